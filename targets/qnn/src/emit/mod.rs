//! Writes networks: gated feed-forward networks by clusters of neurons, groups of experts, attention, the
//! head.
//!
//! Activations are in f32 and weights are codes already; [`crate::quant::coded`] makes codes of the
//! activations when it is known how wide they are. Networks of one artifact have the same static tensors
//! under the same names, so that a unit keeps them once for all batch sizes.
#![expect(clippy::cast_possible_truncation, reason = "channels of one matrix")]

mod attention;
mod ffn;
mod glu;
mod head;
mod projection;

pub use attention::{Attention, Rope, Rotation, fitted, mask};
pub use ffn::{Cluster, Ffn, Group};
pub use head::Head;
pub use projection::Projection;
