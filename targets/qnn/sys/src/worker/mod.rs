//! QNN in a process of its own: if the library crashes, that process dies and the caller gets an error.
//!
//! The caller starts a program that does nothing but [`serve`]: `moec-qnn-exec` or a subcommand of moec's.
//! Requests go to its stdin and answers come from its stdout, each a length and its bytes. The library's
//! output goes to stderr, whose end is in the error if the process dies. One process has one chip and one
//! context. The library numbers objects from context to context and stores the numbers in context binaries.
//! So a new process is necessary for the same graphs to give the same bytes.

mod client;
mod limit;
mod protocol;
mod server;
mod stderr;
mod stdio;

pub use client::{Program, Worker};
pub use limit::within;
pub use server::serve;
