//! Experts that several units can run, assigned anew in every step (TriMoE, §4.2 and §4.3; HybriMoE, §IV).
//!
//! A plan says who can run which expert, what it costs there, and where its weights lie when the first step begins. Who does run
//! it is decided while the plan runs, from the rows that the router has given it.

use crate::op::Score;
use bincode::{Decode, Encode};

/// How experts are assigned to units while the plan runs.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Schedule {
    /// The unit for hot experts: index into [`crate::plan::Plan::units`]. Its memory holds `frames` experts of each layer.
    pub hot: Option<u32>,
    /// The unit for cold experts: memory modules that compute.
    pub cold: Option<u32>,
    /// Modules of that unit.
    pub modules: u32,
    /// Experts that the memory of the hot unit has room for: of a layer, or of all layers together where [`Self::hybrid`] is.
    pub frames: u32,
    /// Whether experts change their places between steps.
    pub moves: bool,
    /// How the first assignment is refined.
    pub refine: Refine,
    /// How a unit with frames and the processor divide experts, where no modules compute: then frames are shared by all layers.
    pub hybrid: Option<Hybrid>,
    /// Microseconds that attention and dense layers leave between the experts of two layers: what moves there is hidden.
    pub window_us: f64,
    /// Bytes of the weights of one expert.
    pub expert_bytes: u64,
    /// Bytes of a row on its way to an expert and back.
    pub row_bytes: u64,
    /// What one expert costs.
    pub times: ExpertTimes,
    /// Layers, ascending by their homes.
    pub layers: Vec<ScheduledLayer>,
}

/// How experts are divided between the frames of a unit and the processor (HybriMoE, §IV). All layers are alike.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Hybrid {
    /// Who divides the experts of a prompt, and of tokens that are decoded: names of the runtime's table of policies.
    pub divides: [String; 2],
    /// The policy of the frames with its parameters, as `[memory] policy` has it. Experts in `pinned` never leave.
    pub keeps: String,
    /// Layers ahead whose experts are brought while the link is idle.
    pub ahead: u32,
    /// Microseconds that the first expert of a layer takes more on the unit, on the processor, and on the link (Figure 3e).
    pub first_us: [f64; 3],
    /// Experts per token.
    pub k: u32,
    /// How the router's logits become scores.
    pub score: Score,
    /// Experts that never leave their frames, by layer of the schedule, ascending.
    pub pinned: Vec<(u32, u32)>,
}

/// How an assignment is refined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Refine {
    /// Not at all: every expert goes where it costs least.
    None,
    /// As the paper writes it (TriMoE, §4.2): the costliest expert of the busiest unit moves.
    Bottleneck,
    /// Further, over plateaus on which that stalls.
    #[default]
    Full,
}

impl Refine {
    /// Every one.
    pub const ALL: [Self; 3] = [Self::None, Self::Bottleneck, Self::Full];

    /// Name in the text form and in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Bottleneck => "bottleneck",
            Self::Full => "full",
        }
    }
}

/// Microseconds of one expert, all its matrices. Curves are points `(rows, µs)`, ascending by rows.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct ExpertTimes {
    /// Computing on the hot unit; empty: there is none.
    pub hot: Vec<(u32, f64)>,
    /// On the processor.
    pub processor: Vec<(u32, f64)>,
    /// On one module; empty: there is none.
    pub cold: Vec<(u32, f64)>,
    /// Bringing the weights to the hot unit's memory.
    pub bring_us: f64,
    /// Reading weights that lie over all modules from the processor.
    pub striped_us: f64,
    /// Reading weights that lie in one module from the processor.
    pub localized_us: f64,
    /// Reading weights inside of a module.
    pub internal_us: f64,
    /// Moving them from one module to another.
    pub link_us: f64,
}

/// Experts of a layer, as they lie when the first step begins.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ScheduledLayer {
    /// Index into [`crate::plan::Plan::homes`].
    pub homes: u32,
    /// Segments with a matrix for each of its experts, ascending: what moves when an expert does.
    pub segments: Vec<u32>,
    /// The same matrices as the hot unit reads them, in the order of `segments`; empty: it reads those.
    pub brought: Vec<u32>,
    /// The module of each expert; −1: it lies over all of them.
    pub modules: Vec<i32>,
    /// Experts that the memory of the hot unit holds, ascending.
    pub cached: Vec<u32>,
}

/// Experts of a layer that streams of commands compute, for as many rows as a call has.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct StreamSet {
    /// Layer.
    pub layer: u32,
    /// Index into [`crate::plan::Plan::units`]: who runs them.
    pub unit: u32,
    /// Path of the artifact that holds a stream for each expert, relative to the bundle.
    pub artifact: String,
    /// Experts of the layer.
    pub experts: u32,
    /// Channels of a row.
    pub hidden: u32,
    /// Channels between the two halves of an expert.
    pub inner: u32,
    /// Whether both biases are there.
    pub bias: bool,
}

impl ScheduledLayer {
    /// Segments whose matrices are brought to the hot unit.
    pub fn to_bring(&self) -> &[u32] {
        if self.brought.is_empty() { &self.segments } else { &self.brought }
    }
}

impl Schedule {
    /// Whether every number is finite and none is negative.
    pub fn is_finite(&self) -> bool {
        let t = &self.times;
        let good = |x: &f64| x.is_finite() && *x >= 0.0;
        let single = [self.window_us, t.bring_us, t.striped_us, t.localized_us, t.internal_us, t.link_us];
        let curves = [&t.hot, &t.processor, &t.cold];
        let first = self.hybrid.iter().flat_map(|h| &h.first_us);
        single.iter().chain(first).all(good) && curves.iter().all(|c| c.iter().all(|(_, us)| good(us)))
    }
}
