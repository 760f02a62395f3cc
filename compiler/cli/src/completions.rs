//! `moec completions`.

use super::{Cli, output};
use clap::CommandFactory as _;
use clap_complete::Shell;
use moec_base::Result;

/// Print shell completions
///
/// For bash: `moec completions bash > ~/.local/share/bash-completion/completions/moec`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Shell
    pub shell: Shell,
}

/// Prints the completions.
///
/// # Errors
/// Fails if stdout cannot be written.
pub fn run(args: &Args) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "moec", &mut script);
    output::data(&String::from_utf8_lossy(&script))
}
