//! A modelled device: it answers reads after as long as a model says, in virtual time.
//!
//! The model is one queue. Reads pass a link one after the other, at its rate, and end a latency after their
//! last byte. So the device reaches its rate if more bytes are in flight than the link carries during the
//! latency, and ends reads in the order of submission. This is the simplest model with the two figures of a
//! bandwidth table; a drive's own scheduling is not modelled.
//!
//! A thread that waits for it advances the virtual time. With an inner reader the bytes are really read,
//! however long that takes. Without one it is a device without bytes, for callers that need only the times.

use super::clock::VirtualClock;
use moec_runtime::offload::disk::{Clock, Read, ReadResult, Reader, Wake};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of reads in flight of a modelled device: every inner reader takes as many.
const MOST: u32 = 32;

/// Model of a link to a device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Time from the last byte of a read to its result.
    pub latency: Duration,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Maximum reads in flight, 1 to 32.
    pub depth: u32,
}

impl Link {
    /// Reads in flight.
    fn depth(&self) -> u32 {
        self.depth.clamp(1, MOST)
    }

    /// Time of this many bytes on the link; 0 on a link without a rate.
    fn time(&self, bytes: u32) -> Duration {
        let seconds = f64::from(bytes) / self.bytes_per_second;
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }
}

/// A modelled device.
pub struct Modelled {
    link: Link,
    clock: Arc<VirtualClock>,
    /// Reads in flight, with the times when they will end, in order.
    queue: VecDeque<(Duration, u64)>,
    /// Time when the link is free.
    free: Duration,
    /// Reader of the bytes, and its results before their time.
    inner: Option<Box<dyn Reader>>,
    answers: Vec<ReadResult>,
    /// Sizes of reads without bytes.
    sizes: VecDeque<u32>,
}

impl Modelled {
    /// A device behind a link; `inner` reads the bytes.
    pub fn new(link: Link, clock: Arc<VirtualClock>, inner: Option<Box<dyn Reader>>) -> Self {
        let (queue, sizes) = (VecDeque::with_capacity(MOST as usize), VecDeque::with_capacity(MOST as usize));
        Self { link, clock, queue, free: Duration::ZERO, inner, answers: Vec::new(), sizes }
    }

    /// Result of the real reader; waiting for it takes no virtual time.
    fn answer(&mut self, token: u64, bytes: u32) -> io::Result<ReadResult> {
        let Some(inner) = &mut self.inner else { return Ok(ReadResult { token, result: Ok(bytes) }) };
        loop {
            if let Some(at) = self.answers.iter().position(|d| d.token == token) {
                return Ok(self.answers.swap_remove(at));
            }
            inner.wait(&mut self.answers, None)?;
        }
    }
}

impl Reader for Modelled {
    fn depth(&self) -> usize {
        let own = self.link.depth() as usize;
        self.inner.as_ref().map_or(own, |inner| own.min(inner.depth()))
    }

    unsafe fn submit(&mut self, reads: &[Read]) -> io::Result<()> {
        for read in reads {
            self.free = self.free.max(self.clock.now()).saturating_add(self.link.time(read.bytes));
            self.queue.push_back((self.free.saturating_add(self.link.latency), read.token));
            self.sizes.push_back(read.bytes);
        }
        match &mut self.inner {
            // SAFETY: guaranteed by the caller; the result is held back until its time, so the bytes stay the
            // read's.
            Some(inner) => unsafe { inner.submit(reads) },
            None => Ok(()),
        }
    }

    /// Advances virtual time until a read has ended, or by `at_most`; not at all if `at_most` is `None` and
    /// no read is in flight.
    fn wait(&mut self, done: &mut Vec<ReadResult>, at_most: Option<Duration>) -> io::Result<()> {
        let now = self.clock.now();
        let next = self.queue.front().map(|&(due, _)| due.saturating_sub(now));
        let pass = match (next, at_most) {
            (Some(next), Some(most)) => next.min(most),
            (next, most) => next.or(most).unwrap_or_default(),
        };
        self.clock.advance(pass);
        let now = now.saturating_add(pass);
        while let Some(&(due, token)) = self.queue.front()
            && due <= now
        {
            self.queue.pop_front();
            let bytes = self.sizes.pop_front().unwrap_or(0);
            let answer = self.answer(token, bytes)?;
            done.push(answer);
        }
        Ok(())
    }

    /// Wakes no thread: requests and waits are on the same thread.
    fn waker(&self) -> Arc<dyn Wake> {
        struct Nobody;
        impl Wake for Nobody {
            fn wake(&self) {}
        }
        Arc::new(Nobody)
    }

    fn describe(&self) -> String {
        let (rate, latency) = (self.link.bytes_per_second * 1e-9, self.link.latency);
        let behind = self.inner.as_ref().map(|inner| format!("; {}", inner.describe())).unwrap_or_default();
        format!("a model of {rate:.2} GB/s and {latency:?}{behind}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_runtime::platform::memory::Addr;
    use std::ptr;

    fn read(token: u64, bytes: u32) -> Read {
        Read { token, file: 0, offset: 0, bytes, at: Addr::read_only(ptr::null()), buffer: 0 }
    }

    #[test]
    fn reads_share_the_link_sequentially() {
        let clock = Arc::new(VirtualClock::default());
        let link = Link { latency: Duration::from_micros(10), bytes_per_second: 1e9, depth: 64 };
        let mut device = Modelled::new(link, Arc::clone(&clock), None);
        assert_eq!(device.depth(), 32);
        let mut done = Vec::new();
        device.wait(&mut done, Some(Duration::from_micros(5))).unwrap();
        assert_eq!((clock.now(), done.len()), (Duration::from_micros(5), 0));
        // SAFETY: nothing writes to them.
        unsafe { device.submit(&[read(1, 4000), read(2, 8000)]) }.unwrap();
        let answer = |token, bytes| ReadResult { token, result: Ok(bytes) };
        for (most, at, want) in [
            (Some(Duration::from_micros(4)), 9, vec![]),
            // Arrivals at 5 + 4 + 10, and 8 later.
            (None, 19, vec![answer(1, 4000)]),
            (Some(Duration::ZERO), 19, vec![]),
            (Some(Duration::from_micros(50)), 27, vec![answer(2, 8000)]),
            (None, 27, vec![]),
            (Some(Duration::from_micros(3)), 30, vec![]),
        ] {
            done.clear();
            device.wait(&mut done, most).unwrap();
            assert_eq!((clock.now(), &done), (Duration::from_micros(at), &want));
        }
    }
}
