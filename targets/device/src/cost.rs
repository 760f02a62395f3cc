//! Costs of a unit's matrix products and launches, from its table of measured times.
#![expect(
    clippy::cast_possible_truncation,
    reason = "a number of a device file becomes a whole one; floats saturate"
)]

use crate::{Bandwidth, DeviceUnit, Figure, Memory};
use serde::{Deserialize, Serialize};

/// A measured time of matrix products: `rows` rows times matrices of `weights` numbers in all.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MatmulTime {
    /// Rows of the input.
    pub rows: u32,
    /// Number of weights that they are multiplied by.
    pub weights: u64,
    /// Milliseconds, without launching and waiting.
    pub ms: f64,
    /// Source.
    pub source: String,
}

/// Microseconds that contexts may take to load at the start of a program: what reading the weights of a model
/// that fills a phone's memory takes, 16 GB at 4 GB/s.
const LOADING_US: f64 = 4e6;

impl Memory {
    /// Row of the table of random reads for blocks of this size: the largest block that is no larger, else the
    /// first; `None` where the file has no table. A second number is by how much reads within `range` bytes are
    /// faster: the rate of the smallest measured range that holds them, over that of the table for its blocks.
    pub fn random_reads(&self, block_bytes: u64, range: u64) -> Option<(&Bandwidth, f64)> {
        let row = |bytes: u64| {
            let fits = self.bandwidth.iter().rfind(|b| b.block_bytes <= bytes);
            fits.or(self.bandwidth.first()).filter(|b| b.rate() > 0.0)
        };
        let near = self.ranges.iter().find(|r| r.range_bytes >= range);
        let gain = near.and_then(|r| Some(r.gb_per_s / row(r.block_bytes)?.rate()));
        Some((row(block_bytes)?, gain.unwrap_or(1.0)))
    }
}

impl DeviceUnit {
    /// Microseconds of a product of `rows` rows with matrices of `weights` numbers; `None` where the file has
    /// no table. 0 for no rows.
    ///
    /// The time per number is interpolated between the entries of the table. Below the first entry the line
    /// between the first two continues, since the time at no rows is the reading of the weights. Past the
    /// last one the time grows with the rows.
    pub fn matmul_us(&self, rows: f64, weights: f64) -> Option<f64> {
        let per_weight = |t: &MatmulTime| (f64::from(t.rows), t.ms * 1e3 / t.weights as f64);
        let points: Vec<(f64, f64)> = self.matmul.iter().map(per_weight).collect();
        let (&first, &last) = points.first().zip(points.last())?;
        if rows <= 0.0 {
            return Some(0.0);
        }
        let line = |a: (f64, f64), b: (f64, f64)| a.1 + (b.1 - a.1) * (rows - a.0) / (b.0 - a.0);
        let time = if rows >= last.0 {
            last.1 * rows / last.0
        } else if rows < first.0 {
            points.get(1).map_or(first.1, |&second| line(first, second)).max(0.0)
        } else {
            points.windows(2).find(|w| rows <= w[1].0).map_or(last.1, |w| line(w[0], w[1]))
        };
        Some(time * weights)
    }

    /// Microseconds to launch a graph on the unit and to wait for it; 0 where the file states neither.
    pub fn launch_us(&self) -> f64 {
        let of = |f: &Option<Figure>| f.as_ref().map_or(0.0, |f| f.value);
        of(&self.dispatch_cost_us) + of(&self.sync_cost_us)
    }

    /// Static graphs of one layer that the unit runs at a time; one where the file states no number.
    pub fn queues(&self) -> u32 {
        self.queues.as_ref().map_or(1, |f| (f.value as u32).max(1))
    }

    /// Time of `graphs` equal graphs one after the other, over their time in parallel. It is interpolated
    /// between the file's rates, and past the last it stays; 1 for one graph, or without rates.
    pub fn parallel_speedup(&self, graphs: u32) -> f64 {
        let mut before = (1.0, 1.0);
        for rate in &self.parallel {
            let (at, n) = ((f64::from(rate.graphs), rate.speedup), f64::from(graphs));
            if n <= at.0 {
                return before.1 + (at.1 - before.1) * (n - before.0).max(0.0) / (at.0 - before.0);
            }
            before = at;
        }
        before.1
    }

    /// Microseconds that each of `graphs` equal graphs computes, launching and waiting excluded, if `queues` of
    /// them run at a time and one alone takes `us`. All of them together take as long as the file's rate says;
    /// the CPU launches one after the other.
    pub fn parallel_us(&self, queues: u32, graphs: u32, us: f64) -> f64 {
        let (n, at_once) = (f64::from(graphs.max(1)), f64::from(queues.clamp(1, graphs.max(1))));
        let of = |f: &Option<Figure>| f.as_ref().map_or(0.0, |f| f.value);
        let dispatch = of(&self.dispatch_cost_us);
        let all = n * (self.launch_us() + us) / self.parallel_speedup(at_once as u32);
        let rounds = (n / at_once).ceil();
        ((all - (at_once - 1.0) * dispatch) / rounds - self.launch_us()).max(us)
    }

    /// 10⁹ bytes per second that programs read on the unit, where the file says.
    pub fn bandwidth(&self) -> Option<f64> {
        let share = self.achieved_bandwidth.as_ref().map_or(1.0, |f| f.value);
        self.bandwidth_gb_per_s.as_ref().map(|f| f.value * share)
    }

    /// Most contexts that are loaded within four seconds, one at least; no limit where the file states no
    /// cost.
    pub fn most_contexts(&self) -> usize {
        let cost = self.context_cost_us.as_ref().filter(|f| f.value > 0.0);
        cost.map_or(usize::MAX, |f| ((LOADING_US / f.value) as usize).max(1))
    }

    /// Most bytes of weights in one graph, where there is a limit.
    pub fn graph_limit(&self) -> Option<u64> {
        self.max_graph_bytes.as_ref().map(|f| f.value as u64)
    }
}
