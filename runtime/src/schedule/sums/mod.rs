//! A step as sums: each unit computes its experts one after the other, and reads of one memory add up
//! (TriMoE, equations 5 to 7).
//!
//! Costs become whole [`ticks`] in [`prices`]; an [`assignment`] updates the times of all units move by move.
//! [`refine`] is the paper's solver, [`search`] leaves the plateaus where that stalls, and [`hottest`] is a
//! cut by load. [`exact`] tries all assignments of few experts. No assignment is shorter than the [`bound`].

pub(super) mod assignment;
pub(super) mod bound;
pub(super) mod exact;
pub(super) mod hottest;
pub(super) mod prices;
pub(super) mod refine;
pub(super) mod search;
pub(super) mod ticks;
