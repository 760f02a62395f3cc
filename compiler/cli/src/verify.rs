//! `moec verify`.

use super::{output, trust};
use moec_base::progress::Progress;
use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_import::{Checkpoint, ImportOptions};
use moec_measure::verify::{Distance, NodeReport, Report};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Execute a bundle's artifacts against the reference, and report the error
///
/// Checks every file against its hash, then runs every compiled step on this machine and compares it with the
/// reference evaluator. For a bundle of another architecture, runs its static graphs or, if it has none, the
/// same steps compiled for this machine. A bundle is a program, and this executes it. For bundles that you do
/// not trust, use `--static`, which executes nothing. Hashes protect against damage, not against malice,
/// since an attacker can change a hash together with its file. Against malice, check the signature (`--key`),
/// or compare the printed SHA-256 of the manifest.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The bundle
    pub bundle: PathBuf,
    /// Check the bundle without executing its code
    ///
    /// Checks the hashes of all files, and that there are no others; plan, Graph, decisions and tokenizer;
    /// the symbols of the object code; packages; with `--source`, every packed weight.
    #[arg(long = "static", conflicts_with = "bound")]
    pub without_execution: bool,
    /// Check the bundle's signature against this public key first
    #[arg(long, value_name = "PUB")]
    pub key: Option<PathBuf>,
    /// Checkpoint to compare the packed weights with
    #[arg(long, value_name = "HF_DIR")]
    pub source: Option<PathBuf>,
    /// Largest permitted error of a step [default: the tolerance of its formats and arithmetic]
    ///
    /// Root mean square, relative to the reference. The tolerance of steps in f32 is 1e-4.
    #[arg(long, value_name = "X")]
    pub bound: Option<f64>,
    /// Print one JSON object to stdout
    #[arg(long)]
    pub json: bool,
}

/// Verifies a bundle.
///
/// # Errors
/// Fails if the bundle cannot be executed here, or its results are wrong.
pub fn run(args: &Args, progress: &Progress) -> Result<()> {
    if let Some(bound) = args.bound
        && !(bound.is_finite() && bound >= 0.0)
    {
        return Err(Error::usage(format!("`--bound` is {bound}, expected a number of at least 0")));
    }
    let start = Instant::now();
    let bundle = Bundle::open(&args.bundle)?;
    let trust = trust::Trust::of(&bundle, args.key.as_deref(), progress)?;
    let checkpoint = args.source.as_deref().map(|dir| open_source(&bundle, dir)).transpose()?;
    if args.without_execution {
        let report = moec_measure::verify::statics::verify(&bundle, checkpoint.as_ref(), progress)?;
        trust.print_static(&report, args.json)?;
        progress.finished(
            &format!("{} is unchanged since the build; nothing was executed", args.bundle.display()),
            start,
        );
        return Ok(());
    }
    let report = moec_measure::verify::verify(&bundle, checkpoint.as_ref(), args.bound, progress)?;
    report.unverified.iter().for_each(|what| progress.warn(what));
    if args.json {
        output::json(&trust.with_signature(&report)?)?;
    } else {
        // `--quiet` prints only the verdict, without the errors of single steps.
        if !progress.is_quiet() {
            output::data(&format!("{}\n", output::table(&trust.rows())))?;
        }
        if !report.entries.is_empty() && !progress.is_quiet() {
            output::data(&format!("{}\n{COLUMNS}\n", output::table(&report_rows(&report))))?;
        }
        if !report.packages.is_empty() && !progress.is_quiet() {
            output::data(&format!("{}\n", output::table(&package_rows(&report))))?;
        }
        if report.packages.iter().any(|f| !f.checks.is_empty()) && !progress.is_quiet() {
            output::data(&format!("{}\n{CHECKS}\n", output::table(&check_rows(&report))))?;
        }
        output::data(&report.verdict(&args.bundle.display().to_string()))?;
    }
    let failures = report.failures();
    if failures.is_empty() {
        progress.finished("verification", start);
        return Ok(());
    }
    let error = Error::input(format!("`{}` is out of tolerance", args.bundle.display()));
    Err(failures.iter().take(8).fold(error, Error::because))
}

/// The checkpoint that a bundle was built from.
fn open_source(bundle: &Bundle, dir: &Path) -> Result<Checkpoint> {
    let checkpoint = Checkpoint::open(dir, &ImportOptions { allow_nonfinite: true })?;
    if checkpoint.fingerprint() == bundle.manifest.source_fingerprint {
        return Ok(checkpoint);
    }
    Err(Error::input(format!("the bundle was not built from `{}`", dir.display()))
        .hint("give the checkpoint's folder that `source` in the `model.toml` named"))
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

/// Explanation of the columns of [`check_rows`].
const CHECKS: &str = "off  largest difference from the same weights with activations in f32, as a share of the results' spread over all rows";

/// Results of other executors than moec on packages, with the worst function of each.
fn check_rows(report: &Report) -> Vec<Vec<String>> {
    let mut rows = vec![["executed by", "functions", "off", "up to", "worst in"].map(str::to_owned).to_vec()];
    let all = || report.packages.iter().flat_map(|f| f.checks.iter().map(move |check| (f, check)));
    let mut names: Vec<&str> = Vec::new();
    for (_, check) in all() {
        if !names.contains(&&*check.by) {
            names.push(&check.by);
        }
    }
    for by in names {
        let of = all().filter(|(_, check)| check.by == by);
        let Some((function, worst)) =
            of.clone().max_by(|a, b| a.1.share_of_spread.total_cmp(&b.1.share_of_spread))
        else {
            continue;
        };
        rows.push(vec![
            by.to_owned(),
            of.count().to_string(),
            format!("{:.1e}", worst.share_of_spread),
            format!("{:.1e}", worst.bound),
            format!("{} of {}", function.function, function.package),
        ]);
    }
    rows
}

/// Explanation of the columns of [`report_rows`].
const COLUMNS: &str = "\
Errors are root mean squares, relative to the reference.
own error     worst of these steps, computed from the reference's inputs
up to         tolerance by its formats and arithmetic (logits: of the summed error)
summed error  worst of these steps, against a reference that also computed all earlier steps";

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
