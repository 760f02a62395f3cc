//! `cargo xtask quality`: what static capacities cost in quality, as a table (NPUMoE, Table 3).
//!
//! The model of golden/models/ferris is calibrated, built for `m2-ultra` in several ways, and every build is measured on
//! text and questions that calibration has not read, with its Neural Engine emulated. The table goes to stdout and into
//! docs/benchmarks.md. What formats and roundings of weights cost is a second table, on stdout.

use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const FERRIS: &str = "golden/models/ferris";
const FOLDER: &str = "target/quality";
const MARKS: [&str; 2] = ["<!-- quality -->", "<!-- /quality -->"];

/// The page that figures go to.
pub(crate) const BENCHMARKS: &str = "docs/benchmarks.md";

/// The builds: name, target, what `model.toml` says besides.
const BUILDS: &[(&str, &str, &str)] = &[
    ("reference", "native", ""),
    ("spill", "m2-ultra", "[experts]\noverflow = \"spill\"\n"),
    ("prune", "m2-ultra", ""),
    ("prune, at most 0.1 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"0.1%\"\n"),
    ("prune, at most 1 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"1%\"\n"),
    ("prune, at most 5 %", "m2-ultra", "[quality]\nmax_perplexity_increase = \"5%\"\n"),
];

/// Builds, measures, writes the table.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let ferris = root().join(FERRIS);
    let eval = |name: &str| ferris.join("eval").join(name);
    let trace = folder.join("ferris.trace");
    let quoted = |p: &Path| format!("\"{}\"", p.display());
    let (source, profile, text) = (quoted(&ferris), quoted(&trace), quoted(&eval("calibration.txt")));
    let config = |more: &str| {
        format!(
            "[model]\nsource = {source}\n[shapes]\nmax_context = 1024\nprefill_chunk = 256\n\
             [weights]\nexperts = \"f16\"\nattention = \"f16\"\nembeddings = \"f16\"\nactivations = \"f32\"\n\
             [calibrate]\nprofile = {profile}\ntext = [{text}]\n[placement]\nexperts = \"npu\"\nattention = \"npu\"\n{more}"
        )
    };
    let toml = folder.join("model.toml");
    let write = |more: &str| fs::write(&toml, config(more)).map_err(failed);
    write("")?;
    let mut calibrate = program(&moec);
    calibrate.arg("calibrate").arg(&toml).arg("--text").arg(eval("calibration.txt")).arg("-o").arg(&trace);
    shell::run(&mut calibrate)?;

    let mut rows = Vec::new();
    for &(name, target, more) in BUILDS {
        stage("Measuring", name);
        write(more)?;
        let bundle = folder.join("out.moec");
        let mut build = program(&moec);
        build.arg("build").arg(&toml).args(["--target", target, "--no-run", "--quiet", "-o"]).arg(&bundle);
        shell::run(&mut build)?;
        let mut measure = program(&moec);
        measure.arg("eval").arg(&bundle).arg("--text").arg(eval("text.txt"));
        measure.arg("--qa").arg(eval("needle.jsonl")).arg("--json");
        let said =
            shell::output(&mut measure).ok_or_else(|| Failed::new(format!("`{name}` cannot be measured")))?;
        let perplexity =
            number(&said, "perplexity").ok_or_else(|| Failed::new("no perplexity was measured"))?;
        rows.push((name, perplexity, said));
    }
    let table = table(&rows);
    println!("\n{table}");
    into_page(BENCHMARKS, MARKS, &table)?;
    let (text, held_out) = (eval("calibration.txt"), eval("text.txt"));
    let roundings = crate::rounding::table(&moec, &folder, &ferris, &trace, &text, &held_out)?;
    println!("\n{roundings}");
    Ok(())
}

/// The rows as Markdown; increases are against the first.
fn table(rows: &[(&str, f64, String)]) -> String {
    let mut out = String::from(
        "| build | dropped | spilled | padding | perplexity | increase | needle |\n|---|---|---|---|---|---|---|\n",
    );
    let reference = rows.first().map_or(1.0, |r| r.1);
    for (name, perplexity, said) in rows {
        let share = |key: &str, digits: usize| {
            number(said, key).map_or("–".to_owned(), |x| format!("{:.digits$} %", 100.0 * x))
        };
        let increase = 100.0 * (perplexity / reference - 1.0);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {name} | {} | {} | {} | {perplexity:.4} | {increase:+.3} % | {} |",
            share("dropped", 2),
            share("spilled", 2),
            share("padded", 1),
            share("exact_match", 1),
        );
    }
    out
}

/// The number behind `"key":` in the output of moec.
pub(crate) fn number(json: &str, key: &str) -> Option<f64> {
    let (_, rest) = json.split_once(&format!("\"{key}\":"))?;
    let end = rest.find([',', '}', '\n']).unwrap_or(rest.len());
    rest[..end].trim().parse().ok()
}

/// Puts a table between its marks in a page of the project.
pub(crate) fn into_page(page: &str, marks: [&str; 2], table: &str) -> Result<(), Failed> {
    let path = root().join(page);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", path.display()));
    let text = fs::read_to_string(&path).map_err(failed)?;
    let parts = text.split_once(marks[0]).and_then(|(head, rest)| Some((head, rest.split_once(marks[1])?.1)));
    let (head, tail) = parts.ok_or_else(|| Failed::new(format!("`{page}` has no `{}`", marks[0])))?;
    fs::write(&path, format!("{head}{}\n{table}{}{tail}", marks[0], marks[1])).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::{number, table};

    #[test]
    fn numbers_are_found() {
        let json = "{\n  \"perplexity\": 16.5,\n  \"rates\": {\n    \"dropped\": 0.001\n  }\n}";
        assert_eq!(number(json, "perplexity"), Some(16.5));
        assert_eq!(number(json, "dropped"), Some(0.001));
        assert_eq!(number(json, "exact_match"), None);
        let rows = [("a", 10.0, String::new()), ("b", 10.1, json.to_owned())];
        let table = table(&rows);
        assert!(table.contains("| b | 0.10 % | – | – | 10.1000 | +1.000 % | – |"), "{table}");
    }
}
