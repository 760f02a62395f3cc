//! The threads that read weights: one has memory backed and asks for reads, one takes SHA-256.

use super::arrival::{Arrival, Why};
use super::order::{PIECE, Piece, Pieces};
use super::page_cache::PageCache;
use crate::error::{Error, Result};
use crate::flash::{Buffer, Buffers, Event, Flash, Priority};
use sha2::{Digest, Sha256};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

/// Pieces on their way at once: as much as the reader has in flight, and as much again behind it.
const AHEAD: usize = 8;

/// How long the thread waits for reads before it looks whether it is to end.
const LOOK: Duration = Duration::from_millis(20);

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
    /// [`Error::Thread`].
    pub(super) fn start(reading: Reading, hashing: Vec<Whole>) -> Result<Self> {
        let arrival = Arc::clone(&reading.arrival);
        let mut loader = Self { arrival: Arc::clone(&arrival), threads: Vec::new() };
        loader.spawn("moec-weights", move || reading.run())?;
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
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(body).map_err(Error::Thread)?;
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

/// Tells whoever waits that nothing more comes, however a thread ends.
struct Told<'a>(&'a Arrival);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.fail(Why::Ended);
    }
}

/// What the reading thread has.
pub(super) struct Reading {
    pub(super) arrival: Arc<Arrival>,
    pub(super) flash: Flash,
    /// Extents are numbered as [`extent`] does.
    pub(super) pieces: Arc<Pieces>,
    /// By piece, the right to fill its memory.
    pub(super) buffers: Vec<Option<Buffer>>,
    /// By file of the program, for those that are read.
    pub(super) caches: Vec<Option<PageCache>>,
    /// Pieces under way that were not in the page cache.
    pub(super) passing: Vec<usize>,
}

/// The extent of a piece that passes by the page cache, or the one that does not.
pub(super) fn extent(piece: usize, cached: bool) -> u32 {
    2 * piece as u32 + u32::from(cached)
}

impl Reading {
    fn run(mut self) {
        let arrival = Arc::clone(&self.arrival);
        let guard = Told(&arrival);
        let mut next = arrival.order().iter().map(|&piece| piece as usize);
        let (mut flying, mut left) = (0, arrival.order().len());
        while left > 0 && arrival.is_wanted() {
            while flying < AHEAD
                && let Some(piece) = next.next()
            {
                if let Err(why) = self.ask(piece) {
                    return arrival.fail(why);
                }
                flying += 1;
            }
            match self.flash.wait(Some(LOOK)) {
                Some(Event::Done { ticket, .. }) => {
                    (flying, left) = (flying - 1, left - 1);
                    arrival.read(ticket.buffer());
                    self.let_go(ticket.buffer());
                }
                Some(Event::Failed { error, .. }) => return arrival.fail(Why::Read(error)),
                Some(Event::Arrived { .. } | Event::Cancelled { .. }) | None => {}
            }
        }
        if left == 0 {
            std::mem::forget(guard);
        }
    }

    /// Has the memory of a piece backed, and asks for its bytes: copies of what the page cache has, reads past it of all else.
    fn ask(&mut self, piece: usize) -> Result<(), Why> {
        let Some(&Piece { file, offset, bytes }) = self.pieces.all.get(piece) else { return Err(Why::Ended) };
        let mut buffer = self.buffers.get_mut(piece).and_then(Option::take).ok_or(Why::Ended)?;
        buffer.populate(bytes);
        let cached = self.cache(file).is_some_and(|cache| cache.holds(offset, bytes));
        self.passing.extend((!cached).then_some(piece));
        match self.flash.submit(extent(piece, cached), 1, Priority::Demand, buffer) {
            Ok(_) => Ok(()),
            Err(Error::Flash(e)) => Err(Why::Read(*e)),
            Err(_) => Err(Why::Ended),
        }
    }

    fn cache(&self, file: u32) -> Option<&PageCache> {
        self.caches.get(file as usize)?.as_ref()
    }

    /// Where the file system had to read a piece through the page cache, it stays there no longer than it must.
    fn let_go(&mut self, piece: usize) {
        let passing = self.passing.iter().position(|&p| p == piece).map(|i| self.passing.swap_remove(i));
        if let Some(&Piece { file, offset, bytes }) = passing.and_then(|piece| self.pieces.all.get(piece))
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
            let at = self.memory.base().plus(piece * PIECE as usize).ptr();
            // SAFETY: a piece has its place of `PIECE` bytes in the memory, which is held here; it was read, and nobody
            // writes there any more.
            hash.update(unsafe { std::slice::from_raw_parts(at, of.bytes as usize) });
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
