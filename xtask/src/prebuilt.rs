//! Objects that moec embeds, built from the crates that moec links.

use crate::llvm::Llvm;
use crate::shell::{self, Failed, cargo, root, shown, stage, target_dir};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

/// Names it to the build script of `moec-bundle`.
const GIVEN: &str = "MOEC_PREBUILT";

static LIBRARY: OnceLock<PathBuf> = OnceLock::new();

/// Packages that are built with it: so crates have the features that all of moec requires of them, and serve
/// both.
const PACKAGES: [&str; 5] = ["moec-prebuilt", "moec-import", "moec-passes", "moec-cpu", "moec-codegen"];

/// A build of them in `profile`, and of moec itself if `whole`.
pub(crate) fn build(profile: &str, llvm: &Llvm, whole: bool) -> Command {
    let mut build = cargo("build", None);
    build.args(["--locked", "--profile", profile]);
    build.args(PACKAGES.iter().copied().chain(whole.then_some("moec")).flat_map(|p| ["--package", p]));
    if llvm.is_other() {
        let whole = if whole { format!(",moec/llvm{},moec/prebuilt", llvm.major) } else { String::new() };
        build.args(["--no-default-features", "--features", &format!("moec-cpu/llvm{}{whole}", llvm.major)]);
    }
    build.envs(llvm.environment());
    build
}

/// Compiles `prebuilt/` in `profile`, and has every later cargo embed that. By itself the build script would
/// compile the runtime and all that it needs a second time, as it ships: optimised, and ended by panics.
pub(crate) fn share(profile: &str, llvm: &Llvm) -> Result<(), Failed> {
    let folder = if profile == "dev" { "debug" } else { profile };
    let mut build = build(profile, llvm, false);
    stage("Running", &shown(&build));
    shell::run(&mut build)?;
    // A second call finds the first call's output.
    let _ = LIBRARY.set(root().join(target_dir()).join(folder).join("libmoec_prebuilt.a"));
    Ok(())
}

/// Environment for cargo, and for tests that call it.
pub(crate) fn environment() -> Option<(&'static str, &'static PathBuf)> {
    LIBRARY.get().map(|library| (GIVEN, library))
}
