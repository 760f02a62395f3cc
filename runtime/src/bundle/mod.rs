//! The bundle that is executed: its program with the addresses of its kernels, its files, its C interface.

pub mod abi;
pub mod manifest;
pub mod program;
