//! `moec build --tune`: the schedules that are timed, the time for each, and the results that are kept.
//!
//! Results are cached by machine and kernel. So the second build of a model, and other models with the same
//! shapes, do not time anything again.

use moec_base::cache_dir;
use moec_base::error::{Error, Result};
use moec_base::hashing::{hex, sha256};
use moec_base::interrupt;
use moec_base::progress::{Bar, Progress};
use moec_cpu::{CpuTarget, KernelSpec, Knob, Schedule, Stopwatch, TuneError};
use moec_passes::decisions::{ScheduleFields, pieces, schedule};
use moec_passes::tune::{KernelTimer, MARGIN};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The error of a kernel that was not timed.
pub(crate) fn failed(e: TuneError) -> Error {
    match e {
        TuneError::Stopped => {
            interrupt::check().err().unwrap_or_else(|| Error::bug("a tuning stopped by itself"))
        }
        TuneError::Threads(e) => Error::from(e),
        e => Error::bug("a kernel cannot be timed").because(e),
    }
}

/// Cached times of a kernel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheRecord {
    kernel: String,
    times: Vec<(ScheduleFields, f64)>,
}

/// Timer of kernels for one build.
#[derive(Debug)]
pub struct Tuner<'a> {
    target: &'a CpuTarget,
    threads: usize,
    /// Created when the first kernel is timed.
    watch: Option<Stopwatch>,
    end: Instant,
    folder: PathBuf,
    machine: String,
    progress: Progress,
    /// Shown while kernels are timed.
    bar: Option<Bar>,
    timed: usize,
    /// Whether the user was warned that times cannot be cached; one warning is enough.
    warned: bool,
    cached: usize,
    left_out: usize,
}

impl KernelTimer for Tuner<'_> {
    fn threads(&self) -> usize {
        self.threads
    }

    fn measure(
        &mut self,
        spec: &KernelSpec,
        n: usize,
        model: Schedule,
        left: usize,
    ) -> Result<Vec<(Schedule, f64)>> {
        let candidates = self.target.candidates(spec, n);
        let path = self.path(spec, n, &candidates);
        let times = if let Some(times) = self.read(&path, spec, n, &candidates) {
            self.cached += 1;
            times
        } else {
            let rest = self.end.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                self.left_out += 1;
                Vec::new()
            } else {
                let what = format!("{} with {n} rows", self.target.symbol(spec));
                self.progress.detail("Timing", &what);
                let progress = &self.progress;
                let seconds = rest.as_secs().max(1);
                let limit = format!("kernels, {left} of them at most, for up to {seconds} s");
                self.bar.get_or_insert_with(|| progress.phase("Timing", &limit)).label(&what);
                let share = rest / u32::try_from(left.max(1)).unwrap_or(u32::MAX);
                let times = self.time(spec, n, &candidates, model, share)?;
                self.timed += 1;
                self.keep(&path, spec, n, &times);
                times
            }
        };
        if left == 1 {
            self.bar = None;
            self.report();
        }
        Ok(times)
    }
}

impl<'a> Tuner<'a> {
    /// Creates a tuner for a target whose code this machine runs. It takes about `time` in all.
    ///
    /// # Errors
    /// Fails for another machine's target, for an invalid number of threads, or if the cache folder cannot be
    /// written. Times are cached there, and a late failure would waste the tuning.
    pub fn new(target: &'a CpuTarget, time: Duration, progress: &Progress) -> Result<Self> {
        let name = target.name();
        target.runs_here().map_err(|e| {
            Error::usage(format!("`--tune` times kernels on this machine, which is not a `{name}`"))
                .because(e)
                .hint(format!("build on a `{name}`, or without `--tune`: a cost model then chooses"))
        })?;
        let subject = "`--tune`, whose times are kept for later builds,";
        let folder =
            cache_dir::writable_for(subject, Some("build without `--tune`: a cost model then chooses"))?;
        let folder = folder.join("schedules");
        let threads = moec_runtime::platform::cpu::threads(None).map_err(Error::from)?;
        let info = target.info();
        let machine = format!(
            "moec {}, LLVM {}\n{} {}\n{}\n{threads} threads, whole matrices",
            env!("CARGO_PKG_VERSION"),
            moec_cpu::llvm_version(),
            info.triple,
            info.cpu,
            info.features.join(" "),
        );
        Ok(Self {
            target,
            threads,
            watch: None,
            end: Instant::now() + time,
            folder,
            machine,
            progress: progress.clone(),
            bar: None,
            timed: 0,
            warned: false,
            cached: 0,
            left_out: 0,
        })
    }

    /// Reports the end of tuning.
    fn report(&self) {
        let Self { timed, cached, left_out, .. } = self;
        self.progress.stage("Tuned", &format!("{timed} kernels timed, {cached} from the cache"));
        if *left_out > 0 {
            self.progress.warn(&format!(
                "the cost model chose the schedules of {left_out} kernels, as the time was over: \
                 raise `--tune-time`, or build again"
            ));
        }
    }

    fn time(
        &mut self,
        spec: &KernelSpec,
        n: usize,
        candidates: &[Schedule],
        model: Schedule,
        time: Duration,
    ) -> Result<Vec<(Schedule, f64)>> {
        let mut watch = match self.watch.take() {
            Some(watch) => watch,
            None => Stopwatch::new(self.target, self.threads).map_err(failed)?,
        };
        let share = watch.share(self.target, spec, n);
        let mut run = |schedules: &[Schedule], time| {
            let times = watch.time(self.target, spec, n, schedules, time, &interrupt::requested);
            times.map(|times| times.into_iter().map(|t| t / share).collect::<Vec<_>>()).map_err(failed)
        };
        let times = run(candidates, time.mul_f64(0.75))?;
        let mut all: Vec<(Schedule, f64)> = candidates.iter().copied().zip(times).collect();
        // Changes that each help alone may help together.
        if let Some(joint) = self.joint(spec, &all, model)
            && let [of_model, of_joint] = run(&[model, joint], time.mul_f64(0.25))?[..]
            && let Some(&(_, base)) = all.iter().find(|(s, _)| *s == model)
        {
            all.push((joint, base * of_joint / of_model));
        }
        self.watch = Some(watch);
        Ok(all)
    }

    /// The model's schedule with every field that made it faster, if there are at least two.
    fn joint(&self, spec: &KernelSpec, all: &[(Schedule, f64)], model: Schedule) -> Option<Schedule> {
        let base = all.iter().find(|(s, _)| *s == model)?.1;
        let usual = self.target.pieces(spec, Schedule::default());
        let mut best: Vec<(Knob, usize, f64)> = Vec::new();
        for &(s, time) in all.iter().filter(|(_, t)| *t < base * (1.0 - MARGIN)) {
            let changed = self.target.pieces(spec, s).into_iter().find(|p| !usual.contains(p));
            let Some((knob, value)) = changed else { continue };
            match best.iter_mut().find(|b| b.0 == knob) {
                Some(b) if b.2 <= time => {}
                Some(b) => *b = (knob, value, time),
                None => best.push((knob, value, time)),
            }
        }
        let mut joint = self.target.pieces(spec, model);
        for piece in &mut joint {
            if let Some(b) = best.iter().find(|b| b.0 == piece.0) {
                piece.1 = b.1;
            }
        }
        let joint = self.target.schedule(&joint).filter(|_| best.len() > 1)?;
        all.iter().all(|(s, _)| *s != joint).then_some(joint)
    }

    /// Path of a kernel's cached times.
    fn path(&self, spec: &KernelSpec, n: usize, candidates: &[Schedule]) -> PathBuf {
        let key = format!("{}\n{}\n{candidates:?}", self.machine, self.name(spec, n));
        self.folder.join(format!("{}.json", hex(&sha256(key.as_bytes()))))
    }

    fn name(&self, spec: &KernelSpec, n: usize) -> String {
        format!("{} with {n} rows", self.target.symbol(spec))
    }

    /// Times of an earlier build. A file that cannot be used is replaced, whatever is wrong with it.
    fn read(
        &self,
        path: &PathBuf,
        spec: &KernelSpec,
        n: usize,
        candidates: &[Schedule],
    ) -> Option<Vec<(Schedule, f64)>> {
        let record: CacheRecord = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        let all = record.times.iter().map(|(p, t)| Some((schedule(self.target, p)?, *t)));
        let all = all.collect::<Option<Vec<_>>>()?;
        let whole = candidates.iter().all(|c| all.iter().any(|(s, _)| s == c));
        let sound = all.iter().all(|(_, t)| t.is_finite() && *t > 0.0);
        (whole && sound && record.kernel == self.name(spec, n)).then_some(all)
    }

    /// Caches times for later builds. If that fails, later builds time again.
    fn keep(&mut self, path: &PathBuf, spec: &KernelSpec, n: usize, times: &[(Schedule, f64)]) {
        let record = CacheRecord {
            kernel: self.name(spec, n),
            times: times.iter().map(|&(s, t)| (pieces(self.target, spec, s), t)).collect(),
        };
        let partial = path.with_extension(format!("partial-{}", std::process::id()));
        let written = serde_json::to_vec_pretty(&record).map_err(std::io::Error::other).and_then(|text| {
            fs::create_dir_all(&self.folder)?;
            fs::write(&partial, text)?;
            fs::rename(&partial, path)
        });
        if let Err(e) = written
            && !std::mem::replace(&mut self.warned, true)
        {
            let shown = self.folder.display();
            self.progress
                .warn(&format!("times are not kept for later builds: `{shown}` cannot be written: {e}"));
        }
    }
}
