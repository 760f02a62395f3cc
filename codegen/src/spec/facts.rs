//! What a kernel tells of itself: work grid, layout of its weight, arguments.

use super::schedule::Schedule;
use super::{
    CACHE_ROWS, Compute, EMBED_ROWS, KernelSpec, MapOp, NEURON_COLUMNS, NEURONS, NormKind, ROWS, RowNorm,
    WeightOrder,
};
use crate::machine::Isa;
use moec_ir::plan::{Grid, Layout, Results};
use moec_ir::types::Format;

impl KernelSpec {
    /// Work items.
    pub fn grid(&self, isa: &Isa) -> Grid {
        let tiles = |rows: usize, tiles: usize| Grid::Tiles { rows: rows as u32, tiles: tiles as u32 };
        match self {
            Self::Embed { .. } => tiles(EMBED_ROWS, 1),
            Self::CacheWrite { heads, each, .. } => tiles(CACHE_ROWS, heads / (*each).max(1)),
            Self::Linear { n, groups, glu, schedule, .. } => {
                tiles(schedule.rows, groups * panels(isa, *n, glu.is_some()))
            }
            Self::Attention { desc, rows, splits, .. } => tiles(*rows, desc.kv_heads * splits),
            Self::AttentionMerge { heads, .. } => tiles(1, *heads),
            Self::ExpertGateUp { inter, glu, .. } => {
                let tiles = panels(isa, glu.projections() * inter, glu.is_gated());
                Grid::Experts { table: 1, tiles: tiles as u32 }
            }
            Self::ExpertDown { hidden, .. } => {
                Grid::Experts { table: 1, tiles: panels(isa, *hidden, false) as u32 }
            }
            Self::NeuronUp { inter, .. }
            | Self::NeuronPredict { inter, .. }
            | Self::NeuronGate { inter, .. }
            | Self::NeuronUpAt { inter, .. } => {
                Grid::Experts { table: 1, tiles: inter.div_ceil(NEURONS) as u32 }
            }
            Self::NeuronDown { hidden, .. } | Self::NeuronDownAt { hidden, .. } => {
                Grid::Experts { table: 1, tiles: hidden.div_ceil(NEURON_COLUMNS) as u32 }
            }
            Self::Norm { .. }
            | Self::Quantise { .. }
            | Self::Rope { .. }
            | Self::Router { .. }
            | Self::Combine { .. }
            | Self::Map { .. }
            | Self::Copy { .. }
            | Self::Softmax { .. }
            | Self::ZeroExperts { .. }
            | Self::GatherRows { .. } => tiles(ROWS, 1),
            Self::Recurrence(of) => of.kernel().grid(isa),
        }
    }

    /// Layout of its weight matrix, if it reads one.
    pub fn layout(&self, isa: &Isa) -> Option<Layout> {
        let nr = isa.nr as u32;
        match self {
            Self::Embed { panels: false, .. } => Some(Layout::Rows),
            &Self::NeuronUp { sketch, .. }
            | &Self::NeuronDown { sketch, .. }
            | &Self::ExpertGateUp { order: WeightOrder::Neurons { sketch }, .. }
            | &Self::ExpertDown { order: WeightOrder::Neurons { sketch }, .. } => {
                Some(Layout::Neurons { sketch })
            }
            Self::NeuronGate { .. }
            | Self::NeuronPredict { .. }
            | Self::ExpertGateUp { order: WeightOrder::Apart, .. } => Some(Layout::Gates),
            Self::NeuronUpAt { .. }
            | Self::NeuronDownAt { .. }
            | Self::ExpertDown { order: WeightOrder::Apart, .. } => Some(Layout::Rests),
            Self::ExpertGateUp { glu, .. } if !glu.is_gated() => Some(Layout::Panels { nr }),
            Self::Linear { glu: Some(_), .. } | Self::ExpertGateUp { .. } => Some(Layout::GluPanels { nr }),
            Self::Embed { panels: true, .. } | Self::Linear { glu: None, .. } | Self::ExpertDown { .. } => {
                Some(Layout::Panels { nr })
            }
            _ => None,
        }
    }

    /// How it cuts its work, if it multiplies by a matrix.
    pub fn schedule(&self) -> Option<Schedule> {
        match self {
            Self::Linear { schedule, .. }
            | Self::ExpertGateUp { schedule, .. }
            | Self::ExpertDown { schedule, .. } => Some(*schedule),
            _ => None,
        }
    }

    /// The same kernel with its work cut otherwise; nothing changes where there is no matrix.
    #[must_use]
    pub fn with_schedule(&self, to: Schedule) -> Self {
        let mut spec = self.clone();
        if let Self::Linear { schedule, .. }
        | Self::ExpertGateUp { schedule, .. }
        | Self::ExpertDown { schedule, .. } = &mut spec
        {
            *schedule = to;
        }
        spec
    }

    /// Format of its matrix, if it multiplies by one.
    pub fn weight_format(&self) -> Option<Format> {
        match self {
            Self::Linear { format, .. }
            | Self::ExpertGateUp { format, .. }
            | Self::ExpertDown { format, .. } => Some(*format),
            _ => None,
        }
    }

    /// What it does, in a word.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Embed { .. } => "embed",
            Self::Norm { .. } => "norm",
            Self::Quantise { .. } => "quantise",
            Self::Linear { .. } => "linear",
            Self::Rope { .. } => "rope",
            Self::CacheWrite { .. } => "cache_write",
            Self::Attention { .. } => "attention",
            Self::AttentionMerge { .. } => "attention_merge",
            Self::Router { .. } => "router",
            Self::ExpertGateUp { .. } => "expert_gate_up",
            Self::ExpertDown { .. } => "expert_down",
            Self::NeuronUp { .. } => "neuron_up",
            Self::NeuronPredict { .. } => "neuron_predict",
            Self::NeuronDown { .. } => "neuron_down",
            Self::NeuronGate { .. } => "neuron_gate",
            Self::NeuronUpAt { .. } => "neuron_up_at",
            Self::NeuronDownAt { .. } => "neuron_down_at",
            Self::Combine { .. } => "combine",
            Self::Map { .. } => "map",
            Self::Copy { .. } => "copy",
            Self::Softmax { .. } => "softmax",
            Self::GatherRows { .. } => "gather_rows",
            Self::ZeroExperts { .. } => "zero_experts",
            Self::Recurrence(of) => of.kernel().kind(),
        }
    }

    /// In what form it multiplies, if it multiplies by a matrix.
    pub fn compute(&self) -> Option<Compute> {
        match self {
            Self::Linear { compute, .. }
            | Self::ExpertGateUp { compute, .. }
            | Self::ExpertDown { compute, .. } => Some(*compute),
            _ => None,
        }
    }

    /// Arguments that it writes.
    pub fn results(&self) -> Results {
        match self {
            Self::CacheWrite { .. } => Results::new([0]).unwrap_or_default(),
            Self::NeuronUpAt { .. } => Results::new([3]).unwrap_or_default(),
            Self::Norm { outs, .. } => Results::last(outs.len(), self.args()),
            Self::Router { .. }
            | Self::ZeroExperts { .. }
            | Self::NeuronUp { .. }
            | Self::NeuronGate { .. } => Results::last(2, self.args()),
            Self::Embed { .. }
            | Self::Quantise { .. }
            | Self::Linear { .. }
            | Self::Rope { .. }
            | Self::Attention { .. }
            | Self::AttentionMerge { .. }
            | Self::ExpertGateUp { .. }
            | Self::ExpertDown { .. }
            | Self::NeuronPredict { .. }
            | Self::NeuronDown { .. }
            | Self::NeuronDownAt { .. }
            | Self::Combine { .. }
            | Self::Map { .. }
            | Self::Copy { .. }
            | Self::Softmax { .. }
            | Self::GatherRows { .. } => Results::last(1, self.args()),
            Self::Recurrence(of) => of.kernel().results(),
        }
    }

    /// Number of arguments.
    pub fn args(&self) -> usize {
        let opt = usize::from;
        match self {
            Self::Embed { .. } | Self::GatherRows { .. } => 3,
            Self::Rope { norm, .. } => 3 + opt(weighted(*norm)),
            Self::Norm { kind, weight, outs, .. } => {
                1 + opt(*weight) + opt(*kind == NormKind::Layer) + outs.len()
            }
            Self::Linear { bias, residual_ld, .. } => 3 + opt(*bias) + opt(residual_ld.is_some()),
            Self::CacheWrite { norm, rotation, .. } => 4 + opt(weighted(*norm)) + opt(rotation.is_some()),
            Self::Attention { desc, splits, .. } => 5 + opt(!desc.v_from_k) + opt(desc.sinks && *splits == 1),
            Self::AttentionMerge { sinks, .. } => 2 + opt(*sinks),
            Self::Router { desc, .. } => 3 + opt(desc.select_bias),
            Self::ExpertGateUp { bias, order, .. } => 4 + opt(*bias) + opt(*order == WeightOrder::Apart),
            Self::ExpertDown { bias, .. } => 4 + opt(*bias),
            Self::NeuronPredict { rank, .. } => 5 + opt(rank.is_some()),
            Self::NeuronUp { .. }
            | Self::NeuronDown { .. }
            | Self::NeuronGate { .. }
            | Self::NeuronUpAt { .. }
            | Self::NeuronDownAt { .. } => 5,
            Self::Combine { residual_ld, .. } => 4 + opt(residual_ld.is_some()),
            Self::Map { op, .. } => match op {
                MapOp::Scale { .. }
                | MapOp::SoftCap { .. }
                | MapOp::Clamp { .. }
                | MapOp::Act(_)
                | MapOp::Softplus => 2,
                MapOp::Add { .. }
                | MapOp::Mul { .. }
                | MapOp::MulHeads { .. }
                | MapOp::ScaleByPosition { .. }
                | MapOp::Glu { .. }
                | MapOp::ScaleCols => 3,
            },
            Self::Copy { .. } | Self::Softmax { .. } | Self::Quantise { .. } => 2,
            Self::ZeroExperts { .. } => 4,
            Self::Recurrence(of) => of.kernel().args(),
        }
    }
}

/// Whether a norm has a weight.
fn weighted(norm: Option<RowNorm>) -> bool {
    norm.is_some_and(|n| n.weight)
}

/// Panels of a weight of `n` rows. A gated panel holds half of its columns from either half of the rows.
pub(crate) fn panels(isa: &Isa, n: usize, glu: bool) -> usize {
    if glu { (n / 2).div_ceil(isa.nr / 2) } else { n.div_ceil(isa.nr) }
}
