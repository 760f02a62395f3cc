//! Every kernel, run in this process, against plain loops.
#![allow(clippy::panic, clippy::print_stdout)] // this is a test, though not all of it a test function

mod attention;
mod cache;
mod experts;
mod harness;
mod matrix;
mod routing;
mod simple;
