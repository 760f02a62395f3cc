//! AArch64: the nine families compiled for Neoverse V2, linked, and run as a user would. On other machines the
//! cross toolchain links them and an emulator runs them; where either is absent the tests are skipped by name.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stderr, reason = "a test fails by panicking")]

mod support;

use moec::bundle::toolchain::Toolchain;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{FAMILIES, Setup, checkpoint, clean, distance, expected, fails, list, logits_file, moec, ok};

const TARGET: &str = "neoverse-v2";
const TRIPLE: &str = "aarch64-unknown-linux-gnu";
/// Largest difference of any logit.
const TOLERANCE: f32 = 2e-3;

/// What starts AArch64 programs: nothing on such a machine, else an emulator. `None` says why a test is skipped.
fn emulator() -> Option<&'static [&'static str]> {
    let missing = match Toolchain::find(TRIPLE) {
        Ok(Toolchain { cross: None, .. }) => return Some(&[]),
        Ok(Toolchain { cross: Some(cross), .. }) if cross.emulated() => return Some(cross.emulator),
        Ok(Toolchain { cross: Some(cross), .. }) => {
            format!("there is no `{}`; install it with `{}`", cross.emulator[0], cross.install())
        }
        Err(missing) => format!("{missing}; install it with {}", missing.hint()),
    };
    eprintln!("skipped: AArch64 programs cannot be linked or run here: {missing}");
    None
}

/// `program`, started by `emulator`.
fn under(emulator: &[&str], program: &Path) -> Command {
    let mut words = emulator.iter().copied();
    match words.next() {
        None => clean(Command::new(program)),
        Some(first) => {
            let mut command = clean(Command::new(first));
            command.args(words).arg(program);
            command
        }
    }
}

/// Builds a bundle with its `run`.
fn build(source: &Path, setup: Setup<'_>, folder: &Path) -> PathBuf {
    let toml = setup.write(source, folder);
    let bundle = folder.join("b");
    ok(moec().arg("build").arg(&toml).args(["--target", TARGET, "--quiet", "-o"]).arg(&bundle));
    bundle
}

/// Logits and greedy tokens of `run`, with one thread and two, against what transformers computed.
fn compare(family: &str, format: &str, emulator: &[&str]) {
    let source = checkpoint(family);
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format, chunk: 20, batch: &[1], context: 96 };
    let run = build(&source, setup, folder.path()).join("run");
    let want = expected(&source);
    let prompt = want.greedy.len() - 24;
    for threads in ["1", "2"] {
        let what = format!("{family} in {format}, {threads} threads");
        let out = folder.path().join("logits.safetensors");
        ok(under(emulator, &run)
            .args(["logits", "--ids", &list(&want.ids), "--threads", threads, "--out"])
            .arg(&out));
        let (shape, logits) = logits_file(&out);
        assert_eq!(shape, [want.ids.len(), want.logits.len() / want.ids.len()], "{what}");
        let worst = distance(&logits, &want.logits);
        assert!(worst <= TOLERANCE, "{what}: a logit is off by {worst}");

        let ids = list(&want.greedy[..prompt]);
        let output = ok(under(emulator, &run).args([
            "generate",
            "--ids",
            &ids,
            "-n",
            "24",
            "--json",
            "--threads",
            threads,
        ]));
        let said: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let ids: Vec<u32> = serde_json::from_value(said["ids"].clone()).unwrap();
        assert_eq!(ids, want.greedy[prompt..], "{what}");
    }
}

#[test]
fn families_in_f32() {
    let Some(emulator) = emulator() else { return };
    FAMILIES.iter().for_each(|family| compare(family, "f32", emulator));
}

#[test]
fn families_in_bf16() {
    let Some(emulator) = emulator() else { return };
    FAMILIES.iter().for_each(|family| compare(family, "bf16", emulator));
}

#[test]
fn an_older_processor_is_refused_by_the_features_that_it_lacks() {
    let Some(emulator) = emulator() else { return };
    let [program, cpu, _] = emulator else {
        eprintln!("skipped: only an emulator has an older processor");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let setup = Setup { format: "bf16", chunk: 16, batch: &[1], context: 64 };
    let run = build(&checkpoint("olmoe"), setup, folder.path()).join("run");
    let (code, said) =
        fails(under(&[program, cpu, "cortex-a57"], &run).args(["generate", "--ids", "1,2", "-n", "1"]));
    assert_eq!(code, 1, "{said}");
    for feature in ["bf16", "dotprod", "fullfp16", "i8mm", "lse"] {
        assert!(said.contains(&format!("`{feature}`")), "`{feature}` is not in: {said}");
    }
    assert!(!said.contains("`neon`") && said.contains("hint:"), "{said}");
}
