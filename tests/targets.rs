//! Every target compiles on any machine, and a machine that cannot run the bundle reports why.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_device::{BUILT_IN, CPU_BACKEND, Device};
use object::{Architecture, BinaryFormat, Object as _, ObjectSymbol as _};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{FAMILIES, Setup, checkpoint, clean, fails, moec, ok, tree};

const SETUP: Setup<'_> = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 };

/// Builds a family for a target; returns the bundle and stderr.
fn build(family: &str, target: &str, folder: &Path, more: &[&str]) -> (PathBuf, String) {
    let toml = SETUP.write(&checkpoint(family), folder);
    let bundle = folder.join(format!("{family}.moec"));
    let mut command = moec();
    command.arg("build").arg(&toml).args(["--quiet", "--target", target]).args(more).arg("-o").arg(&bundle);
    let output = ok(&mut command);
    (bundle, String::from_utf8_lossy(&output.stderr).into_owned())
}

/// Every other family for each target, alternating between targets.
#[test]
fn every_target_compiles_families_here() {
    for (t, (target, _)) in BUILT_IN.iter().enumerate() {
        let device = Device::find(target).unwrap();
        if device.is_native() || device.units.iter().any(|u| device.backend_of(u) != CPU_BACKEND) {
            continue;
        }
        let architecture = match device.triple.split('-').next().unwrap() {
            "x86_64" => Architecture::X86_64,
            "aarch64" | "arm64" => Architecture::Aarch64,
            other => panic!("{other}"),
        };
        let apple = device.triple.contains("macos");
        for family in FAMILIES.into_iter().skip(t % 2).step_by(2) {
            let folder = tempfile::tempdir().unwrap();
            let (bundle, _) = build(family, target, folder.path(), &["--no-run"]);
            let bytes = fs::read(bundle.join("artifacts/kernels.o")).unwrap();
            let file = object::File::parse(&*bytes).unwrap();
            let format = if apple { BinaryFormat::MachO } else { BinaryFormat::Elf };
            assert_eq!((file.format(), file.architecture()), (format, architecture), "{family} for {target}");
            let defined: BTreeSet<&str> = file
                .symbols()
                .filter(|s| s.is_definition() && s.is_global())
                .map(|s| s.name().unwrap())
                // Apple's linker requires an underscore before C's names.
                .map(|s| if apple { s.strip_prefix('_').unwrap() } else { s })
                .collect();
            let plan = fs::read(bundle.join("plan.bin")).unwrap();
            let plan = moec_ir::plan::Plan::decode(&plan).unwrap();
            assert!(!plan.kernels.is_empty());
            for kernel in &plan.kernels {
                assert!(defined.contains(kernel.symbol.as_str()), "{} for {target}", kernel.symbol);
            }
            assert!(!bundle.join("run").exists());
        }
    }
}

/// A target for this kind of machine, with features that no CPU has together.
fn impossible(folder: &Path) -> PathBuf {
    let features = match std::env::consts::ARCH {
        "x86_64" => r#""avx2", "fma", "tbm", "avx512f", "amx-complex""#,
        _ => r#""neon", "sve2-bitperm", "sve2", "sve", "jsconv", "sha3", "bti""#,
    };
    let system = if cfg!(target_os = "macos") { "apple-macosx14.0.0" } else { "unknown-linux-gnu" };
    let path = folder.join("impossible.toml");
    let text = format!(
        "name = \"impossible\"\ndescription = \"none\"\nfamily = \"cpu\"\ntriple = \"{}-{system}\"\ncpu = \
         \"generic\"\nfeatures = [{features}]\n",
        std::env::consts::ARCH
    );
    fs::write(&path, text).unwrap();
    path
}

/// `--gpu-experts` is checked against the target before the model is read.
#[test]
fn gpu_experts_require_a_gpu_with_known_costs() {
    let folder = tempfile::tempdir().unwrap();
    let toml = SETUP.write(&folder.path().join("no-checkpoint"), folder.path());
    let text = fs::read_to_string(support::root().join("targets/cuda/cuda.toml")).unwrap();
    let (before, rest) = text.split_once("matmul = [").unwrap();
    let device = folder.path().join("silent.toml");
    fs::write(&device, format!("{before}{}", rest.split_once("]\n").unwrap().1)).unwrap();
    for (target, expected) in [
        ("native", vec!["`--gpu-experts` requires a GPU", "`moec targets`"]),
        (
            device.to_str().unwrap(),
            vec![
                "`--gpu-experts 50%` cannot be used with",
                "no measured expert costs of `cpu`",
                "moec profile-device",
                "leave `--gpu-experts` out",
            ],
        ),
    ] {
        let (code, stderr) =
            fails(moec().arg("build").arg(&toml).args(["--target", target, "--gpu-experts", "50%"]));
        assert_eq!(code, 2, "{stderr}");
        assert!(expected.iter().all(|part| stderr.contains(part)), "{stderr}");
    }
}

/// Commands for a bundle's `run` and for `moec run`.
fn both(bundle: &Path) -> [Command; 2] {
    let mut through_moec = moec();
    through_moec.arg("run").arg(bundle);
    [clean(Command::new(bundle.join("run"))), through_moec]
}

#[test]
#[cfg(target_arch = "x86_64")]
fn a_cpu_without_the_features_is_refused_by_their_names() {
    let folder = tempfile::tempdir().unwrap();
    let device = impossible(folder.path());
    for target in ["sapphire-rapids", device.to_str().unwrap()] {
        let features = Device::find(target).unwrap().features;
        let features: Vec<&str> = features.iter().map(String::as_str).collect();
        let lacking = moec_runtime::platform::cpu::missing(&features);
        if lacking.is_empty() {
            assert_eq!(target, "sapphire-rapids", "no CPU has these features");
            continue;
        }
        let (bundle, _) = build("olmoe", target, folder.path(), &[]);
        let before = tree(&bundle);
        for mut run in both(&bundle) {
            let (code, stderr) = fails(run.args(["generate", "--ids", "1,2", "-n", "1"]));
            assert_eq!(code, 1, "{stderr}");
            for feature in &lacking {
                assert!(stderr.contains(&format!("`{feature}`")), "`{feature}` is not in: {stderr}");
            }
            assert!(stderr.contains("hint:") && !stderr.contains("`sse3`"), "{stderr}");
        }
        assert_eq!(before, tree(&bundle));
    }
}

#[test]
fn a_bundle_for_another_architecture_or_system_is_refused() {
    let arm = cfg!(target_arch = "aarch64");
    let others = ["apple-m2", if arm { "x86-64-v3" } else { "neoverse-v2" }];
    for target in others.into_iter().filter(|t| !Device::find(t).unwrap().is_host()) {
        let folder = tempfile::tempdir().unwrap();
        let (bundle, _) = build("olmoe", target, folder.path(), &["--no-run"]);
        let triple = Device::find(target).unwrap().triple;
        let (code, stderr) =
            fails(moec().arg("run").arg(&bundle).args(["generate", "--ids", "1,2", "-n", "1"]));
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains(&triple) && stderr.contains(std::env::consts::ARCH), "{stderr}");
        assert!(stderr.contains("hint:"), "{stderr}");
    }
}

/// A bundle for another machine without packages is compiled for this one from its own Graph and weights.
#[test]
fn a_bundle_for_another_machine_is_checked_by_its_host_build() {
    let arm = cfg!(target_arch = "aarch64");
    let others = ["apple-m2", if arm { "x86-64-v3" } else { "neoverse-v2" }];
    let generate = ["generate", "--ids", "1,2,3", "-n", "8", "--json"];
    let ids = |run: &mut Command| -> serde_json::Value {
        let generated: serde_json::Value = serde_json::from_slice(&ok(run.args(generate)).stdout).unwrap();
        generated["ids"].clone()
    };
    let folder = tempfile::tempdir().unwrap();
    let (native, _) = build("olmoe", "native", folder.path(), &["--no-run"]);
    let want = ids(moec().arg("run").arg(&native));
    for target in others.into_iter().filter(|t| !Device::find(t).unwrap().is_host()) {
        let folder = tempfile::tempdir().unwrap();
        let (bundle, _) = build("olmoe", target, folder.path(), &["--no-run"]);
        let triple = Device::find(target).unwrap().triple;
        assert_eq!(ids(moec().args(["run", "--emulate"]).arg(&bundle)), want, "{target}");
        let out = ok(moec().arg("verify").arg(&bundle).arg("--json")).stdout;
        let report: serde_json::Value = serde_json::from_slice(&out).unwrap();
        assert_eq!((&report["verdict"], report["entries"].as_array().unwrap().len()), (&"right".into(), 2));
        let note = report["unverified"][0].as_str().unwrap();
        assert!(note.contains(&triple) && note.contains("compiled for this machine"), "{note}");
    }
}

#[test]
fn bundle_for_a_mac_is_evaluated_on_any_machine() {
    let folder = tempfile::tempdir().unwrap();
    let toml = SETUP.write(&support::ferris(), folder.path());
    let text = "The borrow checker reads what was lent, and says so at once. ".repeat(20);
    fs::write(folder.path().join("text"), text).unwrap();
    let config = fs::read_to_string(&toml).unwrap();
    fs::write(&toml, config + "[calibrate]\ntext = [\"text\"]\ntokens = 256\n").unwrap();
    let perplexity = |target: &str| {
        let bundle = folder.path().join(target);
        let mut build = moec();
        ok(build
            .arg("build")
            .arg(&toml)
            .args(["--quiet", "--no-run", "--target", target, "-o"])
            .arg(&bundle));
        let mut eval = moec();
        let out = ok(eval
            .args(["eval", "--emulate", "--json", "--text"])
            .arg(folder.path().join("text"))
            .arg(&bundle));
        let found: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
        found["perplexity"].as_f64().unwrap()
    };
    let native = perplexity("native");
    // By default, a build of so small a model has nothing on the Neural Engine.
    for mac in ["apple-m2", "m2-ultra"] {
        let found = perplexity(mac);
        assert!((found / native - 1.0).abs() < 1e-3, "{mac}: {found} {native}");
        let files = fs::read_dir(folder.path().join(mac).join("artifacts")).unwrap();
        let packages =
            files.filter(|f| f.as_ref().unwrap().path().extension().is_some_and(|e| e == "mlpackage"));
        assert_eq!(packages.count(), 0, "{mac}");
    }
}

#[test]
#[cfg(not(target_os = "macos"))]
fn bundle_for_a_mac_has_its_code_and_a_link_script() {
    let folder = tempfile::tempdir().unwrap();
    let (bundle, stderr) = build("olmoe", "apple-m2", folder.path(), &[]);
    assert!(!bundle.join("run").exists() && bundle.join("runner/src/main.rs").exists());
    assert!(stderr.contains("arm64-apple-macosx14.0.0") && stderr.contains("sh runner/build.sh"), "{stderr}");
    let script = fs::read_to_string(bundle.join("runner/build.sh")).unwrap();
    assert!(script.contains("MACOSX_DEPLOYMENT_TARGET=14.0\n") && !script.contains('@'), "{script}");
}

/// Formats for a checkpoint's codes exist on the CPU and the GPU only; static graphs have formats of their
/// own.
#[test]
fn checkpoint_code_formats_are_refused_for_static_graphs() {
    let folder = tempfile::tempdir().unwrap();
    for (format, target) in [("q8h", "m2-max"), ("q4h", "snapdragon-8-gen-3"), ("mxfp4", "m2-max")] {
        let toml = Setup { format, ..SETUP }.write(&checkpoint("olmoe"), folder.path());
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--quiet", "--no-run", "--target", target, "-o"]);
        let (_, stderr) = fails(build.arg(folder.path().join("b")));
        let why = format!("cannot be {format} on a target with static graphs, which `npu` has");
        assert!(stderr.contains(&why) && stderr.contains("hint: "), "{stderr}");
        assert!(!folder.path().join("b").exists());
    }
}
