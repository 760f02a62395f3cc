//! Threads that load weights: some populate memory and request reads, one computes SHA-256.

use super::load_progress::{LoadFailure, LoadProgress};
use super::order::{PIECE, Piece, Pieces};
use super::page_cache::PageCache;
use crate::error::{Error, Result};
use crate::offload::disk::{Buffer, Buffers, Disk, Event, Priority, ThreadedDisk};
use crate::platform::available::available;
use crate::platform::cpu;
use crate::weights::RESERVE;
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most requested pieces at a time: as many as the reader has in flight, and as many again in its queue.
const AHEAD: usize = 8;

/// Time that a thread waits for reads before it checks whether to end.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Most threads that populate memory. The kernel clears every page first. One core does that slower than a
/// good drive reads, and much slower on a virtual machine whose host must provide the memory.
const MAX_THREADS: usize = 4;

/// Number of threads that read.
fn threads() -> usize {
    cpu::cores().min(MAX_THREADS)
}

/// The threads. Dropping it ends them: it waits for reads in flight, at most a second.
#[derive(Debug)]
pub(super) struct Loader {
    progress: Arc<LoadProgress>,
    threads: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Starts reading.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn start(reading: Reading, hashing: Vec<Whole>) -> Result<Self> {
        let progress = Arc::clone(&reading.progress);
        let mut loader = Self { progress: Arc::clone(&progress), threads: Vec::new() };
        let reading = Arc::new(reading);
        for _ in 0..threads() {
            let reading = Arc::clone(&reading);
            loader.spawn("moec-weights", move || reading.run())?;
        }
        if !hashing.is_empty() {
            loader.spawn("moec-sha256", move || {
                let guard = NotifyOnDrop(&progress);
                if hashing.iter().all(|file| file.check(&progress)) {
                    std::mem::forget(guard);
                }
            })?;
        }
        Ok(loader)
    }

    fn spawn(&mut self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(Error::thread)?;
        self.threads.push(thread);
        Ok(())
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.progress.stop();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// Notifies waiting threads that no more pieces come, even if the thread panics.
struct NotifyOnDrop<'a>(&'a LoadProgress);

impl Drop for NotifyOnDrop<'_> {
    fn drop(&mut self) {
        self.0.fail(LoadFailure::Ended);
    }
}

/// State that the reading threads share.
pub(super) struct Reading {
    progress: Arc<LoadProgress>,
    /// Its extents are numbered as [`extent`] does.
    disk: ThreadedDisk,
    pieces: Arc<Pieces>,
    /// By piece, the buffer to fill; taken when it is requested.
    buffers: Mutex<Vec<Option<Buffer>>>,
    /// By file of the program, if it is read.
    caches: Vec<Option<PageCache>>,
    /// By piece: whether its bytes were not in the page cache.
    bypass: Vec<AtomicBool>,
    /// Number of pieces of the order that were requested.
    requested: AtomicUsize,
    /// Number of these that are in flight or not handled yet.
    in_flight: AtomicUsize,
    /// Number of pieces of the order that are not loaded yet.
    left: AtomicUsize,
    /// Number of threads that still read.
    last: AtomicUsize,
}

/// Extent of a piece: read past the page cache, or through it (`cached`).
pub(super) fn extent(piece: usize, cached: bool) -> u32 {
    // There are fewer pieces than half the range of `u32`.
    u32::try_from(piece).map_or(u32::MAX, |piece| piece.saturating_mul(2) | u32::from(cached))
}

impl Reading {
    /// State for a load. `buffers`: by piece. `caches`: by file of the program, if it is read.
    pub(super) fn new(
        progress: Arc<LoadProgress>,
        disk: ThreadedDisk,
        pieces: Arc<Pieces>,
        buffers: Vec<Option<Buffer>>,
        caches: Vec<Option<PageCache>>,
    ) -> Self {
        let bypass = pieces.all.iter().map(|_| AtomicBool::new(false)).collect();
        let left = AtomicUsize::new(progress.order().len());
        let (requested, in_flight, last) =
            (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(threads()));
        Self {
            progress,
            disk,
            pieces,
            buffers: Mutex::new(buffers),
            caches,
            bypass,
            requested,
            in_flight,
            left,
            last,
        }
    }

    /// Requests pieces while few are in flight, and otherwise handles those that were read. Every thread does
    /// both.
    fn run(&self) {
        let guard = NotifyOnDrop(&self.progress);
        while self.left.load(Relaxed) > 0 && self.progress.should_continue() {
            let more = |n: usize| (n < AHEAD).then_some(n + 1);
            if self.requested.load(Relaxed) < self.progress.order().len()
                && self.in_flight.fetch_update(Relaxed, Relaxed, more).is_ok()
            {
                let next = self.progress.order().get(self.requested.fetch_add(1, Relaxed));
                match next.map(|&piece| self.request(piece as usize)) {
                    Some(Ok(())) => {}
                    Some(Err(why)) => return self.progress.fail(why),
                    None => drop(self.in_flight.fetch_sub(1, Relaxed)),
                }
                continue;
            }
            match self.disk.wait(Some(POLL_INTERVAL)) {
                Some(Event::Done { ticket, .. }) => {
                    self.in_flight.fetch_sub(1, Relaxed);
                    self.progress.read(ticket.buffer());
                    self.drop_from_page_cache(ticket.buffer());
                    self.left.fetch_sub(1, Relaxed);
                }
                Some(Event::Failed { error, .. }) => return self.progress.fail(LoadFailure::Read(error)),
                Some(Event::Arrived { .. } | Event::Cancelled { .. } | Event::Released { .. }) | None => {}
            }
        }
        if self.left.load(Relaxed) == 0 {
            std::mem::forget(guard);
        }
        if self.last.fetch_sub(1, Relaxed) == 1 {
            self.leave_in_cache();
        }
    }

    /// Loads the pieces that were read past the page cache into it, for the next start, while memory is free.
    /// The thread runs only on idle cores.
    fn leave_in_cache(&self) {
        cpu::only_when_idle();
        for (Piece { file, offset, bytes }, bypass) in self.pieces.all.iter().zip(&self.bypass) {
            let room = available().is_some_and(|free| free >= RESERVE + bytes);
            if !room || !self.progress.should_continue() {
                return;
            }
            if bypass.load(Relaxed)
                && let Some(cache) = self.cache(*file)
            {
                cache.fetch(*offset, *bytes);
            }
        }
    }

    /// Populates the memory of a piece, and requests its bytes: through the page cache if it has them, else
    /// past it.
    fn request(&self, piece: usize) -> Result<(), LoadFailure> {
        let Some(&Piece { file, offset, bytes }) = self.pieces.all.get(piece) else {
            return Err(LoadFailure::Ended);
        };
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = buffers.get_mut(piece).and_then(Option::take);
        drop(buffers);
        let mut buffer = buffer.ok_or(LoadFailure::Ended)?;
        buffer.populate(bytes);
        let cached = self.cache(file).is_some_and(|cache| cache.holds(offset, bytes));
        self.bypass[piece].store(!cached, Relaxed);
        match self.disk.submit(extent(piece, cached), 1, Priority::Demand, buffer) {
            Ok(_) => Ok(()),
            Err(Error::Read(e)) => Err(LoadFailure::Read(*e)),
            Err(_) => Err(LoadFailure::Ended),
        }
    }

    fn cache(&self, file: u32) -> Option<&PageCache> {
        self.caches.get(file as usize)?.as_ref()
    }

    /// Drops a piece from the page cache, if the file system had to read it through there.
    fn drop_from_page_cache(&self, piece: usize) {
        if let Some(&Piece { file, offset, bytes }) = self.pieces.all.get(piece)
            && self.bypass[piece].load(Relaxed)
            && let Some(cache) = self.cache(file)
        {
            cache.forget(offset, bytes);
        }
    }
}

/// A file whose content is checked.
pub(super) struct Whole {
    pub(super) path: PathBuf,
    pub(super) sha256: [u8; 32],
    pub(super) file: u32,
    pub(super) pieces: Arc<Pieces>,
    /// The memory of all pieces.
    pub(super) memory: Arc<Buffers>,
}

impl Whole {
    /// Hashes its pieces as they are read. False if the file is wrong or loading has ended.
    fn check(&self, progress: &LoadProgress) -> bool {
        let (mut hash, pieces) = (Sha256::new(), self.pieces.of_file(self.file));
        for piece in pieces.clone() {
            let Some(of) = self.pieces.all.get(piece).filter(|_| progress.was_read(piece)) else {
                return false;
            };
            let (Ok(bytes), Ok(pitch)) = (usize::try_from(of.bytes), usize::try_from(PIECE)) else {
                return false;
            };
            let at = self.memory.base().plus(piece * pitch).ptr();
            // SAFETY: a piece has its place of `PIECE` bytes in the memory, which is held here. It was read,
            // and nothing writes there any more.
            hash.update(unsafe { std::slice::from_raw_parts(at, bytes) });
        }
        let found: [u8; 32] = hash.finalize().into();
        if found == self.sha256 {
            progress.set_verified(pieces);
            return true;
        }
        progress.fail(LoadFailure::Changed { path: self.path.clone(), expected: self.sha256, found });
        false
    }
}
