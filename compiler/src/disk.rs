//! Free space on disk, and files that appear whole or not at all. The only `unsafe` of this file asks for the space.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Writes a file whole, in the place of an earlier one, and the folders above it.
///
/// # Errors
/// What the system says; an earlier file is then what it was.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".partial-{}", std::process::id()));
    let _hold = crate::interrupt::hold();
    let partial = Partial(parent.join(name));
    fs::write(&partial.0, bytes)?;
    fs::rename(&partial.0, path)
}

/// A file that goes away unless it was renamed.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

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
