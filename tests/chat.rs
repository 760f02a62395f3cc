//! A chat template on its way from a checkpoint to a bundle, and a conversation with the demo model.
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use crate::support;

use serde_json::Value;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::process::Stdio;
use support::{ferris, moec, ok, root};

/// Answers of the demo model to these lines, one JSON object each.
fn answers(bundle: &std::path::Path, args: &[&str], lines: &str) -> Vec<Value> {
    let mut command = moec();
    command.arg("run").arg(bundle).args(["chat", "--json", "-n", "12"]).args(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let done = child.wait_with_output().unwrap();
    assert!(done.status.success());
    String::from_utf8(done.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn bundle_contains_the_chat_template() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("hf")).unwrap();
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors",
    ] {
        fs::copy(ferris().join(name), at("hf").join(name)).unwrap();
    }
    fs::copy(root().join("golden/plain.jinja"), at("hf/chat_template.jinja")).unwrap();
    fs::write(at("model.toml"), "[model]\nsource = \"hf\"\n[shapes]\nmax_context = 512\n").unwrap();
    let bundle = at("out.moec");
    ok(moec().arg("build").arg(at("model.toml")).arg("-o").arg(&bundle).arg("--no-run"));
    let kept: Value =
        serde_json::from_slice(&fs::read(bundle.join("artifacts/chat_template.json")).unwrap()).unwrap();
    assert_eq!(kept["tokens"]["eos_token"], "<|endoftext|>");
    let manifest = fs::read_to_string(bundle.join("manifest.json")).unwrap();
    assert!(
        manifest.contains("artifacts/chat_template.json") && manifest.contains("artifacts/sampling.json")
    );
    let advised: Value =
        serde_json::from_slice(&fs::read(bundle.join("artifacts/sampling.json")).unwrap()).unwrap();
    assert_eq!(advised, serde_json::json!({"do_sample": false}));

    let turns = answers(&bundle, &[], "The borrow checker\nWhat is a trait?\n");
    assert_eq!(turns.len(), 2);
    // The second prompt begins with the first, whose tokens are not computed again.
    assert!(turns[1]["kept_tokens"].as_u64().unwrap() >= turns[0]["prompt_tokens"].as_u64().unwrap());
    let held = answers(&bundle, &["--regex", "(yes|no)"], "Is it sound?\n");
    assert!(["yes", "no"].contains(&held[0]["text"].as_str().unwrap()), "{held:?}");
    // Another template gives another prompt.
    symlink(root().join("golden/templates/Qwen-Qwen3-30B-A3B.jinja"), at("qwen.jinja")).unwrap();
    let other = answers(&bundle, &["--template", at("qwen.jinja").to_str().unwrap()], "Is it sound?\n");
    assert_ne!(other[0]["prompt_tokens"], held[0]["prompt_tokens"]);
}
