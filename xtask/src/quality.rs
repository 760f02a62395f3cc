//! `cargo xtask quality`: the loss of quality by static capacities, as a table (NPUMoE, Table 3).
//!
//! The models ferris and ferris-relu (golden/models) are calibrated and built for `m2-ultra` in several ways.
//! Every build is measured on text and questions that calibration has not read, with its Neural Engine
//! emulated. The table goes to stdout and into docs/benchmarks.md. A second table on stdout has the loss of
//! formats and roundings of weights.

use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

const FERRIS: &str = "golden/models/ferris";
const RELU: &str = "golden/models/ferris-relu";
const FOLDER: &str = "target/quality";
const MARKS: [&str; 2] = ["<!-- quality -->", "<!-- /quality -->"];

/// The page that figures go to.
pub(crate) const BENCHMARKS: &str = "docs/benchmarks.md";

/// A build: its name, the target, what `model.toml` says besides.
type Build = (&'static str, &'static str, &'static str);

/// The models, by the folders of their checkpoints, and the builds of each. The first is the reference of the
/// others.
const MODELS: &[(&str, &[Build])] = &[
    (
        FERRIS,
        &[
            ("reference", "native", ""),
            ("spill", "m2-ultra", ""),
            ("prune", "m2-ultra", "[experts]\noverflow = \"prune\"\n"),
            ("prune, at most 0.1 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"0.1%\"\n"),
            ("prune, at most 1 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"1%\"\n"),
            ("prune, at most 5 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"5%\"\n"),
        ],
    ),
    (
        RELU,
        &[
            ("reference", "native", ""),
            ("spill", "m2-ultra", ""),
            ("spill, coverage 0.9", "m2-ultra", "[experts]\ncoverage = 0.9\n"),
            ("prune", "m2-ultra", "[experts]\noverflow = \"prune\"\n"),
            ("prune, coverage 0.9", "m2-ultra", "[experts]\noverflow = \"prune\"\ncoverage = 0.9\n"),
        ],
    ),
];

/// Measurements of a build.
struct Row {
    model: &'static str,
    name: &'static str,
    perplexity: f64,
    /// Share of the (token, expert) pairs past a capacity that `moec explain` expects, if there are
    /// capacities.
    expected: Option<f64>,
    /// Output of `moec eval`.
    report: String,
}

/// Builds, measures, writes the table. `--capacities` and `--roundings` measure one of the two alone, and
/// `--drops` the figures of docs/npumoe.md.
pub(crate) fn run(args: &[String]) -> Result<(), Failed> {
    let (capacities, roundings) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => (true, true),
        ["--capacities"] => (true, false),
        ["--roundings"] => (false, true),
        ["--drops"] => return drops(),
        ["--help" | "-h"] => {
            println!("cargo xtask quality [--capacities | --roundings | --drops]");
            println!("--capacities  measure only the loss by static capacities");
            println!("--roundings   measure only the loss by formats and roundings of weights");
            println!(
                "--drops       measure only quality by dropped tokens, for docs/npumoe.md (`cargo xtask docs`)"
            );
            return Ok(());
        }
        _ => {
            return Err(Failed::new(format!("there is no option `{}`", args.join(" ")))
                .hint("`cargo xtask quality --help` lists them"));
        }
    };
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    fs::create_dir_all(&folder).map_err(|e| Failed::new(format!("`{}`: {e}", folder.display())))?;
    if capacities {
        let mut rows = Vec::new();
        for &(model, builds) in MODELS {
            rows.extend(measure(&moec, &folder, model, builds)?);
        }
        let table = table(&rows);
        println!("\n{table}");
        write_table(BENCHMARKS, MARKS, &table)?;
    } else {
        measure(&moec, &folder, FERRIS, &[])?;
    }
    if roundings {
        let (ferris, trace) = (root().join(FERRIS), folder.join(trace_of(FERRIS)));
        let [text, held_out] = ["calibration.txt", "text.txt"].map(eval);
        let roundings = crate::rounding::table(&moec, &folder, &ferris, &trace, &text, &held_out)?;
        println!("\n{roundings}");
    }
    Ok(())
}

/// Measures the quality of ferris by the share of dropped tokens, and writes the figures of docs/npumoe.md.
fn drops() -> Result<(), Failed> {
    let mut command = program(&crate::papers::program()?);
    command.arg("drops").arg(root().join(FERRIS));
    command.arg("--calibration").arg(eval("calibration.txt")).arg("--text").arg(eval("text.txt"));
    let text = shell::output(&mut command).ok_or_else(|| Failed::new("ferris cannot be measured"))?;
    let path = root().join("papers/measured/drops.toml");
    fs::write(&path, text + "\n").map_err(|e| Failed::new(format!("`{}`: {e}", path.display())))
}

/// A file of the texts and questions, which both models share.
fn eval(name: &str) -> PathBuf {
    root().join(FERRIS).join("eval").join(name)
}

/// Last part of a model's folder.
fn name_of(model: &str) -> &str {
    model.rsplit('/').next().unwrap_or(model)
}

/// File name of a model's profile.
fn trace_of(model: &str) -> String {
    format!("{}.trace", name_of(model))
}

/// Calibrates a model, builds it in every way, and measures each build.
fn measure(moec: &Path, folder: &Path, model: &'static str, builds: &[Build]) -> Result<Vec<Row>, Failed> {
    let trace = folder.join(trace_of(model));
    let quoted = |p: &Path| format!("\"{}\"", p.display());
    let (source, profile, text) =
        (quoted(&root().join(model)), quoted(&trace), quoted(&eval("calibration.txt")));
    let config = |more: &str| {
        format!(
            "[model]\nsource = {source}\n[shapes]\nmax_context = 1024\nprefill_chunk = 256\n\
             [weights]\nexperts = \"f16\"\nattention = \"f16\"\nembeddings = \"f16\"\nactivations = \"f32\"\n\
             [calibrate]\nprofile = {profile}\ntext = [{text}]\n[placement]\nexperts = \"npu\"\nattention = \"npu\"\n{more}"
        )
    };
    let toml = folder.join("model.toml");
    let write = |more: &str| {
        fs::write(&toml, config(more)).map_err(|e| Failed::new(format!("`{}`: {e}", toml.display())))
    };
    write("")?;
    let mut calibrate = program(moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(eval("calibration.txt")).arg("-o").arg(&trace);
    shell::run(&mut calibrate)?;

    let mut rows = Vec::new();
    for &(name, target, more) in builds {
        stage("Measuring", &format!("{}, {name}", name_of(model)));
        write(more)?;
        let bundle = folder.join("out.moec");
        let mut build = program(moec);
        build.arg("build").arg(&toml).args(["--target", target, "--no-run", "--quiet", "-o"]).arg(&bundle);
        shell::run(&mut build)?;
        let mut measure = program(moec);
        measure.arg("eval").arg(&bundle).arg("--text").arg(eval("text.txt"));
        measure.arg("--qa").arg(eval("needle.jsonl")).arg("--json");
        let report =
            shell::output(&mut measure).ok_or_else(|| Failed::new(format!("`{name}` cannot be measured")))?;
        let perplexity =
            number(&report, "perplexity").ok_or_else(|| Failed::new("no perplexity was measured"))?;
        let explained = shell::output(program(moec).arg("explain").arg(&bundle).arg("--json"));
        let expected = explained.and_then(|json| mean(&json, "overflow"));
        rows.push(Row { model: name_of(model), name, perplexity, expected, report });
    }
    Ok(rows)
}

/// The rows as Markdown; increases are against the first of the same model.
fn table(rows: &[Row]) -> String {
    let mut out = String::from(
        "| model | build | expected overflow | dropped | spilled | padding | perplexity | increase | needle |\n\
         |---|---|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { model, name, perplexity, expected, report } = row;
        let reference = rows.iter().find(|r| r.model == *model).map_or(1.0, |r| r.perplexity);
        let percent = |x: Option<f64>, digits: usize| {
            x.map_or("–".to_owned(), |x| format!("{:.digits$} %", 100.0 * x))
        };
        let share = |key: &str, digits: usize| percent(number(report, key), digits);
        let increase = 100.0 * (perplexity / reference - 1.0);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {model} | {name} | {} | {} | {} | {} | {perplexity:.4} | {increase:+.3} % | {} |",
            percent(*expected, 2),
            share("dropped", 2),
            share("spilled", 2),
            share("padded", 1),
            share("exact_match", 1),
        );
    }
    out
}

/// Mean of all numbers after `"key":` in the output of moec; `None` without any.
fn mean(json: &str, key: &str) -> Option<f64> {
    let found: Vec<f64> =
        json.match_indices(&format!("\"{key}\":")).filter_map(|(at, _)| number(&json[at..], key)).collect();
    (!found.is_empty()).then(|| found.iter().sum::<f64>() / found.len() as f64)
}

/// The number after `"key":` in the output of moec.
pub(crate) fn number(json: &str, key: &str) -> Option<f64> {
    let (_, rest) = json.split_once(&format!("\"{key}\":"))?;
    let end = rest.find([',', '}', '\n']).unwrap_or(rest.len());
    rest[..end].trim().parse().ok()
}

/// Puts a table between its marks in a page of the project.
pub(crate) fn write_table(page: &str, marks: [&str; 2], table: &str) -> Result<(), Failed> {
    let path = root().join(page);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", path.display()));
    let text = fs::read_to_string(&path).map_err(failed)?;
    let parts = text.split_once(marks[0]).and_then(|(head, rest)| Some((head, rest.split_once(marks[1])?.1)));
    let (head, tail) = parts.ok_or_else(|| Failed::new(format!("`{page}` has no `{}`", marks[0])))?;
    fs::write(&path, format!("{head}{}\n{table}{}{tail}", marks[0], marks[1])).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::{Row, mean, number, table};

    #[test]
    fn numbers_are_parsed_from_json() {
        let json = "{\n  \"perplexity\": 16.5,\n  \"rates\": {\n    \"dropped\": 0.001\n  }\n}";
        assert_eq!(number(json, "perplexity"), Some(16.5));
        assert_eq!(number(json, "dropped"), Some(0.001));
        assert_eq!(number(json, "exact_match"), None);
        let row = |model, name, perplexity, expected, report: &str| Row {
            model,
            name,
            perplexity,
            expected,
            report: report.to_owned(),
        };
        let rows = [
            row("m", "a", 10.0, None, ""),
            row("m", "b", 10.1, Some(0.002), json),
            row("n", "a", 20.0, None, ""),
            row("n", "b", 20.2, None, ""),
        ];
        let table = table(&rows);
        assert!(table.contains("| m | b | 0.20 % | 0.10 % | – | – | 10.1000 | +1.000 % | – |"), "{table}");
        // Each model has a reference of its own.
        assert!(table.contains("| n | b | – | – | – | – | 20.2000 | +1.000 % | – |"), "{table}");
        // Strings are not counted as numbers.
        let layers = "{\"overflow\": \"prune\", \"layers\": [{\"overflow\": 0.01}, {\"overflow\": 0.03}]}";
        assert_eq!((mean(layers, "overflow"), mean(layers, "padding")), (Some(0.02), None));
    }
}
