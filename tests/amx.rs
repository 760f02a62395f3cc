//! A bundle for a CPU with AMX, built and run from a user's view, on real or emulated tiles.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]
#![allow(
    clippy::unnecessary_debug_formatting,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use crate::support;

use std::path::{Path, PathBuf};
use support::{Expected, checkpoint, distance, expected, fails, list, logits_file, moec, ok, runs_here};

const TARGET: &str = "sapphire-rapids";
/// Largest difference of any logit with exact activations, as on every target.
const EXACT: f32 = 2e-3;
/// Largest difference of any logit where weights and activations are rounded to bf16; the logits reach 4.
const ROUNDED: f32 = 5e-2;

fn build(folder: &Path, format: &str, activations: &str) -> PathBuf {
    let toml = folder.join(format!("{activations}.toml"));
    // 20 rows are one tile and a part of another; the prompt of 48 is not a multiple of it.
    let text = format!(
        "[model]\nsource = {:?}\n[shapes]\nmax_context = 96\nprefill_chunk = 20\n[weights]\nexperts = \"{format}\"\n\
         attention = \"{format}\"\nembeddings = \"{format}\"\nactivations = \"{activations}\"\n",
        checkpoint("olmoe")
    );
    std::fs::write(&toml, text).unwrap();
    let bundle = toml.with_extension("moec");
    ok(moec().arg("build").arg(&toml).args(["--target", TARGET, "--quiet", "--no-run", "-o"]).arg(&bundle));
    bundle
}

/// Logits of the reference's prompt with this bundle.
fn logits(bundle: &Path, want: &Expected, threads: &str) -> Vec<f32> {
    let out = bundle.join(format!("../logits-{threads}.safetensors"));
    let mut run = moec();
    run.arg("run").arg(bundle).args(["--emulate", "logits", "--ids", &list(&want.ids)]);
    let stderr = ok(run.args(["--threads", threads, "--out"]).arg(&out));
    let stderr = String::from_utf8_lossy(&stderr.stderr).into_owned();
    assert_eq!(stderr.contains("emulated"), !amx_here(), "{stderr}");
    logits_file(&out).1
}

fn amx_here() -> bool {
    std::fs::read_to_string("/proc/cpuinfo").is_ok_and(|info| info.contains("amx_bf16"))
}

#[test]
fn prefill_on_tiles() {
    if !runs_here("sapphire-rapids") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(folder.path(), "bf16", "auto");
    let plan = std::fs::read_to_string(bundle.join("plan.txt")).unwrap();
    assert!(plan.contains("_bf16_p32_as_bf16_"), "kernels multiply on tiles:\n{plan}");
    let want = expected(&checkpoint("olmoe"));
    let one = logits(&bundle, &want, "1");
    assert_eq!(one, logits(&bundle, &want, "2"), "results depend on the number of threads");
    // Rounding may send a token of this untrained model to another expert, which changes the rest of its row.
    let vocab = one.len() / want.ids.len();
    let rows = one.chunks(vocab).zip(want.logits.chunks(vocab));
    let near = rows.filter(|(a, b)| distance(a, b) <= ROUNDED).count();
    eprintln!("{near} of {} rows are within {ROUNDED}", want.ids.len());
    assert!(10 * near >= 9 * want.ids.len(), "only {near} of {} rows are within {ROUNDED}", want.ids.len());

    let mut verify = moec();
    ok(verify.arg("verify").arg(&bundle).arg("--quiet"));
    if !amx_here() {
        let (code, stderr) = fails(moec().arg("run").arg(&bundle).arg("info").args(["--nonsense"]));
        assert_eq!(code, 1, "{stderr}");
        assert!(stderr.contains("`amx-tile`") && stderr.contains("--emulate"), "{stderr}");
    }
}

#[test]
fn exact_activations_use_no_tiles() {
    if !runs_here("sapphire-rapids") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let bundle = build(folder.path(), "f32", "f32");
    let want = expected(&checkpoint("olmoe"));
    let worst = distance(&logits(&bundle, &want, "2"), &want.logits);
    assert!(worst <= EXACT, "a logit is off by {worst}");
}
