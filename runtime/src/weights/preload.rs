//! Mapped weights are requested before they are needed: a thread walks through the files once, in the background.
//!
//! Without it, pages are mapped by faults, a few at a time, whenever a kernel touches the first of them: for as long as
//! there are experts that no token has chosen yet. It begins after the first token, whose prompt requests most of the weights by
//! itself and would only share the disk with it. What does not fit into the memory that is free is left to faults, since
//! its beginning would be gone before its end is there.

#[cfg(target_os = "linux")]
use crate::platform::available::available;
use crate::platform::mapped::MappedFile;
use memmap2::Advice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes that are requested at once; between two such pieces the thread looks whether it is to end.
const PIECE: usize = 4 << 20;

/// Pieces that the disk may begin with before they are waited for.
const AHEAD: usize = 4;

/// The thread. Dropping it ends it, after a piece at most.
#[derive(Debug)]
pub(crate) struct Preload {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Preload {
    /// Begins with the first file; none if all together do not fit into the memory that is free, or no thread can be had.
    pub(crate) fn start(files: &Arc<Vec<Option<MappedFile>>>) -> Option<Self> {
        let bytes = files.iter().flatten().map(|m| m.len() as u64).sum();
        if !fits(bytes) {
            return None;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let (files, end) = (Arc::clone(files), Arc::clone(&stop));
        let walk = move || {
            yield_to_others();
            files.iter().flatten().for_each(|file| whole(file, &end));
        };
        let thread = std::thread::Builder::new().name("moec-preload".to_owned()).spawn(walk).ok();
        thread.is_some().then_some(Self { stop, thread })
    }

    /// Waits until all files are mapped.
    #[cfg(test)]
    fn finish(mut self) {
        drop(self.thread.take().map(JoinHandle::join));
    }
}

impl Drop for Preload {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        drop(self.thread.take().map(JoinHandle::join));
    }
}

/// Lets threads that compute go first. Where pages only have to be mapped, it is better done by faults than at their cost;
/// where they come from disk, this thread sleeps anyway.
#[cfg(target_os = "linux")]
fn yield_to_others() {
    const NICE: libc::c_int = 15;
    // SAFETY: a number for the calling thread's own scheduling (0: itself, which on Linux is the thread); it may be refused.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
fn yield_to_others() {}

/// Requests a file from its beginning to its end. These are hints: what the operating system refuses comes by faults.
fn whole(file: &MappedFile, end: &AtomicBool) {
    for at in (0..file.len()).step_by(PIECE) {
        if end.load(Ordering::Relaxed) {
            return;
        }
        let piece = |at: usize| (at < file.len()).then(|| (at, PIECE.min(file.len() - at)));
        if let Some((at, bytes)) = piece(at + AHEAD * PIECE) {
            drop(file.map().advise_range(Advice::WillNeed, at, bytes));
        }
        if let Some((at, bytes)) = piece(at)
            && populate(file, at, bytes).is_err()
        {
            return;
        }
    }
}

/// Reads pages and maps them (Linux 5.14 and later).
#[cfg(target_os = "linux")]
fn populate(file: &MappedFile, at: usize, bytes: usize) -> std::io::Result<()> {
    file.map().advise_range(Advice::PopulateRead, at, bytes)
}

/// Reads pages; faults map them.
#[cfg(not(target_os = "linux"))]
fn populate(file: &MappedFile, at: usize, bytes: usize) -> std::io::Result<()> {
    file.map().advise_range(Advice::WillNeed, at, bytes)
}

/// Whether memory has room for so many bytes of files.
#[cfg(target_os = "linux")]
fn fits(bytes: u64) -> bool {
    available().is_some_and(|there| bytes <= there)
}

/// Always: elsewhere nothing is mapped ahead, only read, which takes memory from no one.
#[cfg(not(target_os = "linux"))]
fn fits(_bytes: u64) -> bool {
    true
}

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;
    use crate::platform::available::field;
    use std::fs;
    use std::io::Write as _;

    fn mapped(bytes: usize) -> MappedFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&vec![7; bytes]).unwrap();
        MappedFile::open(file.path()).unwrap()
    }

    /// Pages of a mapping that are in this process's tables.
    fn resident(map: &MappedFile) -> usize {
        let first = format!("{:x}-", map.as_ptr().addr());
        let all = fs::read_to_string("/proc/self/smaps").unwrap();
        let own = all.lines().skip_while(|line| !line.starts_with(&first)).collect::<Vec<_>>().join("\n");
        usize::try_from(field(&own, "Rss:").unwrap()).unwrap() * 1024
    }

    #[test]
    fn all_pages_are_mapped_and_the_thread_ends() {
        let files = Arc::new(vec![Some(mapped(2 * PIECE + 5000)), None, Some(mapped(100))]);
        assert_eq!(resident(files[0].as_ref().unwrap()), 0);
        Preload::start(&files).unwrap().finish();
        assert_eq!(resident(files[0].as_ref().unwrap()), (2 * PIECE + 5000).next_multiple_of(4096));
        assert_eq!(resident(files[2].as_ref().unwrap()), 4096);
        // Dropped half way, it ends, and lets go of the files.
        drop(Preload::start(&files));
        assert_eq!(Arc::strong_count(&files), 1);
    }
}
