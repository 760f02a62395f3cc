//! Entry point of worker processes, which work for another process.

use crate::error::{Error, Result};
use crate::process::NAME;
use crate::process::link::Link;
use crate::{grammar, template};
use moec_runtime::cli::{AddedSubcommand, Context, Failure, Io, limits};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// Job of a process: its name, and the function that serves requests until the connection ends.
type Job = (&'static str, fn(&mut Link) -> io::Result<()>);

const JOBS: [Job; 2] =
    [(grammar::worker::JOB, grammar::worker::serve), (template::worker::JOB, template::worker::serve)];

/// Stack of the work: parsers recurse for each level of a grammar or of a template.
const STACK: usize = 64 << 20;

/// The subcommand.
pub(crate) const SUBCOMMAND: AddedSubcommand = AddedSubcommand { command, run: run_subcommand };

fn command() -> clap::Command {
    clap::Command::new(NAME).hide(true)
}

fn run_subcommand(_: &Context<'_>, _: &clap::ArgMatches, _: &mut Io<'_>) -> std::result::Result<(), Failure> {
    Ok(run()?)
}

/// Whether this process was started to be a worker.
pub fn is_started() -> bool {
    std::env::args_os().skip(1).eq([NAME])
}

/// Serves requests of the process at the other end of standard input, a socket, until the connection ends.
/// Returns at once in a process that was not started as a worker.
///
/// # Errors
/// The connection fails, or a limit cannot be set.
pub fn run() -> Result<()> {
    if !is_started() {
        return Ok(());
    }
    let failed = |e: io::Error| Error::new(format!("the worker process fails: {e}"));
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    let work = move || serve(&mut Link(stream));
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(work).map_err(failed)?;
    match thread.join() {
        Ok(Err(e)) if e.kind() != ErrorKind::UnexpectedEof => Err(failed(e)),
        Ok(_) => Ok(()),
        Err(_) => Err(Error::new("the worker process ended in a panic")),
    }
}

/// Serves the job that the first message names.
fn serve(link: &mut Link) -> io::Result<()> {
    limits::no_core_file()?;
    let name = link.receive()?;
    let (_, serve) = JOBS.iter().find(|(job, _)| job.as_bytes() == name).ok_or(ErrorKind::InvalidInput)?;
    serve(link)
}

#[cfg(test)]
mod tests {
    /// Program of a [`Process`](crate::process) of the other tests: this one, with the name of this test.
    #[test]
    fn bounded_worker() {
        super::run().unwrap();
    }
}
