//! NPUMoE's evaluation again, simulated: every configuration, every ratio, and the figures that check the
//! constants.

use super::drops::{self, Drops};
use super::overlap::{Pair, overlaps};
use super::paper::{CLAIMS, CONFIGS, Config, Metric, ORDERS, Ratio};
use crate::claim::{Claim, Claims, Quantities};
use crate::printed::Printed;
use crate::recorded::{DOMAINS, Recorded};
use moec_base::{Error, Result};
use moec_config::{ExpertsConfig, Overflow};
use moec_costs::run::{Outcome, Prompt, Scenario};
use moec_costs::timeline::{Task, TaskKind};
use moec_costs::units::Units;
use moec_costs::{Constants, Energy};
use moec_device::Device;
use moec_simulate::System;
use moec_simulate::systems::{ABLATIONS, ANEMLL, COREML_CPU, COREML_NAIVE, OURS, SYSTEMS};
use std::collections::BTreeMap;

/// Seeds of prompts and of decoded tokens; calibration draws from others.
const PROMPT: u64 = 1;
const DECODE: u64 = 2;

/// The devices that NPUMoE measured.
pub const DEVICES: [&str; 2] = ["m2-ultra", "m2-max"];

/// Devices and recorded routing, ready to run configurations.
#[derive(Debug)]
pub struct Bench {
    recorded: Recorded,
    devices: Vec<Device>,
}

/// A system on the prompts of a configuration, one of each domain: sums over them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Total {
    /// Prompts.
    pub prompts: u32,
    /// Microseconds.
    pub wall_us: f64,
    /// Microseconds that the CPU works.
    pub cpu_us: f64,
    /// Microseconds that the NPU works.
    pub npu_us: f64,
    /// Joules.
    pub energy: Energy,
    /// Tokens.
    pub tokens: u64,
    /// Microseconds of each part, its launches and waiting included.
    pub parts: BTreeMap<TaskKind, f64>,
    /// Microseconds that launch graphs of experts, bring them to the NPU and wait for them.
    pub dispatch_us: f64,
    /// Pairs that routers made, pairs dropped, rows computed by graphs, rows of padding.
    pub rows: [u64; 4],
}

impl Total {
    /// Adds a prompt.
    pub fn add(&mut self, outcome: &Outcome) {
        let line = &outcome.timeline;
        self.prompts += 1;
        self.wall_us += line.wall_us;
        self.cpu_us += outcome.cpu_us;
        self.npu_us += outcome.npu_us;
        self.energy.cpu_j += outcome.energy.cpu_j;
        self.energy.npu_j += outcome.energy.npu_j;
        self.energy.memory_j += outcome.energy.memory_j;
        self.tokens += outcome.tokens;
        for part in [
            TaskKind::Attention,
            TaskKind::Router,
            TaskKind::Gather,
            TaskKind::Pad,
            TaskKind::Experts,
            TaskKind::Scatter,
        ] {
            *self.parts.entry(part).or_default() += line.part_us(part);
        }
        // A layer has two of them.
        *self.parts.entry(TaskKind::Residual).or_default() += line.sum_us(TaskKind::Residual);
        let launching =
            |t: &Task| if matches!(t.kind, TaskKind::Launch | TaskKind::Load) { t.us } else { 0.0 };
        let experts = line.tasks.iter().filter(|t| t.part == TaskKind::Experts);
        self.dispatch_us += experts.map(|t| launching(t) + t.lag_us).sum::<f64>();
        let rows = [outcome.routed, outcome.dropped, outcome.rows, outcome.padding];
        self.rows.iter_mut().zip(rows).for_each(|(sum, n)| *sum += n);
    }

    /// Value of a metric.
    pub fn metric(&self, metric: Metric) -> f64 {
        match metric {
            Metric::Latency => self.wall_us,
            Metric::Energy => self.energy.total_j() / self.tokens.max(1) as f64,
            Metric::Cpu => self.cpu_us,
        }
    }

    /// Mean milliseconds of a part in one layer over all chunks of a prompt, as Table 4 counts.
    pub fn block_ms(&self, part: TaskKind, config: &Config) -> f64 {
        let layers = f64::from(config.shape.layers) * f64::from(self.prompts.max(1));
        self.parts.get(&part).copied().unwrap_or(0.0) * 1e-3 / layers
    }
}

/// A configuration's systems.
#[derive(Clone, Debug)]
pub struct Measured {
    /// Configuration.
    pub config: Config,
    /// Systems and their results.
    pub systems: Vec<(System, Total)>,
}

impl Measured {
    /// Total of a system.
    pub fn total(&self, system: &str) -> Option<&Total> {
        self.systems.iter().find(|(s, _)| s.name == system).map(|(_, t)| t)
    }

    /// Ratio of two systems.
    pub fn ratio(&self, metric: Metric, of: &str, to: &str) -> Option<f64> {
        Some(self.total(of)?.metric(metric) / self.total(to)?.metric(metric))
    }
}

/// An order of two systems that the paper gives.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    /// Configuration.
    pub config: &'static str,
    /// Metric.
    pub metric: Metric,
    /// The better system in the paper, and its ratio to ours if given.
    pub less: (&'static str, Option<f64>),
    /// The worse one.
    pub more: (&'static str, Option<f64>),
    /// Simulated ratio of the worse to the better: below 1 the order is the other way round.
    pub found: f64,
}

impl Order {
    /// Whether the simulation agrees with it.
    pub fn holds(&self) -> bool {
        self.found > 1.0
    }
}

/// Everything.
#[derive(Clone, Debug)]
pub struct Report {
    /// Fitted constants.
    pub constants: Constants,
    /// Configurations.
    pub measured: Vec<Measured>,
    /// Figures: ratios of two systems first.
    pub claims: Claims,
    /// Orders.
    pub orders: Vec<Order>,
    /// Overlap@K of recorded data sets.
    pub overlap: Vec<Pair>,
    /// Measured quality by dropped tokens.
    pub drops: Drops,
}

/// A device whose units run one graph at a time.
pub fn serial(mut device: Device) -> Device {
    device.units.iter_mut().for_each(|unit| unit.queues = None);
    device
}

impl Bench {
    /// The built-in devices and counts. Launches are serial, as in Table 4 and in the rows of Table 5 that the
    /// constants were fitted to.
    ///
    /// # Errors
    /// Our bug: files that came with moec do not parse.
    pub fn new() -> Result<Self> {
        let find = |name: &str| {
            let found =
                Device::find(name).map_err(|e| Error::bug(format!("the device file of {name}")).because(e));
            found.map(serial)
        };
        Ok(Self {
            recorded: Recorded::built_in()?,
            devices: DEVICES.into_iter().map(find).collect::<Result<_>>()?,
        })
    }

    pub(super) fn units(&self, device: &str) -> Result<Units<'_>> {
        let found = self.devices.iter().find(|d| d.name == device);
        found.and_then(Units::of).ok_or_else(|| Error::bug(format!("{device} has no NPU")))
    }

    /// A system on a configuration.
    ///
    /// # Errors
    /// An expert that fits into no graph.
    pub fn total(&self, config: &Config, system: &System, constants: Constants) -> Result<Total> {
        Ok(self.totals(config, &[*system], constants)?.remove(0).1)
    }

    fn totals(
        &self,
        config: &Config,
        systems: &[System],
        constants: Constants,
    ) -> Result<Vec<(System, Total)>> {
        let (model, units) = (config.shape.model(), self.units(config.device)?);
        let calibration = self.recorded.calibration(&model, config.chunk);
        let scene = Scenario {
            model: &model,
            units: &units,
            constants,
            calibration: &calibration,
            coverage: ExpertsConfig::DEFAULT.coverage,
            // As the paper does.
            overflow: Overflow::Prune,
        };
        let chunks = config.prompt.div_ceil(config.chunk);
        let prompts = DOMAINS.map(|domain| Prompt {
            chunk: config.chunk,
            chunks: self.recorded.prompt(&model, domain, config.chunk, chunks, PROMPT),
            decode: self.recorded.prompt(&model, domain, 1, config.decode, DECODE),
        });
        let of = |system: &System| {
            let placed = system.place(&scene)?;
            let mut total = Total::default();
            for prompt in &prompts {
                total.add(&scene.run(&placed, prompt));
            }
            Ok((*system, total))
        };
        systems.iter().map(of).collect()
    }

    /// The evaluation of NPUMoE on one device, or on all.
    ///
    /// # Errors
    /// An expert that fits into no graph.
    pub fn report(&self, device: Option<&str>, constants: Constants) -> Result<Report> {
        let is_selected = |c: &&Config| device.is_none_or(|d| d == c.device);
        let mut measured = Vec::new();
        for config in CONFIGS.iter().filter(is_selected) {
            let mut systems = SYSTEMS.to_vec();
            if config.ablation {
                systems = vec![OURS];
                systems.extend(ABLATIONS);
            }
            measured.push(Measured { config: *config, systems: self.totals(config, &systems, constants)? });
        }
        let mut all = Quantities::default();
        for m in &measured {
            for (of, _) in &m.systems {
                for (to, _) in &m.systems {
                    for metric in Metric::ALL {
                        if let Some(ratio) = m.ratio(metric, of.name, to.name) {
                            all.put(m.config.ratio(metric, of.name, to.name), ratio);
                        }
                    }
                }
            }
        }
        if device.is_none_or(|d| d == "m2-ultra") {
            self.figures(&mut all, &measured)?;
        }
        let claims = Claims::of_computed(CLAIMS, &all)?;
        let orders = orders(&measured, &claims);
        let (overlap, drops) = (overlaps()?, drops::measured()?);
        Ok(Report { constants, measured, claims, orders, overlap, drops })
    }
}

/// Every pair that the paper orders: ours before each baseline, the baselines by their ratios, and statements
/// in words. Pairs whose ratios were all used to fit constants are left out.
fn orders(measured: &[Measured], claims: &Claims) -> Vec<Order> {
    let mut out = Vec::new();
    for m in measured {
        for metric in Metric::ALL {
            let ratios = claims.compared.iter().filter_map(|c| Some((Ratio::of(c)?, c)));
            let own =
                ratios.filter(|(r, _)| r.config == m.config.name && r.metric == metric && r.to == OURS.name);
            let mut known: Vec<(&'static str, Option<f64>)> = vec![(OURS.name, Some(1.0))];
            let (mut ranged, mut used) = (Vec::new(), vec![OURS.name]);
            for (r, c) in own {
                let Some(of) = System::named(r.of).map(|system| system.name) else { continue };
                used.extend(c.used.then_some(of));
                match c.paper {
                    Printed::Is(x) => known.push((of, Some(x))),
                    Printed::Within(from, _) | Printed::Over(from) if from > 1.0 => ranged.push(of),
                    _ => {}
                }
            }
            known.sort_by(|a, b| a.1.partial_cmp(&b.1).unwrap_or(std::cmp::Ordering::Equal));
            let mut add = |less: (&'static str, Option<f64>), more: (&'static str, Option<f64>)| {
                if let Some(found) = m.ratio(metric, more.0, less.0) {
                    out.push(Order { config: m.config.name, metric, less, more, found });
                }
            };
            for (i, less) in known.iter().enumerate() {
                for more in known[i + 1..].iter().filter(|m| !(used.contains(&less.0) && used.contains(&m.0)))
                {
                    add(*less, *more);
                }
            }
            for of in ranged {
                add((OURS.name, Some(1.0)), (of, None));
            }
            for o in ORDERS.iter().filter(|o| o.config == m.config.name && o.metric == metric) {
                add((o.less, None), (o.more, None));
            }
        }
    }
    out
}

impl Report {
    /// Claims about ratios of two systems.
    pub fn ratios(&self) -> impl Iterator<Item = (Ratio<'_>, &Claim)> {
        self.claims.compared.iter().filter_map(|c| Some((Ratio::of(c)?, c)))
    }

    /// The other claims.
    pub fn figures(&self) -> impl Iterator<Item = &Claim> {
        self.claims.compared.iter().filter(|c| Ratio::of(c).is_none())
    }

    /// Orders that the simulation has the other way round.
    pub fn reversed(&self) -> Vec<&Order> {
        self.orders.iter().filter(|o| !o.holds()).collect()
    }

    /// Ratios of the baselines in PhiMoE's prefill that are outside of the range that §5.2 gives for a
    /// metric.
    pub fn outside(&self) -> Vec<(&'static str, Metric, &'static str, f64)> {
        let mut out = Vec::new();
        for m in self.measured.iter().filter(|m| m.config.stated) {
            for metric in Metric::ALL {
                for system in [COREML_CPU, COREML_NAIVE, ANEMLL] {
                    let (from, to) = metric.range();
                    let found = m.ratio(metric, system.name, OURS.name);
                    if let Some(x) = found.filter(|x| !(from..=to).contains(x)) {
                        out.push((m.config.name, metric, system.name, x));
                    }
                }
            }
        }
        out
    }
}
