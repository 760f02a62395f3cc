//! Log of the library. Errors are kept for the caller; nothing goes to stdout or stderr.

use std::ffi::{c_char, c_int, c_void};
use std::panic::catch_unwind;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// `QNN_LOG_LEVEL_ERROR`.
pub(crate) const ERRORS: u32 = 1;
/// Messages kept of one call.
const MAX_MESSAGES: usize = 16;
/// Bytes of a message.
const LONGEST: usize = 1024;

/// Messages since the current call began.
static MESSAGES: Mutex<Vec<String>> = Mutex::new(Vec::new());
/// Held during a call.
static CALL: Mutex<()> = Mutex::new(());

unsafe extern "C" {
    /// `vsnprintf`, whose last argument, a `va_list`, is passed as an address on x86-64 and AArch64.
    fn vsnprintf(to: *mut c_char, len: usize, format: *const c_char, arguments: *mut c_void) -> c_int;
}

/// Guard of a call: no other call runs until it is dropped.
pub(crate) struct CallGuard(MutexGuard<'static, ()>);

impl CallGuard {
    /// Waits for the previous call to end, and deletes its messages.
    pub(crate) fn begin() -> Self {
        let guard = CALL.lock().unwrap_or_else(PoisonError::into_inner);
        messages().clear();
        Self(guard)
    }

    /// Messages since.
    pub(crate) fn messages(&self) -> Vec<String> {
        // The messages belong to this call as long as its lock is held.
        let Self(_lock) = self;
        std::mem::take(&mut messages())
    }

    /// The same after another text.
    pub(crate) fn message_suffix(&self) -> String {
        self.messages().iter().flat_map(|m| ["; ", m]).collect()
    }
}

fn messages() -> MutexGuard<'static, Vec<String>> {
    MESSAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Called by the library for each message.
pub(crate) unsafe extern "C" fn receive(format: *const c_char, _: u32, _: u64, arguments: *mut c_void) {
    if format.is_null() {
        return;
    }
    let mut bytes = [0u8; LONGEST];
    // SAFETY: at most `LONGEST` bytes are written, the last of them zero; format and arguments are the
    // library's own pair.
    let n = unsafe { vsnprintf(bytes.as_mut_ptr().cast(), LONGEST, format, arguments) };
    let n = usize::try_from(n).unwrap_or(0).min(LONGEST - 1);
    let line = String::from_utf8_lossy(&bytes[..n]).trim().to_owned();
    // A panic must not go through the library.
    let _ = catch_unwind(|| {
        let mut messages = messages();
        if !line.is_empty() && messages.len() < MAX_MESSAGES && messages.last() != Some(&line) {
            messages.push(line);
        }
    });
}
