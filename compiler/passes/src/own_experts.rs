//! Pass `own_experts`: the experts of each host as weights of their own, for its file.
//!
//! An expert has one host ([`assign_units`](super::assign_units)), and no other host stores it. Matrices of several
//! experts are one weight of the Graph. This pass declares the experts of each host as a weight, and the whole one
//! as these joined. The computation stays as it is.
//!
//! ```text
//! gate_up: [8, N, K]    →    gate_up.owner_0: [4, N, K], gate_up.owner_1: [4, N, K]
//! ```

use moec_base::error::{Error, Result};
use moec_ir::plan::{ExpertLayer, ExpertPlacement};
use moec_ir::{Axis, Module, Op, Operand, Weight, WeightExpr, WeightId};
use std::collections::{BTreeMap, BTreeSet};

/// Most units of a plan.
const MOST: u32 = 64;

/// Weight of the experts of one unit.
fn name(whole: &str, unit: u32) -> String {
    format!("{whole}.owner_{unit}")
}

/// Weights that a weight may be joined of, in order.
pub fn names(whole: &str) -> impl Iterator<Item = String> {
    (0..MOST).map(move |unit| name(whole, unit))
}

/// Declares the experts of each unit of every layer as weights.
///
/// # Errors
/// A bug of the compiler: experts of a unit that do not follow each other.
pub fn own_experts(module: &mut Module, experts: &ExpertPlacement) -> Result<()> {
    let mut done = BTreeSet::new();
    let nodes = module.entries.iter().flat_map(|g| &g.nodes);
    let read: Vec<(WeightId, &ExpertLayer)> = nodes
        .filter(|n| matches!(n.op, Op::ExpertFfn { fixed: false, .. }))
        .filter_map(|n| Some((n, experts.of_layer(n.scope.layer)?.1)))
        .flat_map(|(n, of)| n.inputs.iter().filter_map(move |i| Some((weight(*i)?, of))))
        .filter(|&(id, _)| module.weight(id).shape.len() > 2 && done.insert(id))
        .collect();
    for (id, of) in read {
        let whole = module.weight(id).clone();
        let &[_, rows, _] = whole.shape.as_slice() else {
            return Err(Error::bug("experts without matrices"));
        };
        let mut parts = Vec::new();
        for &unit in &of.units {
            let own = of.on(unit);
            let (Some(&first), len) = (own.first(), own.len()) else { continue };
            if own.last().is_none_or(|&last| last - first + 1 != len as u32) {
                return Err(Error::bug(format!("experts {own:?} of a host")));
            }
            let expr = matrices(&whole.expr, rows, first as usize, len);
            parts.push(WeightExpr::Join(Box::new(expr.clone())));
            let mut shape = whole.shape.clone();
            shape[0] = len;
            module.weights.push(Weight { name: name(&whole.name, unit), shape, expr, ..whole.clone() });
        }
        let joined = WeightExpr::Concat { axis: Axis::Rows, of: parts };
        let split = WeightExpr::Split { heads: whole.shape[0], of: Box::new(joined) };
        if let Some(weight) = module.weights.get_mut(id.0 as usize) {
            weight.expr = split;
        }
    }
    Ok(())
}

/// `len` matrices of `rows` rows from the first on.
fn matrices(of: &WeightExpr, rows: usize, first: usize, len: usize) -> WeightExpr {
    let joined = Box::new(WeightExpr::Join(Box::new(of.clone())));
    let own =
        WeightExpr::Slice { axis: Axis::Rows, start: first * rows, step: 1, len: len * rows, of: joined };
    WeightExpr::Split { heads: len, of: Box::new(own) }
}

/// The weight that an operand is.
const fn weight(input: Operand) -> Option<WeightId> {
    match input {
        Operand::Weight(id) => Some(id),
        Operand::Value(_) | Operand::State(_) => None,
    }
}

/// Weights that [`own_experts`] has declared, by the whole weight and the unit.
pub(crate) fn owned(module: &Module) -> BTreeMap<(WeightId, u32), WeightId> {
    let ids = || (0..).map(WeightId).zip(&module.weights);
    let by_name: BTreeMap<&str, WeightId> = ids().map(|(id, w)| (w.name.as_str(), id)).collect();
    let of = |(id, weight): (WeightId, &Weight)| {
        let (whole, unit) = weight.name.rsplit_once(".owner_")?;
        Some(((*by_name.get(whole)?, unit.parse().ok()?), id))
    };
    ids().filter_map(of).collect()
}
