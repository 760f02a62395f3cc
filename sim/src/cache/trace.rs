//! Recorded routing, token by token.

use super::error::TraceError;
use moec_runtime::offload::cache::ExpertIndex;
use std::ops::Range;

/// Experts that every token chose in every layer, and the largest scores of its router, if they were
/// recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct Trace {
    experts: ExpertIndex,
    scored: bool,
    /// Position of every layer in a token's chosen experts, and their total number.
    chosen_at: Vec<usize>,
    ranked_at: Vec<usize>,
    chosen: Vec<u16>,
    ranked: Vec<(u16, f32)>,
    tokens: usize,
}

/// One layer of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step<'a> {
    /// Experts that it uses.
    pub chosen: &'a [u16],
    /// The largest scores, the largest first.
    pub ranked: &'a [(u16, f32)],
}

impl Trace {
    /// Creates an empty trace. With `scored`, every token comes with the [`Trace::ranks`] largest scores of
    /// every layer.
    pub fn new(experts: ExpertIndex, scored: bool) -> Self {
        let places = |width: &dyn Fn(usize) -> usize| {
            let widths = (0..experts.layers().len()).map(width);
            let mut sum = 0;
            std::iter::once(0)
                .chain(widths.map(|w| {
                    sum += w;
                    sum
                }))
                .collect::<Vec<_>>()
        };
        let chosen_at = places(&|l| experts.layers()[l].k);
        let ranked_at = places(&|l| if scored { Self::ranks(&experts, l) } else { 0 });
        Self { chosen_at, ranked_at, experts, scored, chosen: Vec::new(), ranked: Vec::new(), tokens: 0 }
    }

    /// Number of scores that are kept of a layer: twice the experts that a token uses (HybriMoE §IV-D), if
    /// there are as many.
    pub fn ranks(experts: &ExpertIndex, layer: usize) -> usize {
        experts.layers().get(layer).map_or(0, |l| (2 * l.k).min(l.experts))
    }

    /// Cacheable experts.
    pub fn experts(&self) -> &ExpertIndex {
        &self.experts
    }

    /// Whether scores were recorded.
    pub fn scored(&self) -> bool {
        self.scored
    }

    /// Tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Uses of experts.
    pub fn accesses(&self) -> usize {
        self.chosen.len()
    }

    /// Adds a token: the experts of all layers one after the other, and their largest scores likewise.
    ///
    /// # Errors
    /// [`TraceError::Routing`] for another number of experts than the model has, an expert that does not
    /// exist or is listed twice, and scores that are not shares in descending order. Nothing is added then.
    pub fn push(&mut self, chosen: &[u16], ranked: &[(u16, f32)]) -> Result<(), TraceError> {
        let wrong = |what: String| TraceError::Routing { token: self.tokens, what };
        let layers = self.experts.layers().len();
        let (k, ranks) = (self.chosen_at[layers], self.ranked_at[layers]);
        if chosen.len() != k || ranked.len() != ranks {
            let (found, scores) = (chosen.len(), ranked.len());
            return Err(wrong(format!("{found} experts for {k}, {scores} scores for {ranks}")));
        }
        for (l, layer) in self.experts.layers().iter().enumerate() {
            let own = &chosen[self.chosen_at[l]..self.chosen_at[l + 1]];
            let twice = |(i, e): (usize, &u16)| own[..i].contains(e) || usize::from(*e) >= layer.experts;
            if own.iter().enumerate().any(twice) {
                return Err(wrong(format!("experts {own:?} of {} in layer {l}", layer.experts)));
            }
            let own = &ranked[self.ranked_at[l]..self.ranked_at[l + 1]];
            let range = |&(e, s): &(u16, f32)| usize::from(e) < layer.experts && (0.0..=1.0).contains(&s);
            if !own.iter().all(range) || !own.is_sorted_by(|a, b| a.1 >= b.1) {
                return Err(wrong(format!("scores in layer {l} that are not descending shares")));
            }
        }
        self.chosen.extend_from_slice(chosen);
        self.ranked.extend_from_slice(ranked);
        self.tokens += 1;
        Ok(())
    }

    /// One layer of one token; both must exist.
    pub fn step(&self, token: usize, layer: usize) -> Step<'_> {
        let part = |at: &[usize]| -> Range<usize> {
            let start = token * at[at.len() - 1];
            start + at[layer]..start + at[layer + 1]
        };
        Step { chosen: &self.chosen[part(&self.chosen_at)], ranked: &self.ranked[part(&self.ranked_at)] }
    }

    /// All steps in order, with the token and the layer.
    pub fn steps(&self) -> impl Iterator<Item = (usize, usize, Step<'_>)> {
        let layers = self.experts.layers().len();
        (0..self.tokens).flat_map(move |t| (0..layers).map(move |l| (t, l, self.step(t, l))))
    }

    /// Some of the tokens; those past the end are ignored.
    pub fn part(&self, tokens: Range<usize>) -> Self {
        let layers = self.experts.layers().len();
        let (from, to) = (tokens.start.min(self.tokens), tokens.end.min(self.tokens));
        let cut = |at: &[usize]| from * at[layers]..to.max(from) * at[layers];
        Self {
            chosen: self.chosen[cut(&self.chosen_at)].to_vec(),
            ranked: self.ranked[cut(&self.ranked_at)].to_vec(),
            tokens: to.max(from) - from,
            experts: self.experts.clone(),
            scored: self.scored,
            chosen_at: self.chosen_at.clone(),
            ranked_at: self.ranked_at.clone(),
        }
    }
}
