//! Weights that move: mapped where the page cache has them already, so that the first token comes at once; then, when memory
//! of our own is filled behind the first prompt, from there.

use super::{Arrival, How, OwnedStore, PageCache, Pieces};
use crate::error::Result;
use crate::memory::Addr;
use crate::program::Program;
use crate::store::{CheckLevel, MappedStore, Store, checked_paths};
use crate::weights::Held;
use std::path::{Path, PathBuf};

/// Mapped weights that are to lie in memory of our own.
pub(crate) struct MovingStore<'p> {
    program: &'p Program,
    bundle: PathBuf,
    how: How,
    /// Until they have moved.
    from: Option<MappedStore>,
    /// From when it is filled.
    to: Option<OwnedStore>,
    /// Why they stay mapped, for people.
    refused: Option<String>,
    /// Whether the addresses are those of `to`.
    moved: bool,
}

impl<'p> MovingStore<'p> {
    /// Maps the weights, whose files are checked as [`MappedStore::open`] does.
    ///
    /// # Errors
    /// As [`MappedStore::open`].
    pub(crate) fn open(program: &'p Program, bundle: &Path, check: CheckLevel, how: &How) -> Result<Self> {
        let from = Some(MappedStore::open(program, bundle, check)?);
        let (bundle, how) = (bundle.to_owned(), *how);
        Ok(Self { program, bundle, how, from, to: None, refused: None, moved: false })
    }

    /// Whether the page cache has nearly all of the files that hold weights: a first prompt is then faster mapped than it
    /// would be after them.
    ///
    /// # Errors
    /// A file that is missing or has another size.
    pub(crate) fn is_worth(program: &Program, bundle: &Path) -> Result<bool> {
        let paths = checked_paths(program, bundle)?;
        let pieces = Pieces::new(program)?;
        let mut files =
            (0_u32..).zip(&program.files).zip(&paths).map(|((i, info), path)| (i, info.bytes, path));
        Ok(files.all(|(file, bytes, path)| {
            pieces.of_file(file).is_empty() || PageCache::open(path).is_ok_and(|c| c.holds(0, bytes))
        }))
    }

    fn here(&self) -> Option<&dyn Store> {
        match (&self.to, &self.from) {
            (Some(to), _) if self.moved => Some(to),
            (_, Some(from)) => Some(from),
            _ => None,
        }
    }
}

// SAFETY: addresses are those of one of two stores, which is held for as long as they are: the mapping until `leave`, memory of
// our own, all of which has arrived by then, from `moves` on.
unsafe impl Store for MovingStore<'_> {
    fn segment(&self, index: u32) -> Option<Addr> {
        self.here()?.segment(index)
    }

    fn matrices(&self, index: u32) -> Option<Addr> {
        self.here()?.matrices(index)
    }

    fn bytes(&self) -> u64 {
        self.here().map_or(0, Store::bytes)
    }

    fn preload(&mut self) {
        if self.to.is_some() || self.refused.is_some() {
            return;
        }
        // What was checked when it was mapped needs no second look.
        match OwnedStore::open(self.program, &self.bundle, CheckLevel::Sizes, &self.how) {
            Ok(to) => self.to = Some(to),
            Err(e) => {
                self.refused = Some(format!("memory of its own was refused: {e}"));
                if let Some(from) = &mut self.from {
                    from.preload();
                }
            }
        }
    }

    fn moves(&mut self) -> Result<bool> {
        let Some(to) = self.to.as_ref().filter(|_| !self.moved) else { return Ok(false) };
        let arrival = to.arrival();
        arrival.map_or(Ok(()), Arrival::check)?;
        self.moved = arrival.is_none_or(Arrival::is_complete);
        Ok(self.moved)
    }

    fn leave(&mut self) {
        if self.moved {
            self.from = None;
        }
    }

    fn settle(&mut self) -> Result<()> {
        self.to.as_ref().and_then(OwnedStore::arrival).map_or(Ok(()), Arrival::wait_all)
    }

    fn held(&self) -> Held {
        match &self.to {
            Some(to) if self.moved => to.held(),
            _ => {
                let why = self.refused.clone();
                let why = why.unwrap_or_else(|| {
                    "the page cache has them; they move to memory of its own behind the first prompt"
                        .to_owned()
                });
                Held { why, ..Held::default() }
            }
        }
    }
}
