//! Compilers of this machine, and what they can compile for.

use crate::shell::{output, program};
use std::path::{Path, PathBuf};

/// Oldest that builds this project.
const OLDEST: (u32, u32) = (1, 95);

/// A compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Rustc {
    /// Cargo's own.
    Own,
    /// The compiler of another toolchain of rustup's.
    Rustup(String),
    /// A program.
    At(PathBuf),
}

impl Rustc {
    /// Toolchains of rustup's, without cargo's own.
    pub(crate) fn of_rustup() -> Vec<Self> {
        let list = output(program("rustup").args(["toolchain", "list"])).unwrap_or_default();
        toolchains(&list).into_iter().map(Self::Rustup).collect()
    }

    /// Its answer to a question.
    fn query(&self, args: &[&str]) -> Option<String> {
        let mut command = match self {
            Self::Own => program("rustc"),
            Self::Rustup(name) => {
                let mut command = program("rustup");
                command.args(["run", name, "rustc"]);
                command
            }
            Self::At(path) => program(path),
        };
        output(command.args(args))
    }

    /// Its version, if it is new enough.
    pub(crate) fn version(&self) -> Option<String> {
        self.query(&["--version"]).filter(|line| number(line).is_some_and(|n| n >= OLDEST))
    }

    /// Whether it has the standard library of a system.
    pub(crate) fn has_library(&self, triple: &str) -> bool {
        let found = self.query(&["--print", "target-libdir", "--target", triple]);
        let entries = found.and_then(|folder| Path::new(&folder).read_dir().ok());
        entries.is_some_and(|e| e.flatten().any(|f| f.file_name().to_string_lossy().starts_with("libstd-")))
    }

    /// Whether it has the standard library's source, so that cargo can build it for any system.
    pub(crate) fn has_source(&self) -> bool {
        let root = self.query(&["--print", "sysroot"]);
        root.is_some_and(|r| Path::new(&r).join("lib/rustlib/src/rust/library/Cargo.lock").is_file())
    }
}

/// Names in what `rustup toolchain list` says, without the one in use.
fn toolchains(list: &str) -> Vec<String> {
    let lines = list.lines().filter(|l| !l.contains("active"));
    lines.filter_map(|l| l.split_whitespace().next()).filter(|n| n.contains('-')).map(str::to_owned).collect()
}

/// Major and minor version of `rustc 1.95.0 (…)`.
fn number(line: &str) -> Option<(u32, u32)> {
    let mut parts = line.strip_prefix("rustc ")?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_toolchains_are_listed_without_remarks() {
        let list = "stable-x86_64-unknown-linux-gnu (active, default)\nnightly-x86_64-unknown-linux-gnu\n\
                    1.95.0-x86_64-unknown-linux-gnu (override)\n";
        assert_eq!(toolchains(list), ["nightly-x86_64-unknown-linux-gnu", "1.95.0-x86_64-unknown-linux-gnu"]);
        assert_eq!(toolchains("no installed toolchains\n"), Vec::<String>::new());
    }

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(number("rustc 1.97.0-nightly (e50aa6fba 2026-05-19)"), Some((1, 97)));
        assert!(number("rustc 1.100.0").unwrap() > OLDEST);
        assert!(number("rustc 1.85.1 (abc)").unwrap() < OLDEST);
        assert_eq!(number("error: no such command"), None);
    }
}
