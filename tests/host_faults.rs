//! Jobs of several hosts under faults: they end soon, say why, and print nothing but right tokens.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::hosts::{LAUNCHERS, build, process, run};
use crate::support::{built, checkpoint, clean, fails, finish, moec, ok};
use moec_testing::MOUNT;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};
use wait_timeout::ChildExt as _;

/// Seconds without a sign after which a job ends.
const TIMEOUT: &str = "1";
/// Longest time that a job may go on after a fault: the limit of the start, which is ten times [`TIMEOUT`], the end of all
/// processes, and a machine with other tests.
const PATIENCE: Duration = Duration::from_secs(40);
/// Longest time that a launcher takes to end the others after the first host.
const LAUNCHER: Duration = Duration::from_secs(10);
/// Faults at random moments in a plain run, and in one of every combination.
const FEW: usize = 6;
const MANY: usize = 50;

/// A fault of a process.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Killed {
        rank: usize,
    },
    /// The first host is the one that waits for the others; a launcher waits for it if it stops.
    Stopped {
        rank: usize,
    },
}

const FAULTS: [Fault; 3] = [Fault::Killed { rank: 1 }, Fault::Stopped { rank: 1 }, Fault::Killed { rank: 0 }];

/// Numbers from 0 to 1 in no visible order: the linear congruential generator of Numerical Recipes.
pub fn numbers() -> impl Iterator<Item = f64> {
    let next = |state: &u32| Some(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
    std::iter::successors(Some(1), next).skip(1).map(|state| f64::from(state) / f64::from(u32::MAX))
}

/// A long answer of a small model.
pub const ANSWER: [&str; 8] = ["generate", "--ids", "1,2,3,4", "-n", "500", "--ignore-eos", "--threads", "1"];

/// A bundle for two hosts with room for the answer.
pub fn bundle(folder: &Path) -> PathBuf {
    let (toml, bundle) = (folder.join("model.toml"), folder.join("two.moec"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 512\nprefill_chunk = 16\ndecode_batch = [1]\n\
         [placement]\nhosts = \"slices\"\n",
        checkpoint("olmoe").display()
    );
    fs::write(&toml, text).unwrap();
    built(&toml, &["--target", "native-x2"], &bundle);
    bundle
}

/// End of a job.
struct Ended {
    out: Output,
    /// Whether the process was there when it was given the fault.
    hit: bool,
    /// Whether the first host had ended before, without it: then only the launcher waits for a stopped process.
    late: bool,
}

/// Starts a job, and gives one of its processes a fault after a time.
fn faulty(command: &mut Command, bundle: &Path, after: Duration, fault: Fault) -> Ended {
    command.env("MOEC_HOST_TIMEOUT", TIMEOUT);
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(after);
    let (rank, signal) = match fault {
        Fault::Killed { rank } => (rank, libc::SIGKILL),
        Fault::Stopped { rank } => (rank, libc::SIGSTOP),
    };
    // SAFETY: a signal to a process of this test, or to one that has ended meanwhile.
    let send = |process, signal| unsafe { libc::kill(process, signal) } == 0;
    let found = process(bundle, rank);
    let hit = found.is_some_and(|process| send(process, signal));
    let (begin, mut alone, mut late) = (Instant::now(), Instant::now(), false);
    while child.wait_timeout(Duration::from_millis(50)).unwrap().is_none() {
        if begin.elapsed() > PATIENCE {
            child.kill().unwrap();
            panic!("the job does not end {PATIENCE:?} after {fault:?} at {after:?}");
        }
        if process(bundle, 0).is_some() {
            alone = Instant::now();
        }
        if let (Some(stopped), Fault::Stopped { .. }) = (found, fault)
            && alone.elapsed() > LAUNCHER
        {
            late |= send(stopped, libc::SIGCONT);
        }
    }
    Ended { out: child.wait_with_output().unwrap(), hit, late }
}

/// Whatever the moment: the job ends, by a message of its launcher or of a host, and has printed the begin of the
/// right answer.
#[test]
fn jobs_end_after_faults_at_random_moments() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let right = ok(run(&bundle, None).args(ANSWER)).stdout;
    let count = if moec_testing::all() { MANY } else { FEW };
    for (_, launcher, options) in LAUNCHERS.iter().filter(|(need, ..)| need.met_or_skip()) {
        let job = || {
            let mut command = run(&bundle, Some((launcher, options, 2)));
            command.args(ANSWER);
            command
        };
        // The first start compiles the library.
        ok(&mut job());
        let begin = Instant::now();
        assert_eq!(ok(&mut job()).stdout, right, "{launcher}");
        let whole = begin.elapsed();
        let mut hits = 0;
        for (share, fault) in numbers().take(count).zip(FAULTS.into_iter().cycle()) {
            let after = whole.mul_f64(share);
            let Ended { out, hit, late } = faulty(&mut job(), &bundle, after, fault);
            let (printed, errors) =
                (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
            // MPICH's launcher says on standard output how a process ended, after the answer's line.
            let (tokens, more) = printed.split_once('\n').unwrap_or((&printed, ""));
            let said = format!("{errors}{more}");
            let what = format!("{launcher}, {fault:?} after {after:?}: {said}");
            assert!(right.starts_with(tokens.as_bytes()), "{what}\n{tokens}");
            assert!(!said.contains("panicked"), "{what}");
            if out.status.success() || late {
                // It came too late, or the process had not started.
                assert_eq!(tokens.as_bytes(), right.trim_ascii_end(), "{what}");
                continue;
            }
            assert!(hit, "{what}");
            hits += 1;
            let named = match fault {
                Fault::Killed { .. } => said.contains("signal 9"),
                Fault::Stopped { rank } => {
                    said.contains(&format!("host {rank} ")) || said.contains("error: MPI waits for")
                }
            };
            assert!(named, "{what}");
        }
        assert!(hits > count / 3, "{launcher}: {hits} of {count} faults came in time");
    }
}

/// A copy of a bundle.
fn copied(bundle: &Path, to: PathBuf) -> PathBuf {
    ok(clean(Command::new("cp")).arg("-r").arg(bundle).arg(&to));
    to
}

/// The second host's files are cut off, changed or missing: the job ends at its start, with the name of the file.
#[test]
fn damaged_bundles_of_a_host_are_reported_by_name() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let whole = bundle(folder.path());
    let damaged = |name: &str, file: &str, damage: &dyn Fn(&mut Vec<u8>)| {
        let copy = copied(&whole, folder.path().join(name));
        let mut bytes = fs::read(copy.join(file)).unwrap();
        damage(&mut bytes);
        fs::write(copy.join(file), bytes).unwrap();
        copy
    };
    let weights = "weights/ram1.bin";
    let cases = [
        (damaged("short", weights, &|bytes| bytes.truncate(bytes.len() / 2)), "bytes instead of"),
        (damaged("changed", weights, &|bytes| bytes[100] ^= 1), "was changed after the build"),
        (damaged("plan", "plan.bin", &|bytes| bytes.truncate(bytes.len() / 2)), "plan"),
    ];
    for (other, says) in cases {
        let mut command = run(&whole, Some((launcher, options, 1)));
        command
            .args(ANSWER)
            .args([":", "-n", "1"])
            .arg(moec().get_program())
            .arg("run")
            .arg(&other)
            .args(ANSWER);
        let out = finish(&mut command);
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && error.contains(says), "{}: {error}", other.display());
        assert!(out.stdout.is_empty() && !error.contains("panicked"), "{}: {error}", other.display());
    }
}

/// Disks without room: for the library that is compiled, and for what the first host writes.
#[test]
fn full_disks_of_hosts_are_reported() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), "native-x2", "");
    let disk = folder.path().join("disk");
    fs::create_dir(&disk).unwrap();
    let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", "size=8k", "tmpfs"]).arg(&disk).status();
    if !MOUNT.holds_or_skip(mounted.is_ok_and(|status| status.success())) {
        return;
    }
    let job = || run(&bundle, Some((launcher, options, 2)));
    let logits = ["logits", "--ids", "1,2,3,4,5,6,7,8", "--out"];
    let library = finish(job().args(ANSWER).env("MOEC_CACHE", &disk));
    for left in fs::read_dir(&disk).unwrap() {
        fs::remove_dir_all(left.unwrap().path()).unwrap();
    }
    fs::write(disk.join("full"), vec![0; 8 << 10]).unwrap();
    let output = finish(job().args(logits).arg(disk.join("out.safetensors")));
    // Unmounted before anything can fail.
    ok(Command::new("umount").arg(&disk));
    for (out, says) in [(library, "MPI"), (output, "out.safetensors")] {
        let error = String::from_utf8_lossy(&out.stderr);
        assert!(!out.status.success() && error.contains("error: ") && error.contains(says), "{error}");
        assert!(!error.contains("panicked"), "{error}");
    }
}

/// No process of a job remains after its launcher was killed.
#[test]
fn processes_end_with_their_launcher() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path());
    let mut command = run(&bundle, Some((launcher, options, 2)));
    command.args(["bench", "--stdin"]).env("MOEC_HOST_TIMEOUT", TIMEOUT);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let begin = Instant::now();
    let there = |rank| process(&bundle, rank);
    while there(0).is_none() || there(1).is_none() {
        assert!(begin.elapsed() < PATIENCE, "the job does not start");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Until the second process serves.
    std::thread::sleep(Duration::from_secs(1));
    child.kill().unwrap();
    child.wait().unwrap();
    let begin = Instant::now();
    while there(0).is_some() || there(1).is_some() {
        assert!(begin.elapsed() < PATIENCE, "a process goes on without its launcher");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Limits that are no numbers are refused before any work.
#[test]
fn wrong_limits_are_refused() {
    let Some((_, launcher, options)) = LAUNCHERS.iter().find(|(need, ..)| need.met_or_skip()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let bundle = build("olmoe", folder.path(), "native-x2", "");
    for (name, value) in [("MOEC_HOST_TIMEOUT", "0"), ("MOEC_TEST_HOST_DELAY_US", "soon")] {
        let (_, error) =
            fails(run(&bundle, Some((launcher, options, 2))).args(["bench", "--json"]).env(name, value));
        assert!(error.contains(name) && error.contains("a number of"), "{error}");
    }
}
