//! A mixer between two norms of its own, next to others in one block: `after(mixer(before(x)))`.

use super::{Mix, Mixer, StateSize};
use crate::lower::{LowerResult, Lowering, Rows};
use crate::spec::{Norm, Rope};
use moec_ir::{Part, WeightClass, WeightExpr};

/// The mixer and its norms.
#[derive(Clone, Debug, PartialEq)]
pub struct Normed {
    /// The norm before the mixer.
    pub before: Norm,
    /// The mixer.
    pub mixer: Mixer,
    /// The norm after the mixer.
    pub after: Norm,
}

impl Mix for Normed {
    /// A network next to a mixture has the role of an expert for every token.
    fn part(&self) -> Part {
        if matches!(self.mixer, Mixer::Dense(_)) { Part::SHARED } else { self.mixer.of().part() }
    }

    fn weights(&self) -> Vec<(WeightClass, &WeightExpr)> {
        let norms = self.before.weights().chain(self.after.weights());
        super::exact(norms).chain(self.mixer.of().weights()).collect()
    }

    fn state_size(&self) -> StateSize {
        self.mixer.of().state_size()
    }

    fn rope(&self) -> Option<&Rope> {
        self.mixer.of().rope()
    }

    fn lower<'a>(&'a self, l: &mut Lowering<'a, '_>, at: &str, rows: Rows) -> LowerResult {
        let name = format!("{at}.{}", self.part());
        let normed = l.norm(&format!("{name}.before"), &self.before, rows.normed)?;
        let y = self.mixer.of().lower(l, at, Rows { normed, ..rows })?;
        l.norm(&format!("{name}.behind"), &self.after, y)
    }
}
