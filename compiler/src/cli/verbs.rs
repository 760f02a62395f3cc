//! Where the verbs meet the compiler: the bodies of `build`, `inspect`, `verify`, `run` and `eval`.

use super::{build, eval, explain, inspect, output, paging, run, trust, verify};
use crate::bundle::manifest::ProfileEntry;
use crate::bundle::read::Bundle;
use crate::bundle::toolchain::Missing;
use crate::coreml::emulate::Emulated;
use crate::decisions::By;
use crate::evaluate::{self, Tasks};
use crate::import::{Checkpoint, ImportOptions};
use crate::pipeline::Stops;
use crate::progress::Progress;
use crate::twin::Twin;
use crate::verify::{Distance, NodeReport, Report};
use crate::{Error, Result, human};
use moec_ir::Format;
use moec_ir::plan::{Plan, Segment};
use moec_runtime::LoadedProgram;
use moec_runtime::cli::Beside;
use moec_runtime::graphs::Graphs;
use moec_runtime::regular;
use serde_json::{Value, json};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// `moec build`.
pub(super) fn build(args: &build::Args, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    let request = crate::build::Request {
        config: &args.config,
        target: &args.target,
        output: args.output.as_deref(),
        tune: args.tune.then(|| Duration::from_secs(u64::from(args.tune_time))),
        link: !args.no_run,
        from_source: args.run_from_source,
        reuse: !args.no_reuse,
        stops: Stops { print_after: args.print_after.as_deref(), stop_after: args.stop_after.as_deref() },
    };
    let mut printed = Ok(());
    let built = crate::build::build(&request, progress, &mut |text| printed = output::data(text))?;
    printed?;
    let Some(built) = built else { return Ok(()) };
    let folder = built.folder.display();
    if let Some(missing) = &built.summary.missing {
        let way = match missing {
            Missing::Mac(_) => missing.hint(),
            _ => "`moec doctor` says what to install".to_owned(),
        };
        progress.warn(&format!(
            "`{folder}` has no `run`: {missing} ({way}); `moec run {folder} …` needs none on a machine of the \
             target's kind"
        ));
    }
    progress.stage("Manifest", &format!("SHA-256 {}", built.summary.manifest_sha256));
    let [reused, all] = [built.summary.reused_bytes, built.summary.weight_bytes].map(human::bytes);
    let taken = if built.summary.reused_bytes > 0 {
        format!(", {reused} from earlier bundles")
    } else {
        String::new()
    };
    progress.finished(&format!("{folder} ({all}{taken})"), start);
    if args.json {
        output::json(&json!({
            "bundle": built.folder,
            "run": built.summary.run,
            "manifest_sha256": built.summary.manifest_sha256,
            "weight_bytes": built.summary.weight_bytes,
            "reused_bytes": built.summary.reused_bytes,
            "packing_seconds": built.summary.packing.as_secs_f64(),
            "package_bytes": built.summary.package_bytes,
            "seconds": start.elapsed().as_secs_f64(),
            "peak_memory_bytes": moec_runtime::cpu::peak_memory(),
            "helper_peak_memory_bytes": moec_runtime::cpu::peak_memory_of_children(),
            "plan": plan_facts(&built.plan),
        }))?;
    }
    Ok(())
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

/// What a plan decided, in numbers.
fn plan_facts(plan: &Plan) -> Value {
    let weights: u64 = plan.segments.iter().map(|s| s.bytes).sum();
    let cache: u64 = plan.states.iter().map(moec_ir::plan::StateBuf::bytes).sum();
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
        "entries": plan.entries.iter().map(|e| json!({
            "entry": e.kind.to_string(),
            "steps": e.steps.len(),
            "barriers": crate::passes::barriers::count(e),
        })).collect::<Vec<_>>(),
        "kernels": plan.kernels.len(),
        "packages": packages(plan),
        "graphs": plan.graphs.len(),
        "formats": by_format(plan).into_iter().map(|(format, numbers, bytes)| json!({
            "format": format.name(),
            "weights": numbers,
            "bytes": bytes,
            "bits_per_weight": bits(numbers, bytes),
        })).collect::<Vec<_>>(),
        "paging": plan.paging.as_ref().map(|p| paging::value(p, None)),
        "kv_cache_format": plan.states.first().map(|s| s.format.name()),
        "memory": {"weights": weights, "kv_cache": cache, "arena": plan.arena_bytes, "scratch_per_thread": plan.scratch_bytes},
    })
}

/// `moec inspect` of a bundle.
pub(super) fn inspect_bundle(args: &inspect::Args) -> Result<()> {
    let bundle = Bundle::open(&args.path)?;
    let facts = plan_facts(&bundle.plan);
    if args.json {
        return output::json(&json!({
            "kind": "bundle",
            "moec_version": bundle.manifest.moec_version,
            "llvm": bundle.manifest.llvm,
            "source_fingerprint": bundle.manifest.source_fingerprint,
            "profile": bundle.manifest.profile,
            "files": bundle.manifest.files,
            "manifest_sha256": bundle.manifest_sha256(),
            "signature": crate::bundle::signature::found(&bundle.folder)?,
            "plan": facts,
        }));
    }
    let plan = &bundle.plan;
    let text = |key: &str| facts["memory"][key].as_u64().map(human::bytes).unwrap_or_default();
    let row = |name: &str, value: String| vec![name.to_owned(), value];
    let formats =
        by_format(plan).into_iter().map(|(format, numbers, bytes)| explain::stored(format, numbers, bytes));
    let formats: Vec<_> = formats.collect();
    let mut rows = vec![
        row("bundle", args.path.display().to_string()),
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
        row("signature", trust::signature(crate::bundle::signature::found(&bundle.folder)?.as_ref())),
        row("context", format!("{} tokens, {} sequences", plan.model.max_context, plan.model.slots)),
        row("profile", bundle.manifest.profile.as_ref().map_or_else(|| "none".to_owned(), profile)),
        row("weights", format!("{}: {}", text("weights"), formats.join("; "))),
        row(
            "KV cache",
            format!("{} of {}", text("kv_cache"), facts["kv_cache_format"].as_str().unwrap_or("nothing")),
        ),
        row("arena", text("arena")),
        row("kernels", plan.kernels.len().to_string()),
    ];
    rows.extend(plan.paging.iter().flat_map(paging::rows));
    if let Ok(decisions) = bundle.decisions() {
        let timed = decisions.kernels.iter().filter(|d| d.by == By::Clock).count();
        let who = if timed > 0 { "measured" } else { "chosen by the cost model" };
        rows.push(row("schedules", format!("{who}; `moec explain {}` says why", args.path.display())));
    }
    if !plan.graphs.is_empty() {
        let of_packages = bundle.manifest.files.iter().filter(|(name, _)| name.contains(".mlpackage/"));
        let bytes = human::bytes(of_packages.map(|(_, f)| f.bytes).sum());
        let graphs = plan.graphs.len();
        rows.push(row(
            "packages",
            format!("{}: {bytes}, {graphs} functions that the plan calls", packages(plan)),
        ));
    }
    if let Some(b) = plan.model.big_little {
        let what = format!("{} experts per token first, all below a probability of {}", b.experts, b.gamma());
        rows.push(row("big-little", what));
    }
    for e in &plan.entries {
        let barriers = crate::passes::barriers::count(e);
        rows.push(row(&e.kind.to_string(), format!("{} steps, {barriers} barriers", e.steps.len())));
    }
    output::data(&output::table(&rows))
}

/// How many packages hold the static graphs of a plan.
fn packages(plan: &Plan) -> usize {
    plan.graphs.iter().map(|g| &g.package).collect::<std::collections::BTreeSet<_>>().len()
}

/// `olmoe.trace (sha256 0123456789ab…)`
fn profile(p: &ProfileEntry) -> String {
    format!("{} (sha256 {}…)", p.name, p.sha256.get(..12).unwrap_or(&p.sha256))
}

/// `moec verify`.
pub(super) fn verify(args: &verify::Args, progress: &Progress) -> Result<()> {
    let start = Instant::now();
    let bundle = Bundle::open(&args.bundle)?;
    let trust = trust::Trust::of(&bundle, args.key.as_deref(), progress)?;
    let checkpoint = args.source.as_deref().map(|dir| open_source(&bundle, dir)).transpose()?;
    if args.without_execution {
        let report = crate::verify::statics::verify(&bundle, checkpoint.as_ref(), progress)?;
        trust.print_static(&report, args.json)?;
        progress
            .finished(&format!("{} is as it was built; nothing was executed", args.bundle.display()), start);
        return Ok(());
    }
    let report = crate::verify::verify(&bundle, checkpoint.as_ref(), args.bound, progress)?;
    if args.json {
        output::json(&trust.beside(&report)?)?;
    } else {
        // The verdict is what was asked for; the errors of single steps say why, to those who want to know.
        if !progress.is_quiet() {
            output::data(&format!("{}\n", output::table(&trust.rows())))?;
        }
        if !report.entries.is_empty() && !progress.is_quiet() {
            output::data(&format!("{}\n{COLUMNS}\n", output::table(&report_rows(&report))))?;
        }
        if !report.packages.is_empty() && !progress.is_quiet() {
            output::data(&format!("{}\n", output::table(&package_rows(&report))))?;
        }
        output::data(&report.verdict(&args.bundle.display().to_string()))?;
    }
    let failures = report.failures();
    if failures.is_empty() {
        progress.finished(&format!("{} is right", args.bundle.display()), start);
        return Ok(());
    }
    let error = Error::input(format!("`{}` is further off than it may be", args.bundle.display()));
    Err(failures.iter().take(8).fold(error, Error::because))
}

/// The checkpoint that a bundle was built from.
fn open_source(bundle: &Bundle, dir: &Path) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(dir, &ImportOptions { allow_nonfinite: true })?;
    if checkpoint.fingerprint() == bundle.manifest.source_fingerprint {
        return Ok(checkpoint);
    }
    Err(Error::input(format!("the bundle was not built from `{}`", dir.display()))
        .hint("name the checkpoint's folder that the `model.toml` named"))
}

/// Every function of every package.
fn package_rows(report: &Report) -> Vec<Vec<String>> {
    let head = ["package", "function", "experts", "error", "up to", "findings"].map(str::to_owned).to_vec();
    let rows = report.packages.iter().map(|f| {
        let found = if f.findings.is_empty() { "-".to_owned() } else { f.findings.join("; ") };
        vec![
            f.package.clone(),
            f.function.clone(),
            if f.experts == 0 { "-".to_owned() } else { f.experts.to_string() },
            format!("{:.1e}", f.error.relative),
            format!("{:.1e}", f.bound),
            found,
        ]
    });
    std::iter::once(head).chain(rows).collect()
}

/// What the columns of [`report_rows`] mean.
const COLUMNS: &str = "\
Errors are root mean squares, relative to what is right.
own error     the worst step of these, which got exactly what the reference got
up to         what its formats and its arithmetic explain; more is wrong (logits: summed error)
summed error  the worst of these steps beside a reference that has computed all steps before it by itself";

/// The worst step of every operator in every entry point.
fn report_rows(report: &Report) -> Vec<Vec<String>> {
    let mut rows = vec![
        ["entry point", "operator", "steps", "own error", "up to", "summed error", "worst in"]
            .map(str::to_owned)
            .to_vec(),
    ];
    for entry in &report.entries {
        let mut ops: Vec<&str> = entry.nodes.iter().map(|n| n.op).collect();
        ops.sort_unstable();
        ops.dedup();
        for op in ops {
            let nodes: Vec<_> = entry.nodes.iter().filter(|n| n.op == op).collect();
            let chained = nodes.iter().filter_map(|n| n.chained).reduce(Distance::max);
            let share = |n: &NodeReport| n.local.relative / report.allowed(n).max(f64::MIN_POSITIVE);
            let Some(worst) = nodes.iter().max_by(|a, b| share(a).total_cmp(&share(b))) else {
                continue;
            };
            rows.push(vec![
                entry.entry.clone(),
                op.to_owned(),
                nodes.len().to_string(),
                format!("{:.1e}", worst.local.relative),
                format!("{:.1e}", report.allowed(worst)),
                chained.map_or_else(|| "-".to_owned(), |d| format!("{:.1e}", d.relative)),
                worst.scope.clone(),
            ]);
        }
        let logits = format!("{:.1e}", entry.logits.relative);
        rows.push(vec![
            entry.entry.clone(),
            "(logits)".into(),
            String::new(),
            String::new(),
            format!("{:.1e}", report.allowed_of_logits(entry)),
            logits,
            format!("{} of {} rows", entry.rows, entry.all_rows),
        ]);
    }
    rows
}

/// `moec run`; the bundle's own verb decides the exit code.
pub(super) fn run(args: &run::Args, progress: &Progress) -> Result<ExitCode> {
    let bundle = Bundle::open(&args.bundle)?;
    if args.key.is_some() {
        trust::Trust::of(&bundle, args.key.as_deref(), progress)?;
        bundle.manifest.check(&bundle.folder, true)?;
    }
    let name = format!("moec run {}", args.bundle.display());
    let words = std::iter::once(name.clone().into()).chain(args.args.iter().cloned()).skip(1);
    if args.emulate && !bundle.plan.graphs.is_empty() {
        let twin = Twin::of(&bundle, progress)?;
        let graphs = || Box::new(Emulated::default()) as Box<dyn Graphs>;
        let beside = Beside { weights: twin.folder(), graphs: &graphs };
        return Ok(twin
            .program()
            .with(|program| moec_runtime::cli::run(program, &bundle.folder, Some(beside), words, &name)));
    }
    let unit = if args.emulate { bundle.emulated_unit(progress)? } else { bundle.unit()? };
    let program = LoadedProgram::from_plan(&bundle.plan, &|symbol| unit.resolve(symbol))
        .map_err(|e| Error::input("the plan does not run here").because(e))?
        .emulating(unit.emulated());
    Ok(program.with(|program| moec_runtime::cli::run(program, &bundle.folder, None, words, &name)))
}

/// One row for each γ.
fn big_little_rows(measured: &evaluate::big_little::BigLittle) -> Vec<Vec<String>> {
    let head = ["gamma", "perplexity", "all experts", "exact match", "all experts in answers"];
    let share = |x: Option<f64>| x.map_or_else(|| "-".to_owned(), |x| format!("{:.2} %", 100.0 * x));
    let rows = measured.gammas.iter().map(|g| {
        vec![
            g.gamma.to_string(),
            g.perplexity.map_or_else(|| "-".to_owned(), |p| format!("{p:.4}")),
            share(g.fallback_ratio),
            share(g.exact_match),
            share(g.answer_fallback_ratio),
        ]
    });
    std::iter::once(head.map(str::to_owned).to_vec()).chain(rows).collect()
}

/// `moec eval`.
pub(super) fn eval(args: &eval::Args, progress: &Progress) -> Result<()> {
    let read = |path: &Path| {
        regular::read_text(path, regular::TEXT).map_err(|e| crate::error::io_error("read", path, &e))
    };
    let questions = |path: &Path| evaluate::questions(&read(path)?, &path.display().to_string());
    let tasks = Tasks {
        text: args.text.as_deref().map(read).transpose()?,
        questions: args.qa.as_deref().map(questions).transpose()?,
        window: args.window as usize,
        windows: args.windows.map(|w| w as usize),
    };
    let bundle = Bundle::open(&args.bundle)?;
    if args.big_little {
        let measured = evaluate::big_little::evaluate(&bundle, &args.gamma, &tasks, progress)?;
        if args.json {
            return output::json(&serde_json::to_value(&measured).map_err(|e| Error::bug(e.to_string()))?);
        }
        return output::data(&output::table(&big_little_rows(&measured)));
    }
    let against = args.against.as_deref().map(Bundle::open).transpose()?;
    let quality = evaluate::evaluate(&bundle, against.as_ref(), &tasks, progress)?;
    if args.json {
        let mut value = serde_json::to_value(&quality).map_err(|e| Error::bug(e.to_string()))?;
        if let Some([dropped, spilled, padded]) = quality.rates() {
            value["rates"] = json!({"dropped": dropped, "spilled": spilled, "padded": padded});
        }
        return output::json(&value);
    }
    let mut rows = Vec::new();
    if let (Some(p), Some(n), Some(w)) = (quality.perplexity, quality.tokens, quality.windows) {
        rows.push(vec!["perplexity".to_owned(), format!("{p:.4}"), format!("{n} tokens in {w} windows")]);
    }
    if let (Some(same), Some(kl)) = (quality.same_choice, quality.divergence) {
        rows.push(vec![
            "same choice".to_owned(),
            format!("{:.2} %", 100.0 * same),
            "of next tokens".to_owned(),
        ]);
        rows.push(vec![
            "divergence".to_owned(),
            format!("{kl:.6}"),
            "nats per token (Kullback-Leibler)".to_owned(),
        ]);
    }
    if let Some([drop, spill, padding]) = quality.rates() {
        let percent = |x: f64| format!("{:.2} %", 100.0 * x);
        let pairs = "of the (token, expert) pairs";
        rows.push(vec!["dropped".to_owned(), percent(drop), pairs.to_owned()]);
        rows.push(vec!["spilled".to_owned(), percent(spill), pairs.to_owned()]);
        rows.push(vec!["padding".to_owned(), percent(padding), "of the rows of static graphs".to_owned()]);
    }
    if let (Some(x), Some(n)) = (quality.exact_match, quality.questions) {
        rows.push(vec!["exact match".to_owned(), format!("{:.2} %", 100.0 * x), format!("{n} questions")]);
    }
    output::data(&output::table(&rows))
}
