//! Output of `moec explain` about the placement.

use super::explain::of_layer;
use super::output;
use moec_base::human;
use moec_device::{GraphForm, is_beside};
use moec_ir::Role;
use moec_ir::placement::{ExpertRow, ExpertTable, OpAssignment, Placement};
use moec_ir::plan::{
    Cached, DecodeUnit, ExpertLayer, ExpertPlacement, ExpertPolicy, Plan, PromptUnits, StateBuf, UnitRef,
};
use moec_runtime::schedule::dispatch::plan;
use moec_runtime::schedule::scheduled::Layout;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// Units in one layer or in all; empty if everything runs on the CPU.
pub(super) fn shown(placement: &Placement, layer: Option<u32>, expert: Option<u32>) -> String {
    let mut text = String::new();
    if !placement.ops.is_empty() && layer.is_none() && expert.is_none() {
        let head = ["entry point", "scope", "operator", "nodes", "runs on", "reason"];
        let mut rows = vec![head.map(str::to_owned).to_vec()];
        rows.extend(placement.ops.iter().map(|o| {
            let (entry, unit) = (o.entry.to_string(), placement.unit(o.unit).to_owned());
            vec![entry, o.scope.to_string(), o.op.clone(), o.nodes.to_string(), unit, o.why.clone()]
        }));
        let _ = write!(text, "\noperators\n{}", output::table(&rows));
    }
    let selected = placement.experts.iter().filter(|t| layer.is_none_or(|l| l == t.layer));
    for table in selected.filter(|_| !placement.is_dynamic()) {
        text += &layer_text(placement, table, expert);
    }
    text
}

/// Format of a unit's static graphs, and the reasons.
pub(super) fn graphs(unit: &str, form: &GraphForm) -> String {
    let rows: Vec<Vec<String>> = form
        .rows()
        .into_iter()
        .map(|(key, value, why)| vec![format!("  {key}"), value, why.to_owned()])
        .collect();
    format!("\nformat of static graphs of {unit}\n{}", output::table(&rows))
}

fn layer_text(placement: &Placement, table: &ExpertTable, expert: Option<u32>) -> String {
    let tiers: Vec<String> = table.tiers.iter().map(ToString::to_string).collect();
    let mut text = format!("\nlayer {}: capacities {} of {}", table.layer, tiers.join(", "), placement.chunk);
    if let Some(e) = table.expected {
        let what = placement.overflow.name();
        let _ = write!(
            text,
            "; expected: {:.2} % overflow ({what}), {:.2} % padding; imbalance {:.2}",
            e.overflow * 100.0,
            e.padding * 100.0,
            e.imbalance
        );
    }
    text.push('\n');
    if let Some(expert) = expert {
        return text + &expert_text(placement, table, expert);
    }
    let head = ["  group", "experts", "capacity", "runs on", "reason"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(table.groups.iter().enumerate().map(|(i, g)| {
        let experts: Vec<String> = g.experts.iter().map(ToString::to_string).collect();
        let capacity = match g.sizes.as_slice() {
            [] => table.tiers.get(g.tier as usize).map_or_else(String::new, ToString::to_string),
            sizes => sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        vec![format!("  {i}"), experts.join(","), capacity, placement.unit(g.unit).to_owned(), g.why.clone()]
    }));
    text += &output::table(&rows);
    text += &decoding_text(placement, table);
    let few: Vec<String> =
        table.experts.iter().enumerate().filter(|(_, r)| r.few).map(|(e, _)| e.to_string()).collect();
    if !few.is_empty() {
        let _ = writeln!(text, "  too few tokens in calibration: {}", few.join(", "));
    }
    text
}

/// Units of a layer's groups in decoding: those that another unit than the CPU has, or else an example.
fn decoding_text(placement: &Placement, table: &ExpertTable) -> String {
    let all = || table.groups.iter().enumerate().flat_map(|(i, g)| g.decode.iter().map(move |d| (i, d)));
    let there: Vec<_> = all().filter(|(_, d)| d.unit != 0).collect();
    let row = |(i, d): (usize, &DecodeUnit)| {
        vec![format!("  {i}"), d.batch.to_string(), placement.unit(d.unit).to_owned(), d.why.clone()]
    };
    match (all().next(), there.is_empty()) {
        (None, _) => String::new(),
        (Some((i, d)), true) => {
            let unit = placement.unit(0);
            format!("  decoding runs all groups on {unit}, as group {i} for {} rows: {}\n", d.batch, d.why)
        }
        (Some(_), false) => {
            let head = ["  group", "decoded rows", "runs on", "reason"].map(str::to_owned).to_vec();
            output::table(&[head].into_iter().chain(there.into_iter().map(row)).collect::<Vec<_>>())
        }
    }
}

/// Rows that costs are shown for.
const ROWS: [u32; 6] = [1, 4, 16, 64, 256, 1024];

/// Costs of an expert on each unit, if experts have no fixed unit: name, and microseconds for [`ROWS`].
fn costs(plan: &Plan) -> Vec<(String, Vec<f64>)> {
    let policy = &plan.experts.policy;
    let Some(Ok(c)) = policy.costs().map(plan::costs) else { return Vec::new() };
    let name = |unit: u32| plan.units.get(unit as usize).map_or("", |u| &u.name);
    let of = |f: &dyn Fn(f64) -> f64| ROWS.iter().map(|&n| f(f64::from(n))).collect::<Vec<_>>();
    let striped = Layout::Striped;
    let mut rows = Vec::new();
    if let Some(hot) = policy.hot().map(name) {
        rows.push((format!("{hot}, in its memory"), of(&|n| c.t_gpu_hit(n))));
        rows.push((format!("{hot}, copied there"), of(&|n| c.t_gpu_miss(n, striped))));
    }
    rows.push((name(0).to_owned(), of(&|n| c.t_cpu(n, striped))));
    rows.extend(policy.cold().map(|cold| (format!("one of {}", name(cold)), of(&|n| c.t_near(n)))));
    rows
}

/// Policy that chooses the units of experts at run time; empty if they are fixed.
pub(super) fn policy(plan: &Plan) -> String {
    let policy = match &plan.experts.policy {
        ExpertPolicy::Fixed => return String::new(),
        ExpertPolicy::Cached(c) => {
            let [prompt, token] = &c.divides;
            format!(
                "divided in every step: prompts by `{prompt}`, tokens by `{token}`; lookahead of {} layers; \
                 {:.2} µs between the experts of two layers; the tables of the layers show the initial cache",
                c.ahead, c.window_us
            )
        }
        ExpertPolicy::Scheduled(s) => {
            let frames = match s.hot.and_then(|u| plan.units.get(u as usize)) {
                Some(unit) => format!("`{}` caches {} experts of a layer", unit.name, s.frames),
                None => "no unit caches hot experts".to_owned(),
            };
            let moves = if s.moves {
                let (rows, us) = s.decode_window.last().copied().unwrap_or_default();
                format!(
                    "experts move beside attention and dense layers: {us:.2} µs per layer for {rows} rows"
                )
            } else {
                "experts do not move".to_owned()
            };
            let refine = s.refine.name();
            let prompts = match s.prefill {
                PromptUnits::Auto => "",
                PromptUnits::Hot => "; prompts run there alone, streamed through these frames",
            };
            format!(
                "assigned to units in every step, refined by `{refine}`; {frames}{prompts}; {moves}; the tables of the layers show the first units"
            )
        }
    };
    let mut head = vec!["  µs per expert, by rows".to_owned()];
    head.extend(ROWS.iter().map(ToString::to_string));
    let mut rows = vec![head];
    for (name, us) in costs(plan) {
        let mut row = vec![format!("  {name}")];
        row.extend(us.iter().map(|us| format!("{us:.2}")));
        rows.push(row);
    }
    format!("\nexperts are {policy}\n{}", output::table(&rows))
}

/// The same as JSON, with the units of each layer; null if all experts are on the CPU or in static graphs.
pub(super) fn policy_json(plan: &Plan) -> Value {
    let ExpertPlacement { layers, policy } = &plan.experts;
    let (name, parameters) = match policy {
        ExpertPolicy::Fixed if layers.is_empty() => return Value::Null,
        ExpertPolicy::Fixed => ("fixed", Value::Null),
        ExpertPolicy::Scheduled(s) => (
            "scheduled",
            json!({
                "refine": s.refine.name(), "moves": s.moves, "dimms": s.dimms, "frames": s.frames,
                "prefill": s.prefill.name(), "prompt_window": s.prompt_window, "decode_window": s.decode_window,
                "traffic": s.traffic,
            }),
        ),
        ExpertPolicy::Cached(c) => {
            let Cached { divides, keeps, ahead, frames, window_us, .. } = c;
            (
                "cached",
                json!({
                    "divides": divides, "keeps": keeps, "ahead": ahead, "frames": frames, "window_us": window_us,
                }),
            )
        }
    };
    let layer = |l: &ExpertLayer| json!({"layer": l.layer, "units": l.units, "starts": l.starts});
    let cost = |(unit, us): (String, Vec<f64>)| json!({"unit": unit, "us": us});
    json!({
        "policy": name, "parameters": parameters, "layers": layers.iter().map(layer).collect::<Vec<_>>(),
        "rows": ROWS,
        "costs": costs(plan).into_iter().map(cost).collect::<Vec<_>>(),
    })
}

/// Contents of each other host or NUMA node, for the first table: weights, states, and what they are of; none on one host.
pub(super) fn hosts(plan: &Plan) -> Vec<Vec<String>> {
    let of_host = |(index, unit): (u32, &UnitRef)| {
        let memory = plan.memories.get(unit.memory as usize).filter(|_| is_beside(&unit.backend))?;
        let segments = memory.residents.iter().filter_map(|r| plan.segments.get(r.segment as usize));
        let bytes: u64 = segments.clone().map(|s| s.bytes).sum();
        let states: u64 = plan.states.iter().filter(|s| s.memory == unit.memory).map(StateBuf::bytes).sum();
        let layers: BTreeSet<u32> = segments.filter_map(|s| Some(of_layer(&s.name)?.0)).collect();
        let (first, last) = layers.first().zip(layers.last())?;
        let whole = |l: &ExpertLayer| l.units.contains(&index);
        let sliced = |role: Role| {
            let ops = &plan.placement.ops;
            ops.iter().any(|op| op.scope.part.slice().is_some() && op.scope.role() == role)
        };
        let what = match (sliced(Role::Network), sliced(Role::Attention)) {
            _ if plan.experts.layers.iter().any(whole) => "experts of layers",
            (true, false) => "slices of the experts of layers",
            (true, true) => "slices of the experts and of attention of layers",
            (false, true) => "slices of attention of layers",
            (false, false) => "layers",
        };
        let states = if states > 0 { format!(", {} of states", human::bytes(states)) } else { String::new() };
        let cpus = if unit.cpus.is_empty() { String::new() } else { format!("CPUs {}; ", unit.cpus) };
        let text = format!("{cpus}{} of weights{states}: {what} {first} to {last}", human::bytes(bytes));
        Some(vec![unit.name.clone(), text])
    };
    (0..).zip(&plan.units).filter_map(of_host).collect()
}

/// Experts of each layer by their unit or first unit; empty if experts have capacities or all run on the CPU.
pub(super) fn units(plan: &Plan, layer: Option<u32>, expert: Option<u32>) -> String {
    let (placement, experts) = (&plan.placement, &plan.experts);
    let divided = placement.is_dynamic() && !placement.ops.is_empty();
    let head = if experts.policy.is_fixed() { "  runs on" } else { "  starts on" };
    let mut text = String::new();
    let tables = placement.experts.iter().filter(|t| divided && layer.is_none_or(|l| l == t.layer));
    let is_slice = |op: &&OpAssignment| op.scope.part.slice().is_some() && op.scope.role() == Role::Network;
    let sliced = placement.ops.iter().filter(is_slice);
    let sliced: BTreeSet<u32> = sliced.map(|op| op.unit).collect();
    for ExpertTable { layer, experts: all, .. } in tables {
        if !sliced.is_empty() {
            let names: Vec<&str> = sliced.iter().map(|&unit| placement.unit(unit)).collect();
            let _ = writeln!(
                text,
                "\nlayer {layer}: {} experts, a slice of each on {}",
                all.len(),
                names.join(", ")
            );
            continue;
        }
        // Experts of a whole layer that a host has are not divided.
        let units: BTreeSet<u32> = all.iter().map(|row| row.unit).collect();
        let start =
            |row: &ExpertRow| (0..).zip(&units).find(|(_, unit)| **unit == row.unit).map_or(0, |(i, _)| i);
        let starts = all.iter().map(start).collect();
        let whole = ExpertLayer { units: units.iter().copied().collect(), starts, ..ExpertLayer::default() };
        let of = experts.of_layer(Some(*layer)).map_or(&whole, |(_, of)| of);
        let mut rows = vec![[head, "experts"].map(str::to_owned).to_vec()];
        for &unit in &of.units {
            let own = of.on(unit).into_iter().filter(|e| expert.is_none_or(|x| x == *e));
            let own: Vec<String> = own.map(|e| e.to_string()).collect();
            if !own.is_empty() {
                rows.push(vec![format!("  {}", placement.unit(unit)), own.join(",")]);
            }
        }
        let _ = write!(text, "\nlayer {layer}: {} experts\n{}", all.len(), output::table(&rows));
    }
    text
}

fn expert_text(placement: &Placement, table: &ExpertTable, expert: u32) -> String {
    let Some(row) = table.experts.get(expert as usize) else { return String::new() };
    let capacity = match row.capacity {
        0 => "any number of tokens".to_owned(),
        c => format!("at most {c} tokens per call"),
    };
    let tier = row.tier.map_or_else(String::new, |t| format!(", tier {t}"));
    let load = row.load.map_or_else(String::new, |l| format!("; {l:.2} per call in calibration"));
    let fallback =
        row.fallback.map_or_else(String::new, |u| format!("; overflow runs on {}", placement.unit(u)));
    let few = if row.few { "; too few for a decision" } else { "" };
    let why = table.groups.get(row.group as usize).map_or("", |g| g.why.as_str());
    format!(
        "  expert {expert}: {capacity}{tier}, group {}, on {}{load}{few}{fallback}\n  {why}\n",
        row.group,
        placement.unit(row.unit)
    )
}

#[cfg(test)]
mod tests {
    use super::shown;
    use moec_ir::text::parse_placement;

    const TEXT: &str = r#"
placement {chunk = 64, overflow = spill, units = ["cpu", "npu"]}
placed prefill[64] "layers.*.attn" "linear" {unit = 1, nodes = 8, why = "nn.Linear (as Conv2d)"}
experts {layer = 3, k = 1, tiers = [32, 16], expected = rates(imbalance = 1.5, overflow = 0.25, padding = 0.5)} {
  group 0 {tier = 0, unit = 1, experts = [1], bytes = 64, cost_us = [9.0, 3.0], why = "hot: so"}
  group 1 {tier = 1, unit = 0, experts = [0], bytes = 64, cost_us = [1.0, 3.0], why = "cold: so"}
  expert 0 {capacity = 0, group = 1, unit = 0, tier = 1, load = 0.5, few = true}
  expert 1 {capacity = 32, group = 0, unit = 1, tier = 0, fallback = 0, load = 31.5}
}
"#;

    #[test]
    fn placement_is_shown_by_operator_group_and_expert() {
        let p = parse_placement(TEXT).unwrap();
        moec_ir::verify::placement(&p).unwrap();
        insta::assert_snapshot!("placement", shown(&p, None, None));
        insta::assert_snapshot!("placement_of_a_hot_expert", shown(&p, Some(3), Some(1)));
        insta::assert_snapshot!("placement_of_a_cold_expert", shown(&p, Some(3), Some(0)));
        assert_eq!(shown(&p, Some(2), None), "");
        assert_eq!(shown(&moec_ir::placement::Placement::default(), None, None), "");
    }
}
