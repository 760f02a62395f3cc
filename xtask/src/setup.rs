//! `cargo xtask setup`: what moec is built with.

use crate::apt;
use crate::llvm::{Llvm, VERSIONS};
use crate::shell::{self, Failed, cargo, output, program, shown, stage};
use std::path::PathBuf;
use std::process::Command;

/// Finds LLVM and a C compiler with a C++ library. Where one is missing it is installed on Debian and Ubuntu,
/// by root.
pub(crate) fn run() -> Result<Llvm, Failed> {
    let (llvm, cc) = (Llvm::find(), has_cc());
    let llvm = match llvm {
        Some(llvm) if cc => llvm,
        llvm => {
            fetch(llvm.is_none(), !cc)?;
            llvm.or_else(Llvm::find).ok_or_else(|| Failed::new("LLVM is still not found"))?
        }
    };
    stage("Found", &format!("LLVM {} in {}", llvm.version, llvm.prefix.display()));
    Ok(llvm)
}

/// Builds moec for release; returns the program's path.
pub(crate) fn moec() -> Result<PathBuf, Failed> {
    let llvm = run()?;
    stage("Building", "moec");
    shell::run(cargo("build", Some(&llvm)).args(["--release", "--locked", "--package", "moec"]))?;
    Ok(shell::target_dir().join("release/moec"))
}

/// Installs moec where cargo puts programs, with the LLVM that is here.
pub(crate) fn install() -> Result<(), Failed> {
    let llvm = run()?;
    let mut install = cargo("install", None);
    install.args(["--locked", "--path", "compiler/cli"]).envs(llvm.environment());
    if llvm.is_other() {
        let features = format!("llvm{},prebuilt", llvm.major);
        install.args(["--no-default-features", "--features", &features]);
    }
    stage("Running", &shown(&install));
    shell::run(&mut install)
}

/// Whether there is a C compiler; on Linux with the C++ library that LLVM's code is linked with.
fn has_cc() -> bool {
    const LIBRARY: &str = "libstdc++.so";
    // A compiler without such a file returns the name.
    let found = output(program("cc").arg(format!("-print-file-name={LIBRARY}")));
    found.is_some_and(|path| !cfg!(target_os = "linux") || path.trim() != LIBRARY)
}

/// Installs packages with apt, or says what to install.
fn fetch(llvm: bool, cc: bool) -> Result<(), Failed> {
    let missing = match (llvm, cc) {
        (true, true) => "LLVM and a C and C++ compiler are missing",
        (true, false) => "LLVM is missing",
        _ => "a C and C++ compiler is missing",
    };
    let majors = VERSIONS.map(|(major, _)| major.to_string()).join(", ");
    if !apt::is_here() {
        return Err(Failed::new(missing).hint(format!(
            "install LLVM ({majors}) with its headers and shared library, and a C and C++ compiler"
        )));
    }
    let root = apt::is_root();
    if root {
        apt::update()?;
    }
    let mut packages: Vec<String> = Vec::new();
    if llvm {
        let newest = VERSIONS.iter().map(|(major, _)| format!("llvm-{major}-dev")).find(|p| available(p));
        packages.push(newest.ok_or_else(|| {
            let hint = "https://apt.llvm.org has them for every release of Debian and Ubuntu";
            let lists = if root { "" } else { " (run `apt-get update` first if its lists are old)" };
            Failed::new(format!("{missing}, and apt knows none of LLVM {majors}{lists}")).hint(hint)
        })?);
    }
    if cc {
        packages.extend(["gcc".into(), "g++".into(), "libc6-dev".into()]);
    }
    let packages: Vec<&str> = packages.iter().map(String::as_str).collect();
    apt::install(missing, &packages)
}

/// Whether apt could install a package.
fn available(package: &str) -> bool {
    let policy =
        output(Command::new("apt-cache").env("LC_ALL", "C").args(["policy", package])).unwrap_or_default();
    policy.lines().any(|l| l.trim().starts_with("Candidate:") && !l.contains("(none)"))
}
