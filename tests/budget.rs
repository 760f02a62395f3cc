//! Memory budgets are respected as the kernel accounts for memory: the largest resident set of `BUNDLE/run`.
//! If a control group can be created, also all memory charged to it, including pages of files.
#![cfg(target_os = "linux")]
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
use crate::support::group;

use group::{Group, forget};
use moec_bundle::read::Bundle;
use moec_ir::plan::Paging;
use moec_testing::{DIRECT_IO, GROUPS, IO_URING};
use std::fs;
use std::path::Path;
use std::process::Command;
use support::{clean, ferris, list, moec, ok, tree};

/// Builds a bundle for two threads, `run` included.
fn build(source: &Path, folder: &Path, context: usize) {
    let toml = folder.join("model.toml");
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = {context}\nprefill_chunk = 32\ndecode_batch = [1, 2]\n\
         [weights]\nactivations = \"f32\"\n[memory]\nthreads = 2\nbudget = \"1 GiB\"\n",
        source.display()
    );
    fs::write(&toml, text).unwrap();
    ok(moec().arg("build").arg(&toml).args(["--quiet", "-o"]).arg(folder.join("b")));
}

/// The budget with room for this many experts.
fn budget(paging: &Paging, experts: u32) -> u64 {
    paging.resident + paging.process + u64::from(paging.staging + experts) * paging.frame_bytes
}

/// A run of `BUNDLE/run` with a budget.
#[derive(Clone, Copy, Debug)]
struct Case<'a> {
    subcommand: &'a [&'a str],
    /// Reader of the disk.
    reader: &'a str,
    budget: u64,
}

impl Case<'_> {
    fn command(&self, folder: &Path) -> Command {
        let mut run = clean(Command::new(folder.join("b/run")));
        run.env("MOEC_DISK_READER", self.reader).args(self.subcommand).args([
            "--threads",
            "2",
            "--json",
            "--budget",
        ]);
        run.arg(self.budget.to_string());
        run
    }

    /// Runs a command, and checks that its resident memory stays within the budget. Returns whether reads
    /// bypassed the page cache.
    fn hold(&self, mut run: Command) -> bool {
        let report: serde_json::Value =
            serde_json::from_slice(&ok(&mut run).stdout).expect("one JSON object");
        assert_eq!(report["memory"]["budget"], self.budget, "{report}");
        assert!(report["disk"]["bytes"].as_u64() > Some(0), "{report}");
        let peak = report["memory"]["peak"].as_u64().expect("this kernel knows the peak");
        assert!(peak <= self.budget, "{peak} bytes were resident: {self:?}");
        let reader = report["disk"]["reader"].as_str().expect("a reader");
        assert!(reader.contains(self.reader), "{report}");
        reader.contains("direct reads")
    }
}

/// Runs every subcommand with room for each number of experts in `sizes`, with both readers.
fn hold(test: &str, folder: &Path, sizes: &[u32], subcommands: &[&[&str]]) {
    let bundle = Bundle::open(&folder.join("b")).unwrap();
    let paging = bundle.plan.paging.as_ref().unwrap();
    let groups = GROUPS.ok_or_skip(Group::new(test, None)).is_some();
    let rings = IO_URING.ok_or_skip(io_uring::IoUring::new(2)).is_some();
    for reader in ["io_uring", "pread"].into_iter().filter(|r| rings || *r == "pread") {
        for (&experts, &subcommand) in sizes.iter().flat_map(|n| subcommands.iter().map(move |v| (n, v))) {
            let case = Case { subcommand, reader, budget: budget(paging, experts) };
            if !groups {
                case.hold(case.command(folder));
                continue;
            }
            // In a group without a limit, every page of the files is charged to the process, and the kernel
            // drops none.
            let group = Group::new(test, None).unwrap();
            // Files are dropped from the page cache, except for `run`, which stays charged to the build.
            // Unoptimised code is several times larger than released code, and its touched pages count as
            // resident.
            for (name, _) in tree(&bundle.folder).into_iter().filter(|(name, _)| name != "run") {
                forget(&bundle.folder.join(name));
            }
            let direct = case.hold(group.enter(&case.command(folder)));
            let peak = group.peak();
            assert!(
                peak <= case.budget || !DIRECT_IO.holds_or_skip(direct),
                "the kernel counted {peak} bytes: {case:?}"
            );
        }
        if groups {
            // With the smallest budget as the group's limit, no process may be killed.
            let case = Case { subcommand: subcommands[0], reader, budget: budget(paging, sizes[0]) };
            let group = Group::new(test, Some(case.budget)).unwrap();
            case.hold(group.enter(&case.command(folder)));
            assert_eq!(group.kills(), 0, "{case:?}");
        }
    }
}

#[test]
fn a_model_larger_than_its_budget() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    ok(moec()
        .args(["synth", "--like", "phi-tiny", "--layers", "1", "--vocab", "512", "--quiet"])
        .arg(&source));
    build(&source, folder.path(), 128);
    let plan = Bundle::open(&folder.path().join("b")).unwrap().plan;
    let weights: u64 = plan.segments.iter().map(|s| s.bytes).sum();
    assert!(2 * budget(plan.paging.as_ref().unwrap(), 1) < weights, "the least budget would be no test");
    let ids = list(&(0..70).map(|i| i * 7 % 512).collect::<Vec<u32>>());
    let generate = ["generate", "--ids", &ids, "-n", "8"];
    let bench = ["bench", "--prompt", "32", "--gen", "8", "--batch", "2", "--repeat", "1"];
    hold("a-model-larger-than-its-budget", folder.path(), &[1, 6], &[&generate, &bench]);
    // `--check` reads all files without keeping them in memory.
    let check = ["generate", "--ids", "1", "-n", "2", "--check"];
    hold("a-model-whose-files-are-checked", folder.path(), &[1], &[&check]);
}

#[test]
fn a_model_with_a_tokenizer() {
    let folder = tempfile::tempdir().unwrap();
    build(&ferris(), folder.path(), 1024);
    let stdout = ok(moec().arg("inspect").arg(folder.path().join("model.toml"))).stdout;
    let listing = String::from_utf8(stdout).unwrap();
    assert!(listing.contains("1.0 GiB, 2 threads; experts that do not fit stay on disk"), "{listing}");
    let text = ["generate", "--prompt", "The borrow checker", "-n", "64"];
    hold("a-model-with-a-tokenizer", folder.path(), &[1, 20], &[&text]);
}
