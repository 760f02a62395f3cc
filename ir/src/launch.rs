//! GPU kernels, which accelerators launch.

use crate::op::DispatchLayout;
use crate::results::Results;
use bincode::{Decode, Encode};

/// Blocks along an axis of a launch, of `n` valid rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub enum Extent {
    /// A fixed number.
    Fixed(u32),
    /// One for every `per` rows, the last perhaps of fewer.
    Rows {
        /// Rows of a block.
        per: u32,
    },
    /// One for every expert that can be active: experts of a token times rows, but no more than there are
    /// experts. The dispatch table lists the active ones; blocks past their number end at once.
    Active {
        /// Experts of a token.
        k: u32,
        /// Experts.
        experts: u32,
    },
}

impl Extent {
    /// Blocks, of `n` valid rows.
    pub const fn blocks(self, n: u32) -> u32 {
        match self {
            Self::Fixed(blocks) => blocks,
            Self::Rows { per: 0 } => 0,
            Self::Rows { per } => n.div_ceil(per),
            Self::Active { k, experts } => {
                let slots = n.saturating_mul(k);
                if slots < experts { slots } else { experts }
            }
        }
    }

    /// The extent for a dispatch table.
    pub const fn active(layout: DispatchLayout) -> Self {
        Self::Active { k: layout.k as u32, experts: layout.experts as u32 }
    }

    /// A fixed number.
    pub const fn fixed(blocks: usize) -> Self {
        Self::Fixed(blocks as u32)
    }

    /// One for every `per` rows.
    pub const fn rows(per: usize) -> Self {
        Self::Rows { per: per as u32 }
    }
}

/// Threads of a block, at most.
pub const MOST_THREADS: u32 = 1024;
/// Bytes of static shared memory of a block, at most.
pub const MOST_SHARED: u32 = 48 << 10;
/// Blocks along x, at most.
const MOST_ALONG_X: u32 = i32::MAX as u32;
/// Blocks along y and z, at most.
const MOST_BLOCKS: u32 = 65_535;

/// Launch of a kernel. Its parameters are the addresses of the operands, in order, then the number of valid
/// rows as a 32-bit integer. No valid row: no launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Encode, Decode)]
pub struct Launch {
    /// Blocks, along x, y and z.
    pub grid: [Extent; 3],
    /// Threads of a block, along x alone.
    pub block: u32,
    /// Bytes of static shared memory of a block, [`MOST_SHARED`] at most: they are in the kernel, nothing is
    /// to be requested.
    pub shared: u32,
}

impl Launch {
    /// Blocks along x, y and z, for `n` valid rows. `None` if the number is 0, or more than a launch can
    /// have.
    pub fn blocks(&self, n: u32) -> Option<[u32; 3]> {
        let blocks = self.grid.map(|extent| extent.blocks(n));
        let most = [MOST_ALONG_X, MOST_BLOCKS, MOST_BLOCKS];
        blocks.iter().zip(most).all(|(&b, most)| (1..=most).contains(&b)).then_some(blocks)
    }
}

/// A GPU kernel, in an artifact of the unit that launches it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct GpuKernel {
    /// Index into [`Plan::units`](crate::plan::Plan::units).
    pub unit: u32,
    /// Path of the artifact, relative to the bundle, with `/`.
    pub artifact: String,
    /// Symbol, once in the artifact.
    pub symbol: String,
    /// Addresses that it takes.
    pub operands: u32,
    /// Those of them that it writes to.
    pub results: Results,
    /// Grid, block and shared memory of a launch.
    pub launch: Launch,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launch_grid_follows_the_number_of_rows() {
        let grid = [Extent::Rows { per: 64 }, Extent::Active { k: 8, experts: 64 }, Extent::Fixed(3)];
        let launch = Launch { grid, block: 128, shared: 0 };
        assert_eq!(launch.blocks(1), Some([1, 8, 3]));
        assert_eq!(launch.blocks(65), Some([2, 64, 3]));
        assert_eq!(launch.blocks(0), None);
        let tall = Launch { grid: [Extent::Fixed(1), Extent::Rows { per: 1 }, Extent::Fixed(1)], ..launch };
        assert_eq!(tall.blocks(65_535), Some([1, 65_535, 1]));
        assert_eq!(tall.blocks(65_536), None);
        let none = Launch { grid: [Extent::Rows { per: 0 }, Extent::Fixed(1), Extent::Fixed(1)], ..launch };
        assert_eq!(none.blocks(7), None);
    }
}
