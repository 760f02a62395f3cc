//! The first half: gathered rows through gate and up.

use super::{Path, WeightOrder, by_panels, gathered_bytes, gathered_ld, multiplies, scratch_bytes};
use crate::dsl::{I, Kb};
use crate::kernels::micro::Columns;
use crate::kernels::multiply::{finish, multiply, on_tiles, panel_bytes};
use crate::kernels::panel::{Matrix, PanelRows, panels};
use crate::kernels::routed::{Expert, expert};
use crate::kernels::{GpuKernel, Kernel, Rule, fits, neuron};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::{ComputeType, Product, RowFormat, Symbol, packed_words};
use moec_ir::Bundle;
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::Format;

/// `[x, dispatch i32, w (addresses [E] of GluPanels, of Panels without a gate), bias? f32 [E, 2I], h out
/// [slots, I]]`: the gathered rows of each active expert through gate and up. With [`WeightOrder::Split`] the
/// `E` addresses are those of gates, followed by `E·I` addresses of up and down;
/// [`ExpertDown`](crate::spec::ExpertDown) then has only the latter.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertGateUp {
    /// Layout of the dispatch table.
    pub layout: DispatchLayout,
    /// Input channels.
    pub hidden: usize,
    /// Output channels `I`.
    pub inter: usize,
    /// Format of the weight.
    pub format: Format,
    /// Compute type; `x` is packed accordingly.
    pub compute: ComputeType,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Whether the bias is there.
    pub bias: bool,
    /// Format of the result: f32 or bf16.
    pub out: RowFormat,
    /// Order of the weight's panels.
    pub order: WeightOrder,
    /// Division of its work.
    pub schedule: Schedule,
}

impl Kernel for ExpertGateUp {
    fn kind(&self) -> &'static str {
        "expert_gate_up"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        s.word("expert_gate_up").layout(self.layout).num("h", self.hidden).num("i", self.inter);
        s.word(self.format.name()).compute(self.compute).num("p", isa.nr).num("x", self.x_ld);
        s.flag("bias", self.bias).glu(self.glu);
        if self.out != RowFormat::f32(self.inter) {
            s.row_format(self.out);
        }
        s.order(self.order).schedule(&self.schedule);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        let tiles = panels(isa, self.glu.projections() * self.inter, self.glu.is_gated());
        Grid::Experts { table: 1, tiles: tiles as u32 }
    }

    fn args(&self) -> usize {
        4 + usize::from(self.bias) + usize::from(self.order == WeightOrder::Split)
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        let &Self { layout, hidden, format, compute, order, schedule, .. } = self;
        let (products, panel) = scratch_bytes(isa, hidden, format, compute, order, schedule);
        products + gathered_bytes(isa, layout.rows, hidden, compute) + panel
    }

    fn layout(&self, isa: &Isa) -> Option<Layout> {
        let nr = isa.nr as u32;
        Some(match self.order {
            WeightOrder::Neurons { gate_bound } => Layout::Neurons { gate_bound },
            WeightOrder::Split => Layout::Gates,
            WeightOrder::Bundles => Layout::Bundles,
            WeightOrder::Panels if self.glu.is_gated() => Layout::GluPanels { nr },
            WeightOrder::Panels => Layout::Panels { nr },
        })
    }

    fn product(&self) -> Option<Product> {
        let &Self { layout, hidden: k, inter, format, compute, glu, order, schedule, .. } = self;
        let n = glu.projections() * inter;
        Some(Product { k, n, groups: 1, experts: Some(layout), format, compute, order, schedule })
    }

    fn schedule_mut(&mut self) -> Option<&mut Schedule> {
        Some(&mut self.schedule)
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { hidden, inter, format, compute, x_ld, out, bias, order, .. } = self;
        let mut rules = vec![
            (hidden > 0 && inter > 0, "an extent is zero"),
            (x_ld >= packed_words(hidden, compute), "rows overlap"),
            (out.compute != ComputeType::I8, "a panel has half a group of columns"),
        ];
        rules.extend(multiplies(isa, format, compute, order, bias));
        rules.extend(fits(isa, out, inter, 1));
        rules
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { layout, hidden, inter, format, compute, x_ld, glu, bias, out: result, order, schedule } =
            self;
        let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
        let bias = bias.then(|| k.arg(3));
        let separate = (order == WeightOrder::Split).then(|| k.arg(3));
        let out = k.arg(3 + usize::from(bias.or(separate).is_some()));
        let (both, gated) = (glu.projections() * inter, glu.is_gated());
        let tiles = panels(&k.isa, both, gated);
        let bytes = panel_bytes(&k.isa, hidden, format);
        let tokens = dispatch.words(layout.token());
        let row_at = |slot| x.words(tokens.words(slot).load_int() * x_ld);
        let (products, _) = scratch_bytes(&k.isa, hidden, format, compute, order, schedule);
        let gathered = k.scratch().bytes(products);
        let written = gathered.bytes(gathered_bytes(&k.isa, layout.rows, hidden, compute));
        let stored = Matrix { outputs: (both, gated), depth: hidden, format, compute, schedule };
        let panel = |e: &Expert<'k>, p: I<'k>, rows: PanelRows<'_, 'k>, columns: &Columns<'k>| {
            let matrix = weights.load_address(e.id);
            let panel = by_panels(stored.panel(k, matrix, p), order, written, |gate_bound, to| {
                let bundle = Bundle { format, hidden, gate_bound };
                let (at, first) = (separate.unwrap_or(weights), e.id * inter);
                let up_down = order.anywhere().map(|gates| neuron::UpDownRows { at, first, gates });
                let addresses = neuron::NeuronAddresses { k, bundle, inter, matrix, up_down };
                neuron::panels::gate_up(k, &addresses, inter, written, p, to);
            });
            let next = if order == WeightOrder::Panels { rows.next } else { Some(written) };
            multiply(k, &panel, &PanelRows { next, ..rows }, None, &|slot, sums| {
                let bias = bias.map(|b| columns.bias(k, b.words(e.id * both)));
                columns.store_as(result.compute, sums, bias, None, out.words(slot * result.ld));
            });
        };
        let columns = |p| Columns::of(k, p, both, Some(glu));
        if !on_tiles(&k.isa, compute) {
            // Rows are read where they lie: gathering them first costs more than their addresses do.
            return k.expert_tiles(tiles, |active, p| {
                let (e, columns) = (expert(dispatch, layout, active), columns(p));
                let next = Some(weights.load_address(e.id).bytes(p * bytes).beyond(bytes));
                let out = columns.results(out, result);
                panel(
                    &e,
                    p,
                    PanelRows { range: [e.first, e.end], at: &row_at, row_stride: None, next, out },
                    &columns,
                );
            });
        }
        // The rows of a tile must be a fixed distance apart: those of a block are gathered once.
        let words = packed_words(hidden, compute);
        let (ld, to) = (gathered_ld(words), gathered);
        let path = Path { k, dispatch, layout, weights, tiles, bytes, rows: schedule.rows };
        path.walk(
            |[first, end]| {
                k.each(first, end, 1, |slot| k.copy(row_at(slot), to.words((slot - first) * ld), words));
            },
            |e, p, range, next| {
                let columns = columns(p);
                let at = |slot: I<'k>| to.words((slot - range[0]) * ld);
                let out = columns.results(out, result);
                panel(
                    e,
                    p,
                    PanelRows { range, at: &at, row_stride: Some(ld), next: Some(next), out },
                    &columns,
                );
            },
        );
        finish(k, compute);
    }
}
