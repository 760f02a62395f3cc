//! Pass `group`: experts that share a static graph (NPUMoE, §4.2).
//!
//! With one graph per expert there are too many launches: every launch costs the same, however little it
//! computes. So experts of one tier, which have equal numbers of rows, share a graph. Popular experts share
//! graphs with popular ones: a graph of unpopular experts is often not needed in a chunk, and may run on
//! another unit. Costs decide the number of experts in a graph:
//!
//! * A graph may not exceed the device's limit in bytes of f16 weights. Beyond it, the device would silently
//!   use the CPU, so that it is an error here.
//! * Among the sizes that fit, each tier of each layer takes the one whose groups cost least on the better of
//!   the two units. Costs include launches, waiting and padding, under the recorded loads. Ties go to larger
//!   groups.
//!
//! The last group of a tier holds the remaining experts.
//!
//! A graph has functions for several numbers of rows, which share its weights. A call takes the smallest that
//! holds the tokens of its busiest expert. So the capacity suffices for a burst, and an ordinary chunk or the
//! short last one of a prompt does not pay for it. The sizes are chosen as tiers are: those with which the
//! recorded chunks compute the fewest rows.

use super::tier::{tier, tiers};
use moec_base::error::{Error, Result};
use moec_config::ExpertsConfig;
use moec_costs::units::{ExpertSize, UnitPreference, Units, expert_sizes_on};
use moec_ir::Module;
use moec_ir::placement::{ExpertGroup, ExpertTable, Placement};
use moec_profile::loads::{LayerLoads, Loads};

/// Options.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Experts per graph; `None` takes the cheapest number.
    pub group: Option<usize>,
    /// Largest number of sizes that a graph has functions for.
    pub sizes: usize,
    /// Preferred unit of groups.
    pub preference: UnitPreference,
}

/// Assigns tiers as [`tier`] does. The number of tiers of each layer, of `1 ..= config.tiers`, is the one
/// that costs least once groups are formed. One tier fewer pads more, and saves a launch. `size` returns the
/// size of a layer's experts. The groups themselves are formed later.
///
/// # Errors
/// Fails as [`group`] does.
pub fn tiered(
    loads: &Loads,
    units: &Units<'_>,
    config: &ExpertsConfig,
    coverage: f64,
    size: &dyn Fn(u32) -> Option<ExpertSize>,
    options: Options,
) -> Result<Placement> {
    let mut best = tier(loads, units, &ExpertsConfig { tiers: 1, ..config.clone() }, coverage);
    let mut least = vec![f64::INFINITY; best.experts.len()];
    for tiers in 1..=config.tiers {
        let tried = tier(loads, units, &ExpertsConfig { tiers, ..config.clone() }, coverage);
        let layers = tried.experts.into_iter().zip(&loads.layers);
        for ((table, layer), (best, least)) in layers.zip(best.experts.iter_mut().zip(&mut least)) {
            let size = size(table.layer);
            let size = size.ok_or_else(|| Error::bug(format!("layer {} has no experts", table.layer)))?;
            let mut grouped = table.clone();
            group_layer(&mut grouped, layer, size, units, options)?;
            let cost = |g: &ExpertGroup| {
                let of = |unit: u32| g.cost_us.get(unit as usize).copied().unwrap_or(0.0);
                let (cpu, npu) = (of(units.cpu_index()), of(units.npu_index()));
                f64::from(if options.preference == UnitPreference::Graphs { npu } else { npu.min(cpu) })
            };
            let cost: f64 = grouped.groups.iter().map(cost).sum();
            // Less than a millionth counts as equal, and among equals the fewest tiers win.
            if cost < *least * (1.0 - 1e-6) {
                (*best, *least) = (table, cost);
            }
        }
    }
    Ok(best)
}

/// Forms the groups of every layer of a placement, all of them still on the NPU.
///
/// # Errors
/// Fails if a graph exceeds the device's limit, with its name, its bytes, and the number of experts that
/// fits.
pub fn group(
    placement: &mut Placement,
    loads: &Loads,
    module: &Module,
    units: &Units<'_>,
    options: Options,
) -> Result<()> {
    let sizes = expert_sizes_on(module, units)?;
    for (table, layer) in placement.experts.iter_mut().zip(&loads.layers) {
        let size = sizes.get(&table.layer).copied();
        let size = size.ok_or_else(|| Error::bug(format!("layer {} has no experts", table.layer)))?;
        group_layer(table, layer, size, units, options)?;
    }
    Ok(())
}

/// Forms the groups of one layer.
///
/// # Errors
/// Fails as [`group`] does.
pub fn group_layer(
    table: &mut ExpertTable,
    layer: &LayerLoads,
    size: ExpertSize,
    units: &Units<'_>,
    options: Options,
) -> Result<()> {
    table.groups.clear();
    let costs = Costs::of(layer, size, units, options.sizes);
    for tier in 0..table.tiers.len() {
        let mut members: Vec<usize> = (0..table.experts.len())
            .filter(|&e| table.experts[e].tier.is_some_and(|t| t as usize == tier))
            .collect();
        members.sort_by_key(|&e| (std::cmp::Reverse(layer.chosen[e]), e));
        if members.is_empty() {
            continue;
        }
        let fits = units.npu.graph_limit().map_or(usize::MAX, |limit| (limit / size.bytes.max(1)) as usize);
        let g = match (options.group, options.preference) {
            // Experts of the CPU need no graph.
            (wanted, UnitPreference::Cpu) => wanted.unwrap_or(members.len()),
            (Some(size_limit), _) => check(table, size_limit.min(members.len()), fits, size, units)?,
            (None, preference) => {
                let most = check(table, fits.clamp(1, members.len()), fits, size, units)?;
                costs.cheapest(&members, most, table.tiers[tier], preference)
            }
        };
        for experts in members.chunks(g.max(1)) {
            let index = table.groups.len() as u32;
            for &e in experts {
                table.experts[e].group = index;
            }
            let sizes = costs.sizes(experts, table.tiers[tier]);
            table.groups.push(ExpertGroup {
                tier: tier as u32,
                unit: units.npu_index(),
                experts: experts.iter().map(|&e| e as u32).collect(),
                // With a single size it is the capacity itself.
                sizes: if sizes.len() > 1 { sizes } else { Vec::new() },
                bytes: size.bytes * experts.len() as u64,
                cost_us: costs.of_group(experts, table.tiers[tier]),
                why: format!("{} to a graph of tier {tier}", plural(experts.len())),
                decode: Vec::new(),
            });
        }
    }
    Ok(())
}

fn plural(experts: usize) -> String {
    if experts == 1 { "1 expert".to_owned() } else { format!("{experts} experts") }
}

/// Returns `g` if so many experts fit into a graph.
fn check(table: &ExpertTable, g: usize, fits: usize, size: ExpertSize, units: &Units<'_>) -> Result<usize> {
    if g <= fits {
        return Ok(g);
    }
    let error = Error::limit(format!(
        "graph `{}` would have {} and {} bytes; the limit of `{}` is {} bytes",
        table.group_name(table.groups.len()),
        plural(g),
        size.bytes.saturating_mul(g as u64),
        units.device.name,
        units.npu.graph_limit().unwrap_or(u64::MAX)
    ));
    Err(match fits {
        0 => error.hint("not even one expert fits: set `experts = \"cpu\"` under `[placement]`"),
        n => error.hint(format!("set `group = {n}` or `group = \"auto\"` under `[experts]`")),
    })
}

/// Costs of groups of a layer's experts.
struct Costs<'a> {
    layer: &'a LayerLoads,
    size: ExpertSize,
    units: &'a Units<'a>,
    /// Largest number of sizes of a graph.
    most: usize,
    /// Expected microseconds per call of each expert on the CPU.
    cpu: Vec<f64>,
}

impl<'a> Costs<'a> {
    fn of(layer: &'a LayerLoads, size: ExpertSize, units: &'a Units<'a>, most: usize) -> Self {
        let cpu = (0..layer.experts()).map(|e| units.cpu_us(layer, e, size)).collect();
        Self { layer, size, units, most, cpu }
    }

    /// The sizes of a graph of these experts, ascending to their capacity. They compute the fewest rows over
    /// the recorded chunks; each chunk needs room for its busiest expert.
    fn sizes(&self, experts: &[usize], capacity: u32) -> Vec<u32> {
        if self.most <= 1 {
            return vec![capacity];
        }
        let align = self.units.alignment();
        let busiest = |s: &Vec<u32>| experts.iter().map(|&e| s[e]).max().unwrap_or(0);
        let needs = self.layer.samples.iter().map(busiest).filter(|&n| n > 0);
        let needs = needs.map(|n| n.next_multiple_of(align).min(capacity));
        // The capacity is always one of them.
        let mut sizes = tiers(&needs.chain([capacity]).collect::<Vec<_>>(), self.most);
        sizes.reverse();
        sizes
    }

    /// Expected microseconds per call, on the CPU and on the NPU.
    fn both(&self, experts: &[usize], capacity: u32) -> (f64, f64) {
        let cpu = experts.iter().map(|&e| self.cpu[e]).sum();
        let sizes = self.sizes(experts, capacity);
        (cpu, self.units.npu_us(self.layer, experts, &sizes, self.size))
    }

    /// The same, one number for each unit of the device.
    fn of_group(&self, experts: &[usize], capacity: u32) -> Vec<f32> {
        let (cpu, npu) = self.both(experts, capacity);
        let units = 0..self.units.device.units.len() as u32;
        units.map(|u| if u == self.units.npu_index() { npu as f32 } else { cpu as f32 }).collect()
    }

    /// The cheapest number of experts in a group, of `1 ..= most`.
    fn cheapest(&self, members: &[usize], most: usize, capacity: u32, preference: UnitPreference) -> usize {
        let total = |g: usize| -> f64 {
            let each = members.chunks(g).map(|experts| {
                let (cpu, npu) = self.both(experts, capacity);
                if preference == UnitPreference::Graphs { npu } else { npu.min(cpu) }
            });
            each.sum()
        };
        // From the largest down, so that among equals the largest wins; less than a millionth counts as
        // equal.
        let mut best = (most, total(most));
        for g in (1..most).rev() {
            let cost = total(g);
            if cost < best.1 * (1.0 - 1e-6) {
                best = (g, cost);
            }
        }
        best.0
    }
}
