//! The figures of a checkpoint, for `model.toml` and `moec inspect`.

use crate::config::Facts;
use crate::import::ModelSpec;
use crate::import::spec::{Attention, LayerSpec, Mixer, Mlp, Norm, Projection};
use moec_ir::{WeightClass, WeightExpr};

/// Parameters by class, while they are counted.
#[derive(Default)]
struct Count {
    experts: u64,
    attention: u64,
    embeddings: u64,
    exact: u64,
}

/// Elements of a weight. The importer has checked every shape.
fn elements(w: &WeightExpr) -> u64 {
    w.shape().map_or(0, |s| s.iter().map(|&d| d as u64).product())
}

impl Count {
    fn projection(&mut self, p: &Projection) {
        self.attention += elements(&p.weight);
        self.exact += p.bias.as_ref().map_or(0, elements);
    }

    fn mlp(&mut self, m: &Mlp) {
        for p in [&m.gate, &m.up, &m.down] {
            self.projection(p);
        }
    }

    fn norm(&mut self, n: &Norm) {
        self.exact += match n {
            Norm::Rms { weight, .. } => elements(weight),
            Norm::Layer { weight, bias, .. } => elements(weight) + elements(bias),
        };
    }

    fn layer(&mut self, l: &LayerSpec) {
        for block in &l.blocks {
            block.norm.iter().chain(&block.post_norm).for_each(|n| self.norm(n));
        }
        l.mixers().for_each(|m| self.mixer(m));
    }

    fn mixer(&mut self, m: &Mixer) {
        match m {
            Mixer::Attention(Attention::Gqa(a)) => {
                for p in [&a.q, &a.k, &a.v, &a.o] {
                    self.projection(p);
                }
                self.exact += a.qk_norm.as_ref().map_or(0, |n| elements(&n.q) + elements(&n.k));
                self.exact += a.sinks.as_ref().map_or(0, elements);
            }
            Mixer::Attention(Attention::Mla(a)) => {
                for p in [&a.q, &a.kv_down, &a.o] {
                    self.projection(p);
                }
                self.attention += elements(&a.k_up) + elements(&a.v_up);
                self.norm(&a.kv_norm);
                if let Some((down, norm)) = &a.q_down {
                    self.projection(down);
                    self.norm(norm);
                }
            }
            Mixer::Dense(m) => self.mlp(m),
            Mixer::Moe(m) => {
                self.experts += elements(&m.experts.gate_up) + elements(&m.experts.down);
                self.exact += m.experts.bias.as_ref().map_or(0, |(a, b)| elements(a) + elements(b));
                self.exact += elements(&m.logits.weight) + m.logits.bias.as_ref().map_or(0, elements);
                self.exact += m.select_bias.as_ref().map_or(0, elements);
                if let Some(shared) = &m.shared {
                    self.mlp(&shared.mlp);
                    self.exact += shared.gate.as_ref().map_or(0, elements);
                }
            }
        }
    }
}

/// Numbers of KV cache that a layer takes per token.
fn kv_numbers(l: &LayerSpec) -> u64 {
    let channels = l.attention().map_or(0, |attention| match attention {
        Attention::Gqa(a) => 2 * a.kv_heads * a.head_dim,
        Attention::Mla(a) => a.latent + a.rotated,
    });
    channels as u64
}

/// The figures of a model.
pub fn of(spec: &ModelSpec) -> Facts {
    let mut c = Count::default();
    spec.layers.iter().for_each(|l| c.layer(l));
    c.norm(&spec.final_norm);
    c.embeddings += elements(&spec.embed) + spec.head.as_ref().map_or(0, elements);
    c.exact += spec.head_bias.as_ref().map_or(0, elements);
    let moe = || spec.layers.iter().filter_map(LayerSpec::moe);
    Facts {
        family: spec.family.to_owned(),
        parameters: spec.params,
        active_parameters: spec.active_params,
        layers: spec.layers.len(),
        moe_layers: moe().count(),
        experts: spec.experts(),
        experts_per_token: moe().map(|m| m.router.k).max().unwrap_or(0),
        max_context: spec.max_positions,
        kv_numbers_per_token: spec.layers.iter().map(kv_numbers).sum(),
        by_class: vec![
            (WeightClass::Experts, c.experts),
            (WeightClass::Attention, c.attention),
            (WeightClass::Embeddings, c.embeddings),
            (WeightClass::Exact, c.exact),
        ],
        tied_embeddings: spec.head.is_none(),
    }
}
