//! The clock of a DIMM's DRAM, as its own unit sees it over the private buses of the subchannel-ranks.
//!
//! The unit reads long runs of localized lines, so that all buses have the same load: one bus represents all
//! of them, with a rate and a latency. Both come from the cycle-level model ([`moec_dram`]); refresh is in
//! the rate.

use crate::allocation::DimmConfig;
use moec_dram::{Channel, Controller, Kind, Layout, Options, Timing, serve};
use moec_ndp_isa::LINE;

/// Refresh periods that are simulated before the rate is taken.
const WARMUP_INTERVALS: u64 = 2;
/// Refresh periods over which it is taken.
const WINDOW: u64 = 16;

/// Rates and latency of the private buses of a DIMM together, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bus {
    /// Time between two consecutive reads of lines.
    pub read_ns: f64,
    /// Time between two consecutive writes of lines.
    pub write_ns: f64,
    /// Time from a request to its line on an idle bus, including opening the row.
    pub latency_ns: f64,
}

impl Bus {
    /// A bus of `gbs` GB/s both ways, without latency.
    pub fn plain(gbs: f64) -> Self {
        let ns = f64::from(LINE) / gbs;
        Self { read_ns: ns, write_ns: ns, latency_ns: 0.0 }
    }

    /// The bus of DIMMs with this timing, simulated clock by clock for 18 refresh periods.
    pub fn new(dimm_config: &DimmConfig, timing: Timing, options: Options) -> Self {
        let channel = channel(dimm_config, timing, options);
        let ns = |clocks: f64| clocks * 1000.0 / f64::from(timing.mhz);
        let buses = f64::from(channel.private_buses());
        let line = |kind| ns(clocks_per_line(&channel, kind)) / buses;
        Self {
            read_ns: line(Kind::Read),
            write_ns: line(Kind::Write),
            latency_ns: ns(f64::from(timing.rcd + timing.cl + timing.bl)),
        }
    }

    /// TriMoE's (Table 1), 153.6 GB/s less refresh.
    pub fn trimoe() -> Self {
        Self::new(&DimmConfig::trimoe(), Timing::trimoe(), Options::default())
    }
}

/// A channel of such DIMMs.
pub fn channel(dimm_config: &DimmConfig, timing: Timing, options: Options) -> Channel {
    let DimmConfig { system, geometry: g } = dimm_config;
    let geometry = moec_dram::Geometry {
        channels: g.subchannels.saturating_mul(system.channels),
        ranks: g.ranks,
        groups: g.bank_groups,
        banks: g.banks,
        rows: g.rows,
        columns: g.lines,
    };
    Channel { timing, geometry, subchannels: g.subchannels, dimms: system.dimms, options }
}

/// Clocks from one line to the next of one private bus while all of a subchannel are busy.
fn clocks_per_line(channel: &Channel, kind: Kind) -> f64 {
    let period = u64::from(channel.timing.refi);
    let (start, end) = (WARMUP_INTERVALS * period, (WARMUP_INTERVALS + WINDOW) * period);
    let one = moec_dram::Geometry { ranks: 1, ..channel.geometry };
    let mut controller = Controller::with_private_ports(&channel.timing, channel.geometry, channel.options);
    let ranks = 0..channel.geometry.ranks;
    let host: moec_dram::Feed<'_> = Box::new(std::iter::empty());
    let units = ranks.map(|rank| -> moec_dram::Feed<'_> {
        Box::new(Layout::LOCALIZED.requests(kind, one, (rank, 0), u64::MAX))
    });
    let mut lines = 0_u64;
    serve(&mut controller, std::iter::once(host).chain(units).collect(), end, |sent| {
        lines += u64::from(sent.command.is_column() && sent.clock > start);
    });
    (end - start) as f64 * f64::from(channel.geometry.ranks) / lines.max(1) as f64
}

/// A bus at work: requests are served in the order of arrival.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traffic {
    bus: Bus,
    free: f64,
}

impl Traffic {
    pub(super) const fn new(bus: Bus) -> Self {
        Self { bus, free: 0.0 }
    }

    /// Time when the last of `lines` lines that are requested at `at` has been read.
    pub(super) fn read(&mut self, at: f64, lines: u64) -> f64 {
        self.take(at, lines as f64 * self.bus.read_ns)
    }

    /// Time when the last of `lines` lines that are sent at `at` has been written.
    pub(super) fn write(&mut self, at: f64, lines: u64) -> f64 {
        self.take(at, lines as f64 * self.bus.write_ns)
    }

    /// Time when the next request begins on the bus.
    pub(super) const fn free(&self) -> f64 {
        self.free
    }

    fn take(&mut self, at: f64, ns: f64) -> f64 {
        self.free = self.free.max(at) + ns;
        self.free + self.bus.latency_ns
    }
}
