//! Artifacts that the library compiles from the networks of a build. Each has a context binary with all of
//! its networks, which share their stored weights. It also has a DLC of the largest network, which can be
//! compiled for another chip.

use super::{CONTEXT, CONTEXT_BYTES, DLC, Library, networks};
use crate::compose::compose;
use moec_backend::error::{Error, Result, io_error};
use moec_backend::{Emit, HotLayer};
use moec_qnn_sys as sys;
use moec_runtime::bundle::BundleReader;
use std::fs;
use std::path::{Path, PathBuf};

/// Compiles every artifact of a build. Without the library a note says that they are left out.
///
/// # Errors
/// A network that the library refuses, with its node; a process that died or hung; a disk that is full.
pub(in crate::backend) fn write(emit: &Emit<'_>) -> Result<Vec<String>> {
    let folders = artifacts(emit.root)?;
    if folders.is_empty() {
        return Ok(Vec::new());
    }
    let library = match Library::open(emit.tools, emit.unit) {
        Ok(library) => library,
        Err(missing) => return Ok(vec![missing.line("no context binaries and no DLC were written")]),
    };
    for folder in &folders {
        let name = folder.file_stem().unwrap_or_default().to_string_lossy();
        (emit.next)(&name)?;
        artifact(&library, folder)
            .map_err(|e| e.context(format!("`{name}` cannot be compiled for the chip")))?;
    }
    Ok(Vec::new())
}

/// Folders of artifacts below a bundle, by name.
pub(in crate::backend) fn artifacts(root: &Path) -> Result<Vec<PathBuf>> {
    let root = root.join("artifacts");
    let mut folders = Vec::new();
    for entry in root.read_dir().map_err(|e| io_error("read", &root, &e))? {
        let path = entry.map_err(|e| io_error("read", &root, &e))?.path();
        if path.extension().is_some_and(|end| end == "qnn") {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

/// Compiles the networks of one artifact, each file in a fresh process.
fn artifact(library: &Library, folder: &Path) -> Result<()> {
    let files = BundleReader::unchecked(folder);
    let networks = networks(&files).map_err(Error::bug)?;
    let mut worker = library.worker(true).map_err(|e| failed(&e))?;
    let mut largest = None;
    for network in &networks {
        let spec = compose(network, Some(&files)).map_err(|e| Error::limit(e.to_string()))?;
        worker.compose(&spec).map_err(|e| failed(&e))?;
        largest = Some(spec);
    }
    let binary = worker.binary().map_err(|e| failed(&e))?;
    drop(worker);
    if binary.len() as u64 > CONTEXT_BYTES {
        let what = format!(
            "its graphs take {} bytes together; a process of the HTP has {CONTEXT_BYTES}",
            binary.len()
        );
        return Err(
            Error::limit(what).hint("set `hot = \"cpu\"` or a smaller `max_group` under `[placement]`")
        );
    }
    let path = folder.join(CONTEXT);
    fs::write(&path, binary).map_err(|e| io_error("write", &path, &e))?;
    // Hot neurons have no largest network: each is of another expert.
    let Some(spec) =
        largest.filter(|_| !folder.file_stem().is_some_and(|s| HotLayer::has_name(&s.to_string_lossy())))
    else {
        return Ok(());
    };
    let path = folder.join(&spec.name).with_extension(DLC);
    let mut worker = library.worker(false).map_err(|e| failed(&e))?;
    worker.write_dlc(&spec, &path).map_err(|e| failed(&e))?;
    // The library writes files that no other user can read.
    let bytes = fs::read(&path).map_err(|e| io_error("read", &path, &e))?;
    fs::remove_file(&path).and_then(|()| fs::write(&path, bytes)).map_err(|e| io_error("write", &path, &e))
}

/// Error of the library, as one of the build.
fn failed(e: &sys::Error) -> Error {
    let error = match e {
        sys::Error::Node { .. } | sys::Error::Graph { .. } | sys::Error::Call { .. } => {
            Error::limit(e.to_string())
        }
        _ => Error::environment(e.to_string()),
    };
    error.hint(e.hint().unwrap_or_else(|| "set `experts = \"cpu\"` under `[placement]`".into()))
}
