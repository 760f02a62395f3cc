//! The bundle that is executed: its program with the addresses of its kernels, its files, its C interface.

pub mod abi;
mod files;
pub mod manifest;
pub mod program;

pub(crate) use files::{BundleFile, BundleFiles, forget};
pub use files::{BundleReader, CheckedFile};
