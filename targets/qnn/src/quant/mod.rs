//! From a network in f32 to one in codes: activations of 16 bits, weights of 8 or 4 bits with a scale for
//! each channel.
#![expect(clippy::cast_possible_truncation, reason = "reals are rounded, codes are those of their type")]

mod activations;
mod reals;
mod weights;

pub use activations::{Range, Ranges, coded};
pub use reals::reals;
pub use weights::{Bits, Matrix, widths};
