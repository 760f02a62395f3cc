//! Numbers as bits: formats, rounding, and arithmetic that rounds once.
#![expect(clippy::cast_possible_truncation, reason = "bits are cut to the format that they are of")]

mod arithmetic;
mod format;

pub(crate) use arithmetic::{add_odd, div_odd, fma_odd, sqrt_odd};
pub(crate) use format::{BF16, E4M3, E5M2, F16, F32, F64, Format, Rounding, TF32};
