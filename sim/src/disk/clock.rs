//! Virtual time.

use moec_runtime::offload::disk::Clock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Virtual time: it passes while a modelled unit works ([`super::Modelled`]), and stops otherwise.
#[derive(Debug, Default)]
pub struct VirtualClock(AtomicU64);

impl VirtualClock {
    /// Advances the time.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, Ordering::SeqCst);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::SeqCst))
    }

    // The waiting thread is a modelled unit, which advances the clock by this time.
    fn until(&self, moment: Duration) -> Duration {
        moment.saturating_sub(self.now())
    }
}
