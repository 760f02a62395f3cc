//! Pass `cluster`: turns experts whose gates leave zeros into neurons, the hottest first.
//!
//! A neuron is a row of gate, a row of up and a column of down. It is computed or skipped as a whole, and
//! stored together (PowerInfer-2, §3.1 and §4.4). With ReLU or a similar gate, few rows leave most neurons at
//! 0, so that decoding need not read them (§2.2). Calibration records which neurons are hot (§5). These come
//! first in every expert, so that any number of the hottest is contiguous.
//!
//! ```text
//! y = expert_ffn(x, table, gate_up, down)   →   y = neuron_ffn(x, table, neurons)
//! neurons[e, i] = gate_up[e, i] | gate_up[e, I + i] | down[e, :, i], in the order of the layer
//! ```
//!
//! Results change only by the order of sums.
//!
//! A dense network is an expert that every row takes (`dense`).
//!
//! If experts stay on disk, gates are separate and stay in memory. Up and down of a neuron are one read
//! (§4.3, §4.4):
//!
//! ```text
//! y = neuron_ffn(x, table, gates, up_down)
//! gates[e, i] = gate_up[e, i], up_down[e, i] = gate_up[e, I + i] | down[e, :, i]
//! ```

mod dense;

pub(super) use dense::stacked;
use moec_backend::DenseNeurons;
use moec_base::error::{Error, Result};
use moec_config::Skip;
use moec_ir::bundle::PARTS;
use moec_ir::{
    Axis, EntryKind, Format, Glu, Module, Node, Op, Operand, Weight, WeightClass, WeightExpr, WeightId,
};
use moec_profile::Profile;
use std::collections::HashMap;

/// Share of neurons that must be 0 while one token is decoded for `auto` to skip them. It is slightly above
/// the share at which reading whole experts is as fast (`docs/neurons.md`).
pub const fn break_even_share(format: Format) -> f64 {
    if format.is_quantised() { 0.6 } else { 0.5 }
}

/// Recorded activity of a layer's neurons.
pub trait Activity {
    /// Share of the neurons that are 0 for one token, of the experts that it chose; `None` if nothing was
    /// recorded.
    fn zeros(&self, layer: u32) -> Option<f64>;
    /// Share of the neurons whose gate after SiLU has a smaller magnitude; `None` if nothing was recorded.
    fn below(&self, _layer: u32, _magnitude: f32) -> Option<f64> {
        None
    }
    /// Neurons of an expert, the hottest first; `None` if nothing was recorded.
    fn hottest(&self, layer: u32, expert: usize) -> Option<Vec<usize>>;
}

impl Activity for Profile {
    fn zeros(&self, layer: u32) -> Option<f64> {
        // Zeros below a threshold may not be skipped.
        self.neurons(layer).filter(|counts| counts.is_exact())?.zeros(0, 1)
    }

    fn below(&self, layer: u32, magnitude: f32) -> Option<f64> {
        self.gates.iter().find(|g| g.layer == layer)?.below(magnitude)
    }

    fn hottest(&self, layer: u32, expert: usize) -> Option<Vec<usize>> {
        let counts = self.neurons(layer).filter(|counts| expert < counts.experts())?;
        Some(counts.hottest(expert, 1))
    }
}

/// No recorded activity: no zeros are known, and neurons keep their order.
#[derive(Clone, Copy, Debug)]
pub struct Unseen;

impl Activity for Unseen {
    fn zeros(&self, _: u32) -> Option<f64> {
        None
    }

    fn hottest(&self, _: u32, _: usize) -> Option<Vec<usize>> {
        None
    }
}

/// Weights of a layer's experts: gate and up, down.
type ExpertWeights = [WeightId; 2];

/// Turns experts and dense networks into neurons if that changes no result and `skip` requests it. `auto`
/// requires enough recorded zeros. With `paged`, experts stay on disk, and all or none become neurons: `auto`
/// leaves them whole, and `on` turns them ([`super::reads`]). Dense networks that are left whole stay in
/// memory.
///
/// # Errors
/// Fails with `on` if nothing can be turned, or, with `paged`, if not all experts can.
pub fn cluster(module: &mut Module, skip: Skip, activity: &dyn Activity, paged: bool) -> Result<()> {
    let mut nodes = module.entries.iter().flat_map(|g| &g.nodes);
    let experts = nodes.find_map(|n| halves(module, n));
    let format = experts.map(|[gate_up, _]| module.weight(gate_up).format);
    networks_to_experts(module, |module, _, layer, network| {
        let own = module.weight(network.gate_up).format;
        // All neurons on disk share frames.
        let fits = !paged || format.is_none_or(|format| format == own);
        fits && becomes_neurons((skip, paged), activity, layer, network.glu, own)
    })?;
    experts_to_neurons(module, skip, activity, paged)
}

/// Whether experts of a layer, in a format, become neurons.
fn becomes_neurons(
    (skip, paged): (Skip, bool),
    activity: &dyn Activity,
    layer: u32,
    glu: Glu,
    format: Format,
) -> bool {
    let zeros = || match glu {
        Glu::Cats { threshold } => activity.below(layer, threshold),
        _ => activity.zeros(layer),
    };
    match skip {
        Skip::Off => false,
        Skip::On => true,
        Skip::Auto => !paged && zeros().is_some_and(|zeros| zeros >= break_even_share(format)),
    }
}

/// As [`cluster`], for experts alone.
///
/// # Errors
/// Those of [`cluster`].
pub(super) fn experts_to_neurons(
    module: &mut Module,
    skip: Skip,
    activity: &dyn Activity,
    paged: bool,
) -> Result<()> {
    let mut bundled: HashMap<ExpertWeights, (Vec<WeightId>, usize)> = HashMap::new();
    let mut left = 0;
    let mut entries = std::mem::take(&mut module.entries);
    for node in entries.iter_mut().flat_map(|g| &mut g.nodes) {
        let (Some(layer), Some((glu, halves))) = (node.scope.layer, convertible(module, node)) else {
            left += usize::from(matches!(node.op, Op::ExpertFfn { fixed: false, .. }));
            continue;
        };
        if !becomes_neurons((skip, paged), activity, layer, glu, module.weight(halves[0]).format) {
            continue;
        }
        let index = bundled.len();
        let (weights, index) =
            bundled.entry(halves).or_insert_with(|| (bundle(module, halves, layer, activity, paged), index));
        node.op = Op::NeuronFfn {
            glu,
            paged: paged.then_some(*index),
            gates_on_disk: false,
            hot: None,
            predict: None,
        };
        node.inputs.truncate(2);
        node.inputs.extend(weights.iter().map(|&w| Operand::Weight(w)));
    }
    module.entries = entries;
    if bundled.is_empty() && skip == Skip::On {
        return Err(Error::input("`skip = \"on\"`, but no expert and no dense network of this model can be skipped neuron by neuron")
            .because("it requires gates with exact zeros (ReLU, dReLU, FATReLU, or SiLU with a `threshold`), no biases, and one format for all matrices of an expert (not q8h, q4h or mxfp4)")
            .hint("set `skip = \"auto\"` under `[experts]`"));
    }
    if paged && left > 0 && !bundled.is_empty() {
        return Err(Error::input("`skip = \"on\"` with a memory budget, but not all experts of this model can be skipped neuron by neuron")
            .because("all experts on disk are stored whole, or all by neurons")
            .hint("set `skip = \"auto\"` under `[experts]`: then whole experts are read"));
    }
    crate::rewrite::drop_unused_weights(module);
    Ok(())
}

/// Turns the dense networks that `chosen` names into experts, entry by entry.
///
/// # Errors
/// A bug of the compiler: a network that does not fit its Graph.
pub(super) fn networks_to_experts(
    module: &mut Module,
    chosen: impl Fn(&Module, EntryKind, u32, &DenseNeurons) -> bool,
) -> Result<()> {
    let mut entries = std::mem::take(&mut module.entries);
    let done = entries.iter_mut().try_for_each(|graph| {
        let kind = graph.kind;
        dense::to_experts(module, graph, |layer, network| chosen(module, kind, layer, network))
    });
    module.entries = entries;
    done
}

/// Function that joins gate and up of a node that becomes neurons, and its weights; `None` if the node is not
/// turned.
fn convertible(module: &Module, node: &Node) -> Option<(Glu, ExpertWeights)> {
    let &Op::ExpertFfn { glu, bias: false, fixed: false } = &node.op else { return None };
    let &[_, _, Operand::Weight(gate_up), Operand::Weight(down)] = node.inputs.as_slice() else {
        return None;
    };
    // Formats of a checkpoint's codes share scales along rows of the original weights; neurons would need
    // scales of down across its rows.
    let format = module.weight(gate_up).format;
    let suits = format == module.weight(down).format && format.has_plain_codes();
    (glu.skips() && suits).then_some((glu, [gate_up, down]))
}

/// Weights of experts that can become neurons, gate and up, then down; `None` if they stay whole.
pub fn halves(module: &Module, node: &Node) -> Option<[WeightId; 2]> {
    convertible(module, node).map(|(_, halves)| halves)
}

/// The format of neurons: rows of a bundle have their own scales instead of those of output channels.
pub(super) const fn neuron_format(experts: Format) -> Format {
    if experts.is_by_channel() { Format::Q4 } else { experts }
}

/// The weight of neuron bundles. If neurons stay on disk, that of the gates, and that of the rest.
fn bundle(
    module: &mut Module,
    [gate_up, down]: ExpertWeights,
    layer: u32,
    activity: &dyn Activity,
    paged: bool,
) -> Vec<WeightId> {
    let (gate_up, down) = (module.weight(gate_up), module.weight(down));
    let (experts, inter, hidden) = (gate_up.matrices(), gate_up.rows() / 2, gate_up.cols());
    let half = |start| WeightExpr::Slice {
        axis: Axis::Rows,
        start,
        step: 1,
        len: inter,
        of: Box::new(gate_up.expr.clone()),
    };
    let columns = WeightExpr::Transpose(Box::new(down.expr.clone()));
    let joined = |of| WeightExpr::Concat { axis: Axis::Cols, of };
    let parts = if paged {
        vec![("gates", 1, half(0)), ("up_down", PARTS - 1, joined(vec![half(inter), columns]))]
    } else {
        vec![("neurons", PARTS, joined(vec![half(0), half(inter), columns]))]
    };
    let orders: Vec<_> = (0..experts).map(|e| activity.hottest(layer, e)).collect();
    let order = order(&orders, inter);
    let stem = gate_up.name.split("gate_up").next().unwrap_or_default();
    let weight = |(name, parts, expr)| Weight {
        name: format!("{stem}{name}"),
        shape: vec![experts, inter, parts * hidden],
        // Neurons on disk are in the file of experts.
        class: if paged { WeightClass::Experts } else { gate_up.class },
        format: neuron_format(gate_up.format),
        expr: match &order {
            Some(order) => WeightExpr::Arrange { order: order.clone(), of: Box::new(stacked(gate_up, expr)) },
            None => stacked(gate_up, expr),
        },
    };
    let weights: Vec<Weight> = parts.into_iter().map(weight).collect();
    let first = module.weights.len() as u32;
    module.weights.extend(weights);
    (first..module.weights.len() as u32).map(WeightId).collect()
}

/// The orders of all experts in one list; `None` if no neuron moves. An expert keeps its order if nothing was
/// recorded of it, or if its recorded order is not a permutation of its neurons.
pub(super) fn order(experts: &[Option<Vec<usize>>], inter: usize) -> Option<Vec<u32>> {
    let usual = || (0..inter).collect::<Vec<_>>();
    let whole = |order: &Vec<usize>| {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        sorted == usual()
    };
    let orders: Vec<Vec<usize>> =
        experts.iter().map(|order| order.clone().filter(whole).unwrap_or_else(usual)).collect();
    let moves = orders.iter().any(|order| *order != usual());
    moves.then(|| orders.into_iter().flatten().map(|i| i as u32).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::text::parse_module;

    /// Half of the neurons are 0, and the last is the hottest.
    struct Backwards;

    impl Activity for Backwards {
        fn below(&self, layer: u32, magnitude: f32) -> Option<f64> {
            Some(if layer == 0 { 0.0 } else { f64::from(magnitude) })
        }

        fn zeros(&self, layer: u32) -> Option<f64> {
            Some(if layer == 0 { 0.9 } else { 0.1 })
        }

        fn hottest(&self, _: u32, expert: usize) -> Option<Vec<usize>> {
            (expert == 1).then(|| vec![2, 1, 0])
        }
    }

    fn experts(glu: &str) -> Module {
        let layers = [0, 1].map(|l| {
            format!(
                "weight @layers.{l}.gate_up: f32[2, 6, 4] experts = t\"{l}.gate_up\"[2, 6, 4]\n\
                 weight @layers.{l}.down: f32[2, 4, 3] experts = t\"{l}.down\"[2, 4, 3]\n"
            )
        });
        let layers = layers.concat();
        let text = format!(
            "weight @embed: f32[8, 4] embeddings = t\"embed\"[8, 4]\n{layers}\
             weight @router: f32[2, 4] exact = t\"router\"[2, 4]\n\n\
             entry decode[1] -> %13 {{\n  inputs %0: i32[1], %1: i32[1], %2: i32[1], %3: i32[1]\n  scope embed\n  \
             %4: f32[1, 4] = embed %0, @embed\n  scope layers.0.ffn\n  %5: f32[1, 2] = linear %4, @router\n  \
             %6: i32[1, 1], %7: f32[1, 1] = router %5 {{experts = 2, k = 1, score = softmax, weight_from = score, \
             renorm = none, scale = 1.0}}\n  %8: i32[11] = dispatch %6 {{experts = 2}}\n  \
             %9: f32[1, 4] = expert_ffn %4, %8, @layers.0.gate_up, @layers.0.down {{glu = {glu}}}\n  \
             %10: f32[1, 4] = combine %9, %8, %7\n  scope layers.1.ffn\n  \
             %11: f32[1, 4] = expert_ffn %10, %8, @layers.1.gate_up, @layers.1.down {{glu = {glu}}}\n  \
             scope head\n  %12: f32[1, 4] = gather_rows %11, %3\n  %13: f32[1, 8] = linear %12, @embed\n}}\n"
        );
        parse_module(&text).unwrap()
    }

    #[test]
    fn hottest_neurons_come_first_if_skipping_pays() {
        let mut module = experts("relu");
        cluster(&mut module, Skip::Auto, &Backwards, false).unwrap();
        moec_ir::verify::module(&module).unwrap();
        let names: Vec<&str> = module.weights.iter().map(|w| w.name.as_str()).collect();
        assert_eq!(names, ["embed", "layers.1.gate_up", "layers.1.down", "router", "layers.0.neurons"]);
        let text = module.weights[4].expr.to_string();
        assert!(text.starts_with("arrange [0, 1, 2, 2, 1, 0] (concat cols(slice rows 0:3:1"), "{text}");
        // Without recorded gates, no gain is known.
        let mut module = experts("relu");
        cluster(&mut module, Skip::Auto, &Unseen, false).unwrap();
        assert_eq!(module, experts("relu"));
        cluster(&mut module, Skip::Off, &Backwards, false).unwrap();
        assert_eq!(module, experts("relu"));
    }

    #[test]
    fn on_disk_gates_are_separate_and_layers_are_counted() {
        let mut module = experts("relu");
        cluster(&mut module, Skip::Auto, &Backwards, true).unwrap();
        assert_eq!(module, experts("relu"));
        cluster(&mut module, Skip::On, &Backwards, true).unwrap();
        moec_ir::verify::module(&module).unwrap();
        let shapes: Vec<(&str, &[usize])> =
            module.weights.iter().map(|w| (w.name.as_str(), w.shape.as_slice())).collect();
        let (gates, up_down): (&[usize], &[usize]) = (&[2, 3, 4], &[2, 3, 8]);
        assert_eq!(
            shapes[2..],
            [
                ("layers.0.gates", gates),
                ("layers.0.up_down", up_down),
                ("layers.1.gates", gates),
                ("layers.1.up_down", up_down)
            ]
        );
        let text = module.to_string();
        assert!(
            text.contains("{glu = relu, paged = 0}") && text.contains("{glu = relu, paged = 1}"),
            "{text}"
        );
        // Either all layers are divided, or none.
        let mut mixed = experts("relu");
        let silu = |n: &mut Node| {
            n.op = Op::ExpertFfn { glu: Glu::Gated(moec_ir::op::Activation::Silu), bias: false, fixed: false }
        };
        mixed.entries[0].nodes.iter_mut().filter(|n| n.op.name() == "expert_ffn").take(1).for_each(silu);
        let refused = cluster(&mut mixed, Skip::On, &Backwards, true).unwrap_err();
        assert!(refused.to_string().contains("not all experts"), "{refused}");
    }

    #[test]
    fn gates_without_zeros_are_unchanged_or_refused_by_name() {
        let mut module = experts("silu");
        cluster(&mut module, Skip::Auto, &Backwards, false).unwrap();
        assert_eq!(module, experts("silu"));
        let refused = cluster(&mut module, Skip::On, &Backwards, false).unwrap_err();
        assert!(refused.to_string().contains("no expert and no dense network of this model"), "{refused}");
    }

    #[test]
    fn neurons_below_a_threshold_count_as_zeros() {
        let of = |threshold: f32, skip| {
            let mut module = experts(&format!("cats(threshold = {threshold:?})"));
            cluster(&mut module, skip, &Backwards, false).unwrap();
            moec_ir::verify::module(&module).unwrap();
            module.weights.iter().filter(|w| w.name.ends_with("neurons")).count()
        };
        // The first layer has no gates below the threshold; the second has the share of that threshold.
        assert_eq!([of(0.4, Skip::Auto), of(0.6, Skip::Auto)], [0, 1]);
        assert_eq!([of(0.4, Skip::On), of(0.6, Skip::Off)], [2, 0]);
    }

    #[test]
    fn invalid_neuron_order_is_ignored() {
        let order = |o: &[&[usize]]| order(&o.iter().map(|o| Some(o.to_vec())).collect::<Vec<_>>(), 3);
        assert_eq!(order(&[&[0, 1, 2], &[2, 2, 0]]), None);
        assert_eq!(order(&[&[0, 1, 2], &[1, 0]]), None);
        assert_eq!(order(&[&[1, 0, 2], &[7, 1, 2]]), Some(vec![1, 0, 2, 0, 1, 2]));
    }
}
