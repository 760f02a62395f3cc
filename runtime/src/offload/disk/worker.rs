//! Requests to a disk and its events, and the worker that serves them in turns. The worker runs on a thread
//! of its own ([`super::ThreadedDisk`]), or under simulated time on the thread that waits.

use super::buffer::{Buffer, Buffers};
use super::clock::Clock;
use super::error::{ReadError, ReadFault};
use super::event::{Event, Fetch, MAX_PARTS, Priority, Ticket};
use super::extent::ExtentTable;
use super::files::Files;
use super::options::Options;
use super::reader::{Read, ReadResult, Reader};
use super::scheduler::ReadScheduler;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Maximum time that `drop` waits for reads in flight.
const GRACE: Duration = Duration::from_secs(1);
/// Pause after the operating system asked to try again.
const PAUSE: Duration = Duration::from_millis(1);

/// Statistics of reads since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of extents that arrived, repeated reads included.
    pub bytes: u64,
    /// Reads that were started.
    pub reads: u64,
    /// Blocks and extents that were read again.
    pub repeated: u64,
    /// Fetches that ended in an error.
    pub failed: u64,
    /// Extents whose checksum was computed.
    pub checked: u64,
    /// Time with a read in flight.
    pub busy: Duration,
}

pub(super) enum Command {
    Add(Fetch),
    Raise(Ticket),
    Cancel(Ticket),
}

#[derive(Default)]
struct Inbox {
    commands: VecDeque<Command>,
    stop: bool,
    /// Error number with which the reader failed.
    broken: Option<i32>,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    events: Mutex<VecDeque<Event>>,
    changed: Condvar,
    stats: Mutex<Stats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests of a disk and its events, which a [`Worker`] serves.
pub struct DiskQueue {
    table: Arc<ExtentTable>,
    buffers: Arc<Buffers>,
    shared: Arc<Shared>,
    serial: AtomicU64,
}

impl DiskQueue {
    /// Creates a queue for extents of `table` that are read into `buffers`.
    pub fn new(table: Arc<ExtentTable>, buffers: Arc<Buffers>) -> Self {
        // Capacity for everything that can be pending at once, so that nothing is allocated later: the
        // extents of a fetch, and the event that frees its buffer.
        let (shared, n) = (Arc::new(Shared::default()), buffers.len());
        lock(&shared.inbox).commands.reserve(2 * n);
        lock(&shared.events).reserve((MAX_PARTS + 1) * n);
        Self { table, buffers, shared, serial: AtomicU64::new(0) }
    }

    /// Reads `count` neighbouring extents from `first` on into a buffer, the first one to its front.
    ///
    /// # Errors
    /// Extents that do not exist or are not neighbours, more than [`MAX_PARTS`], a buffer that is too small
    /// or of another region, or a reader that has failed. The buffer is free again then.
    pub(super) fn submit(
        &self,
        first: u32,
        count: u32,
        priority: Priority,
        buffer: Buffer,
    ) -> Result<Ticket> {
        let run = self.table.run(first, count)?;
        if count as usize > MAX_PARTS {
            return Err(Error::plan(format!("a fetch of {count} extents, not of {MAX_PARTS} at most")));
        }
        if run.bytes > buffer.capacity() || !buffer.is_of(&self.buffers) {
            return Err(Error::plan(format!("{} bytes for a buffer of {}", run.bytes, buffer.capacity())));
        }
        let ticket = Ticket { buffer: buffer.index(), serial: self.serial.fetch_add(1, Ordering::Relaxed) };
        let mut inbox = lock(&self.shared.inbox);
        if let Some(errno) = inbox.broken {
            let extent = self.table.extents().get(first as usize);
            let path = self.table.files().get(run.file as usize).map(|f| f.path.clone());
            return Err(Error::Read(Box::new(ReadError {
                path: path.unwrap_or_default(),
                extent: first,
                expert: None,
                offset: run.offset,
                bytes: extent.map_or(0, |e| e.bytes),
                fault: ReadFault::Reader { errno },
            })));
        }
        inbox.commands.push_back(Command::Add(Fetch { ticket, first, count, priority, buffer }));
        Ok(ticket)
    }

    pub(super) fn push(&self, command: Command) {
        lock(&self.shared.inbox).commands.push_back(command);
    }

    /// The next event, if there is one.
    pub fn poll(&self) -> Option<Event> {
        lock(&self.shared.events).pop_front()
    }

    /// Whether there is an event.
    pub fn has_events(&self) -> bool {
        !lock(&self.shared.events).is_empty()
    }

    /// Waits for an event, for at most `at_most` (`None`: without limit).
    pub(super) fn wait_for_events(&self, at_most: Option<Duration>) -> MutexGuard<'_, VecDeque<Event>> {
        let start = Instant::now();
        let mut events = lock(&self.shared.events);
        while events.is_empty() {
            let changed = &self.shared.changed;
            events = match at_most.map(|time| time.saturating_sub(start.elapsed())) {
                None => changed.wait(events).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => break,
                Some(time) => changed.wait_timeout(events, time).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        events
    }

    /// Makes the worker take no further turn.
    pub(super) fn stop(&self) {
        lock(&self.shared.inbox).stop = true;
    }

    /// Statistics of reads so far.
    pub fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    /// The buffers that are read into.
    pub fn buffers(&self) -> &Arc<Buffers> {
        &self.buffers
    }

    /// The extents that are read.
    pub fn table(&self) -> &Arc<ExtentTable> {
        &self.table
    }
}

/// Serves a [`DiskQueue`] in turns.
pub struct Worker {
    // Dropped in this order: the reader waits for its reads, then the scheduler keeps the buffers that they
    // still hold.
    reader: Box<dyn Reader>,
    scheduler: ReadScheduler,
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
    commands: VecDeque<Command>,
    reads: Vec<Read>,
    done: Vec<ReadResult>,
    events: VecDeque<Event>,
    busy: Duration,
    /// Reads that ended in the last turn.
    ended: usize,
}

impl Worker {
    /// Creates a worker that reads with `reader`, whose files are `files`.
    pub fn new(
        queue: &DiskQueue,
        reader: Box<dyn Reader>,
        files: Arc<Files>,
        clock: Arc<dyn Clock>,
        options: &Options,
    ) -> Self {
        let (depth, n) = (reader.depth(), queue.buffers.len());
        let scheduler =
            ReadScheduler::new(Arc::clone(&queue.table), files, Arc::clone(&clock), *options, n, depth);
        Self {
            reader,
            scheduler,
            clock,
            shared: Arc::clone(&queue.shared),
            commands: VecDeque::with_capacity(2 * n),
            reads: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            events: VecDeque::with_capacity((MAX_PARTS + 1) * n),
            busy: Duration::ZERO,
            ended: 0,
        }
    }

    /// Takes turns until it is stopped or the reader has failed.
    pub(super) fn run(mut self) {
        while self.run_once(None).is_some() {}
    }

    /// Takes a turn: accepts requests, starts reads and waits for results, for at most `at_most`. Returns the
    /// number of reads that have ended; `None` if there will be no more.
    pub fn run_once(&mut self, at_most: Option<Duration>) -> Option<usize> {
        if self.is_broken() {
            return None;
        }
        match self.try_run_once(at_most) {
            Ok(goes_on) => goes_on.then_some(self.ended),
            Err(e) => {
                self.broken(e.raw_os_error().unwrap_or(libc::EIO));
                None
            }
        }
    }

    /// Number of reads in flight.
    pub fn in_flight(&self) -> usize {
        self.scheduler.in_flight()
    }

    fn is_broken(&self) -> bool {
        lock(&self.shared.inbox).broken.is_some()
    }

    /// Takes a turn; returns false at the end.
    fn try_run_once(&mut self, at_most: Option<Duration>) -> std::io::Result<bool> {
        self.ended = 0;
        if self.scheduler.should_pause() {
            self.wait(Some(PAUSE))?;
        }
        let mut inbox = lock(&self.shared.inbox);
        std::mem::swap(&mut self.commands, &mut inbox.commands);
        let stop = inbox.stop;
        drop(inbox);
        if stop {
            return Ok(false);
        }
        self.execute_commands();
        self.scheduler.expire(&mut self.events);
        self.scheduler.start(&mut self.reads, &mut self.events);
        self.publish();
        if !self.reads.is_empty() {
            // SAFETY: every read is into the buffer of a fetch, which the scheduler owns until the result
            // arrives. No more reads are in flight than the reader's depth.
            let submitted = unsafe { self.reader.submit(&self.reads) };
            self.reads.clear();
            submitted?;
        }
        let deadline = self.scheduler.deadline().map(|moment| self.clock.until(moment));
        let at_most = deadline.map_or(at_most, |time| Some(at_most.map_or(time, |most| most.min(time))));
        self.wait(at_most)?;
        Ok(true)
    }

    fn execute_commands(&mut self) {
        for command in self.commands.drain(..) {
            match command {
                Command::Add(fetch) => self.scheduler.add(fetch),
                Command::Raise(ticket) => self.scheduler.raise(ticket),
                Command::Cancel(ticket) => self.scheduler.cancel(ticket, &mut self.events),
            }
        }
    }

    fn wait(&mut self, at_most: Option<Duration>) -> std::io::Result<()> {
        let start = (self.scheduler.in_flight() > 0).then(|| self.clock.now());
        self.reader.wait(&mut self.done, at_most)?;
        if let Some(start) = start {
            self.busy += self.clock.now().saturating_sub(start);
        }
        self.ended += self.done.len();
        for done in self.done.drain(..) {
            self.scheduler.finish(done, &mut self.events);
        }
        self.publish();
        Ok(())
    }

    /// Publishes events.
    fn publish(&mut self) {
        if self.events.is_empty() {
            return;
        }
        let c = self.scheduler.counts;
        *lock(&self.shared.stats) = Stats {
            bytes: c.bytes,
            reads: c.reads,
            repeated: c.repeated,
            failed: c.failed,
            checked: c.checked,
            busy: self.busy,
        };
        lock(&self.shared.events).append(&mut self.events);
        self.shared.changed.notify_all();
    }

    /// Notifies all threads that the reader has failed and there will be no more reads.
    fn broken(&mut self, errno: i32) {
        let mut inbox = lock(&self.shared.inbox);
        inbox.broken = Some(errno);
        std::mem::swap(&mut self.commands, &mut inbox.commands);
        drop(inbox);
        self.execute_commands();
        self.scheduler.fail_all(&ReadFault::Reader { errno }, &mut self.events);
        self.publish();
    }
}

impl Drop for Worker {
    /// Waits a while for reads in flight, so that their buffers are free again.
    fn drop(&mut self) {
        if self.is_broken() {
            return;
        }
        self.commands.clear();
        self.scheduler.stop();
        let start = Instant::now();
        while self.scheduler.in_flight() > 0 && start.elapsed() < GRACE {
            if self.wait(Some(GRACE)).is_err() {
                return;
            }
        }
    }
}
