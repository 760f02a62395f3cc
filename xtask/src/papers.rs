//! `cargo xtask npumoe`: the evaluation of NPUMoE again, simulated; and the program that does it.

use crate::setup;
use crate::shell::{self, Failed, cargo, stage};
use std::path::PathBuf;

/// Builds `moec-papers`; gives the program.
pub(crate) fn program() -> Result<PathBuf, Failed> {
    let llvm = setup::run()?;
    stage("Building", "moec-papers");
    shell::run(cargo("build", Some(&llvm)).args(["--release", "--locked", "--package", "moec-papers"]))?;
    Ok(shell::target_dir().join("release/moec-papers"))
}

/// Prints every figure of NPUMoE's evaluation beside ours.
pub(crate) fn run(options: &[String]) -> Result<(), Failed> {
    shell::run(shell::program(program()?).arg("npumoe").args(options))
}
