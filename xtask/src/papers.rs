//! `cargo xtask npumoe`, `trimoe` and `powerinfer2`: evaluations of three papers again, simulated; and the program that does it.

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

/// Writes an evaluation beside ours, `docs/trimoe.md` or `docs/powerinfer2.md` with its plots, or compares; `--quick` prints a
/// page of a short run.
pub(crate) fn page(paper: &str, options: &[String]) -> Result<(), Failed> {
    let mut command = shell::program(program()?);
    command.arg(paper).args(options);
    if !options.iter().any(|o| o == "--quick" || o == "--help") {
        command.arg("--docs").arg(root().join("docs"));
    }
    shell::run(&mut command)
}
