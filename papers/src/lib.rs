//! Published evaluations again, on moec's simulator, and what they leave open.
//!
//! [`npumoe`] is the evaluation of NPUMoE beside what is simulated; [`capacities`] compares settings of `[experts]`, NPUMoE's
//! among them. Both need models that are not at hand: [`shapes`] has their published shapes, [`recorded`] draws loads of
//! their experts.

pub mod capacities;
pub mod npumoe;
pub mod recorded;
pub mod shapes;
