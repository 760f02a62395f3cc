//! Traces of requests, and the report on what a memory makes of them.
//!
//! A trace is text. Each line is one request for 64 bytes:
//!
//! ```text
//! R|W channel rank bankgroup bank row column
//! ```
//!
//! The first word says whether the line is read or written. The numbers are decimal, in the bounds of
//! [`Geometry::trimoe`](crate::Geometry::trimoe); `column` counts lines of 64 bytes in the row. Blank lines
//! are ignored. Channels are data buses that share nothing: a trace of a near-memory unit's reads over
//! private buses names those as channels. Requests are offered in order, one at a clock; a full queue makes
//! all that follow wait.

mod error;
mod parse;
mod report;
mod run;

pub use error::TraceError;
pub use parse::Requests;
pub use report::{IssueClocks, Report};
pub use run::{Setup, simulate};
