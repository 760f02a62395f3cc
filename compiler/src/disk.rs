//! Free space on disk. The only `unsafe` of this file asks the system for it.

use std::path::Path;

/// Bytes that this user can still write below a folder, if the system tells.
#[cfg(unix)]
pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: `path` is a C string and `stat` is a valid `statvfs` to write to (zero is a valid bit pattern of
    // every field).
    let stat = unsafe {
        let mut stat: libc::statvfs = std::mem::zeroed();
        if libc::statvfs(path.as_ptr(), &raw mut stat) != 0 {
            return None;
        }
        stat
    };
    #[allow(clippy::useless_conversion, reason = "the fields have other widths elsewhere")]
    Some(u64::from(stat.f_bavail).saturating_mul(u64::from(stat.f_frsize)))
}

/// Bytes that this user can still write below a folder, if the system tells.
#[cfg(not(unix))]
pub(crate) fn free_bytes(_folder: &Path) -> Option<u64> {
    None
}

/// The nearest ancestor of a path that exists: where its space will be taken from.
pub(crate) fn existing(path: &Path) -> &Path {
    path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("."))
}
