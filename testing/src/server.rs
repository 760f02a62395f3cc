//! A server that is a process of its own, and ends with who started it.

use std::io::{self, BufRead, BufReader, Error, ErrorKind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A server. Where it is let go it is killed.
#[derive(Debug)]
pub struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts one that prints a line `http://ADDRESS` when it listens, as `run serve` does.
    ///
    /// # Errors
    /// It does not start, or says something else.
    pub fn start(command: &mut Command) -> io::Result<Self> {
        let mut child = command.stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        if let Some(out) = child.stdout.take() {
            BufReader::new(out).read_line(&mut line)?;
        }
        // From here on it is killed where something fails.
        let mut server = Self { child, address: String::new() };
        let address =
            line.trim().strip_prefix("http://").ok_or_else(|| Error::other(format!("no address: {line}")))?;
        address.clone_into(&mut server.address);
        Ok(server)
    }

    /// Where it listens: host and port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal, such as `-TERM`.
    ///
    /// # Errors
    /// There is no such process any longer.
    pub fn signal(&self, name: &str) -> io::Result<()> {
        let sent = Command::new("kill").arg(name).arg(self.id().to_string()).status()?;
        if sent.success() { Ok(()) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// Waits until it has ended by itself, no longer than that.
    ///
    /// # Errors
    /// It goes on.
    pub fn ended(&mut self, patience: Duration) -> io::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            match self.child.try_wait()? {
                Some(status) => return Ok(status),
                None if start.elapsed() > patience => return Err(ErrorKind::TimedOut.into()),
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // One that has ended is gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
