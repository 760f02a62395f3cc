//! How a matrix kernel cuts its work into pieces: what decides its speed and none of its results.

use crate::machine::Isa;
use crate::spec::{Compute, KernelSpec};
use std::fmt;

/// The pieces of a matrix kernel.
///
/// Kernels of one matrix and of different schedules give the same bits. Sums of a row are taken in an order
/// that depends on whether its group has one row, two or more; [`Schedule::check`] refuses what would move a
/// row from one of these to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Schedule {
    /// Rows of a work item, of [`KernelSpec::Linear`] only: experts take all of theirs.
    pub rows: usize,
    /// Most rows that are held in registers, of arithmetic in f32 and bf16; `None`: [`Isa::mr`].
    pub mr: Option<usize>,
    /// Steps of the inner loop that are written out, of arithmetic in f32 and bf16.
    pub unroll: usize,
    /// Rows whose sums wait in scratch together, of arithmetic in bytes.
    pub block: usize,
    /// Bytes ahead that weights are asked for; 0: never, hardware alone fetches them.
    pub ahead: usize,
}

impl Default for Schedule {
    /// A page ahead, because hardware does not look beyond one; sums that fit into a first-level cache.
    fn default() -> Self {
        Self { rows: 96, mr: None, unroll: 4, block: 128, ahead: 4096 }
    }
}

/// A field of [`Schedule`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Knob {
    /// [`Schedule::rows`]
    Rows,
    /// [`Schedule::mr`]
    Mr,
    /// [`Schedule::unroll`]
    Unroll,
    /// [`Schedule::block`]
    Block,
    /// [`Schedule::ahead`]
    Ahead,
}

impl Knob {
    /// Every one, in the order of the fields.
    pub const ALL: [Self; 5] = [Self::Rows, Self::Mr, Self::Unroll, Self::Block, Self::Ahead];

    /// Name in symbols and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rows => "rows",
            Self::Mr => "mr",
            Self::Unroll => "unroll",
            Self::Block => "block",
            Self::Ahead => "ahead",
        }
    }

    /// Whether the kernel of a specification looks at it.
    pub fn turns(self, spec: &KernelSpec, isa: &Isa) -> bool {
        let Some((compute, format)) = spec.compute().zip(spec.weight_format()) else { return false };
        let tiles = isa.tiles && compute == Compute::Bf16;
        match self {
            Self::Rows => matches!(spec, KernelSpec::Linear { .. }),
            Self::Mr | Self::Unroll => compute != Compute::I8 && !tiles,
            Self::Block => compute == Compute::I8,
            // Tiles ask for the next panel by themselves; unpacking does not.
            Self::Ahead => !tiles || format.is_grouped(),
        }
    }
}

impl Schedule {
    /// Rows held in registers on a machine.
    pub fn mr(&self, isa: &Isa) -> usize {
        self.mr.unwrap_or(isa.mr)
    }

    /// The field's value on a machine.
    pub fn get(&self, knob: Knob, isa: &Isa) -> usize {
        match knob {
            Knob::Rows => self.rows,
            Knob::Mr => self.mr(isa),
            Knob::Unroll => self.unroll,
            Knob::Block => self.block,
            Knob::Ahead => self.ahead,
        }
    }

    /// The same but for one field.
    #[must_use]
    pub fn with(self, knob: Knob, value: usize, isa: &Isa) -> Self {
        match knob {
            Knob::Rows => Self { rows: value, ..self },
            Knob::Mr => Self { mr: (value != isa.mr).then_some(value), ..self },
            Knob::Unroll => Self { unroll: value, ..self },
            Knob::Block => Self { block: value, ..self },
            Knob::Ahead => Self { ahead: value, ..self },
        }
    }

    /// What a schedule must keep, and what is wrong where it does not.
    pub(crate) fn check(&self, isa: &Isa) -> [(bool, &'static str); 6] {
        let mr = self.mr(isa);
        // Where groups are fours, any number of fours leaves the same rows over.
        let whole = if isa.mr.is_multiple_of(4) { 4 } else { isa.mr };
        [
            (
                self.rows > 0 && self.rows.is_multiple_of(whole) && self.rows <= 1 << 16,
                "a schedule's work items are no whole register tiles",
            ),
            (
                mr == isa.mr || (mr > 0 && mr < isa.mr && whole == 4 && mr.is_multiple_of(4)),
                "a schedule's register tile does not fit, or would sum in another order",
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
    pub(crate) fn unusual(&self, isa: &Isa) -> impl Iterator<Item = (Knob, usize)> {
        let (this, usual, isa) = (*self, Self::default(), *isa);
        let values = Knob::ALL.into_iter().map(move |k| (k, this.get(k, &isa)));
        values.filter(move |&(k, value)| value != usual.get(k, &isa))
    }

    /// For readers: the fields that a kernel looks at.
    pub fn describe(&self, spec: &KernelSpec, isa: &Isa) -> String {
        let turned = Knob::ALL.into_iter().filter(|k| k.turns(spec, isa));
        turned.map(|k| format!("{k} {}", self.get(k, isa))).collect::<Vec<_>>().join(", ")
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
    fn nonsense_is_refused() {
        let (wide, narrow) = (Machine::x86_64_level(4).isa(), Machine::x86_64_level(3).isa());
        let usual = Schedule::default();
        assert!(usual.fits(&wide) && usual.fits(&narrow));
        assert!(Schedule { mr: Some(8), rows: 100, ..usual }.fits(&wide));
        for wrong in [
            Schedule { rows: 0, ..usual },
            Schedule { rows: 98, ..usual },
            Schedule { mr: Some(16), ..usual },
            Schedule { mr: Some(6), ..usual },
            Schedule { mr: Some(0), ..usual },
            Schedule { unroll: 2, ..usual },
            Schedule { block: 0, ..usual },
            Schedule { ahead: 100, ..usual },
            Schedule { ahead: 1 << 30, ..usual },
        ] {
            assert!(!wrong.fits(&wide), "{wrong:?}");
        }
        // Six rows in registers leave other rows over than four do.
        assert!(!Schedule { mr: Some(4), ..usual }.fits(&narrow));
        assert!(!Schedule { rows: 100, ..usual }.fits(&narrow));
    }

    #[test]
    fn a_name_says_what_is_unusual() {
        let isa = Machine::x86_64_level(4).isa();
        let s = Schedule::default().with(Knob::Rows, 192, &isa).with(Knob::Mr, isa.mr, &isa);
        assert_eq!(s.unusual(&isa).collect::<Vec<_>>(), [(Knob::Rows, 192)]);
        assert_eq!(Schedule::default().unusual(&isa).count(), 0);
    }
}
