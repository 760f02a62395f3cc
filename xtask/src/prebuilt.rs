//! What moec embeds, made of what moec itself links.

use crate::shell::{self, Failed, cargo, root, shown, stage, target_dir};
use std::path::PathBuf;
use std::sync::OnceLock;

/// Names it to the build script of `moec-bundle`.
const GIVEN: &str = "MOEC_PREBUILT";

static LIBRARY: OnceLock<PathBuf> = OnceLock::new();

/// Compiles `prebuilt/` in `profile`, and has every later cargo embed that. By itself the build script would compile the runtime and all that
/// it needs a second time, as it ships: optimised, and ended by panics.
pub(crate) fn share(profile: &str) -> Result<(), Failed> {
    let folder = if profile == "dev" { "debug" } else { profile };
    // With the importer, crates have the features that all of moec asks of them, and serve both.
    let packages = ["--package", "moec-prebuilt", "--package", "moec-import"];
    let mut build = cargo("build", None);
    build.args(["--locked", "--profile", profile]).args(packages);
    stage("Running", &shown(&build));
    shell::run(&mut build)?;
    // A second call finds what the first made.
    let _ = LIBRARY.set(root().join(target_dir()).join(folder).join("libmoec_prebuilt.a"));
    Ok(())
}

/// What cargo, and tests that call it, are to see.
pub(crate) fn environment() -> Option<(&'static str, &'static PathBuf)> {
    LIBRARY.get().map(|library| (GIVEN, library))
}
