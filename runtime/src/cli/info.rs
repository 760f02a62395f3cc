//! `info`: describes the compiled model, its target and its requirements.

use super::args::Info;
use super::{Context, Failure, Io, operations, size};
use crate::bundle::BundleFiles;
use crate::bundle::manifest;
use crate::bundle::program::Program;
use crate::error::Result;
use crate::exec::overflow::Overflow;
use crate::offload::paging;
use crate::platform::available::available;
use crate::platform::numa::Node;
use crate::platform::{cores, cpu};
use crate::serving::text;
use crate::weights::owned::MovingStore;
use crate::weights::{self, Choice, Weights};
use moec_ir::Format;
use moec_ir::plan::{Paging, UnitRef};
use serde_json::json;

pub(super) fn run(context: &Context<'_>, args: &Info, io: &mut Io<'_>) -> Result<(), Failure> {
    let p = context.program;
    let (m, t) = (&p.model, &p.target);
    let weights: u64 = p.segments.iter().fold(0, |sum, s| sum.saturating_add(s.bytes));
    let (kv, saved) = (p.state_bytes(), p.saved_by_rings());
    let kv_format = p.cache_format().map(Format::name);
    let capacities = Capacities::of(p);
    // Padding and weights that are stored twice count as well.
    let bits = weights as f64 * 8.0 / m.parameters.max(1) as f64;
    let features: Vec<&str> = t.features.iter().map(String::as_str).collect();
    let missing = cpu::missing(&features);
    let lacking = lacking(context);
    let runs_here = cpu::check(t).is_ok() && lacking.is_empty();
    let held = held(context)?;
    let huge_pages = weights::gets_huge_pages();
    let tokenizer = context.bundle.join(text::FILE).is_file();
    let manifest = manifest::digest(context.bundle).map(|h| hex(&h));
    let operations = operations::report(context);
    let cores = paging::cores(p, cores::SYS).map(|cores| cores.to_string());
    let entries: Vec<_> = p.entries.iter().map(|e| (e.kind.to_string(), e.out_rows, e.steps.len())).collect();
    if args.json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": {
                "family": m.family,
                "vocab": m.vocab,
                "hidden": m.hidden,
                "layers": m.layers,
                "max_context": m.max_context,
                "slots": m.slots,
                "bos": m.bos,
                "eos": m.eos,
                "parameters": m.parameters,
                "active_parameters": m.active_parameters,
                "big_little": m.big_little.map(|b| json!({ "experts": b.experts, "gamma": b.gamma() })),
                "thresholded_percent": m.thresholded,
            },
            "target": {
                "name": t.name,
                "triple": t.triple,
                "cpu": t.cpu,
                "features": t.features,
                "missing": missing,
                "missing_units": lacking,
                "runs_here": runs_here,
            },
            "memory": {
                "arena_bytes": p.arena_bytes(),
                "scratch_bytes_per_thread": p.scratch_bytes,
                "weight_bytes": weights,
                "bits_per_parameter": bits,
                "kv_bytes": kv,
                "kv_bytes_saved_by_windows": saved,
                "snapshot_bytes": p.snapshot_bytes().0,
                "snapshots_per_slot": p.snapshots_of_slot(),
                "snapshot_distance": p.snapshot_distance(),
                "kv_format": kv_format,
            },
            "capacities": capacities.as_ref().map(|c| json!({
                "overflow": c.overflow.name(), "expected_rate": c.expected,
            })),
            // The decision of a run without `--weights` that begins now; `bench` reports the actual one.
            "weights": { "own": held.own, "why": held.why, "shared": !held.own, "huge_pages": huge_pages },
            // Memories beside the CPU's: of accelerators, NUMA nodes and other hosts.
            "other_memories": others(p).map(|other| other.value()).collect::<Vec<_>>(),
            "entries": entries.iter().map(|(kind, out_rows, steps)| {
                json!({ "kind": kind, "out_rows": out_rows, "steps": steps })
            }).collect::<Vec<_>>(),
            // Units that execute the operations of static graphs.
            "operations": operations.as_ref().map(operations::value),
            "files": p.files.iter().map(|f| {
                json!({ "path": f.path, "bytes": f.bytes, "sha256": hex(&f.sha256) })
            }).collect::<Vec<_>>(),
            "manifest_sha256": manifest,
            "tokenizer": tokenizer,
            "paging": p.paging.as_ref().map(|p| json!({
                "budget_bytes": p.budget,
                "resident_bytes": p.resident,
                "process_bytes": p.process,
                "frame_bytes": p.frame_bytes,
                "frames": p.frames,
                "neurons_per_frame": p.neurons,
                "gates_on_disk": p.gates_on_disk(),
                "staging_frames": p.staging,
                "policy": p.policy,
                "pinned": p.pinned.len(),
                "pinned_bytes": p.frame_bytes.saturating_mul(p.pinned.len() as u64),
                "threads": p.threads,
                "reader": paging::reader(context.program, context.bundle).ok(),
                "locked_bytes": paging::locked(context.program, context.bundle).ok().map(|l| l.bytes),
                "cores": cores,
            })),
        });
        io.say(&format!("{report}\n"))?;
        return Ok(());
    }
    let here = match (runs_here, missing.is_empty(), lacking.is_empty()) {
        (true, ..) => "runs here".to_owned(),
        (_, false, _) => format!("does not run here: this machine lacks {}", missing.join(", ")),
        (_, _, false) => {
            format!("runs here only by emulation: this machine does not have `{}`", lacking.join("`, `"))
        }
        (false, true, true) => "does not run here".to_owned(),
    };
    let entries: Vec<_> = entries.iter().map(|(kind, _, steps)| format!("{kind} ({steps} steps)")).collect();
    let mut lines = vec![
        (
            "model",
            format!("{}: {} layers, hidden size {}, vocabulary {}", m.family, m.layers, m.hidden, m.vocab),
        ),
        (
            "parameters",
            format!("{}, of which a token uses {}", count(m.parameters), count(m.active_parameters)),
        ),
        ("context", format!("{} tokens, {} sequences", m.max_context, m.slots)),
        ("target", format!("{} ({}, {}); {here}", t.name, t.triple, t.cpu)),
        ("weights", format!("{} in {} files, {bits:.2} bits per parameter", size(weights), p.files.len())),
        ("in memory", shown(&held, huge_pages)),
        ("KV cache", format!("{} of {} when full{}", size(kv), kv_format.unwrap_or("nothing"), less(saved))),
        ("arena", format!("{}, and {} of scratch per thread", size(p.arena_bytes()), size(p.scratch_bytes))),
        ("entry points", entries.join(", ")),
        ("tokenizer", if tokenizer { "yes".to_owned() } else { "none: only `--ids` works".to_owned() }),
    ];
    lines.extend(snapshots(p).map(|what| ("snapshots", what)));
    let (units, warnings) = operations.as_ref().map(operations::text).unzip();
    lines.extend(units.map(|units| ("operations", units)));
    if let Some(of) = &capacities {
        lines.push(("capacities", of.to_string()));
    }
    if let Some(manifest) = manifest {
        lines.push(("manifest", format!("SHA-256 {manifest}")));
    }
    if let Some(paging) = &p.paging {
        lines.push(("budget", budget(paging)));
        let reader = paging::reader(p, context.bundle).unwrap_or_else(|e| e.to_string());
        lines.push(("disk", reader));
        let locked = paging::locked(p, context.bundle);
        lines.push(("locked", locked.map_or_else(|e| e.to_string(), |locked| locked.to_string())));
        lines.extend(cores.map(|cores| ("cores", cores)));
    }
    lines.extend(others(p).map(|other| ("memory", other.to_string())));
    if let Some(b) = m.big_little {
        let what = format!("{} experts per token first, all below a probability of {}", b.experts, b.gamma());
        lines.insert(2, ("big-little", what));
    }
    if let Some(percent) = m.thresholded {
        let what =
            format!("{percent:.1} % of the neurons of experts count as 0, by thresholds: an approximation");
        lines.insert(2, ("thresholds", what));
    }
    let lines: Vec<_> = lines.iter().map(|(what, value)| format!("{what:13} {value}\n")).collect();
    io.say(&lines.concat())?;
    warnings.into_iter().flatten().for_each(|warning| io.note(&warning));
    Ok(())
}

/// Expected statistics of experts with fixed capacities.
struct Capacities {
    overflow: Overflow,
    /// Share of the rows that exceed the capacities, over all layers.
    expected: f64,
}

impl Capacities {
    /// `None` if no experts have capacities.
    fn of(p: &Program) -> Option<Self> {
        p.expert_sets.iter().find(|s| s.batch.is_none())?;
        // Every layer routes `k` rows per token.
        let rates = p.placement.experts.iter().filter_map(|t| Some((f64::from(t.k), t.expected?)));
        let (rows, over) = rates.fold((0.0, 0.0), |(rows, over), (k, expected)| {
            (rows + k, f64::from(expected.overflow).mul_add(k, over))
        });
        Some(Self { overflow: p.placement.overflow, expected: over / f64::max(rows, 1.0) })
    }
}

impl std::fmt::Display for Capacities {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let fate = match self.overflow {
            Overflow::Prune => "are dropped",
            Overflow::Spill => "run on the CPU",
        };
        write!(
            f,
            "{:.2} % of the rows of experts are expected to exceed them, and {fate}",
            self.expected * 100.0
        )
    }
}

/// Contents of a budget, in words.
fn budget(paging: &Paging) -> String {
    let experts: u32 = paging.layers.iter().map(|l| l.experts).sum();
    let pinned = match paging.pinned.len() as u64 {
        0 => String::new(),
        n => format!(", {n} of them pinned ({})", size(paging.frame_bytes.saturating_mul(n))),
    };
    let held = match paging.neurons {
        0 => format!("{} of {experts} experts in memory", paging.frames),
        n => {
            let gates = if paging.gates_on_disk() { "" } else { "gates and " };
            format!("{gates}{} neurons in memory", u64::from(paging.frames) * u64::from(n))
        }
    };
    let threads = paging.threads;
    let threads = if threads == 1 { "1 thread".to_owned() } else { format!("{threads} threads") };
    format!("{} for {threads}; {held}{pinned}, the others on disk ({})", size(paging.budget), paging.policy)
}

/// A memory beside the CPU's: of an accelerator, a NUMA node or another host.
struct Other<'a> {
    name: &'a str,
    /// Units that work in it.
    units: Vec<&'a str>,
    /// Bytes that a run holds there at most, without experts that stay on a disk.
    bytes: u64,
    paging: Option<&'a Paging>,
}

/// The memories beside the CPU's in which something runs.
fn others(p: &Program) -> impl Iterator<Item = Other<'_>> {
    let others = (0..).zip(&p.memories).skip(1).map(|(memory, decl)| Other {
        name: &decl.name,
        units: p.accelerators().filter(|(_, u)| u.memory == memory).map(|(_, u)| u.name.as_str()).collect(),
        bytes: p.peak(memory, 0).unwrap_or(u64::MAX),
        paging: p.paging_of(memory),
    });
    others.filter(|other| !other.units.is_empty())
}

impl Other<'_> {
    fn value(&self) -> serde_json::Value {
        let paging = self.paging.map(|p| {
            json!({ "budget_bytes": p.budget, "frame_bytes": p.frame_bytes, "frames": p.frames, "policy": p.policy })
        });
        json!({ "name": self.name, "units": self.units, "bytes": self.bytes, "paging": paging })
    }
}

impl std::fmt::Display for Other<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "`{}` of `{}`: {}", self.name, self.units.join("`, `"), size(self.bytes))?;
        self.paging.map_or(Ok(()), |paging| write!(f, " beside experts; {}", budget(paging)))
    }
}

/// Number and size of snapshots of recurrent states, for people.
fn snapshots(p: &Program) -> Option<String> {
    let (all, one) = p.snapshot_bytes();
    let distance =
        p.snapshot_distance().map_or(String::new(), |n| format!(", at least one every {n} tokens"));
    let count = all.checked_div(one).filter(|&n| n > 0)?;
    Some(format!("{count} of {} each, {} of the KV cache{distance}", size(one), size(all)))
}

/// Savings by windows in a KV cache, in words.
fn less(saved: u64) -> String {
    if saved == 0 { String::new() } else { format!(", {} less for sliding windows", size(saved)) }
}

/// Names of units that have steps but no executor here.
fn lacking<'a>(context: &Context<'a>) -> Vec<&'a str> {
    if context.emulation.is_some() {
        return Vec::new();
    }
    let here = |unit: &UnitRef| match context.native_executor(unit) {
        Some(found) => found.is_ok(),
        None => !unit.cpus.is_empty() && Node::new(&unit.name, &unit.cpus).is_ok(),
    };
    let units = context.program.accelerators().filter(|(_, unit)| !here(unit));
    units.map(|(_, unit)| unit.name.as_str()).collect()
}

/// Placement of the weights in a run without `--weights` that begins now.
fn held(context: &Context<'_>) -> Result<Choice> {
    let program = context.program;
    if program.paging.is_some() {
        return Ok(Choice::under_budget());
    }
    if let Some(why) = weights::must_be_mapped(program) {
        return Ok(Choice { own: false, why: why.to_owned() });
    }
    let needed = weights::needed(program, cpu::threads(None)?);
    // A bundle is also described if its weights are missing.
    let files = BundleFiles::open(program, context.bundle).ok();
    let cached = files.map_or(Ok(None), |files| MovingStore::cached(program, &files))?;
    weights::choose(Weights::Auto, false, needed, cached, available())
}

/// The placement in words. `huge_pages`: whether this system grants huge pages.
fn shown(held: &Choice, huge_pages: Option<bool>) -> String {
    let what = match (held.own, huge_pages) {
        (true, Some(true)) => "of its own, in huge pages",
        (true, Some(false)) => "of its own, in small pages: the kernel provides no huge pages",
        (true, None) => "of its own",
        (false, _) => "mapped, and shared between processes",
    };
    format!("{what} ({})", held.why)
}

fn hex(bytes: &[u8]) -> String {
    let digit = |n: u8| char::from_digit(u32::from(n), 16).unwrap_or('?');
    bytes.iter().flat_map(|b| [digit(b >> 4), digit(b & 15)]).collect()
}

/// A number of parameters, with three digits.
fn count(n: u64) -> String {
    match n as f64 {
        x if x >= 1e9 => format!("{:.2} B", x / 1e9),
        x if x >= 1e6 => format!("{:.2} M", x / 1e6),
        x if x >= 1e3 => format!("{:.1} K", x / 1e3),
        _ => n.to_string(),
    }
}
