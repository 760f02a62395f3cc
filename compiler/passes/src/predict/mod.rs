//! Predictors of active neurons, after `cluster`: calls of few rows query one before they apply gates
//! (PowerInfer-2, §2.2, §4.1.2 and §5).
//!
//! If experts are stored by neurons, every gate, or an int8 bound of it, is read to find the active neurons.
//! A predictor finds them with fewer bytes, but makes errors. The gate of every predicted neuron is computed
//! first, so that a false positive costs only a gate; a false negative loses the neuron. So results change,
//! and there are no predictors unless `predict` under `[experts]` requests them.
//!
//! ```text
//! y = neuron_ffn(x, table, neurons)   →   y = neuron_ffn(x, table, neurons, right, left, margin) {predict = low_rank}
//!                                         y = neuron_ffn(x, table, neurons, codes, margin) {predict = coarse}
//! ```
//!
//! With a memory budget, the neurons that a predictor names have their gates read from disk ([`gates_to_disk`]):
//! then gates take no memory either (§4.3).
//!
//! Predictors are trained here on the inputs of experts that the profile kept ([`moec_profile::inputs`]).
//! There are two kinds; of low rank, several ranks are tried. `decisions.json` has the recall, predicted
//! share and bytes of each.

mod gates;
pub mod low_rank;
mod product;
mod train;

use crate::decisions::Decision;
use crate::reads::Predicted;
use crate::trained::TrainedTensors;
pub use gates::gates_to_disk;
use moec_base::error::{Error, Result};
use moec_config::{ExpertsConfig, Predict};
use moec_ir::bundle::Bundle;
use moec_ir::op::Predictor;
use moec_ir::{
    Axis, Format, Glu, Graph, Module, Node, Op, Operand, Source, Weight, WeightClass, WeightExpr, WeightId,
};
use moec_profile::Profile;
use moec_profile::inputs::Input;
use std::collections::BTreeMap;
pub use train::bytes as training_bytes;
use train::{CODES, FACTORS, Kind, Neurons, TrainedPredictor};

/// Predictors of a layer's neurons, and the chosen one.
pub struct Layer {
    number: u32,
    weight: WeightId,
    shape: Shape,
    trained: train::LayerPredictors,
    chosen: Option<usize>,
    why: String,
}

/// Shape that determines the bytes read.
#[derive(Clone, Copy)]
struct Shape {
    experts: usize,
    /// Experts per token.
    k: usize,
    inter: usize,
    hidden: usize,
    format: Format,
    gate_bound: bool,
    /// Whether neurons are on disk: then the alternative to a predictor is gates in memory.
    on_disk: bool,
}

impl Shape {
    /// Bytes of a row of `cols` numbers that is stored separately.
    const fn row(format: Format, cols: usize) -> usize {
        Bundle { format, hidden: cols, gate_bound: false }.part_bytes()
    }

    /// Bytes that a token reads of a layer that applies every gate, or every gate bound, if the bounds had no
    /// false positives.
    fn exact(&self, active: f64) -> f64 {
        let bundle = Bundle { format: self.format, hidden: self.hidden, gate_bound: self.gate_bound };
        let (part, all) = (bundle.part_bytes() as f64, (self.k * self.inter) as f64);
        if self.gate_bound {
            all * (bundle.gate_bound_bytes() as f64 + active * 3.0 * part)
        } else {
            all * (part + active * 2.0 * part)
        }
    }

    /// Bytes of a predictor of one expert.
    const fn predictor_bytes(&self, kind: Kind) -> usize {
        let margins = Self::row(Format::F32, self.inter);
        margins
            + match kind.predictor {
                Predictor::LowRank => {
                    kind.rank * Self::row(FACTORS, self.hidden) + self.inter * Self::row(FACTORS, kind.rank)
                }
                Predictor::Coarse => self.inter * Self::row(CODES, self.hidden),
            }
    }

    /// Bytes that a token reads with a predictor: all of it, gates of the predicted neurons, up and down of
    /// the active ones.
    fn predicted(&self, trained: &TrainedPredictor, active: f64) -> f64 {
        let (part, all) = (Self::row(self.format, self.hidden) as f64, (self.k * self.inter) as f64);
        (self.k * self.predictor_bytes(trained.kind)) as f64
            + all * part * (trained.predicted + 2.0 * active * trained.recall)
    }
}

impl Layer {
    fn bytes(&self, trained: &TrainedPredictor) -> f64 {
        self.shape.predicted(trained, self.trained.active)
    }

    /// Chooses the predictor that reads least, of the requested kinds; `auto` requires that it reads less
    /// than gates do.
    fn choose(&mut self, requested: Predict) {
        let kinds = |t: &TrainedPredictor| match requested {
            Predict::Off => false,
            Predict::Auto => true,
            Predict::LowRank => t.kind.predictor == Predictor::LowRank,
            Predict::Coarse => t.kind.predictor == Predictor::Coarse,
        };
        let candidates = self.trained.predictors.iter().enumerate().filter(|(_, t)| kinds(t));
        let best = candidates.min_by(|(_, a), (_, b)| self.bytes(a).total_cmp(&self.bytes(b)));
        let exact = self.shape.exact(self.trained.active);
        let source = if self.shape.gate_bound { "gate bounds" } else { "gates" };
        (self.chosen, self.why) = match best {
            None => (None, "its matrices are too small for this kind of predictor".to_owned()),
            Some((at, _)) if self.shape.on_disk => (Some(at), "of all kinds it reads least".to_owned()),
            Some((_, t)) if requested == Predict::Auto && self.bytes(t) >= exact => {
                (None, format!("{source} read no more"))
            }
            Some((at, t)) if self.bytes(t) < exact => (Some(at), format!("reads less than {source}")),
            Some((at, _)) => (Some(at), format!("requested, though {source} read less")),
        };
    }

    /// The decision for `decisions.json`.
    pub fn decision(&self) -> Decision {
        let Self { shape, trained, .. } = self;
        let chosen = self.chosen.and_then(|at| trained.predictors.get(at));
        let chosen = chosen.map_or_else(|| OFF.to_owned(), |t| name(t.kind));
        let exact = shape.exact(trained.active).round();
        let decision = Decision::new("cluster", "predictors of neurons", chosen, &*self.why)
            .in_layer(self.number)
            .with(&[
                ("active_share", trained.active),
                ("rows_fitted", trained.rows[0] as f64),
                ("rows_counted", trained.rows[1] as f64),
            ])
            .or(
                OFF,
                &[
                    ("found_share", 1.0),
                    ("taken_share", trained.active),
                    ("token_bytes", exact),
                    ("held_bytes", 0.0),
                ],
            );
        trained.predictors.iter().fold(decision, |d, t| {
            let held = shape.experts * shape.predictor_bytes(t.kind);
            d.or(
                name(t.kind),
                &[
                    ("found_share", t.recall),
                    ("taken_share", t.predicted),
                    ("token_bytes", self.bytes(t).round()),
                    ("held_bytes", held as f64),
                    ("standard_errors_below", t.kappa),
                ],
            )
        })
    }

    /// True if a predictor is chosen.
    pub fn is_on(&self) -> bool {
        self.chosen.is_some()
    }

    /// The chosen predictor, as the reads of neurons on disk depend on it.
    pub fn predicted(&self) -> Option<Predicted> {
        let Self { number, shape, trained, .. } = self;
        let chosen = trained.predictors.get(self.chosen?)?;
        Some(Predicted {
            layer: *number,
            bundle: Bundle { format: shape.format, hidden: shape.hidden, gate_bound: false },
            held: (shape.experts * shape.predictor_bytes(chosen.kind)) as f64,
            active: trained.active,
            recall: chosen.recall,
            taken: chosen.predicted,
        })
    }

    /// Discards the chosen predictor.
    pub fn discard(&mut self, why: &str) {
        (self.chosen, self.why) = (None, why.to_owned());
    }

    /// Declares the weights of the chosen predictor, in the order of the operator.
    fn declare(
        &self,
        module: &mut Module,
        trained: &mut TrainedTensors,
    ) -> Option<(Predictor, Vec<WeightId>)> {
        let tried = self.trained.predictors.get(self.chosen?)?;
        let Shape { experts, inter, hidden, .. } = self.shape;
        let rank = tried.kind.rank;
        let neurons = module.weight(self.weight).clone();
        let stem = neurons.name.strip_suffix("neurons").unwrap_or(&neurons.name).to_owned();
        let mut first = module.weights.len() as u32;
        let mut declare =
            |what: &str, shape: [usize; 3], format, expr: &mut dyn FnMut(&str) -> WeightExpr| {
                let name = format!("{stem}predict_{what}");
                let expr = expr(&name);
                let shape = shape.to_vec();
                module.weights.push(Weight { name, shape, class: WeightClass::Experts, format, expr });
            };
        let all = |of: &dyn Fn(&train::Factors) -> Vec<f32>| -> Vec<f32> {
            self.trained.factors.iter().flat_map(of).collect()
        };
        match tried.kind.predictor {
            Predictor::LowRank => {
                let right = all(&|f| f.right[..rank * hidden].to_vec());
                let row = |f: &train::Factors, i: usize| -> Vec<f32> {
                    f.left.iter().skip(i).step_by(inter).take(rank).copied().collect()
                };
                let left = all(&|f| (0..inter).flat_map(|i| row(f, i)).collect());
                let shapes = [[experts, rank, hidden], [experts, inter, rank]];
                for (what, shape, numbers) in [("right", shapes[0], right), ("left", shapes[1], left)] {
                    declare(what, shape, FACTORS, &mut |name| {
                        trained.add(name, shape.to_vec(), numbers.clone())
                    });
                }
            }
            Predictor::Coarse => {
                let of = Box::new(neurons.expr.clone());
                let gates = WeightExpr::Slice { axis: Axis::Cols, start: 0, step: 1, len: hidden, of };
                declare("codes", [experts, inter, hidden], CODES, &mut |_| gates.clone());
            }
        }
        let shape = [experts, 1, inter];
        declare("margin", shape, Format::F32, &mut |name| {
            trained.add(name, shape.to_vec(), tried.margins.clone())
        });
        let ids = std::iter::from_fn(|| {
            let id = WeightId(first);
            first += 1;
            Some(id)
        });
        Some((tried.kind.predictor, ids.take(tried.kind.predictor.weights()).collect()))
    }
}

/// No predictor: gates, or their int8 bounds, determine the active neurons.
const OFF: &str = "off";

/// `low-rank 32` or `coarse`.
fn name(kind: Kind) -> String {
    match kind.predictor {
        Predictor::LowRank => format!("low-rank {}", kind.rank),
        Predictor::Coarse => "coarse".to_owned(),
    }
}

/// Layer, gate function and weight of a node whose neurons are active past a border; `None` for other nodes.
/// With a threshold on SiLU, neurons are active on both sides of the inactive ones.
fn by_neurons(node: &Node) -> Option<(u32, Glu, WeightId)> {
    match (&node.op, node.inputs.as_slice(), node.scope.layer) {
        (
            &Op::NeuronFfn { glu, paged, gates_on_disk, hot: _, predict: None },
            &[_, _, Operand::Weight(w)],
            Some(layer),
        ) if glu.skips_below() && (paged.is_none() || gates_on_disk) => Some((layer, glu, w)),
        _ => None,
    }
}

/// Rows of a node, and experts of each row.
fn rows(graph: &Graph, node: &Node) -> Option<(usize, usize)> {
    let (&Operand::Value(x), &out) = (node.inputs.first()?, node.outputs.first()?) else { return None };
    let rows = graph.ty(x).rows();
    Some((rows, graph.ty(out).rows() / rows.max(1)))
}

/// Trains predictors for every layer whose experts are stored by whole neurons, and chooses one for each. Layers
/// without recorded inputs are left out.
///
/// # Errors
/// Fails if weights cannot be read, or on an interrupt.
pub fn choose(
    module: &Module,
    config: &ExpertsConfig,
    profile: &Profile,
    lowered: &Module,
    source: &dyn Source,
    has_bounds: fn(Format, Glu) -> bool,
) -> Result<Vec<Layer>> {
    let mut found: BTreeMap<WeightId, Layer> = BTreeMap::new();
    for graph in &module.entries {
        for node in &graph.nodes {
            let Some(((layer, glu, weight), (_, k))) = by_neurons(node).zip(rows(graph, node)) else {
                continue;
            };
            if found.contains_key(&weight) {
                continue;
            }
            let declared = module.weight(weight);
            let hidden = declared.cols() / moec_ir::bundle::PARTS;
            let input = Input::of(profile, lowered, &declared.expr, source)?;
            let Some(input) = input.filter(|i| i.cols == hidden && i.len() >= 2) else { continue };
            let (experts, inter, format) = (declared.matrices(), declared.rows(), declared.format);
            let neurons = Neurons { expr: &declared.expr, experts, inter, hidden, glu };
            let trained = train::train(&neurons, &input, config.recall, source)?;
            let gate_bound = has_bounds(format, glu);
            let on_disk = node.op.pages_neurons();
            let shape = Shape { experts, k, inter, hidden, format, gate_bound, on_disk };
            let mut found_here =
                Layer { number: layer, weight, shape, trained, chosen: None, why: String::new() };
            found_here.choose(config.predict);
            found.insert(weight, found_here);
        }
    }
    Ok(found.into_values().collect())
}

/// Makes nodes query the chosen predictors; `which` selects nodes by their rows. Cold neurons beside hot
/// networks query them for any number of rows.
pub fn apply(
    module: &mut Module,
    layers: &[Layer],
    trained: &mut TrainedTensors,
    which: impl Fn(usize) -> bool,
) {
    let mut declared = BTreeMap::new();
    for layer in layers {
        declared.extend(layer.declare(module, trained).map(|taken| (layer.weight, taken)));
    }
    for graph in &mut module.entries {
        let few: Vec<bool> =
            graph.nodes.iter().map(|n| rows(graph, n).is_some_and(|(r, _)| which(r))).collect();
        for (node, few) in graph.nodes.iter_mut().zip(few) {
            let Some((_, _, weight)) = by_neurons(node) else { continue };
            let Some((predictor, weights)) = declared.get(&weight) else { continue };
            if let Op::NeuronFfn { hot, predict, .. } = &mut node.op
                && (few || hot.is_some())
            {
                *predict = Some(*predictor);
                node.inputs.extend(weights.iter().map(|&w| Operand::Weight(w)));
            }
        }
    }
    // A predictor that no entry point uses is not stored.
    crate::rewrite::drop_weights(module, |name| name.contains("predict_"));
}

/// Whether every layer whose gates are to stay on disk has a chosen predictor.
pub fn covers(module: &Module, layers: &[Layer]) -> bool {
    let on = |weight| layers.iter().any(|l| l.weight == weight && l.is_on());
    let nodes = module.entries.iter().flat_map(|g| &g.nodes).filter(|n| n.op.pages_neurons());
    nodes.into_iter().all(|node| by_neurons(node).is_some_and(|(_, _, weight)| on(weight)))
}

/// Error for required predictors without neurons to predict.
pub fn nothing_to_predict(requested: Predict) -> Error {
    Error::input(format!("`predict = \"{}\"`, but there is nothing to predict", requested.name()))
        .because(
            "it requires ReLU experts that are stored neuron by neuron, and a profile with rows of their inputs",
        )
        .hint("set `skip = \"on\"` under `[experts]`, or remove `predict`")
}
