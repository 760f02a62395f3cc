//! The passes, one file each. Their order stands in the crate `moec-pipeline`.
#![expect(
    clippy::cast_possible_truncation,
    reason = "ids of a graph and numbers of one model, whose sizes the import bounds"
)]

pub mod barriers;
pub mod cluster;
pub mod cross;
pub mod decisions;
pub mod divide;
pub mod fetch;
pub mod format;
pub mod frames;
pub mod fuse;
pub mod group;
pub mod home;
pub mod hot;
pub mod layout;
pub mod memory;
pub mod offload;
pub mod page;
pub mod parts;
pub mod place;
pub mod predict;
pub mod reads;
pub mod reside;
pub mod rewrite;
pub mod schedule;
#[cfg(test)]
mod tests;
pub mod threshold;
pub mod tier;
pub mod trained;
pub mod tune;
