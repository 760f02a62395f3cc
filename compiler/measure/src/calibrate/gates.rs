//! Measures the gates of experts and dense networks with SiLU. No kernel stores gates, so a sample of rows is kept with the
//! experts that they chose. After all text is read, the sample is multiplied by the gates of these experts.

use bincode::{Decode, Encode};
use moec_base::error::{Error, Result};
use moec_base::interrupt;
use moec_ir::op::{Activation, Glu};
use moec_ir::{Module, Source, WeightId};
use moec_profile::Gates;

/// Most pairs of a row and an expert that are kept per layer. If there are more, at least half this number is
/// kept.
const PAIRS: usize = 512;
/// Number of independent partial sums of a dot product.
const SUMS: usize = 16;

/// Sampled rows of the experts of one layer.
#[derive(Encode, Decode)]
pub(super) struct GateSample {
    layer: u32,
    /// Number of the weight whose first rows are the gate.
    weight: u32,
    /// Rows of the gate.
    inter: usize,
    /// Kept pairs of expert and row: one of `every` pairs.
    pairs: Vec<(usize, Vec<f32>)>,
    every: usize,
    total: usize,
}

/// Whether the gate of this network is measured.
pub(super) fn measured(glu: Glu) -> bool {
    glu == Glu::Gated(Activation::Silu)
}

impl GateSample {
    /// Creates the sample of a layer with a weight whose first `inter` rows are the gate, of each expert.
    pub(super) const fn new(layer: u32, weight: WeightId, inter: usize) -> Self {
        Self { layer, weight: weight.0, inter, pairs: Vec::new(), every: 1, total: 0 }
    }

    /// Adds a row that an expert computes. The choice of the kept pairs depends on their order alone.
    pub(super) fn add(&mut self, expert: usize, row: impl Iterator<Item = f32>) {
        if self.total.is_multiple_of(self.every) {
            self.pairs.push((expert, row.collect()));
        }
        self.total += 1;
        if self.pairs.len() > PAIRS {
            self.thin();
        }
    }

    /// Drops every other pair.
    fn thin(&mut self) {
        let mut index = 0;
        self.pairs.retain(|_| {
            index += 1;
            index % 2 == 1
        });
        self.every *= 2;
    }

    /// Takes the sample out; the next one is empty.
    pub(super) fn take(&mut self) -> Self {
        let next = Self::new(self.layer, WeightId(self.weight), self.inter);
        std::mem::replace(self, next)
    }

    /// Adds the sample of a later piece; both are thinned alike.
    pub(super) fn merge(&mut self, mut next: Self) {
        while self.every != next.every || self.pairs.len() + next.pairs.len() > PAIRS {
            let denser = if self.every <= next.every { &mut *self } else { &mut next };
            denser.thin();
        }
        self.pairs.append(&mut next.pairs);
        self.total += next.total;
    }

    /// Returns the magnitudes of the gates of the sample.
    ///
    /// # Errors
    /// Fails if a weight cannot be read, or on an interrupt.
    pub(super) fn finish(mut self, module: &Module, source: &dyn Source) -> Result<Gates> {
        let weight = module.weight(WeightId(self.weight));
        let (inter, hidden) = (self.inter, weight.cols());
        let mut gates = Gates::new(self.layer, weight.name.clone());
        self.pairs.sort_by_key(|(expert, _)| *expert);
        let mut matrix = vec![0.0; inter * hidden];
        for own in self.pairs.chunk_by(|a, b| a.0 == b.0) {
            interrupt::check()?;
            let Some(&(expert, _)) = own.first() else { continue };
            weight
                .expr
                .read(expert, 0..inter, 0..hidden, source, &mut matrix)
                .map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))?;
            for (_, row) in own {
                for gate in matrix.chunks_exact(hidden) {
                    gates.add(silu(dot(gate, row)));
                }
            }
        }
        Ok(gates)
    }
}

fn silu(x: f32) -> f32 {
    x / (1.0 + (-x).exp())
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, rest_a) = a.as_chunks::<SUMS>();
    let (b, rest_b) = b.as_chunks::<SUMS>();
    let mut sums = [0.0; SUMS];
    for (a, b) in a.iter().zip(b) {
        sums.iter_mut().zip(a.iter().zip(b)).for_each(|(sum, (a, b))| *sum += a * b);
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_sample_is_spread_over_all_rows() {
        let mut sample = GateSample::new(0, WeightId(0), 1);
        (0..10_000).for_each(|i| sample.add(i, std::iter::once(i as f32)));
        let (kept, every) = (sample.pairs.len(), sample.every);
        assert!(kept > PAIRS / 2 && kept <= PAIRS, "{kept}");
        let experts: Vec<usize> = sample.pairs.iter().map(|p| p.0).collect();
        assert_eq!(experts, (0..kept).map(|i| i * every).collect::<Vec<_>>());
        // Of a text in pieces, as dense a sample of each is kept.
        sample.take();
        let mut pieces = GateSample::new(0, WeightId(0), 1);
        for range in [0..8000, 8000..9000, 9000..10_000] {
            range.for_each(|i| sample.add(i, std::iter::once(i as f32)));
            pieces.merge(sample.take());
        }
        let of = |range: std::ops::Range<usize>| pieces.pairs.iter().filter(|p| range.contains(&p.0)).count();
        assert!(pieces.pairs.len() <= PAIRS && pieces.pairs.is_sorted_by_key(|p| p.0));
        assert_eq!([of(0..8000), of(8000..9000)], [8000, 1000].map(|n: usize| n.div_ceil(pieces.every)));
        assert_eq!(pieces.total, 10_000);
        assert_eq!(dot(&[1.0; 35], &[2.0; 35]), 70.0);
        assert!((silu(1.0) - 0.731_058_6).abs() < 1e-6 && silu(-90.0).abs() < 1e-30);
    }
}
