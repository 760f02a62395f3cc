//! `cargo xtask amx-bench`: matrix kernels on tile registers compared with the machine's peak.

use crate::setup;
use crate::shell::{self, Failed, cargo, shown, stage};

/// Runs the example that times them, of the CPU backend.
pub(crate) fn run() -> Result<(), Failed> {
    let llvm = setup::run()?;
    let mut bench = cargo("run", Some(&llvm));
    bench.args(["--locked", "--package", "moec-cpu", "--example", "tiles"]);
    stage("Running", &shown(&bench));
    shell::run(&mut bench)
}
