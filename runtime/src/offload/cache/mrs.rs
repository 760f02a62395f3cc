//! MRS, minus recent score (HybriMoE §IV-D, eq. 3): evicts the expert whose recent router scores are lowest.
//!
//! ```text
//! S = α · TopP(s) + (1 − α) · S
//! ```
//!
//! `s` are the scores of a layer's experts in this step, of which only the `p` largest count. In the paper
//! `p` is twice the number of experts per token. `S` is kept for all experts, resident or not. Experts of
//! different layers are compared by `S` directly, so scores are shares of 1. The paper keeps every miss; with
//! `bypass`, one whose `S` is below that of every expert it could replace is not kept.
//!
//! All experts of a layer decay by the same factor, which keeps their order: a layer's factor is stored once,
//! and a step touches `p` experts only.

use super::experts::ExpertIndex;
use super::heap::{Heap, Rank, compare};
use super::policy::{Id, Pins, Policy};

/// Factors below this are multiplied into the scores.
const RESCALE_BELOW: f64 = 1e-100;

/// Minus recent score.
#[derive(Clone, Debug)]
pub(super) struct Mrs {
    layers: Vec<LayerScores>,
    /// Layer of every expert.
    layer_of: Vec<u16>,
    /// Uses of residents so far.
    clock: u64,
    alpha: f64,
    depth: usize,
    bypass: bool,
}

#[derive(Clone, Debug)]
struct LayerScores {
    first: Id,
    /// Experts of a token.
    k: usize,
    /// Scores that count.
    p: usize,
    /// S of an expert is `score · factor`.
    factor: f64,
    score: Vec<f64>,
    resident: Heap,
}

impl Mrs {
    /// Creates the policy for these experts. `depth` is `p` in units of the experts per token.
    pub(super) fn new(experts: &ExpertIndex, alpha: f64, depth: usize, bypass: bool) -> Self {
        let layer = |(i, l): (usize, &super::experts::CachedLayer)| LayerScores {
            first: experts.ids(i).start,
            k: l.k,
            p: (depth * l.k).min(l.experts),
            factor: 1.0,
            score: vec![0.0; l.experts],
            resident: Heap::new(l.experts),
        };
        let layers: Vec<_> = experts.layers().iter().enumerate().map(layer).collect();
        let layer_of = (0..layers.len()).flat_map(|l| experts.ids(l).map(move |_| l as u16)).collect();
        Self { layers, layer_of, clock: 0, alpha, depth, bypass }
    }

    fn layer(&mut self, id: Id) -> (&mut LayerScores, Id) {
        let layer = &mut self.layers[usize::from(self.layer_of[id as usize])];
        let own = id - layer.first;
        (layer, own)
    }

    fn place(&mut self, id: Id) {
        self.clock += 1;
        let clock = self.clock;
        let (layer, own) = self.layer(id);
        layer.resident.set(own, (layer.score[own as usize], clock));
    }
}

impl LayerScores {
    /// S, and the last use.
    fn rank(&self, own: Id) -> Rank {
        let (score, used) = self.resident.rank(own);
        (score * self.factor, used)
    }

    fn multiply_out(&mut self) {
        for own in 0..self.score.len() {
            self.score[own] *= self.factor;
            if self.resident.contains(own as Id) {
                let (_, used) = self.resident.rank(own as Id);
                self.resident.set(own as Id, (self.score[own], used));
            }
        }
        self.factor = 1.0;
    }
}

impl Policy for Mrs {
    fn depth(&self) -> usize {
        self.depth
    }

    fn on_scores(&mut self, layer: usize, ranked: &[(u16, f32)]) {
        let Some(layer) = self.layers.get_mut(layer) else { return };
        layer.factor *= 1.0 - self.alpha;
        if layer.factor < RESCALE_BELOW {
            layer.multiply_out();
        }
        for &(expert, s) in ranked.iter().take(layer.p) {
            let Some(score) = layer.score.get_mut(usize::from(expert)) else { continue };
            *score += self.alpha * f64::from(s) / layer.factor;
            let own = Id::from(expert);
            if layer.resident.contains(own) {
                layer.resident.set(own, (*score, layer.resident.rank(own).1));
            }
        }
    }

    /// The mean of an expert's S is its mean share of the scores; its share of the choices approximates that.
    fn expect(&mut self, id: Id, probability: f64, _: f64) {
        let (layer, own) = self.layer(id);
        layer.score[own as usize] = probability / (layer.k.max(1) as f64 * layer.factor);
    }

    fn on_hit(&mut self, id: Id) {
        self.place(id);
    }

    fn victim(&mut self, incoming: Id, force: bool, pins: Pins<'_>) -> Option<Id> {
        let mut least: Option<(Rank, Id)> = None;
        for layer in &mut self.layers {
            let first = layer.first;
            let Some(own) = layer.resident.least(|own| pins.holds(first + own)) else { continue };
            let rank = layer.rank(own);
            if least.is_none_or(|(l, _)| compare(rank, l).is_lt()) {
                least = Some((rank, first + own));
            }
        }
        let (rank, id) = least?;
        let next = self.clock + 1;
        let (layer, own) = self.layer(incoming);
        let new = (layer.score[own as usize] * layer.factor, next);
        let stays = self.bypass && !force && compare(new, rank).is_lt();
        (!stays).then_some(id)
    }

    fn on_insert(&mut self, id: Id) {
        self.place(id);
    }

    fn on_evict(&mut self, id: Id) {
        let (layer, own) = self.layer(id);
        layer.resident.remove(own);
    }

    fn reset(&mut self) {
        self.clock = 0;
        for layer in &mut self.layers {
            layer.factor = 1.0;
            layer.score.fill(0.0);
            layer.resident.clear();
        }
    }
}
