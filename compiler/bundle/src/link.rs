//! `run` linked from the precompiled runtime, the bundle's kernels, and a table that names them.
//!
//! moec carries the runtime as one relocatable object, which `compiler/bundle/build.rs` compiles from
//! `prebuilt/`. Linking needs the operating system's C compiler, for its linker and start-up code. It needs
//! neither rustc nor cargo, no cache and no network. The result does not depend on folders: the same inputs
//! give the same bytes.

use super::toolchain::Linker;
use moec_base::error::{Error, Result, io_error};
use moec_base::interrupt;
use moec_base::paths::KERNELS;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The runtime as an object, compressed; none where moec was compiled without it.
#[cfg(prebuilt)]
const RUNTIME: Option<&[u8]> = Some(include_bytes!(concat!(env!("OUT_DIR"), "/prebuilt.o.deflate")));
#[cfg(not(prebuilt))]
const RUNTIME: Option<&[u8]> = None;

/// Flags that rustc gives the linker for a program: no section that nothing reaches, no symbols, everything
/// relocated before `main` and read-only from then on.
const FLAGS: &[&str] = &[
    "-pie",
    "-Wl,--gc-sections",
    "-Wl,-z,relro,-z,now",
    "-Wl,-z,noexecstack",
    "-Wl,--eh-frame-hdr",
    "-Wl,--strip-all",
    "-Wl,--as-needed",
];

/// Libraries that Rust's standard library takes from the operating system (`rustc --print
/// native-static-libs`); those that are not used are left out.
const LIBRARIES: &[&str] = &["-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl", "-lc"];

/// Whether this moec carries a runtime for its own kind of machine.
pub const fn is_prebuilt() -> bool {
    RUNTIME.is_some()
}

/// Links `run` of the bundle in `root`, which has its kernels. `table` is the object that names them.
///
/// # Errors
/// A linker that fails, with its output.
pub fn link(root: &Path, table: &[u8], Linker { cc, flag }: Linker) -> Result<()> {
    let packed = RUNTIME.ok_or_else(|| Error::bug("this moec contains no runtime"))?;
    let runtime = miniz_oxide::inflate::decompress_to_vec(packed)
        .map_err(|e| Error::bug("the embedded runtime is damaged").because(e))?;
    // In the folder of the bundle, which goes away as a whole if anything fails.
    let folder = root.join(".link");
    fs::create_dir(&folder).map_err(|e| io_error("create", &folder, &e))?;
    let [runtime_at, table_at] = [("runtime.o", &*runtime), ("table.o", table)].map(|(name, bytes)| {
        let path = folder.join(name);
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e)).map(|()| path)
    });
    let mut command = Command::new(cc);
    command.args([table_at?, root.join(KERNELS), runtime_at?]).args(FLAGS).args(LIBRARIES);
    command.args(flag).arg("-o").arg(root.join("run"));
    let output = interrupt::output(&mut command)
        .map_err(|e| Error::environment(format!("cannot start `{cc}`")).because(e))?;
    if !output.status.success() {
        let why = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Error::environment(format!("`{cc}` could not link `run`")).because(why).hint(
            "a linker and the C library's development files are needed (on Debian and Ubuntu `apt-get install gcc \
             libc6-dev`); or build with `--no-run` and use `moec run`",
        ));
    }
    fs::remove_dir_all(&folder).map_err(|e| io_error("remove", &folder, &e))
}
