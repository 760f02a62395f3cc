//! Files mapped for reading, and the handling of files that are truncated during the run.
//!
//! Reading a page past the new end of a mapped file raises SIGBUS, which would end the process without a
//! message. So every mapping is listed in a table for a signal handler. It looks the address up, names the
//! truncated file, and ends the process with exit code 1. Faults at other addresses go to the previous
//! handler: Rust's own, which reports stack overflows, or the operating system, which ends the process.
//!
//! The handler allocates nothing and takes no lock: its message is prepared when the file is mapped.

use crate::platform::regular;
use memmap2::Mmap;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::path::Path;

/// A file mapped for reading.
#[derive(Debug)]
pub struct MappedFile {
    // Declared first, so that it is dropped first.
    #[cfg(unix)]
    watch: Option<watch::Watch>,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file; the mapping of an empty one has no bytes.
    ///
    /// If others change the file, the mapped bytes change too. If they truncate it, reading past its new end
    /// ends the process with a message.
    ///
    /// # Errors
    /// As [`regular::open`]; an operation that the operating system refuses.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::of(&regular::open(path)?, path)
    }

    /// As [`MappedFile::open`], for an open regular file. Messages name it by `path`.
    ///
    /// # Errors
    /// An operation that the operating system refuses.
    pub fn of(file: &File, path: &Path) -> io::Result<Self> {
        // SAFETY: the mapping is only read, and every byte pattern is a valid `u8`. If others rewrite the
        // file it gives other numbers; if they truncate it the process ends. Neither breaks memory safety.
        let map = unsafe { Mmap::map(file)? };
        #[cfg(unix)]
        let watch = watch::Watch::new(&map, path);
        Ok(Self {
            #[cfg(unix)]
            watch,
            map,
        })
    }

    /// The mapping, for advice about it.
    pub fn map(&self) -> &Mmap {
        &self.map
    }

    /// Whether a truncation of the file would be reported. Not past [`MOST`] mappings, nor on operating
    /// systems without such signals.
    pub fn is_watched(&self) -> bool {
        #[cfg(unix)]
        return self.watch.is_some();
        #[cfg(not(unix))]
        false
    }
}

impl Deref for MappedFile {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map
    }
}

/// An incomplete output file: a process that ends because a mapped file was truncated removes it first. There
/// is one at a time; a later one replaces it.
#[derive(Debug)]
pub struct Unfinished(());

impl Unfinished {
    /// Registers the file, until this is dropped.
    pub fn new(path: &Path) -> Self {
        #[cfg(unix)]
        watch::remove_first(Some(path));
        #[cfg(not(unix))]
        let _ = path;
        Self(())
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        #[cfg(unix)]
        watch::remove_first(None);
    }
}

/// Most files that are watched at once: the largest checkpoints have some hundred shards.
pub const MOST: usize = 1024;

#[cfg(unix)]
mod watch {
    use super::MOST;
    use libc::{c_int, c_void, sigaction, siginfo_t};
    use memmap2::Mmap;
    use std::collections::BTreeMap;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;
    use std::path::Path;
    use std::ptr;
    use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
    use std::sync::{Mutex, OnceLock, PoisonError};

    /// A mapping. The slot is free if `end` is 0.
    struct Slot {
        start: AtomicUsize,
        end: AtomicUsize,
        /// Message about it, and its length. Never freed.
        text: AtomicPtr<u8>,
        len: AtomicUsize,
    }

    impl Slot {
        const fn free() -> Self {
            Self {
                start: AtomicUsize::new(0),
                end: AtomicUsize::new(0),
                text: AtomicPtr::new(ptr::null_mut()),
                len: AtomicUsize::new(0),
            }
        }
    }

    static SLOTS: [Slot; MOST] = [const { Slot::free() }; MOST];
    /// Messages about all files that were ever mapped. Its lock guards changes of [`SLOTS`].
    static MESSAGES: Mutex<BTreeMap<Vec<u8>, &'static [u8]>> = Mutex::new(BTreeMap::new());
    /// Previous action of each signal.
    static BEFORE: [OnceLock<sigaction>; 2] = [const { OnceLock::new() }; 2];
    const SIGNALS: [c_int; 2] = [libc::SIGBUS, libc::SIGSEGV];

    /// Entry of a mapping in the table. Dropping it removes the mapping.
    #[derive(Debug)]
    pub(crate) struct Watch(usize);

    impl Watch {
        /// Adds a mapping; `None` if it is empty, or the table is full.
        pub(crate) fn new(map: &Mmap, path: &Path) -> Option<Self> {
            install();
            let (start, len) = (map.as_ptr() as usize, map.len());
            let mut messages = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
            let free = SLOTS.iter().position(|s| s.end.load(Ordering::Relaxed) == 0).filter(|_| len > 0)?;
            let text = *messages.entry(path.as_os_str().as_encoded_bytes().to_vec()).or_insert_with(|| {
                let shown = path.display();
                let text = format!(
                    "error: `{shown}` was changed or cut while it was in use\nhint: put the file back as it was, and start again\n"
                );
                // Leaked, because a handler may be about to print it.
                Box::leak(text.into_bytes().into_boxed_slice())
            });
            let slot = &SLOTS[free];
            slot.start.store(start, Ordering::Relaxed);
            slot.text.store(text.as_ptr().cast_mut(), Ordering::Relaxed);
            slot.len.store(text.len(), Ordering::Relaxed);
            // Release: a reader that sees the end sees the whole entry.
            slot.end.store(start.saturating_add(len), Ordering::Release);
            Some(Self(free))
        }
    }

    impl Drop for Watch {
        fn drop(&mut self) {
            let _one = MESSAGES.lock().unwrap_or_else(PoisonError::into_inner);
            SLOTS[self.0].end.store(0, Ordering::Release);
        }
    }

    /// Installs the handler; repeating it is harmless. If the operating system refuses, faults end the
    /// process without a message.
    fn install() {
        static ONCE: std::sync::Once = std::sync::Once::new();
        ONCE.call_once(|| {
            for (signal, before) in SIGNALS.into_iter().zip(&BEFORE) {
                // SAFETY: all-zero is a valid action. With no new action the first call only writes the old
                // one, which must be known before the handler can run. The handler has the signature for
                // `SA_SIGINFO`, and does only what a signal handler may do.
                unsafe {
                    let mut old: sigaction = std::mem::zeroed();
                    if sigaction(signal, ptr::null(), &raw mut old) != 0 {
                        continue;
                    }
                    let _ = before.set(old);
                    let mut action: sigaction = std::mem::zeroed();
                    action.sa_sigaction = on_fault as *const () as usize;
                    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                    libc::sigemptyset(&raw mut action.sa_mask);
                    sigaction(signal, &raw const action, ptr::null_mut());
                }
            }
        });
    }

    /// Path of the file to remove before the process ends. Never freed: the handler may be reading it.
    static UNFINISHED: AtomicPtr<libc::c_char> = AtomicPtr::new(ptr::null_mut());

    /// Sets the file to remove before the process ends.
    pub(crate) fn remove_first(path: Option<&Path>) {
        let name = path.and_then(|p| CString::new(p.as_os_str().as_bytes()).ok());
        UNFINISHED.store(name.map_or(ptr::null_mut(), CString::into_raw), Ordering::Release);
    }

    fn message_of(address: usize) -> Option<(*const u8, usize)> {
        SLOTS.iter().find_map(|slot| {
            let end = slot.end.load(Ordering::Acquire);
            let (start, text) = (slot.start.load(Ordering::Relaxed), slot.text.load(Ordering::Relaxed));
            let within = address < end && address >= start && !text.is_null();
            within.then(|| (text.cast_const(), slot.len.load(Ordering::Relaxed)))
        })
    }

    unsafe extern "C" fn on_fault(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        // SAFETY: with `SA_SIGINFO` the information is valid, and for these signals it has an address.
        let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
        // A write to a read-only mapping is a bug of moec, not a fault of the file.
        let forbidden = signal == libc::SIGSEGV && code == SEGV_ACCERR;
        if let Some((text, len)) = message_of(address).filter(|_| !forbidden) {
            let unfinished = UNFINISHED.load(Ordering::Acquire);
            // SAFETY: text and name are never freed; `unlink`, `write` and `_exit` may be called from a
            // signal handler.
            unsafe {
                if !unfinished.is_null() {
                    libc::unlink(unfinished);
                }
                libc::write(libc::STDERR_FILENO, text.cast(), len);
                libc::_exit(1)
            }
        }
        // SAFETY: exactly the arguments from the operating system.
        unsafe { pass_on(signal, info, context) };
    }

    /// `si_code` of an access that the mapping does not permit.
    const SEGV_ACCERR: c_int = 2;

    /// Passes a signal to the previous handler.
    ///
    /// # Safety
    /// The arguments are those of a handler.
    unsafe fn pass_on(signal: c_int, info: *mut siginfo_t, context: *mut c_void) {
        let which = SIGNALS.iter().position(|&s| s == signal);
        let before = which.and_then(|i| BEFORE[i].get()).map(|b| (b.sa_sigaction, b.sa_flags, b));
        match before {
            Some((handler, flags, _)) if handler != libc::SIG_DFL && handler != libc::SIG_IGN => {
                if flags & libc::SA_SIGINFO == 0 {
                    // SAFETY: without the flag a handler takes the signal's number.
                    let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
                    handler(signal);
                } else {
                    // SAFETY: with the flag a handler takes these three.
                    let handler: unsafe extern "C" fn(c_int, *mut siginfo_t, *mut c_void) =
                        unsafe { std::mem::transmute(handler) };
                    // SAFETY: the caller's promise.
                    unsafe { handler(signal, info, context) };
                }
            }
            _ => {
                // The instruction is then executed again, and the operating system ends the process as it
                // would without a handler. SAFETY: all-zero is the default action.
                unsafe {
                    let default: sigaction = std::mem::zeroed();
                    sigaction(signal, &raw const default, ptr::null_mut());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_is_watched_while_mapped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, [7; 5000]).unwrap();
        // More mappings than the table has room for, one after the other.
        for _ in 0..2 * MOST {
            let file = MappedFile::open(&path).unwrap();
            assert!(file.len() == 5000 && file[4999] == 7);
            assert_eq!(file.is_watched(), cfg!(unix));
        }
        std::fs::write(&path, []).unwrap();
        assert!(MappedFile::open(&path).unwrap().is_empty());
        assert!(MappedFile::open(dir.path()).is_err());
    }
}
