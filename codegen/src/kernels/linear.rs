//! `x · wᵀ` with bias, residual or gate in the epilogue.

use super::micro::Columns;
use super::multiply::{self, finish, multiply, on_tiles, panel_bytes};
use super::panel::{Matrix, PanelRows, panels};
use super::{GpuKernel, Kernel, NO_GATE, Rule, amx, can_multiply};
use crate::dsl::{I, Kb};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::{ComputeType, Product, RowFormat, Symbol, WeightOrder, packed_words};
use moec_ir::op::Glu;
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::Format;

/// `[x, w, bias? f32 [n], residual?, out]`: `x · wᵀ`. `out` may be `residual`. `x` is packed as
/// `compute` says, and so is `x_ld` counted, in words.
///
/// With `groups > 1` group `g` reads columns `g·k ..` of `x` and writes columns `g·n ..` of `out`.
/// With `glu`, `n` is `2I`: gate (first I) and up (last I) join, and `out` has I columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// Input channels (per group).
    pub k: usize,
    /// Rows of the weight (per group).
    pub n: usize,
    /// Format of the weight.
    pub format: Format,
    /// Compute type.
    pub compute: ComputeType,
    /// Matrices, each with its own range of columns.
    pub groups: usize,
    /// Row distance of `x`.
    pub x_ld: usize,
    /// Row distance of `out`.
    pub out_ld: usize,
    /// Whether the bias is there.
    pub bias: bool,
    /// Row distance of the residual, if one is added. Not together with `glu`.
    pub residual_ld: Option<usize>,
    /// Gated epilogue.
    pub glu: Option<Glu>,
    /// Division of its work.
    pub schedule: Schedule,
}

impl Kernel for Linear {
    fn kind(&self) -> &'static str {
        "linear"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        s.word("linear").num("k", self.k).num("n", self.n).word(self.format.name()).num("p", isa.nr);
        s.compute(self.compute);
        s.num("g", self.groups).num("x", self.x_ld).num("o", self.out_ld).flag("bias", self.bias);
        s.option("r", self.residual_ld);
        if let Some(glu) = self.glu {
            s.glu(glu);
        }
        s.schedule(&self.schedule);
    }

    fn grid(&self, isa: &Isa) -> Grid {
        let tiles = self.groups * panels(isa, self.n, self.glu.is_some());
        Grid::Tiles { rows: self.schedule.rows as u32, tiles: tiles as u32 }
    }

    fn args(&self) -> usize {
        3 + usize::from(self.bias) + usize::from(self.residual_ld.is_some())
    }

    fn scratch_bytes(&self, isa: &Isa) -> usize {
        multiply::scratch_bytes(isa, self.k, self.format, self.compute, self.schedule)
    }

    fn layout(&self, isa: &Isa) -> Option<Layout> {
        let nr = isa.nr as u32;
        Some(if self.glu.is_some() { Layout::GluPanels { nr } } else { Layout::Panels { nr } })
    }

    fn product(&self) -> Option<Product> {
        let &Self { k, n, format, compute, groups, schedule, .. } = self;
        let order = WeightOrder::Panels;
        Some(Product { k, n, groups, experts: None, format, compute, order, schedule })
    }

    fn schedule_mut(&mut self) -> Option<&mut Schedule> {
        Some(&mut self.schedule)
    }

    fn rules(&self, isa: &Isa) -> Vec<Rule> {
        let &Self { k, n, format, compute, groups, x_ld, out_ld, residual_ld, glu, .. } = self;
        let out = if glu.is_some() { n / 2 } else { n };
        vec![
            (k > 0 && n > 0 && groups > 0, "an extent is zero"),
            (glu.is_none() || n % 2 == 0, "a gated weight has an odd number of rows"),
            (glu.is_none_or(Glu::is_gated), NO_GATE),
            (glu.is_none() || residual_ld.is_none(), "gate and residual exclude each other"),
            (x_ld >= packed_words(k, compute) * groups && out_ld >= out * groups, "rows overlap"),
            can_multiply(isa, format, compute),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { k: depth, n, format, compute, groups, x_ld, out_ld, bias, residual_ld, glu, schedule } =
            self;
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.scratch());
        let (x, weights) = (arg(), arg());
        let bias = bias.then(&mut arg);
        let residual = residual_ld.map(|ld| (arg(), ld));
        let out = arg();

        let per_group = panels(&k.isa, n, glu.is_some());
        let columns_out = if glu.is_some() { n / 2 } else { n };
        let words = packed_words(depth, compute);
        let tiled = on_tiles(&k.isa, compute);
        let bytes = panel_bytes(&k.isa, depth, format);
        let matrix = Matrix { outputs: (n, glu.is_some()), depth, format, compute, schedule };
        let body = |tile: I<'k>, range, again: Option<I<'k>>| {
            let (group, p) = if groups == 1 {
                (k.i(0), tile)
            } else {
                let count = k.i(per_group as i64);
                (tile.div(count), tile.rem(count))
            };
            let at = if groups == 1 { weights } else { weights.bytes(group * matrix.bytes(k)) };
            let panel = matrix.panel(k, at, p);
            let columns = Columns::of(k, p, n, glu);
            let bias = bias.map(|b| b.words(group * n));
            let at = |row| x.words(row * x_ld + group * words);
            let results = columns.results(out.words(group * columns_out), RowFormat::f32(out_ld));
            // In a block of rows the panels follow each other as in memory.
            let next = tiled.then(|| panel.weights.beyond(bytes));
            let rows = PanelRows { range, at: &at, row_stride: Some(x_ld), next, out: results };
            multiply(k, &panel, &rows, again, &|row, sums| {
                let bias = bias.map(|b| columns.bias(k, b));
                let residual = residual.map(|(r, ld)| r.words(row * ld + group * columns_out));
                columns.store(sums, bias, residual, out.words(row * out_ld + group * columns_out));
            });
        };
        if tiled {
            k.tiles_by_block(schedule.rows, amx::BLOCK, |tile, range| body(tile, range, None));
        } else {
            k.even_tiles_with_reuse(schedule.rows, |tile, range, again| body(tile, range, Some(again)));
        }
        finish(k, compute);
    }
}
