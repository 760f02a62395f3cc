//! Limits of time: no process of a job waits for another one for ever.

use moec_runtime::{Error, Result};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// Seconds without a sign of a host after which the job ends.
const TIMEOUT: u64 = 60;
/// Variable that sets them.
pub const TIMEOUT_VARIABLE: &str = "MOEC_HOST_TIMEOUT";
/// Factor of the limit at the start of all processes: each may check its bundle first.
pub(crate) const STARTING: u32 = 10;

/// Time without a sign of a host after which the job ends.
///
/// # Errors
/// A value of the variable that is not a number of seconds.
pub fn timeout() -> Result<Duration> {
    let given = std::env::var(TIMEOUT_VARIABLE).ok();
    let seconds = match given.as_deref().map(str::parse) {
        None => TIMEOUT,
        Some(Ok(seconds)) if seconds > 0 => seconds,
        Some(_) => {
            let given = given.unwrap_or_default();
            return Err(Error::range(TIMEOUT_VARIABLE, "a number of seconds above 0", given));
        }
    };
    Ok(Duration::from_secs(seconds))
}

/// An error of a limit that has passed.
pub(crate) fn passed(what: impl Into<String>) -> Error {
    Error::machine(what).with_hint(format!("`{TIMEOUT_VARIABLE}` sets another time, in seconds"))
}

/// Time in which a launcher passes a message on: MPICH's drops what is on its way when it ends a job.
const PASSING: Duration = Duration::from_millis(200);

/// Writes an error to standard error before the job ends, in the form of all of moec's errors.
pub(crate) fn report(e: &Error) {
    let hint = e.hint().map_or_else(String::new, |hint| format!("hint: {hint}\n"));
    let text = format!("error: {e}\n{hint}");
    // SAFETY: so many bytes of a text. The thread of a subcommand may hold the lock of the stream while it waits for
    // this one, so the system writes it.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
    std::thread::sleep(PASSING);
}

/// Does work that waits for other processes without a limit of its own. Ends this process if it takes longer; the
/// launcher then ends the job.
///
/// # Errors
/// A thread that does not start.
pub(crate) fn within<T>(limit: Duration, what: &'static str, work: impl FnOnce() -> T) -> Result<T> {
    let (ended, watch) = mpsc::channel::<()>();
    let watching = std::thread::Builder::new().name("limit".to_owned()).spawn(move || {
        if watch.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            report(&passed(format!("{what} for {} s", limit.as_secs())));
            // SAFETY: ends the process, without what libraries do at an exit: that would wait, too.
            unsafe { libc::_exit(1) };
        }
    });
    watching.map_err(Error::thread)?;
    let done = work();
    drop(ended);
    Ok(done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_within_its_limit_is_left_alone() {
        assert_eq!(within(Duration::from_millis(50), "no end", || 7).unwrap(), 7);
        // The watch has ended with the work, and does not end the tests.
        std::thread::sleep(Duration::from_millis(100));
    }
}
