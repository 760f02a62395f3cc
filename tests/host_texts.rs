//! Texts that the hosts of a job divide: calibration, losses of formats, evaluation and the search for formats have
//! the bytes of one process.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{LAUNCHERS, process, start};
use crate::support::{built, cache, calibration, fails, ferris, moec, ok};
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A launcher with its options, and the number of processes; `None`: one process without a launcher.
type Launched<'a> = Option<(&'a str, &'a [&'a str], usize)>;

/// ferris in a folder of its own.
struct Case {
    folder: tempfile::TempDir,
}

impl Case {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// A `model.toml` with these lines after `[model]` and `[shapes]`.
    fn toml(&self, name: &str, more: &str) -> PathBuf {
        let path = self.path(name);
        let text = format!(
            "[model]\nsource = {:?}\n[shapes]\nmax_context = 128\n{more}\n",
            ferris().to_str().unwrap()
        );
        fs::write(&path, text).unwrap();
        path
    }

    /// A subcommand on every host; threads that wait for each other would slow down several processes.
    fn on(&self, launched: Launched<'_>, subcommand: &str, path: &Path) -> Command {
        let mut command = start(launched);
        command.env("MOEC_CACHE", cache(self.folder.path())).env("MOEC_THREADS", "1");
        command.arg(subcommand).arg(path);
        command
    }

    /// The profile that so many hosts record in windows of 64 tokens, and their warnings.
    fn calibrated(&self, launched: Launched<'_>, toml: &Path, options: &[&str]) -> (Vec<u8>, String) {
        let out = self.path("out.trace");
        let mut command = self.on(launched, "calibrate", toml);
        command.args(["--text", &calibration(), "--window", "64", "--quiet", "-o"]).arg(&out);
        let output = ok(command.args(options).arg("--json"));
        // The first host alone prints.
        let _: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let profile = fs::read(&out).unwrap();
        fs::remove_file(&out).unwrap();
        (profile, String::from_utf8(output.stderr).unwrap())
    }
}

/// Numbers of hosts by launchers of this machine.
fn jobs(hosts: &[usize]) -> Vec<(&'static str, &'static [&'static str], usize)> {
    let launchers = LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip());
    launchers.flat_map(|(_, launcher, options)| hosts.iter().map(|&n| (*launcher, *options, n))).collect()
}

/// Sums of floating-point numbers depend on their order, and all of them are in a profile.
#[test]
fn profiles_of_several_hosts_have_the_bytes_of_one() {
    let case = Case::new();
    let toml = case.toml("model.toml", "[decode]\nbig_little = true");
    let tokens = ["--tokens", "2500"];
    let want = case.calibrated(None, &toml, &tokens);
    let profile = moec_profile::Profile::decode(&want.0).unwrap();
    assert!(profile.reading.tokens() > 2000 && profile.confidence.is_some() && !profile.neurons.is_empty());
    for job in jobs(&[2, 3]) {
        assert!(case.calibrated(Some(job), &toml, &tokens) == want, "{job:?}");
    }
}

/// Losses of formats are measured by several models on text that calibration has not read.
#[test]
fn losses_of_several_hosts_have_the_bytes_of_one() {
    let Some(job) = jobs(&[2]).pop() else { return };
    let case = Case::new();
    let toml = case.toml("model.toml", "");
    let options = ["--tokens", "800", "--losses"];
    let want = case.calibrated(None, &toml, &options);
    assert!(moec_profile::Profile::decode(&want.0).unwrap().losses.len() > 10);
    assert!(case.calibrated(Some(job), &toml, &options) == want);
}

#[test]
fn evaluations_of_several_hosts_have_the_results_of_one() {
    let case = Case::new();
    let bundle = |name: &str, more: &str| {
        let out = case.path(name);
        built(&case.toml("model.toml", more), &[], &out);
        out
    };
    let exact = bundle("exact.moec", "[weights]\nactivations = \"f32\"");
    let small = bundle("small.moec", "[weights]\nexperts = \"q4\"\n[decode]\nbig_little = true");
    let questions = case.path("questions.jsonl");
    let asked = "{\"prompt\": \"The \", \"answer\": \"e\"}\n{\"prompt\": \"The borrow checker\", \"answer\": \" is the\"}\n";
    let asked = asked.repeat(3);
    fs::write(&questions, asked).unwrap();
    let text = ferris().join("eval/text.txt");
    let measured = |launched: Launched<'_>, more: &[&str]| {
        let mut command = case.on(launched, "eval", &small);
        command.arg("--text").arg(&text).args(["--window", "40", "--windows", "7", "--json", "--qa"]);
        let output = ok(command.arg(&questions).args(more).arg("--quiet"));
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        String::from_utf8(output.stdout).unwrap()
    };
    let against = ["--against", exact.to_str().unwrap()];
    for more in [&[][..], &against, &["--big-little", "--gamma", "0.3,0.9"]] {
        let want = measured(None, more);
        assert!(want.contains("perplexity") && want.contains("\"exact_match\": 0.5"), "{want}");
        for job in jobs(&[2, 3]) {
            assert_eq!(measured(Some(job), more), want, "{more:?} {job:?}");
        }
    }
}

/// The search measures several choices of formats, each after the result of the one before.
#[test]
fn formats_that_several_hosts_choose_are_those_of_one() {
    let Some(job) = jobs(&[2]).pop() else { return };
    let case = Case::new();
    let text = case.path("text.txt");
    fs::write(&text, fs::read_to_string(calibration()).unwrap().chars().take(40_000).collect::<String>())
        .unwrap();
    let lines = format!(
        "[weights]\nactivations = \"f32\"\nsize = \"5 MiB\"\n[experts]\nthreshold = \"50%\"\n\
         [calibrate]\ntext = [{text:?}]\ntokens = 2048\n"
    );
    let toml = case.toml("model.toml", &lines);
    let build = |launched: Launched<'_>, name: &str| {
        let out = case.path("out.moec");
        let mut command = case.on(launched, "build", &toml);
        // Each calibrates for itself.
        command.env("MOEC_CACHE", cache(&case.path(&format!("cache of {name}"))));
        ok(command.args(["--no-run", "--no-reuse", "-o"]).arg(&out));
        let explained = ok(moec().arg("explain").arg(&out).arg("--json")).stdout;
        (fs::read(out.join("manifest.json")).unwrap(), String::from_utf8(explained).unwrap())
    };
    let (manifest, explained) = build(None, "one");
    assert!(explained.contains("format of a weight") && explained.contains("divergence_nats"), "{explained}");
    let several = build(Some(job), "several");
    assert_eq!(several.1, explained);
    assert!(several.0 == manifest);
}

/// A text that one host lacks, or that differs there, ends the job with an error that names the host.
#[test]
fn hosts_with_other_texts_are_named() {
    let case = Case::new();
    let toml = case.toml("model.toml", "");
    let text = fs::read_to_string(calibration()).unwrap();
    let [own, other] =
        [text.replace("The", "An"), text].map(|text| text.chars().take(20_000).collect::<String>());
    fs::write(case.path("own.txt"), own).unwrap();
    fs::write(case.path("other.txt"), other).unwrap();
    for (launcher, options, _) in jobs(&[2]) {
        let out = case.path("out.trace");
        let refused = |second: &str| {
            let mut command = case.on(Some((launcher, options, 1)), "calibrate", &toml);
            command.arg("--text").arg(case.path("own.txt")).arg("-o").arg(&out);
            command.args([":", "-n", "1"]).arg(moec().get_program()).arg("calibrate").arg(&toml);
            command.arg("--text").arg(case.path(second)).arg("-o").arg(&out);
            fails(&mut command).1
        };
        let error = refused("gone.txt");
        assert!(error.contains("host 1 (`") && error.contains("gone.txt"), "{launcher}: {error}");
        let error = refused("other.txt");
        assert!(error.contains("host 1: another model, text, kind of CPU"), "{launcher}: {error}");
        assert!(!out.exists());
    }
}

/// A host that is killed or stops while it reads ends the job.
#[test]
fn calibration_ends_with_a_host_that_ends_or_stops() {
    let case = Case::new();
    let toml = case.toml("model.toml", "");
    for (launcher, options, hosts) in jobs(&[2]) {
        for (signal, says) in [
            (libc::SIGKILL, &[][..]),
            (libc::SIGSTOP, &["host 1 has given no sign", "hint: `MOEC_HOST_TIMEOUT`"]),
        ] {
            let out = case.path("out.trace");
            let mut command = case.on(Some((launcher, options, hosts)), "calibrate", &toml);
            command.args(["--text", &calibration(), "--tokens", "65536", "-o"]).arg(&out);
            command.env("MOEC_HOST_TIMEOUT", "2").stdin(Stdio::null()).stdout(Stdio::null());
            let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
            assert!(lines.any(|line| line.contains("Reading")), "the first host reads");
            let second = process(&toml, 1).expect("the process runs");
            // SAFETY: a signal to a process of this test.
            assert_eq!(unsafe { libc::kill(second, signal) }, 0);
            let begin = Instant::now();
            let error: Vec<_> = lines.collect();
            let ended = child.wait().unwrap();
            assert!(begin.elapsed() < Duration::from_mins(1), "the job does not end");
            let error = error.join("\n");
            assert!(
                !ended.success() && says.iter().all(|words| error.contains(words)),
                "{launcher}: {error}"
            );
            assert!(!out.exists());
        }
    }
}
