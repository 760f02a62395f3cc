//! Files into the cache: a piece at a time, from where the last attempt ended, checked before they get their names.

use super::cache::Repo;
use super::client::{Broken, Client, Hash, Listed, PIECE};
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

/// Number of times that a line may break without anything having come.
const ATTEMPTS: u32 = 5;
/// Length of the first pause; each is twice the one before.
const PAUSE: Duration = Duration::from_millis(250);

/// Fetches files that the cache lacks, and puts all of them into the commit's folder.
pub(super) fn all(
    client: &Client,
    name: &Name,
    repo: &Repo,
    commit: &str,
    files: &[&Listed],
    progress: &Progress,
) -> Result<()> {
    let absent = |f: &&&Listed| !is_whole(&repo.blob(f.hash.text()), f.bytes);
    let missing: Vec<&&Listed> = files.iter().filter(absent).collect();
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

/// Blobs get their names when they were checked, so that only the size has to be checked.
fn is_whole(blob: &Path, bytes: u64) -> bool {
    fs::metadata(blob).is_ok_and(|m| m.is_file() && m.len() == bytes)
}

/// Opens and locks a file that is on its way, since two processes would write the same bytes twice. `None` where another
/// process has fetched it meanwhile. `wait` is called while another process fetches it.
///
/// # Errors
/// A file that cannot be created, and what `wait` returns.
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
            // A file system without locks: two processes write the same bytes, which are checked.
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        // Until it was locked, the other process may have renamed or removed it.
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

/// A file on its way.
struct Fetch<'a> {
    client: &'a Client,
    name: &'a Name,
    repo: &'a Repo,
    commit: &'a str,
    file: &'a Listed,
    bar: &'a Bar,
    progress: &'a Progress,
}

/// The sum of a file's content, as the hub knows it.
enum Sum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Sum {
    fn new(file: &Listed) -> Self {
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
        let mut done = self.read_again(&mut out, &mut sum).map_err(failed)?;
        let mut broken = 0;
        while done < self.file.bytes {
            interrupt::check()?;
            let before = done;
            match self.piece(&mut out, &mut sum, &mut done) {
                Ok(()) => broken = 0,
                Err(Stopped::Disk(e)) => return Err(failed(e)),
                Err(Stopped::Hub(Broken::Said(e))) => {
                    if done == 0 {
                        // Nothing has come that another attempt could go on with.
                        let _ = fs::remove_file(&partial);
                    }
                    return Err(e);
                }
                Err(Stopped::Hub(line)) => {
                    broken = if done > before { 1 } else { broken + 1 };
                    if broken >= ATTEMPTS {
                        let e = self.client.unreachable(line);
                        return Err(e
                            .context(format!("`{}` of `{}` did not come whole", self.file.name, self.name))
                            .hint("run the same command again: it goes on where this ended"));
                    }
                    std::thread::sleep(PAUSE * 2_u32.pow(broken - 1));
                }
            }
        }
        let found = sum.text();
        if found != self.file.hash.text() {
            let _ = fs::remove_file(&partial);
            return Err(Error::environment(format!(
                "`{}` of `{}` came with other content: its hash is {found}, not {}",
                self.file.name,
                self.name,
                self.file.hash.text()
            ))
            .hint("what came was removed; try again, and should it stay, ask who publishes the model"));
        }
        out.sync_all().map_err(failed)?;
        fs::rename(&partial, &blob).map_err(|e| io_error("write", &blob, &e))
    }

    /// Sums up what an earlier attempt has left, and gives how much that is.
    fn read_again(&self, out: &mut File, sum: &mut Sum) -> io::Result<u64> {
        let there = out.metadata()?.len();
        if there > self.file.bytes {
            out.set_len(0)?;
            return Ok(0);
        }
        let mut buffer = vec![0; 1 << 20];
        let mut done = 0;
        loop {
            let n = out.read(&mut buffer)?;
            if n == 0 {
                break;
            }
            sum.add(&buffer[..n]);
            done += n as u64;
        }
        self.bar.add(done);
        Ok(done)
    }

    /// One request's bytes after those that are there.
    fn piece(&self, out: &mut File, sum: &mut Sum, done: &mut u64) -> Result<(), Stopped> {
        let to = self.file.bytes.min(done.saturating_add(PIECE));
        let mut from =
            self.client.piece(self.name, self.commit, &self.file.name, (*done, to)).map_err(Stopped::Hub)?;
        let mut buffer = vec![0; 1 << 16];
        while *done < to {
            interrupt::check().map_err(|e| Stopped::Hub(Broken::Said(e)))?;
            let n = from.read(&mut buffer).map_err(|e| Stopped::Hub(Broken::Line(e.to_string())))?;
            if n == 0 {
                return Err(Stopped::Hub(Broken::Line("the connection ended early".to_owned())));
            }
            out.write_all(&buffer[..n]).map_err(Stopped::Disk)?;
            sum.add(&buffer[..n]);
            *done += n as u64;
            self.bar.add(n as u64);
        }
        Ok(())
    }
}

/// Reason that a piece ended early.
enum Stopped {
    Disk(io::Error),
    Hub(Broken),
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Result of a wait, while another process does `what`.
    fn after(what: impl Fn(&Path, &Path) -> io::Result<()>) -> (Option<File>, tempfile::TempDir) {
        let folder = tempfile::tempdir().unwrap();
        let [partial, blob] = ["blob.incomplete", "blob"].map(|n| folder.path().join(n));
        fs::write(&partial, "whole").unwrap();
        let mut other = Some(File::open(&partial).unwrap());
        other.as_ref().unwrap().lock().unwrap();
        let mut wait = || {
            what(&partial, &blob).unwrap();
            drop(other.take().expect("it is waited for once"));
            Ok(())
        };
        (lock(&partial, || is_whole(&blob, 5), &mut wait).unwrap(), folder)
    }

    #[test]
    fn a_file_that_another_process_fetched_meanwhile_is_taken() {
        let (found, folder) = after(|partial, blob| fs::rename(partial, blob));
        assert!(found.is_none());
        let left: Vec<_> = fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(left, ["blob"]);
    }

    #[test]
    fn a_file_that_another_process_gave_up_is_fetched() {
        let (found, folder) = after(|partial, _| fs::remove_file(partial));
        let partial = folder.path().join("blob.incomplete");
        assert!(found.is_some_and(|file| same_file(&file, &partial)));
        let (found, _folder) = after(|_, _| Ok(()));
        assert_eq!(found.unwrap().metadata().unwrap().len(), 5, "what has come is gone");
    }
}
