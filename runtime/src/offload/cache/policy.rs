//! Interface between the cache, which holds experts, and the policies, which choose them.

/// Number of an expert, consecutive over the layers that a policy manages.
pub type Id = u32;

/// Experts that must stay: those of the step that runs.
#[derive(Clone, Copy, Debug)]
pub struct Pins<'a> {
    pub(super) stamps: &'a [u32],
    pub(super) now: u32,
}

impl Pins<'_> {
    /// Whether an expert must stay.
    pub fn holds(&self, id: Id) -> bool {
        self.stamps.get(id as usize).is_some_and(|&s| s == self.now)
    }
}

/// Decides which experts stay.
///
/// In every step (one layer of one token) these methods are called, in this order: [`Policy::on_scores`];
/// then [`Policy::on_hit`] for each resident expert; then for each other expert [`Policy::on_miss`]. A miss
/// calls [`Policy::victim`] as often as room is needed, with [`Policy::on_evict`] for each victim, and
/// [`Policy::on_insert`] unless the expert bypasses the cache. No method allocates.
pub trait Policy: Send {
    /// Number of a layer's largest scores that [`Policy::on_scores`] reads, per expert that a token uses; 0:
    /// none.
    fn depth(&self) -> usize {
        0
    }

    /// Scores of a layer's router: `ranked` holds the largest scores of its experts, in descending order, as
    /// shares of the sum of all. Called for every layer of every token, also if there are no scores.
    fn on_scores(&mut self, layer: usize, ranked: &[(u16, f32)]) {
        let _ = (layer, ranked);
    }

    /// Called before the first step: in a recorded routing of `tokens` tokens, each token used the expert
    /// with this `probability`.
    fn expect(&mut self, id: Id, probability: f64, tokens: f64) {
        let _ = (id, probability, tokens);
    }

    /// A resident expert is used.
    fn on_hit(&mut self, id: Id);

    /// A non-resident expert is used.
    fn on_miss(&mut self, id: Id) {
        let _ = id;
    }

    /// The resident expert to evict for `incoming`; never a pinned one. `None`: `incoming` bypasses the cache
    /// and is read for this one use. After a first victim the policy is called with `force`; `None` then
    /// means only that nothing can be evicted.
    fn victim(&mut self, incoming: Id, force: bool, pins: Pins<'_>) -> Option<Id>;

    /// An expert becomes resident.
    fn on_insert(&mut self, id: Id);

    /// An expert is evicted.
    fn on_evict(&mut self, id: Id);

    /// Forgets everything; nothing is resident.
    fn reset(&mut self);
}
