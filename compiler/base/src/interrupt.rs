//! Interrupts: SIGINT, SIGTERM and SIGHUP.
//!
//! While there is nothing to clean up, each of them ends the process at once, even in a system call. While a
//! thread has a [`Hold`] (for a half-written bundle or a scratch folder), the first signal is only recorded.
//! Loops that poll [`check`] then end, waiting system calls return, and unfinished files are removed. A
//! second signal ends the process. The exit code is 128 plus the signal's number: 130 after Ctrl-C. A SIGHUP
//! that the parent process ignores stays ignored, as `nohup` requires.
//!
//! SIGXFSZ is ignored: a write beyond the limit of file sizes then returns an error, as on a full disk.
//!
//! The `unsafe` code of this file installs the signal handler and is the handler.

use crate::{Error, Result};
use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The signal that was received; 0 if there was none.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Number of [`Hold`]s: threads with something to clean up.
static HOLDS: AtomicUsize = AtomicUsize::new(0);
/// The child process that a thread waits for; signals are passed on to it. 0 if there is none.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Error message of an interrupt.
const MESSAGE: &str = "error: interrupted\n";

/// Whether the user has interrupted the program. Long loops poll it.
pub fn requested() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// Exit code of a process that the user has interrupted.
pub fn exit_code() -> Option<u8> {
    let signal = SIGNAL.load(Ordering::Relaxed);
    if signal == 0 { None } else { u8::try_from(128 + signal).ok() }
}

/// Fails if the user has interrupted the program.
///
/// # Errors
/// The user has interrupted the program.
pub fn check() -> Result<()> {
    if requested() { Err(Error::environment("interrupted")) } else { Ok(()) }
}

/// Guard during which the first signal is recorded and does not end the process, since there is something to
/// clean up.
#[derive(Debug)]
pub struct Hold(());

/// Begins to hold interrupts back.
pub fn hold() -> Hold {
    HOLDS.fetch_add(1, Ordering::SeqCst);
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        HOLDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs a command to its end, like [`Command::output`]. Signals to this process are passed on to the command,
/// so that it does not delay the end.
///
/// # Errors
/// Those of [`Command::output`].
pub fn output(command: &mut Command) -> io::Result<Output> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let _passing = pass_to(&child);
    child.wait_with_output()
}

/// Guard during which signals to this process are passed on to a child.
#[derive(Debug)]
pub struct SignalForwarding(());

/// Begins to pass signals on to a child.
pub fn pass_to(child: &Child) -> SignalForwarding {
    CHILD.store(i32::try_from(child.id()).unwrap_or(0), Ordering::SeqCst);
    // A signal that came before this store was not passed on.
    #[cfg(unix)]
    pass_on(SIGNAL.load(Ordering::SeqCst));
    SignalForwarding(())
}

impl Drop for SignalForwarding {
    fn drop(&mut self) {
        CHILD.store(0, Ordering::SeqCst);
    }
}

#[cfg(unix)]
fn pass_on(signal: libc::c_int) {
    let child = CHILD.load(Ordering::SeqCst);
    if child > 0 && signal != 0 {
        // SAFETY: `kill` takes two numbers and may be called from a signal handler.
        unsafe { libc::kill(child, signal) };
    }
}

/// Signals that end the process.
#[cfg(unix)]
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

#[cfg(unix)]
extern "C" fn on_signal(signal: libc::c_int) {
    let first = SIGNAL.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    pass_on(signal);
    if !first || HOLDS.load(Ordering::SeqCst) == 0 {
        // SAFETY: `write` and `_exit` may be called from a signal handler; the bytes are constant.
        unsafe {
            libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
            libc::_exit(128 + signal)
        }
    }
}

/// Current action of a signal: the address of a handler, or one of the constants for no handler.
#[cfg(unix)]
fn action_of(signal: libc::c_int) -> libc::sighandler_t {
    // SAFETY: `action` is a valid `sigaction` to write to (zero is a valid bit pattern of every field). No
    // new action is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action.sa_sigaction
    }
}

/// Installs the handler of interrupts.
#[cfg(unix)]
pub fn install() {
    for signal in SIGNALS {
        if signal == libc::SIGHUP && action_of(signal) == libc::SIG_IGN {
            continue;
        }
        // SAFETY: `action` is a valid `sigaction` (zero is a valid bit pattern of every field). The handler
        // only uses atomics and functions that are allowed in a handler. No `SA_RESTART`: waiting system
        // calls return.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_signal as extern "C" fn(libc::c_int) as usize;
            libc::sigemptyset(&raw mut action.sa_mask);
            libc::sigaction(signal, &raw const action, std::ptr::null_mut());
        }
    }
    // SAFETY: `signal` takes two numbers, and no handler is given.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Removes the handler, for a caller that handles signals itself.
#[cfg(unix)]
pub fn release() {
    let own = on_signal as extern "C" fn(libc::c_int) as usize;
    for signal in SIGNALS.into_iter().filter(|&signal| action_of(signal) == own) {
        // SAFETY: `signal` takes two numbers; the second is the default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// The same as on systems with signals.
#[cfg(not(unix))]
pub fn release() {}

/// Does nothing: this system has no signals.
#[cfg(not(unix))]
pub fn install() {}
