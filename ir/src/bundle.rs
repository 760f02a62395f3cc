//! Where the parts of a neuron's bundle lie: gate, up and down together, so that one read has all of it (PowerInfer-2, §4.4).

use crate::op::DispatchLayout;
use crate::types::{Format, GROUP};

/// Bytes of a cache line: parts begin on one.
const LINE: usize = 64;

/// Bytes that a direct read of flash takes, or a multiple of them.
const BLOCK: usize = 4096;

/// Neurons of a list of those that are awake.
pub const LISTED: usize = 32;

/// Words of the lists of the neurons that rows wake: for every active expert, in the order of the dispatch table, and every
/// [`LISTED`] of its neurons a list of [`LISTED`]` + 1` words: how many are awake, then who, by number, ascending.
pub const fn awake_words(layout: DispatchLayout, inter: usize) -> usize {
    let slots = layout.rows * layout.k;
    let active = if slots < layout.experts { slots } else { layout.experts };
    active * inter.div_ceil(LISTED) * (LISTED + 1)
}

/// Parts of a bundle, in their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The row of the gate matrix.
    Gate,
    /// The row of the up matrix.
    Up,
    /// The column of the down matrix.
    Down,
}

/// How many there are.
pub const PARTS: usize = 3;

/// A bundle of [`crate::Op::NeuronFfn`]: in front a sketch of the gate, if there is one, then gate, up and down, of `hidden`
/// numbers each.
///
/// A part is a row of a row-major weight, codes before scales, filled up with zeros: to whole groups of [`GROUP`] numbers,
/// and to whole cache lines. Whoever reads the gate alone reads lines of no other part.
///
/// The sketch holds a byte (i8) for every number of the gate, up to a whole group, then two f32: `scale` and `bound`. For
/// every `x` the gate that a kernel computes is at most `scale · Σ code·x + bound · ‖x‖`, rounding included
/// ([`Bundle::slack`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bundle {
    /// Number format of the parts.
    pub format: Format,
    /// Numbers of a part.
    pub hidden: usize,
    /// Whether there is a sketch.
    pub sketch: bool,
}

impl Bundle {
    /// Bytes of a part.
    pub const fn part_bytes(self) -> usize {
        self.format.row_bytes(self.hidden.next_multiple_of(GROUP)).next_multiple_of(LINE)
    }

    /// Bytes of the codes of the sketch; `scale` and `bound` follow.
    pub const fn codes_bytes(self) -> usize {
        self.hidden.next_multiple_of(GROUP)
    }

    /// Bytes of the sketch; 0 where there is none.
    pub const fn sketch_bytes(self) -> usize {
        if self.sketch { (self.codes_bytes() + 8).next_multiple_of(LINE) } else { 0 }
    }

    /// First byte of a part.
    pub const fn part(self, part: Part) -> usize {
        self.sketch_bytes() + part as usize * self.part_bytes()
    }

    /// Bytes of the bundle.
    pub const fn bytes(self) -> usize {
        self.sketch_bytes() + PARTS * self.part_bytes()
    }

    /// Bytes of up and down of a neuron, where the gate lies apart from them: whole cache lines.
    pub const fn rest_bytes(self) -> usize {
        (PARTS - 1) * self.part_bytes()
    }

    /// Bytes from one neuron to the next on flash, where gates lie apart ([`crate::plan::Layout::Rests`]): whole blocks of
    /// 4096 bytes, or such a share of one that a block holds a power of two of neurons.
    pub const fn rest_pitch(self) -> usize {
        let bytes = self.rest_bytes();
        if bytes <= BLOCK { bytes.next_power_of_two() } else { bytes.next_multiple_of(BLOCK) }
    }

    /// Neurons that are read together there: as many as a block holds, one at least.
    pub const fn read_together(self) -> usize {
        let pitch = self.rest_pitch();
        if pitch < BLOCK { BLOCK / pitch } else { 1 }
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
    fn parts_are_whole_lines_and_follow_each_other() {
        for format in Format::ALL {
            for (hidden, sketch) in [(1, false), (31, true), (32, false), (80, true), (2048, true)] {
                let b = Bundle { format, hidden, sketch };
                let [gate, up, down] = [Part::Gate, Part::Up, Part::Down].map(|p| b.part(p));
                assert!([gate, up, down, b.bytes()].iter().all(|at| at % LINE == 0), "{b:?}");
                assert!(gate >= b.sketch_bytes() && up - gate >= format.row_bytes(hidden), "{b:?}");
                assert_eq!((down - up, b.bytes() - down), (up - gate, up - gate));
                assert_eq!(gate > 0, sketch);
            }
        }
    }

    #[test]
    fn what_is_read_together_is_whole_blocks() {
        for format in Format::ALL {
            for hidden in [1, 32, 192, 700, 2048, 4096] {
                let b = Bundle { format, hidden, sketch: false };
                let (pitch, each) = (b.rest_pitch(), b.read_together());
                assert!(pitch >= b.rest_bytes() && pitch % LINE == 0, "{b:?}");
                assert!(each.is_power_of_two() && LISTED.is_multiple_of(each), "{b:?}");
                assert_eq!(pitch * each % BLOCK, 0, "{b:?}");
            }
        }
        let olmoe = Bundle { format: Format::Bf16, hidden: 2048, sketch: false };
        assert_eq!((olmoe.rest_bytes(), olmoe.rest_pitch(), olmoe.read_together()), (8192, 8192, 1));
    }

    #[test]
    fn a_bundle_of_olmoe_has_no_padding() {
        let bytes = |format| Bundle { format, hidden: 2048, sketch: false }.bytes();
        assert_eq!([Format::Bf16, Format::Q8, Format::Q4].map(bytes), [12288, 6528, 3456]);
    }
}
