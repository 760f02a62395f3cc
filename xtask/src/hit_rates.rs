//! `cargo xtask hit-rates`: how often an expert is in memory, by policy and size of the cache, as tables.
//!
//! Two models read text, and every policy is replayed on the choices of their routers. One is the trained
//! model of golden/models/ferris. The other has layers of OLMoE-1B-7B's shapes with random weights that
//! choose experts as often as the real one does (golden/traces). The tables go to stdout and into
//! docs/benchmarks.md.

use crate::quality::{BENCHMARKS, write_table};
use crate::setup;
use crate::shell::{self, Failed, program, root, stage};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

const FERRIS: &str = "golden/models/ferris";
const COUNTS: &str = "golden/traces/olmoe_expert_counts.csv";
const FOLDER: &str = "target/hit-rates";
const MARKS: [&str; 2] = ["<!-- hit-rates -->", "<!-- /hit-rates -->"];
/// Sizes of the cache, in shares of all experts.
const SIZES: &str = "25%,50%,75%";
/// Layers of the model in OLMoE-1B-7B's shapes.
const LAYERS: &str = "4";
/// Tokens that are read.
const TOKENS: &str = "8192";

/// Reads, replays, writes the tables.
pub(crate) fn run() -> Result<(), Failed> {
    let moec = setup::moec()?;
    let folder = root().join(FOLDER);
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    let ferris = root().join(FERRIS);
    let skewed = folder.join("skewed");
    let _ = fs::remove_dir_all(&skewed);
    stage("Writing", "layers of OLMoE-1B-7B's shapes");
    let mut synth = program(&moec);
    synth
        .args(["synth", "--quiet", "--like", "olmoe", "--layers", LAYERS, "--popularity"])
        .arg(root().join(COUNTS));
    shell::run(synth.arg(&skewed))?;
    // Its weights are random: any tokenizer with ids below its vocabulary size is valid.
    for name in ["tokenizer.json", "tokenizer_config.json"] {
        fs::copy(ferris.join(name), skewed.join(name)).map_err(failed)?;
    }
    let models = [
        (format!("`{FERRIS}`"), &ferris),
        (
            format!("{LAYERS} layers of OLMoE-1B-7B's shapes, random weights, routed as `{COUNTS}` counts"),
            &skewed,
        ),
    ];
    let mut out = String::new();
    for (name, source) in &models {
        stage("Replaying", name);
        let replay_text = replays(&moec, source, &folder)?;
        let table =
            table(&replay_text).ok_or_else(|| Failed::new("`moec inspect` printed an unexpected report"))?;
        // Writing to a string does not fail.
        let _ = write!(out, "\n{name}, {TOKENS} tokens of text:\n\n{table}");
    }
    fs::remove_dir_all(&skewed).map_err(failed)?;
    println!("{out}");
    write_table(BENCHMARKS, MARKS, &out)
}

/// Output of `moec inspect` on the routing of a model.
fn replays(moec: &Path, source: &Path, folder: &Path) -> Result<String, Failed> {
    let (toml, trace) = (folder.join("model.toml"), folder.join("model.trace"));
    let failed = |e: std::io::Error| Failed::new(format!("`{}`: {e}", toml.display()));
    fs::write(&toml, format!("[model]\nsource = \"{}\"\n", source.display())).map_err(failed)?;
    let mut calibrate = program(moec);
    calibrate
        .arg("calibrate")
        .arg(&toml)
        .args(["--quiet", "--tokens", TOKENS, "-o"])
        .arg(&trace)
        .arg("--text");
    shell::run(calibrate.arg(root().join(FERRIS).join("eval/calibration.txt")))?;
    let mut inspect = program(moec);
    inspect.arg("inspect").arg(&trace).args(["--cache", SIZES]);
    shell::output(&mut inspect).ok_or_else(|| Failed::new("the profile cannot be replayed"))
}

/// The replays as Markdown: a column for each size of the cache.
fn table(replay_text: &str) -> Option<String> {
    let row = |line: &str| -> Vec<String> {
        line.split("  ").map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
    };
    let blocks: Vec<Vec<Vec<String>>> =
        replay_text.split("\n\n").map(|block| block.lines().map(row).collect()).collect();
    let block = |second: &str| {
        blocks.iter().find(|b| {
            b.first().is_some_and(|head| {
                head.first().is_some_and(|c| c == "cache") && head.iter().any(|c| c == second)
            })
        })
    };
    let rates = block("25 %")?;
    let chosen = block("chosen")?;
    let head = rates.first()?;
    let mut out = format!(
        "| experts in memory | {} |\n|---|{}\n",
        head[1..].join(" | "),
        "---|".repeat(head.len() - 1)
    );
    for line in rates.iter().skip(2) {
        let _ = writeln!(out, "| {} |", line.join(" | "));
    }
    let of = |name: &str| -> Option<Vec<String>> {
        let at = chosen.first()?.iter().position(|c| c == name)?;
        chosen.iter().skip(1).map(|line| line.get(at).cloned()).collect()
    };
    for (what, column) in [
        ("chosen by the compiler", "chosen"),
        ("that choice on held-out text", "held out"),
        ("LRU there", "LRU, held out"),
    ] {
        let _ = writeln!(out, "| {what} | {} |", of(column)?.join(" | "));
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn replays_become_a_table() {
        let replay_text = "64 tokens\n\ncache           25 %    50 %\nexperts         64      128\nlru             31.9 %  60.0 %\n\
                    Belady (bound)  62.7 %  83.3 %\n\ncache  chosen                held out  LRU, held out  reason\n\
                    25 %   lfu half_life=64      43.4 %    29.9 %     gains\n50 %   lfu half_life=2       68.3 %    57.8 %     gains\n";
        let table = table(replay_text).unwrap_or_default();
        let expected = "| experts in memory | 25 % | 50 % |\n|---|---|---|\n| lru | 31.9 % | 60.0 % |\n\
                        | Belady (bound) | 62.7 % | 83.3 % |\n| chosen by the compiler | lfu half_life=64 | lfu half_life=2 |\n\
                        | that choice on held-out text | 43.4 % | 68.3 % |\n| LRU there | 29.9 % | 57.8 % |\n";
        assert_eq!(table, expected);
        assert_eq!(super::table("nothing"), None);
    }
}
