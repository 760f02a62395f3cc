//! Rows that are copied: of a table by id, of another buffer, part by part; and the softmax of rows.

use super::GpuKernel;
use super::launch::{Extent, Launch};
use super::map::{by_column, each_column};
use super::weight::{WeightRow, by_rows};
use crate::dsl::{F, Kb, WARP};
use crate::spec::{CopyColumns, Embed, GatherRows, Softmax};

impl GpuKernel for Embed {
    fn launch(&self) -> Option<Launch> {
        by_rows(self.format).then(|| by_column(self.hidden))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { hidden, format, out_ld, .. } = self;
        let (ids, table, out) = (k.arg(0), k.arg(1), k.arg(2));
        each_column(k, hidden, |row, c| {
            let id = ids.words(row).load_int();
            let value = WeightRow::new(k, table, id, format, hidden).one(c);
            out.words(row * out_ld).words(c).store(value);
        });
    }
}

impl GpuKernel for GatherRows {
    fn launch(&self) -> Option<Launch> {
        Some(by_column(self.cols))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { cols, x_ld, out_ld } = self;
        let (x, rows, out) = (k.arg(0), k.arg(1), k.arg(2));
        each_column(k, cols, |row, c| {
            let from = rows.words(row).load_int();
            let value = x.words(from.max(k.i(0)) * x_ld).words(c).load();
            out.words(row * out_ld).words(c).store(from.ge(k.i(0)).pick(value, k.f(0.0)));
        });
    }
}

impl GpuKernel for CopyColumns {
    fn launch(&self) -> Option<Launch> {
        Some(by_column(self.groups * self.cols))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { groups, cols, in_group, out_group, in_ld, out_ld } = self;
        let (from, to) = (k.arg(0), k.arg(1));
        each_column(k, groups * cols, |row, at| {
            let (group, c) = (at.div(k.i(cols as i64)), at.rem(k.i(cols as i64)));
            let value = from.words(row * in_ld + group * in_group).words(c).load();
            to.words(row * out_ld + group * out_group).words(c).store(value);
        });
    }
}

impl GpuKernel for Softmax {
    fn launch(&self) -> Option<Launch> {
        // A warp for every row.
        let grid = [Extent::rows(1), Extent::fixed(1), Extent::fixed(1)];
        Some(Launch { grid, block: WARP as u32, shared: 0 })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { cols, x_ld, out_ld } = self;
        let row = k.block_index(0);
        let (x, out) = (k.arg(0).words(row * x_ld), k.arg(1).words(row * out_ld));
        let lane = k.lane_index();
        let low = k.f(f32::NEG_INFINITY);
        let max = k.fold(lane, cols, WARP, &[low], |c, max| vec![max[0].max(x.words(c).load())]);
        let max = max[0].warp_max(WARP);
        let e = |c| (x.words(c).load() - max).exp();
        let sum: Vec<F<'k>> = k.fold(lane, cols, WARP, &[k.f(0.0)], |c, sum| vec![sum[0] + e(c)]);
        let sum = sum[0].warp_sum(WARP);
        // A lane reads the elements that it writes, and no others, so the result may be the operand.
        k.each(lane, cols, WARP, |c| out.words(c).store(e(c) / sum));
    }
}
