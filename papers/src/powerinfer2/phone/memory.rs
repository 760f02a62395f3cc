//! Memory that CPU and NPU share.

/// Rates at which units read one memory, in bytes per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Memory {
    /// All computing cores, alone.
    pub cpu: f64,
    /// The NPU, alone.
    pub npu: f64,
    /// Both at once, together.
    pub both: f64,
}

impl Memory {
    /// Rates of the cores and of the NPU where cores worth `part` of all compute, and the unit does or does
    /// not. If they request more than both get, each gets its share of the request. Of each byte that cores
    /// get through they read `density` from memory: less than 1 where they compute for longer than they read.
    pub fn rates(&self, part: f64, density: f64, npu: bool) -> (f64, f64) {
        let (cpu, npu) = (self.cpu * part, if npu { self.npu } else { 0.0 });
        let demand = cpu * density + npu;
        let given = if demand > self.both { self.both / demand } else { 1.0 };
        (cpu * given, npu * given)
    }

    /// Seconds until work that can be split at will is done: bytes that the cores would read for all of it,
    /// bytes that the unit would.
    pub fn split(&self, part: f64, density: f64, cpu_bytes: f64, npu_bytes: f64) -> f64 {
        let (cpu, npu) = self.rates(part, density, true);
        1.0 / (cpu / cpu_bytes + npu / npu_bytes)
    }

    /// The same memory with all rates times a number.
    #[must_use]
    pub fn scaled(&self, times: f64) -> Self {
        Self { cpu: self.cpu * times, npu: self.npu * times, both: self.both * times }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Memory = Memory { cpu: 43.9e9, npu: 56.0e9, both: 59.6e9 };

    #[test]
    fn bandwidth_is_shared_by_both_or_limited_for_one() {
        assert_eq!(MEMORY.rates(1.0, 1.0, false), (43.9e9, 0.0));
        assert_eq!(MEMORY.rates(0.0, 1.0, true), (0.0, 56.0e9));
        let (cpu, npu) = MEMORY.rates(1.0, 1.0, true);
        assert!((cpu + npu - 59.6e9).abs() < 1.0 && cpu < npu);
        // Cores that request little bandwidth get all of it.
        assert_eq!(MEMORY.rates(0.05, 1.0, true), (43.9e9 * 0.05, 56.0e9));
    }

    #[test]
    fn split_work_runs_at_the_combined_rate() {
        assert!((MEMORY.split(1.0, 1.0, 59.6e9, 59.6e9) - 1.0).abs() < 1e-9);
        // If the cores need more bytes for the same work, they get a smaller share.
        let slower = MEMORY.split(1.0, 1.0, 2.0 * 59.6e9, 59.6e9);
        assert!(slower > 1.0 && slower < 59.6e9 / MEMORY.rates(1.0, 1.0, true).1);
        // Cores that compute for longer than they read leave more to the unit.
        assert!(MEMORY.rates(1.0, 0.2, true).1 > MEMORY.rates(1.0, 1.0, true).1);
        assert_eq!(MEMORY.rates(1.0, 0.05, true), (43.9e9, 56.0e9));
    }
}
