//! QNN in a process of its own: if the library crashes, that process dies and the caller gets an error.
//!
//! The caller starts a program that does nothing but [`serve`], `moec-qnn-exec` or a subcommand of moec's. Requests go to its
//! stdin and answers come from its stdout, each a length and its bytes; what the library prints goes to stderr, whose end stands in
//! the error if the process dies. One process has one chip and one context. Numbers that the library gives out count on from
//! context to context and stand in context binaries, so that this is what makes the same graphs give the same bytes.

mod client;
mod limit;
mod protocol;
mod server;
mod stderr;
mod stdio;

pub use client::{Program, Worker};
pub use limit::within;
pub use server::serve;
