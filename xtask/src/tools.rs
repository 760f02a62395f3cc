//! Tools that tests need, from the table of `moec-testing`.

use crate::shell::Failed;
use crate::{apt, coreml, qnn, venv};
use moec_testing::{COREML, GGUF, Help, NEEDS, OPENAI, QNN};

/// Installs what is missing and can be installed here. Gives what could not be; tests that need it say so, too.
pub(crate) fn run() -> Vec<String> {
    let mut failed = Vec::new();
    if !COREML.is_met() {
        failed.extend(coreml::run().err().map(|e| format!("tests of {}: {e}", COREML.what)));
    }
    if !QNN.is_met() {
        failed.extend(qnn::run().err().map(|e| format!("tests of {}: {e}", QNN.what)));
    }
    for (need, environment) in [(&GGUF, &venv::GGUF), (&OPENAI, &venv::OPENAI)] {
        if !need.is_met() {
            failed.extend(venv::run(environment).err().map(|e| format!("tests of {}: {e}", need.what)));
        }
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

/// Installs packages with apt, of lists that are new, or says how.
fn install(packages: &[&str]) -> Result<(), Failed> {
    if apt::is_root() && apt::is_here() {
        apt::update()?;
    }
    apt::install(&format!("tests that need {}", packages.join(", ")), packages)
}
