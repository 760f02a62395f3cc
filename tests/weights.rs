//! Weights in RAM and mapped weights, end to end: the same tokens and logits, and a note on their location.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
#[cfg(target_os = "linux")]
#[allow(dead_code, reason = "every test file uses its own part")]
use crate::support::group;

use moec_bundle::read::Bundle;
use moec_ir::plan::{Arg, Layout, Plan};
#[cfg(target_os = "linux")]
use moec_testing::GROUPS;
use safetensors::SafeTensors;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, built, checkpoint, distance, fails, ferris, list, logits_file, moec, ok};

/// Builds a bundle of a checkpoint; `more` is added to its `model.toml`.
fn build(source: &Path, folder: &Path, more: &str) -> PathBuf {
    let toml = Setup { format: "bf16", chunk: 20, batch: &[1, 2], context: 128 }.write(source, folder);
    let text = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, format!("{text}{more}")).unwrap();
    let bundle = folder.join("b");
    built(&toml, &[], &bundle);
    bundle
}

fn run(bundle: &Path, words: &[&str]) -> Command {
    let mut command = moec();
    command.arg("run").arg(bundle).args(words);
    command
}

fn json(command: &mut Command) -> Value {
    serde_json::from_slice(&ok(command).stdout).expect("one JSON object")
}

const OWN: [&str; 2] = ["--weights", "ram"];

#[test]
fn ram_and_mmap_weights_give_the_same_results() {
    for source in [checkpoint("olmoe"), checkpoint("deepseek_v2"), ferris()] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = build(&source, folder.path(), "");
        let ids = list(&(0..45).map(|i| i * 7 % 200).collect::<Vec<u32>>());
        let both = ["ram", "mmap"].map(|weights| {
            let out = folder.path().join(weights);
            let logits = ["logits", "--weights", weights, "--ids", &ids, "--out"];
            ok(run(&bundle, &logits).arg(&out));
            let generate = ["generate", "--weights", weights, "--ids", &ids, "-n", "24", "--check", "--json"];
            let report = json(&mut run(&bundle, &generate));
            (fs::read(&out).unwrap(), report["ids"].clone(), report["tokens"].clone())
        });
        assert!(both[0].0.len() > 45 * 4);
        assert!(both[0] == both[1], "{}: {:?}", source.display(), both.map(|b| (b.1, b.2)));
    }
}

/// A copy of a tied checkpoint whose head is a separate tensor with the same values as the table.
fn untied(source: &Path, folder: &Path) -> PathBuf {
    let copy = folder.join("untied");
    fs::create_dir(&copy).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(source.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"].take(), true);
    config["tie_word_embeddings"] = false.into();
    fs::write(copy.join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(source.join("model.safetensors")).unwrap();
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    let table = tensors.iter().find(|(name, _)| name == "model.embed_tokens.weight").unwrap().1.clone();
    tensors.push(("lm_head.weight".to_owned(), table));
    fs::write(copy.join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    copy
}

/// Segments with the shape of the embedding table, and how many kernels of an entry point read each.
fn tables(plan: &Plan) -> Vec<(Layout, usize)> {
    let shape = &plan.segments[0].shape;
    let readers = |segment: u32| {
        let reads = plan.entries[0].steps.iter().filter(|s| s.args.contains(&Arg::Segment(segment)));
        reads.map(|s| s.node).collect::<BTreeSet<_>>().len()
    };
    let found = (0..).zip(&plan.segments).filter(|(_, s)| s.shape == *shape);
    found.map(|(i, s)| (s.layout, readers(i))).collect()
}

/// A tied table is stored once in every format but q4, in which table and head are rounded separately. The
/// results are the same.
#[test]
fn a_tied_table_is_stored_once() {
    for format in ["f32", "f16", "bf16", "q8", "mxfp4", "q4"] {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint("smallthinker_4b");
        let build = |source: &Path, name: &str| {
            let setup = Setup { format, chunk: 20, batch: &[1, 2], context: 64 };
            let bundle = folder.path().join(name);
            built(&setup.write(source, folder.path()), &[], &bundle);
            let out = bundle.join("logits");
            ok(run(&bundle, &["logits", "--ids", "5,9,33,319,0,64", "--out"]).arg(&out));
            let tokens = ok(&mut run(&bundle, &["generate", "--ids", "5,9,33", "-n", "24"])).stdout;
            (Bundle::open(&bundle).unwrap().plan, logits_file(&out).1, tokens)
        };
        let (tied, logits, tokens) = build(&source, "tied");
        let (untied, want, own_tokens) = build(&untied(&source, folder.path()), "apart");
        let [(Layout::Rows, 1), (head @ Layout::Panels { .. }, 1)] = tables(&untied)[..] else {
            panic!("{format}: {:?}", tables(&untied))
        };
        let bytes = |plan: &Plan| plan.segments.iter().map(|s| s.bytes).sum::<u64>();
        if format == "q4" {
            assert_eq!((tables(&tied), bytes(&tied)), (tables(&untied), bytes(&untied)));
        } else {
            assert_eq!(tables(&tied), [(head, 2)], "{format}");
            // In f32, the last norm's 64 weights are folded into a separate head, but not into a shared
            // table.
            let scale = if format == "f32" { 64 * 4 } else { 0 };
            assert_eq!(bytes(&tied), bytes(&untied) - untied.segments[0].bytes + scale, "{format}");
        }
        assert_eq!(tokens, own_tokens, "{format}");
        if format == "f32" {
            assert!(distance(&logits, &want) < 1e-5);
        } else {
            assert!(logits == want, "{format}: logits differ");
        }
    }
}

#[test]
fn run_reports_where_its_weights_are_stored() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "");
    let bench = ["bench", "--prompt", "8", "--gen", "4", "--repeat", "1"];
    for weights in ["ram", "mmap"] {
        let report = json(run(&bundle, &bench).args(["--json", "--weights", weights]));
        let held = &report["weights"];
        let own = weights == "ram";
        assert!(held["own"] == own && held["shared"] != own && held["why"] == "as requested", "{held}");
        assert_eq!(held["bytes"].as_u64() > Some(0), own, "{held}");
        assert_eq!((held["reader"].is_string(), held["load_seconds"].is_f64()), (own, own), "{held}");
        assert_eq!(held["huge_page_bytes"].is_u64(), own && cfg!(target_os = "linux"), "{held}");
        assert!(report["first_token_seconds"].as_f64() > Some(0.0), "{report}");
        let text = String::from_utf8(ok(run(&bundle, &bench).args(["--weights", weights])).stdout).unwrap();
        assert!(text.contains(if own { " of its own" } else { "mapped (as requested)" }), "{text}");
    }
    let report = json(&mut run(&bundle, &["info", "--json"]));
    let held = &report["weights"];
    assert!(held["own"].is_boolean() && held["why"].as_str().is_some_and(|why| !why.is_empty()), "{held}");
    let text = String::from_utf8(ok(&mut run(&bundle, &["info"])).stdout).unwrap();
    assert!(text.contains("in memory     "), "{text}");
    let (code, stderr) = fails(&mut run(&bundle, &["generate", "--ids", "1", "--weights", "mine"]));
    assert!(code == 2 && stderr.contains("[possible values: auto, ram, mmap]"), "{stderr}");
}

/// Number of locked pages, or the reason why this user may not lock any.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_locked_on_request() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "");
    let bench = ["bench", "--prompt", "8", "--gen", "4", "--repeat", "1", "--json"];
    assert_eq!(json(&mut run(&bundle, &bench))["locked_bytes"], 0);
    let done = run(&bundle, &bench).arg("--mlock").output().unwrap();
    if done.status.success() {
        let report: Value = serde_json::from_slice(&done.stdout).unwrap();
        let locked = report["locked_bytes"].as_u64().unwrap();
        assert!(locked >= report["weight_bytes"].as_u64().unwrap(), "{report}");
    } else {
        let stderr = String::from_utf8(done.stderr).unwrap();
        assert!(stderr.contains("memory cannot be locked") && stderr.contains("ulimit -l"), "{stderr}");
    }
}

/// A command under a limit on locked memory, in KiB. A user who may exceed limits gives up that right.
#[cfg(target_os = "linux")]
fn with_lock_limit(command: &Command, kib: u32) -> Command {
    const IPC_LOCK: u32 = 14;
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    let may_exceed = u64::from_str_radix(rights.trim(), 16).unwrap() >> IPC_LOCK & 1 == 1;
    let mut limited = Command::new(if may_exceed { "setpriv" } else { "sh" });
    if may_exceed {
        limited.args(["--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "sh"]);
    }
    limited.args(["-c", &format!("ulimit -l {kib} && exec \"$@\""), "sh"]);
    limited.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => limited.env(name, value),
            None => limited.env_remove(name),
        };
    }
    limited
}

/// Weights that stay in memory under a budget are locked as far as the user may lock memory. If that is too
/// little, a warning gives the remedy, and the run goes on.
#[cfg(target_os = "linux")]
#[test]
fn weights_that_stay_under_a_budget_are_locked_or_a_warning_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "[memory]\nbudget = \"1 GiB\"\n");
    let generate = run(&bundle, &["generate", "--ids", "1,2,3", "-n", "4", "--json"]);
    let [all, none] = [4096, 0].map(|kib| {
        let done = ok(&mut with_lock_limit(&generate, kib));
        let report: Value = serde_json::from_slice(&done.stdout).unwrap();
        let info = json(&mut with_lock_limit(&run(&bundle, &["info", "--json"]), kib));
        assert_eq!(info["paging"]["locked_bytes"], report["memory"]["locked"], "{info}");
        (report, String::from_utf8(done.stderr).unwrap())
    });
    let locked = |report: &Value| report["memory"]["locked"].as_u64().unwrap();
    assert!(locked(&all.0) > 0 && locked(&none.0) == 0, "{} {}", all.0, none.0);
    assert!(!all.1.contains("locked"), "{}", all.1);
    let words = ["warning: 0 B of ", "that stay in memory are locked", "ulimit -l unlimited"];
    assert!(words.iter().all(|words| none.1.contains(words)), "{}", none.1);
    assert_eq!(all.0["ids"], none.0["ids"]);
    let text = ok(&mut with_lock_limit(&run(&bundle, &["info"]), 0)).stdout;
    assert!(String::from_utf8(text).unwrap().contains("locked        0 B of "));
}

#[test]
fn ram_weights_are_refused_with_a_budget() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "[memory]\nbudget = \"1 GiB\"\n");
    let generate = ["generate", "--ids", "1,2,3", "-n", "4"];
    let (code, stderr) = fails(run(&bundle, &generate).args(OWN));
    assert!(
        code == 2 && stderr.contains("leaves experts on disk") && stderr.contains("--no-budget"),
        "{stderr}"
    );
    let all = ok(run(&bundle, &generate).args(OWN).arg("--no-budget")).stdout;
    assert_eq!(all, ok(&mut run(&bundle, &generate)).stdout);
    let info = json(&mut run(&bundle, &["info", "--json"]));
    assert!(info["weights"]["own"] == false, "{info}");
}

#[test]
fn changed_weight_file_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(&checkpoint("olmoe"), folder.path(), "");
    let weights = fs::read_dir(bundle.join("weights")).unwrap().map(|f| f.unwrap().path());
    for path in weights {
        let whole = fs::read(&path).unwrap();
        let mut other = whole.clone();
        let at = other.len() / 2;
        other[at] ^= 1;
        fs::write(&path, other).unwrap();
        let (code, stderr) = fails(run(&bundle, &["generate", "--ids", "1,2,3", "-n", "4"]).args(OWN));
        assert!(code == 1 && stderr.contains("was changed after the build"), "{stderr}");
        fs::write(&path, whole).unwrap();
    }
}

/// A limit that is larger than the weights, but smaller than weights and reserve together.
#[cfg(target_os = "linux")]
#[test]
fn weights_are_mapped_under_a_small_cgroup_limit() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    ok(moec()
        .args(["synth", "--like", "phi-tiny", "--layers", "1", "--vocab", "512", "--quiet"])
        .arg(&source));
    let bundle = build(&source, folder.path(), "");
    let weights: u64 = support::tree(&bundle)
        .iter()
        .filter(|(name, _)| name.starts_with("weights"))
        .map(|(_, bytes)| bytes.len() as u64)
        .sum();
    let bench = ["bench", "--prompt", "8", "--gen", "4", "--repeat", "1", "--json"];
    for (limit, fits) in [(weights / 2, false), (2 * weights, true)] {
        let Some(group) = GROUPS.ok_or_skip(group::Group::new("a-group-whose-limit-is-small", Some(limit)))
        else {
            return;
        };
        let report = json(&mut group.enter(&run(&bundle, &bench)));
        assert_eq!(report["weights"]["own"], false, "{report}");
        assert!(report["weights"]["why"].as_str().is_some_and(|why| why.contains("would need")), "{report}");
        let mut own = group.enter(run(&bundle, &bench).args(OWN));
        if fits {
            assert_eq!(json(&mut own)["weights"]["own"], true);
        } else {
            let (code, stderr) = fails(&mut own);
            assert!(
                code == 1 && stderr.contains("are missing") && stderr.contains("--weights auto"),
                "{stderr}"
            );
        }
        assert_eq!(group.kills(), 0);
    }
}
