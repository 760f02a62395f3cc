//! The external programs that a backend may use.

use std::path::Path;

/// Paths of the tools.
#[derive(Clone, Copy, Debug)]
pub struct Tools<'a> {
    /// moec's cache folder, where they are installed.
    pub cache: &'a Path,
    /// moec itself: `worker BACKEND` makes a process of it that does
    /// [`Backend::serve`](crate::Backend::serve). `None` where another program calls its code.
    pub moec: Option<&'a Path>,
}
