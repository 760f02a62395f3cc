//! A store's view of flash: fetches go in, events come out, a thread of its own reads.

use super::buffer::{Buffer, Buffers};
use super::clock::Clock;
use super::error::{ReadError, ReadFault};
use super::event::{Event, Fetch, MAX_PARTS, Priority, Ticket};
use super::extent::ExtentTable;
use super::files::Files;
use super::open;
use super::options::Options;
use super::reader::{Done, Read, Reader, Wake};
use super::scheduler::Scheduler;
use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long dropping waits for reads in flight, and for how long it sleeps in between.
const GRACE: Duration = Duration::from_secs(1);
/// How long to wait where the system asked to try again.
const PAUSE: Duration = Duration::from_millis(1);

/// What was read since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes of extents that arrived, those read again included.
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

enum Command {
    Add(Fetch),
    Raise(Ticket),
    Cancel(Ticket),
}

#[derive(Default)]
struct Inbox {
    commands: VecDeque<Command>,
    stop: bool,
    /// Error number that the reader broke down with.
    broken: Option<i32>,
}

#[derive(Default)]
struct Shared {
    inbox: Mutex<Inbox>,
    events: Mutex<VecDeque<Event>>,
    news: Condvar,
    stats: Mutex<Stats>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads extents into buffers on a thread of its own.
///
/// Fetches can be submitted and events taken from any thread. Dropping it ends all fetches.
pub struct Flash {
    table: Arc<ExtentTable>,
    buffers: Arc<Buffers>,
    shared: Arc<Shared>,
    waker: Arc<dyn Wake>,
    thread: Option<JoinHandle<()>>,
    serial: AtomicU64,
    description: String,
}

impl Flash {
    /// Opens the files of `table` and starts the thread. Reads go to `buffers`.
    ///
    /// # Errors
    /// A file that is missing or has another size, an option out of its range, io_uring asked for by name
    /// where there is none, or a thread that cannot be started.
    pub fn open(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        options: &Options,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        Self::with_reader(table, buffers, options, clock, |reader| reader)
    }

    /// As [`Flash::open`], with something put in front of the reader ([`super::fault::Faulty`]).
    ///
    /// # Errors
    /// As [`Flash::open`].
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
        let (n, depth) = (buffers.len(), reader.depth());
        let scheduler = Scheduler::new(Arc::clone(&table), files, Arc::clone(&clock), *options, n, depth);
        let (waker, description) = (reader.waker(), reader.describe());
        let description = format!("{description}, blocks of {} KiB", options.block_bytes >> 10);
        let shared = Arc::new(Shared::default());
        // Room for whatever can be under way at once, so that nothing is allocated later.
        lock(&shared.inbox).commands.reserve(2 * n);
        lock(&shared.events).reserve(MAX_PARTS * n);
        let worker = Worker {
            reader,
            scheduler,
            clock,
            shared: Arc::clone(&shared),
            commands: VecDeque::with_capacity(2 * n),
            reads: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            events: VecDeque::with_capacity(MAX_PARTS * n),
            busy: Duration::ZERO,
        };
        let thread = std::thread::Builder::new().name("moec-flash".to_owned());
        let thread = thread.spawn(move || worker.run()).map_err(Error::Thread)?;
        let serial = AtomicU64::new(0);
        Ok(Self { table, buffers, shared, waker, thread: Some(thread), serial, description })
    }

    /// Reads `count` neighbouring extents from `first` on into a buffer, the first one to its front.
    ///
    /// # Errors
    /// Extents that are not there or not neighbours, more than [`MAX_PARTS`], a buffer that is too small or
    /// of another region, or a reader that has broken down. The buffer is free again then.
    pub fn submit(&self, first: u32, count: u32, priority: Priority, buffer: Buffer) -> Result<Ticket> {
        let run = self.table.run(first, count)?;
        if count as usize > MAX_PARTS {
            return Err(Error::Plan(format!("a fetch of {count} extents, not of {MAX_PARTS} at most")));
        }
        if run.bytes > buffer.capacity() || !buffer.is_of(&self.buffers) {
            return Err(Error::Plan(format!("{} bytes for a buffer of {}", run.bytes, buffer.capacity())));
        }
        let ticket = Ticket { buffer: buffer.index(), serial: self.serial.fetch_add(1, Ordering::Relaxed) };
        let mut inbox = lock(&self.shared.inbox);
        if let Some(errno) = inbox.broken {
            let extent = self.table.extents().get(first as usize);
            let path = self.table.files().get(run.file as usize).map(|f| f.path.clone());
            return Err(Error::Flash(Box::new(ReadError {
                path: path.unwrap_or_default(),
                extent: first,
                expert: None,
                offset: run.offset,
                bytes: extent.map_or(0, |e| e.bytes),
                fault: ReadFault::Reader { errno },
            })));
        }
        inbox.commands.push_back(Command::Add(Fetch { ticket, first, count, priority, buffer }));
        drop(inbox);
        self.waker.wake();
        Ok(ticket)
    }

    /// Makes a fetch urgent: from now on its blocks go before those of prefetches.
    pub fn raise(&self, ticket: Ticket) {
        self.command(Command::Raise(ticket));
    }

    /// Gives up a fetch: blocks that were not started are not read. Unless it has ended already it ends in
    /// [`Event::Cancelled`].
    pub fn cancel(&self, ticket: Ticket) {
        self.command(Command::Cancel(ticket));
    }

    fn command(&self, command: Command) {
        lock(&self.shared.inbox).commands.push_back(command);
        self.waker.wake();
    }

    /// The next event, if there is one.
    pub fn poll(&self) -> Option<Event> {
        lock(&self.shared.events).pop_front()
    }

    /// Waits for an event, at most as long as said (none: for ever).
    pub fn wait(&self, at_most: Option<Duration>) -> Option<Event> {
        let start = Instant::now();
        let mut events = lock(&self.shared.events);
        loop {
            if let Some(event) = events.pop_front() {
                return Some(event);
            }
            let news = &self.shared.news;
            events = match at_most.map(|time| time.saturating_sub(start.elapsed())) {
                None => news.wait(events).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => return None,
                Some(time) => news.wait_timeout(events, time).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
    }

    /// Which reader it is and what it has, for people.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// What was read so far.
    pub fn stats(&self) -> Stats {
        *lock(&self.shared.stats)
    }

    /// The buffers that it reads into.
    pub fn buffers(&self) -> &Arc<Buffers> {
        &self.buffers
    }

    /// The extents that it reads.
    pub fn table(&self) -> &Arc<ExtentTable> {
        &self.table
    }
}

impl Drop for Flash {
    fn drop(&mut self) {
        lock(&self.shared.inbox).stop = true;
        self.waker.wake();
        if let Some(thread) = self.thread.take() {
            drop(thread.join());
        }
    }
}

/// What the thread has.
struct Worker {
    // Dropped in this order: the reader waits for its reads, then the scheduler keeps what they still hold.
    reader: Box<dyn Reader>,
    scheduler: Scheduler,
    clock: Arc<dyn Clock>,
    shared: Arc<Shared>,
    commands: VecDeque<Command>,
    reads: Vec<Read>,
    done: Vec<Done>,
    events: VecDeque<Event>,
    busy: Duration,
}

impl Worker {
    fn run(mut self) {
        let broken = loop {
            match self.turn() {
                Ok(true) => {}
                Ok(false) => break None,
                Err(e) => break Some(e.raw_os_error().unwrap_or(libc::EIO)),
            }
        };
        match broken {
            None => self.stop(),
            Some(errno) => self.broken(errno),
        }
    }

    /// One round: takes what is asked for, starts reads, waits for answers. False at the end.
    fn turn(&mut self) -> std::io::Result<bool> {
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
        self.obey();
        self.scheduler.expire(&mut self.events);
        self.scheduler.start(&mut self.reads);
        self.publish();
        if !self.reads.is_empty() {
            // SAFETY: every read lies in the buffer of a fetch that the scheduler owns until the answer is
            // there, and no more are in flight than the reader's depth, which the scheduler was made for.
            let submitted = unsafe { self.reader.submit(&self.reads) };
            self.reads.clear();
            submitted?;
        }
        let at_most = self.scheduler.deadline().map(|moment| self.clock.until(moment));
        self.wait(at_most)?;
        Ok(true)
    }

    fn obey(&mut self) {
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
        for done in self.done.drain(..) {
            self.scheduler.finish(done, &mut self.events);
        }
        self.publish();
        Ok(())
    }

    /// Makes events known.
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
        self.shared.news.notify_all();
    }

    /// Waits a while for reads in flight, so that their buffers are free again.
    fn stop(&mut self) {
        self.commands.clear();
        self.scheduler.stop();
        let start = Instant::now();
        while self.scheduler.in_flight() > 0 && start.elapsed() < GRACE {
            if self.wait(Some(GRACE)).is_err() {
                return;
            }
        }
    }

    /// Tells everybody that there will be no more reads.
    fn broken(&mut self, errno: i32) {
        let mut inbox = lock(&self.shared.inbox);
        inbox.broken = Some(errno);
        std::mem::swap(&mut self.commands, &mut inbox.commands);
        drop(inbox);
        self.obey();
        self.scheduler.fail_all(&ReadFault::Reader { errno }, &mut self.events);
        self.publish();
    }
}
