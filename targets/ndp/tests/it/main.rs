//! The modelled machine of NDP DIMMs and its command streams, compared with references.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(missing_docs)]

mod artifacts;
mod common;
mod instructions;
mod moves;
mod results;
mod streams;
mod timing;
