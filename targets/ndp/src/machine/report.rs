//! Times of an executed stream.

/// Time and work of one execution.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Report {
    /// From its begin to the end of its last instruction, in nanoseconds.
    pub ns: f64,
    /// Clocks of the unit, of 1 ns, in which each engine had an instruction, in the order of
    /// [`Engine::index`](moec_ndp_isa::Engine::index).
    pub busy: [f64; 4],
    /// Lines read from DRAM, of this DIMM or, by a relayout, of all.
    pub read: u64,
    /// Lines written to DRAM.
    pub written: u64,
    /// Lines that came or went over the DIMM-Link.
    pub linked: u64,
    /// Tiles of weights read, short ones included.
    pub tiles: u64,
    /// Floating-point operations of the GEMV unit: two for each weight and token.
    pub flops: u64,
}

impl Report {
    /// This, then `times` times the other.
    pub(crate) fn plus(self, other: Self, times: u64) -> Self {
        let add = |a: u64, b: u64| a.saturating_add(b.saturating_mul(times));
        let mut busy = self.busy;
        for (mine, other) in busy.iter_mut().zip(other.busy) {
            *mine += other * times as f64;
        }
        Self {
            ns: self.ns + other.ns * times as f64,
            busy,
            read: add(self.read, other.read),
            written: add(self.written, other.written),
            linked: add(self.linked, other.linked),
            tiles: add(self.tiles, other.tiles),
            flops: add(self.flops, other.flops),
        }
    }
}
