//! Planner of the number of hot neurons of a layer at a batch size: the share that makes the layer fastest
//! (PowerInfer-2, §4.1.3, §5).
//!
//! Neurons have an order, in which they become hot. The first `h` are hot: the unit for
//! dense work computes all of them. The others are cold: the CPU computes the active ones, and reads those
//! that the cache lacks meanwhile (§4.3). Both units work in parallel, after attention, during which missing
//! hot neurons are read:
//!
//! ```text
//! time(h, step) = attention + max(dense(h), predict(h) + sparse · active(h, step),
//!                                 read · missing(h, step), bytes(h, step) / memory rate)
//! bytes(h, step) = bytes of the hot, the active cold, and the gates of the other cold neurons
//! time(h) = its mean over the steps of a trace
//! hot bytes that are missing(h) ≤ attention · disk rate                                  (§5)
//! ```
//!
//! A [`Recorded`] trace gives the requests of a step, and the part that a cache lacks: neighbouring steps
//! have similar requests, which frequencies do not show. If memory holds all neurons, frequencies suffice.
//!
//! There are at most as many candidates as clusters. Each has a lower bound: its time without reads.
//! Candidates are replayed by ascending bound until no bound is below the best time. The result equals that
//! of replaying all.

use super::error::NeuronError;
use super::recorded::{Demand, Recorded};

/// Costs of a layer at one batch size. Times are in seconds, rates in bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Tables {
    /// Frequency with which each neuron is active for at least one token of the batch, 0 to 1, in the order in
    /// which neurons become hot.
    pub active: Vec<f64>,
    /// Neurons of a cluster: the step of the search.
    pub cluster: usize,
    /// Time of the dense unit by number of neurons: linear between two rows, and extrapolated from the
    /// nearest two before the first and past the last row. A single row is a rate.
    pub dense: Vec<(usize, f64)>,
    /// The CPU's time for one active neuron, all workers together.
    pub sparse: f64,
    /// The CPU's time to predict one cold neuron, active or not, or to compute its gate where nothing predicts
    /// it, all workers together.
    pub predict: f64,
    /// Part of a neuron's bytes that is read of a cold one that is not active: its gate, where nothing
    /// predicts it.
    pub gate: f64,
    /// Time of attention, in which hot neurons are read.
    pub attention: f64,
    /// Bytes of a neuron.
    pub bytes: f64,
    /// Bytes per second of long reads; infinite for no limit.
    pub disk: f64,
    /// Time of the reads of one cold neuron.
    pub read: f64,
    /// Bytes per second of memory, both units together; infinite for no limit.
    pub memory: f64,
    /// Neurons of this layer that memory holds; the hot ones come first.
    pub held: usize,
}

/// Decision for a batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Hot neurons, a whole number of clusters or all.
    pub hot: usize,
    /// Time of the layer.
    pub seconds: f64,
    /// Time of the dense unit.
    pub dense: f64,
    /// Mean time of the CPU.
    pub sparse: f64,
    /// Mean time of reads of cold neurons.
    pub reads: f64,
}

/// Largest number of neurons of a layer.
const MOST: usize = 1 << 24;
/// Largest number of clusters of a layer.
const MOST_CLUSTERS: usize = 1 << 12;

/// The share of hot neurons with the least time, the smallest of equals.
///
/// # Errors
/// [`NeuronError::Plan`] for invalid tables: no neurons, too many or too small clusters, frequencies that are
/// not shares, negative or NaN times or rates. Also if memory does not hold all neurons, reads
/// take time, and nothing is recorded. [`NeuronError::Trace`] for a trace of another layer.
pub fn hot_share(tables: &Tables, recorded: Option<&Recorded<'_>>) -> Result<Share, NeuronError> {
    check(tables, recorded)?;
    let n = tables.active.len();
    let candidates = (0..n).step_by(tables.cluster).chain([n]).filter(|&hot| hides(tables, hot));
    let bound = |hot| (evaluate(tables, hot, &demand(tables, recorded, hot)).seconds, hot);
    let mut bounds: Vec<(f64, usize)> = candidates.map(bound).collect();
    bounds.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let mut best: Option<Share> = None;
    for (bound, hot) in bounds {
        if best.is_some_and(|b| bound > b.seconds) {
            break;
        }
        let share = replayed(tables, recorded, hot)?;
        let better = |b: Share| (share.seconds, share.hot) < (b.seconds, b.hot);
        if best.is_none_or(better) {
            best = Some(share);
        }
    }
    // Without hot neurons there are no reads to hide.
    best.ok_or_else(|| NeuronError::Plan("no share hides its reads behind attention".to_owned()))
}

/// The time that a share takes, whether or not its reads hide behind attention.
///
/// # Errors
/// As [`hot_share`], and for hot neurons that are neither a whole number of clusters nor all.
pub fn time_of(tables: &Tables, recorded: Option<&Recorded<'_>>, hot: usize) -> Result<Share, NeuronError> {
    check(tables, recorded)?;
    let n = tables.active.len();
    if hot > n || (hot != n && !hot.is_multiple_of(tables.cluster)) {
        return Err(NeuronError::Plan(format!("{hot} of {n} neurons are not a whole number of clusters")));
    }
    replayed(tables, recorded, hot)
}

/// Whether missing hot neurons are read while attention computes (§5).
pub fn hides(tables: &Tables, hot: usize) -> bool {
    let missing = hot.saturating_sub(tables.held) as f64 * tables.bytes;
    // Zero time at an infinite rate is NaN.
    missing == 0.0 || missing <= tables.attention * tables.disk
}

/// Requests of steps for neurons after the hot ones, with nothing missing.
fn demand(tables: &Tables, recorded: Option<&Recorded<'_>>, hot: usize) -> Vec<Demand> {
    match recorded {
        Some(recorded) => recorded.demand(hot),
        None => vec![Demand { active: tables.active[hot..].iter().sum(), missing: 0.0 }],
    }
}

fn replayed(tables: &Tables, recorded: Option<&Recorded<'_>>, hot: usize) -> Result<Share, NeuronError> {
    let steps = match recorded {
        Some(recorded) if tables.read > 0.0 => recorded.replay(hot, tables.held, tables.cluster)?,
        _ => demand(tables, recorded, hot),
    };
    Ok(evaluate(tables, hot, &steps))
}

fn evaluate(tables: &Tables, hot: usize, steps: &[Demand]) -> Share {
    let count = (tables.active.len() - hot) as f64;
    let dense = dense(tables, hot);
    let n = steps.len().max(1) as f64;
    let mut share = Share { hot, seconds: 0.0, dense, sparse: 0.0, reads: 0.0 };
    for step in steps {
        let sparse = tables.predict * count + tables.sparse * step.active;
        let reads = tables.read * step.missing;
        let inactive = (count - step.active).max(0.0);
        let bytes = tables.bytes * (hot as f64 + step.active + tables.gate * inactive) / tables.memory;
        share.sparse += sparse / n;
        share.reads += reads / n;
        share.seconds += (tables.attention + dense.max(sparse).max(reads).max(bytes)) / n;
    }
    share
}

/// The dense unit's time; 0 for no neurons.
fn dense(tables: &Tables, hot: usize) -> f64 {
    let rows = &tables.dense;
    if hot == 0 {
        return 0.0;
    }
    let at = rows.partition_point(|r| r.0 < hot).clamp(1, rows.len().max(2) - 1);
    match (rows.get(at - 1), rows.get(at)) {
        (Some(a), Some(b)) => {
            let slope = (b.1 - a.1) / (b.0 - a.0) as f64;
            (a.1 + slope * (hot as f64 - a.0 as f64)).max(0.0)
        }
        (Some(only), None) => only.1 * hot as f64 / only.0.max(1) as f64,
        _ => 0.0,
    }
}

fn check(tables: &Tables, recorded: Option<&Recorded<'_>>) -> Result<(), NeuronError> {
    let wrong = |what: &str| Err(NeuronError::Plan(what.to_owned()));
    let n = tables.active.len();
    if n == 0 || n > MOST || tables.cluster == 0 {
        return wrong("a layer has 1 to 2^24 neurons, and a cluster one at least");
    }
    if n.div_ceil(tables.cluster) > MOST_CLUSTERS {
        return wrong("a layer has 4096 clusters at most: make them larger");
    }
    if tables.active.iter().any(|f| !(0.0..=1.0).contains(f)) {
        return wrong("how often a neuron is active is a share of 1");
    }
    if tables.dense.is_empty() || tables.dense.windows(2).any(|w| w[0].0 >= w[1].0) {
        return wrong("the dense unit's table needs rows, by neurons");
    }
    let times = [tables.sparse, tables.predict, tables.gate, tables.attention, tables.bytes, tables.read];
    let finite = |t: f64| t.is_finite() && t >= 0.0;
    if !times.into_iter().chain(tables.dense.iter().map(|r| r.1)).all(finite) {
        return wrong("times and sizes are numbers from 0 on");
    }
    if [tables.disk, tables.memory].into_iter().any(|r| r.is_nan() || r <= 0.0) {
        return wrong("rates are above 0");
    }
    match recorded {
        Some(recorded) => recorded.check(n),
        None if tables.held < n && tables.read > 0.0 => {
            wrong("memory does not hold all neurons, and what is read follows from a trace alone")
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
