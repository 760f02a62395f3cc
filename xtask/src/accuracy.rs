//! `cargo xtask accuracy`: the loss of low-bit formats on text, on the CPU and in networks for Hexagon (as in
//! PowerInfer-2, §7.6, Table 7).
//!
//! The model of golden/models/ferris-relu is calibrated and built with its experts in every format. Each
//! build is measured on text that calibration has not read, networks emulated. A second table is of weights
//! alone. Both go into docs/qnn-networks.md.

use crate::papers;
use crate::quality::{number, write_table};
use crate::setup;
use crate::shell::{self, Failed, cargo, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const PAGE: &str = "docs/qnn-networks.md";
const MODEL: [&str; 2] = ["<!-- accuracy -->", "<!-- /accuracy -->"];
const WEIGHTS: [&str; 2] = ["<!-- outliers -->", "<!-- /outliers -->"];
const CHECKPOINT: &str = "golden/models/ferris-relu";
const TEXTS: &str = "golden/models/ferris/eval";
const FOLDER: &str = "target/accuracy";
/// Tokens that are measured: windows, and tokens of each.
const WINDOWS: [&str; 2] = ["8", "512"];

/// Formats of the experts: name, lines of `model.toml`, whether networks support it, and the paper's
/// counterpart.
const FORMATS: &[(&str, &str, bool, &str)] = &[
    ("as stored (bf16)", "bf16", false, "–"),
    ("INT8", "q8", true, "–"),
    ("INT4 in groups of 32", "q4", false, "llama.cpp: 70.12 and 79.25"),
    ("INT4 by channel", "q4c", true, "QNN: 63.26 and 56.93"),
    ("INT4 by channel, outliers INT8", "q4o", true, "PowerInfer-2: 68.35 and 78.38"),
];

/// Targets, and where experts are there.
const PLACES: [(&str, &str); 2] = [("native", "cpu"), ("snapdragon-8-gen-3", "npu")];

/// One build, measured.
#[derive(Clone, Debug, Default)]
struct Row {
    perplexity: f64,
    same: f64,
    divergence: f64,
}

/// Builds, measures, writes both tables.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let (toml, trace) = (folder.join("model.toml"), folder.join("ferris-relu.trace"));
    let text = |name: &str| root().join(TEXTS).join(name);
    let write = |experts: &str, place: &str, more: &str| {
        let config = format!(
            "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 512\nprefill_chunk = 64\n[weights]\nexperts = \"{experts}\"\n\
             attention = \"bf16\"\nembeddings = \"bf16\"\nactivations = \"f32\"\n[experts]\noverflow = \"spill\"\n[placement]\nexperts = \"{place}\"\nattention = \"cpu\"\n{more}",
            root().join(CHECKPOINT).display()
        );
        fs::write(&toml, config).map_err(failed)
    };
    write("bf16", "cpu", "")?;
    let mut calibrate = program(&moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(text("calibration.txt")).arg("-o").arg(&trace);
    shell::run(&mut calibrate)?;
    let exact = folder.join("exact.moec");
    let mut rows = Vec::new();
    for &(name, format, networks, paper) in FORMATS {
        let mut found: Vec<Row> = Vec::new();
        for (target, experts) in PLACES.into_iter().take(1 + usize::from(networks)) {
            stage("Measuring", &format!("{name}, {target}"));
            write(format, experts, &format!("[calibrate]\nprofile = \"{}\"\n", trace.display()))?;
            // The first build of all is what others are compared with.
            let first = rows.is_empty() && found.is_empty();
            let bundle = if first { exact.clone() } else { folder.join("out.moec") };
            let mut build = program(&moec);
            build
                .arg("build")
                .arg(&toml)
                .args(["--target", target, "--no-run", "--quiet", "-o"])
                .arg(&bundle);
            shell::run(&mut build)?;
            found.push(measured(&moec, &bundle, &exact, &text("text.txt"))?);
        }
        rows.push((name, paper, found));
    }
    let table = table(&rows);
    println!("\n{table}");
    write_table(PAGE, MODEL, &table)?;
    let mut sweep = program(papers::debug()?);
    let outliers = shell::output(sweep.arg("outliers").arg(root().join(CHECKPOINT)));
    let outliers = outliers.ok_or_else(|| Failed::new("`moec-papers outliers` failed"))?;
    println!("{outliers}");
    write_table(PAGE, WEIGHTS, &format!("{outliers}\n"))
}

/// Builds moec for these measurements. They take no times, so that the profile with the shortest build is
/// used.
fn moec() -> Result<PathBuf, Failed> {
    let llvm = setup::run()?;
    stage("Building", "moec");
    shell::run(cargo("build", Some(&llvm)).args(["--locked", "--package", "moec"]))?;
    Ok(shell::target_dir().join("debug/moec"))
}

fn measured(moec: &Path, bundle: &Path, exact: &Path, text: &Path) -> Result<Row, Failed> {
    let [windows, window] = WINDOWS;
    let mut eval = program(moec);
    eval.arg("eval").arg(bundle).arg("--against").arg(exact).arg("--text").arg(text);
    let report = shell::output(eval.args(["--windows", windows, "--window", window, "--json"]));
    let of = |key: &str| report.as_deref().and_then(|report| number(report, key));
    match (of("perplexity"), of("same_choice"), of("divergence")) {
        (Some(perplexity), Some(same), Some(divergence)) => Ok(Row { perplexity, same, divergence }),
        _ => Err(Failed::new(format!("`{}` cannot be measured", bundle.display()))),
    }
}

/// The rows as Markdown: perplexity with its increase, and how often the next token is the same.
fn table(rows: &[(&str, &str, Vec<Row>)]) -> String {
    let mut out = String::from(
        "| experts | CPU | networks | same next token | divergence | Table 7: Bamboo 7B and Qwen2 7B |\n|---|---|---|---|---|---|\n",
    );
    let reference = rows.first().and_then(|r| r.2.first()).map_or(1.0, |r| r.perplexity);
    for (name, paper, found) in rows {
        let at = |place: usize, of: &dyn Fn(&Row) -> String| found.get(place).map_or("–".to_owned(), of);
        let perplexity =
            |r: &Row| format!("{:.3} ({:+.2} %)", r.perplexity, 100.0 * (r.perplexity / reference - 1.0));
        let same = |r: &Row| format!("{:.1} %", 100.0 * r.same);
        let divergence = |r: &Row| format!("{:.2}e-3", 1e3 * r.divergence);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {name} | {} | {} | {}, {} | {}, {} | {paper} |",
            at(0, &perplexity),
            at(1, &perplexity),
            at(0, &same),
            at(1, &same),
            at(0, &divergence),
            at(1, &divergence),
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::{Row, table};

    #[test]
    fn table_row_shows_both_measurements() {
        let row = |perplexity| Row { perplexity, same: 0.5, divergence: 0.002 };
        let rows = [("f32", "–", vec![row(10.0)]), ("INT8", "–", vec![row(10.0), row(11.0)])];
        let table = table(&rows);
        assert!(table.contains("| f32 | 10.000 (+0.00 %) | – | 50.0 %, – | 2.00e-3, – | – |"), "{table}");
        let int8 = "| INT8 | 10.000 (+0.00 %) | 11.000 (+10.00 %) | 50.0 %, 50.0 % | 2.00e-3, 2.00e-3 | – |";
        assert!(table.contains(int8), "{table}");
    }
}
