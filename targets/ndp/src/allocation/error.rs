//! Errors of allocations.

use super::{DimmConfig, DramLayout, Expert};
use crate::image::{ImageError, Shape};

/// Reason that an allocation fails.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum AllocationError {
    /// A machine without lines, or with more than can be numbered.
    #[error("a machine of {0:?} has no DRAM, or more than can be addressed")]
    Dimms(DimmConfig),
    /// Boxes that leave no room.
    #[error("boxes of {slots} slots need {sets} row sets, but a DIMM has {rows}: use fewer slots")]
    Boxes {
        /// Slots.
        slots: u32,
        /// Row sets that they take.
        sets: u64,
        /// Row sets of a DIMM.
        rows: u32,
    },
    /// An expert that is larger than what a DIMM has for experts.
    #[error("an expert of {} by {} takes {bytes} bytes, but a DIMM has {room}", .shape.hidden, .shape.inner)]
    Expert {
        /// The expert.
        shape: Shape,
        /// Its bytes, in whole row sets.
        bytes: u64,
        /// Bytes of a DIMM after its boxes.
        room: u64,
    },
    /// No room is left.
    #[error(
        "expert {} of layer {} takes {sets} row sets, and {layout} has no {sets} in a row left ({free} of {rows} are free): \
         move this or another expert to another DIMM",
        .expert.number, .expert.layer
    )]
    Full {
        /// The expert.
        expert: Expert,
        /// Row sets that the expert needs.
        sets: u32,
        /// Requested layout.
        layout: DramLayout,
        /// Free row sets; for a striped layout, common to all DIMMs.
        free: u32,
        /// Row sets of a DIMM.
        rows: u32,
    },
    /// A DIMM that is not there.
    #[error("there is no DIMM {dimm}: the machine has {count}, from 0")]
    NoDimm {
        /// Requested DIMM.
        dimm: u32,
        /// DIMMs.
        count: u32,
    },
    /// An expert that has its place already, or none.
    #[error("expert {} of layer {} {what}", .expert.number, .expert.layer)]
    State {
        /// The expert.
        expert: Expert,
        /// The fault.
        what: &'static str,
    },
    /// A shape without an image.
    #[error(transparent)]
    Image(#[from] ImageError),
}
