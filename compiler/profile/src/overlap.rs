//! Agreement of two profiles on the busy experts: Overlap@K (NPUMoE, §5.1 and §5.8).

use super::{Profile, Routing};
use moec_base::error::{Error, Result};

/// The agreement of two profiles on the busiest experts of each layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Overlap {
    /// Experts that are compared.
    pub k: usize,
    /// Layers with their shares: of the `k` busiest experts of one profile, those that are among the `k`
    /// busiest of the other.
    pub layers: Vec<(u32, f64)>,
    /// Median over the layers.
    pub median: f64,
    /// Mean over the layers.
    pub mean: f64,
}

/// The `k` busiest experts, ties by the lowest index.
fn busiest(layer: &Routing, k: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..layer.chosen.len()).collect();
    order.sort_by_key(|&e| std::cmp::Reverse(layer.chosen[e]));
    order.truncate(k);
    order
}

/// Overlap@K of two profiles of one model; `k` is at most the number of experts of a layer. Symmetric.
///
/// # Errors
/// Fails if the profiles have different layers.
pub fn overlap(a: &Profile, b: &Profile, k: usize) -> Result<Overlap> {
    let alike = |(x, y): (&Routing, &Routing)| x.layer == y.layer && x.chosen.len() == y.chosen.len();
    if a.layers.len() != b.layers.len() || !a.layers.iter().zip(&b.layers).all(alike) {
        return Err(Error::input("the profiles are of models with different layers or experts")
            .hint("profiles of one checkpoint, taken from different texts, can be compared"));
    }
    let share = |(x, y): (&Routing, &Routing)| {
        let k = k.clamp(1, x.chosen.len().max(1));
        let other = busiest(y, k);
        let both = busiest(x, k).iter().filter(|e| other.contains(e)).count();
        (x.layer, both as f64 / k as f64)
    };
    let layers: Vec<(u32, f64)> = a.layers.iter().zip(&b.layers).map(share).collect();
    let mut sorted: Vec<f64> = layers.iter().map(|(_, s)| *s).collect();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    let median = if n == 0 { 0.0 } else { f64::midpoint(sorted[(n - 1) / 2], sorted[n / 2]) };
    let mean = if n == 0 { 0.0 } else { sorted.iter().sum::<f64>() / n as f64 };
    Ok(Overlap { k, layers, median, mean })
}
