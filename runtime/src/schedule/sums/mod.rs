//! A step as sums: each unit takes its experts one after the other, and reads of one memory add up (TriMoE, equations 5 to 7).
//!
//! Costs become whole [`ticks`] in [`prices`]; an [`assignment`] keeps the times of all units up to date move by move. [`refine`] is
//! the paper's, [`search`] leaves the plateaus where that stalls, [`hottest`] is a cut by load, [`exact`] tries all for few experts,
//! and no assignment is shorter than the [`bound`].

pub(super) mod assignment;
pub(super) mod bound;
pub(super) mod exact;
pub(super) mod hottest;
pub(super) mod prices;
pub(super) mod refine;
pub(super) mod search;
pub(super) mod ticks;
