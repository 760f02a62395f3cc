//! Functions of expert groups, on rows that fill their slices to different heights.

use super::{Failed, WeylNumbers};
use crate::backend::{function as function_name, sizes};
use crate::exec::{Executor, States, Tensor as Half};
use crate::package::Package;
use moec_backend::Distance;
use moec_backend::LayerExperts;
use moec_ir::eval::{Arg, Evaluator, Tensor, op};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::ExpertTable;
use moec_ir::{Module, Op};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Runs a function on rows that fill its slices to different heights, and the evaluator on the same.
pub(super) fn execute(
    package: &Arc<Package>,
    function: &str,
    module: &Module,
    evaluator: &mut Evaluator<'_>,
    table: &ExpertTable,
    group: usize,
) -> Result<Distance, Failed> {
    let members = &table.groups[group].experts;
    let mut sizes = sizes(table, group).into_iter();
    let capacity = sizes.find(|&size| function_name(size) == function);
    let capacity = capacity.ok_or("the placement has no function of this name")? as usize;
    let experts = LayerExperts::of(module, table.layer).ok_or("the Graph has no experts in this layer")?;
    let hidden = module.weight(experts.gate_up).cols();
    // Slice g holds a row less than the one before it, so that padding is there, and nothing depends on it.
    let filled: Vec<usize> = (0..members.len()).map(|g| capacity - g % capacity).collect();
    let mut rows = vec![0.0_f32; members.len() * capacity * hidden];
    let mut dense = Vec::new();
    let mut random = WeylNumbers::default();
    for (g, &n) in filled.iter().enumerate() {
        for x in &mut rows[g * capacity * hidden..(g * capacity + n) * hidden] {
            *x = random.number();
            dense.push(*x);
        }
    }
    let shape = [members.len() * capacity, hidden, 1, 1];
    let x = Half::f16(&shape, &rows).ok_or("rows of another size")?;
    let executor = Executor::new(package, Some(function))?;
    let out = executor.run(&BTreeMap::from([("x".to_owned(), x)]), &mut States::default())?;
    let y = out.get("y").ok_or("the function has no result `y`")?.to_f32();
    let got: Vec<f32> = filled
        .iter()
        .enumerate()
        .flat_map(|(g, &n)| y.get(g * capacity * hidden..(g * capacity + n) * hidden).unwrap_or_default())
        .copied()
        .collect();

    // The same rows, each of one expert.
    let total: usize = filled.iter().sum();
    let layout = DispatchLayout { rows: total, k: 1, experts: table.experts.len() };
    let mut words = vec![0; layout.words()];
    (words[0], words[1]) = (members.len() as i32, total as i32);
    let mut slot = 0;
    for (i, (&e, &n)) in members.iter().zip(&filled).enumerate() {
        words[layout.expert() + i] = e as i32;
        words[layout.start() + i] = slot as i32;
        for _ in 0..n {
            words[layout.token() + slot] = slot as i32;
            words[layout.slot() + slot] = slot as i32;
            slot += 1;
        }
    }
    words[layout.start() + members.len()] = slot as i32;
    let inputs = [Tensor::f32([total, hidden], dense), Tensor::i32([layout.words()], words)];
    let ids = [experts.gate_up, experts.down].into_iter().chain(experts.biases.into_iter().flatten());
    let weights = ids.map(|id| evaluator.weight(id)).collect::<Result<Vec<_>, _>>()?;
    let args = inputs.iter().map(Arg::Tensor).chain(weights.iter().map(|w| Arg::Tensor(w))).collect();
    let node = Op::ExpertFfn { glu: experts.glu, bias: experts.biases.is_some(), fixed: false };
    let want = op(&node, args)?;
    let want = want.first().ok_or("the evaluator returned nothing")?;
    Ok(Distance::of(&Tensor::f32([total, hidden], got), want, total * hidden))
}
