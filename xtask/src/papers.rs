//! `cargo xtask npumoe`, `trimoe`, `powerinfer2`, `hybrimoe` and `mobile`: evaluations of five papers again,
//! simulated; and the program that does it.

use crate::setup;
use crate::shell::{self, Failed, cargo, root, stage};
use std::path::PathBuf;

/// Builds `moec-papers`; returns the program's path.
pub(crate) fn program() -> Result<PathBuf, Failed> {
    built(true)
}

/// The same as it is built soonest, for what takes no time.
pub(crate) fn debug() -> Result<PathBuf, Failed> {
    built(false)
}

/// The program in an optimised build, or in the quickest build for `--help`.
fn built(release: bool) -> Result<PathBuf, Failed> {
    let llvm = setup::run()?;
    stage("Building", "moec-papers");
    let (flag, folder) = if release { (Some("--release"), "release") } else { (None, "debug") };
    let mut build = cargo("build", Some(&llvm));
    shell::run(build.args(flag).args(["--locked", "--package", "moec-papers"]))?;
    Ok(shell::target_dir().join(folder).join("moec-papers"))
}

/// The program for these options.
fn built_for(options: &[String]) -> Result<PathBuf, Failed> {
    built(!options.iter().any(|o| o == "--help" || o == "-h"))
}

/// Prints every figure of NPUMoE's evaluation and ours.
pub(crate) fn run(options: &[String]) -> Result<(), Failed> {
    shell::run(shell::program(built_for(options)?).arg("npumoe").args(options))
}

/// Writes the page of an evaluation, for example `docs/trimoe.md`, with its plots, or compares it; `--quick`
/// prints a page of a short run.
pub(crate) fn page(paper: &str, options: &[String]) -> Result<(), Failed> {
    let mut command = shell::program(built_for(options)?);
    command.arg(paper).args(options);
    if !options.iter().any(|o| o == "--quick" || o == "--help" || o == "-h") {
        command.arg("--docs").arg(root().join("docs"));
    }
    shell::run(&mut command)
}
