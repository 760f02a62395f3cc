//! Bundles for phones: groups of experts become quantised networks that verify, with the CPU's results.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test fails by panicking, and says what it measured"
)]

#[path = "qnn/attention.rs"]
mod attention;
#[path = "qnn/decode.rs"]
mod decode;
#[path = "qnn/hot.rs"]
mod hot;
#[path = "qnn/library.rs"]
mod library;
#[path = "qnn/limits.rs"]
mod limits;
#[path = "qnn/phone.rs"]
mod phone;
#[path = "qnn/regions.rs"]
mod regions;
#[path = "qnn/sizes.rs"]
mod sizes;
use crate::support;

use moec_base::hashing::{hex, sha256};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, cache, calibration, checkpoint, expected, fails, ferris, moec, ok, recorded};

const PHONE: &str = "snapdragon-8-gen-3";

/// The phone's device file without the costs of launches and contexts, which the networks of the tests' small
/// models would never pay for.
fn without_costs() -> String {
    let device = String::from_utf8(ok(moec().args(["targets", PHONE])).stdout).unwrap();
    let costs = |line: &&str| line.starts_with("dispatch_cost_us") || line.starts_with("context_cost_us");
    assert_eq!(device.lines().filter(costs).count(), 2, "{device}");
    device.lines().filter(|line| !costs(line)).flat_map(|line| [line, "\n"]).collect()
}

struct Case {
    folder: tempfile::TempDir,
    toml: PathBuf,
}

impl Case {
    fn new() -> Self {
        Self::of("ferris", 64, "")
    }

    /// A model of `golden/models` with prompts in chunks of `chunk`, and more keys.
    fn of(model: &str, chunk: usize, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f16", chunk, batch: &[1], context: 256 };
        let toml = setup.write(&ferris().with_file_name(model), folder.path());
        let case = Self { folder, toml };
        let args = ["--text", &calibration(), "--tokens", "1024", "--window", "256"];
        recorded(&case.toml, &args, &case.path("a.trace"));
        let text = fs::read_to_string(&case.toml).unwrap();
        let keys = "[calibrate]\nprofile = \"a.trace\"\n[placement]\nexperts = \"npu\"\n";
        fs::write(&case.toml, text + keys + more).unwrap();
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

    fn build(&self, target: &str, out: &str) {
        let mut command = self.moec("build");
        command.arg(&self.toml).args(["--target", target, "--no-run", "-o"]).arg(self.path(out));
        ok(&mut command);
    }

    /// See [`forge`].
    fn forge(&self, bundle: &str, file: &str, bytes: &[u8]) {
        forge(&self.path(bundle), file, bytes);
    }

    fn json(&self, subcommand: &str, more: &[&str]) -> Value {
        let mut command = self.moec(subcommand);
        command.arg(self.path("a.moec")).args(more).arg("--json");
        serde_json::from_slice(&ok(&mut command).stdout).unwrap()
    }
}

/// A bundle of a tiny checkpoint, in which the CPU's weights are f16.
struct Tiny {
    folder: tempfile::TempDir,
    model: String,
    tools: Vec<(&'static str, PathBuf)>,
}

impl Tiny {
    /// Builds a bundle without tools, for these decode batches, with additions to `model.toml`.
    fn new(model: &str, batch: &[usize], more: &str) -> Self {
        Self::with(model, batch, more, Vec::new())
    }

    /// Like [`Self::new`], with tools, given by environment variables.
    fn with(model: &str, batch: &[usize], more: &str, tools: Vec<(&'static str, PathBuf)>) -> Self {
        let built = Self::calibrated(model, batch, more, tools);
        let device = built.at("phone.toml");
        fs::write(&device, without_costs()).unwrap();
        ok(&mut built.build(device));
        built
    }

    /// Like [`Self::with`], without building the bundle.
    fn calibrated(model: &str, batch: &[usize], more: &str, tools: Vec<(&'static str, PathBuf)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let setup = Setup { format: "f16", chunk: 16, batch, context: 64 };
        let toml = setup.write(&checkpoint(model), folder.path());
        let made = Self { folder, model: model.to_owned(), tools };
        let ids: Vec<String> = expected(&checkpoint(model)).ids.iter().map(ToString::to_string).collect();
        fs::write(made.at("ids"), ids.join(" ")).unwrap();
        let mut calibrate = made.moec("calibrate");
        ok(calibrate.arg(&toml).arg("--ids").arg(made.at("ids")).arg("-o").arg(made.at("a.trace")));
        let text = fs::read_to_string(&toml).unwrap() + "[calibrate]\nprofile = \"a.trace\"\n" + more;
        fs::write(&toml, text).unwrap();
        made
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Builds the bundle for a target.
    fn build(&self, target: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut build = self.moec("build");
        build
            .arg(self.at("model.toml"))
            .arg("--target")
            .arg(target)
            .args(["--no-run", "-o"])
            .arg(self.bundle());
        build
    }

    fn bundle(&self) -> PathBuf {
        self.at("a.moec")
    }

    fn moec(&self, subcommand: &str) -> Command {
        let mut command = moec();
        command.env("MOEC_CACHE", cache(self.folder.path())).env("MOEC_THREADS", "1");
        command.envs(self.tools.iter().map(|(name, value)| (name, value))).arg(subcommand).arg("--quiet");
        command
    }

    /// Output of `moec verify`, with the checkpoint as the reference.
    fn verify(&self) -> Value {
        let mut verify = self.moec("verify");
        verify.arg(self.bundle()).arg("--source").arg(checkpoint(&self.model)).arg("--json");
        serde_json::from_slice(&ok(&mut verify).stdout).unwrap()
    }
}

/// Replaces a file of a bundle, as an attacker with write access would: its hash is updated.
fn forge(bundle: &Path, file: &str, bytes: &[u8]) {
    fs::write(bundle.join(file), bytes).unwrap();
    let path = bundle.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["files"][file] = json!({"bytes": bytes.len(), "sha256": hex(&sha256(bytes))});
    fs::write(path, manifest.to_string()).unwrap();
}

/// Files below a folder with their bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in folder.read_dir().unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(
                files(&path).into_iter().map(|(p, b)| (Path::new(path.file_name().unwrap()).join(p), b)),
            );
        } else {
            all.insert(path.file_name().unwrap().into(), fs::read(&path).unwrap());
        }
    }
    all
}

#[test]
fn groups_of_experts_become_networks_that_verify() {
    let case = Case::new();
    case.build(PHONE, "a.moec");
    let report = case.json("verify", &[]);
    let functions = report["packages"].as_array().unwrap();
    let packages: BTreeMap<&str, u64> =
        functions.iter().map(|f| (f["package"].as_str().unwrap(), f["experts"].as_u64().unwrap())).collect();
    assert_eq!(packages.values().sum::<u64>(), 4 * 24, "{report}");
    assert_eq!(packages.get("artifacts/head.qnn"), Some(&0), "{report}");
    for f in functions {
        let error = f["error"]["relative"].as_f64().unwrap();
        assert!(error > 0.0 && error < 0.03, "{f}");
        assert_eq!((&f["refused"], f["findings"].as_array().unwrap().len()), (&false.into(), 0), "{f}");
    }

    // Two builds give the same bytes.
    case.build(PHONE, "b.moec");
    let [a, b] = ["a.moec", "b.moec"].map(|name| files(&case.path(name).join("artifacts")));
    assert!(a.len() >= 3 * packages.len());
    assert!(a == b, "two builds differ");

    // The perplexity is about that of this machine's CPU.
    let eval = |more: &[&str]| {
        let text = ferris().join("eval/text.txt");
        let given = [&["--text", text.to_str().unwrap(), "--windows", "1", "--window", "100"], more].concat();
        case.json("eval", &given)["perplexity"].as_f64().unwrap()
    };
    let phone = eval(&[]);
    fs::remove_dir_all(case.path("a.moec")).unwrap();
    let text = fs::read_to_string(&case.toml).unwrap();
    fs::write(&case.toml, text.replace("experts = \"npu\"", "experts = \"cpu\"")).unwrap();
    case.build("native", "a.moec");
    let cpu = eval(&[]);
    assert!((phone / cpu - 1.0).abs() < 0.02, "{phone} and {cpu}");

    // A changed network is refused before anything runs.
    let (name, _) = packages.first_key_value().unwrap();
    let weights = case.path("b.moec").join(name).join("weights.bin");
    let mut bytes = fs::read(&weights).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x40;
    fs::write(&weights, bytes).unwrap();
    let (code, stderr) = fails(case.moec("verify").arg(case.path("b.moec")));
    assert!(code == 1 && stderr.contains("weights.bin") && stderr.contains("changed"), "{stderr}");
}

/// Parts other than experts, of models of every shape: dense networks, shared experts, the head.
#[test]
fn every_stateless_part_becomes_networks_that_verify() {
    let models: [(&str, &[&str]); 6] = [
        ("bamboo", &["head", "layers.0.ffn", "layers.1.ffn"]),
        ("deepseek_v2", &["head", "layers.0.ffn", "layers.1.shared"]),
        ("glm4_moe", &["head", "layers.0.ffn", "layers.1.shared"]),
        ("mixtral", &["head"]),
        ("prosparse", &["head", "layers.0.ffn", "layers.1.ffn"]),
        ("qwen2_moe", &["head", "layers.0.shared"]),
    ];
    for (model, network_parts) in models {
        let built = Tiny::new(model, &[1, 2], "");
        // Weights that only the unit has are in no segment, so the reference is the checkpoint.
        if model == "bamboo" {
            let (code, stderr) = fails(built.moec("verify").arg(built.bundle()));
            let expected =
                ["a.moec` does not contain all weights", "in a package of another unit", "--source"];
            assert!(code == 1 && expected.iter().all(|words| stderr.contains(words)), "{stderr}");
        }
        let report = built.verify();
        let functions = report["packages"].as_array().unwrap();
        let parts = functions.iter().filter(|f| f["experts"] == 0);
        let mut found: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for f in parts {
            let error = f["error"]["relative"].as_f64().unwrap();
            assert!(error > 0.0 && error < 0.02 && f["refused"] == false, "{model}: {f}");
            let name = f["package"].as_str().unwrap();
            let name = name.strip_prefix("artifacts/").and_then(|n| n.strip_suffix(".qnn")).unwrap();
            found.entry(name).or_default().push(f["function"].as_str().unwrap());
        }
        for name in network_parts {
            let functions = found.get(name).unwrap_or_else(|| panic!("{model} has no `{name}`: {found:?}"));
            assert_eq!(functions.len(), 3, "{model}: {found:?}");
        }
        assert!(found.keys().all(|name| !name.contains("attn")), "{model}: {found:?}");
    }
}
