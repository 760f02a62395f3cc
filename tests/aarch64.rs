//! AArch64: every family is compiled for Neoverse V2, linked, and run from a user's view. On other machines
//! this takes the cross toolchain and an emulator; without them the tests are skipped.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unnecessary_debug_formatting,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking"
)]

use crate::support;

use moec_bundle::read::Bundle;
use moec_bundle::toolchain::Toolchain;
use moec_testing::AARCH64;
use std::path::{Path, PathBuf};
use std::process::Command;
use support::{
    FAMILIES, checkpoint, clean, distance, expected, fails, families, list, logits_file, moec, ok,
};

const TARGET: &str = "neoverse-v2";
const TRIPLE: &str = "aarch64-unknown-linux-gnu";
/// Command that starts AArch64 programs: empty on an AArch64 machine, otherwise the emulator.
fn emulator() -> Option<&'static [&'static str]> {
    AARCH64.ok_or_skip(match Toolchain::find(TRIPLE) {
        Ok(Toolchain { cross: None, .. }) => Ok(&[]),
        Ok(Toolchain { cross: Some(cross), .. }) if cross.emulated() => Ok(cross.emulator),
        Ok(Toolchain { cross: Some(cross), .. }) => Err(format!("there is no `{}`", cross.emulator[0])),
        Err(missing) => Err(missing.to_string()),
    })
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

/// `model.toml` of the tests: one format of weights, one format of rows.
fn settings(source: &Path, format: &str, activations: &str, folder: &Path) -> PathBuf {
    let path = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = {source:?}\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1]\n\
         [weights]\nexperts = \"{format}\"\nattention = \"{format}\"\nembeddings = \"{}\"\n\
         activations = \"{activations}\"\n[memory]\nkv_cache = \"f32\"\n",
        support::table_format(format)
    );
    std::fs::write(&path, text).unwrap();
    path
}

/// Builds a bundle with its `run`.
fn build(family: &str, format: &str, activations: &str, folder: &Path) -> PathBuf {
    let toml = settings(&checkpoint(family), format, activations, folder);
    let bundle = folder.join("b");
    ok(moec().arg("build").arg(&toml).args(["--target", TARGET, "--quiet", "-o"]).arg(&bundle));
    bundle
}

/// Results of commands that begin with `start()`: logits of `ids`, and 24 tokens after `prompt`.
fn answers(
    start: &dyn Fn() -> Command,
    threads: &str,
    ids: &[u32],
    prompt: &[u32],
    folder: &Path,
) -> (Vec<f32>, Vec<u32>) {
    let out = folder.join("logits.safetensors");
    ok(start().args(["logits", "--ids", &list(ids), "--threads", threads, "--out"]).arg(&out));
    let (shape, logits) = logits_file(&out);
    assert_eq!(shape, [ids.len(), logits.len() / ids.len()]);
    let output =
        ok(start().args(["generate", "--ids", &list(prompt), "-n", "24", "--json", "--threads", threads]));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    (logits, serde_json::from_value(report["ids"].clone()).unwrap())
}

/// Logits and greedy tokens of `run`, with one thread and two, against what transformers computed.
fn compare(family: &str, format: &str, emulator: &[&str]) {
    let folder = tempfile::tempdir().unwrap();
    let run = build(family, format, "f32", folder.path()).join("run");
    let want = expected(&checkpoint(family));
    let (prompt, rest) = want.greedy.split_at(want.greedy.len() - 24);
    for threads in ["1", "2"] {
        let what = format!("{family} in {format}, {threads} threads");
        let (logits, ids) = answers(&|| under(emulator, &run), threads, &want.ids, prompt, folder.path());
        let worst = distance(&logits, &want.logits);
        assert!(worst <= want.tolerance(), "{what}: a logit is off by {worst}");
        assert_eq!(ids, rest, "{what}");
    }
}

/// Logits of `ids`, computed with these options.
fn logits(emulator: &[&str], run: &Path, ids: &[u32], options: &[&str], folder: &Path) -> Vec<u32> {
    let out = folder.join("logits.safetensors");
    let mut command = under(emulator, run);
    ok(command.args(["logits", "--ids", &list(ids), "--threads", "2"]).args(options).arg("--out").arg(&out));
    logits_file(&out).1.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn neurons_are_read_from_disk_on_aarch64() {
    let Some(emulator) = emulator() else { return };
    for (family, format) in
        [("smallthinker_4b", "f32"), ("turbosparse_mixtral", "q8"), ("smallthinker_21b", "q4")]
    {
        let folder = tempfile::tempdir().unwrap();
        let toml = settings(&checkpoint(family), format, "auto", folder.path());
        let text = std::fs::read_to_string(&toml).unwrap();
        let more = "budget = \"1 GiB\"\nthreads = 2\n[experts]\nskip = \"on\"\n";
        std::fs::write(&toml, format!("{text}{more}")).unwrap();
        let bundle = folder.path().join("b");
        ok(moec().arg("build").arg(&toml).args(["--target", TARGET, "--quiet", "-o"]).arg(&bundle));
        let plan = Bundle::open(&bundle).unwrap().plan;
        let paging = plan.paging.as_ref().unwrap();
        let inter = plan.segments[paging.layers[0].down as usize].extents().1;
        let frames = u64::from(paging.staging + inter.div_ceil(paging.neurons));
        let least = paging.resident + paging.process + frames * paging.frame_bytes;
        let ids = expected(&checkpoint(family)).ids;
        let of = |options: &[&str]| logits(emulator, &bundle.join("run"), &ids[..24], options, folder.path());
        let here = of(&["--no-budget"]);
        assert!(of(&["--budget", &least.to_string()]) == here, "{family} in {format}: other bits from disk");
        assert!(of(&["--budget", "1GiB"]) == here, "{family} in {format}: other bits from disk");
    }
}

/// Root mean square of the difference, relative to that of `b`.
fn relative(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let sum = |of: &dyn Fn(usize) -> f32| (0..a.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
    (sum(&|i| a[i] - b[i]) / sum(&|i| b[i])).sqrt()
}

#[test]
fn families_in_f32() {
    let Some(emulator) = emulator() else { return };
    for family in moec_testing::every_nth(2, families()) {
        compare(family, "f32", emulator);
    }
}

#[test]
fn families_in_bf16() {
    let Some(emulator) = emulator() else { return };
    // In a plain run, the families that the f32 test leaves out.
    let first = usize::from(!moec_testing::all());
    for family in moec_testing::every_nth(2, FAMILIES.into_iter().skip(first)) {
        compare(family, "bf16", emulator);
    }
}

/// Formats of weights and of rows whose results depend on the machine's rounding. They use bf16 dot products
/// (`bfdot`), byte dot products (`sdot`), or panels unpacked to f32.
const ROUNDED: [(&str, &str); 6] =
    [("bf16", "bf16"), ("q8", "i8"), ("q4", "i8"), ("q8", "bf16"), ("q4", "f32"), ("q4o", "i8")];

#[test]
#[cfg(target_arch = "x86_64")]
fn quantised_formats_agree_with_x86() {
    let Some(emulator) = emulator() else { return };
    // The reference is the same arithmetic on this machine, or exact arithmetic without these instructions.
    let pairs = std::arch::is_x86_feature_detected!("avx512bf16");
    for (i, (format, activations)) in moec_testing::every_nth(2, ROUNDED.into_iter().enumerate()) {
        // These families have dense and latent attention, gates with biases, and shared experts.
        let family = ["olmoe", "deepseek_v3", "gpt_oss", "qwen2_moe", "mixtral", "qwen3_moe"][i];
        let want = expected(&checkpoint(family));
        let prompt = &want.greedy[..want.greedy.len() - 24];
        let folder = tempfile::tempdir().unwrap();
        let run = build(family, format, activations, folder.path()).join("run");
        let (logits, tokens) = answers(&|| under(emulator, &run), "1", &want.ids, prompt, folder.path());
        assert_eq!(
            answers(&|| under(emulator, &run), "2", &want.ids, prompt, folder.path()),
            (logits.clone(), tokens.clone()),
            "threads change nothing"
        );
        let here = if activations == "bf16" && !pairs { "f32" } else { activations };
        let toml = settings(&checkpoint(family), format, here, folder.path());
        let own = folder.path().join("own");
        let target = if here == "bf16" { "native" } else { "x86-64-v3" };
        ok(moec().arg("build").arg(&toml).args(["--target", target, "--no-run", "--quiet", "-o"]).arg(&own));
        let start = || {
            let mut command = moec();
            command.arg("run").arg(&own);
            command
        };
        let (same, _) = answers(&start, "1", &want.ids, prompt, folder.path());
        // A number between two codes may send a token of these untrained models to another expert, which
        // changes the rest of its row. So only most rows must be near.
        let bound = if here == activations { 2e-3 } else { 2e-2 };
        let vocab = logits.len() / want.ids.len();
        let rows = logits.chunks(vocab).zip(same.chunks(vocab));
        let near = rows.filter(|(a, b)| relative(a, b) <= bound).count();
        println!(
            "{family}, {format} weights, {activations} rows: {near} of {} near {target}",
            want.ids.len()
        );
        let far = relative(&logits, &same);
        assert!(
            4 * near >= 3 * want.ids.len(),
            "{family} in {format} with {activations}: {near} rows near the same on {target}, {far} over all"
        );
    }
}

#[test]
fn an_older_cpu_is_refused_by_the_features_that_it_lacks() {
    let Some(emulator) = emulator() else { return };
    let [program, cpu, _] = emulator else {
        AARCH64.ok_or_skip::<()>(Err("only an emulator has an older CPU"));
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let run = build("olmoe", "bf16", "auto", folder.path()).join("run");
    let (code, stderr) =
        fails(under(&[program, cpu, "cortex-a57"], &run).args(["generate", "--ids", "1,2", "-n", "1"]));
    assert_eq!(code, 1, "{stderr}");
    for feature in ["bf16", "dotprod", "fullfp16", "i8mm", "lse"] {
        assert!(stderr.contains(&format!("`{feature}`")), "`{feature}` is not in: {stderr}");
    }
    assert!(!stderr.contains("`neon`") && stderr.contains("hint:"), "{stderr}");
}
