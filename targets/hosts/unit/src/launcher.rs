//! The launcher that started this process.

use crate::serve::parent;
use std::fs;

/// Names of Open MPI's launcher, which starts the processes of its own host itself.
const NAMES: [&str; 4] = ["mpirun", "mpiexec", "orterun", "prterun"];
/// Seconds in which it ends by itself after an abort, and between two requests to end.
const GRACE: u32 = 5;
const AGAIN: u32 = 1;
/// File descriptors that this process may have.
const DESCRIPTORS: libc::c_int = 1024;

/// Has a launcher of this host end some seconds after an abort: Open MPI's waits, perhaps for ever, for its daemon on
/// a host that cannot be reached, and ends at the second request.
pub(crate) fn end_later() {
    let launcher = parent();
    let name = fs::read_to_string(format!("/proc/{launcher}/comm")).unwrap_or_default();
    if !NAMES.iter().any(|known| name.starts_with(known)) {
        return;
    }
    // SAFETY: the new process makes system calls alone, and takes no memory: other threads may have held locks.
    unsafe {
        if libc::fork() == 0 {
            // It is of no terminal, and readers of what this process writes see an end.
            libc::setsid();
            for fd in 0..DESCRIPTORS {
                libc::close(fd);
            }
            libc::sleep(GRACE);
            if libc::kill(launcher, libc::SIGTERM) == 0 {
                libc::sleep(AGAIN);
                libc::kill(launcher, libc::SIGTERM);
            }
            libc::_exit(0);
        }
    }
}
