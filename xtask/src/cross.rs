//! What AArch64 code is linked and run with on x86-64 Linux, so that it is tested there.
//!
//! Nothing of the system's Rust is replaced: where rustup cannot give the standard library, Debian's compiler and
//! library are unpacked into moec's cache folder, where moec looks for them.

use crate::shell::{self, Failed, cache_dir, output, program, shown, stage};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

const TRIPLE: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// Debian's packages of linker, its C library, and emulator.
const PACKAGES: [&str; 3] = ["gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross", "qemu-user"];

/// Starts the compiler that is unpacked beside it.
const WRAPPER: &str = r#"#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
export LD_LIBRARY_PATH="$here/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/usr/bin/rustc" "$@"
"#;

/// Finds or installs what is needed. Gives what will be skipped for lack of it, with what installs it.
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
    let mut command = program("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "--no-install-recommends"]);
    command.args(PACKAGES);
    if there("apt-get") && output(program("id").arg("-u")).is_some_and(|id| id == "0") {
        stage("Installing", &PACKAGES.join(", "));
        return shell::run(&mut command);
    }
    Err(Failed::new(format!("no {LINKER} or no {EMULATOR}")).hint(format!("as root: {}", shown(&command))))
}

/// A compiler with the standard library of the target.
fn standard_library() -> Result<String, Failed> {
    let own = Path::new("rustc");
    if has_library(own) {
        return Ok(format!("the standard library of {TRIPLE}"));
    }
    let unpacked = cache_dir()?.join("toolchains").join(TRIPLE);
    let wrapper = unpacked.join("bin/rustc");
    if has_library(&wrapper) {
        return Ok(wrapper.display().to_string());
    }
    let mut rustup = program("rustup");
    rustup.args(["target", "add", TRIPLE]);
    stage("Running", &shown(&rustup));
    if output(&mut rustup).is_some() && has_library(own) {
        return Ok(format!("the standard library of {TRIPLE}"));
    }
    unpack(&unpacked)
        .map_err(|e| e.hint(format!("`{}`, or run this on Debian 12 or later", shown(&rustup))))?;
    if has_library(&wrapper) {
        return Ok(wrapper.display().to_string());
    }
    Err(Failed::new("Debian's rustc does not start").hint(format!("`{}`", shown(&rustup))))
}

/// Whether a compiler has the standard library.
fn has_library(rustc: &Path) -> bool {
    let found = output(program(rustc).args(["--print", "target-libdir", "--target", TRIPLE]));
    let entries = found.and_then(|folder| Path::new(&folder).read_dir().ok());
    entries.is_some_and(|e| e.flatten().any(|f| f.file_name().to_string_lossy().starts_with("libstd-")))
}

/// Unpacks Debian's compiler, which follows new releases for the sake of its browsers, with the libraries of this
/// machine and of the target. Package lists are kept apart from the system's, so it takes no root.
fn unpack(to: &Path) -> Result<(), Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", to.display()));
    let debs = to.join("debs");
    for folder in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(debs.join(folder)).map_err(failed)?;
    }
    let folder = debs.display();
    let options = [
        "APT::Architectures::=amd64".to_owned(),
        "APT::Architectures::=arm64".to_owned(),
        format!("Dir::State::lists={folder}/lists"),
        format!("Dir::Cache={folder}/cache"),
        // Files of root's are not for the user that apt downloads as.
        "APT::Sandbox::User=root".to_owned(),
    ];
    let apt = |tool: &str, verb: &str| {
        let mut command = program(tool);
        command.current_dir(&debs);
        for option in &options {
            command.args(["-o", option]);
        }
        command.arg(verb);
        command
    };
    stage("Fetching", "Debian's rustc and the standard library of AArch64");
    shell::run(apt("apt-get", "update").arg("-qq"))?;
    // The package with the compiler's own library has its version in its name.
    let depends = output(apt("apt-cache", "depends").arg("libstd-rust-web-dev:amd64")).unwrap_or_default();
    let library = depends
        .lines()
        .find_map(|l| l.trim().strip_prefix("Depends: libstd-rust-web-"))
        .ok_or_else(|| Failed::new("apt knows no libstd-rust-web-dev"))?;
    shell::run(apt("apt-get", "download").args([
        "-qq",
        "rustc-web",
        "libstd-rust-web-dev:amd64",
        "libstd-rust-web-dev:arm64",
        &format!("libstd-rust-web-{library}"),
    ]))?;
    for entry in debs.read_dir().map_err(failed)?.flatten() {
        if entry.path().extension().is_some_and(|e| e == "deb") {
            shell::run(program("dpkg-deb").arg("-x").arg(entry.path()).arg(to))?;
        }
    }
    let wrapper = to.join("bin/rustc");
    fs::create_dir_all(to.join("bin")).map_err(failed)?;
    fs::write(&wrapper, WRAPPER).map_err(failed)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    fs::remove_dir_all(&debs).map_err(failed)
}
