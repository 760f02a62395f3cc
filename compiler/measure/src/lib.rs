//! Measurements of a build by running models on this machine.
//!
//! [`calibrate`] records a profile, and [`host_build`] compiles a model for this machine in place of its
//! target. [`quality`] measures what a change costs; [`mix`] and [`thresholds`] choose by that. [`gamma`]
//! chooses γ of big-little decoding by a profile, and [`chunk`] the tokens of a prefill step by costs; [`hosts`] divides a model between hosts by costs. [`tuner`] times schedules of kernels, [`kernel_times`] the kernels of a plan; [`verify`] compares a bundle with
//! its reference, and [`evaluate`] measures a bundle on text. The hosts of a [`job`] divide texts. [`npu`] measures an NPU by static graphs.

pub mod calibrate;
pub mod chunk;
pub mod evaluate;
pub mod gamma;
pub mod host_build;
pub mod hosts;
pub mod job;
pub mod kernel_times;
pub mod mix;
pub mod npu;
pub mod quality;
pub mod thresholds;
pub mod tuner;
pub mod verify;
