//! Static archives of LLVM's dependencies, so that a distributed program does not need these libraries.

use crate::apt;
use crate::llvm::Llvm;
use crate::shell::{Failed, output, program, target_dir};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

/// The library that the linker is requested, the archive that has it, and Debian's package of that.
const ARCHIVES: [(&str, &str, &str); 5] = [
    ("stdc++", "libstdc++.a", "g++"),
    // Rust requests the shared one, to unwind stacks.
    ("gcc_s", "libgcc_eh.a", "gcc"),
    ("z", "libz.a", "zlib1g-dev"),
    ("zstd", "libzstd.a", "libzstd-dev"),
    // The interpreter of LLVM calls functions with it.
    ("ffi", "libffi.a", "libffi-dev"),
];

/// Variable with the folder where the binding to LLVM has the linker look before all of the operating
/// system's folders.
pub(crate) const VARIABLE: &str = "LLVM_SYS_SYSTEM_LIBRARY_DIRS";

/// A folder with these archives and no shared library: a linker that looks there first links statically.
/// Missing archives, and those of LLVM itself, are installed on Debian and Ubuntu, by root.
pub(crate) fn folder(llvm: &Llvm) -> Result<PathBuf, Failed> {
    let missing = ARCHIVES.iter().filter(|(_, archive, _)| find(archive).is_none());
    let (mut names, mut packages): (Vec<String>, Vec<String>) =
        missing.map(|(_, archive, package)| ((*archive).to_owned(), (*package).to_owned())).unzip();
    let own = llvm.missing_archives();
    if !own.is_empty() {
        packages.extend(["llvm", "libpolly"].map(|name| format!("{name}-{}-dev", llvm.major)));
        names.extend(own.iter().map(|path| path.display().to_string()));
    }
    if !names.is_empty() {
        let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
        apt::install(&format!("not found: {}", names.join(", ")), &packages)?;
    }
    let folder = target_dir().join("archives");
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", folder.display()));
    fs::create_dir_all(&folder).map_err(failed)?;
    for (library, archive, package) in ARCHIVES {
        let place = place(archive, package)?;
        let link = folder.join(format!("lib{library}.a"));
        if fs::read_link(&link).ok().as_ref() != Some(&place) {
            let _ = fs::remove_file(&link);
            symlink(&place, &link).map_err(failed)?;
        }
    }
    Ok(folder)
}

/// One archive of LLVM's, and those of the libraries that it requires.
pub(crate) fn files(llvm: &Llvm) -> Result<Vec<PathBuf>, Failed> {
    let own = std::iter::once(Ok(llvm.prefix.join("lib/libLLVMCore.a")));
    own.chain(ARCHIVES.iter().map(|(_, archive, package)| place(archive, package))).collect()
}

fn place(archive: &str, package: &str) -> Result<PathBuf, Failed> {
    let missing = || Failed::new(format!("`{archive}` is not found")).hint(apt::as_root(&[package]));
    find(archive).ok_or_else(missing)
}

/// Path where the C compiler's linker finds an archive.
fn find(archive: &str) -> Option<PathBuf> {
    // The compiler returns the bare name if it has no such file.
    let path = PathBuf::from(output(program("cc").arg(format!("-print-file-name={archive}")))?);
    path.is_absolute().then(|| path.canonicalize().ok()).flatten()
}
