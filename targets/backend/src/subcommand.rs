//! Subcommands of `moec` that a backend adds.

use crate::Result;
use clap::{ArgMatches, Command};

/// A subcommand.
#[derive(Clone, Copy, Debug)]
pub struct Subcommand {
    /// Its name, help and options.
    pub command: fn() -> Command,
    /// Executes it. Gives its output for stdout.
    pub run: fn(&ArgMatches) -> Result<String>,
}
