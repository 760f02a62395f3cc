//! Loads of experts in calls that decode.

use super::loads::LayerLoads;

/// Calls that a cost of decoding is the mean of.
pub const CALLS: u32 = 128;

impl LayerLoads {
    /// Loads of [`CALLS`] calls that decode `batch` rows, each row of another sequence. A profile records the
    /// choices of whole chunks, so the rows are drawn: each chooses `k` experts, and on average every expert
    /// is chosen as often as calibration recorded. Equal counts give equal rows.
    pub fn decoding(&self, batch: u32) -> Self {
        let call = |call: u32| {
            let mut loads = vec![0; self.experts()];
            (0..batch).for_each(|row| self.draw(call * batch + row, &mut loads));
            loads
        };
        Self {
            layer: self.layer,
            k: self.k,
            tokens: self.tokens,
            chosen: self.chosen.clone(),
            samples: (0..CALLS).map(call).collect(),
        }
    }

    /// Adds the choices of a row, by systematic sampling: the shares of the experts follow each other on a
    /// line of length `k`, in an order of the row's own, and `k` points at a distance of 1 choose those under
    /// them.
    fn draw(&self, row: u32, loads: &mut [u32]) {
        let all: u64 = self.chosen.iter().sum();
        if all == 0 {
            return;
        }
        let mut order: Vec<(u64, usize)> = (0..self.experts()).map(|e| (mix(row, e), e)).collect();
        order.sort_unstable();
        let scale = f64::from(self.k) / all as f64;
        let mut point = (f64::from(row + 1) * GOLDEN).fract();
        let mut end = 0.0;
        for (_, e) in order {
            end += (self.chosen[e] as f64 * scale).min(1.0);
            if end > point {
                loads[e] += 1;
                point += 1.0;
            }
        }
    }
}

/// The golden ratio, whose multiples divide an interval evenly.
const GOLDEN: f64 = 0.618_033_988_749_894_9;

/// Number that orders expert `e` in a row (SplitMix64).
fn mix(row: u32, e: usize) -> u64 {
    let mut x = ((u64::from(row) << 32) | e as u64).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
