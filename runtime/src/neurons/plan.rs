//! How many neurons of a layer are hot at a batch size: the share that makes the layer fastest (PowerInfer-2, §4.1.3, §5).
//!
//! Neurons are sorted by how often they are active at this batch size. The first `h` are hot: the unit for dense work computes
//! all of them. The others are cold: the processor computes those that are active, and reads of them what the cache
//! lacks, while it computes (§4.3). Both work side by side, behind attention, in whose time the missing hot ones are read:
//!
//! ```text
//! time(h) = attention + max(dense(h), predict(h) + sparse · active(h), reads(h), bytes(h) / memory rate)
//! hot bytes that are missing(h) ≤ attention · flash rate                                  (§5)
//! ```
//!
//! There are no more candidates than clusters, so all are tried: the result is the optimum of these tables. A candidate costs a look at
//! all clusters that it leaves cold, so that a layer has 4096 at most.

use super::error::NeuronError;

/// What a layer costs at one batch size. Times are in seconds, rates in bytes per second.
#[derive(Clone, Debug, PartialEq)]
pub struct Tables {
    /// How often each neuron is active for at least one token of the batch, 0 to 1, the most active first.
    pub active: Vec<f64>,
    /// Neurons of a cluster: the step of the search.
    pub cluster: usize,
    /// Time of the dense unit for so many neurons, by neurons: on a line between two rows, and on that of the nearest two before the
    /// first and past the last row. A single row is a rate.
    pub dense: Vec<(usize, f64)>,
    /// The processor's time for one active neuron, all workers together.
    pub sparse: f64,
    /// The processor's time to predict one cold neuron, active or not, all workers together.
    pub predict: f64,
    /// Time of attention, in which hot neurons are read.
    pub attention: f64,
    /// Bytes of a neuron.
    pub bytes: f64,
    /// Bytes per second of long reads; infinite where that is no limit.
    pub flash: f64,
    /// Time of the reads of one cold neuron.
    pub read: f64,
    /// Bytes per second of memory, both units together; infinite where that is no limit.
    pub memory: f64,
    /// Neurons of this layer that memory holds; the hot ones come first.
    pub held: usize,
}

/// What is decided for a batch size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share {
    /// Hot neurons, a whole number of clusters or all.
    pub hot: usize,
    /// Time of the layer.
    pub seconds: f64,
    /// Of which the dense unit takes.
    pub dense: f64,
    /// The processor.
    pub sparse: f64,
    /// Reads of cold neurons.
    pub reads: f64,
}

/// Largest number of neurons of a layer.
const MOST: usize = 1 << 24;
/// Largest number of clusters of a layer.
const MOST_CLUSTERS: usize = 1 << 12;

/// The share of hot neurons with the least time, the smallest of equals.
///
/// # Errors
/// [`NeuronError::Plan`] for tables that say nothing: no neurons, too many or too small clusters of them, frequencies that are no shares or
/// not sorted, times or rates that are no numbers from 0 on.
pub fn hot_share(tables: &Tables) -> Result<Share, NeuronError> {
    check(tables)?;
    let mut left = Cold::new(tables);
    let mut best: Option<Share> = None;
    let n = tables.active.len();
    let mut hot = 0;
    loop {
        if hides(tables, hot) {
            let share = evaluate(tables, hot, &left);
            if best.is_none_or(|b| share.seconds < b.seconds) {
                best = Some(share);
            }
        }
        if hot == n {
            break;
        }
        let next = n.min(hot + tables.cluster);
        left.remove(&tables.active[hot..next]);
        hot = next;
    }
    // Without hot neurons nothing has to hide.
    best.ok_or_else(|| NeuronError::Plan("no share hides its reads behind attention".to_owned()))
}

/// The time that a share takes, whether or not its reads hide behind attention.
///
/// # Errors
/// As [`hot_share`], and for hot neurons that are neither a whole number of clusters nor all.
pub fn time_of(tables: &Tables, hot: usize) -> Result<Share, NeuronError> {
    check(tables)?;
    let n = tables.active.len();
    if hot > n || (hot != n && !hot.is_multiple_of(tables.cluster)) {
        return Err(NeuronError::Plan(format!("{hot} of {n} neurons are no whole number of clusters")));
    }
    let mut left = Cold::new(tables);
    left.remove(&tables.active[..hot]);
    Ok(evaluate(tables, hot, &left))
}

/// Whether the hot neurons that memory lacks are read while attention computes (§5).
pub fn hides(tables: &Tables, hot: usize) -> bool {
    let missing = hot.saturating_sub(tables.held) as f64 * tables.bytes;
    // No time at no end of a rate is no number.
    missing == 0.0 || missing <= tables.attention * tables.flash
}

/// The cold neurons, by how active they are.
struct Cold {
    /// Neurons that are active on average.
    active: f64,
    /// Frequencies of equal neurons in few classes: their number and mean, the most active first. The miss rate of a cache
    /// needs the whole distribution, not each neuron.
    classes: Vec<(f64, f64)>,
    cluster: usize,
}

impl Cold {
    fn new(tables: &Tables) -> Self {
        let class = |c: &[f64]| (c.len() as f64, c.iter().sum::<f64>() / c.len() as f64);
        let mut classes: Vec<_> = tables.active.chunks(tables.cluster).map(class).collect();
        classes.reverse();
        Self { active: tables.active.iter().sum(), classes, cluster: tables.cluster }
    }

    /// The most active ones become hot.
    fn remove(&mut self, active: &[f64]) {
        self.active = (self.active - active.iter().sum::<f64>()).max(0.0);
        self.classes.truncate(self.classes.len().saturating_sub(active.len().div_ceil(self.cluster)));
    }

    /// Active neurons that a cache of `room` neurons lacks, each used at random with its frequency and the one used longest
    /// ago going first (Che, Tung and Wang, 2002): a neuron is there where it was used in the last `t` steps, and `t` is such
    /// that `room` are there.
    fn misses(&self, room: f64) -> f64 {
        let there = |t: f64| self.classes.iter().map(|&(n, f)| n * (1.0 - (-f * t).exp())).sum::<f64>();
        let users: f64 = self.classes.iter().filter(|c| c.1 > 0.0).map(|c| c.0).sum();
        if room >= users {
            return 0.0;
        }
        if room <= 0.0 {
            return self.active;
        }
        let (mut low, mut high) = (0.0, 1.0);
        while there(high) < room && high < 1e18 {
            high *= 2.0;
        }
        for _ in 0..60 {
            let middle = f64::midpoint(low, high);
            if there(middle) < room { low = middle } else { high = middle }
        }
        self.classes.iter().map(|&(n, f)| n * f * (-f * high).exp()).sum()
    }
}

fn evaluate(tables: &Tables, hot: usize, cold: &Cold) -> Share {
    let count = (tables.active.len() - hot) as f64;
    let dense = dense(tables, hot);
    let sparse = tables.predict * count + tables.sparse * cold.active;
    let room = tables.held.saturating_sub(hot) as f64;
    let reads = if tables.read == 0.0 { 0.0 } else { tables.read * cold.misses(room) };
    let bytes = tables.bytes * (hot as f64 + cold.active) / tables.memory;
    let seconds = tables.attention + dense.max(sparse).max(reads).max(bytes);
    Share { hot, seconds, dense, sparse, reads }
}

/// The dense unit's time; nothing to do takes none.
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

fn check(tables: &Tables) -> Result<(), NeuronError> {
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
    if tables.active.windows(2).any(|w| w[0] < w[1]) {
        return wrong("neurons have to be sorted, the most active first");
    }
    if tables.dense.is_empty() || tables.dense.windows(2).any(|w| w[0].0 >= w[1].0) {
        return wrong("the dense unit's table needs rows, by neurons");
    }
    let times = [tables.sparse, tables.predict, tables.attention, tables.bytes, tables.read];
    let finite = |t: f64| t.is_finite() && t >= 0.0;
    if !times.into_iter().chain(tables.dense.iter().map(|r| r.1)).all(finite) {
        return wrong("times and sizes are numbers from 0 on");
    }
    if [tables.flash, tables.memory].into_iter().any(|r| r.is_nan() || r <= 0.0) {
        return wrong("rates are above 0");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 14336 neurons of 8 KiB, activity falling with a power of the rank, NPU and processor at the paper's rates (§2.3.1).
    fn layer(batch: i32) -> Tables {
        let once = |i: usize| (0.9 * (1.0 + i as f64 / 60.0).powf(-0.75)).min(1.0);
        let active = (0..14_336).map(|i| 1.0 - (1.0 - once(i)).powi(batch)).collect();
        Tables {
            active,
            cluster: 128,
            dense: vec![(128, 30e-6 + 128.0 * 8192.0 / 56e9), (14_336, 30e-6 + 14_336.0 * 8192.0 / 56e9)],
            sparse: 8192.0 / 43.9e9 * f64::from(batch).sqrt(),
            predict: 1e-8,
            attention: 1e-3,
            bytes: 8192.0,
            flash: 4e9,
            read: 8192.0 / 1e9,
            memory: 59.6e9,
            held: 14_336,
        }
    }

    #[test]
    fn larger_batches_have_more_hot_neurons() {
        let hot: Vec<usize> = (1..=4).map(|b| hot_share(&layer(b)).unwrap().hot).collect();
        assert!(hot.windows(2).all(|w| w[0] < w[1]), "{hot:?}");
        assert!(hot[0] > 0 && hot[3] < 14_336, "{hot:?}");
    }

    #[test]
    fn what_attention_does_not_hide_stays_cold() {
        let free = hot_share(&layer(4)).unwrap().hot;
        // 128 neurons fit into attention's time.
        let window = 128.0 * 8192.0 / 4e9;
        let tight = Tables { held: 256, attention: window, read: 0.0, ..layer(4) };
        let found = hot_share(&tight).unwrap().hot;
        assert_eq!(found, 384);
        assert!(found < free && hides(&tight, found) && !hides(&tight, found + 128));
    }

    #[test]
    fn misses_follow_the_room() {
        let cold = Cold::new(&Tables { active: vec![0.5; 100], cluster: 10, ..layer(1) });
        // Equal neurons at random: of 100 with room for 40, 6 in 10 are missing.
        assert!((cold.misses(40.0) - 50.0 * 0.6).abs() < 1e-6);
        assert_eq!((cold.misses(100.0), cold.misses(0.0)), (0.0, 50.0));
    }

    #[test]
    fn tables_that_say_nothing_are_refused() {
        for bad in [
            Tables { active: vec![], ..layer(1) },
            Tables { active: vec![0.1, 0.2], ..layer(1) },
            Tables { active: vec![f64::NAN], ..layer(1) },
            Tables { cluster: 0, ..layer(1) },
            Tables { cluster: 3, ..layer(1) },
            Tables { dense: vec![], ..layer(1) },
            Tables { dense: vec![(1, 1.0), (1, 1.0)], ..layer(1) },
            Tables { sparse: -1.0, ..layer(1) },
            Tables { flash: 0.0, ..layer(1) },
            Tables { memory: f64::NAN, ..layer(1) },
        ] {
            assert!(hot_share(&bad).is_err());
        }
        assert!(time_of(&layer(1), 14_337).is_err() && time_of(&layer(1), 100).is_err());
        // Neither attention to hide behind nor reads that take time: nothing is missing, and nothing has to hide.
        let fast = Tables { attention: 0.0, flash: f64::INFINITY, ..layer(1) };
        assert!(hides(&fast, 0) && hot_share(&fast).is_ok());
        let one = Tables { dense: vec![(100, 1.0)], memory: f64::INFINITY, ..layer(1) };
        assert!((time_of(&one, 256).unwrap().dense - 2.56).abs() < 1e-12);
    }

    proptest! {
        #[test]
        fn no_share_is_better(
            mut active in proptest::collection::vec(0.0..1.0_f64, 1..40), cluster in 1..9_usize,
            dense in proptest::collection::vec(0.0..3.0_f64, 1..6), sparse in 0.0..1.0_f64, predict in 0.0..0.1_f64,
            attention in 0.0..4.0_f64, read in 0.0..2.0_f64, held in 0..50_usize, memory in 1.0..30.0_f64
        ) {
            active.sort_by(|a, b| b.total_cmp(a));
            let dense = dense.into_iter().enumerate().map(|(i, t)| (1 + 7 * i, t)).collect();
            let tables = Tables {
                active, cluster, dense, sparse, predict, attention, bytes: 1.0, flash: 4.0, read, memory, held,
            };
            let best = hot_share(&tables).unwrap();
            prop_assert!(hides(&tables, best.hot));
            let n = tables.active.len();
            for hot in (0..n).step_by(cluster).chain([n]).filter(|&h| hides(&tables, h)) {
                let other = time_of(&tables, hot).unwrap();
                prop_assert!(best.seconds <= other.seconds + 1e-9, "{best:?} {other:?}");
            }
        }
    }
}
