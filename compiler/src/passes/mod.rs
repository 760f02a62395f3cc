//! The passes, one file each. Their order stands in [`crate::pipeline`].

pub mod barriers;
pub mod format;
pub mod layout;
pub mod lower;
pub mod memory;
pub mod rewrite;
pub mod schedule;
pub mod tune;
