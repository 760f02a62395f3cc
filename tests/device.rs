//! Bundles for users' device files contain the device's description.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_bundle::manifest::{Manifest, entry};
use moec_bundle::read::Bundle;
use moec_device::Device;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{Setup, cache, checkpoint, coreml, expected, fails, list, logits_file, moec, ok, with_words};
use tempfile::TempDir;

/// A tiny checkpoint with a tokenizer, the words `w0` … `w319`, and a text.
struct Case {
    folder: TempDir,
    toml: PathBuf,
}

impl Case {
    fn new(family: &str, more: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("hf");
        with_words(family, &source);
        let words: Vec<String> = (0..400_u64).map(|i| format!("w{}", i * i * 7 % 320)).collect();
        fs::write(folder.path().join("text.txt"), words.join(" ")).unwrap();
        let setup = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 };
        let toml = setup.write(&source, folder.path());
        let text = fs::read_to_string(&toml).unwrap();
        fs::write(&toml, format!("{text}[calibrate]\ntext = [\"text.txt\"]\n{more}")).unwrap();
        Self { folder, toml }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn moec(&self) -> Command {
        let mut command = moec();
        command.env("MOEC_CACHE", cache(self.folder.path())).env("MOEC_THREADS", "1").arg("--quiet");
        command
    }

    /// A built-in device file with another name and these changes.
    fn device(&self, of: &str, name: &str, changes: &[(&str, &str)]) -> PathBuf {
        let text = fs::read_to_string(support::root().join(format!("targets/devices/{of}.toml"))).unwrap();
        let named = format!("name = \"{of}\"");
        let mut text = text.replacen(&named, &format!("name = \"{name}\""), 1);
        for (old, new) in changes {
            assert!(text.contains(old), "{old}");
            text = text.replace(old, new);
        }
        let path = self.path("device.toml");
        fs::write(&path, text).unwrap();
        path
    }

    fn build(&self, device: &Path) -> Command {
        let mut command = self.moec();
        command.arg("build").arg(&self.toml).args(["--no-run", "--target"]).arg(device);
        command.arg("-o").arg(self.path("out.moec"));
        command
    }

    /// Every subcommand that opens a bundle can open this one.
    fn opens(&self, subcommands: &[&[&str]]) -> Vec<Value> {
        let run = |subcommand: &&[&str]| {
            let mut command = self.moec();
            command.arg(subcommand[0]).arg(self.path("out.moec")).args(&subcommand[1..]).arg("--json");
            serde_json::from_slice(&ok(&mut command).stdout).unwrap()
        };
        subcommands.iter().map(run).collect()
    }
}

#[test]
fn bundle_of_a_deleted_device_file_can_be_opened() {
    let case = Case::new("olmoe", "");
    let device = case.device("x86-64-v3", "my-server", &[]);
    let device_used = Device::find(device.to_str().unwrap()).unwrap();
    ok(&mut case.build(&device));
    fs::remove_file(&device).unwrap();
    let bundle = Bundle::open(&case.path("out.moec")).unwrap();
    assert!(bundle.manifest.files.contains_key("device.toml"));
    assert_eq!(bundle.device().unwrap(), device_used);
    if support::runs_here("x86-64-v3") {
        let text = case.path("text.txt");
        let text = text.to_str().unwrap();
        case.opens(&[&["inspect"], &["explain"], &["verify"], &["eval", "--text", text, "--window", "32"]]);
    }
}

/// `m2-ultra` with a limit of 36 000 bytes per graph: heads are split, and everything is executed.
#[test]
fn custom_device_with_split_heads_is_executed() {
    let Some(found) = coreml() else { return };
    let case = Case::new("olmoe", "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n");
    let limit = ("max_graph_bytes = { value = 1258291200", "max_graph_bytes = { value = 36000");
    let device = case.device("m2-ultra", "my-mac", &[limit]);
    ok(case.build(&device).envs(found));
    fs::write(&device, "name = \"another\"").unwrap();
    let text = case.path("text.txt");
    let text = text.to_str().unwrap();
    let source = case.path("hf");
    let reports = case.opens(&[
        &["verify", "--source", source.to_str().unwrap()],
        &["inspect"],
        &["explain"],
        &["simulate"],
        &["eval", "--text", text, "--window", "32", "--windows", "2"],
    ]);
    let packages = reports[0]["packages"].to_string();
    assert!(packages.contains("head.0") && packages.contains("head.1"), "{}", reports[0]);
    assert_eq!(reports[2]["target"], "my-mac");
    // Prompt and decoding give transformers' results, up to f16.
    let want = expected(&checkpoint("olmoe"));
    let out = case.path("logits.safetensors");
    let run = || {
        let mut command = case.moec();
        command.args(["run", "--emulate"]).arg(case.path("out.moec"));
        command
    };
    ok(run().args(["logits", "--ids", &list(&want.ids), "--out"]).arg(&out));
    let (_, logits) = logits_file(&out);
    assert_eq!(logits.len(), want.logits.len());
    let spread: f64 = want.logits.iter().map(|&x| f64::from(x).powi(2)).sum();
    let off: f64 = logits.iter().zip(&want.logits).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    let relative = (off / spread).sqrt();
    assert!(relative > 0.0 && relative < 2e-2, "{relative}");
    let (prompt, _) = want.greedy.split_at(want.greedy.len() - 24);
    let stdout = ok(run().args(["generate", "--ids", &list(prompt), "-n", "8", "--json"])).stdout;
    let report: Value = serde_json::from_slice(&stdout).unwrap();
    let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
    assert_eq!(ids[..8], want.greedy[prompt.len()..][..8]);
}

/// The description in a bundle is untrusted, even if its hash is in the manifest.
#[test]
fn a_bad_description_in_a_bundle_is_an_error() {
    let case = Case::new("olmoe", "");
    let device = case.device("x86-64-v3", "my-server", &[]);
    ok(&mut case.build(&device));
    let bundle = case.path("out.moec");
    let (path, manifest) = (bundle.join("device.toml"), bundle.join("manifest.json"));
    let good = fs::read(&path).unwrap();
    let text = String::from_utf8(good.clone()).unwrap();
    let entries = Manifest::read(&bundle).unwrap();
    let mac = fs::read(support::root().join("targets/devices/m2-ultra.toml")).unwrap();
    let cases: [(&str, Option<Vec<u8>>); 7] = [
        ("nothing", Some(Vec::new())),
        ("no text", Some(vec![0xff; 64])),
        ("of another type", Some(text.replace("name = \"my-server\"", "name = 1").into_bytes())),
        ("of another name", Some(text.replace("name = \"my-server\"", "name = \"other\"").into_bytes())),
        ("another device", Some(mac)),
        ("endless", Some([good, vec![b'#'; 2 << 20]].concat())),
        ("not listed", None),
    ];
    let mut messages = BTreeSet::new();
    for (what, bytes) in cases {
        let mut changed = entries.clone();
        match bytes {
            Some(bytes) => {
                fs::write(&path, bytes).unwrap();
                changed.files.insert("device.toml".into(), entry(&path).unwrap());
            }
            None => drop(changed.files.remove("device.toml")),
        }
        fs::write(&manifest, serde_json::to_string(&changed).unwrap()).unwrap();
        let (code, text) = fails(case.moec().arg("verify").arg(&bundle));
        assert!(code == 1 && text.contains("device.toml"), "{what}: {text}");
        assert!(text.contains("hint: ") && !text.contains("panicked"), "{what}: {text}");
        messages.insert(text.lines().next().unwrap().to_owned());
    }
    assert!(messages.len() >= 5, "{messages:?}");
}
