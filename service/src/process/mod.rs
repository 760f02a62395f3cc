//! Work on untrusted input that only the operating system can bound: in processes that can be ended.
//!
//! Grammars and chat templates come from outside, and the libraries that read them do not bound all of their
//! loops and recursions. So the work is done in another process of this program, under limits of the
//! operating system. Work that exceeds them ends that process, not the server.

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

/// Name of the hidden subcommand of every program that starts such a process. In test programs it is the name
/// of a test.
pub(crate) const NAME: &str = "bounded_worker";

/// Maximum time without a reply of a process. Its own limits count CPU time and end it earlier, unless the
/// machine is very busy.
pub(crate) const REPLY_TIMEOUT: Duration = Duration::from_secs(30);

/// A worker process. It ends when the value is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    child: Child,
    pub(crate) link: Link,
}

/// Handle that ends a process when dropped, on any thread: a thread that waits for its reply gets an error.
#[derive(Debug)]
pub(crate) struct KillHandle(Option<UnixStream>);

impl KillHandle {
    /// Drops the handle without ending the process.
    pub(crate) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for KillHandle {
    fn drop(&mut self) {
        // A process that has ended already needs no signal.
        let _ = self.0.as_ref().map(|stream| stream.shutdown(Shutdown::Both));
    }
}

impl Process {
    /// Starts a process of this program. `job`: a name in [`worker`](crate::worker)'s table.
    ///
    /// # Errors
    /// It cannot be started.
    pub(crate) fn start(job: &str) -> Result<Self> {
        let start = || {
            let (parent_end, child_end) = UnixStream::pair()?;
            parent_end.set_write_timeout(Some(REPLY_TIMEOUT))?;
            let mut command = std::process::Command::new(program()?);
            command.arg(NAME).stdin(Stdio::from(OwnedFd::from(child_end)));
            command.stdout(Stdio::null()).stderr(Stdio::null());
            // Ctrl-C is for the server, which finishes requests in progress.
            let child = command.process_group(0).spawn()?;
            let mut process = Self { child, link: Link(parent_end) };
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
    pub(crate) fn end(&self) -> Result<KillHandle> {
        let stream = self.link.0.try_clone();
        stream
            .map(|stream| KillHandle(Some(stream)))
            .map_err(|e| Error::new(format!("a worker process cannot be watched: {e}")))
    }

    /// Whether it still runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_none())
    }

    /// Process id.
    #[cfg(test)]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A process that has ended is still waited for, so that no zombie remains.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Path of this process's program. If its file was replaced, Linux still has it.
fn program() -> io::Result<PathBuf> {
    let path = std::env::current_exe()?;
    let linked = Path::new("/proc/self/exe");
    Ok(if !path.exists() && linked.exists() { linked.to_owned() } else { path })
}
