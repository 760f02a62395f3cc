//! The machine that executes command streams: what they compute, bit by bit, and how long they take.
//!
//! Results and time are computed separately. [`Dimms::run`] executes the instructions of a [`Program`] in
//! their order. Engines in parallel give the same result, since the verifier has proven that no two
//! instructions race. [`time`] executes the same stream with parallel engines and without data.
#![expect(
    clippy::cast_possible_truncation,
    reason = "an evaluator and simulator: numbers are rounded, places were checked"
)]

mod act;
mod clock;
mod dimms;
mod execute;
mod fault;
mod gemv;
mod memory;
mod program;
mod report;
mod time;

pub use clock::{Bus, channel};
pub use dimms::Dimms;
pub use fault::Fault;
pub use program::Program;
pub use report::Report;
pub use time::{ACT_WIDTH, EXP_CLOCKS, FIFO, GFLOPS, LINK_GBS, TILE_CLOCKS, time, times};
