//! Who computes the experts of a layer, what stays where, and what is foreseen: systems, as rows of one table.
//!
//! A build names one of them, a plan says which it is, and a study compares all of them. There are two models of a layer's time, and a
//! row is for one of them: `sums` of units' times, where memories compute beside the GPU and the processor, and
//! `timelines` on which experts arrive, where a GPU with frames and the processor share them.

use super::scheduled::Unit;

/// When the three timelines of HybriMoE's simulation are filled: "the timeline with the earliest completion time" (§IV-B) can
/// be read in two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The one that is done first with what it has.
    Free,
    /// The one that would be done first with its next task.
    Next,
}

/// How the experts of a layer are divided among the units that may compute them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Solver {
    /// The best that we know. On timelines: the best of all cuts by load, mended by moves and swaps, and by a search that leaves
    /// nothing out for few experts. Of sums: what [`Self::Refined`] gives, and then a search that leaves plateaus.
    Best,
    /// HybriMoE as it is written (§IV-B): three timelines, filled in turn by its three priorities.
    Paper(Order),
    /// What the GPU holds to the GPU, the rest to the processor: KTransformers in decoding, Fiddler for few tokens.
    Fixed,
    /// All to the GPU, the rest transferred: AdapMoE, Klotski.
    Gpu,
    /// All to the processor: a layer of llama.cpp that is not on the GPU.
    Cpu,
    /// Each where it is computed sooner by itself, a transfer included: Fiddler, and TriMoE before its refinement.
    Cheapest,
    /// TriMoE as it is written (§4.2): each where it costs least, then the costliest expert of the busiest unit moves.
    Refined,
    /// What the GPU holds to it, the others to this unit, but for as many of the hottest as shorten the step.
    Hottest(Unit),
}

/// The solvers of both models, with a name and what they do; first those of timelines, then what sums have besides.
pub const SOLVERS: &[(&str, Solver, &str)] = &[
    (
        "cut",
        Solver::Best,
        "the best of all cuts by load, mended by moves and swaps, and searched on from there",
    ),
    ("paper", Solver::Paper(Order::Next), "HybriMoE §IV-B; the timeline whose next task ends first goes on"),
    ("paper-free", Solver::Paper(Order::Free), "HybriMoE §IV-B; the timeline that is free first goes on"),
    ("fixed", Solver::Fixed, "the GPU computes what it holds, the processor the rest"),
    ("gpu", Solver::Gpu, "the GPU computes all; what it does not hold is transferred"),
    ("cpu", Solver::Cpu, "the processor computes all"),
    ("cheapest", Solver::Cheapest, "each expert where it is computed sooner by itself"),
    ("refined", Solver::Refined, "TriMoE §4.2; each where it costs least, then the busiest unit gives away"),
    ("hottest-cpu", Solver::Hottest(Unit::Cpu), "the GPU computes the hottest, the processor the rest"),
    ("hottest-near", Solver::Hottest(Unit::Near), "the GPU computes the hottest, near-data units the rest"),
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

/// What becomes of the experts in the GPU's memory, and how the others lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// What a token uses, until the next one.
    Token,
    /// The most popular of every layer on the GPU: for good, unless loads are foreseen; the others striped over all memories.
    Popular,
    /// All of the first layers, for good.
    Layers,
    /// What a policy keeps of those that come.
    Cache(&'static str),
    /// The most popular of every layer, of the others the cold ones each in one memory, the warm ones striped (TriMoE, §4.3).
    Classes,
    /// The most popular of every layer, the others each in one memory.
    Local,
}

/// What is foreseen, and moved for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Foresees {
    /// Nothing.
    Nothing,
    /// Experts of so many layers ahead, by their gates: transferred while the link is idle (HybriMoE, §IV-C).
    Gates(usize),
    /// Loads of the layer's next step, by their averages (TriMoE, §4.3): hot experts are transferred.
    Loads {
        /// Whether experts change their layout and their memory, too.
        relayout: bool,
    },
}

impl Foresees {
    /// Layers ahead whose gates are asked.
    pub fn gates(self) -> usize {
        if let Self::Gates(layers) = self { layers } else { 0 }
    }
}

/// Which units may compute experts, where their times add up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Units {
    /// The GPU, what it does not hold and reads as it goes. What it holds it always may.
    pub misses: bool,
    /// The processor.
    pub cpu: bool,
    /// Near-data units.
    pub near: bool,
}

impl Units {
    /// All.
    pub const ALL: Self = Self { misses: true, cpu: true, near: true };
}

/// A system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Who divides the experts of a layer of a prompt.
    pub prefill: Solver,
    /// Of a token.
    pub decode: Solver,
    /// Who may compute.
    pub units: Units,
    /// What stays where.
    pub keeps: Keeps,
    /// What is foreseen.
    pub foresees: Foresees,
    /// What it does, for people.
    pub says: &'static str,
}

impl System {
    /// The name in `model.toml`.
    pub fn key(&self) -> String {
        self.name.to_ascii_lowercase()
    }

    /// The system with frames of a name in `model.toml`.
    pub fn of_key(key: &str) -> Option<&'static Self> {
        CACHED.iter().find(|s| s.key() == key)
    }

    /// Whether an expert may be brought that stays for one step only, beside those that stay for good.
    pub fn passes(&self) -> bool {
        let brings = |p| !matches!(p, Solver::Fixed | Solver::Cpu);
        !matches!(self.keeps, Keeps::Cache(_)) && (brings(self.prefill) || brings(self.decode))
    }

    /// A system whose units' times add up: one solver for prompts and tokens.
    const fn of_sums(
        name: &'static str,
        solver: Solver,
        units: Units,
        keeps: Keeps,
        foresees: Foresees,
        says: &'static str,
    ) -> Self {
        Self { name, prefill: solver, decode: solver, units, keeps, foresees, says }
    }
}

/// MRS as the paper has it: every expert that comes is kept. It gives no α; with this one most uses are hits, of 0.1 to 0.99.
pub const MRS: &str = "mrs alpha=0.9 depth=2 bypass=0";
/// MRS that keeps no expert that ranks below all that are there.
pub const MRS_BYPASS: &str = "mrs alpha=0.9 depth=2 bypass=1";
/// LRU.
pub const LRU: &str = "lru";

const PAPER: Solver = Solver::Paper(Order::Next);
/// GPU and processor.
const TWO: Units = Units { misses: true, cpu: true, near: false };
/// Loads of the next step, for transfers alone.
const AHEAD: Foresees = Foresees::Loads { relayout: false };

/// llama.cpp: the first layers on the GPU, the others on the processor.
pub const LLAMA_CPP: System = System {
    name: "llama.cpp",
    prefill: Solver::Fixed,
    decode: Solver::Fixed,
    units: TWO,
    keeps: Keeps::Layers,
    foresees: Foresees::Nothing,
    says: "whole layers on the graphics processor, the others' experts on the processor",
};
/// AdapMoE: the GPU alone, experts of the next layer ahead, LRU. So does Klotski, whose batches hide more of the transfers.
pub const ADAPMOE: System = System {
    name: "AdapMoE",
    prefill: Solver::Gpu,
    decode: Solver::Gpu,
    units: TWO,
    keeps: Keeps::Cache(LRU),
    foresees: Foresees::Gates(1),
    says: "all on the graphics processor, what it lacks is brought, one layer ahead where that can be foreseen (Klotski, AdapMoE)",
};
/// Fiddler: popular experts on the GPU, each other one where it is computed sooner.
pub const FIDDLER: System = System {
    name: "Fiddler",
    prefill: Solver::Cheapest,
    decode: Solver::Cheapest,
    units: TWO,
    keeps: Keeps::Popular,
    foresees: Foresees::Nothing,
    says: "popular experts stay on the graphics processor, each other one is computed where that is done sooner by itself",
};
/// KTransformers: popular experts on the GPU; the processor has the others in decoding, the GPU in prefill (Table I).
pub const KTRANSFORMERS: System = System {
    name: "KTransformers",
    prefill: Solver::Gpu,
    decode: Solver::Fixed,
    units: TWO,
    keeps: Keeps::Popular,
    foresees: Foresees::Nothing,
    says: "popular experts stay on the graphics processor; the processor has the others while tokens are decoded",
};
/// HybriMoE.
pub const HYBRIMOE: System = System {
    name: "HybriMoE",
    prefill: PAPER,
    decode: PAPER,
    units: TWO,
    keeps: Keeps::Cache(MRS),
    foresees: Foresees::Gates(3),
    says: "HybriMoE as it is written: three timelines, MRS, three layers ahead",
};
/// moec: the same with its own division, and MRS with bypass.
pub const MOEC: System = System {
    name: "moec",
    prefill: Solver::Best,
    decode: Solver::Best,
    units: TWO,
    keeps: Keeps::Cache(MRS_BYPASS),
    foresees: Foresees::Gates(3),
    says: "the same with the best of all cuts, searched on, and the policy that the profile's routing gains most by",
};

/// All experts on the GPU, fetched when their layer's router has spoken. MoBiLE's are these, fewer first.
pub const OFFLOADING: System = System {
    name: "offloading",
    keeps: Keeps::Token,
    foresees: Foresees::Nothing,
    says: "all on the graphics processor, what it lacks is brought",
    ..ADAPMOE
};
/// Pre-gated MoE: a layer's experts are known one layer before.
pub const PRE_GATED: System = System {
    name: "Pre-gated MoE",
    foresees: Foresees::Gates(1),
    says: "the same, and a gate says one layer before what is brought",
    ..OFFLOADING
};

/// Those with frames that all layers share: `[placement] policy` takes one of them.
pub const CACHED: [System; 6] = [LLAMA_CPP, ADAPMOE, FIDDLER, KTRANSFORMERS, HYBRIMOE, MOEC];

/// Klotski: the GPU alone; weights travel while others are computed, and hot experts ahead of that.
pub const KLOTSKI: System = System::of_sums(
    "Klotski",
    Solver::Cheapest,
    Units { misses: true, cpu: false, near: false },
    Keeps::Popular,
    AHEAD,
    "all on the GPU; weights travel while others are computed",
);
/// KTransformers with transfers ahead: the GPU computes what it holds.
pub const EN_KTRANSFORMERS_HELD: System = System::of_sums(
    "En-KTransformers, held",
    Solver::Cheapest,
    Units { misses: false, cpu: true, near: false },
    Keeps::Popular,
    AHEAD,
    "what the GPU holds on either, the rest on the processor",
);
/// The same, with as many of the hottest others on the GPU as shorten the step.
pub const EN_KTRANSFORMERS: System = System::of_sums(
    "En-KTransformers",
    Solver::Hottest(Unit::Cpu),
    TWO,
    Keeps::Popular,
    AHEAD,
    "the hottest on the GPU, the rest on the processor, cut where the step is shortest",
);
/// MoNDE: GPU and near-data units; the hottest experts go to the GPU, as many as balance the two.
pub const MONDE: System = System::of_sums(
    "MoNDE",
    Solver::Hottest(Unit::Near),
    Units { misses: true, cpu: false, near: true },
    Keeps::Local,
    Foresees::Nothing,
    "the hottest on the GPU, the rest on near-data units, rows over the link counted",
);
/// TriMoE with a solver of ours in place of its own, and whether experts move.
pub const fn trimoe(name: &'static str, solver: Solver, moves: bool) -> System {
    let foresees = if moves { Foresees::Loads { relayout: true } } else { Foresees::Nothing };
    let says = "GPU, processor and near-data units; experts move between layouts and memories where loads ask for it";
    System::of_sums(name, solver, Units::ALL, Keeps::Classes, foresees, says)
}
/// TriMoE as it is written.
pub const TRIMOE: System = trimoe("TriMoE", Solver::Refined, true);

/// Those with units in the host's memories, or that are compared with these: TriMoE, its parts, and other systems.
pub const SCHEDULED: [System; 10] = [
    KLOTSKI,
    EN_KTRANSFORMERS_HELD,
    EN_KTRANSFORMERS,
    MONDE,
    trimoe("TriMoE, greedy, still", Solver::Cheapest, false),
    trimoe("TriMoE, still", Solver::Refined, false),
    trimoe("moec on memories, still", Solver::Best, false),
    trimoe("TriMoE, greedy", Solver::Cheapest, true),
    TRIMOE,
    trimoe("moec on memories", Solver::Best, true),
];
