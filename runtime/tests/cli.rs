//! The subcommands from a user's view: arguments in; output, notes and exit status out.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code, GraphDecl, GraphTensor, Grid, Step, Subgraph, UnitRef};
use moec_runtime::bundle::BundleReader;
use moec_runtime::cli::{Emulation, Front, Io, Native};
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::{Graphs, f16};
use moec_runtime::exec::operations::{GraphOperation, GraphOperations, OperationReport, OperationUnit};
use moec_runtime::{Error, Program};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::path::Path;

struct ProcessOutput {
    status: u8,
    out: String,
    err: String,
}

fn run_in(bundle: &Path, args: &str, input: Option<&str>) -> ProcessOutput {
    run_program(&program(&ENTRIES), bundle, args, input)
}

fn run_program(program: &Program, bundle: &Path, args: &str, input: Option<&str>) -> ProcessOutput {
    run_front(Front::default(), program, bundle, args, input)
}

fn run_front(
    front: Front<'_>,
    program: &Program,
    bundle: &Path,
    args: &str,
    input: Option<&str>,
) -> ProcessOutput {
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let mut input = input.map(str::as_bytes);
    let input = input.as_mut().map(|i| i as &mut dyn Read);
    let args = args.split_whitespace().map(|a| OsString::from(a.replace('_', " ")));
    let io = Io { input, out: &mut out, err: &mut err };
    let status = front.run_with(program, bundle, args, io);
    let text = |b| String::from_utf8(b).unwrap();
    ProcessOutput { status, out: text(out), err: text(err) }
}

/// Runs a subcommand in a bundle with a tokenizer.
fn run(args: &str) -> ProcessOutput {
    let dir = bundle();
    add_tokenizer(dir.path());
    run_in(dir.path(), args, None)
}

fn joined(ids: &[u32]) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

fn bytes(text: &str) -> Vec<u32> {
    [BOS].into_iter().chain(text.bytes().map(u32::from)).collect()
}

#[test]
fn generate_json_from_ids() {
    let ids = [72, 101, 108];
    for threads in [1, 2, 3] {
        let done = run(&format!("generate --ids {} -n 24 --json --threads {threads}", joined(&ids)));
        assert_eq!((done.status, done.err.as_str()), (0, ""));
        let json: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(json["ids"], serde_json::json!(continuation(&ids, 24)));
        assert!(json["text"].is_string());
        assert!(json["prefill_tokens_per_s"].as_f64().unwrap() > 0.0);
        assert!(json["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
        assert_eq!(json.as_object().unwrap().len(), 4);
    }
}

#[test]
fn saved_prompt_is_not_prefilled_again() {
    let dir = bundle();
    let path = dir.path().join("prompt").display().to_string();
    let ids: Vec<u32> = (0..20).collect();
    let run = |args: &str| run_in(dir.path(), args, None);
    let done = run(&format!("generate --ids {} -n 5 --json --save-prompt {path}", joined(&ids)));
    assert_eq!((done.status, done.err.as_str()), (0, ""));
    let longer = [&ids[..], &[50, 51]].concat();
    for (prompt, held) in [(&longer, 20), (&ids, 19)] {
        let done = run(&format!("generate --ids {} -n 9 --json --load-prompt {path}", joined(prompt)));
        let json: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(json["ids"], serde_json::json!(continuation(prompt, 9)));
        assert_eq!(
            (json["loaded_tokens"].as_u64(), json["prefilled_tokens"].as_u64()),
            (Some(held), Some(prompt.len() as u64 - held))
        );
    }
    // Without a prompt, the saved prompt is continued.
    let done = run(&format!("generate -n 9 --ignore-eos --load-prompt {path}"));
    assert_eq!(done.out, format!("{}\n", joined(&continuation(&ids, 9))));
    assert!(done.err.starts_with("prefill: 1 tokens after 19 that were saved"), "{}", done.err);
    let done = run(&format!("generate --ids 90,91 -n 3 --load-prompt {path}"));
    assert!(done.err.starts_with("note: the saved prompt begins otherwise"), "{}", done.err);
    assert_eq!(done.out, format!("{}\n", joined(&continuation(&[90, 91], 3))));
    std::fs::write(&path, "no").unwrap();
    let done = run(&format!("generate -n 3 --load-prompt {path}"));
    assert_eq!(done.status, 1);
    assert!(
        done.err.contains("is not a saved prompt") && done.err.contains("hint: give a file"),
        "{}",
        done.err
    );
    assert_eq!(run(&format!("generate --ids 1 --best-of 2 --load-prompt {path}")).status, 2);
}

#[test]
fn draft_tokens_are_counted_or_rejected_if_inexact() {
    let dir = bundle();
    let run = |args: &str| run_in(dir.path(), args, None);
    let ids = [7, 8, 9, 7, 8, 9, 7, 8];
    let done = run(&format!("generate --ids {} -n 12 --json --speculate 4", joined(&ids)));
    let json: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(json["ids"], serde_json::json!(continuation(&ids, 12)));
    assert!(json["speculation"]["draft_tokens"].as_u64().is_some());
    let done = run("generate --ids 7,8 -n 12 --speculate 4");
    assert!(done.err.contains("draft tokens: "), "{}", done.err);
    let done = run("generate --ids 7,8 -n 12 --speculate 4 --temperature 1");
    assert_eq!(done.status, 2);
    assert!(done.err.contains("requires the most probable tokens"), "{}", done.err);
    let narrow = [ENTRIES[0], ENTRIES[2]];
    let alone = run_program(&program(&narrow), dir.path(), "generate --ids 7,8 --speculate 4", None);
    assert!(alone.status == 2 && alone.err.contains("decode_batch = [1, 5]"), "{}", alone.err);
    let little = run_program(&program(&BIG_LITTLE), dir.path(), "generate --ids 7,8 --speculate 4", None);
    assert!(little.status == 2 && little.err.contains("--no-big-little"), "{}", little.err);
}

#[test]
fn generate_without_tokenizer() {
    let dir = bundle();
    let done = run_in(dir.path(), "generate --ids 7,8 -n 5 --json", None);
    let json: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((&json["text"], json["ids"].as_array().unwrap().len()), (&Value::Null, 5));
    let done = run_in(dir.path(), "generate --ids 7,8 -n 5", None);
    assert_eq!(done.out, format!("{}\n", joined(&continuation(&[7, 8], 5))));
    assert!(done.err.starts_with("prefill: 2 tokens"), "{}", done.err);
    let done = run_in(dir.path(), "generate --ids 7,8 -n 5 --quiet", None);
    assert_eq!(done.err, "");
    let done = run_in(dir.path(), "generate --prompt hi", None);
    assert_eq!(done.status, 1);
    assert!(done.err.contains("has no tokenizer") && done.err.contains("hint: give token ids with `--ids`"));
}

#[test]
fn generate_from_text() {
    let dir = bundle();
    add_tokenizer(dir.path());
    let expected = continuation(&bytes("hi there"), 9);
    let by_flag = run_in(dir.path(), "generate --prompt hi_there -n 9 --ignore-eos --json", None);
    let by_dash = run_in(dir.path(), "generate --prompt - -n 9 --ignore-eos --json", Some("hi there\n"));
    let by_pipe = run_in(dir.path(), "generate -n 9 --ignore-eos --json", Some("hi there"));
    for done in [by_flag, by_dash, by_pipe] {
        assert_eq!((done.status, done.err.as_str()), (0, ""));
        let json: Value = serde_json::from_str(&done.out).unwrap();
        assert_eq!(json["ids"], serde_json::json!(expected));
    }
    // Printed token by token, and all at once.
    let json = run_in(dir.path(), "generate --prompt hi_there -n 9 --ignore-eos --json", None);
    let json: Value = serde_json::from_str(&json.out).unwrap();
    let text = run_in(dir.path(), "generate --prompt hi_there -n 9 --ignore-eos", None);
    assert_eq!(text.out, format!("{}\n", json["text"].as_str().unwrap()));
}

#[test]
fn stop_string_ends_generation() {
    let dir = bundle();
    add_tokenizer(dir.path());
    // An answer with two letters that come from two tokens.
    let letter = |id: &u32| char::from_u32(*id).is_some_and(|c| c.is_ascii_alphanumeric());
    let found = ('a'..='z').flat_map(|a| ('a'..='z').map(move |b| format!("{a}{b}"))).find_map(|prompt| {
        let ids = continuation(&bytes(&prompt), 9);
        let at = (1..8).find(|&at| ids[at - 1..=at].iter().all(letter))?;
        Some((
            prompt,
            ids[at - 1..=at].iter().filter_map(|&id| char::from_u32(id)).collect::<String>(),
            at + 1,
        ))
    });
    let (prompt, stop, tokens) = found.unwrap();
    let run = |more: &str| {
        run_in(dir.path(), &format!("generate --prompt {prompt} -n 9 --ignore-eos {more}"), None)
    };
    let whole: Value = serde_json::from_str(&run("--json").out).unwrap();
    let whole = whole["text"].as_str().unwrap();
    let before = &whole[..whole.find(&stop).unwrap()];
    for more in ["", "--stop never", "--speculate 2"] {
        assert_eq!(run(&format!("--quiet --stop {stop} {more}")).out, format!("{before}\n"), "{more}");
    }
    let json: Value = serde_json::from_str(&run(&format!("--json --stop {stop}")).out).unwrap();
    assert_eq!((&json["text"], json["ids"].as_array().unwrap().len()), (&before.into(), tokens));
    let several = run(&format!("--quiet --stop {stop} --best-of 2 --temperature 0.01"));
    assert_eq!(several.out, format!("{before}\n"));
    assert_eq!(run("--quiet --stop never").out, format!("{whole}\n"));
    let done = run_in(bundle().path(), "generate --ids 7,8 -n 5 --stop x", None);
    assert!(done.status == 1 && done.err.contains("has no tokenizer"), "{}", done.err);
}

#[test]
fn an_end_token_ends_text_but_not_ids() {
    // A prompt after which greedy decoding soon reaches the end token.
    let found = (1..256u32).flat_map(|a| (1..256).map(move |b| vec![a, b])).find_map(|prompt| {
        let at = continuation(&prompt, 12).iter().position(|&id| id == EOS)?;
        (at < 11).then_some((prompt, at))
    });
    let (prompt, at) = found.unwrap();
    let count = |flags: &str| {
        let done = run(&format!("generate --ids {} -n 12 --json {flags}", joined(&prompt)));
        assert_eq!(done.status, 0, "{}", done.err);
        serde_json::from_str::<Value>(&done.out).unwrap()["ids"].as_array().unwrap().len()
    };
    assert_eq!(count(""), 12);
    assert_eq!(count("--ignore-eos"), 12);
    assert_eq!(count("--stop-at-eos"), at + 1);
}

#[test]
fn equal_seeds_generate_equal_texts() {
    let sample = |seed: u32| {
        run(&format!(
            "generate --ids 1,2,3 -n 20 --temperature 2 --top-p 0.9 --top-k 50 --seed {seed} --quiet"
        ))
        .out
    };
    assert_eq!(sample(1), sample(1));
    assert_ne!(sample(1), sample(2));
}

#[test]
fn refusals() {
    let cases: &[(&str, u8, &[&str])] = &[
        ("", 2, &["Usage: run"]),
        ("fly", 2, &["error: unrecognized subcommand 'fly'", "hint:"]),
        ("generate --wings", 2, &["error: unexpected argument '--wings'", "hint:"]),
        (
            "generate",
            2,
            &["error: there is nothing to continue", "hint: give text with `run generate --prompt TEXT`"],
        ),
        ("generate --prompt -", 2, &["error: standard input is a terminal"]),
        ("generate --ids 1,x", 2, &["error: invalid value 'x'"]),
        ("generate --ids 1 --prompt a", 2, &["error: ", "cannot be used with"]),
        ("generate --ids 1 --temperature -1", 2, &["--temperature"]),
        ("generate --ids 1 --temperature nan", 2, &["must be a number from 0 to 2"]),
        ("generate --ids 1 --temperature 9", 2, &["must be a number from 0 to 2"]),
        ("generate --ids 1 --top-p 0", 2, &["must be a number above 0, up to 1"]),
        ("generate --ids 1 --top-p 1.1", 2, &["must be a number above 0, up to 1"]),
        ("generate --ids 1 --presence-penalty 3", 2, &["must be a number from -2 to 2"]),
        ("generate --ids 1 -n 0", 2, &["must be a number from 1 up"]),
        ("generate --ids 1 -n 99999999999999999999", 2, &["must be 4294967295 at most"]),
        ("generate --ids 1 --threads 0", 2, &["must be a number from 1 to 1024"]),
        (
            "generate --ids 1,260",
            2,
            &["error: token id 260 is outside of the vocabulary of 260 tokens", "hint: ids are 0 to 259"],
        ),
        ("generate --ids 1,2 -n 63", 2, &["63 more are requested", "hint: "]),
        ("generate --ids 1 --gamma 1.5", 2, &["must be a number from 0 to 1"]),
        ("generate --ids 1 --gamma nan", 2, &["must be a number from 0 to 1"]),
        ("generate --ids 1 --gamma 0.5 --no-big-little", 2, &["cannot be used with"]),
        (
            "generate --ids 1 --gamma 0.5",
            2,
            &[
                "error: the bundle was built without big-little decoding",
                "hint: set `big_little = true` under `[decode]` in `model.toml`",
            ],
        ),
        ("generate --ids 1 --best-of 0", 2, &["must be a number from 1 to 64"]),
        (
            "generate --ids 1 --best-of 4 --temperature 1",
            2,
            &[
                "error: 4 sequences were requested, but the KV cache holds 3",
                "hint: name 4 in `decode_batch` under `[shapes]`",
                "decode_batch = [1, 2, 4]",
            ],
        ),
        (
            "generate --ids 1 --best-of 2",
            2,
            &["error: with temperature 0, all sequences are the same", "hint: set a temperature above 0"],
        ),
        ("generate --ids 1 --all", 2, &["--best-of"]),
        ("generate --ids 1 --best-of 2 --temperature 1 --all --json", 2, &["cannot be used with"]),
        ("bench --best-of 4", 2, &["error: 4 sequences were requested, but the KV cache holds 3"]),
        ("bench --best-of 2 --batch 2", 2, &["cannot be used with"]),
        (
            "generate --ids 1 --budget -3",
            2,
            &["must be a size such as `4.5GiB`: a number of KiB, MiB or GiB, or of"],
        ),
        ("generate --ids 1 --budget 0", 2, &["must be a size"]),
        ("generate --ids 1 --budget 3GB", 2, &["must be a size"]),
        ("generate --ids 1 --budget inf", 2, &["must be a size"]),
        ("generate --ids 1 --budget 3GiB --no-budget", 2, &["cannot be used with"]),
        ("generate --ids 1 --prefetch 1 --no-budget", 2, &["cannot be used with"]),
        (
            "generate --ids 1 --budget 3GiB",
            2,
            &["error: `--budget` applies to experts on disk", "hint: set `budget` under `[memory]`"],
        ),
        ("bench --no-verify-reads", 2, &["error: `--no-verify-reads` applies to experts on disk"]),
        ("logits --ids 1 --out x --prefetch 0", 2, &["error: `--prefetch` applies to experts on disk"]),
        // The error comes before any work, so nothing is printed.
        ("generate --ids 1 --timeline /no/such/folder/x", 1, &["error: cannot create `/no/such/folder/x`"]),
        ("logits --ids 1", 2, &["--out"]),
        ("logits --ids 1 --out /no/such/folder/x", 1, &["error: cannot create `/no/such/folder/x`"]),
        ("bench --prompt 60 --gen 10", 2, &["10 more are requested"]),
    ];
    for (args, status, words) in cases {
        let done = run(args);
        assert_eq!(done.status, *status, "{args}: {}", done.err);
        assert_eq!(done.out, "", "{args}");
        for word in *words {
            assert!(done.err.contains(word), "{args}: `{word}` is not in\n{}", done.err);
        }
    }
    let long = joined(&[1; 65]);
    let done = run(&format!("generate --ids {long}"));
    assert!(
        done.err.starts_with("error: the prompt has 65 tokens, but the context holds 64\nhint: "),
        "{}",
        done.err
    );
    let dir = bundle();
    add_tokenizer(dir.path());
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let input: &mut dyn Read = &mut &b"\xff\xfe"[..];
    let io = Io { input: Some(input), out: &mut out, err: &mut err };
    let args = ["generate"].map(OsString::from).into_iter();
    let status = Front::default().run_with(&program(&ENTRIES), dir.path(), args, io);
    assert_eq!((status, String::from_utf8(err).unwrap().as_str()), (1, "error: the prompt is not UTF-8\n"));
}

#[test]
fn big_little_reports_its_fallback_rate() {
    let dir = bundle();
    let program = program(&BIG_LITTLE);
    let run = |args: &str| {
        let done = run_program(&program, dir.path(), args, None);
        assert_eq!(done.status, 0, "{}", done.err);
        done
    };
    let json = |flags: &str| -> Value {
        serde_json::from_str(&run(&format!("generate --ids 7,77,3 -n 30 --json {flags}")).out).unwrap()
    };
    let full = json("--no-big-little");
    assert_eq!(full.as_object().unwrap().len(), 4);
    assert_eq!(full["ids"], serde_json::json!(continuation(&[7, 77, 3], 30)));
    let (none, all) = (json("--gamma 0"), json("--gamma 1"));
    assert_eq!((&none["fallback_ratio"], &all["fallback_ratio"]), (&0.0.into(), &1.0.into()));
    assert_eq!(all["ids"], full["ids"]);
    assert_ne!(none["ids"], full["ids"]);
    // Without the option the plan's value is used.
    let own = json("");
    let ratio = own["fallback_ratio"].as_f64().unwrap();
    assert!(ratio > 0.0 && ratio < 1.0);
    assert_eq!(own["ids"], json(&format!("--gamma {GAMMA}"))["ids"]);
    let notes = run("generate --ids 7,77,3 -n 30").err;
    assert!(notes.contains(&format!(", {:.1} % of them with all experts", 100.0 * ratio)), "{notes}");
    assert!(!run("generate --ids 7,77,3 -n 30 --no-big-little").err.contains("experts"));
    let info: Value = serde_json::from_str(&run("info --json").out).unwrap();
    assert_eq!(info["model"]["big_little"], serde_json::json!({"experts": 1, "gamma": 0.625}));
    assert!(run("info").out.contains("1 experts per token first, all below a probability of 0.625"));
}

#[test]
fn the_best_of_several_sequences() {
    let dir = bundle();
    let run = |args: &str| {
        let done = run_in(dir.path(), args, None);
        assert_eq!(done.status, 0, "{}", done.err);
        done
    };
    let sampled_args = "--ids 1,2,3 -n 12 --temperature 2 --top-k 60";
    let single = |seed: u64| run(&format!("generate {sampled_args} --seed {seed} --quiet")).out;
    let json: Value =
        serde_json::from_str(&run(&format!("generate {sampled_args} --seed 7 --best-of 3 --json")).out)
            .unwrap();
    let sequences = json["sequences"].as_array().unwrap();
    let scores: Vec<f64> = sequences.iter().map(|s| s["mean_log_probability"].as_f64().unwrap()).collect();
    assert!(scores.len() == 3 && scores.is_sorted_by(|a, b| a >= b) && scores[2] < scores[0], "{scores:?}");
    assert_eq!(json["ids"], sequences[0]["ids"]);
    let mut seeds = Vec::new();
    for s in sequences {
        let ids: Vec<u32> = serde_json::from_value(s["ids"].clone()).unwrap();
        let seed = s["seed"].as_u64().unwrap();
        assert_eq!(format!("{}\n", joined(&ids)), single(seed));
        seeds.push(seed);
    }
    // First only the best sequence, then all of them.
    let best = run(&format!("generate {sampled_args} --seed 7 --best-of 3"));
    assert_eq!(best.out, single(seeds[0]));
    assert!(best.err.contains("decode: 36 tokens in 3 sequences"), "{}", best.err);
    let all = run(&format!("generate {sampled_args} --seed 7 --best-of 3 --all")).out;
    let entry = |(&seed, score): (&u64, &f64)| {
        format!("# seed {seed}, mean log-probability {score:.4}\n{}", single(seed))
    };
    let expected: Vec<String> = seeds.iter().zip(&scores).map(entry).collect();
    assert_eq!(all, expected.concat());
    // Every sequence is in the timeline.
    let path = dir.path().join("t.json");
    run(&format!("generate {sampled_args} --best-of 3 --quiet --timeline {}", path.display()));
    let timeline: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let steps = timeline["traceEvents"].as_array().unwrap().iter().filter(|e| e["ph"] == "X").count();
    assert!(steps >= 12, "{timeline}");
    // With one sequence there is nothing to choose, and no error.
    assert_eq!(run("generate --ids 7,8 -n 5 --best-of 1").out, run("generate --ids 7,8 -n 5").out);
}

#[test]
fn bench_of_several_sequences() {
    let json: Value =
        serde_json::from_str(&run("bench --best-of 3 --prompt 9 --gen 6 --repeat 2 --threads 2 --json").out)
            .unwrap();
    assert_eq!((json["best_of"].as_u64(), json["gen"].as_u64()), (Some(3), Some(6)));
    for key in ["best_of_tokens_per_s", "single_runs_tokens_per_s", "speedup"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}");
    }
    let text = run("bench --best-of 2 --repeat 1").out;
    assert!(text.starts_with("best of 2") && text.contains("\n2 single runs"), "{text}");
}

#[test]
fn damage_is_an_error_with_a_hint() {
    let dir = bundle();
    let path = dir.path().join("weights/model.bin");
    let mut content = std::fs::read(&path).unwrap();
    content[0] ^= 0x80;
    std::fs::write(&path, content).unwrap();
    let done = run_in(dir.path(), "generate --ids 1", None);
    assert_eq!((done.status, done.out.as_str()), (1, ""));
    assert!(done.err.starts_with("error: `") && done.err.contains("model.bin` was changed after the build"));
    assert!(done.err.contains("\nhint: "), "{}", done.err);
}

#[test]
fn logits_of_every_position() {
    let dir = bundle();
    let file = dir.path().join("out.safetensors");
    let ids: Vec<u32> = (0..37).map(|i| i * 7 % 256).collect();
    let done = run_in(dir.path(), &format!("logits --ids {} --out {}", joined(&ids), file.display()), None);
    assert_eq!((done.status, done.out.as_str()), (0, ""), "{}", done.err);
    let content = std::fs::read(&file).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&content).unwrap();
    let logits = tensors.tensor("logits").unwrap();
    assert_eq!((logits.dtype(), logits.shape()), (safetensors::Dtype::F32, &[37, V][..]));
    let expected: Vec<u8> = (1..=37).flat_map(|n| reference(&ids[..n])).flat_map(f32::to_le_bytes).collect();
    assert_eq!(logits.data(), expected);
    // A failed command leaves no file.
    let bad = dir.path().join("bad.safetensors");
    let done = run_in(dir.path(), &format!("logits --ids 1,999 --out {}", bad.display()), None);
    assert_eq!(done.status, 2);
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().map(|f| f.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn bench_and_info() {
    let done = run("bench --prompt 20 --gen 5 --repeat 2 --threads 2 --json");
    assert_eq!(done.status, 0, "{}", done.err);
    let json: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!((json["prompt"].as_u64(), json["threads"].as_u64()), (Some(20), Some(2)));
    for key in ["prefill_tokens_per_s", "decode_tokens_per_s", "arena_bytes", "weight_bytes", "kv_bytes"] {
        assert!(json[key].as_f64().unwrap() > 0.0, "{key}");
    }
    if cfg!(target_os = "linux") && json["cores"].is_u64() {
        let used = json["cores_used_by_others"].as_f64().unwrap();
        assert!(used >= 0.0 && used <= json["cores"].as_f64().unwrap(), "{json}");
    }
    assert!(run("bench --repeat 1").out.starts_with("prefill"));
    let json: Value = serde_json::from_str(&run("info --json").out).unwrap();
    assert_eq!(json["model"]["vocab"], 260);
    assert_eq!(json["target"]["runs_here"], true);
    assert_eq!(json["entries"][1]["kind"], "prefill[16]");
    assert_eq!(json["memory"]["kv_format"], "f32");
    let text = run("info").out;
    assert!(text.contains(" of f32 when full"), "{text}");
    assert!(text.contains("toy") && text.contains("runs here"), "{text}");
    // This subcommand needs no weights.
    let empty = tempfile::tempdir().unwrap();
    assert_eq!(run_in(empty.path(), "info", None).status, 0);
    assert!(run("help").out.contains("generate"));
    assert!(run("generate --help").out.contains("--top-p"));
}

/// A unit that reports operations, and runs nothing.
struct Reporter(Option<Vec<GraphOperation>>);

impl Graphs for Reporter {
    fn name(&self) -> &'static str {
        "reporter"
    }

    fn load(&mut self, _: &BundleReader, _: &[GraphDecl], _: usize) -> moec_runtime::Result<()> {
        panic!("`info` loads no graphs")
    }

    fn operations(&self, _: &BundleReader, graphs: &[GraphDecl]) -> moec_runtime::Result<OperationReport> {
        let operations = self.0.clone().ok_or_else(|| Error::graph("part", "Core ML cannot load it"))?;
        let of = |graph: &GraphDecl| GraphOperations {
            package: graph.package.clone(),
            function: graph.function.clone(),
            operations: operations.clone(),
        };
        Ok(OperationReport::Known(graphs.iter().map(of).collect()))
    }

    fn run(&self, _: usize, _: usize, _: &[&[f16]], _: &mut [&mut [f16]]) -> moec_runtime::Result<()> {
        panic!("`info` runs no graphs")
    }
}

/// A unit that reports nothing.
struct Silent;

impl Graphs for Silent {
    fn name(&self) -> &'static str {
        "silent"
    }

    fn load(&mut self, _: &BundleReader, _: &[GraphDecl], _: usize) -> moec_runtime::Result<()> {
        Ok(())
    }

    fn run(&self, _: usize, _: usize, _: &[&[f16]], _: &mut [&mut [f16]]) -> moec_runtime::Result<()> {
        Ok(())
    }
}

/// The toy model with `functions` static graphs of one package, which a unit of the backend `fake` executes.
fn program_with_graphs(functions: u32) -> Program {
    let mut plan = plan(&[(EntryKind::Decode(1), 1)]);
    plan.units.push(UnitRef { name: "npu".into(), backend: "fake".into(), ..UnitRef::cpu() });
    let tensor = |name: &str| GraphTensor { name: name.into(), shape: [1, 1, 1, 1] };
    plan.graphs = (0..functions)
        .map(|i| GraphDecl {
            package: "artifacts/part.mlpackage".into(),
            function: format!("rows{i}"),
            inputs: vec![tensor("x")],
            outputs: vec![tensor("y")],
            stateful: false,
        })
        .collect();
    plan.subgraphs = (0..functions)
        .map(|i| Subgraph { graphs: vec![i], inputs: 1, outputs: 1, attention: None })
        .collect();
    let entry = &mut plan.entries[0];
    // Steps that compute the mixture of the last layer once more.
    let (attend, mix) = (2, 4);
    let mut result = entry.buffers[mix].clone();
    let end = entry.buffers.iter().map(|b| b.offset + b.bytes).max().unwrap().next_multiple_of(64);
    (result.name, result.offset) = ("part".into(), end);
    entry.buffers.push(result);
    plan.memories[0].arena_bytes = end + 64;
    let part = entry.buffers.len() as u32 - 1;
    let mut after = attend;
    for subgraph in 0..functions {
        let like = entry.steps[attend as usize].clone();
        entry.steps.push(Step {
            unit: 1,
            code: Code::Builtin(Builtin::Subgraph { subgraph }),
            args: vec![Arg::Buffer(mix as u32, 0), Arg::Buffer(part, 0)],
            grid: Grid::One,
            barrier: false,
            deps: vec![after],
            ..like
        });
        after = entry.steps.len() as u32 - 1;
    }
    Program::new(plan, &resolve).unwrap()
}

/// Output of `info` on a machine with such a unit.
fn info_with(unit: &dyn Fn() -> moec_runtime::Result<Executor>, functions: u32, args: &str) -> ProcessOutput {
    let dir = bundle();
    let native = [Native { backend: "fake", executor: &|_| Some(unit()) }];
    let front = Front { native: &native, ..Front::default() };
    let done = run_front(front, &program_with_graphs(functions), dir.path(), args, None);
    assert_eq!(done.status, 0, "{}", done.err);
    done
}

#[test]
fn info_warns_about_operations_off_the_npu() {
    let operation = |operator: &str, unit, cost| GraphOperation { operator: operator.into(), unit, cost };
    let operations = vec![
        operation("conv", Some(OperationUnit::Npu), Some(0.75)),
        operation("softmax", Some(OperationUnit::Cpu), Some(0.25)),
    ];
    let unit = || Ok(Executor::Graphs(Box::new(Reporter(Some(operations.clone())))));
    let warning = "function `rows0` of `artifacts/part.mlpackage` does not run on the NPU alone: `softmax` on the CPU; \
                   25.0 % of its estimated cost";
    let text = info_with(&unit, 1, "info");
    let line =
        "operations    1 on NPU (75.0 % of the estimated cost), 1 on CPU (25.0 % of the estimated cost)\n";
    assert!(text.out.contains(line), "{}", text.out);
    assert_eq!(text.err, format!("warning: {warning}\n"));
    let json = info_with(&unit, 1, "info --json");
    assert_eq!(json.err, "");
    let json: Value = serde_json::from_str(&json.out).unwrap();
    assert_eq!(
        json["operations"],
        serde_json::json!({
            "known": true,
            "units": {"npu": {"operations": 1, "cost": 0.75}, "cpu": {"operations": 1, "cost": 0.25}},
            "functions": [{
                "package": "artifacts/part.mlpackage",
                "function": "rows0",
                "operations": [
                    {"operator": "conv", "unit": "npu", "count": 1, "cost": 0.75},
                    {"operator": "softmax", "unit": "cpu", "count": 1, "cost": 0.25},
                ],
            }],
            "warnings": [warning],
        })
    );
    // The text has a few warnings, the JSON all of them.
    let text = info_with(&unit, 11, "info").err;
    assert_eq!(text.lines().count(), 9, "{text}");
    assert!(text.ends_with("3 more functions do not run on the NPU alone: see `info --json`\n"), "{text}");
    let json: Value = serde_json::from_str(&info_with(&unit, 11, "info --json").out).unwrap();
    assert_eq!(json["operations"]["warnings"].as_array().unwrap().len(), 11);
}

/// A unit that reports nothing or fails does not keep `info` from describing the bundle.
#[test]
fn info_gives_the_reason_why_units_of_operations_are_unknown() {
    let silent = || Ok(Executor::Graphs(Box::new(Silent)));
    let failing = || Ok(Executor::Graphs(Box::new(Reporter(None))));
    let old = || Err(Error::graph("Core ML", "its packages need macOS 15 or later"));
    let cases: [(&dyn Fn() -> moec_runtime::Result<Executor>, &str); 3] =
        [(&silent, "`silent` does not report them"), (&failing, "cannot load it"), (&old, "need macOS 15")];
    for (unit, why) in cases {
        let text = info_with(unit, 1, "info");
        let line = text.out.lines().find(|line| line.starts_with("operations")).unwrap();
        assert!(line.contains("units not known: ") && line.contains(why) && text.err.is_empty(), "{line}");
        let json: Value = serde_json::from_str(&info_with(unit, 1, "info --json").out).unwrap();
        assert_eq!(json["operations"]["known"], false);
        assert!(json["operations"]["why"].as_str().unwrap().contains(why), "{json}");
    }
    let dir = bundle();
    let emulation = Emulation { weights: dir.path(), executor: &|_| panic!("`info` emulates nothing") };
    let front = Front { emulation: Some(emulation), ..Front::default() };
    let text = run_front(front, &program_with_graphs(1), dir.path(), "info", None).out;
    assert!(text.contains("units not known: static graphs are emulated"), "{text}");
    let json: Value = serde_json::from_str(&run("info --json").out).unwrap();
    assert!(json["operations"].is_null() && json["model"].is_object(), "{json}");
}

#[test]
fn bench_alternates_between_variants() {
    let dir = bundle();
    let done = run_in(dir.path(), "bench --stdin --threads 2", Some("20 3 1\n5 2 2\n"));
    assert_eq!((done.status, done.err.as_str()), (0, ""));
    let answers: Vec<Value> = done.out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let settings = |a: &Value| ["prompt", "gen", "batch"].map(|k| a[k].as_u64().unwrap());
    assert_eq!(answers.iter().map(settings).collect::<Vec<_>>(), [[20, 3, 1], [5, 2, 2]]);
    assert!(answers.iter().all(|a| a["decode_tokens_per_s"].as_f64().unwrap() > 0.0));
    for (input, word) in [
        ("5 2\n", "`5 2`"),
        ("5 0 1\n", "from 1 up"),
        ("60 10 1\n", "context"),
        ("1 1 99\n", "KV cache holds 3"),
    ] {
        let done = run_in(dir.path(), "bench --stdin", Some(input));
        assert!(done.status != 0 && done.err.contains(word), "{input}: {}", done.err);
    }
    let text = run("bench --batch 2 --repeat 1").out;
    assert!(text.contains("2 sequences") && !text.contains("read per token"), "{text}");
}

/// A pipe whose reader has closed it.
struct Closed;

impl Write for Closed {
    fn write(&mut self, _: &[u8]) -> io::Result<usize> {
        Err(io::ErrorKind::BrokenPipe.into())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_closed_pipe_is_quiet() {
    let dir = bundle();
    for args in ["generate --ids 1,2 -n 9", "generate --ids 1,2 --json", "info", "bench --repeat 1", "help"] {
        let mut err = Vec::new();
        let io = Io { input: None, out: &mut Closed, err: &mut err };
        let args = args.split(' ').map(OsString::from);
        assert_eq!(Front::default().run_with(&program(&ENTRIES), dir.path(), args, io), 0);
        assert_eq!(String::from_utf8(err).unwrap(), "");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn kv_cache_larger_than_memory_is_rejected_if_fully_needed() {
    const MANY: u32 = 1 << 16;
    let mut plan = plan(&ENTRIES);
    plan.model.slots = MANY;
    for state in &mut plan.states {
        // Some terabytes.
        (state.shape[0], state.shape[1]) = (MANY, MANY);
    }
    let huge = Program::new(plan, &resolve).unwrap();
    let dir = bundle();
    let refused = run_program(&huge, dir.path(), "bench --stdin", Some(""));
    assert_eq!(refused.status, 1);
    for words in ["KV cache of 65536 sequences", "MiB are free", "hint:", "max_context", "decode_batch"] {
        assert!(refused.err.contains(words), "{words}: {}", refused.err);
    }
    // One short sequence needs little of it.
    let done = run_program(&huge, dir.path(), "generate --ids 72,101 -n 3 --json", None);
    assert_eq!((done.status, done.err.as_str()), (0, ""));
    let json: Value = serde_json::from_str(&done.out).unwrap();
    assert_eq!(json["ids"], serde_json::json!(continuation(&[72, 101], 3)));
}

#[test]
fn more_threads_than_cores_cannot_be_pinned() {
    assert_eq!(run("generate --ids 72 -n 2 --pin --threads 1").status, 0);
    let done = run("generate --ids 72 -n 2 --pin --threads 1024");
    assert!(done.status == 2 && done.err.contains("--pin"), "{}", done.err);
}
