//! Choice of the experts that leave the CPU, layer after layer: their units, the reasons, and their costs on
//! either side.

use super::{UnitAssignment, most, size, takes_experts};
use crate::decisions::Decision;
use moec_base::error::{Error, Result};
use moec_config::UnitSetting;
use moec_costs::units::{DynamicUnit, UnitList};
use moec_ir::Module;
use moec_ir::plan::ExpertTable;
use moec_profile::loads::Loads;
use moec_runtime::schedule::GpuResidents;
use std::collections::BTreeMap;

/// Expected µs of an expert in a call, transfers of its rows in both directions included.
struct Cost {
    expert: u32,
    /// On the CPU.
    here: f64,
    /// On the cheapest accelerator whose memory has room; `None` if no accelerator has.
    there: Option<f64>,
    /// That accelerator, if it is cheaper than the CPU.
    unit: Option<u32>,
}

/// Experts of a layer that leave the CPU.
#[derive(Default)]
pub(super) struct Choice {
    /// Experts, each with its accelerator.
    pub(super) experts: Vec<(u32, u32)>,
    /// Costs of the layer's experts, if costs decide.
    costs: Vec<Cost>,
}

/// The state of that choice, layer after layer.
pub(super) struct Leaving<'a> {
    pub(super) module: &'a Module,
    pub(super) list: &'a UnitList<'a>,
    pub(super) config: &'a moec_config::PlacementConfig,
    /// The unit that `config` names for experts.
    pub(super) named: Option<u32>,
    /// Layers with experts.
    pub(super) layers: usize,
    /// Bytes of each memory that are already taken.
    pub(super) taken: BTreeMap<u32, u64>,
}

impl Leaving<'_> {
    /// Experts of a layer that leave the CPU.
    /// # Errors
    /// Fails if `placement.experts` gives the CPU a share.
    /// A share for the CPU.
    pub(super) fn choose(
        &mut self,
        layer: usize,
        table: &ExpertTable,
        loads: Option<&Loads>,
        assignment: &UnitAssignment,
    ) -> Result<Choice> {
        let load = loads.and_then(|l| l.layers.iter().find(|l| l.layer == table.layer));
        let mut popular: Vec<u32> = (0..table.experts.len() as u32).collect();
        popular.retain(|&e| table.experts[e as usize].unit == 0);
        let seen = |e: u32| load.and_then(|l| l.chosen.get(e as usize)).copied().unwrap_or(0);
        popular.sort_by_key(|&e| (std::cmp::Reverse(seen(e)), e));
        let all_on = |unit: u32| popular.iter().map(|&e| (e, unit)).collect();
        let (list, policy) = (self.list, self.config.policy);
        let experts = match (&self.config.experts, self.named.and_then(|n| list.accelerator(n))) {
            // On targets with NDP DIMMs `plan_expert_schedule` gives an expert several units.
            (UnitSetting::Auto, _) if list.has_near_data => Vec::new(),
            // With a policy of cache frames `plan_gpu_expert_cache` places the experts.
            _ if policy.is_some_and(|s| s.gpu_residents != GpuResidents::Layers) => Vec::new(),
            (_, accelerator) if policy.is_some() => {
                let accelerator = accelerator.or(list.accelerators.first().copied());
                let accelerator = accelerator.ok_or_else(|| Error::bug("a policy without a unit"))?;
                if self.whole_layer_fits(layer, table, accelerator, assignment) {
                    all_on(accelerator.index)
                } else {
                    Vec::new()
                }
            }
            (UnitSetting::Auto, _) => {
                let rows = |e: u32| match load {
                    Some(l) => l.mean(e as usize, loads.map_or(1, |l| l.chunk)),
                    None => f64::from(table.k) / table.experts.len().max(1) as f64,
                };
                let costs = self.costs(table.layer, &popular, &rows, assignment);
                let experts = costs.iter().filter_map(|c| Some((c.expert, c.unit?))).collect();
                return Ok(Choice { experts, costs });
            }
            (UnitSetting::Share(_, percent), Some(accelerator)) => {
                let count = (table.experts.len() * usize::from(*percent)).div_ceil(100);
                popular.iter().take(count).map(|&e| (e, accelerator.index)).collect()
            }
            (UnitSetting::Share(name, _), None) => {
                return Err(Error::input(format!("`experts` under `[placement]` gives `{name}` a share"))
                    .hint("name an accelerator: the CPU computes the others"));
            }
            (_, Some(accelerator)) => all_on(accelerator.index),
            (_, None) => Vec::new(),
        };
        Ok(Choice { experts, ..Choice::default() })
    }

    /// True if all experts of a layer go to a unit that takes whole layers. With a requested share these are
    /// the first layers, else as many as its memory has room for. After the first layer that does not fit, no
    /// layer goes there.
    fn whole_layer_fits(
        &mut self,
        layer: usize,
        table: &ExpertTable,
        accelerator: DynamicUnit<'_>,
        assignment: &UnitAssignment,
    ) -> bool {
        let whole = size(self.module, table.layer).bytes * table.experts.len() as u64;
        let taken = self.taken.entry(assignment.memory(accelerator.index)).or_default();
        let fits = match self.config.experts {
            UnitSetting::Share(_, percent) => layer < (self.layers * usize::from(percent) + 50) / 100,
            _ => taken.saturating_add(whole) <= most(assignment, accelerator.index),
        };
        *taken = if fits { taken.saturating_add(whole) } else { u64::MAX };
        fits
    }

    /// The costs of experts, each with the cheapest other unit if it costs less than the CPU and its memory
    /// has room. `rows` gives the expected rows per call. A unit without a table of times is not chosen.
    fn costs(
        &mut self,
        layer: u32,
        popular: &[u32],
        rows: &dyn Fn(u32) -> f64,
        assignment: &UnitAssignment,
    ) -> Vec<Cost> {
        let (device, size) = (self.list.device, size(self.module, layer));
        // Other hosts have what `hosts` under `[placement]` gives them.
        let runs =
            |f: &&DynamicUnit<'_>| f.unit.host.is_none() && takes_experts(self.module, layer, **f).is_ok();
        let able: Vec<DynamicUnit<'_>> = self.list.accelerators.iter().filter(runs).copied().collect();
        let cpu = device.units.iter().find(|u| u.kind == moec_device::UnitKind::Cpu);
        let mut costs = Vec::new();
        for &expert in popular {
            let n = rows(expert);
            let Some(here) = cpu.and_then(|p| p.matmul_us(n, size.weights as f64)) else { break };
            let cost = |accelerator: &DynamicUnit<'_>| {
                let own = accelerator.unit.matmul_us(n, size.weights as f64)? + accelerator.unit.launch_us();
                let bytes = n * size.hidden as f64 * 4.0;
                let transfer = match (device.cpu_memory(), device.memory_of(accelerator.unit)) {
                    (Some(host), Some(there)) => {
                        device.transfer_us(host, there, bytes)? + device.transfer_us(there, host, bytes)?
                    }
                    _ => 0.0,
                };
                Some(own + transfer)
            };
            let fits = |accelerator: &&DynamicUnit<'_>| {
                let memory = assignment.memory(accelerator.index);
                let taken = self.taken.get(&memory).copied().unwrap_or(0).saturating_add(size.bytes);
                memory == 0 || taken <= most(assignment, accelerator.index)
            };
            let best = able.iter().filter(fits).filter_map(|f| Some((cost(f)?, f.index)));
            let best = best.min_by(|a, b| a.0.total_cmp(&b.0));
            let unit = best.filter(|(us, _)| *us < here).map(|(_, unit)| unit);
            if let Some(unit) = unit {
                *self.taken.entry(assignment.memory(unit)).or_default() += size.bytes;
            }
            costs.push(Cost { expert, here, there: best.map(|(us, _)| us), unit });
        }
        costs
    }

    /// The decision about which experts of a layer left the CPU; `None` if nothing was requested and nothing
    /// compared.
    pub(super) fn decision(&self, table: &ExpertTable, choice: &Choice) -> Option<Decision> {
        let Choice { experts: chosen, costs } = choice;
        if chosen.is_empty() && costs.is_empty() {
            return None;
        }
        let count = table.experts.len();
        let mut of_unit: BTreeMap<u32, usize> = BTreeMap::new();
        for &(_, unit) in chosen {
            *of_unit.entry(unit).or_default() += 1;
        }
        let named = |unit: u32| self.list.device.units.get(unit as usize).map_or("?", |u| u.name.as_str());
        let part = |(&unit, &n): (&u32, &usize)| match n {
            n if n == count => format!("all on `{}`", named(unit)),
            n => format!("{n} of {count} on `{}`", named(unit)),
        };
        let taken: Vec<String> = of_unit.iter().map(part).collect();
        let taken = if taken.is_empty() { format!("all on `{}`", named(0)) } else { taken.join(", ") };
        let why = match &self.config.experts {
            _ if chosen.is_empty() => "no other unit costs less and has room",
            _ if self.config.policy.is_some() => "whole layers, as far as the unit's memory has room",
            UnitSetting::Auto if chosen.len() < costs.len() => {
                "the others cost less on the CPU, or do not fit"
            }
            UnitSetting::Auto => "they cost less there than on the CPU",
            UnitSetting::Share(..) => {
                "the share that `placement.experts` requests, the most frequently chosen first"
            }
            UnitSetting::Unit(_) => "requested by `placement.experts`",
        };
        let mut all = Decision::new("assign_units", "units of experts", taken, why).in_layer(table.layer);
        if !costs.is_empty() {
            all = all.with(&[
                ("all_on_the_cpu_us", costs.iter().map(|c| c.here).sum()),
                ("as_placed_us", costs.iter().map(|c| c.unit.and(c.there).unwrap_or(c.here)).sum()),
            ]);
            if costs.iter().all(|c| c.there.is_some()) {
                all = all.with(&[("all_beside_it_us", costs.iter().filter_map(|c| c.there).sum())]);
            }
        }
        Some(all)
    }
}
