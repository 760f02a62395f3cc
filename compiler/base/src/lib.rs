//! Base of all crates of the compiler: errors, numbers for people, progress, interrupts, atomic writes of
//! files, the cache folder, and the paths of a bundle's files.

pub mod cache_dir;
pub mod disk;
pub mod error;
pub mod hashing;
pub mod human;
pub mod interrupt;
pub mod locked_folder;
pub mod paths;
pub mod progress;
pub mod scratch;
pub mod tools;

pub use error::{Error, Fault, Result};
