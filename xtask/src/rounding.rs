//! Loss of quality by storing weights in fewer bits, by format and rounding: a table that `cargo xtask
//! quality` prints.

use crate::quality::number;
use crate::shell::{self, Failed, program, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::time::Instant;

/// The builds: name, what `[weights]` says, whether there is a profile.
const BUILDS: &[(&str, &str, bool)] = &[
    ("bf16", "", false),
    ("q8", "experts = \"q8\"\nattention = \"q8\"\nembeddings = \"q8\"\n", true),
    ("q4, no profile", "experts = \"q4\"\nattention = \"q4\"\nembeddings = \"q4\"\n", false),
    (
        "q4, nearest",
        "experts = \"q4\"\nattention = \"q4\"\nembeddings = \"q4\"\nrounding = \"nearest\"\n",
        true,
    ),
    ("q4, feedback", "experts = \"q4\"\nattention = \"q4\"\nembeddings = \"q4\"\n", true),
    (
        "experts and attention q4, nearest",
        "experts = \"q4\"\nattention = \"q4\"\nrounding = \"nearest\"\n",
        true,
    ),
    ("experts and attention q4, feedback", "experts = \"q4\"\nattention = \"q4\"\n", true),
    ("experts q4, nearest", "experts = \"q4\"\nrounding = \"nearest\"\n", true),
    ("experts q4, feedback", "experts = \"q4\"\n", true),
    ("experts q4n, nearest", "experts = \"q4n\"\nrounding = \"nearest\"\n", true),
    ("experts q4n, feedback", "experts = \"q4n\"\n", true),
    ("experts and attention q4n, feedback", "experts = \"q4n\"\nattention = \"q4n\"\n", true),
    ("all q4n, feedback", "experts = \"q4n\"\nattention = \"q4n\"\nembeddings = \"q4n\"\n", true),
    ("experts and attention q4o, feedback", "experts = \"q4o\"\nattention = \"q4o\"\n", true),
    ("experts and attention q4c, feedback", "experts = \"q4c\"\nattention = \"q4c\"\n", true),
    ("experts q4o, nearest", "experts = \"q4o\"\nrounding = \"nearest\"\n", true),
    ("experts q4o, feedback", "experts = \"q4o\"\n", true),
    ("experts q4c, nearest", "experts = \"q4c\"\nrounding = \"nearest\"\n", true),
    ("experts q4c, feedback", "experts = \"q4c\"\n", true),
    ("experts and attention q6", "experts = \"q6\"\nattention = \"q6\"\n", true),
    ("experts and attention q5", "experts = \"q5\"\nattention = \"q5\"\n", true),
    ("experts q3, nearest", "experts = \"q3\"\nrounding = \"nearest\"\n", true),
    ("experts q3, feedback", "experts = \"q3\"\n", true),
    ("experts and attention q3, feedback", "experts = \"q3\"\nattention = \"q3\"\n", true),
    ("experts q2, nearest", "experts = \"q2\"\nrounding = \"nearest\"\n", true),
    ("experts q2, feedback", "experts = \"q2\"\n", true),
    ("experts q2, attention q4, feedback", "experts = \"q2\"\nattention = \"q4\"\n", true),
    ("experts q2s, nearest", "experts = \"q2s\"\nrounding = \"nearest\"\n", true),
    ("experts q2s, feedback", "experts = \"q2s\"\n", true),
    ("attention q4", "attention = \"q4\"\n", true),
    ("embeddings and head q4, nearest", "embeddings = \"q4\"\nrounding = \"nearest\"\n", true),
    ("embeddings and head q4", "embeddings = \"q4\"\n", true),
    ("`size = \"4 MiB\"`", "size = \"4 MiB\"\n", true),
    ("`size = \"5 MiB\"`", "size = \"5 MiB\"\n", true),
];

/// Builds a model of the checkpoint in `source` in every variant, with the profile if it is required, and
/// measures it on `held_out`. `text` is the text of the profile. Gives the rows as Markdown.
pub(crate) fn table(
    moec: &Path,
    folder: &Path,
    source: &Path,
    profile: &Path,
    text: &Path,
    held_out: &Path,
) -> Result<String, Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    let (toml, bundle, exact) =
        (folder.join("rounding.toml"), folder.join("rounding.moec"), folder.join("exact.moec"));
    let mut out = String::from(
        "| weights | bytes | build | perplexity | increase | divergence | same choice |\n|---|---|---|---|---|---|---|\n",
    );
    let mut reference = None;
    for &(name, weights, profiled) in BUILDS {
        stage("Measuring", name);
        let calibrate = if profiled {
            format!("[calibrate]\nprofile = \"{}\"\ntext = [\"{}\"]\n", profile.display(), text.display())
        } else {
            String::new()
        };
        let config = format!(
            "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 1024\n[weights]\nactivations = \"f32\"\n{weights}{calibrate}",
            source.display()
        );
        fs::write(&toml, config).map_err(failed)?;
        let built = if reference.is_none() { &exact } else { &bundle };
        let start = Instant::now();
        let mut build = program(moec);
        build.arg("build").arg(&toml).args(["--no-run", "--quiet", "-o"]).arg(built);
        shell::run(&mut build)?;
        let seconds = start.elapsed().as_secs_f64();
        let bytes: u64 = ["dense.bin", "experts.bin"]
            .iter()
            .filter_map(|f| fs::metadata(built.join("weights").join(f)).ok())
            .map(|m| m.len())
            .sum();
        let mut measure = program(moec);
        measure.arg("eval").arg(built).arg("--against").arg(&exact).arg("--text").arg(held_out).arg("--json");
        let report = shell::output(&mut measure);
        let of = |key: &str| report.as_deref().and_then(|s| number(s, key));
        let (Some(perplexity), Some(divergence), Some(same)) =
            (of("perplexity"), of("divergence"), of("same_choice"))
        else {
            return Err(Failed::new(format!("`{name}` cannot be measured")));
        };
        let increase = 100.0 * (perplexity / *reference.get_or_insert(perplexity) - 1.0);
        // Writing to a string does not fail.
        let _ = writeln!(
            out,
            "| {name} | {:.2} MiB | {seconds:.1} s | {perplexity:.4} | {increase:+.2} % | {:.2}e-3 | {:.2} % |",
            bytes as f64 / f64::from(1 << 20),
            1e3 * divergence,
            100.0 * same,
        );
    }
    Ok(out)
}
