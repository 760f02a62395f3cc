//! Times of matrix kernels on this machine, each in the schedule that the cost model chooses: what `moec fit`
//! predicts the speed of a plan by.

use crate::tuner::failed;
use moec_base::error::Result;
use moec_base::interrupt;
use moec_cpu::{CpuTarget, KernelSpec, Schedule, Stopwatch};
use moec_passes::tune::KernelTimer;
use std::cell::RefCell;
use std::collections::HashMap;
use std::time::Duration;

/// Time of a kernel, with its compilation: the first calls are slower than those of a run.
const TIME: Duration = Duration::from_millis(200);

/// Kernels that were timed: plans that differ in the formats of some weights share the others.
#[derive(Debug)]
pub struct KernelTimes {
    threads: usize,
    timed: RefCell<Timed>,
}

#[derive(Debug, Default)]
struct Timed {
    /// Created when the first kernel is timed.
    watch: Option<Stopwatch>,
    /// By symbol and rows.
    seconds: HashMap<(String, usize), f64>,
}

/// The timer of one compilation.
#[derive(Debug)]
struct Timer<'a> {
    times: &'a KernelTimes,
    target: &'a CpuTarget,
}

impl KernelTimes {
    /// None yet.
    ///
    /// # Errors
    /// An invalid number of threads.
    pub fn new() -> Result<Self> {
        let threads = moec_runtime::platform::cpu::threads(None)?;
        Ok(Self { threads, timed: RefCell::default() })
    }

    /// Number of kernels that were timed.
    pub fn count(&self) -> usize {
        self.timed.borrow().seconds.len()
    }

    /// Times the kernels of a compilation for this machine.
    pub fn timer<'a>(&'a self, target: &'a CpuTarget) -> Box<dyn KernelTimer + 'a> {
        Box::new(Timer { times: self, target })
    }

    fn time(&self, target: &CpuTarget, spec: &KernelSpec, n: usize, schedule: Schedule) -> Result<f64> {
        let key = (target.symbol(&spec.with_schedule(schedule)), n);
        let mut timed = self.timed.borrow_mut();
        if let Some(&seconds) = timed.seconds.get(&key) {
            return Ok(seconds);
        }
        let mut watch = match timed.watch.take() {
            Some(watch) => watch,
            None => Stopwatch::new(target, self.threads).map_err(failed)?,
        };
        let times = watch.time(target, spec, n, &[schedule], TIME, &interrupt::requested).map_err(failed)?;
        let seconds = times.iter().sum::<f64>() / watch.share(target, spec, n);
        timed.watch = Some(watch);
        timed.seconds.insert(key, seconds);
        Ok(seconds)
    }
}

impl KernelTimer for Timer<'_> {
    fn threads(&self) -> usize {
        self.times.threads
    }

    fn measure(
        &mut self,
        spec: &KernelSpec,
        n: usize,
        model: Schedule,
        _: usize,
    ) -> Result<Vec<(Schedule, f64)>> {
        Ok(vec![(model, self.times.time(self.target, spec, n, model)?)])
    }
}
