//! Units of groups in entry points that decode (NPUMoE, §4.3 and §5.8).
//!
//! The rule is that of prompts, with the loads of a batch: a group is launched if launching, waiting and
//! computing cost less than its experts cost on the CPU, on average over calls. Such a launch is mostly
//! padding, so the graph gets a function for the rows of the batch, which shares its weights, if its number
//! of sizes permits. No row of a batch is past a capacity: a graph with less room stays with prompts.

use moec_costs::units::{ExpertSize, UnitPreference, Units};
use moec_ir::placement::{DecodeUnit, ExpertGroup, ExpertTable};
use moec_profile::loads::LayerLoads;

/// Inputs of the decision on the units of one layer in decoding.
#[derive(Clone, Copy, Debug)]
pub struct Decoding<'a> {
    /// Rows of the entry points that decode, ascending.
    pub batches: &'a [u32],
    /// Preferred unit of groups.
    pub preference: UnitPreference,
    /// True if hot neurons of experts have networks of their own, which decoding launches instead.
    pub hot: bool,
    /// Largest number of sizes that a graph has functions for.
    pub sizes: usize,
    /// Size of one of the layer's experts.
    pub size: ExpertSize,
}

/// Assigns every group of a layer to a unit, for each batch that is decoded.
pub fn assign_layer_decoding(
    table: &mut ExpertTable,
    layer: &LayerLoads,
    units: &Units<'_>,
    decoding: Decoding<'_>,
) {
    let loads: Vec<LayerLoads> = decoding.batches.iter().map(|&batch| layer.decoding(batch)).collect();
    for group in &mut table.groups {
        let Some(&capacity) = table.tiers.get(group.tier as usize) else { continue };
        group.decode.clear();
        for (loads, &batch) in loads.iter().zip(decoding.batches) {
            let sizes = with_batch(group, capacity, batch, units.alignment(), decoding.sizes);
            let unit = unit(group, loads, units, &decoding, (batch, &sizes));
            if unit.unit == units.npu_index() && sizes.len() > 1 {
                group.sizes = sizes;
            }
            group.decode.push(unit);
        }
    }
}

/// Sizes of a group's graph if it decodes a batch: one for its rows, if that is less than its capacity and
/// one more is permitted.
fn with_batch(group: &ExpertGroup, capacity: u32, batch: u32, align: u32, most: usize) -> Vec<u32> {
    let mut sizes = if group.sizes.is_empty() { vec![capacity] } else { group.sizes.clone() };
    let rows = batch.next_multiple_of(align.max(1));
    if let Err(at) = sizes.binary_search(&rows)
        && at < sizes.len()
        && sizes.len() < most
    {
        sizes.insert(at, rows);
    }
    sizes
}

/// Unit of a group in the entry points that decode a batch, where its graph has these sizes.
fn unit(
    group: &ExpertGroup,
    loads: &LayerLoads,
    units: &Units<'_>,
    decoding: &Decoding<'_>,
    (batch, sizes): (u32, &[u32]),
) -> DecodeUnit {
    let experts: Vec<usize> = group.experts.iter().map(|&e| e as usize).collect();
    let on_cpu: f64 = experts.iter().map(|&e| units.cpu_us(loads, e, decoding.size)).sum();
    let on_npu = units.npu_us(loads, &experts, sizes, decoding.size);
    let rows: f64 = experts.iter().map(|&e| loads.mean(e, batch)).sum();
    let costs = format!("{rows:.2} rows per call; {on_npu:.1} µs on the NPU, {on_cpu:.1} µs on the CPU");
    let room = sizes.last().copied().unwrap_or(0);
    let (there, why) = match decoding.preference {
        UnitPreference::Cpu => (false, format!("requested: {costs}")),
        _ if decoding.hot => (false, "`placement.hot` requests networks of hot neurons".to_owned()),
        _ if batch > room => (false, format!("its graph has room for {room} rows of an expert")),
        UnitPreference::Graphs => (true, format!("requested: {costs}")),
        UnitPreference::Auto if on_npu < on_cpu => (true, format!("hot: {costs}")),
        UnitPreference::Auto => (false, format!("cold: {costs}")),
    };
    let unit = if there { units.npu_index() } else { units.cpu_index() };
    let cost = |u: u32| if u == units.npu_index() { on_npu as f32 } else { on_cpu as f32 };
    let cost_us = (0..units.device.units.len() as u32).map(cost).collect();
    DecodeUnit { batch, unit, cost_us, why }
}

#[cfg(test)]
mod tests;
