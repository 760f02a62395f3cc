//! Weights that stay in memory under a budget are locked there (PowerInfer-2, §6): else the operating system
//! takes their pages when it reads others.

use super::{CPU, on_disk, resident};
use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::Result;
use crate::platform::memory::lock_pages;
use crate::weights::store::{CheckLevel, MappedStore, Store};
use moec_ir::plan::Segment;
use std::fmt;
use std::path::Path;

/// Locked bytes of the weights outside of experts: pages that were used stay in RAM.
#[derive(Debug, Default)]
pub(crate) struct Locked {
    /// Bytes that are locked.
    pub(crate) bytes: u64,
    /// Bytes of all of these weights.
    pub(crate) all: u64,
    /// Reason that the rest is not locked.
    pub(crate) refused: Option<std::io::Error>,
}

impl Locked {
    /// Locks as many mapped segments as the user's limit allows.
    pub(super) fn of(program: &Program, mapped: &MappedStore) -> Self {
        let mut locked = Self::default();
        for (i, segment) in (0..).zip(&program.segments) {
            let Some((at, bytes)) = mapped.segment(i).zip(bytes_of(segment)) else { continue };
            locked.all += bytes;
            if locked.refused.is_some() {
                continue;
            }
            match lock_pages(at, bytes) {
                Ok(()) => locked.bytes += bytes,
                Err(e) => locked.refused = Some(e),
            }
        }
        locked
    }

    /// The warning for people, with a hint, if not all is locked.
    pub(super) fn warning(&self) -> Option<String> {
        self.refused.as_ref().map(|_| {
            format!(
                "{self}: the operating system may remove the others from RAM; raise the limit (`ulimit -l \
                 unlimited`)"
            )
        })
    }
}

impl fmt::Display for Locked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let size = crate::platform::memory::size;
        write!(
            f,
            "{} of {} of the weights that stay in memory are locked",
            size(self.bytes),
            size(self.all)
        )?;
        self.refused.as_ref().map_or(Ok(()), |e| write!(f, " ({e})"))
    }
}

/// Bytes from a segment's first matrix to the end of its last.
fn bytes_of(segment: &Segment) -> Option<u64> {
    segment.end()?.checked_sub(segment.offset)
}

/// Bytes that a run here would lock: determined by locking it.
///
/// # Errors
/// As [`MappedStore::open`].
pub(crate) fn locked(program: &Program, bundle: &Path) -> Result<Locked> {
    let resident = resident(program, on_disk(program, CPU)?);
    let files = BundleFiles::open(program, bundle)?;
    let mapped = MappedStore::of(program, &files, CheckLevel::Sizes, &|i| resident.contains(&i))?;
    Ok(Locked::of(program, &mapped))
}
