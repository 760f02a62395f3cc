//! The experiments of the evaluation, and those that examine which assumption its figures need.

use super::bench::{Case, Outcome, Size};
use super::loads::{DRIFT, Source};
use super::machine::{Machine, ndp_times};
use super::models::{MODELS, Model, QWEN};
use super::paper::{BATCH, BATCHES};
use moec_dram::{Options, Timing};
use moec_ndp::steps::{Rates, StepsError};
use moec_runtime::schedule::{self, Solver, Table};
use moec_sim::systems::{self, EN_KTRANSFORMERS, EN_KTRANSFORMERS_HELD};

/// The variant that gives the paper's speedups with the paper's schedule.
pub const CLOSEST_VARIANT: &str = "MoNDE keeps no experts on the GPU, loads that do not drift";

/// A system that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct System {
    /// Name.
    pub name: &'static str,
    /// Deciding systems; of several the fastest counts.
    pub policies: &'static [schedule::System],
    /// Whether the GPU reads experts that it does not hold. The equations do not say that the CPU has less
    /// bandwidth then.
    pub fetches: bool,
    /// Whether the GPU keeps experts from step to step.
    pub gpu_cache: bool,
}

const fn trimoe(solver: Solver, moves: bool) -> schedule::System {
    schedule::trimoe(schedule::TRIMOE.name, solver, moves)
}

/// GPU alone.
pub const KLOTSKI: System =
    System { name: "Klotski", policies: &[systems::KLOTSKI], fetches: true, gpu_cache: true };
/// GPU and CPU.
pub const KTRANSFORMERS: System = System {
    name: "En-KTransformers",
    policies: &[EN_KTRANSFORMERS_HELD, EN_KTRANSFORMERS],
    fetches: true,
    gpu_cache: true,
};
/// GPU and NDP units.
pub const MONDE: System =
    System { name: "MoNDE", policies: &[systems::MONDE], fetches: true, gpu_cache: true };
/// The same with a GPU that keeps no experts.
pub const MONDE_BARE: System = System { gpu_cache: false, ..MONDE };
/// As the paper has it.
pub const TRIMOE: System =
    System { name: "TriMoE", policies: &[trimoe(Solver::Refined, true)], fetches: true, gpu_cache: true };
/// With the refinement that leaves plateaus, and without fetches.
pub const MOEC: System =
    System { name: "moec", policies: &[trimoe(Solver::Best, true)], fetches: false, gpu_cache: true };
/// All of them; baselines first.
pub const SYSTEMS: [System; 5] = [KLOTSKI, KTRANSFORMERS, MONDE, TRIMOE, MOEC];
/// Number of them that are baselines.
pub const BASELINES: usize = 3;
const fn step(name: &'static str, policies: &'static [schedule::System], fetches: bool) -> System {
    System { name, policies, fetches, gpu_cache: true }
}

/// The steps of Figure 8, and those that moec adds.
pub const ABLATION: [System; 7] = [
    MONDE,
    step("+CPU", &[trimoe(Solver::Cheapest, false)], true),
    step("+Refinement", &[trimoe(Solver::Refined, false)], true),
    step("+Relayout", &[trimoe(Solver::Refined, true)], true),
    step("plateau-free", &[trimoe(Solver::Best, true)], true),
    step("no fetches", &[trimoe(Solver::Refined, true)], false),
    step("both", &[trimoe(Solver::Best, true)], false),
];

/// Everything that experiments share.
#[derive(Clone, Debug)]
pub struct Bench {
    /// Rates of memory, measured.
    pub rates: Rates,
    /// By model, in their order: `f_calc` of an NDP unit.
    ndp: Vec<Table>,
    /// Drawn loads.
    pub drawn: Source,
    /// Recorded loads.
    pub recorded: Source,
    /// Size of the simulations.
    pub size: Size,
}

/// Setting of an experiment: machine, model, batch, loads.
#[derive(Clone, Debug)]
pub struct Setting<'a> {
    /// The machine.
    pub machine: Machine,
    /// The model.
    pub model: &'a Model,
    /// Tokens of a step.
    pub batch: usize,
    /// Loads.
    pub source: &'a Source,
}

/// Microseconds of the MoE layer: simulated, or as the equations say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimingMethod {
    /// Simulated.
    Simulation,
    /// Equations 5 to 7 alone.
    Equations,
}

impl TimingMethod {
    fn of(self, outcome: &Outcome) -> f64 {
        match self {
            Self::Simulation => outcome.moe_us,
            Self::Equations => outcome.predicted_us,
        }
    }
}

/// A variant of the machine, the loads or the way of counting.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Name of the difference.
    pub name: &'static str,
    /// The machine.
    pub machine: Machine,
    /// Loads.
    pub source: Source,
    /// Systems.
    pub systems: [System; 5],
    /// Way of counting time.
    pub by: TimingMethod,
}

impl Bench {
    /// With these recorded shares.
    ///
    /// # Errors
    /// A model without a command stream.
    pub fn new(recorded: Source, size: Size) -> Result<Self, String> {
        Ok(Self {
            rates: Rates::measure(Timing::trimoe(), Options::default()),
            ndp: MODELS.iter().map(ndp_times).collect::<Result<_, _>>()?,
            drawn: Source::Drawn(DRIFT),
            recorded,
            size,
        })
    }

    /// The machine of Table 1.
    pub fn machine(&self) -> Machine {
        Machine::new(self.rates)
    }

    /// The machine of Table 1 with drawn loads.
    pub fn setting<'a>(&'a self, model: &'a Model, batch: usize) -> Setting<'a> {
        Setting { machine: self.machine(), model, batch, source: &self.drawn }
    }

    /// Time of an expert on an NDP unit, by tokens.
    pub fn ndp(&self, model: &Model) -> &Table {
        let at = MODELS.iter().position(|m| m.name == model.name).unwrap_or(0);
        &self.ndp[at]
    }

    /// A system's best policy in a setting.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn run(
        &self,
        setting: &Setting<'_>,
        system: &System,
        by: TimingMethod,
    ) -> Result<Outcome, StepsError> {
        let mut best: Option<Outcome> = None;
        for &policy in system.policies {
            let Setting { machine, model, batch, source } = setting.clone();
            let cached = if system.gpu_cache { machine.cached } else { 0.0 };
            let machine = Machine { fetches: system.fetches, cached, ..machine };
            let case = Case { machine, model, batch, policy, ndp: self.ndp(model), source, size: self.size };
            let outcome = case.run()?;
            if best.as_ref().is_none_or(|b| by.of(&outcome) < by.of(b)) {
                best = Some(outcome);
            }
        }
        Ok(best.unwrap_or_default())
    }

    /// Microseconds of every system.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn times(
        &self,
        setting: &Setting<'_>,
        systems: &[System; 5],
        by: TimingMethod,
    ) -> Result<[f64; 5], StepsError> {
        let mut times = [0.0; 5];
        for (time, system) in times.iter_mut().zip(systems) {
            *time = by.of(&self.run(setting, system, by)?);
        }
        Ok(times)
    }

    /// The speedups of TriMoE and of moec over the best baseline, each model's mean over the batches of
    /// §5.1.3.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn speedups(&self, variant: &Variant) -> Result<[[f64; 2]; 3], StepsError> {
        let mut out = [[0.0; 2]; 3];
        for (out, model) in out.iter_mut().zip(&MODELS) {
            for batch in BATCHES {
                let Variant { machine, source, systems, by, .. } = variant;
                let setting = Setting { machine: machine.clone(), model, batch, source };
                let times = self.times(&setting, systems, *by)?;
                for (o, s) in out.iter_mut().zip(over_best(&times)) {
                    *o += s / BATCHES.len() as f64;
                }
            }
        }
        Ok(out)
    }

    /// Variants that the speedup hangs on.
    pub fn variants(&self) -> Vec<Variant> {
        let base = Variant {
            name: "as simulated",
            machine: self.machine(),
            source: self.drawn.clone(),
            systems: SYSTEMS,
            by: TimingMethod::Simulation,
        };
        let machine = |name, machine| Variant { name, machine, ..base.clone() };
        let m = self.machine();
        let still = Source::Drawn(0.0);
        let bare = [KLOTSKI, KTRANSFORMERS, MONDE_BARE, TRIMOE, MOEC];
        let bare = Variant { name: "MoNDE keeps no experts on the GPU", systems: bare, ..base.clone() };
        let equations = Variant { name: "the equations alone", by: TimingMethod::Equations, ..base.clone() };
        vec![
            base.clone(),
            Variant { name: "loads of OLMoE", source: self.recorded.clone(), ..base.clone() },
            Variant { name: "loads that do not drift", source: still.clone(), ..base.clone() },
            machine("memory at the rates of Table 1", Machine { rates: Rates::peak(), ..m.clone() }),
            machine("a CPU that computes as moec's kernels", Machine { moec_kernels: true, ..m.clone() }),
            machine("no experts in the GPU's memory", Machine { cached: 0.0, ..m.clone() }),
            machine("twice as many in the GPU's memory", Machine { cached: 0.2, ..m.clone() }),
            machine("rows cross PCIe in no time", Machine { rows: false, ..m.clone() }),
            bare.clone(),
            Variant { name: CLOSEST_VARIANT, source: still.clone(), ..bare },
            equations.clone(),
            Variant {
                name: "the equations alone, loads that do not drift",
                source: still.clone(),
                ..equations.clone()
            },
            Variant {
                name: "the equations alone, loads that do not drift, memory at the rates of Table 1",
                source: still,
                machine: Machine { rates: Rates::peak(), ..m },
                ..equations
            },
        ]
    }

    /// Milliseconds of TriMoE's MoE layer of Qwen3 at batch 512 by DIMMs with NDP units, and moec's.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn by_dimms(&self, counts: &[usize]) -> Result<Vec<(f64, [f64; 2])>, StepsError> {
        let of = |&dimms: &usize| {
            let machine = Machine { dimms, ..self.machine() };
            Ok((dimms as f64, self.two(machine)?))
        };
        counts.iter().map(of).collect()
    }

    /// The same by multiples of the CPU's rate.
    ///
    /// # Errors
    /// A setup that cannot be.
    pub fn by_cpu(&self, rates: &[f64]) -> Result<Vec<(f64, [f64; 2])>, StepsError> {
        rates.iter().map(|&cpu| Ok((cpu, self.two(Machine { cpu, ..self.machine() })?))).collect()
    }

    fn two(&self, machine: Machine) -> Result<[f64; 2], StepsError> {
        let setting = Setting { machine, ..self.setting(&QWEN, BATCH) };
        let ms = |system| self.run(&setting, system, TimingMethod::Simulation).map(|o| o.moe_us * 1e-3);
        Ok([ms(&TRIMOE)?, ms(&MOEC)?])
    }
}

/// Speedups of TriMoE and moec over the best baseline.
pub fn over_best(times: &[f64; 5]) -> [f64; 2] {
    let best = times[..BASELINES].iter().copied().fold(f64::INFINITY, f64::min);
    [best / times[3], best / times[4]]
}
