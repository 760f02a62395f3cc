//! Element by element: a thread for every column of a row.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use crate::dsl::{I, Kb};
use crate::kernels::Kernel as _;
use crate::kernels::map::by_position;
use crate::spec::{Map, MapOp};

pub(super) const THREADS: usize = 256;

/// A thread for every column of every row, 256 of them in a block.
pub(super) fn by_column(cols: usize) -> Launch {
    let grid = [Extent::rows(1), Extent::fixed(cols.div_ceil(THREADS)), Extent::fixed(1)];
    Launch { grid, block: THREADS as u32, shared: 0 }
}

/// Runs `body(row, column)` in a launch [`by_column`].
pub(super) fn each_column<'k>(k: &'k Kb<'k>, cols: usize, body: impl FnOnce(I<'k>, I<'k>)) {
    let (row, c) = (k.block_index(0), k.block_index(1) * THREADS + k.thread());
    k.when(c.lt(k.i(cols as i64)), || body(row, c));
}

impl GpuKernel for Map {
    fn launch(&self) -> Option<Launch> {
        Some(by_column(self.cols))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { op, cols, a_ld, out_ld } = self;
        let (a, out) = (k.arg(0), k.arg(self.args() - 1));
        let b = |ld: usize, row: I<'k>, c| k.arg(1).words(row * ld).words(c).load();
        each_column(k, cols, |row, c| {
            let x = a.words(row * a_ld).words(c).load();
            let column = |broadcast: bool| if broadcast { k.i(0) } else { c };
            let result = match op {
                MapOp::Add { b_ld, broadcast_b } => x + b(b_ld, row, column(broadcast_b)),
                MapOp::Mul { b_ld, broadcast_b } => x * b(b_ld, row, column(broadcast_b)),
                MapOp::MulHeads { heads, b_ld } => x * b(b_ld, row, c.div(k.i((cols / heads.max(1)) as i64))),
                MapOp::SoftCap { cap } => (x * (2.0 / cap)).sigmoid() * (2.0 * cap) - cap,
                MapOp::Glu { glu, b_ld } => x.glu(b(b_ld, row, c), glu),
                MapOp::ScaleCols => x * b(0, row, c),
                MapOp::Scale { factor } => x * factor,
                MapOp::Clamp { lo, hi } => x.at_least(lo).at_most(hi),
                MapOp::ScaleByPosition { beta, every, offset } => {
                    x * by_position(k, k.arg(1).words(row), (beta, every, offset))
                }
                MapOp::Act(act) => x.activate(act),
                MapOp::Softplus => x.softplus(),
            };
            out.words(row * out_ld).words(c).store(result);
        });
    }
}
