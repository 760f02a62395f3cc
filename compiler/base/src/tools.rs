//! Tools of backends on this machine: the cache folder, and moec itself.

use crate::cache_dir;
use moec_backend::Tools;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The file of this program, if it is moec.
static MOEC: OnceLock<PathBuf> = OnceLock::new();

/// Says that this program is moec: its own subcommands are there to be started.
pub fn this_is_moec() {
    if let Ok(path) = std::env::current_exe() {
        MOEC.get_or_init(|| path);
    }
}

/// Tools that there are, by the cache folder.
pub fn beside(cache: &Path) -> Tools<'_> {
    Tools { cache, moec: MOEC.get().map(PathBuf::as_path) }
}

/// The cache folder. Where there is none, a path below which nothing can be: then nothing is installed.
pub fn cache() -> PathBuf {
    cache_dir::path().unwrap_or_else(|_| PathBuf::from("/dev/null"))
}
