//! Costs of a unit's matrix products and launches, from its table of measured times.
#![expect(
    clippy::cast_possible_truncation,
    reason = "a number of a device file becomes a whole one; floats saturate"
)]

use crate::{DeviceUnit, Figure};
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
