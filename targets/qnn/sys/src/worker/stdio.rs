//! The server's stdin and stdout, kept from the library: what that prints goes to stderr.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};

/// Reserves stdin and stdout for requests and answers: other code gets replacements.
///
/// # Errors
/// Fails if the operating system refuses.
pub(super) fn take() -> io::Result<(File, File)> {
    let requests = File::from(io::stdin().as_fd().try_clone_to_owned()?);
    let answers = File::from(io::stdout().as_fd().try_clone_to_owned()?);
    let nothing = File::open("/dev/null")?;
    for (from, to) in [(nothing.as_raw_fd(), io::stdin().as_raw_fd()), (2, io::stdout().as_raw_fd())] {
        // SAFETY: both are open; the standard library does not mind where stdin and stdout lead.
        if unsafe { libc::dup2(from, to) } < 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok((requests, answers))
}
