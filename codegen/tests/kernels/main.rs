//! Every kernel, run in this process, against plain loops.

mod experts;
mod harness;
mod matrix;
mod simple;
