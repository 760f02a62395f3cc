//! Work of a layer other than its routed experts.

use super::error::StepsError;
use super::report::checked;

/// Work before the routed experts of a layer: attention, dense layers, shared experts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Before {
    /// Arithmetic on the GPU, or on the CPU without a GPU, in microseconds.
    pub calc_us: f64,
    /// Bytes that the GPU reads from the host's memory for it, such as a KV cache there.
    pub host_bytes: f64,
}

/// Rows of a step, and what of them crosses PCIe because experts are computed on the host.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rows {
    /// Bytes to the host, before the experts.
    pub to_host: f64,
    /// Bytes to the GPU, after them.
    pub to_gpu: f64,
    /// Whether they belong to a prompt.
    pub prompt: bool,
}

impl Before {
    pub(super) fn check(&self) -> Result<(), StepsError> {
        checked("the time of attention", self.calc_us)?;
        checked("bytes of the host's memory that attention reads", self.host_bytes).map(drop)
    }
}

impl Rows {
    pub(super) fn check(&self) -> Result<(), StepsError> {
        checked("bytes of rows to the host", self.to_host)?;
        checked("bytes of rows to the GPU", self.to_gpu).map(drop)
    }
}
