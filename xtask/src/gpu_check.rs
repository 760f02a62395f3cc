//! `cargo xtask gpu-check`: bundles on a graphics processor of NVIDIA's that is there.
//!
//! The tests that execute a bundle's PTX on the host run once more, with the card in the place of the
//! emulator: logits and tokens are held against the same references. What was found goes into a report beside the build.

use crate::setup;
use crate::shell::{Failed, cargo, output, program, shown, stage, target_dir};
use std::fs;
use std::process::Stdio;

/// What has the tests use the card (`tests/cuda.rs`).
const ON_CARD: (&str, &str) = ("MOEC_CUDA", "card");
/// What tests that execute bundles are called.
const TESTS: &str = "on_threads";

/// Runs them, and writes `gpu-check.txt`.
pub(crate) fn run() -> Result<(), Failed> {
    let cards = output(
        program("nvidia-smi").args(["--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]),
    )
    .filter(|cards| !cards.is_empty());
    let Some(cards) = cards else {
        return Err(Failed::new("there is no graphics processor of NVIDIA's here: `nvidia-smi` finds none")
            .hint("run this on a machine with one and NVIDIA's driver; `cargo test -p moec --test cuda` executes the same bundles on the host"));
    };
    cards.lines().for_each(|card| stage("Found", card));
    let llvm = setup::run()?;
    let mut tests = cargo("test", Some(&llvm));
    tests.args(["--package", "moec", "--test", "cuda", "--", "--nocapture", TESTS]);
    tests.env(ON_CARD.0, ON_CARD.1).stdin(Stdio::null()).stderr(Stdio::inherit());
    let shown = shown(&tests);
    let done = tests.output().map_err(|e| Failed::new(format!("`{shown}` does not start: {e}")))?;
    let said = String::from_utf8_lossy(&done.stdout);
    let verdict = if done.status.success() { "passed" } else { "failed" };
    let report = target_dir().join("gpu-check.txt");
    let text = format!("{cards}\n{}={} {shown}: {verdict}\n\n{said}", ON_CARD.0, ON_CARD.1);
    fs::write(&report, text)
        .map_err(|e| Failed::new(format!("`{}` cannot be written: {e}", report.display())))?;
    stage("Wrote", &report.display().to_string());
    if done.status.success() {
        return Ok(());
    }
    Err(Failed::new("a bundle does not compute on the card what it should")
        .hint(format!("`{}` says which, and by how much", report.display())))
}
