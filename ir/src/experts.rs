//! Units of experts: those that can compute one, the one where it starts, and how one of them is chosen.
//!
//! Experts that several units can run are assigned in every step (TriMoE, §4.2 and §4.3; HybriMoE, §IV).
//! The plan says what an expert costs on each unit, and where its weights are before the first step. The
//! runtime decides from the rows that the router gave the expert. With a fixed unit there is no decision.

use crate::op::{Attributes, Score, attributes, words};
use crate::text::ops::{Parsed, Reader, Word, Writer};
use bincode::{Decode, Encode};

/// Units of experts, of all layers.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub struct ExpertPlacement {
    /// Layers with experts on accelerators, ascending. Experts of other layers are on the CPU, or in static
    /// graphs.
    pub layers: Vec<ExpertLayer>,
    /// Policy that chooses a unit. Layers share it, as they share frames, links and the costs of an expert.
    pub policy: ExpertPolicy,
}

attributes! {
    /// Units of the experts of a layer.
    ///
    /// A `dispatch` of such a layer sorts its table by unit, and also writes a table of each unit's own
    /// experts. All of them use the slots of the whole table, so that the rows of all units are in one
    /// buffer. One `combine` adds them in the order of the router's choices, wherever they were computed.
    #[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
    pub struct ExpertLayer {
        /// Layer.
        pub layer: u32,
        /// The candidates: units that compute experts of the layer, each in its memory, ascending.
        pub units: Vec<u32>,
        /// For each expert, the index into `units` of the unit where it starts.
        pub starts: Vec<u32>,
        /// Segments with a matrix for each expert, ascending: what moves when an expert does. Empty where it
        /// has a fixed unit.
        pub segments: Vec<u32>,
        /// The same matrices as the hot unit reads them, in the order of `segments`; empty: it reads those.
        pub brought: Vec<u32>,
        /// NDP DIMM of each expert where experts are scheduled; −1: it is striped over all of them.
        pub dimms: Vec<i32>,
    }
}

/// Policy that chooses the unit of an expert.
#[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
pub enum ExpertPolicy {
    /// The unit where the expert starts.
    #[default]
    Fixed,
    /// In every step, over the host's memories and frames of each layer (TriMoE).
    Scheduled(Scheduled),
    /// In every step, between the CPU and a cache of frames that all layers share (HybriMoE). All layers are
    /// alike.
    Cached(Cached),
}

attributes! {
    /// Parameters of [`ExpertPolicy::Scheduled`].
    #[derive(Clone, Debug, PartialEq, Encode, Decode)]
    pub struct Scheduled {
        /// The unit for hot experts: index into [`crate::plan::Plan::units`]. Its memory holds those that
        /// start there.
        pub hot: Option<u32>,
        /// The unit for cold experts: NDP DIMMs. Its memory holds all.
        pub cold: u32,
        /// NDP DIMMs of that unit.
        pub dimms: u32,
        /// Experts of a layer that the hot unit's memory has room for.
        pub frames: u32,
        /// Whether experts change their places between steps.
        pub moves: bool,
        /// Refinement of the first assignment.
        pub refine: Refine,
        /// Units of the experts of a prompt.
        pub prefill: PromptUnits,
        /// Time of attention and dense layers between the experts of two layers of a prompt, in which experts
        /// move: points `(rows, µs)`, one for each entry point.
        pub prompt_window: Vec<(u32, f64)>,
        /// The same in decoding.
        pub decode_window: Vec<(u32, f64)>,
        /// Time for which values of the step use the link to the hot unit in a window: points `(rows, µs)`.
        pub traffic: Vec<(u32, f64)>,
        /// Costs of an expert.
        pub costs: ExpertCosts,
    }
}

attributes! {
    /// Parameters of [`ExpertPolicy::Cached`].
    #[derive(Clone, Debug, PartialEq, Encode, Decode)]
    pub struct Cached {
        /// The unit with cache frames: index into [`crate::plan::Plan::units`]. Its memory holds the experts
        /// that start there.
        pub hot: u32,
        /// Frames, of all layers together.
        pub frames: u32,
        /// Policies for the experts of a prompt and of tokens that are decoded: names in the runtime's table
        /// of policies.
        pub divides: [String; 2],
        /// The policy of the frames with its parameters, as `[memory] policy` has it. Experts in `pinned`
        /// never leave.
        pub keeps: String,
        /// Layers ahead whose experts are brought while the link is idle.
        pub ahead: u32,
        /// Microseconds that the first expert of a layer takes more on the unit, on the CPU, and on the link
        /// (Figure 3e).
        pub first_us: [f64; 3],
        /// Microseconds of a launch on the unit. Experts that it holds share one, which `first_us` includes;
        /// an expert that arrives later has its own.
        pub launch_us: f64,
        /// Experts per token.
        pub k: u32,
        /// Function that turns the router's logits into scores.
        pub score: Score,
        /// Experts that never leave their frames, by index into [`ExpertPlacement::layers`], ascending.
        pub pinned: Vec<(u32, u32)>,
        /// Microseconds of attention and dense layers between the experts of two layers: transfers in it are
        /// hidden.
        pub window_us: f64,
        /// Costs of an expert.
        pub costs: ExpertCosts,
    }
}

words! {
    /// Refinement of an assignment.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
    pub enum Refine, "`none`, `bottleneck` or `full`" {
        /// No refinement: every expert goes where it costs least.
        None = "none",
        /// As the paper writes it (TriMoE, §4.2): the costliest expert of the busiest unit moves.
        Bottleneck = "bottleneck",
        /// Further, over plateaus on which that stalls.
        #[default]
        Full = "full",
    }
}

words! {
    /// Units of the experts of a prompt.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Encode, Decode)]
    pub enum PromptUnits, "`auto` or `hot`" {
        /// All units as in decoding, or the hot unit alone: what takes less time by the costs.
        #[default]
        Auto = "auto",
        /// The hot unit alone; experts that it does not hold are streamed through the frames of all layers
        /// (TriMoE, §4.1).
        Hot = "hot",
    }
}

attributes! {
    /// Microseconds of one expert, all its matrices. Curves are points `(rows, µs)`, ascending by rows.
    #[derive(Clone, Debug, Default, PartialEq, Encode, Decode)]
    pub struct ExpertCosts as "us" {
        /// Computing on the hot unit; empty if there is none.
        pub hot: Vec<(u32, f64)>,
        /// On the CPU.
        pub cpu: Vec<(u32, f64)>,
        /// On one DIMM; empty if there is none.
        pub cold: Vec<(u32, f64)>,
        /// Bringing the weights to the hot unit's memory.
        pub bring_us: f64,
        /// Reading weights that are striped over all DIMMs from the CPU.
        pub striped_us: f64,
        /// Reading weights that are in one DIMM from the CPU.
        pub localized_us: f64,
        /// Reading weights inside of a DIMM.
        pub internal_us: f64,
        /// Moving them from one DIMM to another.
        pub link_us: f64,
        /// Bytes of the weights.
        pub expert_bytes: u64,
        /// Bytes of a row, to an expert and back.
        pub row_bytes: u64,
    }
}

attributes! {
    /// Experts of a layer that NDP command streams compute, for as many rows as a call has.
    #[derive(Clone, Debug, PartialEq, Eq, Hash, Encode, Decode)]
    pub struct StreamSet {
        /// Layer.
        pub layer: u32,
        /// Index into [`crate::plan::Plan::units`]: the unit that runs them.
        pub unit: u32,
        /// Path of the artifact that holds an NDP command stream for each expert, relative to the bundle.
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
}

impl ExpertPlacement {
    /// Units of the experts of a layer, with its index.
    pub fn of_layer(&self, layer: Option<u32>) -> Option<(u32, &ExpertLayer)> {
        (0..).zip(&self.layers).find(|(_, l)| Some(l.layer) == layer)
    }
}

impl Scheduled {
    /// Its curves over rows.
    pub fn curves(&self) -> [&[(u32, f64)]; 3] {
        [&self.prompt_window, &self.decode_window, &self.traffic]
    }

    /// Whether all experts of a layer can be streamed to the hot unit: the frames of all layers together hold
    /// them, and the experts that lose their frames return by moves.
    pub fn streams(&self, layers: usize, experts: usize) -> bool {
        self.hot.is_some() && self.moves && self.frames as usize * layers >= experts
    }
}

impl ExpertLayer {
    /// Experts that start on a unit, ascending.
    pub fn on(&self, unit: u32) -> Vec<u32> {
        let there = |&at: &u32| self.units.get(at as usize) == Some(&unit);
        (0..).zip(&self.starts).filter(|(_, at)| there(at)).map(|(e, _)| e).collect()
    }

    /// Segments whose matrices are brought to the hot unit.
    pub fn to_bring(&self) -> &[u32] {
        if self.brought.is_empty() { &self.segments } else { &self.brought }
    }
}

impl ExpertPolicy {
    /// Whether every expert stays where it starts.
    pub fn is_fixed(&self) -> bool {
        matches!(self, Self::Fixed)
    }

    /// The cache of frames, where there is one.
    pub fn cached(&self) -> Option<&Cached> {
        if let Self::Cached(cached) = self { Some(cached) } else { None }
    }

    /// Costs of an expert, where the choice of its unit depends on them.
    pub fn costs(&self) -> Option<&ExpertCosts> {
        match self {
            Self::Fixed => None,
            Self::Scheduled(s) => Some(&s.costs),
            Self::Cached(c) => Some(&c.costs),
        }
    }

    /// The unit that experts are brought to.
    pub fn hot(&self) -> Option<u32> {
        match self {
            Self::Fixed => None,
            Self::Scheduled(s) => s.hot,
            Self::Cached(c) => Some(c.hot),
        }
    }

    /// The unit with NDP DIMMs.
    pub fn cold(&self) -> Option<u32> {
        if let Self::Scheduled(s) = self { Some(s.cold) } else { None }
    }

    /// Whether every time is finite and not negative.
    pub fn is_finite(&self) -> bool {
        let good = |us: &f64| us.is_finite() && *us >= 0.0;
        let own = match self {
            Self::Fixed => true,
            Self::Scheduled(s) => s.curves().into_iter().flatten().all(|(_, us)| good(us)),
            Self::Cached(c) => c.first_us.iter().chain([&c.launch_us, &c.window_us]).all(good),
        };
        own && self.costs().is_none_or(|c| {
            let single = [c.bring_us, c.striped_us, c.localized_us, c.internal_us, c.link_us];
            let curves = [&c.hot, &c.cpu, &c.cold].into_iter().flatten();
            single.iter().chain(curves.map(|(_, us)| us)).all(good)
        })
    }
}
