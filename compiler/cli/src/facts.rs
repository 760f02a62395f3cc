//! The figures of a checkpoint, for `model.toml` and `moec inspect`.

use moec_config::Facts;
use moec_import::ModelSpec;
use moec_import::spec::{Attention, LayerSpec, Mixer, Mlp, Norm, Projection};
use moec_ir::{Format, Leaf, WeightClass, WeightExpr};

/// Parameters by class, while they are counted.
struct Count<'a> {
    classes: [Class; WeightClass::ALL.len()],
    /// The format that holds the numbers of a leaf as the checkpoint stores them, if there is one.
    format: &'a dyn Fn(&Leaf) -> Option<Format>,
}

/// What is known of a class.
#[derive(Default)]
struct Class {
    parameters: u64,
    /// The formats that hold its matrices, each once; `None`: one that no format holds.
    stored: Vec<Option<Format>>,
}

impl Count<'_> {
    /// Counts a weight. The importer has checked every shape.
    fn add(&mut self, class: WeightClass, w: &WeightExpr) {
        let Ok(shape) = w.shape() else { return };
        let of = &mut self.classes[class as usize];
        of.parameters += shape.iter().map(|&d| d as u64).product::<u64>();
        for leaf in w.leaves() {
            let format = (self.format)(leaf);
            if !of.stored.contains(&format) {
                of.stored.push(format);
            }
        }
    }

    fn exact<'w>(&mut self, all: impl IntoIterator<Item = &'w WeightExpr>) {
        all.into_iter().for_each(|w| self.add(WeightClass::Exact, w));
    }

    fn projection(&mut self, p: &Projection) {
        self.add(WeightClass::Attention, &p.weight);
        self.exact(&p.bias);
    }

    fn mlp(&mut self, m: &Mlp) {
        for p in [&m.gate, &m.up, &m.down] {
            self.projection(p);
        }
    }

    fn norm(&mut self, n: &Norm) {
        match n {
            Norm::Rms { weight, .. } => self.exact([weight]),
            Norm::Layer { weight, bias, .. } => self.exact([weight, bias]),
        }
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
                self.exact(a.qk_norm.iter().flat_map(|n| [&n.q, &n.k]));
                self.exact(&a.sinks);
            }
            Mixer::Attention(Attention::Mla(a)) => {
                for p in [&a.q, &a.kv_down, &a.o] {
                    self.projection(p);
                }
                for up in [&a.k_up, &a.v_up] {
                    self.add(WeightClass::Attention, up);
                }
                self.norm(&a.kv_norm);
                if let Some((down, norm)) = &a.q_down {
                    self.projection(down);
                    self.norm(norm);
                }
            }
            Mixer::Dense(m) => self.mlp(m),
            Mixer::Moe(m) => {
                for half in [&m.experts.gate_up, &m.experts.down] {
                    self.add(WeightClass::Experts, half);
                }
                self.exact(m.experts.bias.iter().flat_map(|(a, b)| [a, b]));
                self.exact([&m.logits.weight]);
                self.exact(m.logits.bias.iter().chain(&m.select_bias));
                if let Some(shared) = &m.shared {
                    self.mlp(&shared.mlp);
                    self.exact(&shared.gate);
                }
            }
        }
    }
}

/// Numbers of KV cache that an attention takes per token, and its window.
fn kv(attention: &Attention) -> (u64, Option<usize>) {
    match attention {
        Attention::Gqa(a) => (2 * (a.kv_heads * a.head_dim) as u64, a.window),
        Attention::Mla(a) => ((a.latent + a.rotated) as u64, None),
    }
}

/// The figures of a model. `format` says which format holds the numbers of a leaf as the checkpoint stores them, if there is one.
pub fn of(spec: &ModelSpec, format: &dyn Fn(&Leaf) -> Option<Format>) -> Facts {
    let mut c = Count { classes: Default::default(), format };
    spec.layers.iter().for_each(|l| c.layer(l));
    c.norm(&spec.final_norm);
    spec.head.iter().chain([&spec.embed]).for_each(|w| c.add(WeightClass::Embeddings, w));
    c.exact(&spec.head_bias);
    let moe = || spec.layers.iter().filter_map(LayerSpec::moe);
    let by_class = || WeightClass::ALL.into_iter().zip(&c.classes);
    let one = |of: &Class| if let [format] = of.stored[..] { format } else { None };
    Facts {
        family: spec.family.to_owned(),
        parameters: spec.params,
        active_parameters: spec.active_params,
        layers: spec.layers.len(),
        moe_layers: moe().count(),
        experts: spec.experts(),
        experts_per_token: moe().map(|m| m.router.k).max().unwrap_or(0),
        max_context: spec.max_positions,
        kv: spec.layers.iter().filter_map(LayerSpec::attention).map(kv).collect(),
        by_class: by_class().map(|(class, of)| (class, of.parameters)).collect(),
        stored: by_class().filter_map(|(class, of)| Some((class, one(of)?))).collect(),
        tied_embeddings: spec.head.is_none(),
    }
}
