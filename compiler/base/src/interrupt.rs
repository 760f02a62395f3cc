//! Interrupts: SIGINT, SIGTERM and SIGHUP, from the first moment on.
//!
//! While there is nothing to clean up, each of them ends the process at once, wherever it waits. While a thread holds a [`Hold`]
//! (a bundle that is half written, a scratch folder), the first signal is noted: loops that poll [`check`] end, system calls
//! that wait return, and what was begun is removed. A second one ends the process then, too. The exit code is 128 and the
//! signal's number: 130 after Ctrl-C. A SIGHUP that the parent process has ignored stays ignored, as `nohup` wants it.
//!
//! SIGXFSZ is ignored: a write beyond the limit of file sizes then returns an error, as on a full disk.
//!
//! The `unsafe` of this file installs the handler, and is what the handler does.

use crate::{Error, Result};
use std::io;
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

/// The signal that has come; 0 if none has.
static SIGNAL: AtomicI32 = AtomicI32::new(0);
/// Number of holders with something to clean up.
static HOLDS: AtomicUsize = AtomicUsize::new(0);
/// The process that is waited for, which gets the signal, too; 0 if there is none.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Message of an interrupt.
const SAID: &str = "error: interrupted\n";

/// Whether the user asked to stop. Long loops poll it.
pub fn requested() -> bool {
    SIGNAL.load(Ordering::Relaxed) != 0
}

/// Exit code of a process that was asked to stop.
pub fn exit_code() -> Option<u8> {
    let signal = SIGNAL.load(Ordering::Relaxed);
    if signal == 0 { None } else { u8::try_from(128 + signal).ok() }
}

/// An error if the user asked to stop.
///
/// # Errors
/// He did.
pub fn check() -> Result<()> {
    if requested() { Err(Error::environment("interrupted")) } else { Ok(()) }
}

/// While it lives, the first signal is noted in place of ending the process: there is something to clean up.
#[derive(Debug)]
pub struct Hold(());

/// Holds interrupts back from now on.
pub fn hold() -> Hold {
    HOLDS.fetch_add(1, Ordering::SeqCst);
    Hold(())
}

impl Drop for Hold {
    fn drop(&mut self) {
        HOLDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Runs a command to its end, as [`Command::output`] does. A signal to this process goes to it, too: otherwise it would be
/// waited for.
///
/// # Errors
/// As [`Command::output`].
pub fn output(command: &mut Command) -> io::Result<Output> {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let _passing = pass_to(&child);
    child.wait_with_output()
}

/// While it lives, a signal to this process goes to a child, too.
#[derive(Debug)]
pub struct Passing(());

/// Passes signals on to a child.
pub fn pass_to(child: &Child) -> Passing {
    CHILD.store(i32::try_from(child.id()).unwrap_or(0), Ordering::SeqCst);
    // One that came in between was not passed on.
    #[cfg(unix)]
    pass_on(SIGNAL.load(Ordering::SeqCst));
    Passing(())
}

impl Drop for Passing {
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

/// Signals that ask the process to end.
#[cfg(unix)]
const SIGNALS: [libc::c_int; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

#[cfg(unix)]
extern "C" fn on_signal(signal: libc::c_int) {
    let first = SIGNAL.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    pass_on(signal);
    if !first || HOLDS.load(Ordering::SeqCst) == 0 {
        // SAFETY: `write` and `_exit` may be called from a signal handler; the bytes are constant.
        unsafe {
            libc::write(libc::STDERR_FILENO, SAID.as_ptr().cast(), SAID.len());
            libc::_exit(128 + signal)
        }
    }
}

/// Current action of a signal: a handler's address, or one of the constants for none.
#[cfg(unix)]
fn action_of(signal: libc::c_int) -> libc::sighandler_t {
    // SAFETY: `action` is a valid `sigaction` to write to (zero is a valid bit pattern of every field); no new one is given.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &raw mut action);
        action.sa_sigaction
    }
}

/// Listens for interrupts from now on.
#[cfg(unix)]
pub fn install() {
    for signal in SIGNALS {
        if signal == libc::SIGHUP && action_of(signal) == libc::SIG_IGN {
            continue;
        }
        // SAFETY: `action` is a valid `sigaction` (zero is a valid bit pattern of every field), and the handler only touches
        // atomics and calls what is allowed in one. No `SA_RESTART`: system calls that wait return.
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

/// Listens no longer: who takes signals by itself gets them alone.
#[cfg(unix)]
pub fn release() {
    let own = on_signal as extern "C" fn(libc::c_int) as usize;
    for signal in SIGNALS.into_iter().filter(|&signal| action_of(signal) == own) {
        // SAFETY: `signal` takes two numbers; the second is the action of a process that has requested none.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

/// As where there are signals.
#[cfg(not(unix))]
pub fn release() {}

/// Listens for interrupts; without signals there is nothing to hear.
#[cfg(not(unix))]
pub fn install() {}
