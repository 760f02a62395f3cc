//! Systems, as rows of one table: who divides the experts of a layer, what stays on the GPU, and what is brought ahead.
//!
//! A build names one of them, and a study compares all of them.

use super::policy::{Order, Policy};

/// What becomes of the experts on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keeps {
    /// The most popular of every layer, for good.
    Popular,
    /// All of the first layers, for good.
    Layers,
    /// What a policy keeps of those that come.
    Cache(&'static str),
}

/// A system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Who divides the experts of a layer of a prompt.
    pub prefill: Policy,
    /// Of a token.
    pub decode: Policy,
    /// What stays on the GPU.
    pub keeps: Keeps,
    /// Layers ahead for which experts are transferred.
    pub ahead: usize,
    /// What it does, for people.
    pub says: &'static str,
}

impl System {
    /// The name in `model.toml`.
    pub fn key(&self) -> String {
        self.name.to_ascii_lowercase()
    }

    /// The system of a name in `model.toml`.
    pub fn of_key(key: &str) -> Option<&'static Self> {
        SYSTEMS.iter().find(|s| s.key() == key)
    }

    /// Whether an expert may be brought that stays for one step only, beside those that stay for good.
    pub fn passes(&self) -> bool {
        let brings = |p| !matches!(p, Policy::Fixed | Policy::Cpu);
        !matches!(self.keeps, Keeps::Cache(_)) && (brings(self.prefill) || brings(self.decode))
    }
}

/// MRS as the paper has it: every expert that comes is kept. It gives no α; with this one most uses are hits, of 0.1 to 0.99.
pub const MRS: &str = "mrs alpha=0.9 depth=2 bypass=0";
/// MRS that keeps no expert that ranks below all that are there.
pub const MRS_BYPASS: &str = "mrs alpha=0.9 depth=2 bypass=1";
/// LRU.
pub const LRU: &str = "lru";

const PAPER: Policy = Policy::Paper(Order::Next);

/// llama.cpp: the first layers on the GPU, the others on the processor.
pub const LLAMA_CPP: System = System {
    name: "llama.cpp",
    prefill: Policy::Fixed,
    decode: Policy::Fixed,
    keeps: Keeps::Layers,
    ahead: 0,
    says: "whole layers on the graphics processor, the others' experts on the processor",
};
/// AdapMoE: the GPU alone, experts of the next layer ahead, LRU. So does Klotski, whose batches hide more of the transfers.
pub const ADAPMOE: System = System {
    name: "AdapMoE",
    prefill: Policy::Gpu,
    decode: Policy::Gpu,
    keeps: Keeps::Cache(LRU),
    ahead: 1,
    says: "all on the graphics processor, what it lacks is brought, one layer ahead where that can be foreseen (Klotski, AdapMoE)",
};
/// Fiddler: popular experts on the GPU, each other one where it is computed sooner.
pub const FIDDLER: System = System {
    name: "Fiddler",
    prefill: Policy::Cheapest,
    decode: Policy::Cheapest,
    keeps: Keeps::Popular,
    ahead: 0,
    says: "popular experts stay on the graphics processor, each other one is computed where that is done sooner by itself",
};
/// KTransformers: popular experts on the GPU; the processor has the others in decoding, the GPU in prefill (Table I).
pub const KTRANSFORMERS: System = System {
    name: "KTransformers",
    prefill: Policy::Gpu,
    decode: Policy::Fixed,
    keeps: Keeps::Popular,
    ahead: 0,
    says: "popular experts stay on the graphics processor; the processor has the others while tokens are decoded",
};
/// HybriMoE.
pub const HYBRIMOE: System = System {
    name: "HybriMoE",
    prefill: PAPER,
    decode: PAPER,
    keeps: Keeps::Cache(MRS),
    ahead: 3,
    says: "HybriMoE as it is written: three timelines, MRS, three layers ahead",
};
/// moec: the same with its own division, and MRS with bypass.
pub const MOEC: System = System {
    name: "moec",
    prefill: Policy::Cut,
    decode: Policy::Cut,
    keeps: Keeps::Cache(MRS_BYPASS),
    ahead: 3,
    says: "the same with the best of all cuts, searched on, and the policy that the profile's routing gains most by",
};

/// All of them.
pub const SYSTEMS: [System; 6] = [LLAMA_CPP, ADAPMOE, FIDDLER, KTRANSFORMERS, HYBRIMOE, MOEC];
