//! Service for users and programs: the subcommands of a bundle for conversations, on the runtime's engine.
//!
//! Invariant: of the workspace, this crate depends only on `moec-ir` and `moec-runtime`, so that it builds
//! together with a generated runner.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod chat;
pub mod error;
pub mod grammar;
mod process;
pub mod sampling;
mod serve;
pub mod template;
pub mod tools;
pub mod worker;

pub use error::{Error, Result};
use moec_runtime::cli::{AddedSubcommand, Front, Native};
pub use serve::{RequestPrompts, Requests};

/// The subcommands in addition to the runtime's own.
const SUBCOMMANDS: &[AddedSubcommand] = &[chat::SUBCOMMAND, serve::SUBCOMMAND, worker::SUBCOMMAND];

/// The subcommands of a bundle, the runtime's and this crate's, and grammars for those of the runtime.
/// `native`: what executes accelerators.
pub fn front(native: &'static [Native<'static>]) -> Front<'static> {
    Front {
        added_subcommands: SUBCOMMANDS,
        constraint_options: Some(grammar::CONSTRAINT_OPTIONS),
        native,
        ..Front::default()
    }
}
