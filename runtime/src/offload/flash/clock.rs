//! Clock for threads that wait for reads.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Tells the time since some moment in the past; never runs backwards.
pub trait Clock: Send + Sync {
    /// Now.
    fn now(&self) -> Duration;
    /// Time that a thread may sleep, in real time, before it asks again whether `moment` has come.
    fn until(&self, moment: Duration) -> Duration;
}

/// The system's monotonic clock.
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

/// A clock that goes only as far as it is put.
#[derive(Debug, Default)]
pub struct ManualClock(AtomicU64);

impl ManualClock {
    /// Puts the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    // There is no event when the clock is put forward, so it is polled often.
    fn until(&self, moment: Duration) -> Duration {
        if moment <= self.now() { Duration::ZERO } else { Duration::from_millis(1) }
    }
}
