//! The operators, by kind.

pub(super) mod constexpr;
pub(super) mod elementwise;
pub(super) mod layout;
pub(super) mod product;
pub(super) mod reduce;
pub(super) mod slice;
pub(super) mod state;
