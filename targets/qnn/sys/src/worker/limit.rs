//! A process that is waited for no longer than it may take.

use std::process::Child;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Runs a function that waits for a process, for example for its answer. After the time limit the process is
/// killed, which ends the waiting. Returns the function's result, and whether the process was killed.
pub fn within<R>(child: &mut Child, limit: Duration, work: impl FnOnce() -> R) -> (R, bool) {
    let (done, waiting) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let watch = scope.spawn(move || {
            let late = waiting.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            late && child.kill().is_ok()
        });
        let result = work();
        drop(done);
        (result, watch.join().unwrap_or(false))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read as _;
    use std::process::{Command, Stdio};
    use std::time::Instant;

    #[test]
    fn unresponsive_worker_is_ended() {
        let mut command = Command::new("sleep");
        let mut child = command.arg("100").stdout(Stdio::piped()).spawn().unwrap();
        let mut from = child.stdout.take().unwrap();
        let begin = Instant::now();
        let read = || from.read_to_end(&mut Vec::new());
        let (read, late) = within(&mut child, Duration::from_millis(20), read);
        assert!(late && read.is_ok_and(|n| n == 0) && begin.elapsed() < Duration::from_secs(50));
        assert!(!child.wait().unwrap().success());
        let mut child = Command::new("true").spawn().unwrap();
        assert_eq!(within(&mut child, Duration::from_secs(100), || 7), (7, false));
        child.wait().unwrap();
    }
}
