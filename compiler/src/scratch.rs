//! Folders under the cache that go away with the run: weights of models that are built to be used once.

use crate::cache_dir;
use crate::error::{Error, Result, io_error};
use crate::interrupt::{self, Hold};
use crate::{disk, human};
use moec_ir::plan::Plan;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// What such a folder is called, before who made it.
const PREFIX: &str = "scratch-";

/// A folder that goes away when dropped.
#[derive(Debug)]
pub(crate) struct Scratch {
    folder: PathBuf,
    /// Let go of when the folder is gone.
    _hold: Hold,
}

impl Scratch {
    /// A folder with room for a plan's weights. `what` needs it.
    ///
    /// # Errors
    /// A disk without that room, or a folder that cannot be made.
    pub(crate) fn create(what: &str, plan: &Plan) -> Result<Self> {
        Self::with_room(what, plan.segments.iter().map(|s| s.bytes).sum())
    }

    /// A folder with room for `need` bytes. `what` needs it.
    ///
    /// # Errors
    /// As [`Scratch::create`].
    pub(crate) fn with_room(what: &str, need: u64) -> Result<Self> {
        let cache = cache_dir::writable_for(&format!("to {what}"), None)?;
        remove_stale(&cache);
        if let Some(free) = disk::free_bytes(&cache).filter(|&free| free < need) {
            return Err(Error::environment(format!(
                "to {what} needs {} in `{}`, where {} are free",
                human::bytes(need),
                cache.display(),
                human::bytes(free)
            ))
            .hint("set `MOEC_CACHE` to a folder on a larger disk"));
        }
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = cache.join(format!("{PREFIX}{}-{number}", std::process::id()));
        let hold = interrupt::hold();
        fs::create_dir(&folder).map_err(|e| io_error("create", &folder, &e))?;
        Ok(Self { folder, _hold: hold })
    }

    /// The folder.
    pub(crate) fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Removes what killed runs left behind.
fn remove_stale(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if let Some((pid, _)) = name.strip_prefix(PREFIX).and_then(|rest| rest.split_once('-'))
            && Path::new("/proc/self").exists()
            && !Path::new("/proc").join(pid).exists()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
