//! Limits of this process that the operating system enforces, for work that cannot be bounded otherwise. A
//! process that exceeds one ends.

use std::io;

#[cfg(all(target_os = "linux", target_env = "gnu"))]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
type Resource = libc::c_int;

/// Ends this process after `more` seconds of CPU time, or up to one second later. A later call replaces an
/// earlier one.
///
/// # Errors
/// The operating system refuses.
pub fn cpu_seconds(more: u64) -> io::Result<()> {
    limit(libc::RLIMIT_CPU, used_seconds()?.saturating_add(1).saturating_add(more))
}

/// Lets this process's address space grow by `more` bytes. Past that an allocation fails, which ends a Rust
/// program. Only Linux has this limit: elsewhere this does nothing.
///
/// # Errors
/// The operating system refuses.
pub fn memory(more: u64) -> io::Result<()> {
    if cfg!(target_os = "linux") {
        let pages = std::fs::read_to_string("/proc/self/statm")?;
        let pages = pages.split(' ').next().and_then(|n| n.parse::<u64>().ok());
        let pages = pages.ok_or_else(|| io::Error::other("`/proc/self/statm` has no number of pages"))?;
        // SAFETY: a call of the C library without memory of ours.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        limit(libc::RLIMIT_AS, pages.saturating_mul(page.unsigned_abs()).saturating_add(more))?;
    }
    Ok(())
}

/// Turns core files of this process off.
///
/// # Errors
/// The operating system refuses.
pub fn no_core_file() -> io::Result<()> {
    limit(libc::RLIMIT_CORE, 0)
}

/// Seconds of CPU time of this process, rounded down.
fn used_seconds() -> io::Result<u64> {
    // SAFETY: the structure has only numbers, lives on this stack during the call, and the call fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        if libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) != 0 {
            return Err(io::Error::last_os_error());
        }
        usage
    };
    let micros = i128::from(usage.ru_utime.tv_usec) + i128::from(usage.ru_stime.tv_usec);
    let seconds = i128::from(usage.ru_utime.tv_sec) + i128::from(usage.ru_stime.tv_sec);
    Ok(u64::try_from(seconds + micros / 1_000_000).unwrap_or(0))
}

/// Sets the soft limit, as far as the hard one allows.
fn limit(resource: Resource, to: u64) -> io::Result<()> {
    // SAFETY: the structure has two numbers and lives on this stack during both calls.
    let status = unsafe {
        let mut limit: libc::rlimit = std::mem::zeroed();
        if libc::getrlimit(resource, &raw mut limit) == 0 {
            limit.rlim_cur = limit.rlim_max.min(to);
            libc::setrlimit(resource, &raw const limit)
        } else {
            -1
        }
    };
    if status == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
