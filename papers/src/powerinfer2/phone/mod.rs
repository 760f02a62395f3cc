//! A phone in virtual time: cores, an NPU and a GPU that share one memory, UFS behind one queue of commands,
//! and the power of each. It does not depend on the evaluation.
//!
//! Units are bytes, seconds, multiply-adds and watts, rates are per second.

mod memory;
mod ufs;

pub use memory::Memory;
pub use ufs::{Cluster, Ufs};

/// Cores of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cores {
    /// Kind.
    pub kind: Cluster,
    /// Number.
    pub count: usize,
    /// Their clock.
    pub ghz: f64,
}

/// Watts while something is busy, everything else of the phone included.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Power {
    /// The CPU computes.
    pub cpu: f64,
    /// The NPU computes.
    pub npu: f64,
    /// Both compute.
    pub both: f64,
}

/// A phone.
#[derive(Clone, Debug)]
pub struct Phone {
    /// Name.
    pub name: &'static str,
    /// Cores, the fastest kind first. Those of the last kind compute nothing; they may read.
    pub cores: Vec<Cores>,
    /// Shared memory.
    pub memory: Memory,
    /// Storage.
    pub ufs: Ufs,
    /// Multiply-adds of the cores that compute.
    pub cpu_macs: f64,
    /// Multiply-adds of the NPU.
    pub npu_macs: f64,
    /// Multiply-adds of the GPU.
    pub gpu_macs: f64,
    /// Part of a graphics kernel's time in which it computes.
    pub gpu_busy: f64,
    /// Memory for an application, in bytes.
    pub available: f64,
    /// Power.
    pub power: Power,
}

impl Phone {
    /// Parts of the cores in the rate of all that compute, of one each: `without` is a core that reads UFS
    /// instead.
    pub fn workers(&self, without: Option<Cluster>) -> Vec<f64> {
        let computing = &self.cores[..self.cores.len().saturating_sub(1).max(1)];
        let all: f64 = computing.iter().map(|c| c.ghz * c.count as f64).sum();
        let each = computing.iter().flat_map(|c| {
            let count = c.count - usize::from(without == Some(c.kind)).min(c.count);
            std::iter::repeat_n(c.ghz / all, count)
        });
        each.collect()
    }

    /// Bytes from memory that take the CPU as long as so many multiply-adds.
    pub fn cpu_bytes_of(&self, macs: f64) -> f64 {
        macs * self.memory.cpu / self.cpu_macs
    }

    /// The same of the NPU.
    pub fn npu_bytes_of(&self, macs: f64) -> f64 {
        macs * self.memory.npu / self.npu_macs
    }
}
