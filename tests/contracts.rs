//! Interfaces that external scripts rely on: commands, options, keys of JSON and of `model.toml`, files,
//! paths and names of targets.
//!
//! Every contract is a row of a table, and a failure names the rows that no longer hold. Restore the old
//! spelling, in addition to a new one. The commands of `cargo xtask` have such a table in
//! `xtask/src/main.rs`.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use clap::Parser as _;
use moec::Cli;
use moec_config::Config;
use moec_device::Device;
use moec_testing::PREBUILT;
use moec_testing::http;
use moec_testing::server::Server;
use serde_json::Value;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{clean, ferris, finish, logits_file, moec, ok, root};

/// Command lines of `moec`.
const COMMANDS: &[&str] = &[
    "init HF_DIR",
    "init HF_DIR -o model.toml",
    "calibrate model.toml",
    "calibrate model.toml --text a.txt --text b.txt --window 64 -o x.trace",
    "build model.toml",
    "build model.toml --target m2-ultra -o DIR --no-run --quiet --json",
    "build model.toml --target ./device.toml -q",
    "inspect PATH --json",
    "explain BUNDLE --layer 0 --expert 1",
    "verify BUNDLE --source HF_DIR -q",
    "verify BUNDLE --quiet",
    "run BUNDLE generate --ids 1,2,3 -n 4 --json",
    "run --emulate BUNDLE logits --ids 1,2,3 --out FILE",
    "run BUNDLE bench --json",
    "run BUNDLE serve --port 0",
    "eval BUNDLE --text F --json",
    "eval BUNDLE --qa F.jsonl",
    "simulate BUNDLE --trace T",
    "simulate BUNDLE --hosts 8,16 --json",
    "profile-device",
    "profile-device DIR --quiet --json",
    "profile-device --hosts --name pair DIR",
    "ndp-sim --dram-trace F --timing trimoe --queue 32 --no-refresh --json",
    "ndp-sim --dram-trace F --timing ddr5-4800an",
    "synth DIR --like olmoe --layers 4 --quiet",
    "targets",
    "targets m2-ultra",
    "doctor",
    "completions bash",
];

/// Command lines of `BUNDLE/run`.
const RUN: &[&str] = &[
    "generate --prompt TEXT -n 4 --ignore-eos --json",
    "generate --ids 1,2,3 --temperature 0.7 --top-p 0.9 --seed 1",
    "generate --ids 1 --threads 1 --budget 4.5GiB",
    "generate --ids 1 --no-budget",
    "generate --ids 1 --weights ram",
    "generate --ids 1 --weights mmap",
    "generate --ids 1 --weights auto",
    "logits --ids 1,2,3 --out FILE.safetensors",
    "bench --prompt 512 --gen 64 --threads 1 --json",
    "info",
    "info --json",
    "serve --port 0 --threads 1 --template FILE",
];

/// Sections of `model.toml`, and keys with values.
const KEYS: &[(&str, &str)] = &[
    ("model", "source = \"hf\""),
    ("shapes", "max_context = 4096"),
    ("shapes", "prefill_chunk = 256"),
    ("shapes", "decode_batch = [1, 2, 4]"),
    ("weights", "experts = \"f32\""),
    ("weights", "experts = \"bf16\""),
    ("weights", "experts = \"f16\""),
    ("weights", "experts = \"q8\""),
    ("weights", "experts = \"q4\""),
    ("weights", "attention = \"q8\""),
    ("weights", "embeddings = \"bf16\""),
    ("weights", "activations = \"auto\""),
    ("weights", "activations = \"f32\""),
    ("weights", "activations = \"bf16\""),
    ("calibrate", "text = [\"corpus.txt\"]"),
    ("calibrate", "profile = \"x.trace\""),
    ("calibrate", "tokens = 65536"),
    ("experts", "tiers = 3"),
    ("experts", "group = \"auto\""),
    ("experts", "overflow = \"prune\""),
    ("experts", "overflow = \"spill\""),
    ("memory", "budget = \"8GiB\""),
    ("memory", "policy = \"lru\""),
    ("memory", "threads = 2"),
    ("placement", "attention = \"npu\""),
    ("placement", "experts = \"gpu:25%\""),
    ("placement", "hot = \"npu\""),
    ("placement", "policy = \"moec\""),
    ("quality", "max_perplexity_increase = \"1%\""),
    ("quality", "text = [\"held-out.txt\"]"),
];

/// Names that `--target` takes.
const TARGETS: &[&str] = &[
    "native",
    "x86-64-v3",
    "x86-64-v4",
    "sapphire-rapids",
    "apple-m2",
    "cortex-x4",
    "neoverse-v2",
    "m2-max",
    "m2-ultra",
    "snapdragon-8-gen-3",
    "snapdragon-8-plus-gen-1",
    "a6000-xeon",
    "rtx4080-i5",
    "h100-spr-ndp",
];

/// Files of the tree.
const PATHS: &[&str] = &[
    "golden/models/ferris/config.json",
    "golden/models/ferris/tokenizer.json",
    "golden/models/ferris/model.safetensors",
    "golden/plain.jinja",
    "golden/hf/deepseek_v2/config.json",
    "golden/hf/deepseek_v3/config.json",
    "golden/hf/glm4_moe/config.json",
    "golden/hf/gpt_oss/config.json",
    "golden/hf/mixtral/config.json",
    "golden/hf/olmoe/config.json",
    "golden/hf/phimoe/config.json",
    "golden/hf/qwen2_moe/config.json",
    "golden/hf/qwen3_moe/config.json",
    "golden/hf/smallthinker_4b/config.json",
    "golden/hf/smallthinker_21b/config.json",
];

/// Files and folders of a bundle, except `run`.
const FILES: &[&str] = &["manifest.json", "plan.bin", "plan.txt", "weights", "artifacts", "runner"];

/// Commands that print one JSON object, and keys of it. A key that begins with `…` is the end of a longer
/// one.
///
/// `RUN` is the program of the bundle `BUNDLE`; `TEXT` and `TRACE` are files.
const OBJECTS: &[(&str, &[&str])] = &[
    (
        "RUN generate --ids 1,2,3 -n 4 --ignore-eos --threads 1 --json",
        &["ids", "text", "prefill_tokens_per_s", "decode_tokens_per_s"],
    ),
    ("RUN generate --prompt moec -n 2 --json", &["ids", "text"]),
    (
        "RUN bench --prompt 8 --gen 4 --threads 1 --json",
        &["prefill_tokens_per_s", "decode_tokens_per_s", "bytes_per_decoded_token"],
    ),
    ("RUN info --json", &["model", "target"]),
    ("moec run --emulate BUNDLE generate --ids 1,2,3 -n 4 --json", &["ids", "text"]),
    ("moec inspect BUNDLE --json", &[]),
    ("moec eval BUNDLE --text TEXT --json", &["perplexity"]),
    ("moec profile-device --no-matmul --threads 1 --quiet --json", &["…gb_per_s"]),
    (
        "moec ndp-sim --dram-trace TRACE --timing trimoe --queue 32 --no-refresh --json",
        &["steady_cycles_per_line"],
    ),
];

/// Fails with a list of all broken contracts, and the reasons.
fn all_hold<'a>(kind: &str, rows: impl IntoIterator<Item = (&'a str, Result<(), String>)>) {
    let broken: Vec<String> = rows
        .into_iter()
        .filter_map(|(what, held)| held.err().map(|why| format!("`{what}`: {why}")))
        .collect();
    assert!(broken.is_empty(), "contracts of {kind} that no longer hold:\n{}", broken.join("\n"));
}

#[test]
fn documented_moec_command_lines_parse() {
    all_hold(
        "the command line of moec",
        COMMANDS.iter().map(|line| {
            let words = std::iter::once("moec").chain(line.split(' '));
            (*line, Cli::try_parse_from(words).map(|_| ()).map_err(|e| e.to_string()))
        }),
    );
}

#[test]
fn documented_run_command_lines_parse() {
    let command = moec_service::front(&[]).command();
    all_hold(
        "the command line of BUNDLE/run",
        RUN.iter().map(|line| {
            let parsed = command.clone().try_get_matches_from(line.split(' '));
            (*line, parsed.map(|_| ()).map_err(|e| e.to_string()))
        }),
    );
}

#[test]
fn documented_keys_of_model_toml_parse() {
    all_hold(
        "model.toml",
        KEYS.iter().map(|(section, key)| {
            let model = if *section == "model" { "" } else { "[model]\nsource = \"hf\"\n" };
            let parsed = Config::parse(&format!("{model}[{section}]\n{key}\n"), Path::new("model.toml"));
            (*key, parsed.map(|_| ()).map_err(|e| format!("[{section}]: {e}")))
        }),
    );
    let text = "[model]\nsource = \"hf\"\n[shapes]\nmax_contxt = 8\n";
    let error = Config::parse(text, Path::new("model.toml")).unwrap_err();
    let hint = error.hint.unwrap_or_default();
    assert!(hint.contains("`max_context`"), "an unknown key suggests the nearest one: {hint}");
}

#[test]
fn targets_have_their_names() {
    let find = |name| Device::find(name).map_err(|e| e.to_string());
    all_hold("targets", TARGETS.iter().map(|name| (*name, find(name).map(|_| ()))));
    let printed = String::from_utf8(ok(moec().args(["targets", "m2-ultra"])).stdout).unwrap();
    let line = |start: &str| printed.lines().any(|line| line.trim_start().starts_with(start));
    all_hold(
        "`moec targets m2-ultra`",
        ["name = \"m2-ultra\"", "max_graph_bytes = { value = "]
            .map(|start| (start, line(start).then_some(()).ok_or_else(|| "no such line".to_owned()))),
    );
}

#[test]
fn files_used_by_scripts_exist() {
    all_hold("paths", PATHS.iter().map(|path| (*path, exists(&root().join(path)))));
}

#[test]
fn failures_have_exit_codes_and_hints() {
    let cases = [("exit code 1: failed", "build gone.toml", 1), ("exit code 2: bad use", "build --gone", 2)];
    all_hold(
        "exit codes",
        cases.map(|(what, line, code)| {
            let out = finish(moec().args(line.split(' ')));
            let stderr = String::from_utf8_lossy(&out.stderr);
            let held = out.status.code() == Some(code) && out.stdout.is_empty() && stderr.contains("hint:");
            (what, held.then_some(()).ok_or_else(|| format!("`moec {line}`: {}: {stderr}", out.status)))
        }),
    );
}

#[test]
fn moec_cache_sets_the_cache_folder() {
    let folder = tempfile::tempdir().unwrap();
    let out = finish(moec().args(["doctor", "--json"]).env("MOEC_CACHE", folder.path()));
    let stdout = String::from_utf8(out.stdout).unwrap();
    assert!(
        stdout.contains(folder.path().to_str().unwrap()),
        "`MOEC_CACHE` names the cache folder: {stdout}"
    );
}

/// `doctor` and `targets` agree on what this machine runs.
#[test]
fn doctor_lists_the_targets_that_run_here() {
    let read = |command: &str| -> Value {
        serde_json::from_slice(&finish(moec().args([command, "--json"])).stdout).unwrap()
    };
    let doctor = read("doctor");
    let found = doctor["checks"].as_array().unwrap().iter().find(|c| c["name"] == "cpu").unwrap();
    let listed = found["found"].as_str().unwrap().split_once(", runs ").unwrap().1.split(", ");
    let targets = read("targets");
    let here = targets.as_array().unwrap().iter().filter(|t| t["runs_here"] == true);
    let here: Vec<&str> = here.map(|t| t["name"].as_str().unwrap()).collect();
    assert_eq!(listed.collect::<Vec<_>>(), here);
}

/// Builds one small bundle, and checks everything that scripts read from it or that commands print about it.
#[test]
fn written_and_printed_json_has_its_keys() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    fs::write(path("text"), "The borrow checker reads what was lent. ".repeat(8)).unwrap();
    let lines = (0..2048).map(|i| format!("R 0 0 {} 0 {} {}\n", i % 8, i / 1024, i / 8 % 128));
    fs::write(path("trace"), lines.collect::<String>()).unwrap();
    let source = ferris();
    let toml = format!(
        "[model]\nsource = {source:?}\n[shapes]\nmax_context = 128\nprefill_chunk = 64\ndecode_batch = [1]\n"
    );
    fs::write(path("model.toml"), toml).unwrap();
    let bundle = path("out.moec");
    let linked = PREBUILT.holds_or_skip(moec_bundle::link::is_prebuilt());

    let mut build = moec();
    build.arg("build").arg(path("model.toml")).args(["--target", "native", "--quiet", "--json", "-o"]);
    build.arg(&bundle).args((!linked).then_some("--no-run"));
    all_hold("`moec build --json`", [("bundle", object(&mut build).and_then(|value| has(&value, "bundle")))]);
    let files = FILES.iter().copied().chain(linked.then_some("run"));
    all_hold("files of a bundle", files.map(|name| (name, exists(&bundle.join(name)))));

    let run = || {
        let mut command = if linked { clean(Command::new(bundle.join("run"))) } else { moec() };
        if !linked {
            command.arg("run").arg(&bundle);
        }
        command
    };
    let command = |line: &str| {
        let mut words = line.split(' ');
        let mut command = if words.next() == Some("RUN") { run() } else { moec() };
        command.args(words.map(|word| match word {
            "BUNDLE" => bundle.clone(),
            "TEXT" => path("text"),
            "TRACE" => path("trace"),
            word => PathBuf::from(word),
        }));
        command
    };
    all_hold(
        "keys of JSON",
        OBJECTS.iter().map(|(line, keys)| {
            let held =
                object(&mut command(line)).and_then(|value| keys.iter().try_for_each(|key| has(&value, key)));
            (*line, held)
        }),
    );

    // By default generation is greedy and deterministic, and `ids` has only the generated tokens.
    let ids = || object(&mut command(OBJECTS[0].0)).unwrap()["ids"].clone();
    let (first, again) = (ids(), ids());
    assert!(first == again && first.as_array().unwrap().len() == 4, "`generate --json`: {first} {again}");

    let logits = path("logits.safetensors");
    ok(run().args(["logits", "--ids", "1,2,3", "--out"]).arg(&logits));
    let (shape, values) = logits_file(&logits);
    assert!(
        shape.len() == 2 && shape[0] == 3 && values.len() == 3 * shape[1],
        "`logits` writes f32 [T, vocab]: {shape:?}"
    );

    let mut serve = run();
    serve.args(["serve", "--port", "0", "--threads", "1", "--template"]);
    let server = Server::start(serve.arg(root().join("golden/plain.jinja"))).unwrap();
    let address = server.address();
    assert!(address.parse::<SocketAddr>().is_ok(), "`serve` prints its URL alone first: http://{address}");
    let metrics = http::get(address, "/metrics").call().unwrap().body;
    let names = metrics.lines().filter(|line| !line.starts_with('#'));
    assert!(
        names.filter_map(|line| line.split(['{', ' ']).next()).any(|name| name.contains("slots")),
        "`/metrics` has a name with `slots`:\n{metrics}"
    );
}

fn exists(path: &Path) -> Result<(), String> {
    if path.exists() { Ok(()) } else { Err("not there".to_owned()) }
}

/// The JSON object that a command prints.
fn object(command: &mut Command) -> Result<Value, String> {
    let out = finish(command);
    if !out.status.success() {
        return Err(format!("{}: {}", out.status, String::from_utf8_lossy(&out.stderr)));
    }
    let value: Value =
        serde_json::from_slice(&out.stdout).map_err(|e| format!("stdout is not one JSON value: {e}"))?;
    if value.is_object() { Ok(value) } else { Err(format!("not an object: {value}")) }
}

/// Whether an object has this key with a value; `…gb_per_s` stands for any key with this ending.
fn has(object: &Value, key: &str) -> Result<(), String> {
    let found = object.as_object().into_iter().flatten().any(|(name, value)| {
        !value.is_null()
            && match key.strip_prefix('…') {
                Some(end) => name.ends_with(end),
                None => name == key,
            }
    });
    if found { Ok(()) } else { Err(format!("no key `{key}` in {object}")) }
}
