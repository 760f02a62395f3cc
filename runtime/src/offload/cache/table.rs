//! The policies by name.

use super::experts::ExpertIndex;
use super::lfu::Lfu;
use super::lru::Lru;
use super::mrs::Mrs;
use super::page_cache::PageCache;
use super::policy::Policy;

/// Scope that shares the bytes of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All layers together.
    Shared,
    /// Each layer its own share.
    PerLayer,
}

/// A numeric parameter of a policy.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: &'static str,
    /// Its effect.
    pub about: &'static str,
    /// Least value.
    pub least: f64,
    /// Largest value.
    pub most: f64,
    /// Whether it is a whole number.
    pub whole: bool,
    /// Values that a search tries, the default first.
    pub grid: &'static [f64],
}

/// A row of the table.
#[derive(Clone, Copy, Debug)]
pub struct PolicyInfo {
    /// Its name.
    pub name: &'static str,
    /// Its strategy.
    pub about: &'static str,
    /// Its parameters.
    pub parameters: &'static [Parameter],
    /// Valid scopes; the usual one first.
    pub scopes: &'static [Scope],
    /// Whether it reads router scores.
    pub scored: bool,
    /// Constructor from the experts, the bytes, and a value for each parameter.
    pub(super) new: fn(&ExpertIndex, u64, &[f64]) -> Box<dyn Policy>,
}

const BYPASS: Parameter = Parameter {
    name: "bypass",
    about: "1: a miss that ranks below every expert it could replace is not kept",
    least: 0.0,
    most: 1.0,
    whole: true,
    grid: &[1.0, 0.0],
};

/// All policies; of two equally good ones the earlier is chosen. LRU, the first, is the baseline.
pub const POLICIES: &[PolicyInfo] = &[
    PolicyInfo {
        name: "lru",
        about: "the expert that was used longest ago goes",
        parameters: &[],
        scopes: &[Scope::Shared, Scope::PerLayer],
        scored: false,
        new: |experts, _, _| Box::new(Lru::new(experts.count())),
    },
    PolicyInfo {
        name: "lfu",
        about: "the expert that was used least often goes",
        parameters: &[
            Parameter {
                name: "half_life",
                about: "tokens after which a use counts half; 0: never",
                least: 0.0,
                most: 1e6,
                whole: false,
                grid: &[0.0, 16.0, 64.0, 256.0, 1024.0],
            },
            BYPASS,
        ],
        scopes: &[Scope::Shared, Scope::PerLayer],
        scored: false,
        new: |experts, _, v| Box::new(Lfu::new(experts.count(), experts.layers().len(), v[0], v[1] != 0.0)),
    },
    PolicyInfo {
        name: "mrs",
        about: "the expert whose router scores were low of late goes (HybriMoE eq. 3)",
        parameters: &[
            Parameter {
                name: "alpha",
                about: "share of the newest scores in the average",
                least: 1e-4,
                most: 0.999,
                whole: false,
                grid: &[0.1, 0.003, 0.01, 0.03, 0.3],
            },
            Parameter {
                name: "depth",
                about: "scores that count, in experts that a token uses: p = depth · K",
                least: 1.0,
                most: 8.0,
                whole: true,
                grid: &[2.0, 1.0],
            },
            BYPASS,
        ],
        scopes: &[Scope::Shared, Scope::PerLayer],
        scored: true,
        new: |experts, _, v| Box::new(Mrs::new(experts, v[0], v[1] as usize, v[2] != 0.0)),
    },
    PolicyInfo {
        name: "page-cache",
        about: "the kernel's two lists of pages that were read",
        parameters: &[],
        scopes: &[Scope::Shared],
        scored: false,
        new: |experts, capacity, _| Box::new(PageCache::new(experts, capacity)),
    },
];
