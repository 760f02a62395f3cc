//! Downloads into the cache: in pieces, resumed where the last attempt ended, and checked before files get
//! their names.

use super::cache::Repo;
use super::client::{Client, Hash, PIECE, RemoteFile, TransferError};
use super::name::Name;
use moec_base::error::{Error, Result, io_error};
use moec_base::hashing;
use moec_base::interrupt;
use moec_base::locked_folder::same_file;
use moec_base::progress::{Bar, Progress};
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Number of times that a connection may fail without any progress.
const ATTEMPTS: u32 = 5;
/// Length of the first pause; each pause is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(250);

/// Downloads files that the cache lacks, and links all of them into the commit's folder.
pub(super) fn all(
    client: &Client,
    name: &Name,
    repo: &Repo,
    commit: &str,
    files: &[&RemoteFile],
    progress: &Progress,
) -> Result<()> {
    let absent = |f: &&&RemoteFile| !is_whole(&repo.blob(f.hash.text()), f.bytes);
    let missing: Vec<&&RemoteFile> = files.iter().filter(absent).collect();
    if !missing.is_empty() {
        let total = missing.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
        let bar = progress.bytes("Fetching", total);
        for file in missing {
            bar.label(&file.name);
            Fetch { client, name, repo, commit, file, bar: &bar, progress }.fetch()?;
        }
    }
    files.iter().try_for_each(|f| repo.link(commit, &f.name, f.hash.text()).map(|_| ()))
}

/// Blobs have their names only after a check, so checking the size is enough here.
fn is_whole(blob: &Path, bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|m| m.is_file() && m.len() == bytes)
}

/// Opens and locks a partial file, so that two processes do not download the same bytes. `None` if another
/// process has finished the download meanwhile. `wait` is called while another process downloads it.
///
/// # Errors
/// Fails if the file cannot be created; errors of `wait` are returned.
fn lock(
    partial: &Path,
    is_whole: impl Fn() -> bool,
    wait: &mut dyn FnMut() -> Result<()>,
) -> Result<Option<File>> {
    loop {
        let options = OpenOptions::new().create(true).read(true).append(true).open(partial);
        let out = options.map_err(|e| io_error("create", partial, &e))?;
        match out.try_lock() {
            Err(TryLockError::WouldBlock) => {
                wait()?;
                continue;
            }
            // Without locks in the file system, two processes write the same bytes, which are checked later.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        // Before the lock, the other process may have renamed or removed the file.
        let own = same_file(&out, partial);
        if is_whole() {
            if own {
                let _ = fs::remove_file(partial);
            }
            return Ok(None);
        }
        if own {
            return Ok(Some(out));
        }
    }
}

/// A partial file.
struct Fetch<'a> {
    client: &'a Client,
    name: &'a Name,
    repo: &'a Repo,
    commit: &'a str,
    file: &'a RemoteFile,
    bar: &'a Bar,
    progress: &'a Progress,
}

/// The hash of a file's content, of the kind that the hub has.
enum Sum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Sum {
    fn new(file: &RemoteFile) -> Self {
        match file.hash {
            Hash::Sha256(_) => Self::Sha256(Sha256::new()),
            Hash::Git(_) => Self::Git(Sha1::new().chain_update(format!("blob {}\0", file.bytes))),
        }
    }

    fn add(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(sum) => sum.update(bytes),
            Self::Git(sum) => sum.update(bytes),
        }
    }

    fn text(self) -> String {
        match self {
            Self::Sha256(sum) => hashing::hex(&sum.finalize()),
            Self::Git(sum) => hashing::hex(&sum.finalize()),
        }
    }
}

impl Fetch<'_> {
    fn fetch(&self) -> Result<()> {
        let blob = self.repo.blob(self.file.hash.text());
        let folder = blob.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|e| io_error("create", folder, &e))?;
        let partial = PathBuf::from(format!("{}.incomplete", blob.display()));
        let mut noted = false;
        let mut wait = || {
            if !std::mem::replace(&mut noted, true) {
                self.progress.stage("Waiting", &format!("another process is fetching `{}`", self.file.name));
            }
            interrupt::check()?;
            std::thread::sleep(PAUSE);
            Ok(())
        };
        let is_whole = || is_whole(&blob, self.file.bytes);
        let Some(mut out) = lock(&partial, is_whole, &mut wait)? else {
            self.bar.add(self.file.bytes);
            return Ok(());
        };
        let failed = |e: io::Error| io_error("write", &partial, &e);
        let mut sum = Sum::new(self.file);
        let mut received = self.read_again(&mut out, &mut sum).map_err(failed)?;
        let mut broken = 0;
        while received < self.file.bytes {
            interrupt::check()?;
            let before = received;
            match self.piece(&mut out, &mut sum, &mut received) {
                Ok(()) => broken = 0,
                Err(Stopped::Disk(e)) => return Err(failed(e)),
                Err(Stopped::Hub(TransferError::Permanent(e))) => {
                    if received == 0 {
                        // Another attempt has no bytes to resume from.
                        let _ = fs::remove_file(&partial);
                    }
                    return Err(e);
                }
                Err(Stopped::Hub(line)) => {
                    broken = if received > before { 1 } else { broken + 1 };
                    if broken >= ATTEMPTS {
                        let e = self.client.unreachable(line);
                        return Err(e
                            .context(format!(
                                "`{}` of `{}` could not be downloaded completely",
                                self.file.name, self.name
                            ))
                            .hint("run the same command again to resume the download"));
                    }
                    std::thread::sleep(PAUSE * 2_u32.pow(broken - 1));
                }
            }
        }
        let found = sum.text();
        if found != self.file.hash.text() {
            let _ = fs::remove_file(&partial);
            return Err(Error::environment(format!(
                "`{}` of `{}` was downloaded with wrong content: its hash is {found}, not {}",
                self.file.name,
                self.name,
                self.file.hash.text()
            ))
            .hint(
                "the file was removed; try again, and if the error stays, tell the publisher of the model",
            ));
        }
        out.sync_all().map_err(failed)?;
        fs::rename(&partial, &blob).map_err(|e| io_error("write", &blob, &e))
    }

    /// Hashes the bytes that an earlier attempt left, and returns their number.
    fn read_again(&self, out: &mut File, sum: &mut Sum) -> io::Result<u64> {
        let existing = out.metadata()?.len();
        if existing > self.file.bytes {
            out.set_len(0)?;
            return Ok(0);
        }
        let mut buffer = vec![0; 1 << 20];
        let mut received = 0;
        loop {
            let n = out.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            sum.add(&buffer[..n]);
            received += n as u64;
        }
        self.bar.add(received);
        Ok(received)
    }

    /// Appends the bytes of one request.
    fn piece(&self, out: &mut File, sum: &mut Sum, received: &mut u64) -> Result<(), Stopped> {
        let to = self.file.bytes.min(received.saturating_add(PIECE));
        let mut from = self
            .client
            .piece(self.name, self.commit, &self.file.name, (*received, to))
            .map_err(Stopped::Hub)?;
        let mut buffer = vec![0; 1 << 16];
        while *received < to {
            interrupt::check().map_err(|e| Stopped::Hub(TransferError::Permanent(e)))?;
            let n =
                from.read(&mut buffer).map_err(|e| Stopped::Hub(TransferError::Temporary(e.to_string())))?;
            if n == 0 {
                return Err(Stopped::Hub(TransferError::Temporary("the connection ended early".to_owned())));
            }
            out.write_all(&buffer[..n]).map_err(Stopped::Disk)?;
            sum.add(&buffer[..n]);
            *received += n as u64;
            self.bar.add(n as u64);
        }
        Ok(())
    }
}

/// Reason that a piece ended early.
enum Stopped {
    Disk(io::Error),
    Hub(TransferError),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Message for a wait while another process does `what`.
    fn after(change: impl Fn(&Path, &Path) -> io::Result<()>) -> (Option<File>, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let [partial, blob] = ["blob.incomplete", "blob"].map(|n| folder.path().join(n));
        fs::write(&partial, "whole").unwrap();
        let mut other = Some(File::open(&partial).unwrap());
        other.as_ref().unwrap().lock().unwrap();
        let mut wait = || {
            change(&partial, &blob).unwrap();
            drop(other.take().expect("it is waited for once"));
            Ok(())
        };
        (lock(&partial, || is_whole(&blob, 5), &mut wait).unwrap(), folder)
    }

    #[test]
    fn file_fetched_meanwhile_by_another_process_is_used() {
        let (found, folder) = after(|partial, blob| fs::rename(partial, blob));
        assert!(found.is_none());
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["blob"]);
    }

    #[test]
    fn file_abandoned_by_another_process_is_fetched() {
        let (found, folder) = after(|partial, _| fs::remove_file(partial));
        let partial = folder.path().join("blob.incomplete");
        assert!(found.is_some_and(|file| same_file(&file, &partial)));
        let (found, _folder) = after(|_, _| Ok(()));
        assert_eq!(found.unwrap().metadata().unwrap().len(), 5, "what has come is gone");
    }
}
