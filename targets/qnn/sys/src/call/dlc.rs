//! DLC files: graphs that are not compiled yet, written by the backend for that and compiled by another one.

use super::context::{Context, Graph};
use super::device::{Backend, custom};
use super::log::CallGuard;
use super::system::{System, graph};
use crate::abi::{self, IrGraph, IrSerialization};
use crate::error::{Error, Result};
use crate::graph::GraphSpec;
use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::rc::Rc;

/// Most graphs of a file.
const MOST: u32 = 1 << 16;

fn path_name(path: &Path) -> Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(|e| Error::io(path, e))
}

/// Writes a graph as a DLC. `ir` is [`Backend::ir`].
///
/// # Errors
/// As [`Context::compose`]; [`Error::Io`] if no file was written.
pub fn write_dlc(ir: &Rc<Backend>, spec: &GraphSpec, path: &Path) -> Result<()> {
    let name = path_name(path)?;
    let serialization = IrSerialization { format: abi::IR_FLAT_BUFFER, path: name.as_ptr() };
    let serialize = IrGraph { option: abi::IR_SERIALIZATION, serialization };
    let config = custom(&serialize);
    let mut context = Context::without_device(ir)?;
    context.compose_with(spec, &[&config])?;
    drop(context);
    let mut bytes = std::fs::read(path).map_err(|e| Error::io(path, format!("QNN did not write it: {e}")))?;
    forget_time(&mut bytes);
    std::fs::write(path, bytes).map_err(|e| Error::io(path, e))
}

/// Text before the time in a DLC, which is an archive without compression and without checksums: JSON.
const STAMP: &[u8] = b"\"timestamp\": \"";
/// A meaningless time of the same length.
const NEVER: &[u8] = b"1980-01-01 00:00:00 UTC";

/// Replaces the time of writing in a DLC by [`NEVER`].
fn forget_time(bytes: &mut [u8]) {
    let digits = |text: &[u8]| {
        text.iter().zip(NEVER).all(|(a, b)| if b.is_ascii_digit() { a.is_ascii_digit() } else { a == b })
    };
    let stamps: Vec<usize> = bytes
        .windows(STAMP.len() + NEVER.len())
        .enumerate()
        .filter(|(_, window)| window.starts_with(STAMP) && digits(&window[STAMP.len()..]))
        .map(|(at, _)| at + STAMP.len())
        .collect();
    for at in stamps {
        bytes[at..at + NEVER.len()].copy_from_slice(NEVER);
    }
}

impl Context {
    /// Adds the graphs of a DLC, compiled for the context's chip.
    ///
    /// # Errors
    /// [`Error::Binary`] if the file is damaged or has something that the backend cannot have.
    pub fn compose_dlc(&mut self, system: &System, path: &Path) -> Result<Vec<Graph>> {
        let table = system.table();
        let (Some(open), Some(compose), Some(free)) =
            (table.dlc_from_file, table.dlc_compose, table.dlc_free)
        else {
            return Err(system.missing_function("systemDlcComposeGraphs"));
        };
        let broken = |why: String| Error::Binary { what: format!("DLC `{}`", path.display()), why };
        let name = path_name(path)?;
        let backend = &self.inner().backend;
        let infos = {
            let calling = CallGuard::begin();
            let message = |status| {
                let context = calling.message_suffix();
                format!("QNN does not accept it (code {status}){context}")
            };
            let mut file = ptr::null_mut();
            // SAFETY: the name ends in a zero byte; no log; `file` is written.
            let status = unsafe { open(ptr::null_mut(), name.as_ptr(), &raw mut file) };
            if status != 0 {
                return Err(broken(message(status)));
            }
            let (mut list, mut count) = (ptr::null_mut(), 0);
            // SAFETY: backend and context live; the table is passed by value and whole, which the build's
            // version was checked for; `list` and `count` are written.
            let status = unsafe {
                compose(
                    file,
                    ptr::null(),
                    0,
                    backend.handle(),
                    self.inner().handle(),
                    backend.provider(),
                    abi::GRAPH_INFO_V1,
                    &raw mut list,
                    &raw mut count,
                )
            };
            let infos = if status != 0 {
                Err(broken(message(status)))
            } else if count > MOST || (count > 0 && list.is_null()) {
                Err(broken(format!("it has {count} graphs")))
            } else {
                // SAFETY: the array has `count` graphs. It is not freed: it is some kilobytes, and of an
                // allocator that is not ours.
                (0..count as usize).map(|i| unsafe { graph(&*list.add(i)) }).collect()
            };
            // SAFETY: the file was opened above; everything composed from it belongs to the context.
            unsafe { free(file) };
            infos?
        };
        let infos: Vec<super::GraphInfo> = infos;
        infos
            .into_iter()
            .map(|info| {
                let graph = self.retrieve(info)?;
                graph.finalize()?;
                Ok(graph)
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_timestamps_are_erased() {
        let text = "{ \"timestamp\": \"2026-11-23 08:37:11 UTC\", \"time\": \"2026-11-23 08:37:11 UTC\" }"
            .as_bytes();
        let mut bytes =
            [text, b"\"timestamp\": \"some other time, or so UTC\"", b"\"timestamp\": \"2026"].concat();
        forget_time(&mut bytes);
        let text = String::from_utf8(bytes).unwrap();
        assert_eq!(text.matches("1980-01-01 00:00:00 UTC").count(), 1);
        assert_eq!(text.matches("2026").count(), 2);
    }
}
