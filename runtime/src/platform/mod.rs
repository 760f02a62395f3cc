//! The machine and its system: CPUs, memory, files of others.

pub mod available;
pub mod busy;
pub mod cpu;
pub mod mapped;
pub mod memory;
pub mod regular;
