//! Workers: jobs in parallel, with their output in files and their times stored for the next run.

use super::programs::{Job, file_name, reports};
use super::report::{Outcome, Progress, Time};
use super::tables::LONG;
use super::usage;
use crate::shell::Failed;
use moec_testing::{ALL, SKIPPED};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The longest that a job may take.
const DEADLINE: Duration = Duration::from_mins(30);
/// Memory that a worker is counted with: what building and running a test's model takes at most.
const MEMORY: u64 = 2 << 30;
/// Time between two looks at a job.
const TICK: Duration = Duration::from_millis(5);

/// The file of lines about what was skipped.
pub(super) fn skips() -> PathBuf {
    reports().join("skipped")
}

/// The file of seconds that jobs took.
fn times() -> PathBuf {
    reports().join("times")
}

/// Workers for this machine: one for each core, while there is memory for them.
pub(super) fn workers() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let info = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free =
        info.lines().find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix(" kB")?.parse().ok());
    free.map_or(cores, |kib: u64| cores.min((kib * 1024 / MEMORY).max(1) as usize))
}

/// Runs all jobs, those that took longest the last time first, and those that must be alone last. `every`
/// combination is tried, or each pair.
pub(super) fn all(jobs: Vec<Job>, workers: usize, every: bool) -> Result<Vec<Outcome>, Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", reports().display()));
    fs::create_dir_all(reports()).map_err(failed)?;
    fs::write(skips(), "").map_err(failed)?;
    let mut known = read_times(&fs::read_to_string(times()).unwrap_or_default());
    let (alone, mut parallel): (Vec<Job>, Vec<Job>) = jobs.into_iter().partition(|j| j.alone);
    let last = |job: &Job| known.get(&job.name()).copied().unwrap_or_else(|| guess(&job.program()));
    parallel.sort_by(|a, b| last(a).total_cmp(&last(b)));
    let progress = Progress::new(alone.len() + parallel.len());
    let mut outcomes = side_by_side(parallel, workers, every, &progress);
    outcomes.extend(side_by_side(alone, 1, every, &progress));
    known.extend(outcomes.iter().map(|o| (o.job.name(), o.time.seconds)));
    let lines: Vec<String> = known.iter().map(|(name, s)| format!("{s:.2} {name}\n")).collect();
    fs::write(times(), lines.concat()).map_err(failed)?;
    Ok(outcomes)
}

/// Seconds of a job that is not known, so that those of the table begin, in its order.
fn guess(program: &str) -> f64 {
    LONG.iter().position(|name| *name == program).map_or(1.0, |row| (600 - row) as f64)
}

/// Seconds by job.
fn read_times(text: &str) -> BTreeMap<String, f64> {
    text.lines()
        .filter_map(|l| {
            let (seconds, name) = l.split_once(' ')?;
            Some((name.to_owned(), seconds.parse().ok()?))
        })
        .collect()
}

/// Runs jobs, the last first.
fn side_by_side(jobs: Vec<Job>, workers: usize, every: bool, progress: &Progress) -> Vec<Outcome> {
    let (jobs, outcomes) = (Mutex::new(jobs), Mutex::new(Vec::new()));
    let next = || jobs.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(job) = next() {
                    let outcome = one(job, every);
                    progress.ended(&outcome);
                    outcomes.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(outcome);
                }
            });
        }
    });
    outcomes.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn one(job: Job, every: bool) -> Outcome {
    let start = Instant::now();
    let log = reports().join(file_name(&job.name())).with_added_extension("log");
    let mut cores = 0.0;
    let status = ended(&job, &log, every, &mut cores);
    let time = Time { seconds: start.elapsed().as_secs_f64(), cores };
    let output = fs::read(&log).unwrap_or_default();
    Outcome::new(job, time, status.map_err(|e| e.to_string()), &String::from_utf8_lossy(&output), log)
}

/// Exit status of a job; one without an end is killed. `cores` receives its core-seconds at the last sample.
fn ended(job: &Job, log: &Path, every: bool, cores: &mut f64) -> std::io::Result<ExitStatus> {
    let file = File::create(log)?;
    let mut command = job.command();
    command
        .env(SKIPPED, skips())
        .env(ALL, if every { "1" } else { "" })
        .stdout(file.try_clone()?)
        .stderr(file);
    let mut child: Child = command.spawn()?;
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        *cores = usage::of_process(child.id()).unwrap_or(*cores);
        if start.elapsed() > DEADLINE {
            child.kill()?;
            child.wait()?;
            return Err(std::io::Error::other(format!("it ran for {} minutes", DEADLINE.as_secs() / 60)));
        }
        std::thread::sleep(TICK);
    }
}

#[cfg(test)]
mod tests {
    use super::read_times;

    #[test]
    fn test_times_are_parsed_by_name() {
        let times = read_times("1.50 golden a::b\nx\n0.20 moec-ir\n");
        assert_eq!(
            times.into_iter().collect::<Vec<_>>(),
            [("golden a::b".into(), 1.5), ("moec-ir".into(), 0.2)]
        );
    }
}
