//! A folder that appears complete or not at all.
//!
//! Files are written to a hidden folder beside the destination. At the end it is exchanged with an earlier
//! bundle; after any earlier failure it is removed.

use super::destination::{self, FolderState};
use super::swap::{exchange, fail_point};
use super::workspace::{self, RenameLock, Workspace, parent_of};
use moec_base::disk::sync_folder;
use moec_base::error::{Error, Result, io_error};
use moec_base::interrupt::{self, Hold};
use moec_base::locked_folder::TRIES;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// A bundle being written.
#[derive(Debug)]
pub struct Partial {
    workspace: Workspace,
    folder: PathBuf,
    destination: PathBuf,
    notes: Vec<String>,
    done: bool,
    /// Released when the folder is in place or removed.
    _hold: Hold,
}

impl Partial {
    /// Opens a folder beside `destination`, which must be free, an earlier bundle without other files, or
    /// empty. Leftovers of killed builds are restored or removed first.
    ///
    /// # Errors
    /// Fails if the destination is something else, or if its parent cannot be written.
    pub fn create(destination: &Path) -> Result<Self> {
        let destination = &destination::plain(destination);
        let mut notes: Vec<String> = workspace::recover(destination)?.into_iter().collect();
        look_concurrently(destination)?;
        let parent = parent_of(destination);
        fs::create_dir_all(parent).map_err(|e| io_error("create", parent, &e))?;
        notes.extend(workspace::clear(destination));
        let hold = interrupt::hold();
        let workspace = Workspace::create(destination)?;
        let folder = workspace.bundle();
        let partial =
            Self { workspace, folder, destination: destination.to_owned(), notes, done: false, _hold: hold };
        fs::create_dir(&partial.folder).map_err(|e| io_error("create", &partial.folder, &e))?;
        Ok(partial)
    }

    /// The folder to write into.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Puts the folder in place, in exchange for an earlier bundle. Gives what there is to say of files that
    /// others left, or that stay.
    ///
    /// # Errors
    /// A destination that has become something else, or a name that cannot be changed; what was there is then
    /// still there.
    pub fn commit(mut self) -> Result<Vec<String>> {
        fail_point("write");
        sync_all(&self.folder).map_err(|(path, e)| io_error("write", &path, &e))?;
        fail_point("sync");
        let destination = self.destination.clone();
        let parent = parent_of(&destination);
        {
            let _lock = RenameLock::take(parent);
            self.put_into_place()?;
        }
        self.done = true;
        sync_folder(parent).map_err(|e| io_error("write", parent, &e))?;
        let mut notes = std::mem::take(&mut self.notes);
        match self.workspace.remove() {
            Ok(remaining) => notes.extend(remaining),
            Err(e) => {
                notes.push(format!(
                    "the earlier `{}` could not be removed completely: {e}",
                    destination.display()
                ));
            }
        }
        Ok(notes)
    }

    /// Renames the folder to the destination. What had that name is then in the workspace.
    fn put_into_place(&mut self) -> Result<()> {
        let (new, at) = (&self.folder, &self.destination);
        let failed = |e: &io::Error| io_error("replace", at, e);
        for _ in 0..TRIES {
            if destination::look(at, at)? != FolderState::Bundle {
                // A folder takes the place of none, or of an empty one, in one step.
                match fs::rename(new, at) {
                    Err(e) if CONCURRENT_RENAME.contains(&e.kind()) => continue,
                    done => done.map_err(|e| io_error("put into place", at, &e))?,
                }
                fail_point("place");
                return Ok(());
            }
            match exchange(new, at) {
                Ok(true) => {
                    fail_point("exchange");
                    return self.check_removable(new, || exchange(new, at).map(|_| ()));
                }
                Ok(false) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                Err(e) => return Err(failed(&e)),
            }
            let old = self.workspace.replaced();
            match fs::rename(at, &old) {
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                done => done.map_err(|e| failed(&e))?,
            }
            fail_point("take");
            let back = || fs::rename(&old, at);
            self.check_removable(&old, back)?;
            if let Err(e) = fs::rename(new, at) {
                let error = io_error("put into place", at, &e);
                // A file that cannot be put back now stays in the workspace, where the user finds it.
                self.done = back().is_err();
                return Err(error);
            }
            fail_point("place");
            return Ok(());
        }
        Err(Error::environment(format!("`{}` is being changed by other processes", at.display()))
            .hint("wait until other builds of it have ended"))
    }

    /// Checks again that the replaced folder may be removed, since files may have been added meanwhile.
    /// Otherwise moves everything back.
    fn check_removable(&self, taken: &Path, back: impl FnOnce() -> io::Result<()>) -> Result<()> {
        match destination::look(taken, &self.destination) {
            Ok(_) => Ok(()),
            Err(e) => {
                back().map_err(|e| io_error("put back", taken, &e))?;
                Err(e)
            }
        }
    }
}

/// Like [`destination::look`], while other builds may exchange the name between its steps. A refusal is
/// checked again while no other build can do so.
fn look_concurrently(at: &Path) -> Result<FolderState> {
    destination::look(at, at).or_else(|_| {
        let _lock = RenameLock::take(parent_of(at));
        destination::look(at, at)
    })
}

/// Errors of a rename onto a folder that is not empty any more, or has become something else.
const CONCURRENT_RENAME: [io::ErrorKind; 3] =
    [io::ErrorKind::DirectoryNotEmpty, io::ErrorKind::AlreadyExists, io::ErrorKind::NotADirectory];

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.done {
            // An error is being reported, and the next build tidies up, too.
            let _ = self.workspace.remove();
        }
    }
}

/// Waits until everything below a folder is on the disk. Several threads wait for files, since disks take
/// many at once.
fn sync_all(folder: &Path) -> Result<(), (PathBuf, io::Error)> {
    let mut all = vec![folder.to_owned()];
    let mut at = 0;
    while let Some(path) = all.get(at).cloned() {
        at += 1;
        let named = |e| (path.clone(), e);
        if fs::symlink_metadata(&path).map_err(named)?.is_dir() {
            for entry in fs::read_dir(&path).map_err(named)? {
                all.push(entry.map_err(named)?.path());
            }
        }
    }
    let left = Mutex::new(all.into_iter());
    let failed = Mutex::new(None);
    let take = || left.lock().ok().and_then(|mut all| all.next_back());
    let work = || {
        while let Some(path) = take() {
            if let Err(e) = File::open(&path).and_then(|f| f.sync_all())
                && let Ok(mut failed) = failed.lock()
            {
                failed.get_or_insert((path, e));
            }
        }
    };
    std::thread::scope(|scope| (0..SYNCING).for_each(|_| drop(scope.spawn(work))));
    failed.into_inner().ok().flatten().map_or(Ok(()), Err)
}

/// Threads that wait for the disk.
const SYNCING: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{BUNDLE_VERSION, Manifest};
    use moec_base::paths::MANIFEST;
    use std::collections::BTreeMap;

    /// A test cannot write between the check and the exchange, so it executes both steps itself.
    #[test]
    fn files_added_during_the_exchange_return_with_their_folder() {
        let temp = tempfile::tempdir().unwrap();
        let at = temp.path().join("b");
        let manifest = Manifest {
            bundle_version: BUNDLE_VERSION,
            moec_version: "0".into(),
            family: "olmoe".into(),
            target: "native".into(),
            llvm: "0".into(),
            assembler: None,
            source_fingerprint: "0".into(),
            profile: None,
            files: BTreeMap::new(),
        };
        fs::create_dir(&at).unwrap();
        fs::write(at.join(MANIFEST), serde_json::to_string(&manifest).unwrap()).unwrap();
        let partial = Partial::create(&at).unwrap();
        assert_eq!(destination::look(&at, &at).unwrap(), FolderState::Bundle);
        fs::write(at.join("thesis.txt"), "years of work").unwrap();
        let taken = partial.workspace.replaced();
        fs::rename(&at, &taken).unwrap();
        let error = partial.check_removable(&taken, || fs::rename(&taken, &at)).unwrap_err();
        assert!(error.to_string().contains("`thesis.txt`"), "{error}");
        assert_eq!(fs::read(at.join("thesis.txt")).unwrap(), b"years of work");
        drop(partial);
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}
