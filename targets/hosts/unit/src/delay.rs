//! A slower network, for measurements and tests: queues of the kernel that delay packets are not on every machine.

use crate::wire::{Tag, Wire};
use moec_runtime::{Error, Result};
use std::time::{Duration, Instant};

/// Variable with the microseconds that are added to each round trip to this host. For measurements and tests alone.
pub const DELAY_VARIABLE: &str = "MOEC_TEST_HOST_DELAY_US";

/// A wire whose answers leave later.
#[derive(Debug)]
pub struct Delayed<'w> {
    wire: &'w dyn Wire,
    delay: Duration,
}

impl<'w> Delayed<'w> {
    /// The wire with the delay of the environment, if it has one.
    ///
    /// # Errors
    /// A value of the variable that is not a number of microseconds.
    pub fn from_environment(wire: &'w dyn Wire) -> Result<Self> {
        let given = std::env::var(DELAY_VARIABLE).ok();
        let delay = given.as_deref().map_or(Ok(0), |text| {
            text.parse().map_err(|_| Error::range(DELAY_VARIABLE, "a number of microseconds", text))
        });
        Ok(Self { wire, delay: Duration::from_micros(delay?) })
    }
}

impl Wire for Delayed<'_> {
    fn rank(&self) -> usize {
        self.wire.rank()
    }

    fn hosts(&self) -> usize {
        self.wire.hosts()
    }

    fn send(&self, to: usize, tag: Tag, bytes: &[u8], wait: Duration) -> Result<()> {
        if tag == Tag::Answer {
            let begin = Instant::now();
            // Sleeping would take longer.
            while begin.elapsed() < self.delay {
                std::hint::spin_loop();
            }
        }
        self.wire.send(to, tag, bytes, wait)
    }

    fn receive(&self, from: usize, tag: Tag, wait: Duration, message: &mut Vec<u8>) -> Result<bool> {
        self.wire.receive(from, tag, wait, message)
    }

    fn end_job(&self, why: &Error) -> ! {
        self.wire.end_job(why)
    }
}
