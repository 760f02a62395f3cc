//! Unit of attention, mixers and the rest while the CPU and cache frames share the experts.

use super::{UnitAssignment, most, of_rest, of_role, runs, size, stored};
use crate::decisions::Decision;
use crate::plan_expert_schedule::window_us;
use moec_base::error::Result;
use moec_config::{PlacementConfig, UnitSetting};
use moec_costs::units::{DynamicUnit, UnitList};
use moec_ir::plan::ExpertTable;
use moec_ir::{Module, Op, Operand, Role, WeightId};
use moec_runtime::schedule::GpuResidents;
use moec_targets::backends;
use std::collections::BTreeSet;

/// Reason in the placement.
pub(super) const WHY: &str = "costs less there than on the CPU, beside cache frames";

/// The unit with cache frames, `named` under `[placement]` or the first accelerator, if attention, mixers and the rest are to be there (HybriMoE, §II-A), and the
/// decision about that. It gets them if nothing is requested for them, if it runs them all, if they take half
/// of its memory at most (the other half is for frames), and if a decoded token costs less there. The decision
/// is `None` if the question does not arise.
///
/// # Errors
/// A device without units.
pub(super) fn unit<'a>(
    module: &Module,
    list: &UnitList<'a>,
    config: &PlacementConfig,
    assignment: &UnitAssignment,
    named: Option<u32>,
    tables: &[ExpertTable],
) -> Result<(Option<DynamicUnit<'a>>, Option<Decision>)> {
    let requested = [&config.attention, &config.mixer, &config.rest];
    let auto = requested.into_iter().all(|setting| matches!(setting, UnitSetting::Auto));
    let framed = config.policy.is_some_and(|system| system.gpu_residents != GpuResidents::Layers);
    let hot = named.map_or(list.accelerators.first().copied(), |index| list.accelerator(index));
    let hot = hot.filter(|hot| auto && framed && assignment.memory(hot.index) > 0);
    let has_kernels = |hot: &DynamicUnit<'_>| backends::gpu_kernels(hot.backend.name()).is_some();
    let Some(hot) = hot.filter(has_kernels) else { return Ok((None, None)) };
    let index = hot.index;
    let there = UnitAssignment { attention: index, mixer: index, rest: index, ..assignment.clone() };
    let mixing = [Role::Attention, Role::Mixer].into_iter().flat_map(|role| of_role(module, role));
    let mut all = mixing.chain(of_rest(module, &there));
    let decoding = module.entries.iter().filter(|g| !g.kind.is_prefill()).min_by_key(|g| g.kind.rows());
    let (Some(graph), true) = (decoding, all.all(|(_, node)| runs(hot, node).is_ok())) else {
        return Ok((None, None));
    };
    // A token crosses the link for its router and its experts, in both directions.
    let device = list.device;
    let memories = device.cpu_memory().zip(device.memory_of(hot.unit));
    let crossings = memories.and_then(|(host, memory)| {
        Some(device.transfer_us(host, memory, 0.0)? + device.transfer_us(memory, host, 0.0)?)
    });
    let in_layers = || graph.nodes.iter().filter(|n| n.scope.layer.is_some());
    let layers = in_layers().filter_map(|n| n.scope.layer).collect::<BTreeSet<_>>().len().max(1);
    let launches = in_layers().filter(|n| there.of_node(n) == index).count() as f64 / layers as f64;
    let there_us = window_us(module, graph, device, Some(hot))?
        + launches * hot.unit.launch_us()
        + 2.0 * crossings.unwrap_or(f64::INFINITY);
    let here_us = window_us(module, graph, device, None)?;
    let bytes = dense_bytes(module);
    let half = most(assignment, index) / 2;
    let frames = tables.iter().map(|table| size(module, table.layer).bytes).sum::<u64>();
    let fits = bytes <= half && frames <= half;
    let cheaper = there_us < here_us;
    let (chosen, why) = match (fits, cheaper) {
        (false, _) => (0, "with the frames they do not fit in the unit's memory"),
        (true, false) => (0, "they cost less on the CPU"),
        (true, true) => (index, WHY),
    };
    let name = |unit: u32| format!("on `{}`", device.units.get(unit as usize).map_or("?", |u| &u.name));
    let decision = Decision::new("assign_units", "attention and dense layers", name(chosen), why)
        .with(&[("dense_bytes", bytes as f64)])
        .or(name(0), &[("layer_us", here_us)])
        .or(name(index), &[("layer_us", there_us)]);
    Ok(((chosen == index).then_some(hot), Some(decision)))
}

/// Bytes of all states, and of all weights except those of experts.
fn dense_bytes(module: &Module) -> u64 {
    let nodes = module.entries.iter().flat_map(|g| &g.nodes);
    let experts = nodes.filter(|n| matches!(n.op, Op::ExpertFfn { .. } | Op::NeuronFfn { .. }));
    let weight = |i: &Operand| if let Operand::Weight(w) = i { Some(*w) } else { None };
    let of_experts: BTreeSet<WeightId> = experts.flat_map(|n| n.inputs.iter().filter_map(weight)).collect();
    let dense = (0..).map(WeightId).zip(&module.weights).filter(|(id, _)| !of_experts.contains(id));
    let weights: u64 = dense.map(|(_, weight)| stored(weight)).sum();
    weights + module.states.iter().map(|s| s.ty.bytes() as u64).sum::<u64>()
}
