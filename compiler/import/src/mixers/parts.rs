//! Names of the parts of an expert.

/// Names of the parts of experts in a family.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Gate projection, of an expert that has tensors of its own.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Gate and up of all experts, and down of all, where each is one tensor.
    pub stacks: [&'static str; 2],
}

/// As most families do.
pub const PROJ: Parts =
    Parts { gate: "gate_proj", up: "up_proj", down: "down_proj", stacks: ["gate_up_proj", "down_proj"] };
/// As Mixtral does.
pub const W123: Parts = Parts { gate: "w1", up: "w3", down: "w2", ..PROJ };
/// As Granite does.
pub const STACKS: Parts = Parts { stacks: ["input_linear.weight", "output_linear.weight"], ..PROJ };
