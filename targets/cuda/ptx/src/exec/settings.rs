//! Launch of a kernel.

/// Launch of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks: x, y and z.
    pub grid: [u32; 3],
    /// Threads of a block: x, y and z; 1024 together at most.
    pub block: [u32; 3],
    /// Bytes of shared memory after what the kernel declares itself: where `.extern .shared` begins.
    pub dynamic_shared: u32,
    /// Whether races in shared memory are looked for.
    pub races: bool,
    /// Whether unwritten registers and shared memory may be read; they are zero.
    pub unwritten: bool,
    /// Most steps of the warps of one block.
    pub steps: u64,
    /// Threads of this machine that execute blocks. With one, everything happens in one order; with more,
    /// atomic operations of several blocks come in any.
    pub workers: usize,
}

impl Launch {
    /// Blocks and threads of a block, in one dimension; one worker, and everything is looked for.
    pub fn linear(blocks: u32, threads: u32) -> Self {
        Self::new([blocks, 1, 1], [threads, 1, 1])
    }

    /// Blocks and threads of a block; one worker, and everything is looked for.
    pub fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, dynamic_shared: 0, races: true, unwritten: false, steps: 1 << 32, workers: 1 }
    }

    pub(super) fn block_threads(&self) -> u32 {
        self.block.iter().product()
    }
}
