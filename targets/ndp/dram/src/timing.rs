//! Timing of a module's chips, in clocks of their memory bus.

use serde::Serialize;

/// Timing parameters of DDR5, all in clocks but for the two that say what a clock is.
///
/// Names are those of JESD79-5 without the `t`. If a parameter has a short and a long form, the short one
/// applies between bank groups of a rank and the long one within a bank group.
///
/// | field | `ddr5_4800an` | source | `trimoe` | source |
/// |---|---|---|---|---|
/// | `cl` | 34 | JESD79-5, speed bin DDR5-4800AN | 40 | TriMoE, Table 1 |
/// | `rcd` | 34 | speed bin 4800AN | 34 | the bin whose tRP Table 1 has |
/// | `rp` | 34 | speed bin 4800AN | 34 | Table 1 |
/// | `ras` | 77 | 32 ns | 77 | as JESD79-5 |
/// | `rc` | 111 | tRAS + tRP | 111 | tRAS + tRP |
/// | `cwl` | 32 | CL − 2 | 38 | CL − 2 |
/// | `bl` | 8 | BL16, two beats a clock | 8 | Table 1 |
/// | `ccd_s` | 8 | 8 nCK | 8 | Table 1 |
/// | `ccd_l` | 12 | max(8 nCK, 5 ns) | 12 | Table 1 |
/// | `ccd_s_wr` | 8 | 8 nCK | 8 | as JESD79-5 |
/// | `ccd_l_wr` | 48 | max(32 nCK, 20 ns) | 48 | as JESD79-5 |
/// | `rrd_s` | 8 | 8 nCK | 8 | Table 1 |
/// | `rrd_l` | 12 | max(8 nCK, 5 ns) | 12 | Table 1 |
/// | `faw` | 32 | max(32 nCK, 13.333 ns), pages of 1 KB | 32 | Table 1 |
/// | `wtr_s` | 6 | max(4 nCK, 2.5 ns) | 6 | as JESD79-5 |
/// | `wtr_l` | 24 | max(16 nCK, 10 ns) | 24 | as JESD79-5 |
/// | `wr` | 72 | 30 ns | 72 | Table 1 |
/// | `rtp` | 18 | max(12 nCK, 7.5 ns) | 18 | as JESD79-5 |
/// | `ppd` | 2 | 2 nCK | 2 | as JESD79-5 |
/// | `preamble` | 4 | tRPST 2 nCK + tWPRE 2 nCK, in whole clocks | 4 | as JESD79-5 |
/// | `cs` | 2 | one idle clock and one of preamble between ranks | 2 | as JESD79-5 |
/// | `rfc` | 986 | tRFC1 of 32 Gb chips, 410 ns | 986 | as JESD79-5 |
/// | `refi` | 9375 | 3.9 µs | 9375 | as JESD79-5 |
/// | `tck_ps` | 416 | tCK(avg) of DDR5-4800 | 416 | as JESD79-5 |
/// | `mhz` | 2400 | 4800 MT/s | 2400 | Table 1 |
///
/// Nanoseconds become clocks by division by 0.416 ns, rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Timing {
    /// Read command to its first data.
    pub cl: u32,
    /// Activate to read or write of the row.
    pub rcd: u32,
    /// Precharge to activate.
    pub rp: u32,
    /// Activate to precharge.
    pub ras: u32,
    /// Activate to activate of the same bank.
    pub rc: u32,
    /// Write command to its first data.
    pub cwl: u32,
    /// Clocks that the 64 bytes of one line are on the data bus.
    pub bl: u32,
    /// Read to read, other bank group.
    pub ccd_s: u32,
    /// Read to read, same bank group.
    pub ccd_l: u32,
    /// Write to write, other bank group.
    pub ccd_s_wr: u32,
    /// Write to write, same bank group: chips read, merge and write, as those of four data pins do.
    pub ccd_l_wr: u32,
    /// Activate to activate, other bank group.
    pub rrd_s: u32,
    /// Activate to activate, same bank group.
    pub rrd_l: u32,
    /// Window in which a rank takes four activates.
    pub faw: u32,
    /// Last data written to read, other bank group.
    pub wtr_s: u32,
    /// Last data written to read, same bank group.
    pub wtr_l: u32,
    /// Last data written to precharge.
    pub wr: u32,
    /// Read to precharge.
    pub rtp: u32,
    /// Precharge to precharge of a rank.
    pub ppd: u32,
    /// Idle clocks between data read and data written, of one rank: postamble and preamble.
    pub preamble: u32,
    /// Idle clocks of a data bus between two ranks.
    pub cs: u32,
    /// Duration of a refresh of all banks.
    pub rfc: u32,
    /// From one refresh of a rank to the next.
    pub refi: u32,
    /// The clock's period that nanoseconds of the standard are divided by, in picoseconds.
    pub tck_ps: u32,
    /// Clocks in a microsecond.
    pub mhz: u32,
}

/// The sets of timing that have a name, as the command line takes them.
pub const TIMINGS: [(&str, Timing); 2] =
    [("trimoe", Timing::trimoe()), ("ddr5-4800an", Timing::ddr5_4800an())];

/// tRFC1 in nanoseconds by the gigabits of a chip (JESD79-5, refresh parameters by density).
pub const RFC1_NS: [(u32, u32); 3] = [(8, 195), (16, 295), (32, 410)];

impl Timing {
    /// DDR5-4800AN by JESD79-5, chips of 32 Gb: what makes 128 GB of four ranks with chips of eight data
    /// pins.
    pub const fn ddr5_4800an() -> Self {
        Self {
            cl: 34,
            rcd: 34,
            rp: 34,
            ras: 77,
            rc: 111,
            cwl: 32,
            bl: 8,
            ccd_s: 8,
            ccd_l: 12,
            ccd_s_wr: 8,
            ccd_l_wr: 48,
            rrd_s: 8,
            rrd_l: 12,
            faw: 32,
            wtr_s: 6,
            wtr_l: 24,
            wr: 72,
            rtp: 18,
            ppd: 2,
            preamble: 4,
            cs: 2,
            rfc: 986,
            refi: 9375,
            tck_ps: 416,
            mhz: 2400,
        }
    }

    /// TriMoE's Table 1, and [`Timing::ddr5_4800an`] where it is silent.
    pub const fn trimoe() -> Self {
        Self { cl: 40, cwl: 38, ..Self::ddr5_4800an() }
    }

    /// The set of that name, one of [`TIMINGS`].
    pub fn named(name: &str) -> Option<Self> {
        TIMINGS.iter().find(|(n, _)| *n == name).map(|&(_, set)| set)
    }

    /// The same with chips of another density in gigabits, one of [`RFC1_NS`].
    pub fn with_density(self, gigabits: u32) -> Option<Self> {
        let &(_, ns) = RFC1_NS.iter().find(|&&(g, _)| g == gigabits)?;
        Some(Self { rfc: (ns * 1000).div_ceil(self.tck_ps), ..self })
    }

    /// Clocks as microseconds.
    pub fn microseconds(&self, clocks: u64) -> f64 {
        clocks as f64 / f64::from(self.mhz)
    }

    /// Peak rate of one data bus of 32 bits, in GB/s: a line of 64 bytes every `bl` clocks.
    pub fn bus_gbs(&self) -> f64 {
        64.0 * f64::from(self.mhz) / f64::from(self.bl) / 1000.0
    }
}
