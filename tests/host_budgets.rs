//! Experts that stay on the disks of several hosts: each pages its own, and all together give the bits of one host.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::cast_precision_loss, reason = "numbers of tests are small")]

use crate::host_costs::device;
use crate::hosts::{LAUNCHERS, run};
use crate::support::{
    Setup, built, checkpoint, clean, distance, expected, fails, json_of, list, logits_file, moec, ok,
};
use moec_bundle::read::Bundle;
use moec_ir::plan::Paging;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;
use wait_timeout::ChildExt as _;

/// A launcher, its options and a number of processes.
type Launched<'a> = Option<(&'a str, &'a [&'a str], usize)>;

/// Divisions with the family that each is tested with, and the lines that give its bits on one host.
const DIVISIONS: [(&str, &str, &str); 6] = [
    ("slices", "olmoe", "[placement]\nslices = 2"),
    ("slices", "gpt_oss", "[placement]\nslices = 2"),
    ("owners", "olmoe", ""),
    ("owners", "deepseek_v3", ""),
    ("stages", "gpt_oss", ""),
    ("stages", "qwen3_next", ""),
];

/// Experts that fit into the cache of each host.
const FRAMES: u64 = 3;

/// Builds a family in f32 for a target with these lines.
fn build(family: &str, folder: &Path, target: &str, more: &str) -> PathBuf {
    let folder = tempfile::Builder::new().tempdir_in(folder).unwrap().keep();
    let toml =
        Setup { format: "f32", chunk: 20, batch: &[1, 2], context: 96 }.write(&checkpoint(family), &folder);
    writeln!(fs::File::options().append(true).open(&toml).unwrap(), "{more}").unwrap();
    let bundle = folder.join("out.moec");
    built(&toml, &["--target", target], &bundle);
    bundle
}

/// The lines of a division under a budget.
fn divided(division: &str, budget: u64) -> String {
    format!("[memory]\nbudget = \"{budget}\"\nthreads = 2\n[placement]\nhosts = \"{division}\"")
}

/// The least budget with so many frames.
fn budget(paging: &Paging) -> u64 {
    paging.resident + paging.process + (u64::from(paging.staging) + FRAMES) * paging.frame_bytes
}

/// Experts on disk of both hosts.
fn paging(bundle: &Path) -> [Paging; 2] {
    let plan = Bundle::open(bundle).unwrap().plan;
    [0, 1].map(|memory| plan.paging_of(memory).unwrap().clone())
}

/// A bundle for two hosts whose caches have room for [`FRAMES`] experts each: the first by the budget, the second by
/// the memory that the target says it has.
fn tight(family: &str, division: &str, folder: &Path) -> PathBuf {
    let roomy = build(family, folder, "native-x2", &divided(division, 1 << 30));
    let [first, second] = paging(&roomy);
    let most = budget(&second);
    let target = device(folder, 10.0, (10.0, 10.0), [None, Some(most as f64)]);
    // The first has at least what the second has: everything but a part of the experts.
    let bundle = build(family, folder, &target, &divided(division, budget(&first).max(most)));
    for (paging, least) in paging(&bundle).into_iter().zip([1, FRAMES]) {
        assert!(paging.peak().unwrap() <= paging.budget && u64::from(paging.frames) >= least, "{paging:?}");
    }
    bundle
}

/// Logits of a prompt to the bit, and what `generate` reports.
fn answers(
    bundle: &Path,
    ids: &[u32],
    threads: &str,
    launched: Launched<'_>,
) -> (Vec<u32>, serde_json::Value) {
    let out = bundle.with_extension("safetensors");
    let common = ["--threads", threads, "--ids", &list(ids)];
    ok(run(bundle, launched).arg("logits").args(common).arg("--out").arg(&out));
    let logits = logits_file(&out).1.into_iter().map(f32::to_bits).collect();
    let mut generate = run(bundle, launched);
    generate.arg("generate").args(common).args(["-n", "24", "--ignore-eos", "--json"]);
    (logits, json_of(&mut generate))
}

/// Each host reads its own experts from its own disk, more than its memory holds; logits and tokens are those of one
/// host that has all of them in memory.
#[test]
fn hosts_page_their_experts_and_give_the_bits_of_one() {
    let launchers: Vec<_> = LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()).collect();
    for (division, family, alone) in DIVISIONS {
        let folder = tempfile::tempdir().unwrap();
        let golden = expected(&checkpoint(family));
        let (want, report) = answers(&build(family, folder.path(), "native", alone), &golden.ids, "1", None);
        let worst =
            distance(&want.iter().map(|&bits| f32::from_bits(bits)).collect::<Vec<_>>(), &golden.logits);
        assert!(worst <= golden.tolerance(), "{family}, {division}: a logit is off by {worst}");
        let bundle = tight(family, division, folder.path());
        let second = paging(&bundle)[1].clone();
        let said = &json_of(moec().arg("run").arg(&bundle).args(["info", "--json"]))["other_memories"][0];
        assert_eq!(said["paging"]["budget_bytes"], second.budget, "{said}");
        assert!(said["bytes"].as_u64().unwrap() < second.resident + second.process, "{said}");
        let said = ok(moec().arg("run").arg(&bundle).arg("info")).stdout;
        let experts: u32 = second.layers.iter().map(|l| l.experts).sum();
        let held = format!("{} of {experts} experts in memory", second.frames);
        assert!(
            String::from_utf8(said).unwrap().lines().any(|l| l.starts_with("memory") && l.contains(&held))
        );
        for threads in ["1", "2"] {
            let what = format!("{family}, {division}, {threads} threads");
            let (logits, own) = answers(&bundle, &golden.ids, threads, None);
            assert!(logits == want && own["ids"] == report["ids"], "{what}, one process");
            assert!(own["disk"]["reads"].as_u64().unwrap() > 0 && own["hosts"].is_null(), "{what}: {own}");
            for (_, launcher, options) in &launchers {
                let (logits, own) = answers(&bundle, &golden.ids, threads, Some((launcher, options, 2)));
                assert!(logits == want && own["ids"] == report["ids"], "{what}, {launcher}");
                let disks = own["hosts"]["disks"].as_array().unwrap();
                assert_eq!((disks.len(), disks[0]["unit"].as_str()), (1, Some("cpu1")), "{own}");
                let of = |disk: &serde_json::Value, count: &str| disk[count].as_u64().unwrap();
                assert!(of(&own["disk"], "reads") > 0, "{what}: {own}");
                // More than fits: experts have left the cache and were read again.
                let misses = of(&disks[0], "misses");
                assert!(of(&disks[0], "reads") > 0 && misses > u64::from(second.frames), "{what}: {own}");
                assert!(of(&disks[0], "bytes") > second.cache_bytes().unwrap(), "{what}: {own}");
            }
        }
    }
}

/// Experts on disk are there once, each in its own file, which no other host needs.
#[test]
fn capacity_is_without_duplicates() {
    let folder = tempfile::tempdir().unwrap();
    for division in ["slices", "owners"] {
        let bundle = tight("olmoe", division, folder.path());
        let plan = Bundle::open(&bundle).unwrap().plan;
        let experts = |memory| -> u64 {
            plan.paging_of(memory).unwrap().segments().map(|s| plan.segments[s as usize].bytes).sum()
        };
        let alone = Bundle::open(&build("olmoe", folder.path(), "native", "")).unwrap().plan;
        let all = alone.segments.iter().filter(|s| s.file == 1).map(|s| s.bytes).sum::<u64>();
        let (both, padded) = (experts(0) + experts(1), if division == "slices" { all / 2 } else { 0 });
        assert!((all..=all + padded).contains(&both), "{division}: {both} of {all}");
        let text = String::from_utf8(ok(moec().arg("explain").arg(&bundle)).stdout).unwrap();
        let count = if division == "slices" { 16 } else { 8 };
        assert!(text.contains(&format!("3 of {count} experts in memory, budget ")), "{division}: {text}");
        ok(moec().arg("verify").arg(&bundle));
    }
}

/// The error of a disk names the host, and a missing or shortened file is found at the start.
#[test]
fn faults_of_a_disk_name_the_host() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = tight("olmoe", "owners", folder.path());
    let second = bundle.with_file_name("second");
    ok(clean(Command::new("cp")).arg("-r").arg(&bundle).arg(&second));
    let generate =
        ["generate", "--ids", "1,2,3,4,5,6", "-n", "24", "--quiet", "--ignore-eos", "--threads", "1"];
    let job = || {
        let mut command = run(&bundle, Some((launcher, options, 1)));
        command.args(generate).args([":", "-n", "1"]).arg(moec().get_program());
        command.arg("run").arg(&second).args(generate);
        command
    };
    let right = ok(&mut job()).stdout;
    // The second host needs its own file alone.
    for file in ["dense.bin", "experts.bin"] {
        fs::remove_file(second.join("weights").join(file)).unwrap();
    }
    assert_eq!(ok(&mut job()).stdout, right);
    let file = second.join("weights/ram1.bin");
    let sound = fs::read(&file).unwrap();
    let refused = |what: &str, words: [&str; 2]| {
        let (_, error) = fails(&mut job());
        assert!(words.iter().all(|word| error.contains(word)), "{what}: {error}");
    };
    fs::write(&file, &sound[..sound.len() - 1]).unwrap();
    // A process checks sizes before it serves.
    refused("cut off", ["second/weights/ram1.bin", "was changed after the build"]);
    fs::remove_file(&file).unwrap();
    refused("missing", ["host 1", "ram1.bin"]);
}

/// A disk that gives other bytes than it was given ends the job, with the names of the host and of what was read.
#[test]
fn errors_of_reads_name_the_host() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = tight("olmoe", "slices", folder.path());
    let mut command = run(&bundle, Some((launcher, options, 2)));
    command.args(["bench", "--stdin", "--threads", "2"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut input, mut output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
    let mut line = String::new();
    writeln!(input, "8 4 1").unwrap();
    output.read_line(&mut line).unwrap();
    let report: serde_json::Value = serde_json::from_str(&line).unwrap();
    assert!(report["hosts"]["disks"][0]["reads"].as_u64().unwrap() > 0, "{report}");
    let file = bundle.join("weights/ram1.bin");
    let spoilt: Vec<u8> = fs::read(&file).unwrap().into_iter().map(|byte| !byte).collect();
    fs::write(&file, spoilt).unwrap();
    writeln!(input, "8 16 1").unwrap();
    let ended = child.wait_timeout(Duration::from_mins(1)).unwrap();
    if ended.is_none() {
        child.kill().unwrap();
    }
    let out = child.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&out.stderr);
    for word in ["host 1 (`", "cannot read expert ", "ram1.bin", "CRC-32C"] {
        assert!(error.contains(word), "no `{word}` in: {error}");
    }
    assert!(ended.is_some_and(|status| !status.success()), "{error}");
}

/// A budget that is too small for a host names its memory, and the least.
#[test]
fn too_small_budgets_of_a_host_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let [_, second] = paging(&build("olmoe", folder.path(), "native-x2", &divided("owners", 1 << 30)));
    let target =
        device(folder.path(), 10.0, (10.0, 10.0), [None, Some((second.resident + second.process) as f64)]);
    let toml = folder.path().join("model.toml");
    let text =
        format!("[model]\nsource = \"{}\"\n{}\n", checkpoint("olmoe").display(), divided("owners", 1 << 30));
    fs::write(&toml, text).unwrap();
    let (_, error) = fails(moec().arg("build").arg(&toml).args(["--target", &target, "--no-run"]));
    assert!(error.contains("is too small for `ram1`") && error.contains("the minimum is "), "{error}");
}
