//! Hundreds of damaged checkpoints and bundles: every subcommand ends soon, with an error that names the
//! fault or with the requested result, and leaves no other files.
//!
//! A case is a base (a checkpoint or a bundle), a mutation of its files, and a subcommand. All are drawn by a
//! seed and the case's number. `cargo xtask fault-injection` runs a thousand cases. It takes `--cases`,
//! `--seed`, `--only KIND` and `--case NUMBER`, which are passed as the variables `MOEC_FAULTS_…`. A plain
//! `cargo test` runs a hundred.
//!
//! A bundle is a program: its object code does what its author wants. So if object code or a plan was changed
//! and the hashes were updated, only subcommands that execute nothing are run.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says which case"
)]

#[path = "fault_injection/bases.rs"]
mod bases;
#[path = "fault_injection/bundles.rs"]
mod bundles;
#[path = "fault_injection/case.rs"]
mod case;
#[path = "fault_injection/files.rs"]
mod files;
#[path = "fault_injection/judge.rs"]
mod judge;
#[path = "fault_injection/rng.rs"]
mod rng;
use crate::support;
#[path = "fault_injection/subcommands.rs"]
mod subcommands;
#[path = "fault_injection/tensors.rs"]
mod tensors;
#[path = "fault_injection/text.rs"]
mod text;

use bases::Bases;
use case::{Case, KINDS};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Number of cases of a plain `cargo test`.
const USUAL: usize = 100;
/// Number of cases between two lines of progress.
const PROGRESS: usize = 50;

/// The value of `MOEC_FAULTS_{name}`, if it is set.
fn option(name: &str) -> Option<String> {
    std::env::var(format!("MOEC_FAULTS_{name}")).ok().filter(|v| !v.is_empty())
}

/// The value of `MOEC_FAULTS_{name}` as a number.
fn number(name: &str) -> Option<u64> {
    option(name).map(|v| v.parse().unwrap_or_else(|_| panic!("`MOEC_FAULTS_{name}` is `{v}`, no number")))
}

/// The cases that the variables select.
fn selected_cases(seed: u64) -> Vec<Case> {
    let only = option("ONLY");
    if let Some(kind) = only.as_deref() {
        let names: Vec<_> = KINDS.iter().map(|k| k.name).collect();
        assert!(names.contains(&kind), "there is no kind `{kind}`; there are {}", names.join(", "));
    }
    if let Some(number) = number("CASE") {
        return vec![Case::draw(seed, number)];
    }
    let cases = number("CASES").map_or(USUAL, |n| usize::try_from(n).unwrap());
    let all = (0..).map(|i| Case::draw(seed, i));
    all.filter(|c| only.as_deref().is_none_or(|k| k == c.kind.name)).take(cases).collect()
}

#[test]
fn damaged_files_are_reported_or_read_correctly() {
    let seed = number("SEED").unwrap_or(0);
    let cases = selected_cases(seed);
    // Called here, since this thread has the name of the test.
    case::coreml_once();
    let bases = Bases::new();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let codes: Mutex<[usize; 4]> = Mutex::default();
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let index = match case.run(&bases, cases.len() == 1) {
                Ok(Some(code)) => usize::from(code).min(2),
                Ok(None) => 3,
                Err(why) => {
                    eprintln!(
                        "{case}: {why}\n  again: cargo xtask fault-injection --seed {seed} --case {}",
                        case.number
                    );
                    failed.lock().unwrap().push(case.number);
                    continue;
                }
            };
            let mut codes = codes.lock().unwrap();
            codes[index] += 1;
            let done = codes.iter().sum::<usize>() + failed.lock().unwrap().len();
            if done % PROGRESS == 0 {
                eprintln!("{done} of {} cases, {} failed", cases.len(), failed.lock().unwrap().len());
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(4);
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    bases.untouched();
    let [well, refused, misused, skipped] = codes.into_inner().unwrap();
    eprintln!(
        "seed {seed}: {} cases, {well} went well, {refused} were refused, {misused} as bad use; {skipped} could not be tried here",
        cases.len()
    );
    let mut failed = failed.into_inner().unwrap();
    failed.sort_unstable();
    assert!(failed.is_empty(), "{} of {} cases failed: {failed:?}", failed.len(), cases.len());
}

#[test]
fn fault_cases_are_reproducible_by_number() {
    for number in 0..50 {
        assert_eq!(Case::draw(7, number).to_string(), Case::draw(7, number).to_string());
    }
    let all = |seed| (0..50).map(|n| Case::draw(seed, n).to_string()).collect::<Vec<_>>();
    assert_ne!(all(1), all(2));
    // A plain run has cases of every kind.
    let is_drawn = |k: &case::Kind| (0..USUAL as u64).any(|n| Case::draw(0, n).kind.name == k.name);
    let never: Vec<_> = KINDS.iter().filter(|k| !is_drawn(k)).map(|k| k.name).collect();
    assert!(never.is_empty(), "a plain test never meets {never:?}");
}

/// Tests the judge itself.
#[test]
fn judge_rejects_crashes_hangs_and_silent_failures() {
    use judge::{Outcome, verdict};
    let fine = Outcome { code: Some(1), signal: None, stderr: "error: `a` is wrong\n".into(), hung: false };
    let of = |change: &dyn Fn(&mut Outcome)| {
        let mut outcome = fine.clone();
        change(&mut outcome);
        verdict(&outcome)
    };
    assert_eq!(verdict(&fine), Ok(()));
    assert!(of(&|o| o.hung = true).unwrap_err().contains("hangs"));
    assert!(of(&|o| (o.code, o.signal) = (None, Some(11))).unwrap_err().contains("signal 11"));
    assert!(of(&|o| o.code = Some(101)).unwrap_err().contains("101"));
    assert!(of(&|o| o.code = Some(130)).unwrap_err().contains("130"));
    assert!(of(&|o| o.stderr = "thread 'main' panicked at".into()).unwrap_err().contains("panicked"));
    assert!(of(&|o| o.stderr.clear()).unwrap_err().contains("no error"));
    assert!(of(&|o| o.stderr = "error: it failed\n".into()).unwrap_err().contains("names nothing"));
}
