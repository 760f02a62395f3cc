//! Tools of backends on this machine: the cache folder, and moec itself.

use crate::cache_dir;
use moec_backend::Tools;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Path of this executable, if it is moec.
static MOEC: OnceLock<PathBuf> = OnceLock::new();

/// Records that this executable is moec, so that its subcommands can be started.
pub fn this_is_moec() {
    if let Ok(path) = std::env::current_exe() {
        MOEC.get_or_init(|| path);
    }
}

/// Installed tools, by cache folder.
pub fn beside(cache: &Path) -> Tools<'_> {
    Tools { cache, moec: MOEC.get().map(PathBuf::as_path) }
}

/// The cache folder. Without one, a path that cannot exist, so that no tool counts as installed.
pub fn cache() -> PathBuf {
    cache_dir::path().unwrap_or_else(|_| PathBuf::from("/dev/null"))
}
