//! Layout of the parts of neurons: up and down of a neuron together, gates of a block one after the other (PowerInfer-2,
//! §4.4).

use crate::op::DispatchLayout;
use crate::types::{Format, GROUP};

/// Bytes of a cache line: parts begin on one.
const LINE: usize = 64;

/// Neurons of a block, and of a list of those that are active.
pub const BLOCK: usize = 32;

/// Bytes that a direct read of flash takes, or a multiple of them.
const FLASH_BLOCK: usize = 4096;

/// Words of the lists of the neurons that rows activate: for every active expert, in the order of the dispatch table, and every
/// [`BLOCK`] of its neurons a list of [`BLOCK`]` + 1` words: how many are active, then who, by number, ascending.
pub const fn awake_words(layout: DispatchLayout, inter: usize) -> usize {
    let slots = layout.rows * layout.k;
    let active = if slots < layout.experts { slots } else { layout.experts };
    active * inter.div_ceil(BLOCK) * (BLOCK + 1)
}

/// Bytes of flash that so many take, so that a direct read gets them: whole blocks, or a power of two below.
const fn read_bytes(bytes: usize) -> usize {
    if bytes <= FLASH_BLOCK { bytes.next_power_of_two() } else { bytes.next_multiple_of(FLASH_BLOCK) }
}

/// Parts of a bundle, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The sketch of the gate.
    Sketch,
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
    /// Those parts.
    pub const OF_ROW: [Self; PARTS] = [Self::Gate, Self::Up, Self::Down];
}

/// A bundle of [`crate::Op::NeuronFfn`]: a sketch of the gate, if there is one, gate, up and down, of `hidden` numbers each.
///
/// Neurons lie in blocks of [`BLOCK`], of which the last may have fewer: first their sketches, then their gates, then up and
/// down of each. So who reads all gates reads on and on, which memory answers faster than rows here and there, and who reads
/// a neuron that is active finds up and down together. A block is one piece, and so are any number of the first blocks.
///
/// A part is a row of a row-major weight, codes before scales, filled up with zeros: to whole groups of [`GROUP`] numbers,
/// and to whole cache lines.
///
/// The sketch holds a byte (i8) for every number of the gate, up to a whole group, then three f32: `scale`, `bound` and `kept`.
/// For every `x` the gate that a kernel computes is at most `scale · Σ code·x + bound · ‖x‖`, rounding included
/// ([`Bundle::slack`]); `kept` is the norm of `scale · code`, so that for who multiplies rounded numbers `y` instead
/// `kept · ‖x − y‖` more is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Number format of the parts.
    pub format: Format,
    /// Numbers of a part.
    pub hidden: usize,
    /// Whether there is a sketch.
    pub sketch: bool,
}

/// Place of a part in a block of `n` neurons: that of neuron `i` is at byte `n · each + first + i · pitch`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
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

    /// Bytes of the codes of the sketch; what else it has follows.
    pub const fn codes_bytes(self) -> usize {
        self.hidden.next_multiple_of(GROUP)
    }

    /// Bytes of the sketch; 0 where there is none.
    pub const fn sketch_bytes(self) -> usize {
        if self.sketch { (self.codes_bytes() + 12).next_multiple_of(LINE) } else { 0 }
    }

    /// Place of a part in a block.
    pub const fn place(self, part: Part) -> Place {
        let (sketch, one) = (self.sketch_bytes(), self.part_bytes());
        let (each, first, pitch) = match part {
            Part::Sketch => (0, 0, sketch),
            Part::Gate => (sketch, 0, one),
            Part::Up => (sketch + one, 0, 2 * one),
            Part::Down => (sketch + one, one, 2 * one),
        };
        Place { each, first, pitch }
    }

    /// First byte of a part of neuron `i` of a matrix of `inter`.
    pub const fn at(self, part: Part, i: usize, inter: usize) -> usize {
        let start = i / BLOCK * BLOCK;
        let left = inter.saturating_sub(start);
        let there = if left < BLOCK { left } else { BLOCK };
        let Place { each, first, pitch } = self.place(part);
        start * self.bytes() + there * each + first + (i - start) * pitch
    }

    /// Bytes of a neuron.
    pub const fn bytes(self) -> usize {
        self.sketch_bytes() + PARTS * self.part_bytes()
    }

    /// Bytes of the codes of a part without its scales: whole cache lines. Of formats without scales, the part.
    const fn part_codes(self) -> usize {
        let groups = self.hidden.div_ceil(GROUP);
        match self.format.group_bytes() {
            Some(bytes) => (groups * (bytes - 2)).next_multiple_of(LINE),
            None => self.part_bytes(),
        }
    }

    /// Whether scales of up and down lie by themselves, to be resident, where the gate lies apart: a read is smaller without
    /// them. Codes of 2048 numbers of 8 bits are half a block of flash; with their scales a neuron would take two.
    pub const fn scales_apart(self) -> bool {
        read_bytes(2 * self.part_codes()) < read_bytes(2 * self.part_bytes())
    }

    /// Bytes of up or down, where the gate lies apart: whole cache lines; without scales, where these lie by themselves.
    pub const fn rest_part_bytes(self) -> usize {
        if self.scales_apart() { self.part_codes() } else { self.part_bytes() }
    }

    /// Bytes of the scales of up or down that lie by themselves: whole cache lines, or none.
    pub const fn rest_scales_bytes(self) -> usize {
        if self.scales_apart() { (2 * self.hidden.div_ceil(GROUP)).next_multiple_of(LINE) } else { 0 }
    }

    /// Bytes of up and down of a neuron, where the gate lies apart from them: whole cache lines; without scales that lie by
    /// themselves.
    pub const fn rest_bytes(self) -> usize {
        (PARTS - 1) * self.rest_part_bytes()
    }

    /// Bytes from one neuron to the next on flash, where gates lie apart ([`crate::plan::Layout::Rests`]): whole blocks of
    /// 4096 bytes, or such a share of one that a block holds a power of two of neurons.
    pub const fn rest_pitch(self) -> usize {
        read_bytes(self.rest_bytes())
    }

    /// Bytes that a neuron takes there, its scales included.
    pub const fn rest_stored_bytes(self) -> usize {
        self.rest_pitch() + (PARTS - 1) * self.rest_scales_bytes()
    }

    /// First byte of the scales of up of neuron `i` of a matrix of `inter` there, if they lie by themselves: after all neurons.
    /// Those of down follow.
    pub const fn rest_scales_at(self, i: usize, inter: usize) -> usize {
        inter * self.rest_pitch() + i * (PARTS - 1) * self.rest_scales_bytes()
    }

    /// Addresses of a neuron in a table of up and down: of these, and of their scales, if they lie by themselves.
    pub const fn rest_addresses(self) -> usize {
        if self.scales_apart() { 2 } else { 1 }
    }

    /// Neurons that are read together there: as many as a block holds, one at least.
    pub const fn read_together(self) -> usize {
        let pitch = self.rest_pitch();
        if pitch < FLASH_BLOCK { FLASH_BLOCK / pitch } else { 1 }
    }

    /// By how much a sum of `hidden` products in f32, in any order, may be off, as a share of the product of the norms of what
    /// is multiplied, twice over: for the gate and for its sketch (Higham, Accuracy and Stability of Numerical Algorithms,
    /// §3.1).
    pub fn slack(self) -> f64 {
        let n = (self.hidden + GROUP) as f64 * f64::from(f32::EPSILON);
        2.0 * n / (1.0 - n).max(0.5)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_whole_lines_and_fill_the_matrix() {
        for format in Format::ALL {
            for (hidden, sketch, inter) in [(1, false, 5), (31, true, 32), (80, true, 70), (2048, true, 64)] {
                let b = Bundle { format, hidden, sketch };
                let mut parts: Vec<_> = (0..inter)
                    .flat_map(|i| {
                        [Part::Sketch, Part::Gate, Part::Up, Part::Down].map(|p| (b.at(p, i, inter), p))
                    })
                    .filter(|&(_, p)| sketch || p != Part::Sketch)
                    .collect();
                parts.sort_by_key(|&(at, _)| at);
                let mut end = 0;
                for (at, part) in parts {
                    assert_eq!((at, at % LINE), (end, 0), "{b:?} {part:?}");
                    end += if part == Part::Sketch { b.sketch_bytes() } else { b.part_bytes() };
                }
                assert_eq!(end, inter * b.bytes());
                assert!(b.part_bytes() >= format.row_bytes(hidden));
            }
        }
    }

    #[test]
    fn gates_follow_each_other_and_up_and_down_lie_together() {
        let b = Bundle { format: Format::Bf16, hidden: 64, sketch: false };
        let at = |part, i| b.at(part, i, 33);
        assert_eq!([at(Part::Gate, 0), at(Part::Gate, 1), at(Part::Up, 0)], [0, 128, 32 * 128]);
        assert_eq!([at(Part::Down, 0), at(Part::Up, 1)], [33 * 128, 34 * 128]);
        // The last block has one neuron.
        assert_eq!([at(Part::Gate, 32), at(Part::Up, 32)], [32 * 384, 32 * 384 + 128]);
    }

    #[test]
    fn what_is_read_together_is_whole_blocks() {
        for format in Format::ALL {
            for hidden in [1, 32, 192, 700, 2048, 4096] {
                let b = Bundle { format, hidden, sketch: false };
                let (pitch, each) = (b.rest_pitch(), b.read_together());
                assert!(pitch >= b.rest_bytes() && pitch % LINE == 0, "{b:?}");
                assert!(each.is_power_of_two() && BLOCK.is_multiple_of(each), "{b:?}");
                assert_eq!(pitch * each % FLASH_BLOCK, 0, "{b:?}");
            }
        }
        let olmoe = |format| Bundle { format, hidden: 2048, sketch: false };
        let read = |b: Bundle| (b.rest_bytes(), b.rest_pitch(), b.read_together());
        assert_eq!(read(olmoe(Format::Bf16)), (8192, 8192, 1));
        // Codes fill their blocks: scales lie by themselves.
        assert_eq!(read(olmoe(Format::Q8)), (4096, 4096, 1));
        assert_eq!(read(olmoe(Format::Q4)), (2048, 2048, 2));
    }

    #[test]
    fn scales_lie_apart_where_a_read_is_smaller_for_it() {
        for format in Format::ALL {
            for hidden in [1, 32, 64, 192, 700, 2048, 4096] {
                let b = Bundle { format, hidden, sketch: false };
                let (scales, apart) = (b.rest_scales_bytes(), b.scales_apart());
                assert_eq!((scales > 0, b.rest_addresses() == 2), (apart, apart), "{b:?}");
                assert!(!apart || b.rest_pitch() < read_bytes(2 * b.part_bytes()), "{b:?}");
                assert!(
                    scales >= usize::from(apart) * 2 * hidden.div_ceil(GROUP) && scales % LINE == 0,
                    "{b:?}"
                );
                assert_eq!(b.rest_scales_at(7, 7), 7 * b.rest_stored_bytes(), "{b:?}");
                assert!(b.rest_part_bytes() + scales >= format.row_bytes(hidden), "{b:?}");
            }
        }
    }

    #[test]
    fn a_bundle_of_olmoe_has_no_padding() {
        let bytes = |format| Bundle { format, hidden: 2048, sketch: false }.bytes();
        assert_eq!([Format::Bf16, Format::Q8, Format::Q4].map(bytes), [12288, 6528, 3456]);
    }
}
