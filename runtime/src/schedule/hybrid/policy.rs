//! Who divides the experts of a layer, as rows of one table.

/// When the three timelines of the paper's simulation are filled: "the timeline with the earliest completion time" (§IV-B) can
/// be read in two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Order {
    /// The one that is done first with what it has.
    Free,
    /// The one that would be done first with its next task.
    Next,
}

/// Who divides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// HybriMoE as it is written (§IV-B): three timelines, filled in turn by its three priorities.
    Paper(Order),
    /// The best of all cuts by load, mended by moves and swaps, and by a search that leaves nothing out for few experts.
    Cut,
    /// What the GPU holds to the GPU, the rest to the processor: KTransformers in decoding, Fiddler for few tokens.
    Fixed,
    /// All to the GPU, the rest transferred: AdapMoE, Klotski.
    Gpu,
    /// All to the processor: a layer of llama.cpp that is not on the GPU.
    Cpu,
    /// Each where it is computed sooner by itself, a transfer included: Fiddler.
    Cheapest,
}

/// All of them, with a name and what they do.
pub const POLICIES: &[(&str, Policy, &str)] = &[
    (
        "cut",
        Policy::Cut,
        "the best of all cuts by load, mended by moves and swaps, and searched on from there",
    ),
    ("paper", Policy::Paper(Order::Next), "HybriMoE §IV-B; the timeline whose next task ends first goes on"),
    ("paper-free", Policy::Paper(Order::Free), "HybriMoE §IV-B; the timeline that is free first goes on"),
    ("fixed", Policy::Fixed, "the GPU computes what it holds, the processor the rest"),
    ("gpu", Policy::Gpu, "the GPU computes all; what it does not hold is transferred"),
    ("cpu", Policy::Cpu, "the processor computes all"),
    ("cheapest", Policy::Cheapest, "each expert where it is computed sooner by itself"),
];

impl Policy {
    /// The row of that name.
    pub fn named(name: &str) -> Option<Self> {
        POLICIES.iter().find(|p| p.0 == name).map(|p| p.1)
    }

    /// Its name in the table.
    pub fn name(self) -> &'static str {
        POLICIES.iter().find(|p| p.1 == self).map_or("", |p| p.0)
    }
}
