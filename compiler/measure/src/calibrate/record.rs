//! Records the routing of single tokens. Routers are observed layer by layer, but records are stored token by
//! token.

use moec_ir::op::Score;
use moec_profile::routes::{Sequence, stored_score};
use moec_profile::{Routes, Routing};
use moec_runtime::offload::cache::Ranking;

/// Recorder of the choices of routers.
#[derive(Default)]
pub(super) struct Recorder {
    layers: Vec<RecordedLayer>,
    routes: Routes,
    /// Whether the current sequence is recorded.
    recording: bool,
    tokens: usize,
}

/// Choices of a router in the current chunk.
struct RecordedLayer {
    k: usize,
    score: Score,
    ranking: Ranking,
    ranks: usize,
    logits: Vec<f32>,
    chosen: Vec<u16>,
    ranked: Vec<u16>,
    scores: Vec<u8>,
}

impl Recorder {
    /// Adds a layer; layers are added in order.
    pub(super) fn layer(&mut self, layer: &Routing, score: Score) {
        let ranks = moec_profile::routes::ranks(layer);
        self.layers.push(RecordedLayer {
            k: layer.k as usize,
            score,
            ranking: Ranking::new(layer.chosen.len(), ranks),
            ranks,
            logits: Vec::new(),
            chosen: Vec::new(),
            ranked: Vec::new(),
            scores: Vec::new(),
        });
    }

    /// Begins a sequence; `keep` says whether it is recorded.
    pub(super) fn begin(&mut self, keep: bool) {
        self.recording = keep;
        if keep {
            self.routes.sequences.push(Sequence::default());
        }
    }

    /// Adds a token's experts in a layer, and the logits of all experts.
    pub(super) fn token(
        &mut self,
        layer: usize,
        chosen: impl Iterator<Item = usize>,
        logits: impl Iterator<Item = f32>,
    ) {
        let Some(layer) = self.layers.get_mut(layer).filter(|_| self.recording) else { return };
        layer.chosen.extend(chosen.map(|e| e as u16));
        layer.logits.clear();
        layer.logits.extend(logits);
        for &(expert, score) in layer.ranking.of_logits(&layer.logits, layer.score) {
            layer.ranked.push(expert);
            layer.scores.push(stored_score(score));
        }
    }

    /// Ends a chunk of `tokens` tokens.
    pub(super) fn end_chunk(&mut self, tokens: usize, most: usize) {
        let Some(sequence) = self.routes.sequences.last_mut().filter(|_| self.recording) else { return };
        let tokens = tokens.min(most.saturating_sub(self.tokens));
        self.tokens += tokens;
        for t in 0..tokens {
            for l in &self.layers {
                sequence.chosen.extend_from_slice(l.chosen.get(t * l.k..(t + 1) * l.k).unwrap_or_default());
                let own = t * l.ranks..(t + 1) * l.ranks;
                sequence.ranked.extend_from_slice(l.ranked.get(own.clone()).unwrap_or_default());
                sequence.scores.extend_from_slice(l.scores.get(own).unwrap_or_default());
            }
        }
        for l in &mut self.layers {
            l.chosen.clear();
            l.ranked.clear();
            l.scores.clear();
        }
    }

    /// Takes the recorded routes out.
    pub(super) fn take(&mut self) -> Routes {
        self.tokens = 0;
        let mut routes = std::mem::take(&mut self.routes);
        routes.sequences.retain(|s| !s.chosen.is_empty());
        routes
    }
}
