//! Ctrl-C: the first one requests a clean end, the second one ends the process.

use std::sync::atomic::{AtomicBool, Ordering};

static STOP: AtomicBool = AtomicBool::new(false);

/// True once an interrupt has come.
pub fn flag() -> &'static AtomicBool {
    &STOP
}

/// Guard during whose life an interrupt sets the flag instead of ending the process.
pub struct Guard {
    #[cfg(unix)]
    before: Option<libc::sigaction>,
}

#[cfg(unix)]
extern "C" fn on_interrupt(_signal: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// Catches interrupts until the returned guard is dropped.
#[cfg(unix)]
pub fn guard() -> Guard {
    STOP.store(false, Ordering::Relaxed);
    // SAFETY: the handler only stores to an atomic, which a signal handler may; both structures live on
    // this stack for the call. `SA_RESETHAND` gives the second interrupt its usual effect.
    let before = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        let mut before: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_interrupt as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_RESETHAND;
        libc::sigemptyset(&raw mut action.sa_mask);
        (libc::sigaction(libc::SIGINT, &raw const action, &raw mut before) == 0).then_some(before)
    };
    Guard { before }
}

/// Catches interrupts until the returned guard is dropped.
#[cfg(not(unix))]
pub fn guard() -> Guard {
    STOP.store(false, Ordering::Relaxed);
    Guard {}
}

impl Drop for Guard {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some(before) = &self.before {
            // SAFETY: this is the action that the operating system returned before.
            unsafe { libc::sigaction(libc::SIGINT, before, std::ptr::null_mut()) };
        }
        STOP.store(false, Ordering::Relaxed);
    }
}
