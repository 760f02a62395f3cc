//! Exchanges two folders, in one step if the operating system supports it.
//!
//! The only `unsafe` code of this file calls the operating system to exchange two names. Tests can end the
//! process at every step of a replacement, and disable that call; release builds cannot.

use std::io;
use std::path::Path;

/// Steps of a replacement after which a test can end the process (`MOEC_DIE_AFTER`), in their order. Of the
/// steps that exchange names, `exchange` is taken where the operating system can, `take` and `place` where it
/// cannot.
pub const STEPS: [&str; 11] =
    ["folder", "lock", "write", "sync", "exchange", "take", "place", "file", "remove", "unlock", "tidy"];

/// Ends the process here, without a word and without tidying up, if a test requests it.
#[cfg(debug_assertions)]
pub(super) fn fail_point(step: &str) {
    debug_assert!(STEPS.contains(&step), "`{step}` is not a step");
    if std::env::var_os("MOEC_DIE_AFTER").is_some_and(|s| s == step) {
        std::process::abort();
    }
}

/// Does nothing: what ships dies of nothing but others.
#[cfg(not(debug_assertions))]
pub(super) fn fail_point(_step: &str) {}

/// Whether a test has set that names are exchanged by two renames.
fn by_renames() -> bool {
    cfg!(debug_assertions) && std::env::var_os("MOEC_RENAME_TWICE").is_some()
}

/// Exchanges what two paths name, at once. `Ok(false)`: this system or file system has no such step, and
/// nothing happened.
///
/// # Errors
/// The operating system refuses; nothing has changed then.
pub(super) fn exchange(a: &Path, b: &Path) -> io::Result<bool> {
    if by_renames() {
        return Ok(false);
    }
    match system(a, b) {
        Err(e) if e.raw_os_error().is_none_or(|code| ABSENT.contains(&code)) => Ok(false),
        done => done.map(|()| true),
    }
}

/// Errors of systems and file systems without this operation. `EPERM` is returned by filters of system calls
/// that are older than it.
#[cfg(unix)]
const ABSENT: [i32; 5] = [libc::EINVAL, libc::ENOSYS, libc::ENOTSUP, libc::EOPNOTSUPP, libc::EPERM];
#[cfg(not(unix))]
const ABSENT: [i32; 0] = [];

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
fn system(a: &Path, b: &Path) -> io::Result<()> {
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt as _;
    let [a, b] = [a, b].map(|p| CString::new(p.as_os_str().as_bytes()));
    let (a, b) = (a?, b?);
    // Called by number, since not every C library of Linux wraps it.
    #[cfg(any(target_os = "linux", target_os = "android"))]
    // SAFETY: both are C strings that live until the call is over, and the call takes nothing else of memory.
    let code = unsafe {
        let here = libc::AT_FDCWD;
        libc::syscall(libc::SYS_renameat2, here, a.as_ptr(), here, b.as_ptr(), libc::RENAME_EXCHANGE)
    };
    #[cfg(target_vendor = "apple")]
    // SAFETY: as above.
    let code = unsafe { libc::renamex_np(a.as_ptr(), b.as_ptr(), libc::RENAME_SWAP) };
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
fn system(_a: &Path, _b: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn folders_are_exchanged() {
        let folder = tempfile::tempdir().unwrap();
        let [a, b, none] = ["a", "b", "none"].map(|n| folder.path().join(n));
        for path in [&a, &b] {
            fs::create_dir(path).unwrap();
            fs::write(path.join("was"), path.file_name().unwrap().to_str().unwrap()).unwrap();
        }
        if !moec_testing::EXCHANGE.holds_or_skip(exchange(&a, &b).unwrap()) {
            return;
        }
        assert_eq!(fs::read(a.join("was")).unwrap(), b"b");
        assert_eq!(fs::read(b.join("was")).unwrap(), b"a");
        assert_eq!(exchange(&a, &none).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
