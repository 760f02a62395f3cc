//! `moec explain`: the decisions of a build, and their reasons.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::{decided, output, paging, placement};
use moec_base::{Error, Result, human};
use moec_bundle::read::Bundle;
use moec_config::Rounding;
use moec_cpu::Bound;
use moec_device::GraphForm;
use moec_ir::plan::{Code, ExpertTable, Placement, StateBuf, StateKind};
use moec_ir::{Format, Graph, Module, Node, Op, Operand, WeightClass};
use moec_passes::decisions::{Decisions, KernelDecision, ScheduleSource, shown};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::path::PathBuf;

/// Explain a bundle's compilation decisions: precision, schedules, formats
///
/// For every matrix kernel: its compute type and the reason, its schedule, the prediction of the cost model
/// for one core and, after `build --tune`, the measured time of every candidate schedule.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Show only this layer, counted from 0
    #[arg(long, value_name = "L")]
    pub layer: Option<u32>,
    /// Show only decisions about this expert, in every layer or in the one that `--layer` names
    #[arg(long, value_name = "E")]
    pub expert: Option<u32>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Weights of one class and format.
#[derive(Clone, Copy, Default)]
struct WeightTotals {
    numbers: u64,
    bytes: u64,
}

impl WeightTotals {
    /// Stored bits per number, padding included.
    fn bits(self) -> f64 {
        self.bytes as f64 * 8.0 / self.numbers.max(1) as f64
    }
}

/// Uses of a kernel in an entry point: scopes with `*` for the layer, the matrices that it multiplies by, and steps.
#[derive(Clone, Debug, Default)]
struct Use {
    scopes: Vec<String>,
    matrices: Vec<String>,
    steps: usize,
}

/// Adds a name, unless the list has it.
fn note(names: &mut Vec<String>, name: String) {
    if !names.contains(&name) {
        names.push(name);
    }
}

/// Name in the Graph of the matrix that a step multiplies by, if there is one. If a product is fused with the
/// addition of the residual, the step is that of the addition, so the product is found among its inputs.
/// `steps`: nodes with a step of their own.
fn matrix<'a>(module: &'a Module, graph: &Graph, steps: &[u32], node: &Node) -> Option<&'a str> {
    let multiplies = |op: &Op| matches!(op, Op::Linear { .. } | Op::LinearGlu { .. } | Op::HeadLinear { .. });
    let fused = || {
        let before = node.inputs.iter().filter_map(|i| match i {
            Operand::Value(v) => graph.def(*v),
            _ => None,
        });
        let hidden = before.filter(|n| !steps.contains(&n.0)).filter_map(|n| graph.nodes.get(n.0 as usize));
        hidden.into_iter().find(|n| multiplies(&n.op))
    };
    let product = if multiplies(&node.op) { Some(node) } else { fused() };
    product?.inputs.iter().find_map(|i| match i {
        Operand::Weight(w) => module.weights.get(w.0 as usize).map(|w| w.name.as_str()),
        _ => None,
    })
}

/// `q4, 4.5 bits each, 1.2 MiB`, and the amount of padding if it is 1 % or more.
pub(super) fn stored(format: Format, numbers: u64, bytes: u64) -> String {
    let padding = padding(format, numbers, bytes);
    let padded = if padding * 100 < bytes {
        String::new()
    } else {
        format!(", {} of it padding", human::bytes(padding))
    };
    format!("{format}, {} bits each, {}{padded}", format.bits(), human::bytes(bytes))
}

/// Bytes that pad panels, groups and cache lines.
fn padding(format: Format, numbers: u64, bytes: u64) -> u64 {
    bytes.saturating_sub((numbers as f64 * format.bits() / 8.0).ceil() as u64)
}

/// Format of the static graphs of each unit, by the unit's name.
fn graph_forms(bundle: &Bundle) -> Result<BTreeMap<String, GraphForm>> {
    if bundle.plan.graphs.is_empty() {
        return Ok(BTreeMap::new());
    }
    let written = bundle.device()?.units.into_iter().filter(|u| !u.graph.is_default());
    Ok(written.map(|u| (u.name, u.graph)).collect())
}

/// Prints the decisions.
///
/// # Errors
/// Fails if the bundle cannot be read, is of an earlier moec, or does not have the layer or the expert.
pub fn run(args: &Args) -> Result<()> {
    let bundle = Bundle::open(&args.bundle)?;
    let decisions = bundle.decisions()?;
    let layers = bundle.plan.model.layers;
    if let Some(layer) = args.layer.filter(|l| *l >= layers) {
        return Err(Error::usage(format!("the model has no layer {layer}"))
            .hint(format!("its layers are 0 to {}", layers.saturating_sub(1))));
    }
    let placement = &bundle.plan.placement;
    let module = bundle.graph()?;
    if let Some(expert) = args.expert {
        let experts = experts(&module, args.layer);
        if expert as usize >= experts {
            let hint = match experts {
                0 => "the layer is dense: it has no experts".to_owned(),
                n => format!("there are {n} experts, counted from 0"),
            };
            return Err(Error::usage(format!("expert {expert} of `--expert` does not exist")).hint(hint));
        }
    }
    let uses = uses(&bundle, &module, args.layer);
    let kernels: Vec<(&KernelDecision, &Use)> =
        decisions.kernels.iter().filter_map(|d| Some((d, uses.get(&(d.entry.clone(), d.kernel))?))).collect();
    let weights = weights(&bundle, &module, args.layer);
    let states: Vec<&StateBuf> =
        bundle.plan.states.iter().filter(|s| args.layer.is_none_or(|l| in_layer(&s.name, l))).collect();
    let forms = graph_forms(&bundle)?;
    if args.json {
        return output::json(&report(args, &bundle, &decisions, &kernels, &weights, &states, &forms));
    }
    let units = placement::units(&bundle.plan, args.layer, args.expert);
    let placed = placement::shown(placement, args.layer, args.expert) + &units;
    let mut head = head(args, &bundle, &decisions, &kernels, &weights, &states);
    head.extend(paging::rows(&bundle.plan));
    head.extend(placement::hosts(&bundle.plan));
    let mut text = output::table(&head);
    if args.expert.is_none() {
        text += &decided::shown(&decisions.decisions, args.layer);
    }
    if args.layer.is_none() && args.expert.is_none() {
        text += &forms.iter().map(|(unit, form)| placement::graphs(unit, form)).collect::<String>();
    }
    text += &placement::policy(&bundle.plan);
    text += &placed;
    if args.expert.is_some() {
        if placed.is_empty() {
            text += "\nexperts have no capacities, because the target has dynamic shapes\n";
        }
        return output::data(&text);
    }
    let mut entry = "";
    for (decision, at) in kernels {
        if entry != decision.entry {
            entry = &decision.entry;
            let _ = write!(text, "\n{entry}\n");
        }
        text += &paragraph(decision, at, decisions.threads);
    }
    output::data(&text)
}

/// Number of experts of a layer, or the largest number of any layer.
fn experts(module: &Module, layer: Option<u32>) -> usize {
    let nodes = module.entries.iter().flat_map(|g| &g.nodes);
    let selected = nodes.filter(|n| n.scope.layer.is_some_and(|of| layer.is_none_or(|l| of == l)));
    selected.filter_map(|n| Some(n.op.router()?.experts)).max().unwrap_or(0)
}

/// Layer of a weight or a state, and the rest of its name: 3 and `attn.q` for `layers.3.attn.q`.
pub(super) fn of_layer(name: &str) -> Option<(u32, &str)> {
    let (layer, rest) = name.strip_prefix("layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}

/// Whether a name belongs to a layer.
fn in_layer(name: &str, layer: u32) -> bool {
    of_layer(name).is_some_and(|(l, _)| l == layer)
}

/// A name with `*` for its layer: `layers.*.attn.q`.
fn any_layer(name: &str) -> String {
    of_layer(name).map_or_else(|| name.to_owned(), |(_, rest)| format!("layers.*.{rest}"))
}

/// Uses of every kernel, by entry point, in one layer or in all.
fn uses(bundle: &Bundle, module: &Module, layer: Option<u32>) -> HashMap<(String, u32), Use> {
    let mut uses: HashMap<(String, u32), Use> = HashMap::new();
    for (entry, graph) in bundle.plan.entries.iter().zip(&module.entries) {
        let steps: Vec<u32> = entry.steps.iter().map(|s| s.node).collect();
        for step in &entry.steps {
            let (Code::Kernel(kernel), Some(node)) = (step.code, graph.nodes.get(step.node as usize)) else {
                continue;
            };
            if layer.is_some_and(|l| node.scope.layer != Some(l)) {
                continue;
            }
            let at = uses.entry((entry.kind.to_string(), kernel)).or_default();
            at.steps += 1;
            let scope = &node.scope;
            let scope = if layer.is_some() { scope.to_string() } else { scope.any_layer().to_string() };
            note(&mut at.scopes, scope);
            if let Some(matrix) = matrix(module, graph, &steps, node) {
                note(&mut at.matrices, if layer.is_some() { matrix.to_owned() } else { any_layer(matrix) });
            }
        }
    }
    uses
}

/// Weights by class and format, in one layer or in all.
fn weights(
    bundle: &Bundle,
    module: &Module,
    layer: Option<u32>,
) -> BTreeMap<(&'static str, Format), WeightTotals> {
    let classes: HashMap<&str, WeightClass> =
        module.weights.iter().map(|w| (w.name.as_str(), w.class)).collect();
    let mut shares: BTreeMap<_, WeightTotals> = BTreeMap::new();
    let selected = bundle.plan.segments.iter().filter(|s| layer.is_none_or(|l| in_layer(&s.name, l)));
    for segment in selected {
        let class = classes.get(segment.name.as_str()).map_or("exact", |c| c.name());
        let share = shares.entry((class, segment.format)).or_default();
        share.numbers += segment.shape.iter().map(|&d| u64::from(d)).product::<u64>();
        share.bytes += segment.bytes;
    }
    shares
}

/// Format, bits per number, bytes per token and rotated channels of the KV cache. States without a row for each token
/// do not count.
fn cache(states: &[&StateBuf]) -> Option<(&'static str, f64, u64, Option<u32>)> {
    let states = || states.iter().filter(|s| s.kind == StateKind::Cache);
    let first = states().next()?;
    let numbers: u64 = states().map(|s| s.shape.iter().map(|&d| u64::from(d)).product::<u64>()).sum();
    let bytes: u64 = states().map(|s| s.bytes()).sum();
    let tokens = u64::from(first.shape[0]) * u64::from(first.shape[2]);
    let rotated = states().map(|s| s.rotated).filter(|&channels| channels > 1).min();
    Some((first.format.name(), bytes as f64 * 8.0 / numbers.max(1) as f64, bytes / tokens.max(1), rotated))
}

/// Caches of layers with a sliding window: rows for each sequence, the most of any layer, and bytes.
fn windows(states: &[&StateBuf]) -> Option<(u32, u64)> {
    let rings = || states.iter().filter(|s| matches!(s.kind, StateKind::Ring { .. }));
    let rows = rings().map(|s| s.shape[2]).max()?;
    Some((rows, rings().map(|s| s.bytes()).sum()))
}

fn head(
    args: &Args,
    bundle: &Bundle,
    decisions: &Decisions,
    kernels: &[(&KernelDecision, &Use)],
    weights: &BTreeMap<(&'static str, Format), WeightTotals>,
    states: &[&StateBuf],
) -> Vec<Vec<String>> {
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let target = &bundle.plan.target;
    let mut rows = vec![
        row("bundle", args.bundle.display().to_string()),
        row("target", format!("{} ({}, {})", target.name, target.triple, target.cpu)),
        row("activations", format!("`{}` in model.toml", decisions.activations)),
        row("rounding", rounding(decisions).to_owned()),
    ];
    rows.extend(weights.iter().map(|((class, format), share)| {
        row("weights", format!("{class}: {}", stored(*format, share.numbers, share.bytes)))
    }));
    rows.extend(cache(states).map(|(format, bits, bytes, rotated)| {
        let rotated = rotated.map_or_else(String::new, |channels| {
            format!("; heads are rotated when they are stored, in blocks of {channels} channels, so that none of them is large alone")
        });
        row("KV cache", format!("{format}, {bits:.2} bits per number, {bytes} bytes per token{rotated}"))
    }));
    let snapshots = args.layer.is_none().then(|| super::bundle::snapshots(&bundle.plan)).flatten();
    rows.extend(snapshots.map(|what| row("snapshots", what)));
    rows.extend(windows(states).map(|(rows, bytes)| {
        row("sliding windows", format!("{rows} rows for each sequence, {} in all", human::bytes(bytes)))
    }));
    rows.extend(
        decisions
            .figures
            .iter()
            .map(|f| row("one core", format!("{}: {} {} ({})", f.what, f.value.round(), f.unit, f.source))),
    );
    let timed = kernels.iter().filter(|(d, _)| d.by == ScheduleSource::Measured).count();
    let all = kernels.len();
    rows.push(row(
        "schedules",
        match (timed, decisions.threads) {
            (0, _) => format!("{all}, by the cost model; `moec build --tune` measures"),
            (_, threads) => {
                let threads = threads.unwrap_or(1);
                format!("{all}, {timed} of them measured with {threads} threads")
            }
        },
    ));
    rows
}

/// Description of a kernel, for people.
fn paragraph(d: &KernelDecision, at: &Use, threads: Option<usize>) -> String {
    let mut out = String::new();
    let load = &d.load;
    let matrices = if load.matrices == 1 { String::new() } else { format!("{} × ", load.matrices) };
    let rows = if load.rows == 1 { "1 row".to_owned() } else { format!("{} rows", load.rows) };
    let steps = if at.steps == 1 { "1 step".to_owned() } else { format!("{} steps", at.steps) };
    let _ = writeln!(
        out,
        "  {}{} {matrices}{} → {} in {}, {rows}{}; {steps} in {}",
        d.kind,
        at.matrices
            .iter()
            .enumerate()
            .fold(String::new(), |s, (i, m)| s + if i == 0 { " " } else { ", " } + m),
        load.k,
        load.n,
        d.format,
        if load.matrices == 1 { "" } else { " each" },
        at.scopes.join(", "),
    );
    let _ = writeln!(out, "    arithmetic  {}: {}", d.compute, d.why);
    let by = if d.by == ScheduleSource::Measured { "measured" } else { "by the cost model" };
    let _ = if d.schedule.is_empty() {
        writeln!(out, "    schedule    fixed: kernels of this kind have only one")
    } else {
        writeln!(out, "    schedule    {} ({by})", shown(&d.schedule))
    };
    let p = &d.predicted;
    // If memory bounds the time, arithmetic other than the products costs nothing.
    let overhead = 100.0 * (1.0 - 1.0 / p.overhead);
    let overhead = if p.bound == Bound::Arithmetic.name() && overhead >= 0.5 {
        format!(", of which {overhead:.0} % is loading and unpacking weights")
    } else {
        String::new()
    };
    let _ = writeln!(
        out,
        "    predicted   {:.3} ms on one core, {:.0} GOP/s, {:.1} GB/s, bound by {}{overhead}",
        p.ms, p.gops, p.gb_per_s, p.bound,
    );
    for (i, m) in d.measured.iter().enumerate() {
        let name = if i == 0 { "measured" } else { "" };
        let chosen = if m.schedule == d.schedule { "  ← chosen" } else { "" };
        let what = if i == 0 {
            format!("  ({} threads, by a part of the matrix)", threads.unwrap_or(1))
        } else {
            String::new()
        };
        let _ = writeln!(out, "    {name:<10}  {:.3} ms  {}{chosen}{what}", m.ms, shown(&m.schedule));
    }
    out
}

/// Rounding of weights, for people.
pub(super) fn rounding(decisions: &Decisions) -> &'static str {
    match decisions.rounding {
        Rounding::Feedback => {
            "below 8 bits with error feedback, by the profile's correlations of input channels"
        }
        Rounding::Nearest => "to the nearest codes",
    }
}

fn report(
    args: &Args,
    bundle: &Bundle,
    decisions: &Decisions,
    kernels: &[(&KernelDecision, &Use)],
    weights: &BTreeMap<(&'static str, Format), WeightTotals>,
    states: &[&StateBuf],
    forms: &BTreeMap<String, GraphForm>,
) -> Value {
    let symbol = |d: &KernelDecision| bundle.plan.kernels.get(d.kernel as usize).map(|k| k.symbol.clone());
    json!({
        "bundle": args.bundle,
        "layer": args.layer,
        "target": bundle.plan.target.name,
        "cpu": bundle.plan.target.cpu,
        "activations": decisions.activations,
        "rounding": decisions.rounding.name(),
        "decisions": decisions.decisions.iter()
            .filter(|d| args.layer.is_none() || d.layer.is_none() || d.layer == args.layer).collect::<Vec<_>>(),
        "figures": decisions.figures,
        "threads": decisions.threads,
        "weights": weights.iter().map(|((class, format), share)| json!({
            "class": class, "format": format.name(), "weights": share.numbers, "bytes": share.bytes,
            "bits_per_weight": share.bits(), "padding_bytes": padding(*format, share.numbers, share.bytes),
        })).collect::<Vec<_>>(),
        "kv_cache": cache(states).map(|(format, bits, bytes, rotated)| json!({
            "format": format, "bits_per_number": bits, "bytes_per_token": bytes, "rotated": rotated,
        })),
        "snapshots": {
            "slot": bundle.plan.snapshots_of_slot(),
            "bytes": bundle.plan.snapshot_bytes().0,
            "distance": bundle.plan.snapshot_distance(),
        },
        "sliding_windows": windows(states).map(|(rows, bytes)| json!({"rows": rows, "bytes": bytes})),
        "graphs": forms,
        "placement": placement_json(&bundle.plan.placement, args),
        "expert_placement": placement::policy_json(&bundle.plan),
        "paging": paging::value(&bundle.plan),
        "kernels": kernels.iter().map(|(d, at)| {
            let mut value = json!(d);
            if let Value::Object(map) = &mut value {
                map.insert("symbol".into(), json!(symbol(d)));
                map.insert("scopes".into(), json!(at.scopes));
                map.insert("matrices".into(), json!(at.matrices));
                map.insert("steps".into(), json!(at.steps));
            }
            value
        }).collect::<Vec<_>>(),
    })
}

/// The placement, if shapes are static.
fn placement_json(p: &Placement, args: &Args) -> Option<Value> {
    let selected = |t: &&ExpertTable| args.layer.is_none_or(|l| l == t.layer);
    let expert = |t: &ExpertTable, e: usize| {
        let row = &t.experts[e];
        json!({
            "expert": e, "tier": row.tier, "capacity": row.capacity, "group": row.group,
            "unit": p.unit(row.unit), "fallback": row.fallback.map(|u| p.unit(u)), "load": row.load,
            "too_few_tokens": row.few,
        })
    };
    let table = |t: &ExpertTable| {
        let all = (0..t.experts.len()).filter(|&e| args.expert.is_none_or(|x| x as usize == e));
        json!({
            "layer": t.layer, "experts_per_token": t.k, "tiers": t.tiers,
            "expected": t.expected.map(|x| json!({
                "imbalance": x.imbalance, "overflow": x.overflow, "padding": x.padding,
            })),
            "groups": t.groups.iter().map(|g| json!({
                "tier": g.tier, "unit": p.unit(g.unit), "experts": g.experts, "bytes": g.bytes,
                "cost_us": g.cost_us, "why": g.why,
                "decode": g.decode.iter().map(|d| json!({
                    "batch": d.batch, "unit": p.unit(d.unit), "cost_us": d.cost_us, "why": d.why,
                })).collect::<Vec<_>>(),
            })).collect::<Vec<_>>(),
            "experts": all.map(|e| expert(t, e)).collect::<Vec<_>>(),
        })
    };
    (!p.is_dynamic()).then(|| {
        json!({
            "chunk": p.chunk, "overflow": p.overflow.name(),
            "operators": p.ops.iter().map(|o| json!({
                "entry": o.entry.to_string(), "scope": o.scope.to_string(), "op": o.op, "nodes": o.nodes,
                "unit": p.unit(o.unit), "why": o.why,
            })).collect::<Vec<_>>(),
            "layers": p.experts.iter().filter(selected).map(table).collect::<Vec<_>>(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_layers_are_matched() {
        assert!(in_layer("layers.3.attn.q", 3) && !in_layer("layers.30.attn.q", 3) && !in_layer("head", 0));
        assert_eq!([any_layer("layers.3.attn.q"), any_layer("head")], ["layers.*.attn.q", "head"]);
    }
}
