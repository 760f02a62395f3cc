//! Joules of a timeline: watts of each unit while it works, and of the memory all the time.
//!
//! NPUMoE's energy per token is that of computing and of moving data (§5.1). In its Table 7 the memory takes
//! 2.4 to 2.6 W in every system, whatever it computes. So here the memory draws power as long as the run
//! lasts.

use super::timeline::Timeline;
use super::units::Units;

/// Joules.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Energy {
    /// Energy of the CPU.
    pub cpu_j: f64,
    /// Energy of the neural processing unit.
    pub npu_j: f64,
    /// Energy of the memory.
    pub memory_j: f64,
}

impl Energy {
    /// Energy of a timeline on a device, whose CPU works for `cpu_us` microseconds. A unit without power in
    /// the device file counts as 0.
    pub fn of(timeline: &Timeline, cpu_us: f64, units: &Units<'_>) -> Self {
        let watts = |f: &Option<moec_device::Figure>| f.as_ref().map_or(0.0, |f| f.value);
        let memory: f64 = units.device.memories.iter().map(|m| watts(&m.busy_w)).sum();
        Self {
            cpu_j: cpu_us * 1e-6 * watts(&units.cpu.busy_w),
            npu_j: timeline.working_us(&units.npu_queues(), None) * 1e-6 * watts(&units.npu.busy_w),
            memory_j: timeline.wall_us * 1e-6 * memory,
        }
    }

    /// Sum of all.
    pub fn total_j(&self) -> f64 {
        self.cpu_j + self.npu_j + self.memory_j
    }
}
