//! Finding LLVM.

use crate::shell::{output, program};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Versions that moec can be built with, best first. The last digit is the minor version that the
/// binding's name ends in.
pub(crate) const VERSIONS: [(u32, u32); 4] = [(22, 1), (21, 1), (20, 1), (19, 1)];

/// An LLVM with headers and a shared library.
#[derive(Debug)]
pub(crate) struct Llvm {
    /// Major version.
    pub(crate) major: u32,
    minor: u32,
    /// Version in full.
    pub(crate) version: String,
    /// Folder that it is installed in.
    pub(crate) prefix: PathBuf,
    /// Whether the binding finds it by itself, being `llvm-config-N` on the path.
    on_path: bool,
}

impl Llvm {
    /// The newest one that is installed.
    pub(crate) fn find() -> Option<Self> {
        VERSIONS.into_iter().find_map(|(major, minor)| {
            let variable = format!("LLVM_SYS_{major}{minor}_PREFIX");
            if let Some(prefix) = std::env::var_os(variable).filter(|p| !p.is_empty()) {
                return Self::at(&Path::new(&prefix).join("bin/llvm-config"), major, minor, true);
            }
            Self::at(Path::new(&format!("llvm-config-{major}")), major, minor, true).or_else(|| {
                [
                    format!("/usr/lib/llvm-{major}"),
                    format!("/usr/lib/llvm{major}"),
                    format!("/usr/local/opt/llvm@{major}"),
                    format!("/opt/homebrew/opt/llvm@{major}"),
                    "/usr".into(),
                ]
                .iter()
                .find_map(|p| Self::at(&Path::new(p).join("bin/llvm-config"), major, minor, false))
            })
        })
    }

    /// The one whose `llvm-config` this is, if it has that version, headers and a shared library.
    fn at(config: &Path, major: u32, minor: u32, on_path: bool) -> Option<Self> {
        let query = |what: &str| output(program(config).arg(what));
        let version = query("--version")?;
        let found: Vec<u32> = version.split('.').map_while(|n| n.parse().ok()).collect();
        if found.first() != Some(&major) || found.get(1).is_none_or(|&m| m < minor) {
            return None;
        }
        let headers = Path::new(&query("--includedir")?).join("llvm-c/Core.h");
        let shared = output(Command::new(config).args(["--link-shared", "--libs"])).is_some();
        let prefix = query("--prefix")?.into();
        (headers.is_file() && shared).then_some(Self { major, minor, version, prefix, on_path })
    }

    /// Whether it is not the one that moec requests by default.
    pub(crate) fn is_other(&self) -> bool {
        self.major != VERSIONS[0].0
    }

    /// Features of the package `moec` for this version.
    pub(crate) fn flags(&self) -> Vec<String> {
        if !self.is_other() {
            return Vec::new();
        }
        vec![
            "--no-default-features".into(),
            "--features".into(),
            format!("moec/llvm{},moec/prebuilt", self.major),
        ]
    }

    /// Its static archives that are not installed: those of Polly may be a package of their own.
    pub(crate) fn missing_archives(&self) -> Vec<PathBuf> {
        let config = self.prefix.join("bin/llvm-config");
        let files = output(program(config).args(["--link-static", "--libfiles"])).unwrap_or_default();
        files.split_whitespace().map(PathBuf::from).filter(|file| !file.is_file()).collect()
    }

    /// Features of the package `moec` with this version as a part of the program.
    pub(crate) fn archived(&self) -> Vec<String> {
        let features = format!("moec/llvm{}-static,moec/prebuilt", self.major);
        vec!["--no-default-features".into(), "--features".into(), features]
    }

    /// Variable by which the binding finds it. It is set only if needed, so that cargo called by hand shares
    /// build outputs.
    pub(crate) fn environment(&self) -> Option<(String, PathBuf)> {
        let variable = format!("LLVM_SYS_{}{}_PREFIX", self.major, self.minor);
        (!self.on_path).then(|| (variable, self.prefix.clone()))
    }
}
