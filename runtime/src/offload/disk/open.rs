//! Choice of the [`Reader`] for this machine.

use super::buffer::Buffers;
use super::files::Files;
use super::options::{Choice, Options};
use super::reader::Reader;
use super::threads::Threads;
use crate::error::{Error, Result};
use std::io;
use std::sync::Arc;

/// The reader that `options` request and this machine has.
///
/// # Errors
/// io_uring was requested by name but is missing; threads cannot be started.
pub fn reader(files: &Arc<Files>, buffers: &Arc<Buffers>, options: &Options) -> Result<Box<dyn Reader>> {
    let threads = |why: Option<String>| -> Result<Box<dyn Reader>> {
        let (files, buffers) = (Arc::clone(files), Arc::clone(buffers));
        Ok(Box::new(Threads::new(files, buffers, options.depth as usize, options.core, why)?))
    };
    match options.reader {
        Choice::Threads => threads(None),
        choice => match uring(files, buffers, options) {
            Ok(reader) => Ok(reader),
            Err(e) if choice == Choice::Auto => threads(Some(format!("io_uring is not there: {e}"))),
            Err(source) => Err(Error::system("use io_uring", source)
                .with_hint("set `MOEC_DISK_READER=pread`, or leave it to moec with `auto`")),
        },
    }
}

#[cfg(target_os = "linux")]
fn uring(files: &Arc<Files>, buffers: &Arc<Buffers>, options: &Options) -> io::Result<Box<dyn Reader>> {
    let (files, buffers) = (Arc::clone(files), Arc::clone(buffers));
    Ok(Box::new(super::uring::Uring::new(files, buffers, options.depth, options.register)?))
}

#[cfg(not(target_os = "linux"))]
fn uring(_files: &Arc<Files>, _buffers: &Arc<Buffers>, _options: &Options) -> io::Result<Box<dyn Reader>> {
    Err(io::Error::new(io::ErrorKind::Unsupported, "this system has none"))
}
