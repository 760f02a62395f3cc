//! Experts that the tokens chose, one token after the other, for replays of a cache.
//!
//! Only a sample of a run's sequences is kept, at most [`TOKENS`] tokens. Per token and layer it has the
//! chosen experts, and twice as many experts with the largest router scores. The square roots of scores are
//! kept in eight bits: a score of 0.02 is accurate to 0.001. It may be empty; the other parts of a profile do
//! not require it.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::{MOST, ProfileFault, Routing};
use bincode::{Decode, Encode};
use moec_runtime::offload::cache::{CachedLayer, ExpertIndex};
use moec_sim::cache::Trace;

/// Limit of the tokens that are kept.
pub const TOKENS: usize = 1 << 13;
/// Limit of the numbers that are kept.
const NUMBERS: usize = 1 << 24;

/// The sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Routes {
    /// Sequences that were each read as one text.
    pub sequences: Vec<Sequence>,
}

/// Routing of a sequence of tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub struct Sequence {
    /// `[tokens, Σ k]`: experts that each token chose, layer after layer.
    pub chosen: Vec<u16>,
    /// `[tokens, Σ min(2 k, experts)]`: experts with the largest scores, in descending order, layer after
    /// layer.
    pub ranked: Vec<u16>,
    /// Their scores, in the form of [`stored_score`].
    pub scores: Vec<u8>,
}

/// A score, a share of 1, in its stored form.
pub fn stored_score(score: f32) -> u8 {
    (score.clamp(0.0, 1.0).sqrt() * 255.0).round() as u8
}

/// The score of a stored form.
pub fn score(stored: u8) -> f32 {
    (f32::from(stored) / 255.0).powi(2)
}

impl Sequence {
    fn numbers(&self) -> usize {
        self.chosen.len() + self.ranked.len() + self.scores.len()
    }

    /// FNV-1a over the choices: an order of sequences independent of their contents.
    fn hash(&self) -> u64 {
        let mix = |h: u64, e: &u16| (h ^ u64::from(*e)).wrapping_mul(0x0100_0000_01b3);
        self.chosen.iter().fold(0xcbf2_9ce4_8422_2325, mix)
    }
}

impl Routes {
    /// True if nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.sequences.iter().all(|s| s.chosen.is_empty())
    }

    /// Merges two; past the limit, whole sequences are left out at random. Commutative.
    pub(super) fn merge(&self, other: &Self, layers: &[Routing]) -> Self {
        let k: usize = layers.iter().map(|l| l.k as usize).sum();
        let mut all: Vec<_> = self.sequences.iter().chain(&other.sequences).collect();
        all.sort_by(|a, b| a.hash().cmp(&b.hash()).then_with(|| a.cmp(b)));
        let (mut tokens, mut numbers) = (0, 0);
        let fits = |s: &&&Sequence| {
            tokens += s.chosen.len() / k.max(1);
            numbers += s.numbers();
            tokens <= TOKENS && numbers <= NUMBERS
        };
        Self { sequences: all.iter().take_while(fits).map(|&s| s.clone()).collect() }
    }

    /// Adds sequences that were read later, up to the limit of tokens.
    pub fn append(&mut self, later: Self, layers: &[Routing]) {
        let k: usize = layers.iter().map(|l| l.k as usize).sum();
        let width: usize = layers.iter().map(ranks).sum();
        let tokens = |s: &Sequence| s.chosen.len() / k.max(1);
        let mut room = Self::most(layers).saturating_sub(self.sequences.iter().map(tokens).sum());
        for mut sequence in later.sequences {
            let kept = tokens(&sequence).min(room);
            room -= kept;
            sequence.chosen.truncate(kept * k);
            sequence.ranked.truncate(kept * width);
            sequence.scores.truncate(kept * width);
            if kept > 0 {
                self.sequences.push(sequence);
            }
        }
    }

    /// Limit of the tokens that are kept of `layers`.
    pub fn most(layers: &[Routing]) -> usize {
        let numbers: usize = layers.iter().map(|l| l.k as usize + 2 * ranks(l)).sum();
        TOKENS.min(NUMBERS / numbers.max(1))
    }

    /// Converts the routes to a trace for replays. Every expert has one byte, since capacities count experts.
    ///
    /// # Errors
    /// Fails if the routes do not fit the layers.
    pub fn trace(&self, layers: &[Routing]) -> Result<Trace, ProfileFault> {
        let shape = |l: &Routing| CachedLayer { experts: l.chosen.len(), k: l.k as usize, bytes: 1 };
        let shapes: Vec<_> = layers.iter().map(shape).collect();
        let experts = ExpertIndex::new(&shapes).map_err(|e| e.to_string())?;
        let k: usize = shapes.iter().map(|l| l.k).sum();
        let width: usize = layers.iter().map(ranks).sum();
        let mut trace = Trace::new(experts, true);
        let mut ranked = Vec::with_capacity(width);
        for s in &self.sequences {
            let tokens = s.chosen.len() / k;
            let parts = [(s.chosen.len(), k), (s.ranked.len(), width), (s.scores.len(), width)];
            if parts.iter().any(|&(len, width)| Some(len) != tokens.checked_mul(width)) {
                return Err(format!("{} choices and {} scores", s.chosen.len(), s.scores.len()));
            }
            let rows = s.ranked.chunks_exact(width).zip(s.scores.chunks_exact(width));
            for (chosen, (experts, scores)) in s.chosen.chunks_exact(k).zip(rows) {
                ranked.clear();
                ranked.extend(experts.iter().zip(scores).map(|(&e, &s)| (e, score(s))));
                trace.push(chosen, &ranked).map_err(|e| e.to_string())?;
            }
        }
        Ok(trace)
    }

    pub(super) fn check(&self, layers: &[Routing]) -> Result<(), ProfileFault> {
        if self.sequences.is_empty() {
            return Ok(());
        }
        let wrong = |what: &str| Err(format!("its recorded routing has {what}"));
        let numbers: usize = self.sequences.iter().map(Sequence::numbers).sum();
        if self.sequences.len() > MOST || numbers > NUMBERS {
            return wrong(&format!("{} sequences of {numbers} numbers", self.sequences.len()));
        }
        let trace = self.trace(layers).map_err(|e| format!("its recorded routing is none: {e}"))?;
        if trace.tokens() > TOKENS {
            return wrong(&format!("{} tokens", trace.tokens()));
        }
        let mut chosen: Vec<_> = layers.iter().map(|l| vec![0_u64; l.chosen.len()]).collect();
        for (_, layer, step) in trace.steps() {
            for &e in step.chosen {
                chosen[layer][usize::from(e)] += 1;
            }
        }
        let more = |(l, own): (&Routing, &Vec<u64>)| own.iter().zip(&l.chosen).any(|(a, b)| a > b);
        if layers.iter().zip(&chosen).any(more) {
            return wrong("more choices than its layers");
        }
        Ok(())
    }
}

/// Number of scores that are kept of a layer.
pub fn ranks(layer: &Routing) -> usize {
    (2 * layer.k as usize).min(layer.chosen.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers: one with two experts, one used, two scores; one with three experts, two used, three
    /// scores.
    fn layers() -> Vec<Routing> {
        let mut layers = vec![Routing::new(0, 1, 2), Routing::new(1, 2, 3)];
        for l in &mut layers {
            l.tokens = 9;
            l.chosen = vec![9; l.chosen.len()];
        }
        layers
    }

    fn sequence(tokens: usize, first: u16) -> Sequence {
        Sequence {
            chosen: [first, 0, 2].repeat(tokens),
            ranked: [first, 1 - first, 2, 0, 1].repeat(tokens),
            scores: [200, 100, 180, 150, 10].repeat(tokens),
        }
    }

    #[test]
    fn routing_scores_are_stored_with_small_error() {
        for s in [0.0_f32, 0.001, 0.02, 0.3, 1.0] {
            assert!((score(stored_score(s)) - s).abs() <= 0.004 * s.sqrt() + 1e-5, "{s}");
        }
        assert!((0..=255).all(|q| stored_score(score(q)) == q));
    }

    #[test]
    fn a_sequence_becomes_a_trace() {
        let routes = Routes { sequences: vec![sequence(2, 0), sequence(1, 1)] };
        routes.check(&layers()).unwrap();
        let trace = routes.trace(&layers()).unwrap();
        assert_eq!((trace.tokens(), trace.accesses()), (3, 9));
        assert_eq!(trace.step(2, 0).chosen, [1]);
        assert_eq!(trace.step(0, 1).ranked.iter().map(|r| r.0).collect::<Vec<_>>(), [2, 0, 1]);
        assert!((trace.step(0, 0).ranked[0].1 - 0.615).abs() < 1e-3);
        assert!(Routes::default().is_empty() && !routes.is_empty());
    }

    #[test]
    fn merging_commutes_and_stays_bounded() {
        let layers = layers();
        let half = |first| Routes { sequences: (0..8).map(|_| sequence(TOKENS / 10, first)).collect() };
        let (a, b) = (half(0), half(1));
        let merged = a.merge(&b, &layers);
        assert_eq!(merged, b.merge(&a, &layers));
        assert_eq!(merged.sequences.len(), 10);
        assert_eq!(Routes::default().merge(&a, &layers), a);
    }

    #[test]
    fn appended_routes_end_at_the_limit() {
        let layers = layers();
        let (mut routes, third) = (Routes::default(), TOKENS / 3);
        for first in [0, 1, 0, 1] {
            routes.append(Routes { sequences: vec![sequence(third, first)] }, &layers);
        }
        let rest = TOKENS - 3 * third;
        let want =
            [(third, 0), (third, 1), (third, 0), (rest, 1)].map(|(tokens, first)| sequence(tokens, first));
        assert_eq!(routes.sequences, want);
        assert_eq!(Routes::most(&layers), TOKENS);
    }

    #[test]
    fn inconsistent_routes_are_rejected() {
        type Change = fn(&mut Sequence);
        let cases: [(&str, Change); 7] = [
            ("is none", |s| s.chosen[0] = 2),
            ("is none", |s| s.chosen[1] = 2),
            ("is none", |s| s.scores[1] = 201),
            ("is none", |s| s.ranked[4] = 3),
            ("is none", |s| s.chosen.truncate(5)),
            ("is none", |s| s.scores.truncate(9)),
            ("more choices than its layers", |s| *s = sequence(10, 0)),
        ];
        for (words, change) in cases {
            let mut routes = Routes { sequences: vec![sequence(2, 0)] };
            routes.check(&layers()).unwrap();
            change(&mut routes.sequences[0]);
            let e = routes.check(&layers()).unwrap_err();
            assert!(e.contains(words), "`{words}` is not in `{e}`");
        }
        let long = Routes { sequences: vec![sequence(TOKENS + 1, 0)] };
        assert!(long.check(&layers()).unwrap_err().contains("tokens"));
        assert!(Routes { sequences: vec![sequence(1, 0)] }.check(&[]).is_err());
    }
}
