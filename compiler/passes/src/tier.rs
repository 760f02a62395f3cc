//! Pass `tier`: the capacity of each expert in tokens per call (NPUMoE, §4.1).
//!
//! A static graph has a fixed number of rows. With one capacity for all experts, either most experts are
//! padded, or the few busy ones drop tokens. So the experts of a layer share a small number of capacities,
//! the tiers. Every expert gets the smallest tier that covers its expected load.
//!
//! * The expected load of an expert is a quantile of its loads over the recorded chunks. In a share
//!   `coverage` of the chunks the load is at most that. Its mean is the expert's share of B·k tokens, which
//!   is B·k/E when routing is balanced. The paper's B/E is the case of one expert per token.
//! * An expert that calibration met too rarely has no meaningful quantile. After `n` tokens of `N` its rate
//!   is at most `(n + 1.65 √n + 3) / N`, with 95 % confidence (Poisson; for n = 0 the rule of three). Its
//!   expected load is at least that rate of a chunk. Such experts are marked, and named in a warning.
//! * `capacity` under `[experts]` replaces the quantile by the paper's estimates, or by a number.
//! * Tiers are multiples of the device's alignment. They are chosen to minimize the rows of all experts.

use moec_base::error::{Error, Result};
use moec_config::{Capacity, ExpertsConfig, Overflow};
use moec_costs::units::Units;
use moec_ir::placement::{Expected, ExpertRow, ExpertTable, Placement};
use moec_profile::importance::ENOUGH;
use moec_profile::loads::{LayerLoads, Loads};
use std::cmp::Reverse;

/// Coverages that a quality budget chooses from. Those past 1 are multiples of the largest recorded load,
/// since other text may load an expert more.
pub const LADDER: [f64; 16] =
    [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 0.995, 1.0, 1.25, 1.5, 2.0, 3.0, 8.0];

/// Makes a placement with the capacity of every expert, all of them on the NPU: later passes choose the unit.
pub fn tier(loads: &Loads, units: &Units<'_>, config: &ExpertsConfig, coverage: f64) -> Placement {
    let table = |layer: &LayerLoads| table(layer, loads.chunk, units, config, coverage);
    Placement {
        chunk: loads.chunk,
        overflow: overflow(config),
        units: units.names(),
        ops: Vec::new(),
        experts: loads.layers.iter().map(table).collect(),
    }
}

/// Default treatment of rows past a capacity.
fn overflow(config: &ExpertsConfig) -> Overflow {
    config.overflow.unwrap_or(Overflow::Spill)
}

fn table(
    layer: &LayerLoads,
    chunk: u32,
    units: &Units<'_>,
    config: &ExpertsConfig,
    coverage: f64,
) -> ExpertTable {
    let align = units.alignment();
    let needs: Vec<u32> = match config.capacity {
        Capacity::Coverage => (0..layer.experts()).map(|e| expected(layer, e, chunk, coverage)).collect(),
        Capacity::Mean => (0..layer.experts()).map(|e| layer.mean(e, chunk).ceil() as u32).collect(),
        Capacity::Quartile => by_quartile(layer, chunk),
        Capacity::Rows(rows) => vec![rows; layer.experts()],
    };
    let needs: Vec<u32> =
        needs.into_iter().map(|need| need.min(chunk).next_multiple_of(align).max(align)).collect();
    let tiers = tiers(&needs, config.tiers);
    let row = |(e, need): (usize, &u32)| {
        // The tiers descend, and the first covers every need.
        let tier = tiers.iter().rposition(|c| c >= need).unwrap_or(0);
        ExpertRow {
            capacity: tiers[tier],
            group: 0,
            unit: units.npu_index(),
            tier: Some(tier as u32),
            fallback: (overflow(config) == Overflow::Spill).then(|| units.cpu_index()),
            load: Some(layer.mean(e, chunk) as f32),
            few: is_few(layer, e),
        }
    };
    let experts = needs.iter().enumerate().map(row).collect();
    let mut table =
        ExpertTable { layer: layer.layer, k: layer.k, tiers, expected: None, groups: Vec::new(), experts };
    table.expected = Some(predict(layer, &table));
    table
}

/// Four times the mean load of the experts for the busiest quarter, and the mean load for the others (NPUMoE,
/// §1).
fn by_quartile(layer: &LayerLoads, chunk: u32) -> Vec<u32> {
    const MULTIPLE: f64 = 4.0;
    let experts = layer.experts();
    let base = f64::from(chunk) * f64::from(layer.k) / experts.max(1) as f64;
    let mut order: Vec<usize> = (0..experts).collect();
    order.sort_by_key(|&e| (Reverse(layer.chosen[e]), e));
    let mut needs = vec![base.ceil() as u32; experts];
    order[..experts.div_ceil(4)].iter().for_each(|&e| needs[e] = (base * MULTIPLE).ceil() as u32);
    needs
}

/// True if calibration met an expert too rarely to judge it.
fn is_few(layer: &LayerLoads, expert: usize) -> bool {
    layer.chosen[expert] < ENOUGH
}

/// The expected load of an expert: at most the whole chunk.
fn expected(layer: &LayerLoads, expert: usize, chunk: u32, coverage: f64) -> u32 {
    let load = (f64::from(layer.quantile(expert, coverage.min(1.0))) * coverage.max(1.0)).ceil() as u32;
    let least = if is_few(layer, expert) {
        let n = layer.chosen[expert] as f64;
        let most = n + 1.65 * n.sqrt() + 3.0;
        (most * f64::from(chunk) / layer.tokens.max(1) as f64).ceil().min(f64::from(chunk)) as u32
    } else {
        0
    };
    load.max(least).min(chunk)
}

/// Returns at most `most` capacities, descending. Every need gets the smallest capacity that is at least as
/// large, and the sum of these is minimal. Among several such sets one of the smallest is taken.
///
/// `best[t][i]` is the least sum for the needs from the `i`-th largest on, in `t` tiers. The largest of these
/// needs is a tier, and covers as many of the next needs as reduces the sum.
pub(super) fn tiers(needs: &[u32], most: usize) -> Vec<u32> {
    let mut sorted = needs.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let mut values: Vec<(u32, u64)> = Vec::new();
    for need in sorted {
        match values.last_mut() {
            Some((value, count)) if *value == need => *count += 1,
            _ => values.push((need, 1)),
        }
    }
    let n = values.len();
    // (sum, first value of the next tier), for one tier: everything.
    let mut best: Vec<Vec<(u64, usize)>> = vec![vec![(u64::MAX, n); n]; most + 1];
    for tier in 1..=most {
        for i in (0..n).rev() {
            let mut count = 0;
            for next in i + 1..=n {
                count += values[next - 1].1;
                let rest = if next == n { Some(0) } else { Some(best[tier - 1][next].0) };
                let sum = rest.filter(|r| *r < u64::MAX).map(|r| r + count * u64::from(values[i].0));
                if let Some(sum) = sum.filter(|s| *s < best[tier][i].0) {
                    best[tier][i] = (sum, next);
                }
            }
        }
    }
    // The fewest tiers that reach the least sum.
    let least = best.iter().filter_map(|b| b.first()).map(|b| b.0).min().unwrap_or(0);
    let mut tier = best.iter().position(|b| b.first().is_some_and(|b| b.0 == least)).unwrap_or(0);
    let (mut found, mut i) = (Vec::new(), 0);
    while i < n && tier > 0 {
        found.push(values[i].0);
        i = best[tier][i].1;
        tier -= 1;
    }
    found
}

/// Prediction of the profile for a table. Experts with a capacity overflow past it and are padded up to it,
/// one graph at a time if there are groups. The overflow is that of text which the capacities were not made
/// for ([`LayerLoads::held_out_overflow`]).
pub fn predict(layer: &LayerLoads, table: &ExpertTable) -> Expected {
    let grouped = !table.groups.is_empty();
    let capacity = |e: usize| table.experts.get(e).map(|r| r.capacity).filter(|c| *c > 0);
    let graph = |e: usize| if grouped { table.experts.get(e).map_or(0, |r| r.group as usize) } else { e };
    let rows = |g: usize, most: u32| {
        let group = table.groups.get(g)?;
        Some(group.rows(most, table.tiers.get(group.tier as usize).copied()?))
    };
    let sum = layer.account_sized(&capacity, &graph, &rows);
    Expected {
        imbalance: layer.imbalance() as f32,
        overflow: layer.held_out_overflow(&capacity) as f32,
        padding: sum.padding_rate() as f32,
    }
}

/// List of the experts that calibration met too rarely, by layer, for a warning.
pub fn few(placement: &Placement) -> Option<String> {
    const SHOWN: usize = 8;
    let named = |t: &ExpertTable| {
        let few: Vec<String> =
            t.experts.iter().enumerate().filter(|(_, r)| r.few).map(|(e, _)| e.to_string()).collect();
        (!few.is_empty()).then(|| format!("layer {}: {}", t.layer, few.join(", ")))
    };
    let layers: Vec<String> = placement.experts.iter().filter_map(named).collect();
    let more = layers.len().saturating_sub(SHOWN);
    let shown = layers.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    let more = if more > 0 { format!("; and {more} more layers") } else { String::new() };
    (!layers.is_empty()).then(|| {
        format!(
            "calibration used some experts fewer than {ENOUGH} times, so their capacities are estimates with a margin \
             ({shown}{more}); use more text or more `tokens`"
        )
    })
}

/// The smallest coverage of [`LADDER`] whose loss is within the budget. `loss` returns the increase of
/// perplexity for a coverage, as a share; it is called about four times.
///
/// # Errors
/// Fails if `loss` fails, or if no coverage keeps the budget.
pub fn smallest_coverage(budget: f64, loss: &mut dyn FnMut(f64) -> Result<f64>) -> Result<f64> {
    let (mut from, mut to) = (0, LADDER.len());
    let mut kept = None;
    let mut last = 0.0;
    // More coverage drops less. If noise contradicts that, the chosen coverage was still measured within the
    // budget.
    while from < to {
        let at = usize::midpoint(from, to);
        last = loss(LADDER[at])?;
        if last <= budget {
            kept = Some(LADDER[at]);
            to = at;
        } else {
            from = at + 1;
        }
    }
    kept.ok_or_else(|| {
        Error::limit(format!(
            "even capacities for eight times the calibrated loads raise perplexity by {:.3} %, and \
             `quality.max_perplexity_increase` allows {:.3} %",
            last * 100.0,
            budget * 100.0
        ))
        .hint("set `overflow = \"spill\"` under `[experts]`, which drops no tokens")
    })
}
