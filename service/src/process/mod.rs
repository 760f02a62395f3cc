//! Work on what others send that only the operating system can bound: in processes that can be ended.
//!
//! A grammar or a chat template comes from outside, and libraries read it whose own limits leave out some of their loops and
//! recursions. So the work is done by this program once more, under limits of the operating system: what exceeds them ends that process
//! and not the one that answers requests.

pub(crate) mod link;
pub(crate) mod pool;

use crate::error::{Error, Result};
use link::Link;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

/// The subcommand, hidden, of every program that starts such a process. Test programs take it for the name of a test.
pub(crate) const NAME: &str = "bounded_worker";

/// Time that a process may be silent. Its own limits count its time on the CPU and end it earlier, unless the machine is very busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A process that works for this one. It ends with the value.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pub(crate) link: Link,
}

/// Ends a process when dropped, wherever that is: a thread that waits for its reply gets an error.
#[derive(Debug)]
pub(crate) struct End(Option<UnixStream>);

impl End {
    /// Lets the process go on.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for End {
    fn drop(&mut self) {
        // One that has ended already needs no end.
        let _ = self.0.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
    }
}

impl Process {
    /// Starts one: the program of this process once more. `job`: a name of [`worker`](crate::worker)'s table.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(job: &str) -> Result<Self> {
        let start = || {
            let (ours, theirs) = UnixStream::pair()?;
            ours.set_write_timeout(Some(PATIENCE))?;
            let mut command = std::process::Command::new(program()?);
            command.arg(NAME).stdin(Stdio::from(OwnedFd::from(theirs)));
            command.stdout(Stdio::null()).stderr(Stdio::null());
            // Ctrl-C is for the server, which answers what it has begun.
            let child = command.process_group(0).spawn()?;
            let mut process = Self { child, link: Link(ours) };
            process.link.send(job.as_bytes())?;
            Ok(process)
        };
        start().map_err(|e: io::Error| {
            Error::new(format!("the process that works on {job} cannot be started: {e}"))
        })
    }

    /// Handle that ends it.
    ///
    /// # Errors
    /// Too many files are open.
    pub(crate) fn end(&self) -> Result<End> {
        let stream = self.link.0.try_clone();
        stream
            .map(|stream| End(Some(stream)))
            .map_err(|e| Error::new(format!("a worker process cannot be watched: {e}")))
    }

    /// Whether it still runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Its number.
    #[cfg(test)]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // One that has ended is waited for all the same, so that nothing of it is left.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program of this process. Where its file was replaced, Linux still has it.
fn program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let linked = Path::new("/proc/self/exe");
    Ok(if !path.exists() && linked.exists() { linked.to_owned() } else { path })
}
