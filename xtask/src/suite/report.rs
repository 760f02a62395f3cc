//! Report of a run for people: a line for every job, and at the end what failed, what could not run, what
//! took longest.

use super::programs::Job;
use super::usage;
use moec_testing::{Need, Skip};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Programs in the table of those that took longest.
const PROGRAMS: usize = 20;
/// Tests in the table of those that took longest.
const TESTS: usize = 10;
/// Lines of a failure that are shown; the file has all.
const LINES: usize = 60;

/// Time on the clock, and of all cores together.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Time {
    pub(super) seconds: f64,
    /// Core-seconds of the processes that it started and waited for.
    pub(super) cores: f64,
}

/// Stages of a run with their times.
#[derive(Debug, Default)]
pub(super) struct Stages(Vec<(&'static str, Time)>);

impl Stages {
    /// Does `work` as the stage of that name.
    pub(super) fn timed<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let (start, before) = (Instant::now(), usage::children());
        let result = work();
        self.0
            .push((name, Time { seconds: start.elapsed().as_secs_f64(), cores: usage::children() - before }));
        result
    }

    /// The table of stages, and of what ran in them.
    pub(super) fn table(&self, usage: &[(&str, f64)]) -> String {
        let mut text = String::from("\nstages:           on the clock, of all cores\n");
        for (name, time) in &self.0 {
            let _ = writeln!(text, "{}  {name}", shown(*time));
        }
        text.push_str("\nwhat ran, by core-seconds (from samples of /proc):\n");
        for (name, cores) in usage.iter().filter(|(_, cores)| *cores >= 0.5) {
            let _ = writeln!(text, "{cores:10.1}s  {name}");
        }
        text
    }
}

/// Outcome of a job.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) job: Job,
    pub(super) time: Time,
    /// Tests that passed, failed, and were ignored.
    counts: [u64; 3],
    /// Tests that are ignored, with the reason.
    ignored: Vec<(String, String)>,
    /// Tests that failed.
    failed: Vec<String>,
    /// Further fault.
    wrong: Option<String>,
    log: PathBuf,
}

impl Outcome {
    /// Reads the output of a test program.
    pub(super) fn new(
        job: Job,
        time: Time,
        status: Result<ExitStatus, String>,
        output: &str,
        log: PathBuf,
    ) -> Self {
        let mut counts = [0; 3];
        let (mut ignored, mut failed) = (Vec::new(), Vec::new());
        for line in output.lines() {
            if line.starts_with("test result:") {
                for (count, word) in counts.iter_mut().zip(["passed", "failed", "ignored"]) {
                    *count += number_before(line, word);
                }
            } else if let Some((name, end)) = line.strip_prefix("test ").and_then(|l| l.split_once(" ... ")) {
                match end.strip_prefix("ignored") {
                    Some(why) => ignored.push((name.to_owned(), why.trim_start_matches(", ").to_owned())),
                    None if end == "FAILED" => failed.push(name.to_owned()),
                    None => {}
                }
            }
        }
        let wrong = match status {
            Err(why) => Some(why),
            // A test that a name no longer finds has not passed.
            Ok(status) if status.success() && job.only.is_some() && counts.iter().sum::<u64>() != 1 => {
                Some("it ran no test".to_owned())
            }
            Ok(status) if !status.success() && counts[1] == 0 => Some(status.to_string()),
            Ok(_) => None,
        };
        Self { job, time, counts, ignored, failed, wrong, log }
    }

    fn is_good(&self) -> bool {
        self.wrong.is_none() && self.counts[1] == 0
    }
}

/// `12` of `…; 12 passed; …`.
fn number_before(line: &str, word: &str) -> u64 {
    let words: Vec<&str> = line.split_whitespace().collect();
    let at = words.iter().position(|w| w.trim_end_matches(';') == word);
    at.and_then(|i| words.get(i.checked_sub(1)?)).and_then(|n| n.parse().ok()).unwrap_or(0)
}

/// A line for every job that has ended.
#[derive(Debug)]
pub(super) struct Progress {
    start: Instant,
    jobs: usize,
    done: AtomicUsize,
}

impl Progress {
    pub(super) fn new(jobs: usize) -> Self {
        Self { start: Instant::now(), jobs, done: AtomicUsize::new(0) }
    }

    pub(super) fn ended(&self, outcome: &Outcome) {
        let (done, elapsed) = (self.done.fetch_add(1, Ordering::Relaxed) + 1, self.start.elapsed().as_secs());
        let (minutes, seconds) = (elapsed / 60, elapsed % 60);
        let word = if outcome.is_good() { "ok" } else { "FAILED" };
        let (jobs, width) = (self.jobs, self.jobs.to_string().len());
        let (took, name) = (outcome.time.seconds, outcome.job.name());
        println!("[{done:width$}/{jobs} {minutes:2}:{seconds:02}] {word:6} {took:6.1}s  {name}");
    }
}

/// The summary at the end, and whether all tests passed.
pub(super) fn closing(outcomes: &[Outcome], skipped: &str) -> (String, bool) {
    let mut text = String::new();
    let failures: Vec<&Outcome> = outcomes.iter().filter(|o| !o.is_good()).collect();
    for outcome in &failures {
        failure(&mut text, outcome);
    }
    slowest(&mut text, outcomes);
    missed(&mut text, skipped);
    for outcome in outcomes {
        for (test, why) in &outcome.ignored {
            let why = if why.is_empty() { String::new() } else { format!(" ({why})") };
            let _ = writeln!(text, "ignored: {}{why}", outcome.job.again(test, true));
        }
    }
    let [passed, mut failed, ignored] = [0, 1, 2].map(|i| outcomes.iter().map(|o| o.counts[i]).sum::<u64>());
    failed += failures.iter().filter(|o| o.wrong.is_some()).count() as u64;
    let word = if failures.is_empty() { "ok" } else { "FAILED" };
    let skipped = tests(skipped).len();
    let _ = write!(
        text,
        "\ntest result: {word}. {passed} passed, {skipped} of them skipped in whole or in part; {failed} failed; {ignored} ignored"
    );
    (text, failures.is_empty())
}

/// Output of a job that failed, and the command that repeats it.
fn failure(text: &mut String, outcome: &Outcome) {
    let log = std::fs::read_to_string(&outcome.log).unwrap_or_default();
    let lines: Vec<&str> = log.lines().collect();
    let shown = lines.len().saturating_sub(LINES);
    let _ = writeln!(text, "\n--- {}", outcome.job.name());
    if shown > 0 {
        let _ = writeln!(text, "({shown} more lines in {})", outcome.log.display());
    }
    for line in &lines[shown..] {
        let _ = writeln!(text, "{line}");
    }
    if let Some(wrong) = &outcome.wrong {
        let _ = writeln!(text, "error: {wrong}");
    }
    let only = outcome.job.only.iter();
    let tests: BTreeSet<&String> = outcome.failed.iter().chain(only).collect();
    for test in tests {
        let _ = writeln!(text, "again: {}", outcome.job.again(test, false));
    }
}

/// The programs and the tests that took longest.
fn slowest(text: &mut String, outcomes: &[Outcome]) {
    let mut programs: BTreeMap<&str, Time> = BTreeMap::new();
    let mut sum = Time::default();
    let names: Vec<String> = outcomes.iter().map(|o| o.job.program()).collect();
    for (outcome, name) in outcomes.iter().zip(&names) {
        for time in [programs.entry(name.as_str()).or_default(), &mut sum] {
            time.seconds += outcome.time.seconds;
            time.cores += outcome.time.cores;
        }
    }
    let _ = writeln!(text, "\nslowest programs: on the clock, of all cores");
    table(text, programs.into_iter().map(|(name, time)| (name.to_owned(), time)).collect(), PROGRAMS);
    let _ = writeln!(text, "{}  all together", shown(sum));
    let _ = writeln!(text, "\nslowest tests:");
    table(text, outcomes.iter().map(|o| (o.job.name(), o.time)).collect(), TESTS);
    text.push('\n');
}

/// The first rows, the longest first.
fn table(text: &mut String, mut rows: Vec<(String, Time)>, most: usize) {
    rows.sort_by(|a, b| b.1.seconds.total_cmp(&a.1.seconds));
    for (name, time) in rows.into_iter().take(most) {
        let _ = writeln!(text, "{}  {name}", shown(time));
    }
}

/// Both times in columns.
fn shown(time: Time) -> String {
    format!("{:10.1}s {:10.1}s", time.seconds, time.cores)
}

/// Names of the tests in the lines about what was skipped.
fn tests(skipped: &str) -> BTreeSet<String> {
    skipped.lines().filter_map(|l| Some(l.parse::<Skip>().ok()?.test)).collect()
}

/// One line for each missing need: number of tests, name, remedy.
fn missed(text: &mut String, skipped: &str) {
    let mut by_need: BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> = BTreeMap::new();
    for skip in skipped.lines().filter_map(|l| l.parse::<Skip>().ok()) {
        let (tests, whys) = by_need.entry(skip.need).or_default();
        tests.insert(skip.test);
        whys.extend(Some(skip.why).filter(|w| !w.is_empty()));
    }
    for (name, (tests, whys)) in by_need {
        let (what, help) =
            Need::find(&name).map_or((name, String::new()), |n| (n.what.into(), n.help.to_string()));
        let all: Vec<String> = tests.iter().cloned().collect();
        let why = whys.first().map_or_else(String::new, |w| format!("; {w}"));
        let count =
            if all.len() == 1 { "1 test needs".to_owned() } else { format!("{} tests need", all.len()) };
        let _ = writeln!(text, "skipped: {count} {what} ({help}{why}): {}", all.join(", "));
    }
}

#[cfg(test)]
mod tests {
    use super::super::programs::Program;
    use super::*;

    #[test]
    fn filter_without_matching_tests_is_a_failure() {
        let of = |only: Option<&str>, output: &str| {
            let job = Job { program: Program::default(), only: only.map(str::to_owned), alone: false };
            Outcome::new(job, Time::default(), Ok(ExitStatus::default()), output, PathBuf::new())
        };
        let line =
            |passed: u8| format!("test result: ok. {passed} passed; 0 failed; 0 ignored; 9 filtered out");
        assert!(of(Some("a"), &line(1)).is_good());
        assert!(!of(Some("a"), &line(0)).is_good());
        assert!(of(None, &line(0)).is_good());
        let ignored = of(
            Some("a"),
            "test a ... ignored, some minutes\ntest result: ok. 0 passed; 0 failed; 1 ignored;",
        );
        assert!(ignored.is_good());
        assert_eq!(ignored.ignored, [("a".to_owned(), "some minutes".to_owned())]);
    }

    #[test]
    fn test_summary_lines_are_parsed() {
        let line =
            "test result: ok. 12 passed; 0 failed; 3 ignored; 0 measured; 0 filtered out; finished in 0.05s";
        assert_eq!(["passed", "failed", "ignored", "none"].map(|w| number_before(line, w)), [12, 0, 3, 0]);
    }

    #[test]
    fn missing_requirements_are_listed_once_each() {
        let mut text = String::new();
        missed(
            &mut text,
            "strace\treplace a\t\nstrace\treplace a\t\ngroups\tbudget x\tdenied\nstrace\treplace b\t\n",
        );
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("skipped: 1 test needs control groups"), "{text}");
        assert!(lines[0].ends_with("; denied): budget x"), "{text}");
        assert!(lines[1].ends_with("(apt-get install strace): replace a, replace b"), "{text}");
    }
}
