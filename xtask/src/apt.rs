//! Packages of Debian and Ubuntu.

use crate::shell::{self, Failed, output, program, shown, stage};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether this system has apt.
pub(crate) fn is_here() -> bool {
    output(program("apt-get").arg("--version")).is_some()
}

/// Whether root runs this.
pub(crate) fn is_root() -> bool {
    output(program("id").arg("-u")).is_some_and(|id| id == "0")
}

/// Fetches the lists of packages, once in a run of this program.
pub(crate) fn update() -> Result<(), Failed> {
    static UPDATED: AtomicBool = AtomicBool::new(false);
    if UPDATED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    stage("Updating", "the lists of apt");
    shell::run(program("apt-get").args(["update", "-qq"]))
}

/// Installs packages as root with apt; else reports what is missing and how to install it.
pub(crate) fn install(missing: &str, packages: &[&str]) -> Result<(), Failed> {
    let mut command = command(packages);
    if !is_root() || !is_here() {
        return Err(Failed::new(missing).hint(as_root(packages)));
    }
    update()?;
    stage("Installing", &packages.join(", "));
    shell::run(&mut command)
}

/// Command that installs packages, in words.
pub(crate) fn as_root(packages: &[&str]) -> String {
    format!("on Debian and Ubuntu, as root: {}", shown(&command(packages)))
}

fn command(packages: &[&str]) -> Command {
    let mut command = program("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive").args(["install", "-y", "--no-install-recommends"]);
    command.args(packages);
    command
}

#[cfg(test)]
mod tests {
    use super::as_root;

    #[test]
    fn install_hint_is_a_valid_command() {
        assert_eq!(
            as_root(&["strace", "gdb"]),
            "on Debian and Ubuntu, as root: apt-get install -y --no-install-recommends strace gdb"
        );
    }
}
