//! `cargo xtask fit`: what `moec fit` predicts, beside measurements.
//!
//! First what formats lose on the project's models, which moec carries for models whose own losses are not known, and
//! a table of the forms of the KV cache. Then builds under limits of memory: size, speed and loss as predicted and as measured, for docs/benchmarks.md.

use crate::quality::{BENCHMARKS, number, write_table};
use crate::setup;
use crate::shell::{self, Failed, cargo, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// File that moec carries.
const FILE: &str = "compiler/cli/src/fit/losses.json";
/// Models whose losses are measured, by their folders in `golden/models`.
const MODELS: [&str; 2] = ["ferris", "ferris-relu"];
const FOLDER: &str = "target/fit";
/// Calibration reads the one text, losses are measured on the other.
const TEXTS: [&str; 2] = ["golden/models/ferris/eval/calibration.txt", "golden/models/ferris/eval/text.txt"];
const MARKS: [&str; 2] = ["<!-- fit -->", "<!-- /fit -->"];
const MARKS_OF_CACHES: [&str; 2] = ["<!-- caches -->", "<!-- /caches -->"];
/// Tokens of text that each form of the KV cache is measured on.
const TOKENS_OF_CACHES: &str = "32768";
/// Limits of memory for ferris, in MiB, from the whole model to the smallest.
const OF_FERRIS: [u32; 5] = [64, 24, 18, 15, 13];
/// The same for OLMoE with fewer layers and random weights.
const OF_OLMOE: [u32; 4] = [8192, 3072, 2304, 1700];
const LAYERS: &str = "4";

/// Measures and writes.
pub(crate) fn run() -> Result<(), Failed> {
    let llvm = setup::run()?;
    stage("Building", "moec");
    shell::run(cargo("build", Some(&llvm)).args(["--locked", "--release", "--package", "moec"]))?;
    let moec = shell::target_dir().join("release/moec");
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let all = MODELS.iter().map(|model| recorded(&moec, &folder, model)).collect::<Result<Vec<_>, _>>()?;
    fs::write(root().join(FILE), format!("{{\n{}\n}}\n", all.join(",\n"))).map_err(failed)?;
    stage("Wrote", FILE);
    stage("Measuring", "forms of the KV cache");
    let mut measure = cargo("run", Some(&llvm));
    measure.args([
        "--locked",
        "--release",
        "--quiet",
        "--package",
        "moec",
        "--example",
        "cache_losses",
        "--",
    ]);
    measure.arg(configured(&folder, MODELS[0])?).arg(folder.join("ferris.trace")).arg(TOKENS_OF_CACHES);
    let caches = shell::output(measure.arg(root().join(TEXTS[1])));
    let caches = caches.ok_or_else(|| Failed::new("the KV cache cannot be measured"))?;
    write_table(BENCHMARKS, MARKS_OF_CACHES, &format!("{}\n", caches.trim_end()))?;

    let held_out = half(&folder, false)?;
    let ferris = root().join("golden/models/ferris");
    let trace = folder.join("ferris.trace").display().to_string();
    let text = held_out.display().to_string();
    let olmoe = folder.join("olmoe");
    drop(fs::remove_dir_all(&olmoe));
    let mut synth = program(&moec);
    synth.args(["synth", "--like", "olmoe", "--layers", LAYERS, "--vocab", "8192", "--quiet"]);
    shell::run(synth.arg(&olmoe))?;
    let mut table = String::from(
        "| model | memory limit | experts, rest, KV | size | decode tokens/s | prefill tokens/s | loss |\n|---|---|---|---|---|---|---|\n",
    );
    for limit in OF_FERRIS {
        let options = ["--profile", &trace, "--text", &text, "--context", "1024"];
        table += &row(&moec, &folder, (&ferris, "ferris"), limit, &options)?;
    }
    let name = format!("olmoe, {LAYERS} layers");
    for limit in OF_OLMOE {
        table += &row(&moec, &folder, (&olmoe, &name), limit, &["--context", "2048"])?;
    }
    drop(fs::remove_dir_all(&olmoe));
    println!("\n{table}");
    write_table(BENCHMARKS, MARKS, &table)
}

/// Half of the text that calibration does not read: losses are recorded on the first, and measured on the second.
fn half(folder: &Path, first: bool) -> Result<PathBuf, Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", TEXTS[1]));
    let text = fs::read_to_string(root().join(TEXTS[1])).map_err(failed)?;
    let middle = (text.len() / 2..text.len()).find(|&i| text.is_char_boundary(i)).unwrap_or(text.len());
    let (before, after) = text.split_at(middle);
    let (name, half) = if first { ("first.txt", before) } else { ("second.txt", after) };
    fs::write(folder.join(name), half).map_err(failed)?;
    Ok(folder.join(name))
}

/// Records the profile of a model, and returns its losses as a member of the file.
fn recorded(moec: &Path, folder: &Path, model: &str) -> Result<String, Failed> {
    stage("Measuring", model);
    let toml = configured(folder, model)?;
    let mut calibrate = program(moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(root().join(TEXTS[0]));
    calibrate.args(["--losses", "--quiet", "--json", "-o"]);
    let report = shell::output(calibrate.arg(folder.join(format!("{model}.trace"))));
    let report = report.ok_or_else(|| Failed::new(format!("`{model}` cannot be calibrated")))?;
    let losses = losses(&report).ok_or_else(|| Failed::new(format!("`{model}` has no losses")))?;
    Ok(format!("  \"{model}\": {losses}"))
}

/// Writes the `model.toml` of a model whose losses are measured, and returns its path.
fn configured(folder: &Path, model: &str) -> Result<PathBuf, Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    let (source, toml) = (root().join("golden/models").join(model), folder.join("model.toml"));
    let config = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 1024\n[quality]\ntext = [\"{}\"]\n",
        source.display(),
        half(folder, true)?.display()
    );
    fs::write(&toml, config).map_err(failed)?;
    Ok(toml)
}

/// Fits a model into memory, and returns the row of what was predicted and measured.
fn row(
    moec: &Path,
    folder: &Path,
    (source, name): (&Path, &str),
    limit: u32,
    options: &[&str],
) -> Result<String, Failed> {
    stage("Fitting", &format!("{name} into {limit} MiB"));
    let mut fit = program(moec);
    fit.arg("fit").arg(source).args(["--memory", &format!("{limit}MiB"), "--force", "--quiet", "--json"]);
    fit.args(options).arg("--toml").arg(folder.join("fit.toml")).arg("-o").arg(folder.join("fit.moec"));
    let report = shell::output(&mut fit).ok_or_else(|| Failed::new(format!("`{name}` does not fit")))?;
    table_row(&report, name, limit).ok_or_else(|| Failed::new("a report without a build"))
}

/// The row of a report.
fn table_row(report: &str, name: &str, limit: u32) -> Option<String> {
    let (_, builds) = report.split_once("\"builds\": [")?;
    // Those of the first build, in either order.
    let figures = |key: &str| builds.split_once(&format!("\"{key}\": {{"))?.1.split_once('}');
    let ((predicted, _), (measured, _)) = (figures("predicted")?, figures("measured")?);
    let word = |key: &str| {
        let (_, rest) = predicted.split_once(&format!("\"{key}\": \""))?;
        Some(rest.split_once('"')?.0.to_owned())
    };
    let both = |key: &str, show: &dyn Fn(f64) -> String| match (number(predicted, key), number(measured, key))
    {
        (Some(p), Some(m)) => format!("{}, measured {}", show(p), show(m)),
        _ => "–".to_owned(),
    };
    let rate = |x: f64| format!("{x:.1}");
    let share = |x: f64| format!("{:+.2} %", 100.0 * x);
    let mut out = String::new();
    // Writing to a string does not fail.
    let _ = writeln!(
        out,
        "| {name} | {limit} MiB | {}, {}, {} | {:.1} MB | {} | {} | {} |",
        word("experts")?,
        word("rest")?,
        word("kv_cache")?,
        number(predicted, "size_bytes")? / 1e6,
        both("decode_tokens_per_s", &rate),
        both("prefill_tokens_per_s", &rate),
        both("loss_share", &share),
    );
    Some(out)
}

/// The list of losses in a report: objects without further lists.
fn losses(report: &str) -> Option<&str> {
    let (_, rest) = report.split_once("\"losses\": ")?;
    rest.get(..=rest.find(']')?)
}

#[cfg(test)]
mod tests {
    #[test]
    fn losses_are_cut_out_of_a_report() {
        let report =
            "{\n  \"loads\": [1],\n  \"losses\": [\n    {\"key\": \"experts\"}\n  ],\n  \"tokens\": 3\n}";
        assert_eq!(super::losses(report), Some("[\n    {\"key\": \"experts\"}\n  ]"));
    }

    #[test]
    fn row_shows_predictions_beside_measurements() {
        let report = "{\"builds\": [{\"measured\": {\n\"decode_tokens_per_s\": 9.0,\n\"loss_share\": null,\n\"prefill_tokens_per_s\": 80\n},\n\
                      \"predicted\": {\n\"decode_tokens_per_s\": 10.0,\n\"experts\": \"q4\",\n\"kv_cache\": \"bf16\",\n\
                      \"loss_share\": 0.02,\n\"prefill_tokens_per_s\": 100.0,\n\"rest\": \"q8\",\n\"size_bytes\": 2000000\n}}]}";
        assert_eq!(
            super::table_row(report, "m", 5).as_deref(),
            Some("| m | 5 MiB | q4, q8, bf16 | 2.0 MB | 10.0, measured 9.0 | 100.0, measured 80.0 | – |\n")
        );
    }
}
