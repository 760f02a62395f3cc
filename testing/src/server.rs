//! A server in a separate process, which ends with its owner.

use std::io::{self, BufRead, BufReader, Error, ErrorKind};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Time that a server may take to listen.
const START: Duration = Duration::from_mins(2);

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
        let mut server = Self { child: command.stdout(Stdio::piped()).spawn()?, address: String::new() };
        // From here on it is killed where something fails.
        let out = server.child.stdout.take().ok_or(ErrorKind::BrokenPipe)?;
        let (sender, first_line) = channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(out).read_line(&mut line);
            // It is lost if no caller waits any longer.
            let _ = sender.send(read.map(|_| line));
        });
        let line = first_line.recv_timeout(START).map_err(|_| Error::from(ErrorKind::TimedOut))??;
        if line.is_empty() {
            let status = server.ended(START)?;
            return Err(Error::other(format!("it does not start: {status}")));
        }
        let address =
            line.trim().strip_prefix("http://").ok_or_else(|| Error::other(format!("no address: {line}")))?;
        address.clone_into(&mut server.address);
        Ok(server)
    }

    /// Its address: host and port.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Bytes of it in memory.
    ///
    /// # Errors
    /// It has ended, or the operating system does not say.
    pub fn resident(&self) -> io::Result<u64> {
        memory(self.id(), "VmRSS:")
    }

    /// Peak of its resident bytes.
    ///
    /// # Errors
    /// As [`Server::resident`].
    pub fn peak(&self) -> io::Result<u64> {
        memory(self.id(), "VmHWM:")
    }

    /// Sends a signal, such as `-TERM`.
    ///
    /// # Errors
    /// The process no longer exists.
    pub fn signal(&self, name: &str) -> io::Result<()> {
        let sent = Command::new("kill").arg(name).arg(self.id().to_string()).status()?;
        if sent.success() { Ok(()) } else { Err(ErrorKind::NotFound.into()) }
    }

    /// Waits until it has ended by itself, up to a limit.
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

/// A figure of memory of a process, in bytes, as Linux tells it.
///
/// # Errors
/// The process has ended, or the operating system is another one.
pub fn memory(process: u32, name: &str) -> io::Result<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    Ok(kib.ok_or(ErrorKind::InvalidData)? << 10)
}

impl Drop for Server {
    fn drop(&mut self) {
        // A process that has ended is removed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
