//! What the parts of an expert are called.

/// How a family names the parts of an expert that has tensors of its own.
#[derive(Clone, Copy, Debug)]
pub struct Parts {
    /// Gate projection.
    pub gate: &'static str,
    /// Up projection.
    pub up: &'static str,
    /// Down projection.
    pub down: &'static str,
}

/// As most families do.
pub const PROJ: Parts = Parts { gate: "gate_proj", up: "up_proj", down: "down_proj" };
/// As Mixtral does.
pub const W123: Parts = Parts { gate: "w1", up: "w3", down: "w2" };
