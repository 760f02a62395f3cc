//! Interrupts: the first SIGINT or SIGTERM is noted, so that a build can clean up; a second one kills.
//!
//! The only `unsafe` of this file installs the handler.

use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};

static REQUESTED: AtomicBool = AtomicBool::new(false);

/// Whether the user asked to stop. Long loops poll it.
pub fn requested() -> bool {
    REQUESTED.load(Ordering::Relaxed)
}

/// An error if the user asked to stop.
///
/// # Errors
/// He did.
pub fn check() -> Result<()> {
    if requested() { Err(Error::environment("interrupted")) } else { Ok(()) }
}

/// Notes interrupts from now on, instead of ending at once.
#[cfg(unix)]
pub fn install() {
    extern "C" fn note(signal: libc::c_int) {
        if REQUESTED.swap(true, Ordering::Relaxed) {
            // SAFETY: `_exit` may be called from a signal handler.
            unsafe { libc::_exit(128 + signal) }
        }
    }
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: `action` is a valid `sigaction` (zero is a valid bit pattern of every field), and `note`
        // only touches an atomic and calls `_exit`, which is allowed in a signal handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as extern "C" fn(libc::c_int) as usize;
            action.sa_flags = libc::SA_RESTART;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
}

/// Notes interrupts from now on; without signals there is nothing to note.
#[cfg(not(unix))]
pub fn install() {}
