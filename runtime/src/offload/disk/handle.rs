//! An SSD with a thread of its own that reads: fetches go in, events come out.

use super::buffer::{Buffer, Buffers};
use super::clock::Clock;
use super::event::{Event, Priority, Ticket};
use super::extent::ExtentTable;
use super::files::Files;
use super::open;
use super::options::Options;
use super::reader::{Reader, Wake};
use super::worker::{Command, DiskQueue, Stats, Worker};
use crate::error::{Error, Result};
use crate::platform::cpu::CoreSet;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// An SSD: fetches go in, events come out.
///
/// [`ThreadedDisk`] is the real one. Code over this trait can also run under virtual time, with another
/// implementation.
pub trait Disk: Send + Sync {
    /// Its requests and events.
    fn queue(&self) -> &DiskQueue;

    /// Makes it begin what was requested.
    fn wake(&self);

    /// Waits for an event, for at most `at_most` (`None`: without limit). Returns whether there is an event
    /// to [`Disk::poll`].
    fn wait_for_event(&self, at_most: Option<Duration>) -> bool;

    /// Time of the waiting thread, since an arbitrary moment in the past.
    fn now(&self) -> Duration;

    /// Description of the reader and its features, for users.
    fn describe(&self) -> &str;

    /// The next event, if there is one.
    fn poll(&self) -> Option<Event> {
        self.queue().poll()
    }

    /// Reads `count` neighbouring extents from `first` on into a buffer, the first one to its front.
    ///
    /// # Errors
    /// Extents that do not exist or are not neighbours, more than [`MAX_PARTS`](super::MAX_PARTS), a buffer
    /// that is too small or of another region, or a reader that has failed. The buffer is free again then.
    fn submit(&self, first: u32, count: u32, priority: Priority, buffer: Buffer) -> Result<Ticket> {
        let ticket = self.queue().submit(first, count, priority, buffer)?;
        self.wake();
        Ok(ticket)
    }

    /// Makes a fetch urgent: from now on its blocks go before those of prefetches.
    fn raise(&self, ticket: Ticket) {
        self.queue().push(Command::Raise(ticket));
        self.wake();
    }

    /// Cancels a fetch: blocks that were not started are not read. Unless it has ended already, it ends in
    /// [`Event::Cancelled`].
    fn cancel(&self, ticket: Ticket) {
        self.queue().push(Command::Cancel(ticket));
        self.wake();
    }

    /// Statistics of reads so far.
    fn stats(&self) -> Stats {
        self.queue().stats()
    }

    /// The buffers that it reads into.
    fn buffers(&self) -> &Arc<Buffers> {
        self.queue().buffers()
    }
}

/// Reads extents into buffers on a thread of its own.
///
/// Fetches can be submitted and events taken from any thread. Dropping it ends all fetches.
pub struct ThreadedDisk {
    queue: DiskQueue,
    waker: Arc<dyn Wake>,
    handle: Option<JoinHandle<()>>,
    clock: Arc<dyn Clock>,
    description: String,
}

impl ThreadedDisk {
    /// Opens the files of `table` and starts the thread. Reads go to `buffers`.
    ///
    /// # Errors
    /// A file that is missing or has another size, an option out of its range, io_uring requested by name but
    /// missing, or a thread that cannot be started.
    pub fn open(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        options: &Options,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        Self::with_reader(table, buffers, options, clock, |reader| reader)
    }

    /// As [`ThreadedDisk::open`], with a wrapper around the reader.
    ///
    /// # Errors
    /// As [`ThreadedDisk::open`].
    pub fn with_reader(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        options: &Options,
        clock: Arc<dyn Clock>,
        wrap: impl FnOnce(Box<dyn Reader>) -> Box<dyn Reader>,
    ) -> Result<Self> {
        options.check()?;
        let files = Arc::new(Files::open(&table, options.direct)?);
        let reader = wrap(open::reader(&files, &buffers, options)?);
        let waker = reader.waker();
        let on_core = options.core.map_or(String::new(), |core| format!(", on core {core}"));
        let description =
            format!("{}, blocks of {} KiB{on_core}", reader.describe(), options.block_bytes >> 10);
        let queue = DiskQueue::new(table, buffers);
        let worker = Worker::new(&queue, reader, files, Arc::clone(&clock), options);
        let thread = std::thread::Builder::new().name("moec-disk".to_owned());
        let core = options.core;
        let work = move || {
            if let Some(core) = core {
                CoreSet::of(&[core]).bind();
            }
            worker.run();
        };
        let handle = Some(thread.spawn(work).map_err(Error::thread)?);
        Ok(Self { queue, waker, handle, clock, description })
    }

    /// Waits for an event, for at most `at_most` (`None`: without limit).
    pub fn wait(&self, at_most: Option<Duration>) -> Option<Event> {
        self.queue.wait_for_events(at_most).pop_front()
    }
}

impl Disk for ThreadedDisk {
    fn queue(&self) -> &DiskQueue {
        &self.queue
    }

    fn wake(&self) {
        self.waker.wake();
    }

    fn wait_for_event(&self, at_most: Option<Duration>) -> bool {
        !self.queue.wait_for_events(at_most).is_empty()
    }

    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn describe(&self) -> &str {
        &self.description
    }
}

impl Drop for ThreadedDisk {
    fn drop(&mut self) {
        self.queue.stop();
        self.waker.wake();
        if let Some(handle) = self.handle.take() {
            drop(handle.join());
        }
    }
}
