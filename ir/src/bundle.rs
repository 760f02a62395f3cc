//! Layout of the parts of neurons: up and down of a neuron together, gates of a block one after the other
//! (PowerInfer-2, §4.4).

use crate::op::DispatchLayout;
use crate::types::{Format, GROUP};

/// Bytes of a cache line: parts begin on one.
const LINE: usize = 64;

/// Neurons of a block, and of a list of those that are active.
pub const BLOCK: usize = 32;

/// Bytes that a direct read of the disk takes, or a multiple of them.
const DISK_BLOCK: usize = 4096;

/// Words of the lists of the neurons that rows activate. For every active expert, in the order of the
/// dispatch table, every [`BLOCK`] of its neurons has a list of [`BLOCK`]` + 1` words: the number of active
/// neurons, then their indices, ascending.
pub const fn active_list_words(layout: DispatchLayout, inter: usize) -> usize {
    let slots = layout.rows * layout.k;
    let active = if slots < layout.experts { slots } else { layout.experts };
    active * inter.div_ceil(BLOCK) * (BLOCK + 1)
}

/// Bytes that this many take on disk, so that a direct read gets them: whole blocks, or a power of two below.
const fn read_bytes(bytes: usize) -> usize {
    if bytes <= DISK_BLOCK { bytes.next_power_of_two() } else { bytes.next_multiple_of(DISK_BLOCK) }
}

/// Parts of a bundle, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The bound of the gate.
    GateBound,
    /// The row of the gate matrix.
    Gate,
    /// The row of the up matrix.
    Up,
    /// The column of the down matrix.
    Down,
}

/// Parts that hold numbers of the weight: gate, up and down, in their order in a row of it.
pub const PARTS: usize = 3;

impl Part {
    /// The parts of a row.
    pub const OF_ROW: [Self; PARTS] = [Self::Gate, Self::Up, Self::Down];
}

/// A bundle of [`crate::Op::NeuronFfn`]: a bound of the gate, if there is one, gate, up and down, of `hidden`
/// numbers each.
///
/// Neurons are in blocks of [`BLOCK`], of which the last may have fewer: first their gate bounds, then their
/// gates, then up and down of each. So a reader of all gates reads sequentially, which is faster than
/// scattered rows, and a reader of an active neuron finds up and down together. A block is contiguous, and so
/// is any number of the first blocks.
///
/// A part is a row of a row-major weight, codes before scales, filled up with zeros: to whole groups of
/// [`GROUP`] numbers, and to whole cache lines.
///
/// The gate bound holds a byte (i8) for every number of the gate, up to a whole group, then three f32:
/// `scale`, `bound` and `kept`. For every `x` the gate that a kernel computes is at most `scale · Σ code·x +
/// bound · ‖x‖`, rounding included ([`Bundle::slack`]). `kept` is the norm of `scale · code`: a kernel that
/// multiplies rounded numbers `y` instead adds `kept · ‖x − y‖`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Number format of the parts.
    pub format: Format,
    /// Numbers of a part.
    pub hidden: usize,
    /// Whether there is a gate bound.
    pub gate_bound: bool,
}

/// Place of a part in a block of `n` neurons: that of neuron `i` is at byte `n · each + first + i · pitch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartLayout {
    /// Bytes before the part of the first neuron, for each neuron of the block.
    pub each: usize,
    /// Further bytes before it.
    pub first: usize,
    /// Bytes from neuron to neuron.
    pub pitch: usize,
}

impl Bundle {
    /// Bytes of a part.
    pub const fn part_bytes(self) -> usize {
        self.format.row_bytes(self.hidden.next_multiple_of(GROUP)).next_multiple_of(LINE)
    }

    /// Bytes of the codes of the gate bound; the rest of it follows.
    pub const fn codes_bytes(self) -> usize {
        self.hidden.next_multiple_of(GROUP)
    }

    /// Bytes of the gate bound; 0 without a gate bound.
    pub const fn gate_bound_bytes(self) -> usize {
        if self.gate_bound { (self.codes_bytes() + 12).next_multiple_of(LINE) } else { 0 }
    }

    /// Place of a part in a block.
    pub const fn place(self, part: Part) -> PartLayout {
        let (gate_bound, one) = (self.gate_bound_bytes(), self.part_bytes());
        let (each, first, pitch) = match part {
            Part::GateBound => (0, 0, gate_bound),
            Part::Gate => (gate_bound, 0, one),
            Part::Up => (gate_bound + one, 0, 2 * one),
            Part::Down => (gate_bound + one, one, 2 * one),
        };
        PartLayout { each, first, pitch }
    }

    /// First byte of a part of neuron `i` of a matrix of `inter`.
    pub const fn at(self, part: Part, i: usize, inter: usize) -> usize {
        let start = i / BLOCK * BLOCK;
        let left = inter.saturating_sub(start);
        let there = if left < BLOCK { left } else { BLOCK };
        let PartLayout { each, first, pitch } = self.place(part);
        start * self.bytes() + there * each + first + (i - start) * pitch
    }

    /// Bytes of a neuron.
    pub const fn bytes(self) -> usize {
        self.gate_bound_bytes() + PARTS * self.part_bytes()
    }

    /// Bytes of the codes of a part without its scales: whole cache lines. Of formats without scales, the
    /// part.
    const fn part_codes(self) -> usize {
        let groups = self.hidden.div_ceil(GROUP);
        match self.format.group_bytes() {
            Some(bytes) => (groups * (bytes - 2)).next_multiple_of(LINE),
            None => self.part_bytes(),
        }
    }

    /// Whether scales of up and down are stored separately, to stay in memory, where the gate is stored
    /// separately: reads are smaller without them. Codes of 2048 numbers of 8 bits are half a block of the
    /// disk; with their scales a neuron would take two.
    pub const fn has_split_scales(self) -> bool {
        read_bytes(2 * self.part_codes()) < read_bytes(2 * self.part_bytes())
    }

    /// Bytes of up or down, where the gate is stored separately: whole cache lines; without scales that are
    /// stored separately.
    pub const fn up_down_part_bytes(self) -> usize {
        if self.has_split_scales() { self.part_codes() } else { self.part_bytes() }
    }

    /// Bytes of the scales of up or down that are stored separately: whole cache lines, or none.
    pub const fn up_down_scales_bytes(self) -> usize {
        if self.has_split_scales() { (2 * self.hidden.div_ceil(GROUP)).next_multiple_of(LINE) } else { 0 }
    }

    /// Bytes of up and down of a neuron, where the gate is stored separately: whole cache lines; without
    /// scales that are stored separately.
    pub const fn up_down_bytes(self) -> usize {
        (PARTS - 1) * self.up_down_part_bytes()
    }

    /// Bytes from one neuron to the next on disk, where gates are stored separately
    /// ([`crate::plan::Layout::UpDown`]): whole blocks of 4096 bytes, or a fraction of one with which a block
    /// holds a power of two of neurons.
    pub const fn up_down_pitch(self) -> usize {
        read_bytes(self.up_down_bytes())
    }

    /// Bytes that a neuron takes there, its scales included.
    pub const fn up_down_stored_bytes(self) -> usize {
        self.up_down_pitch() + (PARTS - 1) * self.up_down_scales_bytes()
    }

    /// First byte of the scales of up of neuron `i` of a matrix of `inter` there, if they are stored
    /// separately: after all neurons. Those of down follow.
    pub const fn up_down_scales_at(self, i: usize, inter: usize) -> usize {
        inter * self.up_down_pitch() + i * (PARTS - 1) * self.up_down_scales_bytes()
    }

    /// Addresses of a neuron in a table of up and down: of these, and of their scales, if they are stored
    /// separately.
    pub const fn up_down_addresses(self) -> usize {
        if self.has_split_scales() { 2 } else { 1 }
    }

    /// Neurons that are read together there: as many as a block holds, one at least.
    pub const fn read_together(self) -> usize {
        let pitch = self.up_down_pitch();
        if pitch < DISK_BLOCK { DISK_BLOCK / pitch } else { 1 }
    }

    /// Bytes in memory of the gate of a neuron that is read from disk, too: with the scales of up and down, if
    /// these are stored separately. Whole cache lines.
    pub const fn gate_block_bytes(self) -> usize {
        self.part_bytes() + (PARTS - 1) * self.up_down_scales_bytes()
    }

    /// Largest error of a sum of `hidden` products in f32, in any order, as a share of the product of the
    /// operands' norms, doubled: for the gate and for its gate bound (Higham, Accuracy and Stability of
    /// Numerical Algorithms, §3.1).
    pub fn slack(self) -> f64 {
        let n = (self.hidden + GROUP) as f64 * f64::from(f32::EPSILON);
        2.0 * n / (1.0 - n).max(0.5)
    }
}

/// Neurons on disk, in the layout in which they are read (PowerInfer-2, §4.4): up and down of each, and its gate
/// where that stays on disk, too.
///
/// Neurons that are read together form a unit. With gates, a unit holds first the gates of its neurons, then
/// up and down of each, both at multiples of a block of the disk. So a neuron is one bundle, and is read in two
/// phases: the gate of a neuron that may be active, then up and down of one whose gate is not 0. Where a gate
/// of 4 bits is up to a block, and up and down are, too, both are reads of 4 KiB. If scales of up and down are
/// stored separately, they follow the gate.
///
/// Without gates a unit has only the second part; separate scales follow all units, and stay in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskNeurons {
    /// Format and size of the parts.
    pub bundle: Bundle,
    /// Whether gates are stored with up and down.
    pub gates: bool,
}

/// Part of a unit that one read gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitRead {
    /// First byte in the unit.
    pub first: usize,
    /// Bytes of the read, of all neurons: whole blocks, unless a unit is smaller than a block.
    pub read: usize,
    /// Bytes from neuron to neuron on disk.
    pub pitch: usize,
    /// Bytes of a neuron in memory.
    pub bytes: usize,
}

impl DiskNeurons {
    /// Neurons of a unit: as many as a block of the disk holds of the smaller part, one at least.
    pub const fn together(self) -> usize {
        let (gate, up_down) = (read_bytes(self.bundle.gate_block_bytes()), self.bundle.up_down_pitch());
        if !self.gates {
            return self.bundle.read_together();
        }
        let pitch = if gate < up_down { gate } else { up_down };
        let most = if pitch < DISK_BLOCK { DISK_BLOCK / pitch } else { 1 };
        if most < BLOCK { most } else { BLOCK }
    }

    /// The read of gates; `None` where they are in memory.
    pub const fn gate(self) -> Option<UnitRead> {
        let bytes = self.bundle.gate_block_bytes();
        let pitch = read_bytes(bytes);
        let read = (self.together() * pitch).next_multiple_of(DISK_BLOCK);
        if self.gates { Some(UnitRead { first: 0, read, pitch, bytes }) } else { None }
    }

    /// The read of up and down.
    pub const fn up_down(self) -> UnitRead {
        let (bytes, pitch) = (self.bundle.up_down_bytes(), self.bundle.up_down_pitch());
        let read = self.together() * pitch;
        match self.gate() {
            Some(gate) => {
                UnitRead { first: gate.read, read: read.next_multiple_of(DISK_BLOCK), pitch, bytes }
            }
            None => UnitRead { first: 0, read, pitch, bytes },
        }
    }

    /// Bytes from unit to unit on disk.
    pub const fn unit_pitch(self) -> usize {
        let up_down = self.up_down();
        up_down.first + up_down.read
    }

    /// Bytes of the largest read.
    pub const fn largest_read(self) -> usize {
        let up_down = self.up_down().read;
        match self.gate() {
            Some(gate) if gate.read > up_down => gate.read,
            _ => up_down,
        }
    }

    /// Bytes of a unit in memory.
    pub const fn unit_bytes(self) -> usize {
        let gate = match self.gate() {
            Some(gate) => gate.bytes,
            None => 0,
        };
        self.together() * (gate + self.up_down().bytes)
    }

    /// Bytes of a neuron's scales that stay in memory.
    pub const fn resident_scales(self) -> usize {
        if self.gates { 0 } else { (PARTS - 1) * self.bundle.up_down_scales_bytes() }
    }

    /// Whether up and down are computed with scales that were read with the gate.
    pub const fn has_scales_with_gates(self) -> bool {
        self.gates && self.bundle.has_split_scales()
    }

    /// Addresses of a neuron in a table: of up and down, then of its gate, or of its scales if these are stored
    /// separately.
    pub const fn addresses(self) -> usize {
        if self.gates { 2 } else { self.bundle.up_down_addresses() }
    }

    /// First bytes of what these addresses name, of neuron `i` of a matrix of `inter`.
    pub const fn at(self, i: usize, inter: usize) -> [usize; 2] {
        let (unit, within) = (i / self.together() * self.unit_pitch(), i % self.together());
        let up_down = self.up_down();
        let first = unit + up_down.first + within * up_down.pitch;
        match self.gate() {
            Some(gate) => [first, unit + within * gate.pitch],
            None => [first, self.bundle.up_down_scales_at(i, inter)],
        }
    }

    /// First byte of the scales of up of neuron `i` of a matrix of `inter`, if they are stored separately.
    /// Those of down follow.
    pub const fn scales_at(self, i: usize, inter: usize) -> usize {
        let [_, second] = self.at(i, inter);
        if self.gates { second + self.bundle.part_bytes() } else { second }
    }

    /// Bytes of a matrix of `inter` neurons; `None` on overflow.
    pub fn matrix_bytes(self, inter: u64) -> Option<u64> {
        if self.gates {
            return inter.div_ceil(self.together() as u64).checked_mul(self.unit_pitch() as u64);
        }
        inter.checked_mul(self.bundle.up_down_stored_bytes() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bundle_parts_are_whole_cache_lines_and_fill_the_matrix() {
        for format in Format::ALL {
            for (hidden, gate_bound, inter) in
                [(1, false, 5), (31, true, 32), (80, true, 70), (2048, true, 64)]
            {
                let b = Bundle { format, hidden, gate_bound };
                let mut parts: Vec<_> = (0..inter)
                    .flat_map(|i| {
                        [Part::GateBound, Part::Gate, Part::Up, Part::Down].map(|p| (b.at(p, i, inter), p))
                    })
                    .filter(|&(_, p)| gate_bound || p != Part::GateBound)
                    .collect();
                parts.sort_by_key(|&(at, _)| at);
                let mut end = 0;
                for (at, part) in parts {
                    assert_eq!((at, at % LINE), (end, 0), "{b:?} {part:?}");
                    end += if part == Part::GateBound { b.gate_bound_bytes() } else { b.part_bytes() };
                }
                assert_eq!(end, inter * b.bytes());
                assert!(b.part_bytes() >= format.row_bytes(hidden));
            }
        }
    }

    #[test]
    fn gates_are_contiguous_and_up_and_down_interleaved() {
        let b = Bundle { format: Format::Bf16, hidden: 64, gate_bound: false };
        let at = |part, i| b.at(part, i, 33);
        assert_eq!([at(Part::Gate, 0), at(Part::Gate, 1), at(Part::Up, 0)], [0, 128, 32 * 128]);
        assert_eq!([at(Part::Down, 0), at(Part::Up, 1)], [33 * 128, 34 * 128]);
        // The last block has one neuron.
        assert_eq!([at(Part::Gate, 32), at(Part::Up, 32)], [32 * 384, 32 * 384 + 128]);
    }

    #[test]
    fn bundles_read_together_are_whole_disk_blocks() {
        for format in Format::ALL {
            for hidden in [1, 32, 192, 700, 2048, 4096] {
                let b = Bundle { format, hidden, gate_bound: false };
                let (pitch, each) = (b.up_down_pitch(), b.read_together());
                assert!(pitch >= b.up_down_bytes() && pitch % LINE == 0, "{b:?}");
                assert!(each.is_power_of_two() && BLOCK.is_multiple_of(each), "{b:?}");
                assert_eq!(pitch * each % DISK_BLOCK, 0, "{b:?}");
            }
        }
        let olmoe = |format| Bundle { format, hidden: 2048, gate_bound: false };
        let read = |b: Bundle| (b.up_down_bytes(), b.up_down_pitch(), b.read_together());
        assert_eq!(read(olmoe(Format::Bf16)), (8192, 8192, 1));
        // Codes fill their blocks: scales are stored separately.
        assert_eq!(read(olmoe(Format::Q8)), (4096, 4096, 1));
        assert_eq!(read(olmoe(Format::Q4)), (2048, 2048, 2));
    }

    #[test]
    fn scales_are_split_if_reads_get_smaller() {
        for format in Format::ALL {
            for hidden in [1, 32, 64, 192, 700, 2048, 4096] {
                let b = Bundle { format, hidden, gate_bound: false };
                let (scales, split) = (b.up_down_scales_bytes(), b.has_split_scales());
                assert_eq!((scales > 0, b.up_down_addresses() == 2), (split, split), "{b:?}");
                assert!(!split || b.up_down_pitch() < read_bytes(2 * b.part_bytes()), "{b:?}");
                assert!(
                    scales >= usize::from(split) * 2 * hidden.div_ceil(GROUP) && scales % LINE == 0,
                    "{b:?}"
                );
                assert_eq!(b.up_down_scales_at(7, 7), 7 * b.up_down_stored_bytes(), "{b:?}");
                assert!(b.up_down_part_bytes() + scales >= format.row_bytes(hidden), "{b:?}");
            }
        }
    }

    #[test]
    fn units_on_disk_hold_each_neuron_once_and_are_read_in_whole_blocks() {
        for format in Format::ALL {
            for (hidden, inter, gates) in
                [(16, 70, true), (192, 96, true), (192, 97, false), (2048, 5, true), (4096, 3, false)]
            {
                let n = DiskNeurons { bundle: Bundle { format, hidden, gate_bound: false }, gates };
                let up_down = n.up_down();
                let second = n.gate().map_or(n.resident_scales(), |gate| gate.bytes);
                let parts = |i| n.at(i, inter).into_iter().zip([up_down.bytes, second]).filter(|p| p.1 > 0);
                let mut all: Vec<(usize, usize)> = (0..inter).flat_map(parts).collect();
                all.sort_unstable();
                assert!(all.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0), "{n:?}: {all:?}");
                let last = all.last().map_or(0, |p| p.0 + p.1) as u64;
                assert!(n.matrix_bytes(inter as u64).is_some_and(|bytes| last <= bytes), "{n:?}");
                let (of_one, all_first) = (n.together(), up_down.first.is_multiple_of(DISK_BLOCK));
                assert!((1..=BLOCK).contains(&of_one) && all_first, "{n:?}");
                if let Some(gate) = n.gate() {
                    let whole = |read: UnitRead| {
                        read.read.is_multiple_of(DISK_BLOCK) && read.pitch * of_one <= read.read
                    };
                    assert!(whole(gate) && whole(up_down) && n.unit_pitch().is_multiple_of(of_one), "{n:?}");
                    assert_eq!(n.unit_pitch(), gate.read + up_down.read);
                }
            }
        }
    }

    /// §4.4: a neuron of four bits is 8 KB, which are read as two blocks of 4 KB. The scales of all parts come
    /// with the gate.
    #[test]
    fn a_neuron_of_four_bits_is_two_reads_of_4_kb() {
        let stored = |format| {
            let bundle = Bundle { format, hidden: 4096, gate_bound: false };
            DiskNeurons { bundle, gates: true }
        };
        let n = stored(Format::Q4);
        assert_eq!((n.together(), n.unit_pitch(), n.resident_scales()), (1, 8192, 0));
        let gate = UnitRead { first: 0, read: 4096, pitch: 4096, bytes: 2048 + 3 * 256 };
        assert_eq!(n.gate(), Some(gate));
        assert_eq!(n.up_down(), UnitRead { first: 4096, read: 4096, pitch: 4096, bytes: 4096 });
        // Of 16 bits it is 24 KB.
        assert_eq!((stored(Format::F16).together(), stored(Format::F16).unit_pitch()), (1, 24576));
    }

    #[test]
    fn a_bundle_of_olmoe_has_no_padding() {
        let bytes = |format| Bundle { format, hidden: 2048, gate_bound: false }.bytes();
        assert_eq!([Format::Bf16, Format::Q8, Format::Q4].map(bytes), [12288, 6528, 3456]);
    }
}
