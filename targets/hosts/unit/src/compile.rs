//! The library that stands between moec and MPI: a file of C, which the compiler of this machine's MPI compiles
//! once, into the user's cache folder. Every MPI has an interface of its own for compiled code; that of the
//! source is common to all.

use moec_runtime::{Error, Result};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The source.
const SOURCE: &str = include_str!("shim.c");

/// Variable with the path of a library that is compiled already.
const LIBRARY: &str = "MOEC_MPI_LIBRARY";

/// Compilers to try, those of the launcher that started this process first.
fn compilers() -> [&'static str; 2] {
    let started_by = |variable: &str| std::env::var_os(variable).is_some();
    match () {
        () if started_by("OMPI_COMM_WORLD_SIZE") => ["mpicc.openmpi", "mpicc"],
        () if started_by("SLURM_STEP_NUM_TASKS") => ["mpicc", "mpicc.openmpi"],
        () => ["mpicc.mpich", "mpicc"],
    }
}

/// Path of the library, compiled first where it is missing.
///
/// # Errors
/// No compiler of MPI, or one that fails; no cache folder.
pub fn library() -> Result<PathBuf> {
    if let Some(given) = std::env::var_os(LIBRARY) {
        return Ok(given.into());
    }
    let mut why = String::new();
    for compiler in compilers() {
        // What the compiler would call names the MPI and its version.
        let shown = match Command::new(compiler).arg("-show").output() {
            Ok(out) if out.status.success() => out.stdout,
            Ok(out) => {
                why = format!("`{compiler} -show`: {}", out.status);
                continue;
            }
            Err(e) => {
                why = format!("`{compiler}`: {e}");
                continue;
            }
        };
        let library = folder()?.join(format!("{:016x}.so", digest(&[SOURCE.as_bytes(), &shown])));
        if !library.is_file() {
            compile(compiler, &library)?;
        }
        return Ok(library);
    }
    Err(Error::machine(format!("MPI's compiler is missing: {why}"))
        .with_hint("install it on every host: `apt install libopenmpi-dev`, or `libmpich-dev`"))
}

/// Folder of compiled libraries in the cache.
fn folder() -> Result<PathBuf> {
    let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = from("MOEC_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
        .or_else(|| from("HOME").map(|p| p.join(".cache/moec")));
    let folder = cache.map(|cache| cache.join("mpi"));
    let folder = folder.ok_or_else(|| {
        Error::machine("there is no cache folder for what MPI's compiler writes")
            .with_hint("set `MOEC_CACHE` to a folder that you can write")
    })?;
    fs::create_dir_all(&folder).map_err(|e| Error::io("create", &folder, e))?;
    Ok(folder)
}

/// FNV-1a (Fowler, Noll and Vo) of all bytes.
pub(crate) fn digest(parts: &[&[u8]]) -> u64 {
    let bytes = parts.iter().flat_map(|part| part.iter());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Compiles the library. Several processes may do so at once: each writes a file of its own, which then gets the
/// name.
fn compile(compiler: &str, library: &Path) -> Result<()> {
    let process = std::process::id();
    let (own, source) =
        (library.with_extension(format!("{process}.so")), library.with_extension(format!("{process}.c")));
    fs::write(&source, SOURCE).map_err(|e| Error::io("write", &source, e))?;
    let out = Command::new(compiler).args(["-O2", "-shared", "-fPIC", "-o"]).arg(&own).arg(&source).output();
    // The file is of no use any more.
    let _ = fs::remove_file(&source);
    let out = out.map_err(|e| Error::machine(format!("`{compiler}` does not start: {e}")))?;
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr);
        let line = text.lines().find(|l| l.contains("error")).unwrap_or("no message");
        return Err(Error::machine(format!("`{compiler}` does not compile moec's part for MPI: {line}")));
    }
    fs::rename(&own, library).map_err(|e| Error::io("rename", library, e))
}
