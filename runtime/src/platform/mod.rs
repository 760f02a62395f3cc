//! The machine and its operating system: CPUs, memory, untrusted files.

pub mod available;
pub mod busy;
pub mod cores;
pub mod cpu;
pub mod energy;
pub mod mapped;
pub mod memory;
pub mod numa;
pub mod regular;
