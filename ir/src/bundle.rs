//! Where the parts of a neuron's bundle lie: gate, up and down together, so that one read has all of it (PowerInfer-2, §4.4).

use crate::types::{Format, GROUP};

/// Bytes of a cache line: parts begin on one.
const LINE: usize = 64;

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
    fn a_bundle_of_olmoe_has_no_padding() {
        let bytes = |format| Bundle { format, hidden: 2048, sketch: false }.bytes();
        assert_eq!([Format::Bf16, Format::Q8, Format::Q4].map(bytes), [12288, 6528, 3456]);
    }
}
