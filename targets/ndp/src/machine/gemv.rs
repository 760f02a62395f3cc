//! The GEMV unit: tiles of 64 inputs by 32 columns.

use moec_ndp_isa::{LINE, PAIR_LINES, PANEL, TILE_PAIRS};

pub(super) const COLUMNS: usize = PANEL as usize;
pub(super) const PAIRS: usize = TILE_PAIRS as usize;
/// Bytes of a full tile.
pub(super) const TILE_BYTES: usize = PAIRS * (PAIR_LINES * LINE) as usize;

/// The weights of a tile as f32: those of even inputs, then those of odd ones, pair by pair.
#[derive(Clone)]
pub(super) struct Tile([[[f32; COLUMNS]; PAIRS]; 2]);

/// 64 inputs as f32: even ones, then odd ones.
pub(super) type Inputs = [[f32; PAIRS]; 2];

impl Tile {
    pub(super) const fn new() -> Self {
        Self([[[0.0; COLUMNS]; PAIRS]; 2])
    }

    /// Takes the records of a tile; pairs that it does not have are zero.
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        let [even, odd] = &mut self.0;
        let records = bytes.chunks_exact(COLUMNS * 4);
        let pairs = records.len();
        for ((record, even), odd) in records.zip(even.iter_mut()).zip(odd.iter_mut()) {
            for ((word, even), odd) in record.chunks_exact(4).zip(even).zip(odd) {
                // Two bf16: the even input in the lower half.
                let word = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
                *even = f32::from_bits(word << 16);
                *odd = f32::from_bits(word & 0xffff_0000);
            }
        }
        even[pairs.min(PAIRS)..].fill([0.0; COLUMNS]);
        odd[pairs.min(PAIRS)..].fill([0.0; COLUMNS]);
    }

    /// Adds the products with `x`: those of a column by halves, 32 apart first, in the end two neighbours;
    /// then to its sum.
    pub(super) fn multiply(&self, x: &Inputs, sums: &mut [f32; COLUMNS]) {
        for (block, sums) in sums.chunks_exact_mut(LANES).enumerate() {
            let [even, odd] = [0, 1].map(|side| Part { weights: &self.0[side], x: &x[side], block }.all());
            for ((sum, even), odd) in sums.iter_mut().zip(even).zip(odd) {
                *sum += even + odd;
            }
        }
    }
}

/// Columns that are worked on at once: as many as registers hold.
const LANES: usize = 8;

type Lanes = [f32; LANES];

/// Some columns of every second input. Each level of the sums is a function, so that all of them stay in
/// registers.
#[derive(Clone, Copy)]
struct Part<'a> {
    weights: &'a [[f32; COLUMNS]; PAIRS],
    x: &'a [f32; PAIRS],
    block: usize,
}

impl Part<'_> {
    #[inline]
    fn product(self, pair: usize) -> Lanes {
        let (mut lanes, x) = ([0.0; LANES], self.x[pair]);
        for (lane, weight) in lanes.iter_mut().zip(&self.weights[pair][self.block * LANES..]) {
            *lane = weight * x;
        }
        lanes
    }

    #[inline]
    fn sixteen_apart(self, pair: usize) -> Lanes {
        add(self.product(pair), self.product(pair + 16))
    }

    #[inline]
    fn eight_apart(self, pair: usize) -> Lanes {
        add(self.sixteen_apart(pair), self.sixteen_apart(pair + 8))
    }

    #[inline]
    fn four_apart(self, pair: usize) -> Lanes {
        add(self.eight_apart(pair), self.eight_apart(pair + 4))
    }

    #[inline]
    fn two_apart(self, pair: usize) -> Lanes {
        add(self.four_apart(pair), self.four_apart(pair + 2))
    }

    #[inline]
    fn all(self) -> Lanes {
        add(self.two_apart(0), self.two_apart(1))
    }
}

#[inline]
fn add(mut low: Lanes, high: Lanes) -> Lanes {
    for (low, high) in low.iter_mut().zip(high) {
        *low += high;
    }
    low
}
