//! Counts active neurons while a model reads text: token by token, and in batches of tokens of different
//! sequences.
//!
//! A token adds one row of bits for each expert that it chose. The rows of the current and of earlier
//! sequences are kept. So a token can form a batch with the tokens at the same position of the last
//! sequences of the same piece.

use moec_profile::neurons::{BATCHES, MOST_COUNTS, QUANTILES};
use moec_profile::{NeuronCounts, Saliency};
use std::collections::VecDeque;

/// Most bytes of the rows of earlier sequences, over all layers.
const MOST_REMEMBERED: usize = 64 << 20;

/// A network whose neurons are counted.
pub(super) struct Network {
    /// Layer, and name of the down matrix.
    pub(super) name: (u32, String),
    pub(super) experts: usize,
    pub(super) width: u32,
    /// Experts per token; `None` for a network that every token uses.
    pub(super) k: Option<usize>,
    /// Whether inactive neurons are exact zeros.
    pub(super) exact: bool,
}

/// Neurons of all networks of a model.
#[derive(Default)]
pub(super) struct Neurons {
    networks: Vec<Network>,
    watched: Vec<Watched>,
    /// Whether values are only measured, to choose thresholds for gates without exact zeros.
    gauging: bool,
}

/// Counts of one network.
struct Watched {
    counts: NeuronCounts,
    /// Magnitudes of activations, while thresholds are being chosen.
    magnitudes: Option<Saliency>,
    /// The current sequence, then earlier ones, the latest first.
    sequences: VecDeque<Sequence>,
    /// Tokens of a sequence that batches of later sequences use.
    remembered: usize,
    /// Start of the current chunk: its position, and the first word of its bits.
    start: usize,
    bits: usize,
    union: Union,
}

/// Active neurons of the tokens of a sequence.
#[derive(Default)]
struct Sequence {
    /// For each position and token: the expert, and the first word of its bits.
    tokens: Vec<Vec<(usize, usize)>>,
    bits: Vec<u64>,
}

/// Active neurons of a batch, by expert.
#[derive(Default)]
struct Union {
    experts: Vec<usize>,
    bits: Vec<u64>,
}

impl Neurons {
    /// Adds a network. Its number in later calls is the number of networks added before.
    pub(super) fn network(&mut self, network: Network) -> usize {
        self.networks.push(network);
        self.networks.len() - 1
    }

    /// Whether text must be measured before it is counted.
    pub(super) fn needs_thresholds(&self) -> bool {
        self.networks.iter().any(|n| !n.exact)
    }

    /// Whether the current sequence is only measured.
    pub(super) fn is_gauging(&self) -> bool {
        self.gauging
    }

    /// Begins to measure. The next [`Neurons::begin`] ends it.
    pub(super) fn gauge(&mut self) {
        self.prepare();
        self.gauging = true;
        for (w, n) in self.watched.iter_mut().zip(&self.networks) {
            w.magnitudes = (!n.exact).then(|| Saliency::new(n.name.0));
        }
    }

    /// Begins a sequence that is counted.
    pub(super) fn begin(&mut self) {
        self.prepare();
        self.gauging = false;
        for w in &mut self.watched {
            if let Some(seen) = w.magnitudes.take() {
                w.counts.set_thresholds(&QUANTILES.map(|q| seen.quantile(q) as f32));
            }
            w.sequences.truncate(BATCHES - 1);
            w.sequences.push_front(Sequence::default());
        }
    }

    /// Allocates the counts after all networks are known, for batches as large as the memory limit allows.
    fn prepare(&mut self) {
        if !self.watched.is_empty() {
            return;
        }
        let levels = |n: &Network| if n.exact { 1 } else { QUANTILES.len() };
        let numbers: usize = self.networks.iter().map(|n| n.experts * n.width as usize * levels(n)).sum();
        let batches = (MOST_COUNTS / numbers.max(1)).min(BATCHES);
        if batches == 0 {
            self.networks.clear();
        }
        let row = |n: &Network| n.k.unwrap_or(1) * levels(n) * (n.width as usize).div_ceil(64) * 8;
        let token: usize = self.networks.iter().map(row).sum();
        let remembered = MOST_REMEMBERED / BATCHES / token.max(1);
        for n in &self.networks {
            let thresholds = [0.0; QUANTILES.len()];
            let counts = NeuronCounts::new(
                n.name.clone(),
                (n.experts, n.width, n.k.is_some()),
                &thresholds[..levels(n)],
                batches,
            );
            let (magnitudes, sequences, union) = (None, VecDeque::new(), Union::default());
            self.watched.push(Watched {
                counts,
                magnitudes,
                sequences,
                remembered,
                start: 0,
                bits: 0,
                union,
            });
        }
    }

    /// Begins a chunk of `tokens` tokens of a network.
    pub(super) fn chunk(&mut self, network: usize, tokens: usize) {
        let Some(w) = self.watched.get_mut(network).filter(|_| !self.gauging) else { return };
        if let Some(now) = w.sequences.front_mut() {
            (w.start, w.bits) = (now.tokens.len(), now.bits.len());
            now.tokens.resize(w.start + tokens, Vec::new());
        }
    }

    /// Adds activations of an expert's neurons for token `token` of the chunk.
    pub(super) fn row(
        &mut self,
        network: usize,
        (expert, token): (usize, usize),
        products: impl Iterator<Item = f32> + Clone,
    ) -> Option<()> {
        let Some(w) = self.watched.get_mut(network) else { return Some(()) };
        if self.gauging {
            if let Some(seen) = &mut w.magnitudes {
                products.for_each(|x| seen.add(f64::from(x.abs())));
            }
            return Some(());
        }
        let now = w.sequences.front_mut()?;
        now.tokens.get_mut(w.start + token)?.push((expert, now.bits.len()));
        for level in &w.counts.levels {
            let mut products = products.clone();
            for _ in 0..words(w.counts.width) {
                let active = products.by_ref().take(64).map(|x| x.abs() > level.threshold);
                now.bits.push(active.enumerate().fold(0, |word, (i, a)| word | u64::from(a) << i));
            }
        }
        Some(())
    }

    /// Ends the chunk of a network: counts its tokens, one by one and in batches.
    pub(super) fn end_chunk(&mut self, network: usize) -> Option<()> {
        let Some(w) = self.watched.get_mut(network).filter(|_| !self.gauging) else { return Some(()) };
        w.count()
    }

    /// Takes the counts of a piece out, in the order of a profile. The next piece begins without sequences.
    pub(super) fn take(&mut self) -> Vec<NeuronCounts> {
        let take = |w: &mut Watched| {
            w.sequences.clear();
            let next = w.counts.empty();
            std::mem::replace(&mut w.counts, next)
        };
        let mut all: Vec<_> = self.watched.iter_mut().map(take).collect();
        all.sort_by(|a, b| (a.layer, &a.weight).cmp(&(b.layer, &b.weight)));
        all.dedup_by(|b, a| a.weight == b.weight);
        all
    }
}

const fn words(width: u32) -> usize {
    (width as usize).div_ceil(64)
}

impl Watched {
    fn count(&mut self) -> Option<()> {
        let (width, words) = (self.counts.width as usize, words(self.counts.width));
        let levels = self.counts.levels.len();
        let end = self.sequences.front()?.tokens.len();
        for token in self.start..end {
            self.union.clear();
            // Batches grow by one token at a time: this token, then those at its position of earlier
            // sequences.
            for (i, sequence) in self.sequences.iter().take(self.counts.batches()).enumerate() {
                let known = i == 0 || token < self.remembered;
                let Some(chosen) = sequence.tokens.get(token).filter(|_| known) else { break };
                for &(expert, at) in chosen {
                    self.union.add(expert, sequence.bits.get(at..at + levels * words)?);
                }
                for (level, counts) in self.counts.levels.iter_mut().enumerate() {
                    let batch = counts.batches.get_mut(i)?;
                    for (expert, bits) in self.union.each(levels * words) {
                        batch.add(expert, width, &bits[level * words..(level + 1) * words])?;
                    }
                }
            }
        }
        // Tokens that no batch will use are dropped.
        if self.start >= self.remembered {
            let now = self.sequences.front_mut()?;
            now.tokens.iter_mut().skip(self.start).for_each(Vec::clear);
            now.bits.truncate(self.bits);
        }
        Some(())
    }
}

impl Union {
    fn clear(&mut self) {
        self.experts.clear();
        self.bits.clear();
    }

    fn add(&mut self, expert: usize, bits: &[u64]) {
        if let Some(i) = self.experts.iter().position(|&e| e == expert) {
            let own = self.bits.iter_mut().skip(i * bits.len());
            own.zip(bits).for_each(|(a, b)| *a |= b);
        } else {
            self.experts.push(expert);
            self.bits.extend_from_slice(bits);
        }
    }

    fn each(&self, words: usize) -> impl Iterator<Item = (usize, &[u64])> {
        self.experts.iter().copied().zip(self.bits.chunks(words.max(1)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(width: u32, exact: bool) -> Neurons {
        let mut neurons = Neurons::default();
        let name = (0, "down".to_owned());
        neurons.network(Network { name, experts: 3, width, k: Some(1), exact });
        neurons
    }

    /// Reads a chunk of tokens which chose one expert each.
    fn read(neurons: &mut Neurons, tokens: &[(usize, &[f32])]) {
        neurons.chunk(0, tokens.len());
        for (token, &(expert, row)) in tokens.iter().enumerate() {
            neurons.row(0, (expert, token), row.iter().copied()).unwrap();
        }
        neurons.end_chunk(0).unwrap();
    }

    #[test]
    fn batch_counts_use_one_position_of_several_sequences() {
        let mut neurons = network(2, true);
        neurons.begin();
        read(&mut neurons, &[(0, &[1.0, 0.0])]);
        read(&mut neurons, &[(1, &[0.0, -2.0])]);
        neurons.begin();
        read(&mut neurons, &[(0, &[0.0, 3.0]), (2, &[0.0, 0.0]), (2, &[1.0, 0.0])]);
        let counts = neurons.take().remove(0);
        let of = |expert, batch| [0, 1].map(|n| counts.active(expert, n, batch));
        assert_eq!(of(0, 1), [(1, 2), (1, 2)]);
        assert_eq!((of(1, 1), of(2, 1)), ([(0, 1), (1, 1)], [(1, 2), (0, 2)]));
        // One token of each sequence. Both tokens of the first position chose expert 0; those of the second
        // position chose different experts.
        assert_eq!(of(0, 2), [(1, 1), (1, 1)]);
        assert_eq!((of(1, 2), of(2, 2)), ([(0, 1), (1, 1)], [(0, 1), (0, 1)]));
        assert_eq!(of(0, 3), [(0, 0), (0, 0)], "there were two sequences");
    }

    #[test]
    fn gate_without_zeros_is_measured_for_thresholds_first() {
        let mut neurons = network(4, false);
        assert!(neurons.needs_thresholds());
        neurons.gauge();
        (0..100).for_each(|i| read(&mut neurons, &[(0, &[i as f32, -(i as f32), 0.5, 0.5])]));
        assert!(neurons.is_gauging());
        neurons.begin();
        read(&mut neurons, &[(1, &[99.0, -99.0, 1.0, 0.0])]);
        let counts = neurons.take().remove(0);
        assert!(!counts.is_exact() && counts.levels.len() == 3, "{:?}", counts.levels);
        assert!(counts.levels.is_sorted_by(|a, b| a.threshold < b.threshold));
        for level in 0..3 {
            let seen = [0, 1, 3].map(|n| counts.active_at(level, 1, n, 1).0);
            assert_eq!(seen, [1, 1, 0], "what was measured is not counted, and signs say nothing");
        }
        assert_eq!(counts.active(0, 0, 1), (0, 0));
    }

    #[test]
    fn memory_does_not_grow_with_the_sequence() {
        let mut neurons = network(130, true);
        neurons.begin();
        let remembered = neurons.watched[0].remembered;
        neurons.watched[0].remembered = 4;
        assert!(remembered >= 512, "{remembered}");
        let row = [1.0; 130];
        (0..100).for_each(|_| read(&mut neurons, &[(0, row.as_slice()), (1, row.as_slice())]));
        assert!(neurons.watched[0].sequences[0].bits.len() <= 6 * 3);
        neurons.begin();
        (0..3).for_each(|_| read(&mut neurons, &[(0, row.as_slice()), (0, row.as_slice())]));
        let counts = neurons.take().remove(0);
        assert_eq!((counts.active(0, 129, 1), counts.active(1, 129, 1)), ((106, 106), (100, 100)));
        assert_eq!(
            (counts.active(0, 0, 2), counts.active(1, 0, 2)),
            ((4, 4), (2, 2)),
            "positions past the fourth"
        );
    }
}
