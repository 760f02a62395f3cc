//! The passes, one file each. The crate `moec-pipeline` has their order.
#![expect(
    clippy::cast_possible_truncation,
    reason = "ids of a graph and numbers of one model, whose sizes the import bounds"
)]

pub mod assign_residency;
pub mod assign_units;
pub mod barriers;
pub mod cluster;
pub mod decisions;
pub mod divide;
pub mod format;
pub mod fuse;
pub mod gpu_expert_cache;
pub mod group;
pub mod hot;
pub mod insert_copies;
pub mod layout;
pub mod memory;
pub mod outline_graphs;
pub mod own_experts;
pub mod parts;
pub mod plan_expert_schedule;
pub mod predict;
pub mod prefetch_experts;
pub mod reads;
mod regions;
pub mod rewrite;
pub mod schedule;
pub mod size_expert_cache;
pub mod slice_attention;
pub mod slice_experts;
#[cfg(test)]
mod tests;
pub mod threshold;
pub mod tier;
pub mod trained;
pub mod tune;
