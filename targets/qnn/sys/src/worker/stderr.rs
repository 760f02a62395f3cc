//! The end of the process's stderr, which explains why it ended.

use std::io::{self, Read};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are kept.
const MAX_BYTES: usize = 16 << 10;
/// Number of the last lines that errors show.
const LINES: usize = 8;

/// Thread that reads stderr, so that the process never blocks on it; and the text that it has kept.
#[derive(Debug)]
pub(super) struct Stderr {
    reader: JoinHandle<()>,
    kept: Arc<Mutex<Vec<u8>>>,
}

impl Stderr {
    /// Begins to read.
    pub(super) fn read(from: impl Read + Send + 'static) -> Self {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let to = Arc::clone(&kept);
        Self { reader: std::thread::spawn(move || keep(from, &to)), kept }
    }

    /// The last lines, without blank ones. The end is waited for no longer than this: a child that the
    /// process has started may still hold it open.
    pub(super) fn last(self, patience: Duration) -> Vec<String> {
        let begin = Instant::now();
        while !self.reader.is_finished() && begin.elapsed() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let text = String::from_utf8_lossy(&kept);
        let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        lines[lines.len().saturating_sub(LINES)..].iter().map(|&line| line.to_owned()).collect()
    }
}

/// Keeps the end of what comes, however much it is and however long its lines are.
fn keep(mut from: impl Read, kept: &Mutex<Vec<u8>>) {
    let mut piece = [0; 4096];
    loop {
        match from.read(&mut piece) {
            Ok(n) if n > 0 => {
                let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
                kept.extend_from_slice(&piece[..n]);
                let past = kept.len().saturating_sub(MAX_BYTES);
                kept.drain(..past);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn the_last_lines_are_kept() {
        let text = (0..20).map(|i| format!("line {i}\r\n\n")).collect::<Vec<_>>().concat();
        let last = Stderr::read(io::Cursor::new(text)).last(LONG);
        assert_eq!((last.len(), last[0].as_str(), last[7].as_str()), (LINES, "line 12", "line 19"));
    }

    #[test]
    fn endless_stderr_line_uses_bounded_memory() {
        let from = io::repeat(b'a').take(1 << 20).chain(&b"\nthe end"[..]);
        let kept = Mutex::new(Vec::new());
        keep(from, &kept);
        let kept = kept.into_inner().unwrap();
        assert!(kept.len() == MAX_BYTES && kept.capacity() <= 4 * MAX_BYTES && kept.ends_with(b"a\nthe end"));
    }

    #[test]
    fn stderr_held_open_is_not_awaited() {
        let (read, mut write) = std::os::unix::net::UnixStream::pair().unwrap();
        write.write_all(b"falling over\n").unwrap();
        let stderr = Stderr::read(read);
        while stderr.kept.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!(stderr.last(Duration::from_millis(20)), ["falling over"]);
        drop(write);
    }
}
