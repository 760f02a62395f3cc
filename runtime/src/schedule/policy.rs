//! Policies: the units of a layer's experts, what stays where, and what is predicted. A system is one choice
//! of each.
//!
//! A plan names its solvers and caches. [`System`]s, of other authors and of moec, are combinations of these.
//! There are two models of a layer's time, and a system is for one of them. With `sums` of units' times,
//! NDP DIMMs compute in addition to the GPU and the CPU. With `timelines` on which experts arrive, a
//! GPU with frames and the CPU share them.

use super::scheduled::ExpertUnit;

/// Order in which the three timelines of HybriMoE's simulation are filled: "the timeline with the earliest
/// completion time" (§IV-B) can be read in two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The timeline that has finished its own tasks first.
    Free,
    /// The timeline that would finish its next task first.
    Next,
}

/// Division of a layer's experts among the units that may compute them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Solver {
    /// The best known solver. On timelines: the best of all cuts by load, improved by moves and swaps, and by
    /// a search that is exhaustive for few experts. On sums: [`Self::Refined`], followed by a search that
    /// leaves plateaus.
    Best,
    /// HybriMoE as published (§IV-B): three timelines, filled in turn by its three priorities.
    Paper(Order),
    /// Experts in the GPU's memory to the GPU, the rest to the CPU: KTransformers in decoding, Fiddler for
    /// few tokens.
    Fixed,
    /// All to the GPU; missing experts are transferred: AdapMoE, Klotski.
    Gpu,
    /// All to the CPU: a layer of llama.cpp that is not on the GPU.
    Cpu,
    /// Each to the unit that would compute it first on its own, a transfer included: Fiddler, and TriMoE
    /// before its refinement.
    Cheapest,
    /// TriMoE as published (§4.2): each to the unit where it costs least, then the costliest expert of the
    /// busiest unit moves.
    Refined,
    /// Experts in the GPU's memory to the GPU, the others to this unit, except as many of the hottest as
    /// shorten the step.
    Hottest(ExpertUnit),
}

/// The solvers of both models, with their names and descriptions; first those of timelines, then those that
/// only sums have.
pub const SOLVERS: &[(&str, Solver, &str)] = &[
    (
        "cut",
        Solver::Best,
        "the best of all cuts by load, mended by moves and swaps, and searched on from there",
    ),
    ("paper", Solver::Paper(Order::Next), "HybriMoE §IV-B; the timeline whose next task ends first goes on"),
    ("paper-free", Solver::Paper(Order::Free), "HybriMoE §IV-B; the timeline that is free first goes on"),
    ("fixed", Solver::Fixed, "the GPU computes what it holds, the CPU the rest"),
    ("gpu", Solver::Gpu, "the GPU computes all; what it does not hold is transferred"),
    ("cpu", Solver::Cpu, "the CPU computes all"),
    ("cheapest", Solver::Cheapest, "each expert where it is computed sooner by itself"),
    ("refined", Solver::Refined, "TriMoE §4.2; each where it costs least, then the busiest unit gives away"),
    ("hottest-cpu", Solver::Hottest(ExpertUnit::Cpu), "the GPU computes the hottest, the CPU the rest"),
    ("hottest-near", Solver::Hottest(ExpertUnit::Near), "the GPU computes the hottest, NDP units the rest"),
];

impl Solver {
    /// The row of that name.
    pub fn named(name: &str) -> Option<Self> {
        SOLVERS.iter().find(|p| p.0 == name).map(|p| p.1)
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        SOLVERS.iter().find(|p| p.1 == self).map_or("", |p| p.0)
    }

    /// Whether it divides experts on timelines.
    pub fn has_timelines(self) -> bool {
        !matches!(self, Self::Refined | Self::Hottest(_))
    }

    /// Whether it divides experts whose units' times add up.
    pub fn has_sums(self) -> bool {
        matches!(self, Self::Best | Self::Cheapest | Self::Refined | Self::Hottest(_))
    }
}

/// Experts that the GPU's memory keeps, and the layout of the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuResidents {
    /// The experts of a token, until the next token.
    Token,
    /// The most popular of every layer on the GPU: permanently, unless loads are predicted; the others
    /// striped over all memories.
    Popular,
    /// All experts of the first layers, permanently.
    Layers,
    /// Transferred experts that a cache policy keeps.
    Cache(&'static str),
    /// The most popular of every layer on the GPU; of the others, cold ones each in one memory and warm ones
    /// striped (TriMoE, §4.3).
    Classes,
    /// The most popular of every layer on the GPU; the others each in one memory.
    Local,
}

/// Kind of prediction, and the moves that follow from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prediction {
    /// Nothing.
    Nothing,
    /// Experts of this many layers ahead, by their gates: transferred while the link is idle (HybriMoE,
    /// §IV-C).
    Gates(usize),
    /// Loads of the layer's next step, by their averages (TriMoE, §4.3): hot experts are transferred.
    Loads {
        /// Whether experts also change their layout and their memory.
        relayout: bool,
    },
}

impl Prediction {
    /// Number of layers ahead whose gates are applied.
    pub fn gates(self) -> usize {
        if let Self::Gates(layers) = self { layers } else { 0 }
    }
}

/// Units that may compute experts, where their times add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// The GPU, for experts that it does not hold and reads while computing. Experts that it holds are always
    /// allowed.
    pub misses: bool,
    /// The CPU.
    pub cpu: bool,
    /// NDP units.
    pub near: bool,
}

impl Units {
    /// All units.
    pub const ALL: Self = Self { misses: true, cpu: true, near: true };
}

/// A combination of policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Solver for a layer's experts in a prompt.
    pub prefill: Solver,
    /// Solver for a decoded token.
    pub decode: Solver,
    /// Units that may compute.
    pub units: Units,
    /// Experts that stay, and where.
    pub gpu_residents: GpuResidents,
    /// Prediction.
    pub prediction: Prediction,
    /// Description, for users.
    pub description: &'static str,
}

impl System {
    /// A system whose units' times add up: one solver for prompts and tokens.
    pub const fn of_sums(
        name: &'static str,
        solver: Solver,
        units: Units,
        gpu_residents: GpuResidents,
        prediction: Prediction,
        description: &'static str,
    ) -> Self {
        Self { name, prefill: solver, decode: solver, units, gpu_residents, prediction, description }
    }
}

/// TriMoE with another solver, with or without moves of experts.
pub const fn trimoe(name: &'static str, solver: Solver, moves: bool) -> System {
    let prediction = if moves { Prediction::Loads { relayout: true } } else { Prediction::Nothing };
    let description =
        "GPU, CPU and NDP units; experts move between layouts and memories where loads request it";
    System::of_sums(name, solver, Units::ALL, GpuResidents::Classes, prediction, description)
}
/// TriMoE as published: the GPU computes all experts of a prompt (§4.1).
pub const TRIMOE: System = System { prefill: Solver::Gpu, ..trimoe("TriMoE", Solver::Refined, true) };
