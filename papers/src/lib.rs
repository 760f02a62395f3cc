//! Published evaluations, reproduced on moec's simulator.
//!
//! [`npumoe`] is the evaluation of NPUMoE, [`trimoe`] that of TriMoE, [`powerinfer2`] that of PowerInfer-2,
//! [`hybrimoe`] that of HybriMoE, [`mobile`] that of MoBiLE; [`capacities`] compares settings of `[experts]`,
//! NPUMoE's among them, and [`outliers`] shares of channels of 8 bits; [`mechanisms`] lists the papers'
//! mechanisms and their state in moec. The models are not available here: [`shapes`] has their published
//! shapes, [`recorded`] samples loads of their experts.
#![allow(clippy::cast_possible_truncation, reason = "figures of published evaluations")]

pub mod capacities;
pub mod chart;
pub mod claim;
pub mod hybrimoe;
pub mod mechanisms;
pub mod mobile;
pub mod npumoe;
pub mod outliers;
pub mod powerinfer2;
pub mod printed;
pub mod random;
pub mod recorded;
pub mod shapes;
pub mod trimoe;
