//! Tests of whole networks.
#![allow(clippy::cast_possible_truncation, clippy::unwrap_used, reason = "a test fails by panicking")]

mod it {
    mod emitted;
    mod emulator;
    mod fixture;
    mod onnxruntime;
    mod reals;
    mod refused;
    mod saturation;
}
