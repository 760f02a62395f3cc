//! `cargo xtask check-apple`: compiles for macOS, without linking, what ships there.
//!
//! No Mac is needed: the bindings to Apple's frameworks are Rust, and type-checking links nothing. What is
//! missing for it is the standard library of macOS: rustup has it, and cargo can build it from source.

use crate::debian;
use crate::rust::Rustc;
use crate::shell::{self, Failed, cache_dir, cargo, output, program, shown, stage, target_dir};
use std::path::PathBuf;
use std::process::Command;

const TRIPLE: &str = "aarch64-apple-darwin";
/// Crates that ship, and those that read and check packages.
const CRATES: [&str; 4] = ["moec-runtime", "moec-service", "moec-coreml-unit", "moec-coreml"];

/// A compiler, and whether the standard library is to be built with it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Route {
    rustc: Rustc,
    version: String,
    build: bool,
}

/// Checks; installs what is missing.
pub(crate) fn run() -> Result<(), Failed> {
    let route = match Route::find() {
        Some(route) => route,
        None => install()?,
    };
    stage("Found", &route.description());
    check(&route)
}

/// Checks, if cargo's own compiler can do it: then most dependencies are compiled already. Building a
/// standard library first takes minutes and is a separate command.
///
/// # Errors
/// Fails if something does not compile. Returns the skipped checks, each with its remedy.
pub(crate) fn check_if_quick() -> Result<Option<String>, Failed> {
    match Route::of(Rustc::Own) {
        Some(route) if !route.build => check(&route).map(|()| None),
        _ => Ok(Some("type-check for macOS (cargo xtask check-apple)".to_owned())),
    }
}

fn check(route: &Route) -> Result<(), Failed> {
    let mut command = route.command();
    stage("Running", &shown(&command));
    shell::run(&mut command)
}

/// Folder of Debian's compiler and the library's source.
fn unpacked() -> Result<PathBuf, Failed> {
    Ok(cache_dir()?.join("toolchains").join(TRIPLE))
}

impl Route {
    /// The first that can do it. Those with a library come first: they build nothing.
    fn find() -> Option<Self> {
        let mut all = vec![Rustc::Own];
        all.extend(Rustc::of_rustup());
        all.extend(unpacked().map(|folder| Rustc::At(debian::rustc(&folder))));
        all.into_iter().filter_map(Self::of).min_by_key(|route| route.build)
    }

    /// Abilities of a compiler of this machine.
    fn of(rustc: Rustc) -> Option<Self> {
        let version = rustc.version()?;
        let (library, source) = (rustc.has_library(TRIPLE), rustc.has_source());
        Self::by(rustc, version, library, source)
    }

    /// Abilities of a compiler with the installed components.
    fn by(rustc: Rustc, version: String, library: bool, source: bool) -> Option<Self> {
        (library || source).then_some(Self { rustc, version, build: !library })
    }

    fn description(&self) -> String {
        let library =
            if self.build { "builds the standard library of" } else { "has the standard library of" };
        format!("{}, which {library} {TRIPLE}", self.version)
    }

    /// The command that checks.
    fn command(&self) -> Command {
        // If the whole tree is compiled with the same compiler, its build scripts and macros serve here, too.
        let own = self.rustc == Rustc::Own && !self.build;
        let lints = own && output(cargo("clippy", None).arg("--version")).is_some();
        let subcommand = if lints { "clippy" } else { "check" };
        let mut command = match &self.rustc {
            Rustc::Rustup(name) => {
                let mut command = program("rustup");
                command.args(["run", name, "cargo", subcommand]);
                command
            }
            Rustc::Own | Rustc::At(_) => cargo(subcommand, None),
        };
        if let Rustc::At(path) = &self.rustc {
            command.env("RUSTC", path);
        }
        command.args(["--locked", "--target", TRIPLE]);
        command.args(CRATES.iter().flat_map(|name| ["--package", *name]));
        if !own {
            command.arg("--target-dir").arg(target_dir().join("check-apple"));
        }
        if self.build {
            command.arg("-Zbuild-std=std,panic_abort");
            if !self.version.contains("nightly") {
                command.env("RUSTC_BOOTSTRAP", "1");
            }
        }
        if lints {
            command.args(["--", "-D", "warnings"]);
        }
        command
    }
}

/// Gets the library from rustup, or Debian's compiler and the library's source.
fn install() -> Result<Route, Failed> {
    let mut rustup = program("rustup");
    rustup.args(["target", "add", TRIPLE]);
    let found = |what: &str| {
        Route::find().ok_or_else(|| Failed::new(format!("{what} does not compile for {TRIPLE}")))
    };
    stage("Running", &shown(&rustup));
    if output(&mut rustup).is_some() {
        return found("rustup's compiler");
    }
    stage("Fetching", "Debian's rustc and the source of the standard library");
    debian::unpack(&unpacked()?, &["amd64"], &["rust-web-src"])
        .map_err(|e| e.hint(format!("`{}`, or run this on Debian 12 or later", shown(&rustup))))?;
    found("Debian's compiler")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(rustc: Rustc, version: &str, build: bool) -> Route {
        Route { rustc, version: version.to_owned(), build }
    }

    fn arguments(command: &Command) -> Vec<String> {
        command.get_args().map(|a| a.to_string_lossy().into_owned()).collect()
    }

    fn bootstraps(command: &Command) -> bool {
        command.get_envs().any(|(name, value)| name == "RUSTC_BOOTSTRAP" && value.is_some())
    }

    #[test]
    fn compiler_without_library_and_source_is_unusable() {
        let by = |library, source| Route::by(Rustc::Own, "rustc 1.95.0".into(), library, source);
        assert_eq!(by(false, false), None);
        assert!(by(false, true).unwrap().build);
        assert!(!by(true, false).unwrap().build && !by(true, true).unwrap().build);
    }

    #[test]
    fn library_is_built_only_if_missing() {
        let built = route(Rustc::At("/x/bin/rustc".into()), "rustc 1.96.0", true).command();
        let all = arguments(&built);
        assert!(
            all.contains(&"-Zbuild-std=std,panic_abort".into()) && all.contains(&TRIPLE.into()),
            "{all:?}"
        );
        assert!(bootstraps(&built));
        assert!(built.get_envs().any(|(n, v)| n == "RUSTC" && v == Some("/x/bin/rustc".as_ref())));
        let nightly = route(Rustc::Rustup("nightly-x".into()), "rustc 1.97.0-nightly", true).command();
        assert_eq!(arguments(&nightly)[..4], ["run", "nightly-x", "cargo", "check"]);
        assert!(!bootstraps(&nightly));
        let own = route(Rustc::Own, "rustc 1.95.0", false).command();
        let all = arguments(&own);
        assert!(
            !all.iter().any(|a| a.starts_with("-Z") || a == "--target-dir") && !bootstraps(&own),
            "{all:?}"
        );
    }
}
