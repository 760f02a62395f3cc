//! Options of experts on disk.

use super::hooks::Hooks;
use crate::error::Result;
use crate::offload::disk::{self, Reader};
use crate::platform::cores;
use std::fmt;

/// Options of a program whose experts stay on disk. The plan has the rest.
#[derive(Clone, Copy, Debug)]
pub struct Paging {
    /// Options of reads from disk.
    pub disk: disk::Options,
    /// Bytes that the run may take; `None`: the plan's budget.
    pub budget: Option<u64>,
    /// Number of layers ahead whose experts are read before they are requested, at most as many as the plan
    /// has scores for.
    pub ahead: usize,
    /// Whether the cache begins with what recorded routing used most, as far as the plan says.
    pub preload: bool,
    /// Wrapper around the reader, for tests.
    pub wrap: Option<Wrap>,
    /// Hooks of simulations and tests.
    pub hooks: Option<&'static dyn Hooks>,
    /// Folder where the operating system describes the cores, in the form of [`cores::SYS`].
    pub cores: &'static str,
}

/// A function that wraps a reader.
#[derive(Clone, Copy)]
pub struct Wrap(pub &'static (dyn Fn(Box<dyn Reader>) -> Box<dyn Reader> + Sync));

impl fmt::Debug for Wrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrap").finish_non_exhaustive()
    }
}

impl Paging {
    /// Options from the environment: `MOEC_DISK_READER` names the reader.
    ///
    /// # Errors
    /// An unknown reader.
    pub fn from_env() -> Result<Self> {
        let disk = super::usual_disk()?;
        let ahead = crate::offload::cache::prefetch::DEPTH;
        Ok(Self { disk, budget: None, ahead, preload: true, wrap: None, hooks: None, cores: cores::SYS })
    }
}
