//! Tests of the instructions' forms, places and verifier.

mod common;
mod faults;
mod forms;
mod messages;
mod order;
mod places;
mod touches;
