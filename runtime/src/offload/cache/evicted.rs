//! Experts of evicted tokens (MoBiLE, §III-B).
//!
//! A token that the little pass is not sure of is evicted and decoded again with all experts. The routers of
//! the evicted token have named these experts for every layer, so that they can be prefetched from the
//! beginning of the second pass.

/// Experts that the routers of the last little pass named, and whether a second pass runs.
#[derive(Clone, Debug, Default)]
pub(crate) struct EvictedTokens {
    /// By layer: experts that a full pass would use, the best first.
    named: Vec<Vec<u16>>,
    /// Whether `named` belongs to the last call.
    fresh: bool,
    again: bool,
    counts: EvictedExpertCounts,
}

/// Experts of second passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EvictedExpertCounts {
    /// Experts that layers of second passes used.
    pub used: u64,
    /// Those of them that the evicted tokens had named.
    pub named: u64,
}

impl EvictedTokens {
    /// Creates it for layers that each have at most `experts` experts.
    pub(crate) fn new(layers: usize, experts: usize) -> Self {
        Self { named: (0..layers).map(|_| Vec::with_capacity(experts)).collect(), ..Self::default() }
    }

    /// Records that a layer begins; `little`: with fewer experts than the model has.
    pub(crate) fn begin(&mut self, layer: usize, little: bool) {
        if layer == 0 {
            self.again = std::mem::take(&mut self.fresh) && !little;
        }
        if little && let Some(named) = self.named.get_mut(layer) {
            named.clear();
        }
        self.fresh = little && layer + 1 == self.named.len();
    }

    /// Records that another call came between.
    pub(crate) fn forget(&mut self) {
        (self.fresh, self.again) = (false, false);
    }

    /// Adds an expert that a full pass of the little layer would use.
    pub(crate) fn name(&mut self, layer: usize, expert: u16) {
        if let Some(named) = self.named.get_mut(layer).filter(|named| !named.contains(&expert)) {
            named.push(expert);
        }
    }

    /// Experts that a layer of the second pass is expected to use; `None` if no second pass runs.
    pub(crate) fn of(&self, layer: usize) -> Option<&[u16]> {
        self.named.get(layer).filter(|_| self.again).map(Vec::as_slice)
    }

    /// Counts the experts that a layer used, if it belongs to a second pass.
    pub(crate) fn count(&mut self, layer: usize, used: impl Iterator<Item = u16>) {
        let Some(named) = self.named.get(layer).filter(|_| self.again) else { return };
        for expert in used {
            self.counts.used += 1;
            self.counts.named += u64::from(named.contains(&expert));
        }
    }

    /// Experts of second passes so far.
    pub(crate) fn counts(&self) -> EvictedExpertCounts {
        self.counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn second_pass_follows_a_little_pass_directly() {
        let mut evicted = EvictedTokens::new(2, 4);
        for layer in 0..2 {
            evicted.begin(layer, true);
            assert_eq!(evicted.of(layer), None);
            for expert in [3, 1, 3] {
                evicted.name(layer, expert);
            }
        }
        for layer in 0..2 {
            evicted.begin(layer, false);
            assert_eq!(evicted.of(layer), Some(&[3, 1][..]));
            evicted.count(layer, [1, 2].into_iter());
        }
        assert_eq!(evicted.counts(), EvictedExpertCounts { used: 4, named: 2 });
        // The next full pass decodes another token.
        evicted.begin(0, false);
        assert_eq!(evicted.of(0), None);
        evicted.count(0, [1].into_iter());
        assert_eq!(evicted.counts().used, 4);
        // A little pass that was cancelled has named nothing for its last layer.
        evicted.begin(0, true);
        evicted.begin(0, false);
        assert_eq!(evicted.of(1), None);
    }
}
