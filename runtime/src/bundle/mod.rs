//! The bundle that is executed: its program with the addresses of kernels, its files, the kernels' C ABI.

pub mod abi;
mod files;
pub mod manifest;
pub mod program;

pub(crate) use files::{BundleFile, BundleFiles, forget};
pub use files::{BundleReader, CheckedFile};
