//! `cargo xtask npumoe` and `trimoe`: evaluations of NPUMoE and TriMoE again, simulated; and the program that does it.

use crate::setup;
use crate::shell::{self, Failed, cargo, root, stage};
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

/// Writes TriMoE's evaluation beside ours, `docs/trimoe.md` with its plots, or compares; `--quick` prints a page of few steps.
pub(crate) fn trimoe(options: &[String]) -> Result<(), Failed> {
    let mut command = shell::program(program()?);
    command.arg("trimoe").args(options);
    if !options.iter().any(|o| o == "--quick" || o == "--help") {
        command.arg("--docs").arg(root().join("docs"));
    }
    shell::run(&mut command)
}
