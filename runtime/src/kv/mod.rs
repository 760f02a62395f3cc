//! States of the sequences in slots, and files of saved prompts.

pub mod saved;
mod snapshots;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub(crate) mod states;
pub(crate) mod unsupported;
