//! Loads of experts in chunks of a given size, from a profile with another chunk size.
#![expect(clippy::cast_possible_truncation, reason = "statistics: floats are clamped and rounded")]

use super::Profile;
use moec_base::error::{Error, Result};
use std::fmt::Write as _;

/// Folds of the samples, for judging capacities by text that they were not made for.
pub const FOLDS: usize = 5;

/// Loads at a chunk size.
#[derive(Clone, Debug, PartialEq)]
pub struct Loads {
    /// Tokens of a chunk, B.
    pub chunk: u32,
    /// Origin of the samples in the recorded text.
    pub origin: String,
    /// Layers with routed experts, ascending.
    pub layers: Vec<LayerLoads>,
}

/// Loads of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerLoads {
    /// Layer.
    pub layer: u32,
    /// Experts per token.
    pub k: u32,
    /// Tokens routed during calibration.
    pub tokens: u64,
    /// Tokens that chose each expert during calibration.
    pub chosen: Vec<u64>,
    /// `[chunks][experts]`: tokens of a chunk that chose each expert.
    pub samples: Vec<Vec<u32>>,
}

impl LayerLoads {
    /// Experts.
    pub fn experts(&self) -> usize {
        self.chosen.len()
    }

    /// The imbalance ratio r: load of the busiest expert divided by the mean load (NPUMoE, §4.1). 0 if
    /// nothing was routed.
    pub fn imbalance(&self) -> f64 {
        let sum: u64 = self.chosen.iter().sum();
        let max = self.chosen.iter().copied().max().unwrap_or(0);
        if sum == 0 { 0.0 } else { max as f64 * self.experts() as f64 / sum as f64 }
    }

    /// Mean load of an expert in tokens per chunk of `chunk` tokens: its share of the tokens. The mean over
    /// all experts is B·k/E.
    pub fn mean(&self, expert: usize, chunk: u32) -> f64 {
        let chosen = self.chosen.get(expert).copied().unwrap_or(0);
        chosen as f64 * f64::from(chunk) / self.tokens.max(1) as f64
    }

    /// The load that an expert does not exceed in a share `q` of the chunks (nearest rank); with 1, the
    /// largest recorded load.
    pub fn quantile(&self, expert: usize, q: f64) -> u32 {
        let mut loads: Vec<u32> = self.samples.iter().map(|s| s[expert]).collect();
        loads.sort_unstable();
        let rank = (q.clamp(0.0, 1.0) * loads.len() as f64).ceil() as usize;
        loads.get(rank.saturating_sub(1)).copied().unwrap_or(0)
    }

    /// Counts overflowing rows and padding, summed over the samples, if expert `e` has room for `capacity(e)`
    /// rows; `None` is no limit and no padding. Experts of one graph, `graph(e)`, are padded whenever one of
    /// them has a row.
    pub fn account(
        &self,
        capacity: &dyn Fn(usize) -> Option<u32>,
        graph: &dyn Fn(usize) -> usize,
    ) -> Account {
        self.account_sized(capacity, graph, &|_, _| None)
    }

    /// Share of the pairs that overflow in text which capacities were not made for. The samples are cut into
    /// [`FOLDS`] folds, and each is judged by the capacities that the others lead to. For that, an expert's
    /// capacity keeps its quantile among the loads, and its margin above it. Fewer than two samples are
    /// judged by themselves.
    pub fn held_out_overflow(&self, capacity: &dyn Fn(usize) -> Option<u32>) -> f64 {
        let n = self.samples.len();
        let folds = FOLDS.min(n);
        if folds < 2 {
            return self.account(capacity, &|e| e).overflow_rate();
        }
        let mut overflow = 0;
        for e in 0..self.experts() {
            let Some(c) = capacity(e) else { continue };
            let loads: Vec<u32> = self.samples.iter().map(|s| s[e]).collect();
            for fold in 0..folds {
                let own = fold * n / folds..(fold + 1) * n / folds;
                let others = loads.iter().enumerate().filter(|(i, _)| !own.contains(i)).map(|(_, &l)| l);
                let bound = refit(c, &loads, others.collect());
                overflow += loads[own].iter().map(|&l| u64::from(l.saturating_sub(bound))).sum::<u64>();
            }
        }
        let routed: u64 = self.samples.iter().flatten().map(|&l| u64::from(l)).sum();
        overflow as f64 / routed.max(1) as f64
    }

    /// Like [`LayerLoads::account`], with graphs of several sizes. `rows(graph, most)` is the rows of each
    /// expert in a call whose busiest expert has `most` tokens; `None` is the capacity.
    pub fn account_sized(
        &self,
        capacity: &dyn Fn(usize) -> Option<u32>,
        graph: &dyn Fn(usize) -> usize,
        rows: &dyn Fn(usize, u32) -> Option<u32>,
    ) -> Account {
        let mut sum = Account::default();
        let graphs = (0..self.experts()).map(graph).max().map_or(0, |g| g + 1);
        for sample in &self.samples {
            let mut most = vec![0; graphs];
            for (e, &n) in sample.iter().enumerate() {
                sum.routed += u64::from(n);
                most[graph(e)] = n.max(most[graph(e)]);
                if let Some(c) = capacity(e) {
                    sum.overflow += u64::from(n.saturating_sub(c));
                }
            }
            for (e, &n) in sample.iter().enumerate() {
                let g = graph(e);
                if let Some(c) = capacity(e).filter(|_| most[g] > 0) {
                    let c = rows(g, most[g]).unwrap_or(c);
                    sum.rows += u64::from(c);
                    sum.padding += u64::from(c.saturating_sub(n));
                }
            }
        }
        sum
    }
}

/// The capacity that `some` of an expert's loads lead to, if `all` of them have led to `capacity`.
fn refit(capacity: u32, all: &[u32], mut some: Vec<u32>) -> u32 {
    some.sort_unstable();
    let held = all.iter().filter(|&&l| l <= capacity).count();
    let most = all.iter().copied().filter(|&l| l <= capacity).max().unwrap_or(0);
    let rank = (held * some.len() / all.len().max(1)).max(1);
    let own = rank.checked_sub(1).and_then(|i| some.get(i)).copied().unwrap_or(0);
    if most == 0 || own == 0 {
        return capacity;
    }
    let scaled = (u64::from(capacity) * u64::from(own)).div_ceil(u64::from(most));
    u32::try_from(scaled).unwrap_or(u32::MAX)
}

/// Numbers of rows: routed, overflowing, computed, padding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    /// (token, expert) pairs of the router.
    pub routed: u64,
    /// Pairs of these past a capacity.
    pub overflow: u64,
    /// Rows that graphs computed.
    pub rows: u64,
    /// Rows of these that were padding.
    pub padding: u64,
}

impl Account {
    /// Share of the pairs that overflowed.
    pub fn overflow_rate(&self) -> f64 {
        self.overflow as f64 / self.routed.max(1) as f64
    }

    /// Share of the computed rows that were padding.
    pub fn padding_rate(&self) -> f64 {
        self.padding as f64 / self.rows.max(1) as f64
    }

    /// Sum of both.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            routed: self.routed + other.routed,
            overflow: self.overflow + other.overflow,
            rows: self.rows + other.rows,
            padding: self.padding + other.padding,
        }
    }
}

/// Loads in chunks of `chunk` tokens. Recorded chunks are joined if `chunk` is a multiple of theirs.
/// Otherwise, and at the end of a text, they are scaled to its size. Less than half of a chunk does not count
/// unless there is nothing else.
///
/// # Errors
/// Fails if the profile has no chunks.
pub fn loads(profile: &Profile, chunk: u32) -> Result<Loads> {
    let trace = &profile.trace;
    let of = trace.chunk;
    if trace.chunks() == 0 || of == 0 || chunk == 0 {
        return Err(Error::input("the profile holds no loads of chunks")
            .hint("record it again with `moec calibrate`, on text of more than one token"));
    }
    let join = (chunk / of).max(1);
    let mut samples: Vec<(u32, Vec<u32>)> = Vec::new();
    for sequence in &trace.sequences {
        for parts in sequence.chunks(join as usize) {
            let width = parts.first().map_or(0, |p| p.loads.len());
            let mut sum = vec![0_u32; width];
            for part in parts {
                sum.iter_mut().zip(&part.loads).for_each(|(s, &n)| *s = s.saturating_add(n.into()));
            }
            samples.push((parts.iter().map(|p| p.tokens).sum(), sum));
        }
    }
    let whole = u64::from(of) * u64::from(join);
    let fullest = samples.iter().map(|(n, _)| u64::from(*n)).max().unwrap_or(0);
    samples.retain(|(n, _)| u64::from(*n) * 2 >= whole.min(fullest));
    let scaled = samples.iter().filter(|(n, _)| *n != chunk).count();
    for (tokens, loads) in &mut samples {
        let scale = |n: u32| {
            let n = (u64::from(n) * u64::from(chunk)).div_ceil(u64::from(*tokens).max(1));
            u32::try_from(n).unwrap_or(u32::MAX)
        };
        for n in loads {
            *n = scale(*n);
        }
    }
    let mut origin = format!("{} chunks of {of} tokens", trace.chunks());
    if join > 1 {
        let _ = write!(origin, ", joined by {join}");
    }
    if scaled > 0 {
        let _ = write!(origin, ", {scaled} of {} scaled to {chunk}", samples.len());
    }
    let mut first = 0;
    let layers = profile.layers.iter().map(|l| {
        let own = first..first + l.chosen.len();
        first = own.end;
        LayerLoads {
            layer: l.layer,
            k: l.k,
            tokens: l.tokens,
            chosen: l.chosen.clone(),
            samples: samples.iter().map(|(_, s)| s[own.clone()].to_vec()).collect(),
        }
    });
    Ok(Loads { chunk, origin, layers: layers.collect() })
}
