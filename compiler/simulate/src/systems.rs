//! The systems that are compared, as data: what runs where, in which shapes (NPUMoE, Table 2 and §5.8).
//!
//! What a system does with its experts is decided by the passes that decide for bundles: `tier`, `group`,
//! `assign_residency`.

use moec_base::error::{Error, Result};
use moec_config::ExpertsConfig;
use moec_costs::model::{Model, ModelLayer};
use moec_costs::run::{Placed, Scenario};
use moec_costs::timeline::Queue;
use moec_costs::units::{UnitPreference, Units};
use moec_ir::placement::{ExpertTable, Overflow};
use moec_passes::assign_residency::assign_layer_residency;
use moec_passes::assign_residency::decoding::{Decoding, assign_layer_decoding};
use moec_passes::group::{Options, group_layer};
use moec_passes::tier::tier;
use moec_profile::loads::Loads;

/// A system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct System {
    /// Name in tables and JSON.
    pub name: &'static str,
    /// Queue of attention in prompts.
    pub attention: Queue,
    /// Execution of experts.
    pub experts: ExpertExecution,
    /// Whether decoding takes the cheaper unit by the device's tables, as pass `assign_residency` does; else
    /// it runs where prompts do.
    pub decode_by_cost: bool,
    /// Line of a legend: the paper or project, and what it does with experts.
    pub legend: &'static str,
    /// Source of this description.
    pub source: &'static str,
}

/// Capacities of graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shapes {
    /// One for every expert of every layer: that of the busiest one (NPUMoE, Figure 10b).
    Busiest,
    /// One for every expert of every layer: the whole chunk, which needs no calibration.
    Chunk,
    /// At most so many per layer (NPUMoE, §4.1).
    Tiers(usize),
}

/// Execution of a system's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertExecution {
    /// On the CPU, each with the tokens that chose it.
    Dynamic,
    /// In static graphs.
    Graphs {
        /// Capacities.
        shapes: Shapes,
        /// Experts per graph; none: what costs least.
        group: Option<usize>,
        /// Preferred unit of graphs.
        preference: UnitPreference,
        /// Whether graphs stay on the NPU between launches.
        resident: bool,
    },
}

/// NPUMoE's capacities (§5.1): three.
const TIERED: Shapes = Shapes::Tiers(3);

/// With everything that moec decides.
pub const OURS: System = System {
    name: "ours",
    attention: Queue::Npu,
    experts: ExpertExecution::Graphs {
        shapes: TIERED,
        group: None,
        preference: UnitPreference::Auto,
        resident: true,
    },
    decode_by_cost: true,
    legend: "NPUMoE (paper) with everything that moec decides",
    source: "Table 2; tiers, groups and units by the passes tier, group and assign_residency, one size to a graph",
};

/// Core ML on the CPU.
pub const COREML_CPU: System = System {
    name: "coreml-cpu",
    attention: Queue::Cpu,
    experts: ExpertExecution::Dynamic,
    decode_by_cost: false,
    legend: "Core ML (Apple) on the CPU alone, a baseline of NPUMoE's paper",
    source: "Table 2, Core ML (CPU only)",
};

/// Core ML as it schedules by default.
pub const COREML_NAIVE: System = System {
    name: "coreml-naive",
    attention: Queue::Cpu,
    experts: ExpertExecution::Graphs {
        shapes: Shapes::Busiest,
        group: Some(1),
        preference: UnitPreference::Graphs,
        resident: false,
    },
    decode_by_cost: false,
    legend: "Core ML (Apple) as it schedules by default: one padded graph per expert, none kept on the NPU; a baseline of NPUMoE's paper",
    source: "Table 2, Core ML (naive); one graph per expert, padded (Table 4, Padding), nothing kept resident",
};

/// ANEMLL: dense blocks on the NPU.
pub const ANEMLL: System = System {
    name: "anemll",
    attention: Queue::Npu,
    experts: ExpertExecution::Dynamic,
    decode_by_cost: false,
    legend: "ANEMLL (project): dense blocks on the NPU, experts on the CPU; a baseline of NPUMoE's paper",
    source: "Table 2, ANEMLL",
};

/// One graph per expert, one shape.
pub const BASE: System = System {
    name: "ours-base",
    attention: Queue::Npu,
    experts: ExpertExecution::Graphs {
        shapes: Shapes::Busiest,
        group: Some(1),
        preference: UnitPreference::Graphs,
        resident: true,
    },
    decode_by_cost: true,
    legend: "NPUMoE (paper) without its mechanisms: one graph per expert, all with the capacity of the busiest expert",
    source: "§5.8, Ours-base; the fixed shape is not stated, this is the least that drops nothing",
};

/// The same with the largest shape that can be meant.
pub const BASE_CHUNK: System = System {
    name: "ours-base-chunk",
    experts: ExpertExecution::Graphs {
        shapes: Shapes::Chunk,
        group: Some(1),
        preference: UnitPreference::Graphs,
        resident: true,
    },
    legend: "the same with the capacity of a whole chunk",
    source: "§5.8, Ours-base; the fixed shape is not stated, this is the most that a chunk can need",
    ..BASE
};

/// With tiers.
pub const TIERS: System = System {
    name: "ours-t",
    experts: ExpertExecution::Graphs {
        shapes: TIERED,
        group: Some(1),
        preference: UnitPreference::Graphs,
        resident: true,
    },
    legend: "NPUMoE (paper) with three capacities (tiers), still one graph per expert",
    source: "§5.8, Ours-T",
    ..BASE
};

/// With tiers and groups.
pub const GROUPS: System = System {
    name: "ours-tg",
    experts: ExpertExecution::Graphs {
        shapes: TIERED,
        group: None,
        preference: UnitPreference::Graphs,
        resident: true,
    },
    legend: "NPUMoE (paper) with tiers, and several experts to a graph (groups)",
    source: "§5.8, Ours-TG",
    ..BASE
};

/// Ours and the three baselines of Table 2.
pub const SYSTEMS: [System; 4] = [OURS, COREML_CPU, COREML_NAIVE, ANEMLL];
/// The ablations of Figure 17; ours is Ours-all.
pub const ABLATIONS: [System; 4] = [BASE, BASE_CHUNK, TIERS, GROUPS];

impl System {
    /// The one of that name.
    pub fn named(name: &str) -> Option<Self> {
        SYSTEMS.into_iter().chain(ABLATIONS).find(|s| s.name == name)
    }

    /// Tables that the passes decide for its experts, one per layer that has some; none where experts are
    /// dynamic.
    ///
    /// # Errors
    /// An expert that fits into no graph; loads of other layers.
    pub fn tables(
        &self,
        model: &Model,
        loads: &Loads,
        units: &Units<'_>,
        coverage: f64,
        overflow: Overflow,
    ) -> Result<Option<Vec<ExpertTable>>> {
        let ExpertExecution::Graphs { shapes, group, preference, .. } = self.experts else { return Ok(None) };
        let tiers = if let Shapes::Tiers(most) = shapes { most } else { 1 };
        let mut placement = tier(
            loads,
            units,
            &ExpertsConfig {
                tiers,
                group,
                sizes: 1,
                overflow: Some(overflow),
                coverage,
                ..ExpertsConfig::DEFAULT
            },
            coverage,
        );
        let one = match shapes {
            Shapes::Busiest => placement.experts.iter().flat_map(|t| &t.tiers).copied().max(),
            Shapes::Chunk => Some(loads.chunk.next_multiple_of(units.alignment())),
            Shapes::Tiers(_) => None,
        };
        if let Some(most) = one {
            for table in &mut placement.experts {
                table.tiers = vec![most];
                table.experts.iter_mut().for_each(|row| row.capacity = most);
            }
        }
        for (table, layer) in placement.experts.iter_mut().zip(&loads.layers) {
            let moe = model.layers.iter().find(|l| l.layer == table.layer).and_then(|l| l.experts);
            let moe = moe.filter(|m| m.count == table.experts.len());
            let moe = moe.ok_or_else(|| {
                Error::input(format!("the loads of layer {} are not those of {}", table.layer, model.name))
            })?;
            group_layer(table, layer, moe.size, units, Options { group, sizes: 1, preference })?;
            assign_layer_residency(table, layer, units, preference);
            let decode = if self.decode_by_cost { UnitPreference::Auto } else { preference };
            let decoding =
                Decoding { batches: &[1], preference: decode, hot: false, sizes: 1, size: moe.size };
            assign_layer_decoding(table, layer, units, decoding);
        }
        Ok(Some(placement.experts))
    }

    /// Placement that the passes decide for it.
    ///
    /// # Errors
    /// An expert that fits into no graph.
    pub fn place(&self, scene: &Scenario<'_>) -> Result<Placed> {
        let tables =
            self.tables(scene.model, scene.calibration, scene.units, scene.coverage, scene.overflow)?;
        let mut placed = Placed {
            attention: self.attention,
            decode_attention: self.attention,
            dense: self.attention,
            decode_dense: self.attention,
            decode_batch: 1,
            tables,
            resident: self.is_resident(),
        };
        if self.decode_by_cost {
            // As pass `assign_residency` decides: one launch against what one row costs on the CPU.
            let us = |unit: &moec_device::DeviceUnit, n: u64| unit.matmul_us(1.0, n as f64).unwrap_or(0.0);
            let attention = |l: &ModelLayer| {
                us(scene.units.cpu, l.attention)
                    > us(scene.units.npu, l.attention) + scene.units.npu.launch_us()
            };
            let on_npu = scene.model.layers.iter().all(attention);
            placed.decode_attention = if on_npu { Queue::Npu } else { Queue::Cpu };
            placed.decode_dense = placed.decode_attention;
        }
        Ok(placed)
    }

    /// Whether graphs stay on the NPU.
    pub fn is_resident(&self) -> bool {
        matches!(self.experts, ExpertExecution::Dynamic | ExpertExecution::Graphs { resident: true, .. })
    }
}
