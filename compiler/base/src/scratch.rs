//! Temporary folders in the cache, which are removed after the run. They hold weights of models that are used
//! once.

use crate::cache_dir;
use crate::error::{Error, Result};
use crate::interrupt::{self, Hold};
use crate::locked_folder::LockedFolder;
use crate::{disk, human};
use moec_ir::plan::Plan;
use std::fs;
use std::path::Path;

/// Prefix of the names of such folders.
const PREFIX: &str = "scratch-";

/// A folder that is removed when dropped.
#[derive(Debug)]
pub struct Scratch {
    folder: LockedFolder,
    /// The lock, released after the folder is removed.
    _hold: Hold,
}

impl Scratch {
    /// Creates a folder for a plan's weights. `what` is the user of the folder in messages.
    ///
    /// # Errors
    /// Fails if the disk has too little room, or the folder cannot be created.
    pub fn create(what: &str, plan: &Plan) -> Result<Self> {
        Self::with_room(what, plan.segments.iter().map(|s| s.bytes).sum())
    }

    /// Creates a folder for `need` bytes. `what` is the user of the folder in messages.
    ///
    /// # Errors
    /// Those of [`Scratch::create`].
    pub fn with_room(what: &str, need: u64) -> Result<Self> {
        let cache = cache_dir::writable_for(&format!("to {what}"), None)?;
        remove_abandoned(&cache);
        if let Some(free) = disk::free_bytes(&cache).filter(|&free| free < need) {
            return Err(Error::environment(format!(
                "to {what} needs {} in `{}`, where {} are free",
                human::bytes(need),
                cache.display(),
                human::bytes(free)
            ))
            .hint("set `MOEC_CACHE` to a folder on a larger disk"));
        }
        Self::create_in(&cache)
    }

    fn create_in(cache: &Path) -> Result<Self> {
        let hold = interrupt::hold();
        let folder = LockedFolder::create(cache, |id| format!("{PREFIX}{id}").into(), |_| {})?;
        Ok(Self { folder, _hold: hold })
    }

    /// Path of the folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        self.folder.release_descriptors();
        // Files that remain are removed by the next run.
        let _ = fs::remove_dir_all(self.folder.path());
    }
}

/// Removes the folders of processes that were killed.
fn remove_abandoned(cache: &Path) {
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        if let Some(folder) = LockedFolder::abandoned(entry.path()) {
            let _ = fs::remove_dir_all(folder.path());
        } else {
            // A folder of a process that was killed before it created the lock is empty. Folders with files
            // but no lock are kept.
            let _ = fs::remove_dir(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::locked_folder::LOCK;
    use std::fs::File;

    /// A folder left by a run on another host or in another container, where its process id has no meaning.
    fn of_another_host(cache: &Path, id: &str) -> File {
        let folder = cache.join(format!("{PREFIX}{id}"));
        fs::create_dir_all(folder.join("weights")).unwrap();
        fs::write(folder.join("weights/dense.bin"), "weights").unwrap();
        File::create_new(folder.join(LOCK)).unwrap()
    }

    fn names(cache: &Path) -> Vec<String> {
        let all = fs::read_dir(cache).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = all.collect();
        names.sort();
        names
    }

    #[test]
    fn a_folder_is_removed_only_when_its_process_has_ended() {
        let cache = tempfile::tempdir().unwrap();
        // No process has this id.
        let lock = of_another_host(cache.path(), "999999999-0");
        lock.lock().unwrap();
        remove_abandoned(cache.path());
        assert_eq!(names(cache.path()), ["scratch-999999999-0"]);
        assert!(cache.path().join("scratch-999999999-0/weights/dense.bin").exists());
        drop(lock);
        remove_abandoned(cache.path());
        assert_eq!(names(cache.path()), [""; 0]);
    }

    #[test]
    fn a_process_of_the_same_id_in_another_container_keeps_its_folder() {
        let cache = tempfile::tempdir().unwrap();
        let id = std::process::id().to_string();
        let lock = of_another_host(cache.path(), &id);
        lock.lock().unwrap();
        let [first, second] = [(); 2].map(|()| Scratch::create_in(cache.path()).unwrap());
        assert_ne!(first.path(), second.path());
        drop((first, second));
        assert_eq!(names(cache.path()), [format!("{PREFIX}{id}")]);
        assert!(cache.path().join(format!("{PREFIX}{id}/weights/dense.bin")).exists());
    }
}
