//! Output of `moec inspect` on a bundle, and of `moec build --json` on its plan.

use super::{divided, explain, output, packages, paging, placement, trust};
use moec_backend::UnitSizes;
use moec_base::paths::is_inside;
use moec_base::{Result, human};
use moec_bundle::manifest::ProfileEntry;
use moec_bundle::read::Bundle;
use moec_ir::Format;
use moec_ir::plan::{Plan, Segment};
use moec_passes::decisions::ScheduleSource;
use serde_json::{Value, json};
use std::path::Path;

/// `moec inspect` of a bundle.
pub(super) fn inspect(path: &Path, as_json: bool) -> Result<()> {
    let bundle = Bundle::open(path)?;
    let facts = facts(&bundle.plan);
    if as_json {
        let mut value = json!({
            "kind": "bundle",
            "moec_version": bundle.manifest.moec_version,
            "llvm": bundle.manifest.llvm,
            "source_fingerprint": bundle.manifest.source_fingerprint,
            "profile": bundle.manifest.profile,
            "files": bundle.manifest.files,
            "manifest_sha256": bundle.manifest_sha256(),
            "signature": moec_bundle::signature::found(&bundle.folder)?,
            "plan": facts,
        });
        let sizes = packages::sizes(&bundle)?;
        if let Some(hot) = divided::value(&bundle.plan, codes(sizes.as_ref())) {
            value["hot"] = hot;
        }
        if let Some(sizes) = sizes {
            value["unit"] = json!(sizes);
        }
        return output::json(&value);
    }
    let plan = &bundle.plan;
    let text = |key: &str| facts["memory"][key].as_u64().map(human::bytes).unwrap_or_default();
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let formats =
        by_format(plan).into_iter().map(|(format, numbers, bytes)| explain::stored(format, numbers, bytes));
    let formats: Vec<_> = formats.collect();
    let mut rows = vec![
        row("bundle", path.display().to_string()),
        row(
            "model",
            format!(
                "{}, {} parameters, {} active",
                plan.model.family,
                human::count(plan.model.parameters),
                human::count(plan.model.active_parameters)
            ),
        ),
        row("target", format!("{} ({}, {})", plan.target.name, plan.target.triple, plan.target.cpu)),
        row("built by", format!("moec {}, LLVM {}", bundle.manifest.moec_version, bundle.manifest.llvm)),
        row("manifest", format!("SHA-256 {}", bundle.manifest_sha256())),
        row("signature", trust::signature(moec_bundle::signature::found(&bundle.folder)?.as_ref())),
        row("context", format!("{} tokens, {} sequences", plan.model.max_context, plan.model.slots)),
        row("profile", bundle.manifest.profile.as_ref().map_or_else(|| "none".to_owned(), profile)),
        row("weights", format!("{}: {}", text("weights"), formats.join("; "))),
        row(
            "KV cache",
            format!(
                "{} of {}{}",
                text("kv_cache"),
                facts["kv_cache_format"].as_str().unwrap_or("nothing"),
                match plan.saved_by_rings() {
                    0 => String::new(),
                    saved => format!(", {} less for sliding windows", human::bytes(saved)),
                }
            ),
        ),
    ];
    rows.extend(snapshots(plan).map(|what| row("snapshots", what)));
    rows.push(row("arena", text("arena")));
    rows.push(row("kernels", plan.kernels.len().to_string()));
    rows.extend(paging::rows(plan));
    rows.extend(placement::hosts(plan));
    if let Ok(decisions) = bundle.decisions() {
        let timed = decisions.kernels.iter().filter(|d| d.by == ScheduleSource::Measured).count();
        let method = if timed > 0 { "measured" } else { "chosen by the cost model" };
        rows.push(row("schedules", format!("{method}; `moec explain {}` shows the reasons", path.display())));
    }
    if !plan.graphs.is_empty() {
        let of_packages = bundle.manifest.files.iter().filter(|(name, _)| is_inside(name));
        let bytes = human::bytes(of_packages.map(|(_, f)| f.bytes).sum());
        let graphs = plan.graphs.len();
        rows.push(row(
            "packages",
            format!("{}: {bytes}, {graphs} functions that the plan calls", count(plan)),
        ));
    }
    let sizes = packages::sizes(&bundle)?;
    rows.extend(sizes.iter().flat_map(packages::rows));
    rows.extend(divided::rows(plan, codes(sizes.as_ref())));
    if let Some(b) = plan.model.big_little {
        let what = format!("{} experts per token first, all below a probability of {}", b.experts, b.gamma());
        rows.push(row("big-little", what));
    }
    if let Some(percent) = plan.model.thresholded {
        rows.push(row(
            "thresholds",
            format!("{percent:.1} % of the neurons of experts count as 0: an approximation; `moec explain` shows the loss"),
        ));
    }
    for e in &plan.entries {
        let barriers = moec_passes::barriers::count(e);
        rows.push(row(&e.kind.to_string(), format!("{} steps, {barriers} barriers", e.steps.len())));
    }
    output::data(&output::table(&rows))
}

/// Bytes of the codes of hot neurons.
fn codes(sizes: Option<&UnitSizes>) -> Option<u64> {
    sizes.and_then(packages::hot_of).map(|(_, bytes)| bytes)
}

/// Segments of one format: format, numbers, bytes.
fn by_format(plan: &Plan) -> Vec<(Format, u64, u64)> {
    let all = Format::ALL.into_iter().map(|format| {
        let segments = plan.segments.iter().filter(|s| s.format == format);
        let sum = |(numbers, bytes): (u64, u64), s: &Segment| {
            (numbers + s.shape.iter().map(|&d| u64::from(d)).product::<u64>(), bytes + s.bytes)
        };
        let (numbers, bytes) = segments.fold((0, 0), sum);
        (format, numbers, bytes)
    });
    all.filter(|&(_, numbers, _)| numbers > 0).collect()
}

fn bits(numbers: u64, bytes: u64) -> f64 {
    bytes as f64 * 8.0 / numbers.max(1) as f64
}

/// Number and size of snapshots of recurrent states, for people.
pub(super) fn snapshots(plan: &Plan) -> Option<String> {
    let (all, one) = plan.snapshot_bytes();
    let distance =
        plan.snapshot_distance().map_or(String::new(), |n| format!(", at least one every {n} tokens"));
    let count = all.checked_div(one).filter(|&n| n > 0)?;
    Some(format!("{count} of {} each, {} of the KV cache{distance}", human::bytes(one), human::bytes(all)))
}

/// Facts of a plan, as JSON.
pub(super) fn facts(plan: &Plan) -> Value {
    let weights: u64 = plan.segments.iter().map(|s| s.bytes).sum();
    let (cache, saved) = (plan.state_bytes(), plan.saved_by_rings());
    json!({
        "family": plan.model.family,
        "target": plan.target.name,
        "features": plan.target.features,
        "parameters": plan.model.parameters,
        "active_parameters": plan.model.active_parameters,
        "layers": plan.model.layers,
        "moe_layers": plan.placement.experts.len(),
        "max_context": plan.model.max_context,
        "big_little": plan.model.big_little.map(|b| json!({"experts": b.experts, "gamma": b.gamma()})),
        "thresholded_percent": plan.model.thresholded,
        "entries": plan.entries.iter().map(|e| json!({
            "entry": e.kind.to_string(),
            "steps": e.steps.len(),
            "barriers": moec_passes::barriers::count(e),
        })).collect::<Vec<_>>(),
        "kernels": plan.kernels.len(),
        "packages": count(plan),
        "graphs": plan.graphs.len(),
        "formats": by_format(plan).into_iter().map(|(format, numbers, bytes)| json!({
            "format": format.name(),
            "weights": numbers,
            "bytes": bytes,
            "bits_per_weight": bits(numbers, bytes),
        })).collect::<Vec<_>>(),
        "paging": paging::value(plan),
        "kv_cache_format": plan.cache_format().map(Format::name),
        "memory": {"weights": weights, "kv_cache": cache, "kv_cache_saved_by_windows": saved, "snapshots": plan.snapshot_bytes().0, "arena": plan.arena_bytes(), "scratch_per_thread": plan.scratch_bytes},
    })
}

/// Number of packages that hold the static graphs of a plan.
fn count(plan: &Plan) -> usize {
    plan.graphs.iter().map(|g| &g.package).collect::<std::collections::BTreeSet<_>>().len()
}

/// `olmoe.trace (sha256 0123456789ab…)`
fn profile(p: &ProfileEntry) -> String {
    format!("{} (sha256 {}…)", p.name, p.sha256.get(..12).unwrap_or(&p.sha256))
}
