//! `moec simulate`: a bundle for a device with a neural processing unit, and one with experts on disk.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::read::Bundle;
use moec_costs::Model;
use serde_json::Value;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use support::{Setup, cache, calibration, checkpoint, fails, ferris, moec, ok, recorded};

fn stdout(command: &mut Command) -> String {
    String::from_utf8(ok(command).stdout).unwrap()
}

/// ferris for the M2 Ultra, with a profile of two thousand tokens. Its attention stays on the CPU, and its
/// experts are too small for a launch: so coremltools is not called.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        let case = Self { folder: tempfile::tempdir().unwrap() };
        let setup = Setup { format: "f16", chunk: 64, batch: &[1], context: 256 };
        let toml = setup.write(&ferris(), case.folder.path());
        let args = ["--text", &calibration(), "--tokens", "2048", "--window", "256"];
        recorded(&toml, &args, &case.path("a.trace"));
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, text + "[calibrate]\nprofile = \"a.trace\"\n[placement]\nattention = \"cpu\"\n")
            .unwrap();
        case.build(&toml, "m2-ultra", "out.moec");
        case
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn moec(&self, subcommand: &str) -> Command {
        let mut command = moec();
        command
            .env("MOEC_CACHE", cache(self.folder.path()))
            .env("MOEC_THREADS", "1")
            .arg(subcommand)
            .arg("--quiet");
        command
    }

    fn build(&self, toml: &std::path::Path, target: &str, out: &str) {
        let mut build = self.moec("build");
        ok(build.arg(toml).args(["--target", target, "--no-run", "-o"]).arg(self.path(out)));
    }

    fn simulate(&self, more: &[&str]) -> Command {
        let mut command = self.moec("simulate");
        command.arg(self.path("out.moec")).args(more).current_dir(self.folder.path());
        command
    }
}

#[test]
fn a_bundle_is_simulated() {
    let case = Case::new();
    let text = stdout(&mut case.simulate(&["--trace", "a.trace", "--timeline", "t.json"]));
    assert!(
        text.starts_with("m2-ultra: a prompt of 256 tokens in chunks of 64; loads: 32 chunks of 64 tokens\n"),
        "{text}"
    );
    for name in ["this bundle", "coreml-cpu", "coreml-naive", "anemll", "ours-base", "ours-tg"] {
        assert!(text.contains(name), "{text}");
    }
    let legend: Vec<&str> = text.lines().skip_while(|line| !line.starts_with("system  ")).collect();
    for (name, words) in [("this bundle", "plan"), ("anemll", "(project)"), ("ours-tg", "NPUMoE (paper)")] {
        let explained = legend.iter().any(|line| line.starts_with(name) && line.contains(words));
        assert!(explained, "`{name}` is not explained:\n{text}");
    }
    let trace: Value = serde_json::from_str(&fs::read_to_string(case.path("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let of = |pid: u64, ph: &str| events.iter().filter(|e| e["pid"] == pid && e["ph"] == ph).count();
    // Units, and further queues of the NPU where several graphs run at a time.
    assert_eq!((of(1, "M"), of(9, "M")), (3, 0));
    assert!((3..=18).contains(&of(8, "M")), "{}", of(8, "M"));
    assert!(of(1, "X") > 100);

    let json = |more: &[&str]| {
        let mut command = case.simulate(more);
        command.arg("--json");
        serde_json::from_str::<Value>(&stdout(&mut command)).unwrap()
    };
    // The bundle launches no graphs, ANEMLL one graph of attention per layer and chunk.
    let traced = json(&["--trace", "a.trace"]);
    let ours = &traced["systems"][0];
    let launches = |pid: u64| events.iter().filter(|e| e["pid"] == pid && e["name"] == "launch").count();
    assert_eq!((traced["systems"][3]["system"].as_str(), &traced["chunk"]), (Some("anemll"), &64.into()));
    assert_eq!((launches(1), launches(4)), (0, 4 * 4));
    let joules = |key: &str| ours["energy_j"][key].as_f64().unwrap();
    assert!((joules("total") - joules("cpu") - joules("npu") - joules("memory")).abs() < 1e-12);
    assert!(ours["latency_s"].as_f64() < traced["systems"][2]["latency_s"].as_f64());
    // Shapes are those of ferris: 6 query and 2 key heads of 32 channels, 24 experts of 96, 192 wide.
    let module = Bundle::open(&case.path("out.moec")).unwrap().graph().unwrap();
    let model = Model::of(&module, "ferris", 4).unwrap();
    assert_eq!((model.hidden, model.head, model.layers.len()), (192, 192 * 2048, 4));
    for layer in &model.layers {
        assert_eq!((layer.attention, layer.per_position), (2 * 192 * 32 * (6 + 2), 6 * (32 + 32)));
        let experts = layer.experts.unwrap();
        assert_eq!((experts.count, experts.k, experts.size.weights), (24, 4, 3 * 192 * 96));
        assert_eq!((layer.router, layer.dense), (192 * 24, 0));
    }
    // Without a trace, the mean loads of the bundle's profile are used; longer runs take longer.
    let own = json(&[]);
    assert_eq!(own["loads"], "mean loads of the bundle's own profile");
    let seconds = |v: &Value| v["systems"][0]["latency_s"].as_f64().unwrap();
    assert!((seconds(&own) / seconds(&traced) - 1.0).abs() < 0.5);
    assert!(seconds(&json(&["--decode", "8", "--prompt", "128"])) < seconds(&own));
    assert!(seconds(&json(&["--decode", "8", "--prompt", "128"])) > seconds(&json(&["--prompt", "128"])));
    assert!(seconds(&json(&["--target", "m2-max"])) > seconds(&own));
}

/// The chunk that a build chooses by costs is explained, and the simulation of the bundle takes the same time.
#[test]
fn chosen_chunk_is_explained_and_simulated_alike() {
    let case = Case::new();
    let toml = case.path("model.toml");
    let text = fs::read_to_string(&toml).unwrap().replace("prefill_chunk = 64", "prefill_chunk = \"auto\"");
    for (prompt, tokens) in [(60, 64), (248, 256)] {
        fs::write(&toml, format!("{text}prompt = {prompt}\ngenerate = 8\n")).unwrap();
        let name = format!("{prompt}.moec");
        case.build(&toml, "m2-ultra", &name);
        let bundle = Bundle::open(&case.path(&name)).unwrap();
        let decisions = bundle.decisions().unwrap().decisions;
        let chosen = decisions.iter().find(|d| d.pass == "prefill_chunk").unwrap();
        assert_eq!((&*chosen.chosen, bundle.plan.placement.chunk), (&*tokens.to_string(), tokens));
        assert_eq!(chosen.alternatives.len(), 3, "64, 128 and 256 tokens: {chosen:?}");
        let explained = stdout(case.moec("explain").arg(case.path(&name)));
        assert!(explained.contains("tokens per prefill step"), "{explained}");
        let mut simulate = case.moec("simulate");
        simulate.arg(case.path(&name)).arg("--trace").arg(case.path("a.trace"));
        let prompt = prompt.to_string();
        let simulated = stdout(simulate.args(["--prompt", &prompt, "--decode", "8", "--json"]));
        let simulated: Value = serde_json::from_str(&simulated).unwrap();
        let seconds = simulated["systems"][0]["latency_s"].as_f64().unwrap();
        let ms = chosen.figure("request_ms").unwrap();
        assert!((seconds * 1e3 / ms - 1.0).abs() < 1e-9, "{seconds} s and {ms} ms");
    }
}

#[test]
fn impossible_simulations_are_reported() {
    let case = Case::new();
    fs::write(case.path("bad.trace"), "no trace").unwrap();
    let mut cut = fs::read(case.path("a.trace")).unwrap();
    cut.truncate(cut.len() / 2);
    fs::write(case.path("cut.trace"), cut).unwrap();
    let setup = Setup { format: "f16", chunk: 64, batch: &[1], context: 128 };
    let toml = setup.write(&checkpoint("qwen3_moe"), case.folder.path());
    case.build(&toml, "x86-64-v3", "dynamic.moec");
    for (more, expected, words) in [
        (&["--trace", "bad.trace"][..], 1, "cannot be used as a profile"),
        (&["--trace", "cut.trace"], 1, "cannot be used as a profile"),
        (&["--trace", "none.trace"], 1, "there is no profile"),
        (&["--target", "native"], 1, "has no neural processing unit"),
        (&["--target", "m2-ultar"], 2, "did you mean `m2-ultra`"),
        (&["--prompt", "300"], 2, "do not fit into a context of 256"),
        (&["--memory", "1 GiB"], 2, "`--memory` does not apply to this bundle"),
        (&["--batch", "2"], 2, "`--batch` does not apply to this bundle"),
    ] {
        let (code, stderr) = fails(&mut case.simulate(more));
        assert!(code == expected && stderr.contains(words), "{more:?}: {code} {stderr}");
    }
    let (code, stderr) = fails(case.moec("simulate").arg(case.path("dynamic.moec")));
    assert!(code == 1 && stderr.contains("which has no static graphs"), "{stderr}");
}

/// A machine with invented figures, and a link that a paged plan does not use.
fn machine(disk: f64) -> String {
    let source = "source = \"a test\"";
    format!(
        r#"name = "machine"
description = "a test"
backend = "cpu"
triple = "native"
cpu = "native"

[[unit]]
name = "cores"
kind = "cpu"
dispatch_cost_us = {{ value = 2, {source} }}
peak.f32 = {{ gops = 500, {source} }}

[[memory]]
name = "dram"
bandwidth = [{{ block_bytes = 64, gb_per_s = 20, {source} }}]

[[memory]]
name = "disk"
bandwidth = [
  {{ block_bytes = 4096, gb_per_s = 0.1, {source} }},
  {{ block_bytes = 262144, gb_per_s = {disk}, {source} }},
]

[[link]]
from = "dram"
to = "cores"
gb_per_s = 20
{source}
"#
    )
}

#[test]
fn experts_on_disk_are_simulated_by_the_runtime() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    let setup = Setup { format: "bf16", chunk: 32, batch: &[1], context: 256 };
    let toml = setup.write(&ferris(), folder.path());
    let run = |subcommand: &str| {
        let mut command = moec();
        command
            .env("MOEC_CACHE", cache(folder.path()))
            .env("MOEC_THREADS", "2")
            .arg(subcommand)
            .arg("--quiet");
        command
    };
    let args = ["--text", &calibration(), "--tokens", "1024", "--window", "128"];
    recorded(&toml, &args, &path("a.trace"));
    let text = fs::read_to_string(&toml).unwrap();
    let build = |name: &str, budget: &str| {
        let memory = format!("[memory]\nbudget = \"{budget}\"\nthreads = 2\npolicy = \"lfu bypass=1\"\n");
        fs::write(&toml, format!("{text}{memory}")).unwrap();
        let mut command = run("build");
        ok(command.arg(&toml).args(["--target", "native", "--no-run", "-o"]).arg(path(name)));
    };
    build("small", "25 MiB");
    build("large", "1 GiB");
    for (name, disk) in [("slow.toml", 0.5), ("fast.toml", 5.0)] {
        fs::write(path(name), machine(disk)).unwrap();
    }
    let simulate = |bundle: &str, device: &str, more: &[&str]| {
        let mut command = run("simulate");
        command.arg(path(bundle)).arg("--target").arg(path(device)).arg("--trace").arg(path("a.trace"));
        command
            .args(["--decode", "100"])
            .args(if more.contains(&"--prompt") { &[][..] } else { &["--prompt", "48"] })
            .args(more);
        command
    };
    let json = |bundle: &str, device: &str| -> Value {
        serde_json::from_str(&stdout(&mut simulate(bundle, device, &["--json"]))).unwrap()
    };
    let text = stdout(&mut simulate("small", "slow.toml", &["--timeline", path("t.json").to_str().unwrap()]));
    for words in [
        "machine: a prompt of 48 tokens in chunks of 32, then 100 decoded; routing: ",
        "all times are predictions",
        "0.5 GB/s in blocks of 262144 bytes",
        "500 GOP/s of f32",
        "a test",
    ] {
        assert!(text.contains(words), "`{words}` is not in: {text}");
    }
    // One queue for each unit and link of the device.
    let names = |v: &Value| -> Vec<String> {
        v["queues"].as_array().unwrap().iter().map(|q| q["queue"].as_str().unwrap().to_owned()).collect()
    };
    let (slow, fast, large) =
        (json("small", "slow.toml"), json("small", "fast.toml"), json("large", "slow.toml"));
    assert_eq!(names(&slow), ["cores", "dram → cores", "disk → cores"]);
    let trace: Value = serde_json::from_str(&fs::read_to_string(path("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let reads: Vec<(f64, f64)> = events
        .iter()
        .filter(|e| e["ph"] == "X" && e["tid"] == 3)
        .map(|e| (e["ts"].as_f64().unwrap(), e["dur"].as_f64().unwrap()))
        .collect();
    assert!(reads.len() > 10 && reads.windows(2).all(|w| w[0].0 + w[0].1 <= w[1].0 + 1e-3));
    let experts = |v: &Value, what: &str| v["experts"][what].as_u64().unwrap();
    let waiting = |v: &Value| v["waiting_s"]["decode"].as_f64().unwrap();
    // Every token uses four experts in each of four layers.
    for v in [&slow, &fast, &large] {
        assert!(experts(v, "hits") + experts(v, "misses") >= 100 * 16, "{v}");
        assert!(v["decode_s"].as_f64().unwrap() > waiting(v) && v["model"] == true);
    }
    assert!(experts(&slow, "misses") > 100 && experts(&slow, "streamed") > 0, "{slow}");
    assert!(waiting(&slow) > waiting(&fast), "{slow} {fast}");
    assert!(experts(&large, "misses") + experts(&large, "read_ahead") <= 96, "{large}");
    // Simulations are reproducible.
    assert_eq!(slow, json("small", "slow.toml"));

    let small = path("small");
    let mut without = run("simulate");
    without.arg(&small).arg("--target").arg(path("slow.toml"));
    let (code, stderr) = fails(&mut without);
    assert!(code == 1 && stderr.contains("recorded routing"), "{stderr}");
    let mut native = run("simulate");
    native.arg(&small).args(["--target", "native", "--trace"]).arg(path("a.trace"));
    let (code, stderr) = fails(&mut native);
    assert!(code == 1 && stderr.contains("does not say") && stderr.contains("profile-device"), "{stderr}");
    let (code, stderr) = fails(&mut simulate("small", "slow.toml", &["--prompt", "200"]));
    assert!(code == 2 && stderr.contains("do not fit into a context of 256"), "{stderr}");
}

/// ferris with ReLU gates for a phone; its experts are on the CPU, and its profile counts neurons.
fn relu_on_a_phone(folder: &std::path::Path) -> PathBuf {
    let source = ferris().parent().unwrap().join("ferris-relu");
    let setup = Setup { format: "f16", chunk: 64, batch: &[1], context: 256 };
    let toml = setup.write(&source, folder);
    let run = |command: &mut Command| {
        ok(command.env("MOEC_CACHE", cache(folder)).env("MOEC_THREADS", "1").arg("--quiet"));
    };
    let args = ["--text", &calibration(), "--tokens", "2048", "--window", "256"];
    recorded(&toml, &args, &folder.join("a.trace"));
    let text = fs::read_to_string(&toml).unwrap();
    let more = "[calibrate]\nprofile = \"a.trace\"\n[placement]\nattention = \"cpu\"\nexperts = \"cpu\"\n";
    fs::write(&toml, text + more).unwrap();
    let out = folder.join("phone.moec");
    run(moec().arg("build").arg(&toml).args(["--target", "snapdragon-8-gen-3", "--no-run", "-o"]).arg(&out));
    out
}

#[test]
fn a_phone_decodes_by_hot_and_cold_neurons() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = relu_on_a_phone(folder.path());
    let simulate = |more: &[&str]| {
        let mut command = moec();
        command.args(["simulate", "--quiet", "--trace", "a.trace"]).arg(&bundle).args(more);
        command.current_dir(folder.path());
        command
    };
    let json =
        |more: &[&str]| -> Value { serde_json::from_str(&stdout(simulate(more).arg("--json"))).unwrap() };
    let number = |v: &Value, key: &str| v[key].as_f64().unwrap();
    let neurons = |v: &Value, key: &str| v["neurons"][key].as_u64().unwrap();

    // With everything in memory, nothing is read. A batch activates more neurons.
    let one = json(&[]);
    let four = json(&["--batch", "4"]);
    assert_eq!((number(&one, "disk_bytes"), neurons(&one, "read")), (0.0, 0), "{one}");
    assert!(neurons(&four, "active") > neurons(&one, "active"), "{one} {four}");
    assert!(neurons(&one, "hot") <= neurons(&one, "active") && neurons(&one, "active") > 0);

    // There are 24 experts with 96 neurons in each of 4 layers. With room for a part of the neurons, some are
    // read, which takes time.
    let tight = json(&["--memory", "4608 KiB", "--timeline", "t.json"]);
    let bytes = number(&tight, "disk_bytes");
    assert!(bytes > 0.0 && number(&tight, "held") < 0.7, "{tight}");
    assert!((number(&tight, "disk_bytes_per_token") * number(&tight, "decode") / bytes - 1.0).abs() < 1e-9);
    assert!(number(&tight, "tokens_per_s") < number(&one, "tokens_per_s"), "{one} {tight}");
    assert!(number(&json(&["--memory", "3 MiB"]), "disk_bytes") > bytes);

    let trace: Value =
        serde_json::from_str(&fs::read_to_string(folder.path().join("t.json")).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let rows: Vec<&str> = events
        .iter()
        .filter(|e| e["name"] == "thread_name")
        .map(|e| e["args"]["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        rows,
        [
            "npu", "big 1", "middle 1", "middle 2", "middle 3", "middle 4", "middle 5", "disk", "little 1",
            "little 2"
        ]
    );
    let disk = |e: &&Value| e["tid"] == 8 && e["ph"] == "X";
    assert!(
        events.iter().filter(disk).count() > 0 && events.iter().filter(disk).all(|e| e["name"] == "read")
    );

    // The decisions are reported, for batches of one to four sequences.
    let explained = stdout(moec().arg("explain").arg(&bundle));
    assert!((1..=4).all(|n| explained.contains(&format!("hot neurons of batches of {n}"))), "{explained}");
    let (code, stderr) = fails(&mut simulate(&["--batch", "5"]));
    assert!(code == 2 && stderr.contains("no hot neurons for 5 sequences"), "{stderr}");
    let (code, stderr) = fails(&mut simulate(&["--prompt", "64"]));
    assert!(code == 2 && stderr.contains("`--prompt` does not apply to this bundle"), "{stderr}");
    let (code, stderr) = fails(&mut simulate(&["--memory", "much"]));
    assert!(code == 2 && stderr.contains("a size with a unit"), "{stderr}");
    let text = stdout(&mut simulate(&["--memory", "1 MiB"]));
    assert!(text.starts_with("snapdragon-8-gen-3: 16 tokens of each of 1 sequences"), "{text}");
    assert!(text.contains("tokens per second") && text.contains("disk per token"), "{text}");
}
