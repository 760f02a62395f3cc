//! Pass `cluster`: experts whose gates leave zeros become neurons, the hottest first.
//!
//! A neuron is what is computed or skipped: a row of gate, a row of up and a column of down, which lie together (PowerInfer-2,
//! §3.1 and §4.4). Where a gate is ReLU or one of its kind, few rows leave most neurons at 0, so that decoding need not read
//! them (§2.2). Which neurons are hot is what calibration saw (§5): they stand in front of every expert, so that any number
//! of the hottest is one piece.
//!
//! ```text
//! y = expert_ffn(x, table, gate_up, down)   →   y = neuron_ffn(x, table, neurons)
//! neurons[e, i] = gate_up[e, i] | gate_up[e, I + i] | down[e, :, i], in the order of the layer
//! ```
//!
//! No result changes but for the order of sums.

use crate::config::Skip;
use crate::error::{Error, Result};
use crate::profile::Profile;
use moec_ir::bundle::PARTS;
use moec_ir::{Axis, Format, Module, Node, Op, Operand, Weight, WeightExpr, WeightId};
use std::collections::HashMap;

/// Share of neurons that must be 0, while one token is decoded, for `auto` to skip them: somewhat more than where whole experts
/// are read as fast (`docs/neurons.md`).
pub const fn worth(format: Format) -> f64 {
    match format {
        Format::Q8 | Format::Q4 => 0.6,
        _ => 0.5,
    }
}

/// What calibration saw of a layer's neurons.
pub trait Activity {
    /// Share of them that are 0 for one token, of the experts that it chose; `None` where nothing was seen.
    fn zeros(&self, layer: u32) -> Option<f64>;
    /// Neurons of an expert, the hottest first; `None` where nothing was seen.
    fn hottest(&self, layer: u32, expert: usize) -> Option<Vec<usize>>;
}

impl Activity for Profile {
    fn zeros(&self, layer: u32) -> Option<f64> {
        // Zeros below a threshold are none that may be skipped.
        self.neurons(layer).filter(|counts| counts.is_exact())?.zeros(0, 1)
    }

    fn hottest(&self, layer: u32, expert: usize) -> Option<Vec<usize>> {
        let counts = self.neurons(layer).filter(|counts| expert < counts.experts())?;
        Some(counts.hottest(expert, 1))
    }
}

/// Nothing was seen: no zeros are known, and neurons stay where they are.
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
type Halves = [WeightId; 2];

/// Turns experts into neurons wherever that changes no result and `skip` asks for it; `auto` where enough zeros were seen.
///
/// # Errors
/// `on` for a model none of whose experts can be turned.
pub fn cluster(module: &mut Module, skip: Skip, seen: &dyn Activity) -> Result<()> {
    let wanted = |layer, format| match skip {
        Skip::Off => false,
        Skip::On => true,
        Skip::Auto => seen.zeros(layer).is_some_and(|zeros| zeros >= worth(format)),
    };
    let mut bundled: HashMap<Halves, WeightId> = HashMap::new();
    let mut entries = std::mem::take(&mut module.entries);
    for node in entries.iter_mut().flat_map(|g| &mut g.nodes) {
        let (Some(layer), Some((op, halves))) = (node.scope.layer, turned(module, node)) else { continue };
        if !wanted(layer, module.weight(halves[0]).format) {
            continue;
        }
        let neurons = *bundled.entry(halves).or_insert_with(|| bundle(module, halves, layer, seen));
        node.op = op;
        node.inputs.truncate(2);
        node.inputs.push(Operand::Weight(neurons));
    }
    module.entries = entries;
    if bundled.is_empty() && skip == Skip::On {
        return Err(Error::input("`skip = \"on\"`, but no expert of this model can be skipped neuron by neuron")
            .because("that takes gates which leave exact zeros (ReLU, dReLU, FATReLU), no biases, and one format for all matrices of an expert")
            .hint("leave `skip` under `[experts]` at `\"auto\"`"));
    }
    crate::passes::rewrite::drop_unused_weights(module);
    Ok(())
}

/// What a node becomes, and whose weights it has; `None`: it stays.
fn turned(module: &Module, node: &Node) -> Option<(Op, Halves)> {
    let &Op::ExpertFfn { glu, bias: false, fixed: false } = &node.op else { return None };
    let &[_, _, Operand::Weight(gate_up), Operand::Weight(down)] = node.inputs.as_slice() else {
        return None;
    };
    let one_format = module.weight(gate_up).format == module.weight(down).format;
    (glu.skips() && one_format).then_some((Op::NeuronFfn { glu }, [gate_up, down]))
}

/// The weight of bundles.
fn bundle(module: &mut Module, [gate_up, down]: Halves, layer: u32, seen: &dyn Activity) -> WeightId {
    let (gate_up, down) = (module.weight(gate_up), module.weight(down));
    let (experts, inter, hidden) = (gate_up.lead(), gate_up.rows() / 2, gate_up.cols());
    let half = |start| WeightExpr::Slice {
        axis: Axis::Rows,
        start,
        step: 1,
        len: inter,
        of: Box::new(gate_up.expr.clone()),
    };
    let columns = WeightExpr::Transpose(Box::new(down.expr.clone()));
    let parts = WeightExpr::Concat { axis: Axis::Cols, of: vec![half(0), half(inter), columns] };
    let orders: Vec<_> = (0..experts).map(|e| seen.hottest(layer, e)).collect();
    let expr = match order(&orders, inter) {
        Some(order) => WeightExpr::Arrange { order, of: Box::new(parts) },
        None => parts,
    };
    let stem = gate_up.name.strip_suffix("gate_up").unwrap_or(&gate_up.name);
    let weight = Weight {
        name: format!("{stem}neurons"),
        shape: vec![experts, inter, PARTS * hidden],
        class: gate_up.class,
        format: gate_up.format,
        expr,
    };
    module.weights.push(weight);
    WeightId((module.weights.len() - 1) as u32)
}

/// The orders of all experts in one; `None` where nobody leaves his place. An expert of whom nothing was seen, or something
/// else than his neurons, keeps his order.
fn order(experts: &[Option<Vec<usize>>], inter: usize) -> Option<Vec<u32>> {
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
    fn the_hottest_come_first_where_zeros_pay() {
        let mut module = experts("relu");
        cluster(&mut module, Skip::Auto, &Backwards).unwrap();
        moec_ir::verify::module(&module).unwrap();
        let names: Vec<&str> = module.weights.iter().map(|w| w.name.as_str()).collect();
        assert_eq!(names, ["embed", "layers.1.gate_up", "layers.1.down", "router", "layers.0.neurons"]);
        let text = module.weights[4].expr.to_string();
        assert!(text.starts_with("arrange [0, 1, 2, 2, 1, 0] (concat cols(slice rows 0:3:1"), "{text}");
        // Nothing was seen: nothing is known to pay.
        let mut module = experts("relu");
        cluster(&mut module, Skip::Auto, &Unseen).unwrap();
        assert_eq!(module, experts("relu"));
        cluster(&mut module, Skip::Off, &Backwards).unwrap();
        assert_eq!(module, experts("relu"));
    }

    #[test]
    fn gates_without_zeros_stay_and_are_refused_by_name() {
        let mut module = experts("silu");
        cluster(&mut module, Skip::Auto, &Backwards).unwrap();
        assert_eq!(module, experts("silu"));
        let refused = cluster(&mut module, Skip::On, &Backwards).unwrap_err();
        assert!(refused.to_string().contains("no expert of this model"), "{refused}");
    }

    #[test]
    fn an_order_that_is_none_changes_nothing() {
        let order = |o: &[&[usize]]| order(&o.iter().map(|o| Some(o.to_vec())).collect::<Vec<_>>(), 3);
        assert_eq!(order(&[&[0, 1, 2], &[2, 2, 0]]), None);
        assert_eq!(order(&[&[0, 1, 2], &[1, 0]]), None);
        assert_eq!(order(&[&[1, 0, 2], &[7, 1, 2]]), Some(vec![1, 0, 2, 0, 1, 2]));
    }
}
