//! Clock for threads that wait for reads.

use std::time::{Duration, Instant};

/// Returns the time since an arbitrary moment in the past; never runs backwards.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Duration;
    /// Time that a thread may sleep, in real time, before it checks again whether `moment` has come.
    fn until(&self, moment: Duration) -> Duration;
}

/// The operating system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl Default for SystemClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }

    fn until(&self, moment: Duration) -> Duration {
        moment.saturating_sub(self.now())
    }
}
