//! Preload of mapped weights: a background thread walks through the files once, before they are needed.
//!
//! Without it, pages are mapped by faults, a few at a time, whenever a kernel first touches them. That goes
//! on as long as there are experts that no token has chosen yet. Preloading begins after the first token: the
//! first prompt reads most of the weights anyway, and would have to share the disk. If the files do not fit
//! into free memory, there is no preload: the first pages would be evicted before the last are read.

#[cfg(target_os = "linux")]
use crate::platform::available::available;
use crate::platform::mapped::MappedFile;
use memmap2::Advice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// Bytes of one request; between two requests the thread checks whether to end.
const PIECE: usize = 4 << 20;

/// Pieces that are requested from the disk before they are waited for.
const AHEAD: usize = 4;

/// The thread. Dropping this ends it, after at most one piece.
#[derive(Debug)]
pub(crate) struct Preload {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Preload {
    /// Starts with the first file; `None` if the files do not fit into free memory, or no thread can be
    /// started.
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

/// Gives threads that compute priority. If pages only have to be mapped, faults are better than slowing those
/// threads down. If pages come from disk, this thread sleeps anyway.
#[cfg(target_os = "linux")]
fn yield_to_others() {
    const NICE: libc::c_int = 15;
    // SAFETY: the call only takes numbers, for the priority of the calling thread (0; on Linux it is per
    // thread). It may be refused.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, NICE) };
}

/// Does nothing on this system.
#[cfg(not(target_os = "linux"))]
fn yield_to_others() {}

/// Requests a file from its beginning to its end. These are hints: pages that the operating system does not
/// read are mapped by faults.
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

/// Whether free memory has room for `bytes` bytes of files.
#[cfg(target_os = "linux")]
fn fits(bytes: u64) -> bool {
    available().is_some_and(|there| bytes <= there)
}

/// Always true: on other operating systems pages are only read ahead, not mapped, which takes no memory from
/// other programs.
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
        // If dropped half way, the thread ends and releases the files.
        drop(Preload::start(&files));
        assert_eq!(Arc::strong_count(&files), 1);
    }
}
