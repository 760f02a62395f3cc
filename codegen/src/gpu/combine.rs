//! The weighted sum of the expert outputs of each token: a thread for every channel.

use super::map::{by_column, each_column};
use super::{GpuKernel, Launch};
use crate::dsl::Kb;
use crate::spec::Combine;

impl GpuKernel for Combine {
    fn launch(&self) -> Option<Launch> {
        Some(by_column(self.hidden))
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, out_ld, residual_ld, partial } = self;
        let (y, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
        let residual = residual_ld.map(|ld| (k.arg(3), ld));
        let out = k.arg(3 + usize::from(residual.is_some()));
        each_column(k, hidden, |row, c| {
            let slots = dispatch.words(layout.slot()).words(row * layout.k);
            let sum = (0..layout.k).fold(k.f(0.0), |sum, j| {
                let weight = weights.words(row * layout.k).words(j).load();
                let slot = slots.words(j).load_int();
                if !partial {
                    return y.words(slot * hidden).words(c).load().fma(weight, sum);
                }
                // A choice without a slot adds nothing; the first slot may hold NaN.
                let value = y.words(slot.max(k.i(0)) * hidden).words(c).load();
                slot.ge(k.i(0)).pick(value, k.f(0.0)).fma(weight, sum)
            });
            // Last, as on the CPU.
            let sum = residual.map_or(sum, |(r, ld)| sum + r.words(row * ld).words(c).load());
            out.words(row * out_ld).words(c).store(sum);
        });
    }
}
