//! The seam between what the cache holds and who decides on it.

/// Number of an expert, counted through the layers that a policy looks after.
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
/// Of every step (one layer of one token) a policy hears, in this order: [`Policy::on_scores`]; [`Policy::on_hit`]
/// for each expert that is resident; then for each that is not [`Policy::on_miss`], [`Policy::victim`] as often
/// as room is needed, with [`Policy::on_evict`] for each victim, and [`Policy::on_insert`] unless it bypassed.
/// No method allocates.
pub trait Policy: Send {
    /// Number of a layer's largest scores that [`Policy::on_scores`] reads, per expert that a token uses; 0: none.
    fn depth(&self) -> usize {
        0
    }

    /// A layer's router has spoken: `ranked` holds the largest scores of its experts, the largest first, as
    /// shares of 1 of all of them. Called for every layer of every token, also where there are no scores.
    fn on_scores(&mut self, layer: usize, ranked: &[(u16, f32)]) {
        let _ = (layer, ranked);
    }

    /// Before the first step: recorded routing of `tokens` tokens used an expert with this `probability` each.
    fn expect(&mut self, id: Id, probability: f64, tokens: f64) {
        let _ = (id, probability, tokens);
    }

    /// A resident expert is used.
    fn on_hit(&mut self, id: Id);

    /// An expert is used that is not resident.
    fn on_miss(&mut self, id: Id) {
        let _ = id;
    }

    /// The resident expert that goes to make room for `incoming`, none that is pinned. `None`: it bypasses the
    /// cache, it is read for this one use. Once a first victim has gone the policy is called with `force`, and
    /// `None` then says only that nothing can go.
    fn victim(&mut self, incoming: Id, force: bool, pins: Pins<'_>) -> Option<Id>;

    /// An expert becomes resident.
    fn on_insert(&mut self, id: Id);

    /// An expert goes.
    fn on_evict(&mut self, id: Id);

    /// Forgets everything; nothing is resident.
    fn reset(&mut self);
}
