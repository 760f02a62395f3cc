//! Options of experts on flash.

use super::hooks::Hooks;
use crate::error::Result;
use crate::offload::flash::{self, Reader};
use std::fmt;

/// Options of a program whose experts stay on flash. The plan has the rest.
#[derive(Clone, Copy, Debug)]
pub struct Paging {
    /// Options of reads from flash.
    pub flash: flash::Options,
    /// Bytes that the run may take; `None`: the plan's budget.
    pub budget: Option<u64>,
    /// Layers ahead whose experts are read before they are asked for, as far as the plan has their scores.
    pub ahead: usize,
    /// Whether the cache begins with what recorded routing used most, as far as the plan says.
    pub preload: bool,
    /// Put before the reader, for tests.
    pub wrap: Option<Wrap>,
    /// What simulations and tests put around a run.
    pub hooks: Option<&'static dyn Hooks>,
}

/// Something to be put before a reader.
#[derive(Clone, Copy)]
pub struct Wrap(pub &'static (dyn Fn(Box<dyn Reader>) -> Box<dyn Reader> + Sync));

impl fmt::Debug for Wrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wrap").finish_non_exhaustive()
    }
}

impl Paging {
    /// As the environment asks: `MOEC_FLASH` names the reader.
    ///
    /// # Errors
    /// A reader that is not known.
    pub fn from_env() -> Result<Self> {
        let flash = super::usual_flash()?;
        let ahead = crate::offload::cache::prefetch::DEPTH;
        Ok(Self { flash, budget: None, ahead, preload: true, wrap: None, hooks: None })
    }
}
