//! Programs of parts of a model: their structure, results and errors, and the packages made of them.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test fails by panicking")]

mod attention;
mod blocks;
mod executed;
mod experts;
mod head;
mod interpret;
mod latent;
mod legalised;
mod packages;
mod store;
mod verify;
