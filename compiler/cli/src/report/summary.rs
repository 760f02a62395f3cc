//! Summary of a bundle for people: `moec report` draws it, `moec compare` puts two side by side.
#![expect(clippy::cast_possible_truncation, reason = "figures for readers, and indices of a plan")]

use super::speed::{self, Expected, Machine};
use crate::{decided, explain, paging};
use moec_base::paths::is_inside;
use moec_base::{Result, human};
use moec_bundle::read::Bundle;
use moec_device::Device;
use moec_ir::plan::{Entry, Plan};
use moec_ir::{EntryKind, Format, Module, Role, WeightClass};
use moec_passes::decisions::{Decisions, ExpertUse, ScheduleSource};
use moec_profile::importance::ENOUGH;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// A name and how much of something it has.
pub(crate) type Share = (String, f64);

/// Unit of one part of a layer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Cell {
    /// Units and their shares, which sum to 1; empty: the layer has no such part.
    pub(crate) units: Vec<Share>,
    /// Counted things.
    pub(crate) of: &'static str,
}

/// A part of what memory holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Of which memory.
    pub(crate) memory: String,
    /// Description.
    pub(crate) what: String,
    /// Bytes.
    pub(crate) bytes: u64,
}

/// Weights of one class and format.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) class: &'static str,
    pub(crate) format: Format,
    pub(crate) numbers: u64,
    pub(crate) bytes: u64,
}

/// Number of times that experts are chosen, where it is known.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Loads {
    /// Layer, and of each expert its use over the layer's mean.
    pub(crate) layers: Vec<(u32, Vec<f64>)>,
    /// Number of experts with too few tokens in calibration, and of all experts.
    pub(crate) few: (usize, usize),
}

/// A layer, its capacities, and the shares of expected overflow and padding.
pub(crate) type Tiers = (u32, Vec<u32>, Option<(f32, f32)>);

/// A bundle.
#[derive(Clone, Debug)]
pub(crate) struct Summary {
    pub(crate) title: String,
    pub(crate) head: Vec<(&'static str, String)>,
    /// Columns, and of each layer its cells.
    pub(crate) columns: Vec<String>,
    pub(crate) places: Vec<(u32, Vec<Cell>)>,
    pub(crate) memory: Vec<Part>,
    pub(crate) weights: Vec<Stored>,
    pub(crate) loads: Option<Loads>,
    /// The machine of the expected speed.
    pub(crate) machine: Machine,
    pub(crate) expected: Vec<Expected>,
    /// Kernels whose schedules were measured, and all.
    pub(crate) timed: (usize, usize),
    pub(crate) tiers: Vec<Tiers>,
    pub(crate) decisions: Vec<(String, String)>,
    pub(crate) files: Vec<(String, u64)>,
}

/// Summarizes a bundle. The speed is predicted for the machine that it was built for, or for another device.
///
/// # Errors
/// Files of the bundle that cannot be read, a device whose CPU is unknown.
pub(crate) fn of(bundle: &Bundle, device: Option<&Device>) -> Result<Summary> {
    let plan = &bundle.plan;
    let (decisions, module) = (bundle.decisions()?, bundle.graph()?);
    let model = &plan.model;
    let (columns, places) = unit_table(plan, &module);
    let kernels = &decisions.kernels;
    let machine = Machine::of(bundle, device)?;
    let expected = speed::expected(plan, &module, &decisions, &machine);
    Ok(Summary {
        title: format!("{} for {}", model.family, plan.target.name),
        head: vec![
            ("parameters", human::count(model.parameters)),
            ("active per token", human::count(model.active_parameters)),
            ("layers", model.layers.to_string()),
            ("context", format!("{} tokens", model.max_context)),
            ("sequences", model.slots.to_string()),
            ("cpu", plan.target.cpu.clone()),
            ("manifest", bundle.manifest_sha256()[..12].to_owned()),
            ("built by", format!("moec {}, LLVM {}", bundle.manifest.moec_version, bundle.manifest.llvm)),
        ],
        columns,
        places,
        memory: memory(plan, &module),
        weights: weights(plan, &module),
        loads: loads(plan, &decisions),
        machine,
        expected,
        timed: (kernels.iter().filter(|d| d.by == ScheduleSource::Measured).count(), kernels.len()),
        tiers: plan
            .placement
            .experts
            .iter()
            .filter(|t| !t.tiers.is_empty())
            .map(|t| (t.layer, t.tiers.clone(), t.expected.map(|e| (e.overflow, e.padding))))
            .collect(),
        decisions: decision_rows(plan, &decisions, bundle),
        files: files(bundle),
    })
}

/// Roles of a layer that are distinguished, with their names.
const ROLES: [(&str, Role); 3] =
    [("attention", Role::Attention), ("mixer", Role::Mixer), ("experts", Role::Network)];

/// Unit of each of the model's roles in every layer, in the largest prefill and in the smallest decode entry
/// point.
fn unit_table(plan: &Plan, module: &Module) -> (Vec<String>, Vec<(u32, Vec<Cell>)>) {
    let of_kind = |is_kind: fn(EntryKind) -> bool| {
        plan.entries.iter().enumerate().filter(move |(_, e)| is_kind(e.kind))
    };
    let prefill = of_kind(|k| matches!(k, EntryKind::Prefill(_))).max_by_key(|(_, e)| e.kind.rows());
    let decode = of_kind(|k| matches!(k, EntryKind::Decode(_))).min_by_key(|(_, e)| e.kind.rows());
    let entries: Vec<(usize, &Entry)> = [prefill, decode].into_iter().flatten().collect();
    let nodes = || module.entries.iter().flat_map(|g| &g.nodes);
    let exists = |role: Role| role == Role::Network || nodes().any(|n| n.scope.role() == role);
    let roles: Vec<_> = ROLES.into_iter().filter(|&(_, role)| exists(role)).collect();
    let columns = entries
        .iter()
        .flat_map(|(_, e)| roles.iter().map(|(name, _)| format!("{}: {name}", e.kind)))
        .collect();
    let rows = (0..plan.model.layers)
        .map(|layer| {
            let cells = entries.iter().flat_map(|&(i, entry)| {
                roles.iter().map(move |&(_, role)| cell(plan, module, (i, entry), layer, role))
            });
            (layer, cells.collect())
        })
        .collect();
    (columns, rows)
}

fn cell(plan: &Plan, module: &Module, (i, entry): (usize, &Entry), layer: u32, role: Role) -> Cell {
    if role == Role::Network
        && let Some(cell) = experts(plan, entry.kind, layer)
    {
        return cell;
    }
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    let nodes = module.entries.get(i).map(|g| g.nodes.as_slice()).unwrap_or_default();
    for step in &entry.steps {
        let Some(node) = nodes.get(step.node as usize) else { continue };
        if node.scope.layer == Some(layer) && node.scope.role() == role {
            *counts.entry(step.unit).or_default() += 1;
        }
    }
    let sum: usize = counts.values().sum();
    let name = |u: u32| plan.units.get(u as usize).map_or("?", |u| &u.name).to_owned();
    let units = counts.into_iter().map(|(u, n)| (name(u), n as f64 / sum as f64)).collect();
    Cell { units, of: "steps" }
}

/// Units of the experts of a layer, with their shares; `None` if all experts are on the CPU.
fn experts(plan: &Plan, kind: EntryKind, layer: u32) -> Option<Cell> {
    let placement = &plan.placement;
    let table = placement.experts.iter().find(|t| t.layer == layer && !t.groups.is_empty());
    let units = plan.experts.of_layer(Some(layer));
    let names: Vec<String> = match (table, units) {
        (Some(t), _) if matches!(kind, EntryKind::Prefill(_)) => {
            t.experts.iter().map(|row| placement.unit(row.unit).to_owned()).collect()
        }
        (_, Some((_, of))) => {
            let unit = |&at: &u32| of.units.get(at as usize).and_then(|&u| plan.units.get(u as usize));
            of.starts.iter().map(|at| unit(at).map_or("?", |u| &u.name).to_owned()).collect()
        }
        _ => return None,
    };
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in &names {
        *counts.entry(name).or_default() += 1;
    }
    let units = counts.into_iter().map(|(n, c)| (n.to_owned(), c as f64 / names.len() as f64)).collect();
    Some(Cell { units, of: "experts" })
}

/// Contents of every memory: weights by class, with those on disk separate, then the other memory of a run.
fn memory(plan: &Plan, module: &Module) -> Vec<Part> {
    let classes = classes(module);
    let paged = plan.paged_memories().flat_map(|(_, paging)| paging.segments());
    let on_disk: BTreeSet<u32> = paged.collect();
    let mut sums: BTreeMap<(usize, &str), u64> = BTreeMap::new();
    let name = |m: usize| plan.memories.get(m).map_or("memory", |m| &m.name);
    let class = |segment: usize| {
        let name = plan.segments.get(segment).map_or("", |s| &s.name);
        described(classes.get(name).copied().unwrap_or(WeightClass::Exact))
    };
    let mut elsewhere: BTreeMap<usize, u64> = BTreeMap::new();
    for (m, memory) in plan.memories.iter().enumerate().skip(1) {
        for resident in &memory.residents {
            let Some(segment) = plan.segments.get(resident.segment as usize) else { continue };
            let (matrices, ..) = segment.extents();
            let bytes = match resident.matrices.len() as u64 {
                0 => segment.bytes,
                n => segment.bytes / u64::from(matrices.max(1)) * n,
            };
            if on_disk.contains(&resident.segment) && memory.paging.is_some() {
                continue;
            }
            *sums.entry((m, class(resident.segment as usize))).or_default() += bytes;
            *elsewhere.entry(resident.segment as usize).or_default() += bytes;
        }
    }
    let mut disk: BTreeMap<&str, u64> = BTreeMap::new();
    for (i, segment) in plan.segments.iter().enumerate() {
        let bytes = segment.bytes.saturating_sub(elsewhere.get(&i).copied().unwrap_or(0));
        if on_disk.contains(&(i as u32)) {
            *disk.entry(class(i)).or_default() += bytes;
        } else {
            *sums.entry((0, class(i))).or_default() += bytes;
        }
    }
    for state in &plan.states {
        let live = state.live_bytes().unwrap_or(0);
        *sums.entry((state.memory as usize, "KV cache, full")).or_default() += live;
        *sums.entry((state.memory as usize, "snapshots of states")).or_default() += state.bytes() - live;
    }
    for (m, memory) in plan.memories.iter().enumerate() {
        *sums.entry((m, "intermediate results")).or_default() += memory.arena_bytes;
    }
    *sums.entry((0, "scratch of a thread")).or_default() += plan.scratch_bytes;
    for (m, paging) in plan.paged_memories() {
        let frames = paging.cache_bytes().unwrap_or(0);
        *sums.entry((m as usize, "frames for experts on disk")).or_default() += frames;
    }
    let in_memory = sums.into_iter().map(|((m, what), bytes)| Part {
        memory: name(m).to_owned(),
        what: what.to_owned(),
        bytes,
    });
    let on_disk = disk.into_iter().map(|(what, bytes)| Part {
        memory: "disk".to_owned(),
        what: what.to_owned(),
        bytes,
    });
    let mut parts: Vec<Part> = in_memory.chain(on_disk).filter(|p| p.bytes > 0).collect();
    // The order of memories stays; within one the largest comes first.
    let order: Vec<String> = parts.iter().map(|p| p.memory.clone()).collect();
    parts.sort_by_key(|p| (order.iter().position(|m| *m == p.memory), std::cmp::Reverse(p.bytes)));
    parts
}

fn classes(module: &Module) -> HashMap<&str, WeightClass> {
    module.weights.iter().map(|w| (w.name.as_str(), w.class)).collect()
}

/// A class in words.
fn described(class: WeightClass) -> &'static str {
    match class {
        WeightClass::Experts => "experts",
        WeightClass::Attention => "attention and shared networks",
        WeightClass::Embeddings => "embeddings and head",
        WeightClass::Exact => "norms and routers",
    }
}

fn weights(plan: &Plan, module: &Module) -> Vec<Stored> {
    let classes = classes(module);
    let mut sums: BTreeMap<(&str, Format), (u64, u64)> = BTreeMap::new();
    for s in &plan.segments {
        let class = described(classes.get(s.name.as_str()).copied().unwrap_or(WeightClass::Exact));
        let sum = sums.entry((class, s.format)).or_default();
        sum.0 += s.shape.iter().map(|&d| u64::from(d)).product::<u64>();
        sum.1 += s.bytes;
    }
    sums.into_iter()
        .map(|((class, format), (numbers, bytes))| Stored { class, format, numbers, bytes })
        .collect()
}

/// Loads from the profile of the build, else from the initial expert cache.
fn loads(plan: &Plan, decisions: &Decisions) -> Option<Loads> {
    let relative = |all: Vec<f64>| {
        let mean = all.iter().sum::<f64>() / all.len().max(1) as f64;
        all.into_iter().map(|x| if mean > 0.0 { x / mean } else { 0.0 }).collect()
    };
    if !decisions.expert_use.is_empty() {
        let all = || decisions.expert_use.iter().flat_map(|layer| &layer.chosen);
        let of =
            |layer: &ExpertUse| (layer.layer, relative(layer.chosen.iter().map(|&n| n as f64).collect()));
        return Some(Loads {
            layers: decisions.expert_use.iter().map(of).collect(),
            few: (all().filter(|&&n| n < ENOUGH).count(), all().count()),
        });
    }
    let paging = plan.paging.as_ref().filter(|p| !p.uses.is_empty())?;
    let mut uses = paging.uses.iter();
    let of_layer = |(i, l): (usize, &moec_ir::paging::PagedLayer)| {
        (i as u32, relative(uses.by_ref().take(l.experts as usize).map(|&u| f64::from(u)).collect()))
    };
    let layers: Vec<(u32, Vec<f64>)> = paging.layers.iter().enumerate().map(of_layer).collect();
    let unseen = paging.uses.iter().filter(|&&u| u == 0).count();
    Some(Loads { layers, few: (unseen, paging.uses.len()) })
}

/// Decisions, in words.
fn decision_rows(plan: &Plan, decisions: &Decisions, bundle: &Bundle) -> Vec<(String, String)> {
    let mut rows = vec![("activations".to_owned(), format!("`{}` in model.toml", decisions.activations))];
    let mut add = |name: &str, what: String| rows.push((name.to_owned(), what));
    add("rounding", explain::rounding(decisions).to_owned());
    if let Some(p) = &bundle.manifest.profile {
        add("profile", format!("of `{}`", p.name));
    }
    for (name, what) in decided::lines(&decisions.decisions) {
        add(&name, what);
    }
    for row in paging::rows(plan) {
        if let [name, what] = row.as_slice() {
            add(name, what.clone());
        }
    }
    if let Some(b) = plan.model.big_little {
        add(
            "big-little",
            format!("{} experts per token first, all below a probability of {}", b.experts, b.gamma()),
        );
    }
    let policy = &plan.experts.policy;
    if !policy.is_fixed() {
        let name = |u: Option<u32>| u.and_then(|u| plan.units.get(u as usize)).map_or("none", |u| &u.name);
        let (hot, cold) = (name(policy.hot()), name(policy.cold()));
        add("experts", format!("assigned in every step; hot ones on {hot}, cold ones on {cold}"));
    }
    for op in &plan.placement.ops {
        add(
            &format!("{} of {}", op.op, op.scope),
            format!("{} on {}: {}", op.entry, plan.placement.unit(op.unit), op.why),
        );
    }
    for f in &decisions.figures {
        add("one core", format!("{}: {} {} ({})", f.what, f.value.round(), f.unit, f.source));
    }
    rows
}

/// Files, the largest first; packages as one.
fn files(bundle: &Bundle) -> Vec<(String, u64)> {
    let mut sums: BTreeMap<String, u64> = BTreeMap::new();
    for (name, entry) in &bundle.manifest.files {
        let shown = if is_inside(name) { "packages of static graphs".to_owned() } else { name.clone() };
        *sums.entry(shown).or_default() += entry.bytes;
    }
    let mut files: Vec<_> = sums.into_iter().collect();
    files.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    files
}
