//! Times of streams of many lines: an expert read by the unit of its module, or by the host.
#![expect(clippy::cast_possible_truncation, reason = "a time becomes the clock after it")]

use crate::serve::{Feed, Served, serve};
use crate::{Clock, Controller, Geometry, HOST, Kind, Layout, Options, Timing};

/// Refresh periods that are simulated before the rate of a long stream is taken.
const WARMUP_INTERVALS: Clock = 2;
/// Refresh periods over which the rate is measured, if one side reads alone.
const WINDOW: Clock = 16;
/// The same if both sides read, since conflicts of rows change slowly.
const LONG_WINDOW: Clock = 96;

/// Placement of an expert's lines (TriMoE §4.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// In all DIMMs of the channel, as the host likes it ([`Layout::STRIPED`]).
    Striped,
    /// In one module, as its unit needs it ([`Layout::LOCALIZED`]).
    Localized,
}

/// Reader and source of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Path {
    /// The unit of a module reads what is localized there, over the private buses.
    Ndp,
    /// The host reads over the channel.
    Host(Placement),
}

/// One channel of the host: DIMMs whose subchannels are the same two buses. In addition each of their ranks
/// has a private bus to the unit of its module.
///
/// Banks, bank groups and ranks do not depend on the port: tCCD, tRRD, tFAW, tRCD and the like apply to all
/// commands of a rank, and refresh stops both. The host's data bus has bursts and changes of rank of the
/// host's own commands only, a private bus those of its rank. TriMoE does not specify the priority. Here the
/// host has it, at every clock, and each side is first-ready, first-come-first-served.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    /// The chips.
    pub timing: Timing,
    /// One rank of one subchannel.
    pub geometry: Geometry,
    /// Subchannels of a module.
    pub subchannels: u32,
    /// DIMMs on the channel.
    pub dimms: u32,
    /// Queues and refresh.
    pub options: Options,
}

/// Clocks that two streams take which start together, and each on its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Together {
    /// The host's stream.
    pub host: Clock,
    /// The streams of the units.
    pub ndp: Clock,
    /// The host's stream alone.
    pub host_alone: Clock,
    /// The streams of the units alone.
    pub ndp_alone: Clock,
}

impl Together {
    /// Factor by which the host is slower.
    pub fn host_slowdown(&self) -> f64 {
        self.host as f64 / self.host_alone as f64
    }

    /// Factor by which the units are slower.
    pub fn ndp_slowdown(&self) -> f64 {
        self.ndp as f64 / self.ndp_alone as f64
    }
}

/// Load of one subchannel: lines that the host reads, and lines that the units read, of each module.
#[derive(Clone, Copy, Debug)]
struct Load {
    placement: Placement,
    host: u64,
    ndp: u64,
    /// DIMMs whose units read.
    busy: u32,
}

/// Both sides of a subchannel: the host, and the unit of the first module, which no other is slower than.
type Sides<T> = [T; 2];

/// Result of one run of a subchannel.
struct Run {
    /// Time when each side had ended, if it had.
    finished: Sides<Option<Clock>>,
    /// Lines that each side had got at the end.
    lines: Sides<u64>,
    /// Lines at a clock, over the window.
    rate: Sides<f64>,
    end: Clock,
}

impl Channel {
    /// TriMoE's: two DIMMs of 128 GB, each two subchannels of four ranks (Table 1).
    pub fn trimoe(timing: Timing, options: Options) -> Self {
        // Chips of 32 Gb with eight data pins, whose rows have 4 KB in a rank.
        let geometry = Geometry { columns: 64, ..Geometry::trimoe() };
        Self { timing, geometry, subchannels: 2, dimms: 2, options }
    }

    /// Private buses of a module.
    pub fn private_buses(&self) -> u32 {
        self.subchannels * self.geometry.ranks
    }

    /// Clocks until the last of `lines` lines is there, from an idle channel.
    ///
    /// Streams of up to 18 refresh periods are simulated to their end. Longer ones go on at the rate of the
    /// last 16 of those; a test holds that to be within half a percent.
    pub fn stream_cycles(&self, path: Path, lines: u64) -> Clock {
        let load = match path {
            Path::Ndp => Load { placement: Placement::Localized, host: 0, ndp: lines, busy: 1 },
            Path::Host(placement) => Load { placement, host: lines, ndp: 0, busy: 0 },
        };
        let [host, ndp] = self.ends(load);
        host.max(ndp)
    }

    /// The host reads `host` lines while the units of `busy` DIMMs read `ndp` lines each out of their own.
    ///
    /// The two are in different rows of the same banks. When one side has ended the other goes on alone.
    /// Streams that take more than 98 refresh periods go on at the rate of the last 96. A test checks that
    /// this is within five percent, since conflicts of rows in a bank recur as long as a stream lasts. Ports
    /// are simulated one by one here, which takes a good part of a second: keep the result.
    pub fn together(&self, placement: Placement, host: u64, ndp: u64, busy: u32) -> Together {
        let load = Load { placement, host, ndp, busy: busy.min(self.dimms) };
        let [host, ndp] = self.ends(load);
        let [host_alone, _] = self.ends(Load { ndp: 0, ..load });
        let [_, ndp_alone] = self.ends(Load { host: 0, ..load });
        Together { host, ndp, host_alone, ndp_alone }
    }

    /// GB/s of a stream that takes this many clocks.
    pub fn rate_gbs(&self, lines: u64, clocks: Clock) -> f64 {
        64.0 * lines as f64 / self.timing.microseconds(clocks) / 1000.0
    }

    /// End of each side: 0 for one without lines, [`Clock::MAX`] for one that gets none.
    fn ends(&self, load: Load) -> Sides<Clock> {
        let run = self.run(load);
        let totals = self.lines_per_side(load);
        let mut ends = run.finished.map(|clock| clock.unwrap_or(Clock::MAX));
        let mut left = [0, 1].map(|side| (totals[side] - run.lines[side]) as f64);
        let mut rate = run.rate;
        // One side has ended within the window: what it did to the other's rate is over.
        if totals.iter().all(|&lines| lines > 0) && run.finished != [None, None] {
            rate = self.rates_alone(load, left);
        }
        let mut now = run.end as f64;
        while let Some(side) = first_to_end(left, rate) {
            let clocks = left[side] / rate[side];
            now += clocks;
            ends[side] = now.ceil() as Clock + self.latency();
            let other = 1 - side;
            left[other] -= (clocks * rate[other]).min(left[other]);
            left[side] = 0.0;
            if left[other] > 0.0 {
                rate = self.rates_alone(load, left);
            }
        }
        ends
    }

    /// The rate of the one side that has lines left.
    fn rates_alone(&self, load: Load, left: Sides<f64>) -> Sides<f64> {
        match left {
            [host, ndp] if host > 0.0 && ndp <= 0.0 => self.run(Load { ndp: 0, ..load }).rate,
            [host, ndp] if host <= 0.0 && ndp > 0.0 => self.run(Load { host: 0, ..load }).rate,
            _ => [0.0; 2],
        }
    }

    fn latency(&self) -> Clock {
        Clock::from(self.timing.cl + self.timing.bl)
    }

    /// Lines that each side reads in the first subchannel, which has the most of them.
    fn lines_per_side(&self, load: Load) -> Sides<u64> {
        let subchannels = u64::from(self.subchannels);
        if load.busy == 0 {
            return [load.host.div_ceil(subchannels), 0];
        }
        let ndp = (0..self.geometry.ranks).map(|rank| self.private_lines(load, rank)).sum();
        [load.host.div_ceil(subchannels), ndp]
    }

    /// Lines that one private bus of the first subchannel carries: of every eight, ranks and subchannels take
    /// turns.
    fn private_lines(&self, load: Load, rank: u32) -> u64 {
        let buses = u64::from(self.private_buses());
        let bus = u64::from(rank * self.subchannels);
        (load.ndp + buses - 1 - bus.min(buses - 1)) / buses
    }

    /// Simulates the first subchannel until all is read or the window is over.
    fn run(&self, load: Load) -> Run {
        let start = WARMUP_INTERVALS * Clock::from(self.timing.refi);
        let window = if load.host > 0 && load.ndp > 0 { LONG_WINDOW } else { WINDOW };
        let until = (WARMUP_INTERVALS + window) * Clock::from(self.timing.refi);
        let ranks = self.geometry.ranks;
        let all = Geometry { ranks: ranks * self.dimms, ..self.geometry };
        let mut controller = Controller::with_private_ports(&self.timing, all, self.options);
        let half = self.geometry.rows / 2;
        let totals = self.lines_per_side(load);
        let host: Feed<'_> = match load.placement {
            Placement::Striped => Box::new(Layout::STRIPED.requests(Kind::Read, all, (0, half), totals[0])),
            Placement::Localized => {
                Box::new(Layout::LOCALIZED.requests(Kind::Read, self.geometry, (0, half), totals[0]))
            }
        };
        let one = Geometry { ranks: 1, ..self.geometry };
        let private = (0..load.busy * ranks).map(|port| -> Feed<'_> {
            let lines = self.private_lines(load, port % ranks);
            Box::new(Layout::LOCALIZED.requests(Kind::Read, one, (port, 0), lines))
        });
        let feeds = std::iter::once(host).chain(private).collect();
        let mut before = [0_u64; 2];
        let mut after = [0_u64; 2];
        let served = serve(&mut controller, feeds, until, |issued| {
            if issued.command.is_column() {
                let side = match issued.port {
                    HOST => 0,
                    port if port <= ranks as usize => 1,
                    _ => return,
                };
                let count = if issued.clock <= start { &mut before } else { &mut after };
                count[side] += 1;
            }
        });
        let lines = [0, 1].map(|side| before[side] + after[side]);
        let end = |served: &[Served]| served.iter().map(|s| s.finished).max().unwrap_or(0);
        let (host, units) = served.split_at(1);
        let first = &units[..units.len().min(ranks as usize)];
        let finished = [end(host), end(first)];
        Run {
            finished: [0, 1].map(|side| (lines[side] == totals[side]).then_some(finished[side])),
            lines,
            rate: after.map(|n| n as f64 / (until - start) as f64),
            end: until,
        }
    }
}

/// The side with lines left that has the fewest clocks to go.
fn first_to_end(left: Sides<f64>, rate: Sides<f64>) -> Option<usize> {
    let clocks = |side: usize| left[side] / rate[side];
    let open = (0..2).filter(|&side| left[side] > 0.0 && rate[side] > 0.0);
    open.min_by(|&a, &b| clocks(a).total_cmp(&clocks(b)))
}
