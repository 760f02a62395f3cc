//! Weights that move. If the page cache has them already, they are mapped, so that the first token comes at
//! once. After the first prompt they are copied to memory of our own, and used there. If that fails they stay
//! mapped.

use super::{LoadOptions, LoadProgress, OwnedStore, PageCache, Pieces};
use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::{Fault, Result};
use crate::platform::memory::Addr;
use crate::weights::WeightPlacement;
use crate::weights::store::{CheckLevel, MappedStore, Store};
use std::path::Path;

/// Mapped weights that are moved to memory of our own.
pub struct MovingStore<'p> {
    program: &'p Program,
    files: BundleFiles,
    check: CheckLevel,
    options: LoadOptions,
    /// The mapped weights, until they have moved.
    from: Option<MappedStore>,
    /// Memory of our own, from the beginning of the copy.
    to: Option<OwnedStore>,
    /// Reason that they stay mapped, for people.
    refused: Option<String>,
    /// Warning that is still to be printed.
    warning: Option<String>,
    /// Whether the addresses are those of `to`.
    moved: bool,
}

impl<'p> MovingStore<'p> {
    /// Maps the weights. Files are checked as by [`MappedStore::open`].
    ///
    /// # Errors
    /// As [`MappedStore::open`].
    pub fn open(
        program: &'p Program,
        bundle: &Path,
        check: CheckLevel,
        options: &LoadOptions,
    ) -> Result<Self> {
        Self::of(program, &BundleFiles::open(program, bundle)?, check, options)
    }

    /// As [`MovingStore::open`], for open files.
    ///
    /// # Errors
    /// As [`MappedStore::open`].
    pub(crate) fn of(
        program: &'p Program,
        files: &BundleFiles,
        check: CheckLevel,
        options: &LoadOptions,
    ) -> Result<Self> {
        let from = Some(MappedStore::of_files_here(program, files, check)?);
        let (files, options) = (files.clone(), *options);
        Ok(Self {
            program,
            files,
            check,
            options,
            from,
            to: None,
            refused: None,
            warning: None,
            moved: false,
        })
    }

    /// Bytes of the files with weights, if the page cache has nearly all of them; else `None`. A first prompt
    /// is then faster from the mapping than after a copy.
    ///
    /// # Errors
    /// A plan whose files cannot be cut into pieces.
    pub(crate) fn cached(program: &Program, files: &BundleFiles) -> Result<Option<u64>> {
        let pieces = Pieces::new(program)?;
        let is_read = |i: u32| !pieces.of_file(i).is_empty();
        let files = (0_u32..).zip(&program.files).zip(files.reading(program, &is_read)?);
        let mut read = files.filter_map(|((i, info), of)| Some((info, of.filter(|_| is_read(i))?)));
        Ok(read.try_fold(0_u64, |sum, (info, of)| {
            let cache = PageCache::of(&of.file, &of.path).ok()?;
            cache.holds_most(info.bytes).then(|| sum.saturating_add(info.bytes))
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

// SAFETY: addresses are those of one of two stores, which is held as long as they are used. The mapping is
// held until `leave`. Memory of our own is used from `moves` on, and is completely loaded by then.
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
        // The copy is used from now on, so its files are checked as those of the mapping were.
        match OwnedStore::of(self.program, &self.files, self.check, &self.options) {
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
        let progress = to.load_progress();
        match progress.map_or(Ok(()), LoadProgress::check) {
            Ok(()) => self.moved = progress.is_none_or(LoadProgress::is_complete),
            // The mapping is of the same file: if that was truncated or changed, the mapped weights are
            // wrong, too.
            Err(e) if e.fault() == Fault::Bundle => return Err(e),
            Err(e) => {
                let why = format!("weights stay mapped, since they could not be read into memory: {e}");
                self.to = None;
                self.warning = Some(why.clone());
                self.refused = Some(why);
            }
        }
        Ok(self.moved)
    }

    fn leave(&mut self) {
        if self.moved {
            self.from = None;
        }
    }

    fn settle(&mut self) {
        // `moves` reports errors.
        if let Some(progress) = self.to.as_ref().and_then(OwnedStore::load_progress) {
            let _ = progress.wait_all();
        }
    }

    fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    fn held(&self) -> WeightPlacement {
        match &self.to {
            Some(to) if self.moved => to.held(),
            _ => {
                let why = self.refused.clone();
                let why = why.unwrap_or_else(|| {
                    "the page cache has them; they move to memory of its own after the first prompt"
                        .to_owned()
                });
                WeightPlacement { why, ..WeightPlacement::default() }
            }
        }
    }
}
