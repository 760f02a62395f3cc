//! Tests of whole networks.
#![allow(clippy::unwrap_used, reason = "tests")]

mod it {
    mod emitted;
    mod fixture;
    mod onnxruntime;
    mod saturation;
}
