//! Schedules: the division of a matrix kernel's work into pieces, which decides its speed and none of its
//! results.

use super::{ComputeType, KernelSpec, Product};
use crate::machine::Isa;
use std::fmt;

/// The pieces of a matrix kernel.
///
/// Kernels of one matrix and of different schedules give the same bits. Sums of a row are taken in an order
/// that depends on whether its group has one row, two or more; `check` refuses work items so small that they
/// could move a row from one of these to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Schedule {
    /// Rows of a work item of [`Linear`](super::Linear). On tile registers also the rows of an expert that
    /// all its panels multiply before the next rows; elsewhere experts take all of their rows.
    pub rows: usize,
    /// Steps of the inner loop that are written out, of arithmetic in f32 and bf16.
    pub unroll: usize,
    /// Rows whose sums wait in scratch together, of arithmetic in bytes.
    pub block: usize,
    /// Bytes ahead that weights are prefetched; 0: never, hardware alone fetches them.
    pub ahead: usize,
}

/// Fewest rows of a group in registers, where there are enough to cut them evenly: `mr` at most.
pub const fn least(mr: usize) -> usize {
    let two_thirds = mr * 2 / 3;
    if two_thirds < 3 { 3 } else { two_thirds }
}

/// Rows from which on all groups have [`least`] or more.
pub const fn evenly_from(mr: usize) -> usize {
    // Two groups are the hardest: three and more differ by less.
    let (mut from, least) = (2 * least(mr), least(mr));
    let mut rows = from;
    while rows < 8 * mr {
        if rows / rows.div_ceil(mr) < least {
            from = rows + 1;
        }
        rows += 1;
    }
    from
}

impl Default for Schedule {
    /// Weights of ninety-six cache lines ahead: what memory gives in its latency. One thread of an EPYC (Zen 5), with
    /// one row, reads 41 GB/s of q8, 39 of q6, 40 of q4 and 40 of q3, and with forty lines ahead 37, 35, 37 and 35;
    /// plain reads give 44. Where all threads wait for the same memory, the distance matters less. Sums fit into a
    /// first-level cache.
    fn default() -> Self {
        Self { rows: 96, unroll: 4, block: 128, ahead: 6144 }
    }
}

/// A field of [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Knob {
    /// [`Schedule::rows`]
    Rows,
    /// [`Schedule::unroll`]
    Unroll,
    /// [`Schedule::block`]
    Block,
    /// [`Schedule::ahead`]
    Ahead,
}

impl Knob {
    /// Every one, in the order of the fields.
    pub const ALL: [Self; 4] = [Self::Rows, Self::Unroll, Self::Block, Self::Ahead];

    /// Name in symbols and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Unroll => "unroll",
            Self::Block => "block",
            Self::Ahead => "ahead",
        }
    }

    /// Whether the kernel of a specification looks at it.
    pub fn applies_to(self, spec: &KernelSpec, isa: &Isa) -> bool {
        let Some(Product { compute, format, experts, .. }) = spec.product() else { return false };
        let tiles = isa.tiles && compute == ComputeType::Bf16;
        match self {
            Self::Rows => tiles || experts.is_none(),
            Self::Unroll => compute != ComputeType::I8 && !tiles,
            Self::Block => compute == ComputeType::I8,
            // Tiles prefetch the next panel by themselves; unpacking does not.
            Self::Ahead => !tiles || format.is_quantised(),
        }
    }
}

impl Schedule {
    /// The field's value.
    pub fn get(&self, knob: Knob) -> usize {
        match knob {
            Knob::Rows => self.rows,
            Knob::Unroll => self.unroll,
            Knob::Block => self.block,
            Knob::Ahead => self.ahead,
        }
    }

    /// The same but for one field.
    #[must_use]
    pub fn with(self, knob: Knob, value: usize) -> Self {
        match knob {
            Knob::Rows => Self { rows: value, ..self },
            Knob::Unroll => Self { unroll: value, ..self },
            Knob::Block => Self { block: value, ..self },
            Knob::Ahead => Self { ahead: value, ..self },
        }
    }

    /// Conditions of a schedule, and the fault where one does not hold.
    pub(crate) fn check(&self, isa: &Isa) -> [(bool, &'static str); 5] {
        [
            // Rows are cut evenly: an item has at least half as many.
            (
                self.rows / 2 >= evenly_from(isa.mr) && self.rows.is_multiple_of(16) && self.rows <= 1 << 16,
                "a schedule's work items are not whole tiles, or so small that they would sum in another order",
            ),
            (matches!(self.unroll, 4 | 8 | 16), "a schedule's loop would sum in another order"),
            ((1..=1 << 12).contains(&self.block), "a schedule's block of sums is empty or huge"),
            (self.ahead <= 1 << 20, "a schedule fetches more than a megabyte ahead"),
            (self.ahead.is_multiple_of(64), "a schedule fetches parts of cache lines"),
        ]
    }

    /// Whether a machine has kernels of that schedule.
    pub fn fits(&self, isa: &Isa) -> bool {
        self.check(isa).iter().all(|(holds, _)| *holds)
    }

    /// Fields that are not the usual ones.
    pub(crate) fn unusual(&self) -> impl Iterator<Item = (Knob, usize)> {
        let (this, usual) = (*self, Self::default());
        let values = Knob::ALL.into_iter().map(move |k| (k, this.get(k)));
        values.filter(move |&(k, value)| value != usual.get(k))
    }

    /// For readers: the fields that a kernel looks at.
    pub fn describe(&self, spec: &KernelSpec, isa: &Isa) -> String {
        let read = Knob::ALL.into_iter().filter(|k| k.applies_to(spec, isa));
        read.map(|k| format!("{k} {}", self.get(k))).collect::<Vec<_>>().join(", ")
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;

    #[test]
    fn invalid_schedules_are_rejected() {
        let (wide, narrow) = (Machine::x86_64_level(4).isa(), Machine::x86_64_level(3).isa());
        let usual = Schedule::default();
        assert!(usual.fits(&wide) && usual.fits(&narrow));
        for wrong in [
            Schedule { rows: 0, ..usual },
            Schedule { rows: 98, ..usual },
            Schedule { rows: 16, ..usual },
            Schedule { unroll: 2, ..usual },
            Schedule { block: 0, ..usual },
            Schedule { ahead: 100, ..usual },
            Schedule { ahead: 1 << 30, ..usual },
        ] {
            assert!(!wrong.fits(&wide), "{wrong:?}");
        }
        // With fewer rows in registers, groups have equally many rows, but fewer.
        assert!(Schedule { rows: 16, ..usual }.fits(&narrow));
    }

    #[test]
    fn row_groups_are_even_above_a_number_of_rows() {
        for mr in [4, 6, 8, 12] {
            let from = evenly_from(mr);
            let smallest = |rows: usize| rows / rows.div_ceil(mr);
            assert!(smallest(from - 1) < least(mr), "{mr}");
            assert!((from..4096).all(|rows| smallest(rows) >= least(mr)), "{mr}");
        }
    }

    #[test]
    fn name_lists_only_knobs_that_differ_from_the_default() {
        let s = Schedule::default().with(Knob::Rows, 192);
        assert_eq!(s.unusual().collect::<Vec<_>>(), [(Knob::Rows, 192)]);
        assert_eq!(Schedule::default().unusual().count(), 0);
    }
}
