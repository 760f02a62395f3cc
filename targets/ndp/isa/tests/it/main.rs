//! Tests of the instruction set's forms, of addresses, and of the verifier.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod common;
mod faults;
mod forms;
mod messages;
mod order;
mod places;
mod touches;
