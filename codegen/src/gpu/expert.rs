//! Gated networks of experts over the rows that were routed to them. A block has an active expert and some
//! columns of its result. Few rows are gathered by warps, as many at a time as the schedule says. Many rows
//! come in tiles of 64, each a block of its own; blocks past an expert's last row end at once.

use super::dot::Rows;
use super::launch::{Extent, Launch};
use super::linear::{Few, LinearMethod, WARPS};
use super::weight::WeightRow;
use super::{GpuKernel, plain_tile, tile};
use crate::dsl::{F, I, Kb, P};
use crate::kernels::routed::expert;
use crate::spec::{ComputeType, ExpertDown, ExpertGateUp, RowFormat, WeightOrder};
use moec_ir::op::{DispatchLayout, Glu};
use moec_ir::types::Format;

/// Gate-up or down product of an expert: the parameters fixed at build time.
struct ExpertMatrix {
    layout: DispatchLayout,
    depth: usize,
    /// Columns of the result.
    columns: usize,
    format: Format,
    compute: ComputeType,
    /// Row distance of the multiplied operand, in words.
    ld: usize,
    /// Activation of the gate-up product.
    glu: Option<Glu>,
    bias: bool,
    out: RowFormat,
    rows: usize,
}

impl ExpertMatrix {
    fn is_gated(&self) -> bool {
        self.glu.is_some_and(Glu::is_gated)
    }

    fn method(&self) -> Option<LinearMethod> {
        LinearMethod::of(self.rows, self.format, self.compute, self.depth, self.ld)
    }

    fn launch(&self) -> Option<Launch> {
        let method = self.method()?;
        let [rows, columns] = method.extents(self.columns, self.is_gated());
        let [block, shared] = method.block();
        // An expert has a token at most once.
        let parts =
            if matches!(method, LinearMethod::Few { .. }) { Extent::fixed(1) } else { Extent::rows(rows) };
        let tiles = Extent::fixed(self.columns.div_ceil(columns));
        Some(Launch { grid: [tiles, Extent::active(self.layout), parts], block, shared })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let Some(method) = self.method() else {
            return k.fail("no GPU kernel for this order, format or depth");
        };
        let (x, dispatch, weights) = (k.arg(0), k.arg(1), k.arg(2));
        let bias = self.bias.then(|| k.arg(3));
        let out = k.arg(3 + usize::from(self.bias));
        let active = k.block_index(1);
        k.when(active.lt(dispatch.load_int()), || {
            let e = expert(dispatch, self.layout, active);
            let matrix = weights.load_address(e.id);
            let width = self.columns * self.glu.map_or(1, Glu::projections);
            let bias = bias.map(|b| b.words(e.id * width));
            self.columns_of(
                k,
                method,
                &ExpertOperands { x, dispatch, matrix, bias, out, first: e.first, end: e.end },
            );
        });
    }
}

impl ExpertGateUp {
    /// Matrix that it multiplies by; `None` where panels are written out of neurons.
    fn matrix(&self) -> Option<ExpertMatrix> {
        let &Self { layout, hidden, inter, format, compute, x_ld, glu, bias, out, order, schedule } = self;
        (order == WeightOrder::Panels).then_some(ExpertMatrix {
            layout,
            depth: hidden,
            columns: inter,
            format,
            compute,
            ld: x_ld,
            glu: Some(glu),
            bias,
            out,
            rows: schedule.rows,
        })
    }
}

impl ExpertDown {
    /// Matrix that it multiplies by, as of [`ExpertGateUp`].
    fn matrix(&self) -> Option<ExpertMatrix> {
        let &Self { layout, inter, hidden, format, compute, h_ld, bias, order, schedule } = self;
        (order == WeightOrder::Panels).then_some(ExpertMatrix {
            layout,
            depth: inter,
            columns: hidden,
            format,
            compute,
            ld: h_ld,
            glu: None,
            bias,
            out: RowFormat::f32(hidden),
            rows: schedule.rows,
        })
    }
}

impl GpuKernel for ExpertGateUp {
    fn launch(&self) -> Option<Launch> {
        self.matrix()?.launch()
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        match self.matrix() {
            Some(matrix) => matrix.write(k),
            None => k.fail("no GPU kernel for this order, format or depth"),
        }
    }
}

impl GpuKernel for ExpertDown {
    fn launch(&self) -> Option<Launch> {
        self.matrix()?.launch()
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        match self.matrix() {
            Some(matrix) => matrix.write(k),
            None => k.fail("no GPU kernel for this order, format or depth"),
        }
    }
}

/// Operands of a block, and the slots of its expert.
struct ExpertOperands<'k> {
    x: P<'k>,
    dispatch: P<'k>,
    matrix: P<'k>,
    bias: Option<P<'k>>,
    out: P<'k>,
    first: I<'k>,
    end: I<'k>,
}

impl ExpertMatrix {
    fn columns_of<'k>(&self, k: &'k Kb<'k>, method: LinearMethod, p: &ExpertOperands<'k>) {
        let gated = self.is_gated();
        let [rows, columns] = method.extents(self.columns, gated);
        let (first_column, last_column) = (k.block_index(0) * columns, k.i(self.columns as i64 - 1));
        // Gate and up read the rows of tokens, down those of slots. Past the end the last row is repeated,
        // and not stored.
        let row_at = |slot: I<'k>| {
            let slot = slot.min(p.end - 1);
            let row = if self.glu.is_some() {
                p.dispatch.words(self.layout.token()).words(slot).load_int()
            } else {
                slot
            };
            p.x.words(row * self.ld)
        };
        let weight = |column: I<'k>, part: I<'k>| {
            let row = (first_column + column).min(last_column) + part * self.columns;
            WeightRow::new(k, p.matrix, row, self.format, self.depth)
        };
        let store = |slot: I<'k>, column: I<'k>, sum: F<'k>, up: Option<F<'k>>| {
            let column = first_column + column;
            k.when(slot.lt(p.end).and(column.lt(last_column + 1)), || {
                let biased = |sum: F<'k>, c: I<'k>| p.bias.map_or(sum, |b| sum + b.words(c).load());
                let value = match (self.glu, up) {
                    (Some(Glu::Ungated(act)), _) => biased(sum, column).activate(act),
                    (Some(glu), Some(up)) => biased(sum, column).glu(biased(up, column + self.columns), glu),
                    _ => biased(sum, column),
                };
                let row = p.out.words(slot * self.out.ld);
                match self.out.compute {
                    ComputeType::Bf16 => {
                        row.halves(column).store_halves(value.both_halves(k.f(0.0)));
                        let alone = column.equals(last_column).and((column & 1).equals(k.i(0)));
                        // The missing half of a pair is zero.
                        k.when(alone, || row.halves(column + 1).store_halves(k.i32(0)));
                    }
                    _ => row.words(column).store(value),
                }
            });
        };
        match method {
            LinearMethod::Few { held, .. } => k.each(p.first, p.end, rows, |slot| {
                let at: Vec<_> = (0..rows).map(|r| row_at(slot + r)).collect();
                let x = Rows { at: &at, compute: self.compute, aligned: self.ld, held: false };
                let (format, depth, holds) = (self.format, self.depth, held > 0);
                let few = Few { per: columns / WARPS, gated, format, depth, holds };
                few.write(k, &x, &weight, &|r, c, sum, up| store(slot + r, c, sum, up));
            }),
            LinearMethod::Tile | LinearMethod::PlainTile => {
                let slot = p.first + k.block_index(2) * rows;
                k.when(slot.lt(p.end), || {
                    let row = |row: I<'k>| row_at(slot + row);
                    let finish =
                        |row: I<'k>, c: I<'k>, sum: F<'k>, up: Option<F<'k>>| store(slot + row, c, sum, up);
                    let (depth, format, form) = (self.depth, self.format, self.compute);
                    if method == LinearMethod::Tile {
                        let (row, weight, finish) = (&row, &weight, &finish);
                        tile::Product { depth, format, gated, row, weight, finish }.write(k);
                    } else {
                        let (row, weight, finish) = (&row, &weight, &finish);
                        plain_tile::Product { depth, compute: form, gated, row, weight, finish }.write(k);
                    }
                });
            }
        }
    }
}
