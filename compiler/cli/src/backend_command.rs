//! Subcommands that backends define.

use super::output;
use clap::error::ErrorKind;
use clap::{ArgMatches, Command, FromArgMatches, Subcommand};
use moec_backend::Subcommand as Of;
use moec_base::Result;
use moec_targets::backends::BACKENDS;

/// A subcommand of a backend, with its options.
#[derive(Clone, Debug)]
pub struct BackendCommand {
    of: Of,
    options: ArgMatches,
}

/// Returns the subcommands of all backends.
fn all() -> impl Iterator<Item = &'static Of> {
    BACKENDS.iter().flat_map(|backend| backend.subcommands())
}

impl BackendCommand {
    /// Executes the subcommand and prints its output.
    ///
    /// # Errors
    /// Fails if the backend does.
    pub fn run(&self) -> Result<()> {
        output::data(&(self.of.run)(&self.options)?)
    }
}

impl FromArgMatches for BackendCommand {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let found = matches.subcommand().and_then(|(name, options)| {
            let of = *all().find(|of| (of.command)().get_name() == name)?;
            Some(Self { of, options: options.clone() })
        });
        found.ok_or_else(|| clap::Error::new(ErrorKind::MissingSubcommand))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Subcommand for BackendCommand {
    fn augment_subcommands(command: Command) -> Command {
        command.subcommands(all().map(|of| (of.command)()))
    }

    fn augment_subcommands_for_update(command: Command) -> Command {
        Self::augment_subcommands(command)
    }

    fn has_subcommand(name: &str) -> bool {
        all().any(|of| (of.command)().get_name() == name)
    }
}
