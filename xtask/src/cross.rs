//! Tools that link and run AArch64 code on x86-64 Linux, so that it is tested there.
//!
//! Nothing of the operating system's Rust is replaced. If rustup cannot provide the standard library,
//! Debian's compiler and library are unpacked into moec's cache folder, where moec looks for them.

use crate::rust::Rustc;
use crate::shell::{Failed, cache_dir, output, program, shown, stage};
use crate::{apt, debian};

const TRIPLE: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Debian's packages of linker, its C library, and emulator.
const PACKAGES: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];

/// Finds or installs the tools. Returns the skipped checks, with the commands that install their tools.
pub(crate) fn run() -> Option<String> {
    if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
        return None;
    }
    match tools().and_then(|()| standard_library()) {
        Ok(what) => {
            stage("Found", &format!("{LINKER}, {EMULATOR}, {what}"));
            None
        }
        Err(e) => Some(format!("tests of AArch64 code: {e}")),
    }
}

/// Linker and emulator.
fn tools() -> Result<(), Failed> {
    let there = |tool: &str| output(program(tool).arg("--version")).is_some();
    if there(LINKER) && there(EMULATOR) {
        return Ok(());
    }
    apt::install(&format!("no {LINKER} or no {EMULATOR}"), &PACKAGES)
}

/// A compiler with the standard library of the target.
fn standard_library() -> Result<String, Failed> {
    let own = Rustc::Own;
    if own.has_library(TRIPLE) {
        return Ok(format!("the standard library of {TRIPLE}"));
    }
    let unpacked = cache_dir()?.join("toolchains").join(TRIPLE);
    let wrapper = debian::rustc(&unpacked);
    let theirs = Rustc::At(wrapper.clone());
    if theirs.has_library(TRIPLE) {
        return Ok(wrapper.display().to_string());
    }
    let mut rustup = program("rustup");
    rustup.args(["target", "add", TRIPLE]);
    stage("Running", &shown(&rustup));
    if output(&mut rustup).is_some() && own.has_library(TRIPLE) {
        return Ok(format!("the standard library of {TRIPLE}"));
    }
    stage("Fetching", "Debian's rustc and the standard library of AArch64");
    debian::unpack(&unpacked, &["amd64", "arm64"], &["libstd-rust-web-dev:arm64"])
        .map_err(|e| e.hint(format!("`{}`, or run this on Debian 12 or later", shown(&rustup))))?;
    if theirs.has_library(TRIPLE) {
        return Ok(wrapper.display().to_string());
    }
    Err(Failed::new("Debian's rustc does not start").hint(format!("`{}`", shown(&rustup))))
}
