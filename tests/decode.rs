//! Big-little decoding and best-of-N of compiled models: every family, every format of the KV cache.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test fails by panicking"
)]

mod batches;
mod big_little;
mod folded;
mod prompts;

use crate::support::{Setup, built, checkpoint, clean, expected, fails, ferris, json_of, list, moec, ok};
use moec_bundle::read::Bundle;
use moec_runtime::Engine;
use moec_testing::checkpoints::late_checkpoints;
use std::path::Path;

const BATCHES: [usize; 3] = [1, 2, 4];

/// Builds a checkpoint for this machine; `more` is added to its `model.toml`.
fn compiled(source: &Path, format: &str, more: &str, folder: &Path) -> Bundle {
    compiled_by(source, format, folder, |text| text + more)
}

/// Builds a checkpoint for this machine; `by` changes its `model.toml`.
fn compiled_by(source: &Path, format: &str, folder: &Path, by: impl FnOnce(String) -> String) -> Bundle {
    let toml = Setup { format, chunk: 20, batch: &BATCHES, context: 128 }.write(source, folder);
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, by(text)).unwrap();
    built(&toml, &["--target", "native"], &folder.join("b"));
    Bundle::open(&folder.join("b")).unwrap()
}

const BIG_LITTLE: &str = "[decode]\nbig_little = true\n";

/// Cache formats to test: all of them for one model with each kind of attention and for the trained model, and
/// f32 for late families, one of which (Gemma 4) does not scale its scores, so that a rounded key counts for more.
fn caches(model: &str) -> &'static [&'static str] {
    if ["olmoe", "deepseek_v2", "ferris"].contains(&model) {
        &["f32", "bf16", "q8"]
    } else if late_checkpoints().any(|late| late == model) {
        &["f32"]
    } else {
        &["bf16"]
    }
}

type Step<'a> = &'a mut dyn FnMut(&mut Engine<'_>, &[(u32, usize, u32)]) -> Vec<f32>;

/// Logits of every token of a sequence in slot 0, decoded one by one.
fn read(engine: &mut Engine<'_>, ids: &[u32], step: Step<'_>) -> Vec<Vec<f32>> {
    engine.reset(0).unwrap();
    ids.iter().enumerate().map(|(pos, &id)| step(engine, &[(0, pos, id)])).collect()
}

fn full(engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]) -> Vec<f32> {
    let mut all = Vec::new();
    engine
        .decode(batch, &mut |_, logits| {
            all.extend_from_slice(logits);
            Ok(())
        })
        .unwrap();
    all
}

fn little(engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]) -> Vec<f32> {
    let mut all = Vec::new();
    engine
        .decode_little(batch, &mut |_, logits| {
            all.extend_from_slice(logits);
            Ok(())
        })
        .unwrap();
    all
}

#[test]
fn decoding_options_work_on_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let source = ferris();
    let toml =
        Setup { format: "bf16", chunk: 128, batch: &[1, 2], context: 512 }.write(&source, folder.path());
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, format!("{text}{BIG_LITTLE}")).unwrap();
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "-o"]).arg(&bundle));

    // The linked program and `moec run` decode the same tokens.
    let prompt = list(&expected(&source).ids[..24]);
    let args = ["generate", "--ids", &prompt, "-n", "40", "--json", "--gamma", "0.6"];
    let own = json_of(clean(std::process::Command::new(bundle.join("run"))).args(args));
    let ours = json_of(moec().arg("run").arg(&bundle).args(args));
    assert_eq!((&own["ids"], &own["fallback_ratio"]), (&ours["ids"], &ours["fallback_ratio"]));
    let ratio = own["fallback_ratio"].as_f64().unwrap();
    assert!(ratio > 0.0 && ratio < 1.0, "{ratio}");

    // Perplexity: γ = 1 gives that of a prefill, fewer experts give a higher one, and other values of γ are
    // in between.
    let text = source.join("eval/text.txt");
    let eval = |more: &[&str]| {
        json_of(
            moec()
                .arg("eval")
                .arg(&bundle)
                .args(["--json", "--windows", "4", "--window", "256", "--text"])
                .arg(&text)
                .args(more),
        )
    };
    let plain = eval(&[])["perplexity"].as_f64().unwrap();
    let measured = eval(&["--big-little", "--gamma", "1,0.5,0"]);
    assert_eq!(measured["experts"], 2);
    let rows = measured["gammas"].as_array().unwrap();
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert_eq!([0, 1, 2].map(|i| number(i, "gamma")), [1.0, 0.5, 0.0]);
    assert!((number(0, "perplexity") / plain - 1.0).abs() < 1e-4, "{plain} {measured}");
    assert!(number(0, "perplexity") < number(1, "perplexity"), "{measured}");
    assert!(number(1, "perplexity") < number(2, "perplexity"), "{measured}");
    assert_eq!((number(0, "fallback_ratio"), number(2, "fallback_ratio")), (1.0, 0.0));
    assert!(number(1, "fallback_ratio") > 0.1 && number(1, "fallback_ratio") < 0.9, "{measured}");

    // Answers to questions as a table, with the bundle's γ.
    let questions = folder.path().join("qa.jsonl");
    let lines = std::fs::read_to_string(source.join("eval/needle.jsonl")).unwrap();
    let few: Vec<&str> = lines.lines().take(12).collect();
    std::fs::write(&questions, few.join("\n")).unwrap();
    let shown = ok(moec().arg("eval").arg(&bundle).arg("--big-little").arg("--qa").arg(&questions)).stdout;
    let shown = String::from_utf8(shown).unwrap();
    let rows: Vec<&str> = shown.lines().collect();
    assert!(rows.len() == 2 && rows[0].contains("exact match") && rows[1].starts_with("0.7"), "{shown}");
}

#[test]
fn invalid_decode_options_are_rejected() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "f32", chunk: 8, batch: &[1], context: 32 }
        .write(&checkpoint("olmoe"), folder.path());
    let text = std::fs::read_to_string(&toml).unwrap();
    let bundle = folder.path().join("b");
    let build = |more: &str| {
        std::fs::write(&toml, format!("{text}{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle);
        build
    };
    let (code, stderr) = fails(&mut build("[decode]\nbig_little = true\nlittle = 2\n"));
    assert_eq!(code, 1);
    assert!(stderr.contains("`decode.little` is 2, but the model uses 2 experts per token"), "{stderr}");
    assert!(stderr.contains("hint: set it to 1 or less; 1 is the default"), "{stderr}");
    ok(&mut build(""));
    let questions = folder.path().join("qa.jsonl");
    std::fs::write(&questions, "{\"prompt\": \"a\", \"answer\": \"b\"}\n").unwrap();
    let eval = || {
        let mut eval = moec();
        eval.arg("eval").arg(&bundle).arg("--qa").arg(&questions);
        eval
    };
    for (args, words) in [
        (
            &["--big-little"][..],
            ["built without big-little decoding", "hint: set `big_little = true` under `[decode]`"],
        ),
        (&["--gamma", "0.5"], ["--big-little", "required"]),
        (&["--big-little", "--gamma", "0.5,2"], ["--gamma", "must be a number from 0 to 1"]),
    ] {
        let (_, stderr) = fails(eval().args(args));
        assert!(words.iter().all(|w| stderr.contains(w)), "{args:?}: {stderr}");
    }
    let (_, stderr) =
        fails(moec().arg("run").arg(&bundle).args(["generate", "--ids", "1", "--gamma", "0.5"]));
    assert!(stderr.contains("hint: set `big_little = true`"), "{stderr}");
    let (_, stderr) = fails(moec().arg("run").arg(&bundle).args([
        "generate",
        "--ids",
        "1",
        "--best-of",
        "2",
        "--temperature",
        "1",
    ]));
    assert!(stderr.contains("hint: name 2 in `decode_batch` under `[shapes]`"), "{stderr}");
}
