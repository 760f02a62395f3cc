//! `cargo xtask coreml-shapes`: Core ML packages of models in real shapes, with random weights, as a table.
//!
//! Every matrix lives on the Neural Engine. The router is random, so a short text is enough to calibrate on;
//! its tokenizer is the demo model's. The table goes to stdout and into docs/benchmarks.md.

use crate::quality::{BENCHMARKS, number, write_table};
use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;

const FOLDER: &str = "target/coreml-shapes";
const MARKS: [&str; 2] = ["<!-- coreml-shapes -->", "<!-- /coreml-shapes -->"];

const MODEL_TOML: &str = "[model]
source = \"hf\"
[shapes]
max_context = 1024
prefill_chunk = 256
[weights]
experts = \"bf16\"
attention = \"bf16\"
embeddings = \"bf16\"
[calibrate]
profile = \"p.trace\"
[placement]
experts = \"npu\"
attention = \"npu\"
";

/// Models with what their experts are, and layers.
const MODELS: &[(&str, &str, u32)] = &[
    ("phi-tiny", "16 of 4096 × 448", 1),
    ("phi-tiny", "16 of 4096 × 448", 2),
    ("olmoe", "64 of 2048 × 1024", 1),
    ("olmoe", "64 of 2048 × 1024", 2),
    ("qwen3-30b-a3b", "128 of 2048 × 768", 1),
    ("qwen3-30b-a3b", "128 of 2048 × 768", 2),
];

/// Builds and verifies each, and writes the table.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    let mut table = String::from(
        "| shapes | experts | layers | packages, GB | largest graph, MB | s per GB | moec, MiB | helper, MiB | largest error |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for &(model, experts, layers) in MODELS {
        stage("Measuring", &format!("{model}, {layers} layers"));
        // Nothing of the one before is kept: they are large.
        drop(fs::remove_dir_all(&folder));
        fs::create_dir_all(&folder).map_err(failed)?;
        let [source, toml, trace, bundle] =
            ["hf", "model.toml", "p.trace", "out.moec"].map(|n| folder.join(n));
        let call = |words: &[&str]| {
            let mut command = program(&moec);
            command.args(words);
            command
        };
        let mut synth = call(&["synth", "--like", model, "--vocab", "2048", "--quiet"]);
        shell::run(synth.arg("--layers").arg(layers.to_string()).arg(&source))?;
        let golden = root().join("golden/models/ferris");
        fs::copy(golden.join("tokenizer.json"), source.join("tokenizer.json")).map_err(failed)?;
        fs::write(&toml, MODEL_TOML).map_err(failed)?;
        let mut calibrate = call(&["calibrate", "--quiet", "--tokens", "4096", "--text"]);
        calibrate.arg(golden.join("eval/calibration.txt")).arg(&toml).arg("-o").arg(&trace);
        shell::run(&mut calibrate)?;
        let mut build = call(&["build", "--target", "m2-ultra", "--no-run", "--quiet", "--json", "-o"]);
        let built = shell::output(build.arg(&bundle).arg(&toml));
        let built = built.ok_or_else(|| Failed::new(format!("{model} does not build")))?;
        let mut verify = call(&["verify", "--quiet", "--json", "--source"]);
        let verified = shell::output(verify.arg(&source).arg(&bundle));
        let verified = verified.ok_or_else(|| Failed::new(format!("{model} does not verify")))?;
        let of = |key: &str| number(&built, key).unwrap_or(f64::NAN);
        let gb = of("package_bytes") / 1e9;
        let errors = verified.split("\"relative\":").skip(1).filter_map(|rest| {
            rest[..rest.find([',', '}', '\n']).unwrap_or(rest.len())].trim().parse::<f64>().ok()
        });
        let _ = writeln!(
            table,
            "| {model} | {experts} | {layers} | {gb:.2} | {:.0} | {:.1} | {:.0} | {:.0} | {:.1e} |",
            largest(&bundle.join("artifacts")).map_err(failed)? as f64 / 1e6,
            of("seconds") / gb,
            of("peak_memory_bytes") / f64::from(1 << 20),
            of("helper_peak_memory_bytes") / f64::from(1 << 20),
            errors.fold(0.0, f64::max),
        );
    }
    drop(fs::remove_dir_all(&folder));
    println!("\n{table}");
    write_table(BENCHMARKS, MARKS, &table)
}

/// Bytes of the largest file of weights below a folder.
fn largest(folder: &std::path::Path) -> std::io::Result<u64> {
    let mut most = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        most = most.max(if entry.file_type()?.is_dir() {
            largest(&entry.path())?
        } else if entry.file_name() == "weight.bin" {
            entry.metadata()?.len()
        } else {
            0
        });
    }
    Ok(most)
}
