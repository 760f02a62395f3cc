//! Systems that use subsets of the units, layouts and predictions.

use crate::schedule::policy::{GpuResidents, Prediction, Solver, System, Units, trimoe};
use crate::schedule::scheduled::ExpertUnit;

const AHEAD: Prediction = Prediction::Loads { relayout: false };

const fn units(cpu: bool, near: bool) -> Units {
    Units { misses: true, cpu, near }
}

/// The GPU alone.
pub(super) const GPU_ALONE: System =
    System::of_sums("GPU", Solver::Cheapest, units(false, false), GpuResidents::Popular, AHEAD, "");
/// The hottest experts on the GPU, the others on the CPU.
const HOTTEST_CPU: System = System::of_sums(
    "CPU",
    Solver::Hottest(ExpertUnit::Cpu),
    units(true, false),
    GpuResidents::Popular,
    AHEAD,
    "",
);
/// The hottest experts on the GPU, the others on NDP units.
const HOTTEST_NEAR: System = System::of_sums(
    "near",
    Solver::Hottest(ExpertUnit::Near),
    units(false, true),
    GpuResidents::Local,
    Prediction::Nothing,
    "",
);

/// The systems above, then the parts of TriMoE added one by one, up to all of it.
pub(super) const SYSTEMS: [System; 9] = [
    GPU_ALONE,
    HOTTEST_CPU,
    HOTTEST_NEAR,
    trimoe("greedy, still", Solver::Cheapest, false),
    trimoe("refined, still", Solver::Refined, false),
    trimoe("best, still", Solver::Best, false),
    trimoe("greedy", Solver::Cheapest, true),
    trimoe("refined", Solver::Refined, true),
    trimoe("best", Solver::Best, true),
];
