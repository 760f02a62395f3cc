//! Who decides: TriMoE and the systems that it is compared with, as rows of one table.

use super::schedule::Unit;

/// What follows the greedy assignment (TriMoE, §4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refinement {
    /// Nothing: each expert stays on the unit where it costs least.
    None,
    /// As the paper writes it.
    Paper,
    /// The paper's, and then a search that leaves plateaus.
    Full,
}

/// Which experts a system of GPU and processor gives to the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Those that it holds.
    AllCold,
    /// Those that it holds, and as many of the hottest others as shorten the step.
    Best,
}

/// Who decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Policy {
    /// TriMoE: GPU, processor and near-data units.
    TriMoe {
        /// What follows the greedy assignment.
        refinement: Refinement,
        /// Whether experts move between steps (§4.3).
        migrate: bool,
    },
    /// Klotski: the GPU alone; weights travel while others are computed, and hot experts ahead of that.
    Klotski,
    /// KTransformers with prefetching: GPU and processor.
    KTransformers {
        /// Who computes what.
        split: Split,
    },
    /// MoNDE: GPU and near-data units; the hottest experts go to the GPU, as many as balance the two.
    MoNde,
}

/// How a policy gives experts to units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// Each to the unit where it costs least, and what follows.
    Greedy(Refinement),
    /// What the GPU holds to it, the others to this unit, but for as many of the hottest as shorten the step.
    Hottest(Unit),
}

/// Where experts are before the first step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Cold ones localized, the others striped.
    Classes,
    /// All striped.
    Striped,
    /// All localized.
    Local,
}

/// What a policy may do; its row of the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules {
    pub(super) units: Units,
    pub(super) method: Method,
    pub(super) start: Start,
    /// Whether weights travel to the GPU while it computes others, so that the slower of the two sums counts.
    pub(super) overlap: bool,
    /// Whether rows travel over PCIe to near-data units, and the balance counts them.
    pub(super) rows: bool,
    /// Whether hot experts are read ahead.
    pub(super) prefetch: bool,
    /// Whether experts change their layout and their DIMM.
    pub(super) relayout: bool,
}

impl Policy {
    pub(super) fn rules(self) -> Rules {
        let units = |miss, cpu, ndp| Units { hit: true, miss, cpu, ndp };
        let plain = Rules {
            units: units(true, true, true),
            method: Method::Greedy(Refinement::None),
            start: Start::Striped,
            overlap: false,
            rows: false,
            prefetch: true,
            relayout: false,
        };
        match self {
            Self::TriMoe { refinement, migrate } => Rules {
                method: Method::Greedy(refinement),
                start: Start::Classes,
                prefetch: migrate,
                relayout: migrate,
                ..plain
            },
            Self::Klotski => Rules { units: units(true, false, false), overlap: true, ..plain },
            Self::KTransformers { split: Split::AllCold } => {
                Rules { units: units(false, true, false), ..plain }
            }
            Self::KTransformers { split: Split::Best } => {
                Rules { units: units(true, true, false), method: Method::Hottest(Unit::Cpu), ..plain }
            }
            Self::MoNde => Rules {
                units: units(true, false, true),
                method: Method::Hottest(Unit::Ndp),
                start: Start::Local,
                rows: true,
                prefetch: false,
                ..plain
            },
        }
    }
}

const fn trimoe(refinement: Refinement, migrate: bool) -> Policy {
    Policy::TriMoe { refinement, migrate }
}

/// All policies, by name.
pub const POLICIES: [(&str, Policy); 10] = [
    ("klotski", Policy::Klotski),
    ("ktransformers-all-cold", Policy::KTransformers { split: Split::AllCold }),
    ("ktransformers", Policy::KTransformers { split: Split::Best }),
    ("monde", Policy::MoNde),
    ("trimoe-greedy-static", trimoe(Refinement::None, false)),
    ("trimoe-paper-static", trimoe(Refinement::Paper, false)),
    ("trimoe-static", trimoe(Refinement::Full, false)),
    ("trimoe-greedy", trimoe(Refinement::None, true)),
    ("trimoe-paper", trimoe(Refinement::Paper, true)),
    ("trimoe", trimoe(Refinement::Full, true)),
];

impl std::fmt::Display for Policy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = POLICIES.iter().find(|p| p.1 == *self).map_or("policy", |p| p.0);
        f.pad(name)
    }
}

/// Which units may compute experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Units {
    /// The GPU, what it holds.
    pub(super) hit: bool,
    /// The GPU, what it reads as it goes.
    pub(super) miss: bool,
    /// The processor.
    pub(super) cpu: bool,
    /// Near-data units.
    pub(super) ndp: bool,
}
