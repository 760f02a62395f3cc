//! Tokens past an expert's capacity (NPUMoE, §3.2 and §4.1).
//!
//! Pure functions over the routing of one chunk: they decide the fate of every (token, expert) pair, and the
//! caller moves the rows. An expert keeps the tokens of the highest saliency, which is the L2 norm of what
//! attention added to a token. Among equal ones it keeps the lowest index. The others are pruned, or spilled:
//! they run on another unit with the same expert's weights.

pub use moec_ir::placement::Overflow;
use moec_ir::placement::Placement;
use std::cmp::Ordering;

/// Fate of a (token, expert) pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Fate {
    /// The expert computes it on its own unit.
    #[default]
    Stays,
    /// The token goes without this expert.
    Pruned,
    /// The expert's fallback computes it.
    Spilled,
}

/// Invalid output of a router: an expert that does not exist, or a wrong number of choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Misrouted {
    /// No such expert.
    #[error("the router chose expert {expert} of {experts}")]
    Expert {
        /// The chosen expert.
        expert: i32,
        /// Experts of the layer.
        experts: usize,
    },
    /// Choices, saliency and experts per token do not agree.
    #[error("{choices} choices of {k} per token for {rows} tokens")]
    Shape {
        /// Choices.
        choices: usize,
        /// Choices per token.
        k: usize,
        /// Tokens.
        rows: usize,
    },
}

/// Counts of rows by their fate, summed over chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverflowCounters {
    /// (token, expert) pairs that the router made.
    pub routed: u64,
    /// Pairs among them that were pruned.
    pub pruned: u64,
    /// Pairs among them that were spilled.
    pub spilled: u64,
    /// Rows that static graphs computed.
    pub rows: u64,
    /// Rows among them that were padding.
    pub padding: u64,
}

impl OverflowCounters {
    /// Share of the pairs that were pruned.
    pub fn drop_rate(&self) -> f64 {
        self.pruned as f64 / self.routed.max(1) as f64
    }

    /// Share of the pairs that were spilled.
    pub fn spill_rate(&self) -> f64 {
        self.spilled as f64 / self.routed.max(1) as f64
    }

    /// Share of the computed rows that were padding.
    pub fn padding_rate(&self) -> f64 {
        self.padding as f64 / self.rows.max(1) as f64
    }

    /// Counts an executed static graph: its experts have `capacity` rows each; `kept` are the tokens that
    /// each kept.
    pub fn executed(&mut self, capacity: u32, kept: impl IntoIterator<Item = u32>) {
        for n in kept {
            self.rows += u64::from(capacity);
            self.padding += u64::from(capacity.saturating_sub(n));
        }
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        self.routed += other.routed;
        self.pruned += other.pruned;
        self.spilled += other.spilled;
        self.rows += other.rows;
        self.padding += other.padding;
    }
}

/// Approximate number of rows of an expert that overflow in one call. They are not independent observations.
const CORRELATED_ROWS: f64 = 32.0;
/// Standard deviations above the expectation beyond which chance is not an explanation.
const MIN_SIGMAS: f64 = 4.0;

/// Pairs past the capacities of all layers, and the number that the plan expects.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Overflowed {
    /// Counts of pairs.
    pub counters: OverflowCounters,
    /// Pairs that would overflow at the rates that the plan expects.
    pub expected: f64,
}

impl Overflowed {
    /// Sums the counters of all layers, under a placement; `None` if no experts have capacities.
    pub fn of(counters: &[(u32, OverflowCounters)], placement: &Placement) -> Option<Self> {
        let mut sum = Self::default();
        for (layer, counters) in counters {
            let table = placement.experts.iter().find(|t| t.layer == *layer);
            let rate = table.and_then(|t| t.expected).map_or(0.0, |e| f64::from(e.overflow));
            sum.counters.add(counters);
            sum.expected += rate * counters.routed as f64;
        }
        (!counters.is_empty()).then_some(sum)
    }

    /// Share of the pairs that overflowed.
    pub fn rate(&self) -> f64 {
        (self.counters.pruned + self.counters.spilled) as f64 / self.counters.routed.max(1) as f64
    }

    /// Share that the plan expects.
    pub fn expected_rate(&self) -> f64 {
        self.expected / self.counters.routed.max(1) as f64
    }

    /// Whether more pairs overflowed than chance explains. Clumps of rows are taken as Poisson-distributed;
    /// the threshold is four standard deviations and as many clumps above the expectation.
    pub fn exceeds(&self) -> bool {
        let over = (self.counters.pruned + self.counters.spilled) as f64;
        over > self.expected
            + MIN_SIGMAS * (self.expected * CORRELATED_ROWS).sqrt()
            + MIN_SIGMAS * CORRELATED_ROWS
    }
}

impl std::fmt::Display for Overflowed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let percent = |rate: f64| rate * 100.0;
        let OverflowCounters { pruned, spilled, .. } = self.counters;
        write!(f, "{:.2} % of the rows of experts found no room", percent(self.rate()))?;
        match (pruned, spilled) {
            (0, 0) => {}
            (_, 0) => write!(f, " and were dropped")?,
            (0, _) => write!(f, " and ran on the CPU")?,
            (dropped, ran) => write!(f, " ({dropped} dropped, {ran} ran on the CPU)")?,
        }
        write!(f, "; {:.2} % were expected", percent(self.expected_rate()))
    }
}

/// The saliency of a token: the L2 norm of attention's output for it.
///
/// ```
/// assert_eq!(moec_runtime::exec::overflow::saliency(&[3.0, -4.0]), 5.0);
/// ```
pub fn saliency(attention_output: &[f32]) -> f32 {
    attention_output.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt() as f32
}

/// The choices of one chunk.
#[derive(Clone, Copy, Debug)]
pub struct Choices<'a> {
    /// `[rows, k]`: experts of each token.
    pub ids: &'a [i32],
    /// Experts per token.
    pub k: usize,
    /// `[rows]`: saliency of each token. NaN counts as the highest.
    pub saliency: &'a [f32],
}

/// Decides the fates of pairs. Its memory is used again from chunk to chunk.
#[derive(Clone, Debug, Default)]
pub struct Decider {
    order: Vec<u32>,
    fates: Vec<Fate>,
    kept: Vec<u32>,
}

impl Decider {
    /// Decides each choice. Expert `e` has room for `capacities[e]` tokens; 0: for any number. Routed, pruned
    /// and spilled pairs are added to `counters`.
    ///
    /// # Errors
    /// Invalid choices. Nothing is counted then.
    pub fn decide(
        &mut self,
        choices: &Choices<'_>,
        capacities: &[u32],
        policy: Overflow,
        counters: &mut OverflowCounters,
    ) -> Result<&[Fate], Misrouted> {
        let Choices { ids, k, saliency } = *choices;
        if k.checked_mul(saliency.len()) != Some(ids.len()) || u32::try_from(ids.len()).is_err() {
            return Err(Misrouted::Shape { choices: ids.len(), k, rows: saliency.len() });
        }
        let experts = capacities.len();
        let known = |id: &i32| usize::try_from(*id).is_ok_and(|e| e < experts);
        if let Some(&expert) = ids.iter().find(|id| !known(id)) {
            return Err(Misrouted::Expert { expert, experts });
        }
        self.order.clear();
        self.order.extend(0..ids.len() as u32);
        // Expert by expert, each with its most salient tokens first.
        self.order.sort_unstable_by(|&a, &b| {
            let (a, b) = (a as usize, b as usize);
            ids[a].cmp(&ids[b]).then_with(|| higher(saliency[a / k], saliency[b / k])).then(a.cmp(&b))
        });
        self.fates.clear();
        self.fates.resize(ids.len(), Fate::Stays);
        self.kept.clear();
        self.kept.resize(experts, 0);
        let mut over = 0;
        for &choice in &self.order {
            let expert = ids[choice as usize] as usize;
            let capacity = capacities[expert];
            if capacity == 0 || self.kept[expert] < capacity {
                self.kept[expert] += 1;
            } else {
                over += 1;
                self.fates[choice as usize] = match policy {
                    Overflow::Prune => Fate::Pruned,
                    Overflow::Spill => Fate::Spilled,
                };
            }
        }
        counters.routed += ids.len() as u64;
        match policy {
            Overflow::Prune => counters.pruned += over,
            Overflow::Spill => counters.spilled += over,
        }
        Ok(&self.fates)
    }

    /// Tokens that each expert kept, after [`Self::decide`].
    pub fn kept(&self) -> &[u32] {
        &self.kept
    }
}

/// Order by descending saliency, with NaN first.
fn higher(a: f32, b: f32) -> Ordering {
    b.is_nan().cmp(&a.is_nan()).then_with(|| b.partial_cmp(&a).unwrap_or(Ordering::Equal))
}
