//! Tools that tests need, from the table of `moec-testing`.

use crate::shell::Failed;
use crate::{apt, coreml, cuda, qnn, venv};
use moec_testing::{ACTIONLINT, COREML, GGUF, Help, KUBERNETES, NEEDS, Need, OPENAI, PTXAS, QNN};

/// Need of a test, and the command of this program that installs it.
type Installer = (&'static Need, fn() -> Result<(), Failed>);

/// Every such command.
const INSTALLERS: &[Installer] = &[
    (&COREML, coreml::run),
    (&QNN, qnn::run),
    (&GGUF, || venv::run(&venv::GGUF)),
    (&OPENAI, || venv::run(&venv::OPENAI)),
    (&ACTIONLINT, || venv::run(&venv::ACTIONLINT)),
    (&KUBERNETES, || venv::run(&venv::KUBERNETES)),
    (&PTXAS, cuda::run),
];

/// Installs missing tools that can be installed here. Gives the others; tests that need them report it, too.
pub(crate) fn run() -> Vec<String> {
    let missing = INSTALLERS.iter().filter(|(need, _)| !need.is_met());
    let mut failed: Vec<String> = missing
        .filter_map(|(need, install)| install().err().map(|e| format!("tests of {}: {e}", need.what)))
        .collect();
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
        let missing = format!("tests that need {}", packages.join(", "));
        failed.extend(apt::install(&missing, &packages).err().map(|e| e.to_string()));
    }
    failed
}
