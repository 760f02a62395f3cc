//! Tools that tests need, from the table of `moec-testing`.

use crate::shell::{self, Failed, output, program, shown, stage};
use crate::{coreml, qnn};
use moec_testing::{COREML, Help, NEEDS, QNN};

/// Installs what is missing and can be installed here. Gives what could not be; tests that need it say so, too.
pub(crate) fn run() -> Vec<String> {
    let mut failed = Vec::new();
    if !COREML.is_met() {
        failed.extend(coreml::run().err().map(|e| format!("tests of {}: {e}", COREML.what)));
    }
    if !QNN.is_met() {
        failed.extend(qnn::run().err().map(|e| format!("tests of {}: {e}", QNN.what)));
    }
    let packages: Vec<&str> = NEEDS
        .iter()
        .filter_map(|need| match need.help {
            Help::Packages(names) if !need.is_met() => Some(names),
            _ => None,
        })
        .flatten()
        .copied()
        .collect();
    if !packages.is_empty() {
        failed.extend(install(&packages).err().map(|e| e.to_string()));
    }
    failed
}

/// Installs packages with apt, or says how.
fn install(packages: &[&str]) -> Result<(), Failed> {
    let mut command = program("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "--no-install-recommends"]);
    command.args(packages);
    let root = output(program("id").arg("-u")).is_some_and(|id| id == "0");
    if !root || output(program("apt-get").arg("--version")).is_none() {
        let missing = format!("tests that need {}", packages.join(", "));
        return Err(Failed::new(missing).hint(format!("as root: {}", shown(&command))));
    }
    stage("Updating", "the lists of apt");
    shell::run(program("apt-get").args(["update", "-qq"]))?;
    stage("Installing", &packages.join(", "));
    shell::run(&mut command)
}
