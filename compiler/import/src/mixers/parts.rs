//! Names of the parts of an expert.

/// Names of the parts of experts in a family.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Gate projection of an expert with separate tensors.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
    /// Gate and up of all experts, and down of all experts, if each is one tensor.
    pub stacks: [&'static str; 2],
}

/// Names in most families.
pub const PROJ: Parts =
    Parts { gate: "gate_proj", up: "up_proj", down: "down_proj", stacks: ["gate_up_proj", "down_proj"] };
/// Names in Mixtral.
pub const W123: Parts = Parts { gate: "w1", up: "w3", down: "w2", ..PROJ };
/// Names in Granite.
pub const STACKS: Parts = Parts { stacks: ["input_linear.weight", "output_linear.weight"], ..PROJ };
