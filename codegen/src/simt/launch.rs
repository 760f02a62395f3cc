//! How kernels of threads are launched.

use moec_ir::op::DispatchLayout;

/// Blocks along an axis of a launch, of `n` valid rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// So many.
    Fixed(u32),
    /// One for every `per` rows, the last perhaps of fewer.
    Rows {
        /// Rows of a block.
        per: u32,
    },
    /// One for every expert that can be active: experts of a token times rows, but no more than there are experts. Which
    /// are active stands in the dispatch table; blocks past their number end at once.
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
            Self::Rows { per } => n.div_ceil(per),
            Self::Active { k, experts } => {
                let slots = n.saturating_mul(k);
                if slots < experts { slots } else { experts }
            }
        }
    }

    pub(super) const fn active(layout: DispatchLayout) -> Self {
        Self::Active { k: layout.k as u32, experts: layout.experts as u32 }
    }

    pub(super) const fn fixed(blocks: usize) -> Self {
        Self::Fixed(blocks as u32)
    }

    pub(super) const fn rows(per: usize) -> Self {
        Self::Rows { per: per as u32 }
    }
}

/// What a runtime launches a kernel with. Its parameters are the addresses of the operands, in order, then the number of
/// valid rows as a 32-bit integer. No valid row: no launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks, along x, y and z.
    pub grid: [Extent; 3],
    /// Threads of a block, along x alone.
    pub block: u32,
    /// Bytes of static shared memory of a block, 48 KiB at most: they are in the kernel, nothing is to be asked for.
    pub shared: u32,
}

/// Blocks along y and z, at most.
const MOST_BLOCKS: u32 = 65_535;

impl Launch {
    /// Blocks along x, y and z, of `n` valid rows. `None` where that is more than a launch can have.
    pub fn blocks(&self, n: u32) -> Option<[u32; 3]> {
        let blocks = self.grid.map(|extent| extent.blocks(n));
        (blocks[1] <= MOST_BLOCKS && blocks[2] <= MOST_BLOCKS).then_some(blocks)
    }
}
