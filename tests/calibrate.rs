//! Calibration from a user's view.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "calibrate/case.rs"]
mod case;
#[path = "calibrate/confidence.rs"]
mod confidence;
#[path = "calibrate/evaluator.rs"]
mod evaluator;
#[path = "calibrate/rounding.rs"]
mod rounding;
use crate::support;
#[path = "calibrate/wide.rs"]
mod wide;

use case::{Case, WINDOW, ids, json};
use moec_base::progress::Progress;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_measure::calibrate::{Request, calibrate, read_texts};
use moec_measure::job::Job;
use moec_profile::Profile;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{Setup, cache, fails, ferris, ferris_relu, moec, ok};

#[test]
fn profile_of_two_texts_equals_the_merged_profiles() {
    let case = Case::new("qwen3_moe");
    let a = case.text("a.txt", &ids(40));
    let b = case.text("b.txt", &ids(100)[40..]);
    let take = |texts: &[&PathBuf], out: &str| {
        let mut command = case.calibrate();
        for text in texts {
            command.arg("--text").arg(text);
        }
        json(command.arg("--window").arg(WINDOW.to_string()).arg("-o").arg(case.path(out)))
    };
    take(&[&a], "a.trace");
    take(&[&b], "b.trace");
    let both = take(&[&a, &b], "ab.trace");
    assert_eq!((both["tokens"].as_u64(), both["texts"].as_array().map(Vec::len)), (Some(100), Some(2)));
    let merge = |first: &str, second: &str, out: &str| {
        let mut command = case.calibrate();
        command.arg("--merge").arg(case.path(first)).arg("--merge").arg(case.path(second));
        ok(command.arg("-o").arg(case.path(out)));
        fs::read(case.path(out)).unwrap()
    };
    let merged = merge("a.trace", "b.trace", "m.trace");
    assert!(merged == merge("b.trace", "a.trace", "n.trace"), "merging depends on the order");
    let (merged, both) = (Profile::decode(&merged).unwrap(), Profile::read(&case.path("ab.trace")).unwrap());
    assert_eq!(merged.reading.texts, both.reading.texts);
    for (a, b) in merged.layers.iter().zip(&both.layers) {
        assert_eq!((a.layer, &a.chosen, &a.together), (b.layer, &b.chosen, &b.together));
    }
    assert_eq!(merged.trace, both.trace);
    for (name, a) in &merged.weights {
        let b = &both.weights[name];
        assert_eq!(a.tokens, b.tokens, "{name}");
        let close = |(a, b): (&f32, &f32)| (a - b).abs() <= b * 2e-3;
        assert!((0..a.matrices()).all(|l| a.of(l).iter().zip(b.of(l)).all(close)), "{name}");
    }
    // Reading texts and merging profiles in one command.
    let mut command = case.calibrate();
    command.arg("--text").arg(&a).arg("--merge").arg(case.path("b.trace"));
    let read = json(command.args(["--window", "24", "-o"]).arg(case.path("o.trace")));
    assert_eq!(read["tokens"], 100);
    case.nothing_left(&["a.txt", "b.txt", "a.trace", "b.trace", "ab.trace", "m.trace", "n.trace", "o.trace"]);
}

#[test]
fn inspect_shows_a_profile() {
    let case = Case::new("olmoe");
    case.text("corpus.txt", &ids(200));
    case.append("[calibrate]\ntext = [\"corpus.txt\"]\nprofile = \"own.trace\"\ntokens = 96\n");
    ok(&mut case.calibrate());
    let stderr = json(moec().arg("inspect").arg(case.path("own.trace")));
    assert_eq!((&stderr["kind"], &stderr["model"]["family"]), (&"profile".into(), &"olmoe".into()));
    assert_eq!((&stderr["tokens"], &stderr["layers"][1]["layer"]), (&96.into(), &1.into()));
    let per_expert: Vec<u64> =
        serde_json::from_value(stderr["layers"][0]["tokens_per_expert"].clone()).unwrap();
    assert_eq!((per_expert.len(), per_expert.iter().sum::<u64>()), (8, 2 * 96));
    assert!(stderr["perplexity"].as_f64().unwrap() > 1.0);
    let text = ok(moec().arg("inspect").arg(case.path("own.trace"))).stdout;
    let text = String::from_utf8(text).unwrap();
    for words in ["olmoe, 2 layers", "96 tokens of 1 texts", "busiest / mean", "of 8"] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    // The same input gives the same bytes with any number of threads.
    let first = fs::read(case.path("own.trace")).unwrap();
    ok(case.calibrate().env("MOEC_THREADS", "3"));
    assert!(first == fs::read(case.path("own.trace")).unwrap(), "a profile depends on the number of threads");
}

#[test]
fn model_with_zero_experts_is_not_calibrated() {
    let case = Case::new("longcat_flash");
    let text = case.text("t.txt", &ids(100));
    let (_, stderr) = fails(case.calibrate().arg("--text").arg(&text));
    assert!(stderr.contains("zero-computation experts") && stderr.contains("hint:"), "{stderr}");
}

#[test]
fn impossible_calibrations_are_reported() {
    let case = Case::new("olmoe");
    let refused = |change: &dyn Fn(&mut Command), code: i32, words: &[&str]| {
        let mut command = case.calibrate();
        change(&mut command);
        let (found, stderr) = fails(&mut command);
        assert_eq!(found, code, "{stderr}");
        for word in words {
            assert!(stderr.contains(word), "`{word}` is not in:\n{stderr}");
        }
        assert!(stderr.contains("hint:"), "no hint in:\n{stderr}");
    };
    refused(&|_| {}, 2, &["no text", "--text"]);
    let text = case.text("t.txt", &ids(100));
    fs::write(case.path("empty.txt"), "").unwrap();
    fs::write(case.path("x.bin"), b"w1 \xff w2").unwrap();
    refused(
        &|c| {
            c.arg("--text").arg(case.path("empty.txt"));
        },
        1,
        &["nothing to read", "empty.txt"],
    );
    let mut command = case.calibrate();
    let (_, stderr) = fails(command.arg("--text").arg(case.path("x.bin")));
    assert!(stderr.contains("UTF-8") && stderr.contains("byte 3"), "{stderr}");
    let mut command = case.calibrate();
    let (_, stderr) = fails(command.arg("--text").arg(case.path("gone.txt")));
    assert!(stderr.contains("gone.txt"), "{stderr}");

    // A profile of another model, a damaged one, and a missing one.
    let other = Case::new("mixtral");
    let foreign = case.path("mixtral.trace");
    ok(other.calibrate().arg("--text").arg(&text).arg("-o").arg(&foreign));
    refused(
        &|c| {
            c.arg("--merge").arg(&foreign);
        },
        1,
        &["mixtral.trace", "another model", "olmoe"],
    );
    let mut bytes = fs::read(&foreign).unwrap();
    bytes.truncate(bytes.len() - 7);
    fs::write(&foreign, bytes).unwrap();
    refused(
        &|c| {
            c.arg("--merge").arg(&foreign);
        },
        1,
        &["mixtral.trace", "damaged"],
    );
    refused(
        &|c| {
            c.arg("--merge").arg(case.path("no.trace"));
        },
        1,
        &["no.trace"],
    );

    fs::remove_file(case.path("hf/tokenizer.json")).unwrap();
    refused(
        &|c| {
            c.arg("--text").arg(&text);
        },
        1,
        &["no usable tokenizer", "tokenizer.json"],
    );
    case.nothing_left(&["t.txt", "empty.txt", "x.bin", "mixtral.trace"]);
}

#[test]
fn profile_of_another_model_is_refused() {
    let case = Case::new("olmoe");
    let other = Case::new("mixtral");
    let text = case.text("t.txt", &ids(50));
    ok(other.calibrate().arg("--text").arg(&text).arg("-o").arg(case.path("x.trace")));
    case.append("[calibrate]\nprofile = \"x.trace\"\n");
    let build = || {
        let mut command = moec();
        command.arg("build").arg(&case.toml).args(["--quiet", "--no-run", "-o"]).arg(case.path("out.moec"));
        fails(&mut command)
    };
    let (code, stderr) = build();
    assert!(code == 1 && stderr.contains("x.trace") && stderr.contains("another model"), "{stderr}");
    fs::write(case.path("x.trace"), "no profile").unwrap();
    let (code, stderr) = build();
    assert!(code == 1 && stderr.contains("x.trace") && stderr.contains("not a profile"), "{stderr}");
    fs::remove_file(case.path("x.trace")).unwrap();
    let (code, stderr) = build();
    assert!(code == 1 && stderr.contains("x.trace") && stderr.contains("moec calibrate"), "{stderr}");
    case.nothing_left(&["t.txt"]);
}

#[test]
fn interrupted_calibration_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 4, batch: &[1], context: 512 }.write(&ferris(), folder.path());
    let (cache, out) = (folder.path().join("cache"), folder.path().join("x.trace"));
    let mut command = moec();
    command.env("MOEC_CACHE", &cache).env("MOEC_THREADS", "1").arg("calibrate").arg(&toml).arg("--quiet");
    command.arg("--text").arg(ferris().join("eval/calibration.txt")).args(["--tokens", "16777216"]);
    let child = command.arg("-o").arg(&out).stderr(Stdio::piped()).spawn().unwrap();
    let written = || {
        let mut entries = fs::read_dir(&cache).into_iter().flatten().flatten();
        entries.any(|e| e.path().join("model.moec/manifest.json").exists())
    };
    for _ in 0..1500 {
        if written() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(written(), "the run was over before it could be interrupted");
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let done = child.wait_with_output().unwrap();
    let stderr = String::from_utf8_lossy(&done.stderr);
    assert!(done.status.code() == Some(130) && stderr.contains("interrupted"), "{stderr}");
    let left = fs::read_dir(&cache).unwrap().map(|e| e.unwrap().file_name()).filter(|name| name != "objects");
    assert!(!out.exists() && left.count() == 0, "something was left");
}

/// Routing is recorded token by token, in order. The chosen experts have the largest scores, and their counts
/// add up to the totals.
#[test]
fn a_profile_records_the_routing_of_single_tokens() {
    let case = Case::new("olmoe");
    let take = |n: usize| {
        let text = case.text("t.txt", &ids(n));
        let texts = read_texts(&[text]).unwrap();
        let config = Config::load(&case.toml).unwrap();
        let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
        let request = Request { texts: &texts, tokens: n, window: 40, job: Job::ALONE };
        calibrate(&config, &checkpoint, &spec, &request, &Progress::silent()).unwrap()
    };
    let whole = take(100);
    let trace = whole.routes.trace(&whole.layers).unwrap();
    assert_eq!(trace.tokens(), 100);
    let mut chosen: Vec<Vec<u64>> = whole.layers.iter().map(|l| vec![0; l.chosen.len()]).collect();
    for (_, layer, step) in trace.steps() {
        let mut top: Vec<u16> = step.ranked[..step.chosen.len()].iter().map(|r| r.0).collect();
        let mut own = step.chosen.to_vec();
        for &e in &own {
            chosen[layer][usize::from(e)] += 1;
        }
        top.sort_unstable();
        own.sort_unstable();
        assert_eq!(own, top);
    }
    assert!(whole.layers.iter().zip(&chosen).all(|(l, own)| l.chosen == *own));
    // The profile of a shorter text is a prefix of the longer one's.
    let part = take(30);
    let short = part.routes.trace(&part.layers).unwrap();
    assert!(short.steps().zip(trace.steps()).all(|(a, b)| a == b) && short.tokens() == 30);
    let merged = whole.merge(&part).unwrap();
    assert_eq!(merged.routes.trace(&merged.layers).unwrap().tokens(), 130);
}

/// Replaying a recorded router: no policy exceeds the bound, and the chosen one is at least as good as LRU.
#[test]
fn caches_are_compared_on_a_recorded_router() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "bf16", chunk: 64, batch: &[1], context: 512 }.write(&ferris(), folder.path());
    let out = folder.path().join("ferris.trace");
    let mut command = moec();
    command.env("MOEC_CACHE", cache(folder.path())).env("MOEC_THREADS", "1").arg("calibrate").arg(&toml);
    command.arg("--text").arg(ferris().join("eval/calibration.txt")).args(["--tokens", "2048", "--quiet"]);
    ok(command.arg("-o").arg(&out));
    let found = json(moec().arg("inspect").arg(&out).args(["--cache", "25%,50%,75%"]));
    assert_eq!((&found["tokens"], &found["experts"]), (&2048.into(), &96.into()));
    let rate = |v: &Value| v["hit_rate"].as_f64().unwrap();
    let caches = found["caches"].as_array().unwrap();
    assert_eq!(caches.iter().map(|c| c["experts"].as_u64().unwrap()).collect::<Vec<_>>(), [24, 48, 72]);
    for cache in caches {
        let settings = cache["settings"].as_array().unwrap();
        assert_eq!(settings[0]["setting"], "lru");
        assert!(settings.iter().all(|s| rate(s) <= rate(&cache["bound"])));
        assert!(cache["chosen_hit_rate"].as_f64().unwrap() >= rate(&settings[0]));
        if cache["beats_lru"] == true {
            assert!(rate(&cache["held_out"]) > rate(&cache["held_out_lru"]));
        }
    }
    assert!(caches.is_sorted_by_key(|c| (rate(&c["bound"]) * 1e6) as u64));
    let stdout =
        String::from_utf8(ok(moec().arg("inspect").arg(&out).args(["--cache", "50%"])).stdout).unwrap();
    for word in ["lru", "lfu", "mrs", "page-cache", "Belady (bound)", "held out"] {
        assert!(stdout.contains(word), "`{word}` is not in:\n{stdout}");
    }
    let (code, stderr) = fails(moec().arg("inspect").arg(&toml).args(["--cache", "50%"]));
    assert!(code == 2 && stderr.contains("requires a profile"), "{stderr}");
    let (code, stderr) = fails(moec().arg("inspect").arg(&out).args(["--cache", "50"]));
    assert!(code == 2 && stderr.contains("25%"), "{stderr}");
}

/// Neurons of a trained model with ReLU: as many are 0 as in the reference implementation, and fewer in a
/// larger batch.
#[test]
fn neurons_of_a_trained_model_are_mostly_zero() {
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format: "bf16", chunk: 256, batch: &[1], context: 512 };
    let toml = setup.write(&ferris_relu(), folder.path());
    let out = folder.path().join("relu.trace");
    let mut command = moec();
    command.env("MOEC_CACHE", cache(folder.path())).env("MOEC_THREADS", "1").arg("calibrate").arg(&toml);
    command.arg("--text").arg(ferris().join("eval/text.txt")).args(["--tokens", "4096", "--quiet"]);
    ok(command.arg("-o").arg(&out));
    let reference = fs::read_to_string(ferris_relu().join("reference_metrics.json")).unwrap();
    let reference: Value = serde_json::from_str(&reference).unwrap();
    let profile = Profile::read(&out).unwrap();
    for (layer, want) in reference["zeros_by_layer"].as_array().unwrap().iter().enumerate() {
        let counts = profile.neurons(layer as u32).unwrap();
        assert!(counts.is_exact() && counts.batches() == 4, "layer {layer}");
        let zeros: Vec<f64> = (1..=4).map(|b| counts.zeros(0, b).unwrap()).collect();
        let want = want.as_f64().unwrap();
        assert!((zeros[0] - want).abs() < 0.02, "layer {layer}: {zeros:?}, the reference saw {want}");
        assert!(zeros.is_sorted_by(|a, b| a > b), "layer {layer}: {zeros:?}");
    }
    let stderr = json(moec().arg("inspect").arg(&out));
    let network = &stderr["neurons"][0];
    assert_eq!(
        (&network["experts"], &network["neurons_per_expert"], &network["exact"]),
        (&24.into(), &96.into(), &true.into())
    );
    let batches = network["levels"][0]["batches"].as_array().unwrap();
    assert_eq!(batches.iter().map(|b| b["batch"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    let slices: Vec<f64> = serde_json::from_value(batches[0]["hot_to_cold"].clone()).unwrap();
    assert!(slices.len() == 40 && slices.is_sorted_by(|a, b| a >= b), "{slices:?}");
    let text = String::from_utf8(ok(moec().arg("inspect").arg(&out)).stdout).unwrap();
    for words in ["neurons of", "layers.3.moe.down", "skipped", "below 0.25"] {
        assert!(text.contains(words), "`{words}` is not in:\n{text}");
    }
    let page = folder.path().join("page.html");
    ok(moec().arg("inspect").arg(&out).arg("--html").arg(&page));
    assert!(fs::read_to_string(page).unwrap().contains("Neurons in batches of 4"));
}
