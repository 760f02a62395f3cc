//! The threads that read weights: some have memory backed and ask for reads, one takes SHA-256.

use super::arrival::{Arrival, Why};
use super::order::{PIECE, Piece, Pieces};
use super::page_cache::PageCache;
use crate::error::{Error, Result};
use crate::offload::flash::{Buffer, Buffers, Disk, Event, Flash, Priority};
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

/// Pieces on their way at once: as much as the reader has in flight, and as much again after it.
const AHEAD: usize = 8;

/// Time that a thread waits for reads before it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

/// Most threads that have memory backed. The kernel clears every page first: one core does that slower than a good drive
/// reads, and much slower where a machine is virtual and its host has to find the memory.
const TOUCHING: usize = 4;

/// Threads that read.
fn threads() -> usize {
    cpu::cores().min(TOUCHING)
}

/// The threads. Dropping it ends them: reads in flight are waited for, a second at most.
#[derive(Debug)]
pub(super) struct Loader {
    arrival: Arc<Arrival>,
    threads: Vec<JoinHandle<()>>,
}

impl Loader {
    /// Starts reading.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub(super) fn start(reading: Reading, hashing: Vec<Whole>) -> Result<Self> {
        let arrival = Arc::clone(&reading.arrival);
        let mut loader = Self { arrival: Arc::clone(&arrival), threads: Vec::new() };
        let reading = Arc::new(reading);
        for _ in 0..threads() {
            let reading = Arc::clone(&reading);
            loader.spawn("moec-weights", move || reading.run())?;
        }
        if !hashing.is_empty() {
            loader.spawn("moec-sha256", move || {
                let guard = Told(&arrival);
                if hashing.iter().all(|file| file.check(&arrival)) {
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
        self.arrival.stop();
        for thread in self.threads.drain(..) {
            drop(thread.join());
        }
    }
}

/// Tells waiting threads that nothing more comes, however a thread ends.
struct Told<'a>(&'a Arrival);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.fail(Why::Ended);
    }
}

/// State that the reading threads share.
pub(super) struct Reading {
    arrival: Arc<Arrival>,
    /// Its extents are numbered as [`extent`] does.
    flash: Flash,
    pieces: Arc<Pieces>,
    /// By piece, the right to fill its memory.
    buffers: Mutex<Vec<Option<Buffer>>>,
    /// By file of the program, for those that are read.
    caches: Vec<Option<PageCache>>,
    /// By piece: whether its bytes were not in the page cache.
    passing: Vec<AtomicBool>,
    /// Pieces of the order that were asked for.
    asked: AtomicUsize,
    /// Those of them that are on their way or were not yet looked at.
    flying: AtomicUsize,
    /// Pieces of the order that are not there yet.
    left: AtomicUsize,
    /// Threads that still read.
    last: AtomicUsize,
}

/// The extent of a piece that passes by the page cache, or the one that does not.
pub(super) fn extent(piece: usize, cached: bool) -> u32 {
    // There are fewer than half as many pieces as numbers.
    u32::try_from(piece).map_or(u32::MAX, |piece| piece.saturating_mul(2) | u32::from(cached))
}

impl Reading {
    /// `buffers`: by piece. `caches`: by file of the program, for those that are read.
    pub(super) fn new(
        arrival: Arc<Arrival>,
        flash: Flash,
        pieces: Arc<Pieces>,
        buffers: Vec<Option<Buffer>>,
        caches: Vec<Option<PageCache>>,
    ) -> Self {
        let passing = pieces.all.iter().map(|_| AtomicBool::new(false)).collect();
        let left = AtomicUsize::new(arrival.order().len());
        let (asked, flying, last) = (AtomicUsize::new(0), AtomicUsize::new(0), AtomicUsize::new(threads()));
        Self {
            arrival,
            flash,
            pieces,
            buffers: Mutex::new(buffers),
            caches,
            passing,
            asked,
            flying,
            left,
            last,
        }
    }

    /// Asks for pieces as long as few are on their way, and else sees to what has come. Every thread does both.
    fn run(&self) {
        let guard = Told(&self.arrival);
        while self.left.load(Relaxed) > 0 && self.arrival.is_wanted() {
            let more = |n: usize| (n < AHEAD).then_some(n + 1);
            if self.asked.load(Relaxed) < self.arrival.order().len()
                && self.flying.fetch_update(Relaxed, Relaxed, more).is_ok()
            {
                let next = self.arrival.order().get(self.asked.fetch_add(1, Relaxed));
                match next.map(|&piece| self.ask(piece as usize)) {
                    Some(Ok(())) => {}
                    Some(Err(why)) => return self.arrival.fail(why),
                    None => drop(self.flying.fetch_sub(1, Relaxed)),
                }
                continue;
            }
            match self.flash.wait(Some(LOOK)) {
                Some(Event::Done { ticket, .. }) => {
                    self.flying.fetch_sub(1, Relaxed);
                    self.arrival.read(ticket.buffer());
                    self.let_go(ticket.buffer());
                    self.left.fetch_sub(1, Relaxed);
                }
                Some(Event::Failed { error, .. }) => return self.arrival.fail(Why::Read(error)),
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

    /// Fetches the pieces that were read past the page cache into it, for the next start, while memory is free. The thread runs only on
    /// idle cores.
    fn leave_in_cache(&self) {
        cpu::only_when_idle();
        for (Piece { file, offset, bytes }, passing) in self.pieces.all.iter().zip(&self.passing) {
            let room = available().is_some_and(|free| free >= RESERVE + bytes);
            if !room || !self.arrival.is_wanted() {
                return;
            }
            if passing.load(Relaxed)
                && let Some(cache) = self.cache(*file)
            {
                cache.fetch(*offset, *bytes);
            }
        }
    }

    /// Has the memory of a piece backed, and asks for its bytes: copies of what the page cache has, reads past it of all else.
    fn ask(&self, piece: usize) -> Result<(), Why> {
        let Some(&Piece { file, offset, bytes }) = self.pieces.all.get(piece) else { return Err(Why::Ended) };
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let buffer = buffers.get_mut(piece).and_then(Option::take);
        drop(buffers);
        let mut buffer = buffer.ok_or(Why::Ended)?;
        buffer.populate(bytes);
        let cached = self.cache(file).is_some_and(|cache| cache.holds(offset, bytes));
        self.passing[piece].store(!cached, Relaxed);
        match self.flash.submit(extent(piece, cached), 1, Priority::Demand, buffer) {
            Ok(_) => Ok(()),
            Err(Error::Read(e)) => Err(Why::Read(*e)),
            Err(_) => Err(Why::Ended),
        }
    }

    fn cache(&self, file: u32) -> Option<&PageCache> {
        self.caches.get(file as usize)?.as_ref()
    }

    /// Lets go of a piece that the file system had to read through the page cache, so that it stays there no longer than it must.
    fn let_go(&self, piece: usize) {
        if let Some(&Piece { file, offset, bytes }) = self.pieces.all.get(piece)
            && self.passing[piece].load(Relaxed)
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
    /// Sums its pieces up as they come. False if that is not to go on.
    fn check(&self, arrival: &Arrival) -> bool {
        let (mut hash, pieces) = (Sha256::new(), self.pieces.of_file(self.file));
        for piece in pieces.clone() {
            let Some(of) = self.pieces.all.get(piece).filter(|_| arrival.was_read(piece)) else {
                return false;
            };
            let (Ok(bytes), Ok(pitch)) = (usize::try_from(of.bytes), usize::try_from(PIECE)) else {
                return false;
            };
            let at = self.memory.base().plus(piece * pitch).ptr();
            // SAFETY: a piece has its place of `PIECE` bytes in the memory, which is held here; it was read, and nothing
            // writes there any more.
            hash.update(unsafe { std::slice::from_raw_parts(at, bytes) });
        }
        let found: [u8; 32] = hash.finalize().into();
        if found == self.sha256 {
            arrival.prove(pieces);
            return true;
        }
        arrival.fail(Why::Changed { path: self.path.clone(), expected: self.sha256, found });
        false
    }
}
