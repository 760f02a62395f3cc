//! The second half: what gate and up gave through the down projection.

use super::{Path, WeightOrder, by_panels, multiplies, scratch_bytes};
use crate::dsl::{I, Kb};
use crate::kernels::micro::Columns;
use crate::kernels::multiply::{finish, multiply, on_tiles, panel_bytes};
use crate::kernels::panel::{Matrix, PanelRows, panels};
use crate::kernels::routed::{Expert, expert};
use crate::kernels::{GpuKernel, Kernel, Rule, neuron};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::{ComputeType, Product, RowFormat, Symbol, packed_words};
use moec_ir::Bundle;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::Format;

/// `[h [slots, I], dispatch i32, w (addresses [E] of Panels), bias? f32 [E, H], y out f32 [slots, H]]`.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertDown {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels `I`.
    pub inter: usize,
    /// Output channels `H`.
    pub hidden: usize,
    /// Format of the weight.
    pub format: Format,
    /// Compute type; `h` is packed accordingly.
    pub compute: ComputeType,
    /// Row distance of `h`, in words.
    pub h_ld: usize,
    /// Whether the bias is there.
    pub bias: bool,
    /// Order of the weight's panels.
    pub order: WeightOrder,
    /// Division of its work.
    pub schedule: Schedule,
}

impl Kernel for ExpertDown {
    fn kind(&self) -> &'static str {
        "expert_down"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        s.word("expert_down").layout(self.layout).num("i", self.inter).num("h", self.hidden);
        s.word(self.format.name()).compute(self.compute).num("p", isa.nr).num("x", self.h_ld);
        s.flag("bias", self.bias).order(self.order).schedule(&self.schedule);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        Grid::Experts { table: 1, tiles: panels(isa, self.hidden, false) as u32 }
    }

    fn args(&self) -> usize {
        4 + usize::from(self.bias)
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let &Self { inter, format, compute, order, schedule, .. } = self;
        let (products, panel) = scratch_bytes(isa, inter, format, compute, order, schedule);
        products + panel
    }

    fn layout(&self, isa: &Isa) -> Option<Layout> {
        Some(match self.order {
            WeightOrder::Neurons { gate_bound } => Layout::Neurons { gate_bound },
            WeightOrder::Split => Layout::UpDown,
            WeightOrder::Bundles => Layout::Bundles,
            WeightOrder::Panels => Layout::Panels { nr: isa.nr as u32 },
        })
    }

    fn product(&self) -> Option<Product> {
        let &Self { layout, inter: k, hidden: n, format, compute, order, schedule, .. } = self;
        Some(Product { k, n, groups: 1, experts: Some(layout), format, compute, order, schedule })
    }

    fn schedule_mut(&mut self) -> Option<&mut Schedule> {
        Some(&mut self.schedule)
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { hidden, inter, format, compute, h_ld, bias, order, .. } = self;
        let mut rules = vec![
            (hidden > 0 && inter > 0, "an extent is zero"),
            (h_ld >= packed_words(inter, compute), "rows overlap"),
        ];
        rules.extend(multiplies(isa, format, compute, order, bias));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, inter, hidden, format, compute, h_ld, bias, order, schedule } = self;
        let (h, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
        let bias = bias.then(|| k.arg(3));
        let out = k.arg(3 + usize::from(bias.is_some()));
        let tiles = panels(&k.isa, hidden, false);
        let bytes = panel_bytes(&k.isa, inter, format);
        let (products, _) = scratch_bytes(&k.isa, inter, format, compute, order, schedule);
        let written = k.scratch().bytes(products);
        let stored = Matrix { outputs: (hidden, false), depth: inter, format, compute, schedule };
        let panel = |e: &Expert<'k>, p: I<'k>, range, next| {
            let matrix = weights.load_address(e.id);
            let panel = by_panels(stored.panel(k, matrix, p), order, written, |gate_bound, to| {
                let bundle = Bundle { format, hidden, gate_bound };
                let first = e.id * inter;
                let up_down = order.anywhere().map(|gates| neuron::UpDownRows { at: weights, first, gates });
                let addresses = neuron::NeuronAddresses { k, bundle, inter, matrix, up_down };
                neuron::panels::down(k, &addresses, inter, written, p, to);
            });
            let next = if order == WeightOrder::Panels { next } else { written };
            let columns = Columns::of(k, p, hidden, None);
            let at = |slot| h.words(slot * h_ld);
            let results = columns.results(out, RowFormat::f32(hidden));
            let rows = PanelRows { range, at: &at, row_stride: Some(h_ld), next: Some(next), out: results };
            multiply(k, &panel, &rows, None, &|slot, sums| {
                let bias = bias.map(|b| columns.bias(k, b.words(e.id * hidden)));
                columns.store(sums, bias, None, out.words(slot * hidden));
            });
        };
        if on_tiles(&k.isa, compute) {
            let path = Path { k, dispatch, layout, weights, tiles, bytes, rows: schedule.rows };
            path.walk(|_| {}, panel);
        } else {
            k.expert_tiles(tiles, |active, p| {
                let e = expert(dispatch, layout, active);
                panel(&e, p, [e.first, e.end], weights.load_address(e.id).bytes(p * bytes).beyond(bytes));
            });
        }
        finish(k, compute);
    }
}
