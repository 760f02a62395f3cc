//! Measurements of a build by running models on this machine.
//!
//! [`calibrate`] records a profile, [`host_build`] compiles a model for this machine in place of its target, [`quality`] says what a change
//! costs, by which [`mix`] and [`thresholds`] choose, [`tuner`] times kernels, [`verify`] compares a bundle with its reference, and
//! [`evaluate`] reads text with it.

pub mod calibrate;
pub mod evaluate;
pub mod host_build;
pub mod mix;
pub mod quality;
pub mod thresholds;
pub mod tuner;
pub mod verify;
