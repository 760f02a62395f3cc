//! A store's view of flash: fetches go in, events come out, a thread of its own reads. Under virtual time there is no such
//! thread: the requesting thread takes the same turns, so that the same questions are answered at the same moments.

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

/// Time that dropping waits for reads in flight.
const GRACE: Duration = Duration::from_secs(1);
/// Wait before a read that is to be tried again.
const PAUSE: Duration = Duration::from_millis(1);

/// Statistics of reads since the start.
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

/// Makes a device of what reads its bytes, and its clock.
pub type Device<'a> = &'a dyn Fn(Option<Box<dyn Reader>>) -> (Box<dyn Reader>, Arc<dyn Clock>);

/// Puts something before the reader that has the bytes.
pub type Wrapped<'a> = &'a dyn Fn(Box<dyn Reader>) -> Box<dyn Reader>;

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

/// Thread that takes turns.
enum Hand {
    /// A thread of its own.
    Thread { waker: Arc<dyn Wake>, handle: Option<JoinHandle<()>> },
    /// The requesting thread.
    Caller(Box<Mutex<Worker>>),
}

/// Reads extents into buffers on a thread of its own, or, under virtual time, on that of its caller.
///
/// Fetches can be submitted and events taken from any thread. Dropping it ends all fetches.
pub struct Flash {
    table: Arc<ExtentTable>,
    buffers: Arc<Buffers>,
    shared: Arc<Shared>,
    hand: Hand,
    clock: Arc<dyn Clock>,
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

    /// As [`Flash::open`], with something put before the reader.
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
        let (waker, description) = (reader.waker(), reader.describe());
        let worker = Worker::new(reader, &table, files, Arc::clone(&clock), options, buffers.len());
        let shared = Arc::clone(&worker.shared);
        let thread = std::thread::Builder::new().name("moec-flash".to_owned());
        let handle = Some(thread.spawn(move || worker.run()).map_err(Error::thread)?);
        let hand = Hand::Thread { waker, handle };
        Ok(Self::of(table, buffers, shared, hand, clock, &description, options))
    }

    /// A device whose time passes while a thread waits for it, read as any other: by the same scheduler, cut into the same
    /// blocks. Time passes in [`Flash::wait`], [`Flash::news`] and [`Flash::pass`]. `device` makes it of the reader that has the
    /// bytes, and gives its clock; `wrap` makes that reader from the one that [`Flash::open`] would take; none: no file is opened,
    /// nothing is read, and no checksum is computed.
    ///
    /// # Errors
    /// An option out of its range; with `wrap`, as [`Flash::open`].
    pub fn on_caller(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        options: &Options,
        device: Device<'_>,
        wrap: Option<Wrapped<'_>>,
    ) -> Result<Self> {
        options.check()?;
        let options = Options { verify_reads: options.verify_reads && wrap.is_some(), ..*options };
        let (files, inner) = match wrap {
            Some(wrap) => {
                let files = Arc::new(Files::open(&table, options.direct)?);
                let inner = wrap(open::reader(&files, &buffers, &options)?);
                (files, Some(inner))
            }
            None => (Arc::new(Files::none()), None),
        };
        let (reader, clock) = device(inner);
        let description = reader.describe();
        let options = Options { depth: reader.depth() as u32, ..options };
        let worker = Worker::new(reader, &table, files, Arc::clone(&clock), &options, buffers.len());
        let shared = Arc::clone(&worker.shared);
        let hand = Hand::Caller(Box::new(Mutex::new(worker)));
        Ok(Self::of(table, buffers, shared, hand, clock, &description, &options))
    }

    fn of(
        table: Arc<ExtentTable>,
        buffers: Arc<Buffers>,
        shared: Arc<Shared>,
        hand: Hand,
        clock: Arc<dyn Clock>,
        description: &str,
        options: &Options,
    ) -> Self {
        let description = format!("{description}, blocks of {} KiB", options.block_bytes >> 10);
        Self { table, buffers, shared, hand, clock, serial: AtomicU64::new(0), description }
    }

    /// Reads `count` neighbouring extents from `first` on into a buffer, the first one to its front.
    ///
    /// # Errors
    /// Extents that are not there or not neighbours, more than [`MAX_PARTS`], a buffer that is too small or
    /// of another region, or a reader that has broken down. The buffer is free again then.
    pub fn submit(&self, first: u32, count: u32, priority: Priority, buffer: Buffer) -> Result<Ticket> {
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
        drop(inbox);
        self.call();
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
        self.call();
    }

    /// Has what was asked for begun.
    fn call(&self) {
        match &self.hand {
            Hand::Thread { waker, .. } => waker.wake(),
            Hand::Caller(worker) => lock(worker).settle(),
        }
    }

    /// The next event, if there is one.
    pub fn poll(&self) -> Option<Event> {
        if let Hand::Caller(worker) = &self.hand {
            lock(worker).settle();
        }
        lock(&self.shared.events).pop_front()
    }

    /// Waits for an event, at most as long as said (none: for ever). Under virtual time, until there is one or no read is
    /// under way.
    pub fn wait(&self, at_most: Option<Duration>) -> Option<Event> {
        self.until_news(at_most).pop_front()
    }

    /// Waits as [`Flash::wait`], and takes nothing: whether there is something to [`Flash::poll`].
    pub fn news(&self, at_most: Option<Duration>) -> bool {
        !self.until_news(at_most).is_empty()
    }

    fn until_news(&self, at_most: Option<Duration>) -> MutexGuard<'_, VecDeque<Event>> {
        if let Hand::Caller(worker) = &self.hand {
            let mut worker = lock(worker);
            worker.settle();
            while lock(&self.shared.events).is_empty()
                && worker.scheduler.in_flight() > 0
                && worker.pass(None)
            {}
            return lock(&self.shared.events);
        }
        let start = Instant::now();
        let mut events = lock(&self.shared.events);
        while events.is_empty() {
            let news = &self.shared.news;
            events = match at_most.map(|time| time.saturating_sub(start.elapsed())) {
                None => news.wait(events).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => break,
                Some(time) => news.wait_timeout(events, time).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        events
    }

    /// Lets virtual time pass, in which another unit works; the device meanwhile does what it was asked for. Real time passes
    /// by itself: nothing is done then.
    pub fn pass(&self, time: Duration) {
        let Hand::Caller(worker) = &self.hand else { return };
        let mut worker = lock(worker);
        let end = self.clock.now().saturating_add(time);
        worker.settle();
        while let left = end.saturating_sub(self.clock.now())
            && left > Duration::ZERO
            && worker.pass(Some(left))
        {}
    }

    /// Clock of the threads that wait for it.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    /// Whether its time is virtual.
    pub fn is_modelled(&self) -> bool {
        matches!(self.hand, Hand::Caller(_))
    }

    /// Name of the reader and its features, for people.
    pub fn describe(&self) -> &str {
        &self.description
    }

    /// Statistics of reads so far.
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
        match &mut self.hand {
            Hand::Thread { waker, handle } => {
                lock(&self.shared.inbox).stop = true;
                waker.wake();
                if let Some(handle) = handle.take() {
                    drop(handle.join());
                }
            }
            Hand::Caller(worker) => worker.get_mut().unwrap_or_else(PoisonError::into_inner).stop(),
        }
    }
}

/// State of the thread.
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
    /// Reads that ended in the last turn.
    ended: usize,
}

impl Worker {
    fn new(
        reader: Box<dyn Reader>,
        table: &Arc<ExtentTable>,
        files: Arc<Files>,
        clock: Arc<dyn Clock>,
        options: &Options,
        n: usize,
    ) -> Self {
        let depth = reader.depth();
        let scheduler = Scheduler::new(Arc::clone(table), files, Arc::clone(&clock), *options, n, depth);
        let shared = Arc::new(Shared::default());
        // Room for whatever can be under way at once, so that nothing is allocated later: the extents of a fetch, and that its
        // buffer is free.
        let events = (MAX_PARTS + 1) * n;
        lock(&shared.inbox).commands.reserve(2 * n);
        lock(&shared.events).reserve(events);
        Self {
            reader,
            scheduler,
            clock,
            shared,
            commands: VecDeque::with_capacity(2 * n),
            reads: Vec::with_capacity(depth),
            done: Vec::with_capacity(depth),
            events: VecDeque::with_capacity(events),
            busy: Duration::ZERO,
            ended: 0,
        }
    }

    /// Under virtual time: does what can be done at this moment, so that asking twice is asking once.
    fn settle(&mut self) {
        while self.pass(Some(Duration::ZERO)) && self.ended > 0 {}
    }

    /// Under virtual time: takes a turn, in which at most so much of it passes. False from the moment on when the reader has
    /// broken down.
    fn pass(&mut self, at_most: Option<Duration>) -> bool {
        if lock(&self.shared.inbox).broken.is_some() {
            return false;
        }
        let Err(e) = self.turn(at_most) else { return true };
        self.broken(e.raw_os_error().unwrap_or(libc::EIO));
        false
    }

    fn run(mut self) {
        let broken = loop {
            match self.turn(None) {
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

    /// One round: takes what is asked for, starts reads, waits for answers, at most as long as said. False at the end.
    fn turn(&mut self, at_most: Option<Duration>) -> std::io::Result<bool> {
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
        self.obey();
        self.scheduler.expire(&mut self.events);
        self.scheduler.start(&mut self.reads, &mut self.events);
        self.publish();
        if !self.reads.is_empty() {
            // SAFETY: every read lies in the buffer of a fetch that the scheduler owns until the answer is
            // there, and no more are in flight than the reader's depth, which the scheduler was made for.
            let submitted = unsafe { self.reader.submit(&self.reads) };
            self.reads.clear();
            submitted?;
        }
        let deadline = self.scheduler.deadline().map(|moment| self.clock.until(moment));
        let at_most = deadline.map_or(at_most, |time| Some(at_most.map_or(time, |most| most.min(time))));
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
        self.ended += self.done.len();
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

    /// Tells all waiting threads that there will be no more reads.
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
