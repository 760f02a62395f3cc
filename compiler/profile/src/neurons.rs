//! Frequency of every neuron's activation, by expert and by the size of the decoded batch (PowerInfer-2, §2.2
//! and Figure 2). It distinguishes hot neurons from cold ones (§5).
//!
//! A neuron is a row of the gate and up matrices and a column of the down matrix. With ReLU in the gate it is
//! active if its input to the down matrix is not zero; skipping the others changes nothing. Other gates leave
//! no zeros. There a neuron counts as active if the magnitude of that input exceeds a threshold, one for each
//! [`Level`].
//!
//! In a batch of B tokens a neuron of an expert is active if any of the tokens that chose the expert
//! activates it. The tokens of a batch are of different sequences, at the same position of each: the last B
//! sequences that were read of one piece of the texts.

use super::{MOST, ProfileFault, Routing};
use bincode::{Decode, Encode};

/// Largest batch that is counted.
pub const BATCHES: usize = 4;
/// Limit of the numbers in the counts of a model: 256 MiB.
pub const MOST_COUNTS: usize = 1 << 26;
/// Quantiles of the products' magnitudes that are the thresholds of a gate without zeros, ascending.
pub const QUANTILES: [f64; 3] = [0.5, 0.7, 0.9];

/// Counts of the neurons of a layer's experts, or of a dense feed-forward network.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct NeuronCounts {
    /// Layer.
    pub layer: u32,
    /// The down matrix, by its name in the lowered Graph.
    pub weight: String,
    /// True if a router chooses among several experts; otherwise every token takes the only expert.
    pub routed: bool,
    /// Neurons of an expert.
    pub width: u32,
    /// Counts by ascending threshold; a gate with zeros has one, the threshold 0.
    pub levels: Vec<Level>,
}

/// Counts at one threshold.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Level {
    /// Magnitude that a neuron's product must exceed.
    pub threshold: f32,
    /// Counts by the size of the batch, from 1 on.
    pub batches: Vec<Batch>,
}

/// Counts at one size of the batch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct Batch {
    /// `[experts]`: batches with at least one token that chose the expert.
    of: Vec<u32>,
    /// `[experts, width]`: batches of these that activated the neuron.
    active: Vec<u32>,
}

impl Batch {
    /// Counts a batch of an expert; `active` is one bit per neuron, 64 in a word.
    pub fn add(&mut self, expert: usize, width: usize, active: &[u64]) -> Option<()> {
        let of = self.of.get_mut(expert)?;
        *of = of.saturating_add(1);
        let counts = self.active.get_mut(expert * width..(expert + 1) * width)?;
        for (word, counts) in active.iter().zip(counts.chunks_mut(64)) {
            let mut word = *word;
            while word != 0 {
                let n = counts.get_mut(word.trailing_zeros() as usize)?;
                *n = n.saturating_add(1);
                word &= word - 1;
            }
        }
        Some(())
    }

    fn empty(&self) -> Self {
        Self { of: vec![0; self.of.len()], active: vec![0; self.active.len()] }
    }

    fn merge(&self, other: &Self) -> Self {
        let sum = |a: &[u32], b: &[u32]| a.iter().zip(b).map(|(a, b)| a.saturating_add(*b)).collect();
        Self { of: sum(&self.of, &other.of), active: sum(&self.active, &other.active) }
    }
}

impl NeuronCounts {
    /// Empty counts of `experts` experts, for batches of 1 to `batches` tokens; a level for each threshold.
    pub fn new(
        (layer, weight): (u32, String),
        (experts, width, routed): (usize, u32, bool),
        thresholds: &[f32],
        batches: usize,
    ) -> Self {
        let batch = Batch { of: vec![0; experts], active: vec![0; experts * width as usize] };
        let level = |&threshold: &f32| Level { threshold, batches: vec![batch.clone(); batches] };
        Self { layer, weight, routed, width, levels: thresholds.iter().map(level).collect() }
    }

    /// Counts of the same neurons, at the same thresholds, before any token.
    #[must_use]
    pub fn empty(&self) -> Self {
        let level = |level: &Level| Level {
            threshold: level.threshold,
            batches: level.batches.iter().map(Batch::empty).collect(),
        };
        Self { levels: self.levels.iter().map(level).collect(), weight: self.weight.clone(), ..*self }
    }

    /// Sets the thresholds of the levels, ascending; equal ones share a level.
    pub fn set_thresholds(&mut self, thresholds: &[f32]) {
        self.levels.iter_mut().zip(thresholds).for_each(|(level, &t)| level.threshold = t);
        self.levels.dedup_by(|b, a| b.threshold <= a.threshold);
    }

    /// Experts.
    pub fn experts(&self) -> usize {
        self.levels.first().and_then(|l| l.batches.first()).map_or(0, |b| b.of.len())
    }

    /// Largest batch that was counted.
    pub fn batches(&self) -> usize {
        self.levels.first().map_or(0, |l| l.batches.len())
    }

    /// True if inactive neurons are exactly zero, so that skipping them changes nothing.
    pub fn is_exact(&self) -> bool {
        self.levels.first().is_some_and(|l| l.threshold == 0.0)
    }

    /// The level whose share of zeros for one token is nearest to a share; `None` if nothing was counted.
    pub fn nearest_level(&self, zeros: f64) -> Option<usize> {
        let off = |level: usize| Some((self.zeros(level, 1)? - zeros).abs());
        let levels = (0..self.levels.len()).filter_map(|level| Some((off(level)?, level)));
        levels.min_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, level)| level)
    }

    /// The counts of one level alone.
    pub fn of_level(&self, level: usize) -> Option<Self> {
        let levels = vec![self.levels.get(level)?.clone()];
        Some(Self { levels, weight: self.weight.clone(), ..*self })
    }

    /// Number of batches of `batch` tokens that activated a neuron of an expert, and of those with a token
    /// that chose the expert. `(0, 0)` if nothing was counted. For a gate without zeros, at the lowest
    /// threshold ([`NeuronCounts::active_at`]).
    pub fn active(&self, expert: usize, neuron: usize, batch: usize) -> (u64, u64) {
        self.active_at(0, expert, neuron, batch)
    }

    /// The same at a level.
    pub fn active_at(&self, level: usize, expert: usize, neuron: usize, batch: usize) -> (u64, u64) {
        let width = self.width as usize;
        let found = self.at(level, batch).filter(|_| neuron < width).and_then(|b| {
            Some((*b.active.get(expert.checked_mul(width)?.checked_add(neuron)?)?, *b.of.get(expert)?))
        });
        found.map_or((0, 0), |(active, of)| (active.into(), of.into()))
    }

    /// Neurons of an expert, the hottest first, ties by index: the order in which clusters take them (§4.1).
    pub fn hottest(&self, expert: usize, batch: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.width as usize).collect();
        order.sort_by_key(|&n| std::cmp::Reverse(self.active(expert, n, batch).0));
        order
    }

    /// Share of the (batch, expert, neuron) triples that are inactive: the zeros that can be skipped. `None`
    /// if nothing was counted.
    pub fn zeros(&self, level: usize, batch: usize) -> Option<f64> {
        let counts = self.at(level, batch)?;
        let sum = |counts: &[u32]| counts.iter().map(|&n| u64::from(n)).sum::<u64>() as f64;
        let all = sum(&counts.of) * f64::from(self.width);
        (all > 0.0).then(|| 1.0 - sum(&counts.active) / all)
    }

    /// Frequency of each neuron of all experts, as shares of the batches of its expert, the hottest first
    /// (Figure 2). Experts without tokens are left out.
    pub fn frequencies(&self, level: usize, batch: usize) -> Vec<f64> {
        let Some(counts) = self.at(level, batch) else { return Vec::new() };
        let experts =
            counts.of.iter().zip(counts.active.chunks(self.width as usize)).filter(|(of, _)| **of > 0);
        let often = |(&of, active)| -> Vec<f64> {
            let share = |&n: &u32| f64::from(n) / f64::from(of);
            <[u32]>::iter(active).map(share).collect()
        };
        let mut all: Vec<f64> = experts.flat_map(often).collect();
        all.sort_by(|a, b| b.total_cmp(a));
        all
    }

    fn at(&self, level: usize, batch: usize) -> Option<&Batch> {
        self.levels.get(level)?.batches.get(batch.checked_sub(1)?)
    }

    /// True if both count the same neurons.
    pub(super) fn same(&self, other: &Self) -> bool {
        let of = |c: &Self| (c.layer, c.routed, c.width, c.experts(), c.is_exact());
        self.weight == other.weight && of(self) == of(other)
    }

    /// Merges two, at thresholds and for batches that both counted. `None` if there are none.
    pub fn merge(&self, other: &Self) -> Option<Self> {
        let level = |a: &Level| {
            let b = other.levels.iter().find(|b| b.threshold == a.threshold)?;
            let batches = a.batches.iter().zip(&b.batches).map(|(a, b)| a.merge(b)).collect();
            Some(Level { threshold: a.threshold, batches })
        };
        let levels: Vec<_> = self.levels.iter().filter_map(level).collect();
        (self.same(other) && !levels.is_empty()).then(|| Self {
            levels,
            weight: self.weight.clone(),
            ..*self
        })
    }

    /// Number of all counts.
    fn numbers(&self) -> Option<usize> {
        self.levels.iter().flat_map(|l| &l.batches).try_fold(0_usize, |n, b| n.checked_add(b.active.len()))
    }

    fn check(&self, layers: &[Routing]) -> Result<(), ProfileFault> {
        let (experts, width) = (self.experts(), self.width as usize);
        if !(1..=MOST).contains(&experts) || !(1..=MOST).contains(&width) {
            return Err(format!("{experts} experts of {width} neurons"));
        }
        if !self.levels.is_sorted_by(|a, b| a.threshold < b.threshold)
            || !self.levels.iter().all(|l| l.threshold.is_finite() && l.threshold >= 0.0)
            || self.is_exact() && self.levels.len() > 1
        {
            return Err("thresholds of neurons that are not in order".to_owned());
        }
        for level in &self.levels {
            if !(1..=BATCHES).contains(&level.batches.len()) || level.batches.len() != self.batches() {
                return Err(format!("neurons in {} sizes of batches", level.batches.len()));
            }
            for batch in &level.batches {
                let fits =
                    batch.of.len() == experts && experts.checked_mul(width) == Some(batch.active.len());
                let most = |(of, active): (&u32, &[u32])| active.iter().all(|n| n <= of);
                if !fits || !batch.of.iter().zip(batch.active.chunks(width)).all(most) {
                    return Err("counts of neurons that cannot be".to_owned());
                }
            }
        }
        let Some(layer) = layers.iter().find(|l| l.layer == self.layer).filter(|_| self.routed) else {
            return if self.routed { Err("neurons of no layer".to_owned()) } else { Ok(()) };
        };
        let alone = self.levels.iter().filter_map(|l| l.batches.first());
        let chosen = |b: &Batch| b.of.iter().zip(&layer.chosen).all(|(&of, &chosen)| u64::from(of) <= chosen);
        if layer.chosen.len() == experts && { alone }.all(chosen) {
            Ok(())
        } else {
            Err("neurons of experts that nothing chose".to_owned())
        }
    }
}

/// Merges counts by their weights. Those in one profile only stay as they are.
pub(super) fn merge(a: &[NeuronCounts], b: &[NeuronCounts]) -> Vec<NeuronCounts> {
    let other = |x: &NeuronCounts, of: &[NeuronCounts]| of.iter().find(|y| y.weight == x.weight).cloned();
    let both = a.iter().filter_map(|x| other(x, b).map_or_else(|| Some(x.clone()), |y| x.merge(&y)));
    let rest = b.iter().filter(|y| other(y, a).is_none()).cloned();
    let mut all: Vec<_> = both.chain(rest).collect();
    all.sort_by(|x, y| (x.layer, &x.weight).cmp(&(y.layer, &y.weight)));
    all
}

/// Checks the counts of a model against its routing.
pub(super) fn check(all: &[NeuronCounts], layers: &[Routing]) -> Result<(), ProfileFault> {
    if !all.is_sorted_by(|a, b| (a.layer, &a.weight) < (b.layer, &b.weight)) {
        return Err("its neurons are not in order".to_owned());
    }
    let numbers = all.iter().try_fold(0_usize, |sum, c| sum.checked_add(c.numbers()?));
    if numbers.is_none_or(|n| n > MOST_COUNTS) {
        return Err("it counts more neurons than a profile may".to_owned());
    }
    all.iter().try_for_each(|c| c.check(layers).map_err(|e| format!("layer {}: {e}", c.layer)))
}
