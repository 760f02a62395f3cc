//! Debian's Rust, unpacked without touching the operating system's.
//!
//! Debian's `rustc-web` follows new releases for the sake of its browsers, and is packaged for other
//! architectures and as source. Package lists are kept apart from the operating system's, so unpacking takes
//! no root.

use crate::shell::{self, Failed, output, program};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// Starts the compiler in the folder next to it.
const WRAPPER: &str = r#"#!/bin/sh
here=$(dirname "$(readlink -f "$0")")/..
export LD_LIBRARY_PATH="$here/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
exec "$here/usr/bin/rustc" "$@"
"#;

/// Path of the compiler in a folder that [`unpack`] has filled.
pub(crate) fn rustc(folder: &Path) -> PathBuf {
    folder.join("bin/rustc")
}

/// Unpacks the compiler, the libraries of this machine, and further packages, perhaps of other architectures.
pub(crate) fn unpack(to: &Path, architectures: &[&str], packages: &[&str]) -> Result<(), Failed> {
    let failed = |e: std::io::Error| Failed::new(format!("`{}` cannot be written: {e}", to.display()));
    let debs = to.join("debs");
    for folder in ["lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(debs.join(folder)).map_err(failed)?;
    }
    let folder = debs.display();
    let mut options = vec![
        format!("Dir::State::lists={folder}/lists"),
        format!("Dir::Cache={folder}/cache"),
        // Files of root's are not for the user that apt downloads as.
        "APT::Sandbox::User=root".to_owned(),
    ];
    options.extend(architectures.iter().map(|a| format!("APT::Architectures::={a}")));
    let apt = |tool: &str, subcommand: &str| {
        let mut command = program(tool);
        command.current_dir(&debs);
        for option in &options {
            command.args(["-o", option]);
        }
        command.arg(subcommand);
        command
    };
    shell::run(apt("apt-get", "update").arg("-qq"))?;
    // The package with the compiler's own library has its version in its name.
    let depends = output(apt("apt-cache", "depends").arg("libstd-rust-web-dev:amd64")).unwrap_or_default();
    let library = library(&depends).ok_or_else(|| Failed::new("apt knows no libstd-rust-web-dev"))?;
    let mut download = apt("apt-get", "download");
    download.args(["-qq", "rustc-web", "libstd-rust-web-dev:amd64", library]).args(packages);
    shell::run(&mut download)?;
    for entry in debs.read_dir().map_err(failed)?.flatten() {
        if entry.path().extension().is_some_and(|e| e == "deb") {
            shell::run(program("dpkg-deb").arg("-x").arg(entry.path()).arg(to))?;
        }
    }
    let wrapper = rustc(to);
    fs::create_dir_all(to.join("bin")).map_err(failed)?;
    fs::write(&wrapper, WRAPPER).map_err(failed)?;
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).map_err(failed)?;
    fs::remove_dir_all(&debs).map_err(failed)
}

/// `libstd-rust-web-1.96` of what apt says that the development package depends on.
fn library(depends: &str) -> Option<&str> {
    let packages = depends.lines().filter_map(|l| l.trim().strip_prefix("Depends: "));
    packages.into_iter().find(|p| p.starts_with("libstd-rust-web-"))
}

#[cfg(test)]
mod tests {
    use super::library;

    #[test]
    fn the_compilers_library_is_found_by_its_version() {
        let description = "libstd-rust-web-dev\n  Depends: libc6\n  Depends: libstd-rust-web-1.96\n  Conflicts: libstd-rust-dev\n";
        assert_eq!(library(description), Some("libstd-rust-web-1.96"));
        assert_eq!(library("libstd-rust-web-dev\n  Conflicts: libstd-rust-web-1.96\n"), None);
    }
}
