//! Golden models on one, two and three hosts: one process gives transformers' logits, and all hosts its bits.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{LAUNCHERS, run};
use crate::support::{Setup, built, checkpoint, distance, expected, list, logits_file, ok};
use moec_testing::every_nth;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

/// Families of each kind of attention and router.
const NINE: [&str; 9] = [
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe",
    "gpt_oss",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
];
/// Families of 2026, each with mixers or experts of its own.
const LATE: [&str; 6] = ["gemma4", "glm4_moe_lite", "jamba", "kimi_linear", "minimax_m2", "nemotron_h"];

/// Builds a family in f32 for a target, with these lines under `[placement]`.
fn build(family: &str, folder: &Path, target: &str, placement: &str) -> PathBuf {
    let folder = folder.join(target);
    fs::create_dir(&folder).unwrap();
    let toml =
        Setup { format: "f32", chunk: 20, batch: &[1], context: 96 }.write(&checkpoint(family), &folder);
    write!(fs::File::options().append(true).open(&toml).unwrap(), "[placement]\n{placement}\n").unwrap();
    let bundle = folder.join("out.moec");
    built(&toml, &["--target", target], &bundle);
    bundle
}

/// Logits of the golden prompt.
fn logits(bundle: &Path, ids: &[u32], threads: usize, launched: Option<(&str, &[&str], usize)>) -> Vec<f32> {
    let out = bundle.with_extension("safetensors");
    let mut command = run(bundle, launched);
    ok(command.args(["logits", "--ids", &list(ids), "--threads", &threads.to_string(), "--out"]).arg(&out));
    logits_file(&out).1
}

/// A plain run has each third model, in turn with two or three hosts and one or two threads.
#[test]
fn golden_models_are_equal_on_one_two_and_three_hosts() {
    let all = moec_testing::all();
    let launchers: Vec<_> = LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()).collect();
    let launchers = if all { &launchers[..] } else { &launchers[..launchers.len().min(1)] };
    for (turn, family) in every_nth(3, NINE.into_iter().chain(LATE)).enumerate() {
        let want = expected(&checkpoint(family));
        for hosts in [2, 3].into_iter().filter(|hosts| all || hosts % 2 == turn % 2) {
            let folder = tempfile::tempdir().unwrap();
            let one = build(family, folder.path(), "native", &format!("slices = {hosts}"));
            let target = format!("native-x{hosts}");
            let several = build(family, folder.path(), &target, "hosts = \"slices\"");
            let right = logits(&one, &want.ids, 1, None);
            let worst = distance(&right, &want.logits);
            assert!(worst <= want.tolerance(), "{family}, {hosts} slices: a logit is off by {worst}");
            for threads in [1, 2].into_iter().filter(|threads| all || threads % 2 == turn / 2 % 2) {
                let bits = |logits: &[f32]| logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let same = |launched, what: &str| {
                    let found = logits(&several, &want.ids, threads, launched);
                    assert!(
                        bits(&found) == bits(&right),
                        "{family}, {hosts} hosts, {threads} threads, {what}"
                    );
                };
                same(None, "one process");
                for (_, launcher, options) in launchers {
                    same(Some((*launcher, *options, hosts)), launcher);
                }
            }
        }
    }
}
