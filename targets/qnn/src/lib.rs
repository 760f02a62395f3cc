//! The QNN backend: static graphs for Qualcomm's Hexagon tensor processor (HTP).
//!
//! A [network](net) is one graph of fixed shapes. It begins with activations in f32 over quantised weights.
//! Running it on real rows shows the range of every activation ([`ranges`]), and [`quant`] turns these into
//! 16-bit codes. [`exec`] computes both forms, the quantised one in integers, and counts saturated numbers.
//! [`onnx`] writes a network as QDQ ONNX and reads it back, without a vendor library; [`compose`] hands it to
//! the library where that is installed. [`backend`] is the interface to the compiler.
//!
//! Invariant: this crate knows no model family.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod backend;
pub mod compose;
pub mod emit;
pub mod exec;
pub mod net;
pub mod onnx;
pub mod quant;
pub mod ranges;

pub use backend::Qnn;
