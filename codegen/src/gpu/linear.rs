//! `x · wᵀ` with bias, residual or gate in the epilogue.

use super::FEW_ROWS;
use super::dot::{self, Rows, products};
use super::launch::{Extent, Launch};
use super::weight::{WeightRow, by_rows};
use super::{GpuKernel, plain_tile, tile};
use crate::dsl::{F, I, Kb, P, WARP};
use crate::spec::{ComputeType, Linear, packed_words};
use moec_ir::types::Format;

/// Warps of a block that multiplies few rows.
pub(super) const WARPS: usize = 4;

impl Linear {
    /// Columns of a group's result.
    fn columns(&self) -> usize {
        if self.glu.is_some() { self.n / 2 } else { self.n }
    }

    fn method(&self) -> Option<LinearMethod> {
        // Rows of a group, too, begin at addresses that copies can read.
        let ld = self.x_ld | if self.groups > 1 { packed_words(self.k, self.compute) } else { 0 };
        LinearMethod::of(self.schedule.rows, self.format, self.compute, self.k, ld)
    }
}

/// Columns of a result that a warp computes. Each warp reads the rows, so it takes as many columns as
/// registers hold and as leave enough warps to fill a GPU.
pub(super) const fn per_warp(columns: usize, gated: bool, rows: usize) -> usize {
    match columns {
        4096.. if !gated && rows == 1 => 4,
        1024.. => 2,
        _ => 1,
    }
}

/// Row format of a product with the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LinearMethod {
    /// Few of them, by warps: this many at a time, in this many bytes of shared memory.
    Few {
        /// Rows.
        rows: usize,
        /// Bytes.
        held: usize,
    },
    /// Tiles on tensor cores.
    Tile,
    /// Tiles in f32.
    PlainTile,
}

impl LinearMethod {
    /// The method for a schedule of `rows` rows of type `compute`, `ld` words apart.
    pub(super) fn of(
        rows: usize,
        format: Format,
        compute: ComputeType,
        depth: usize,
        ld: usize,
    ) -> Option<Self> {
        let many = rows > FEW_ROWS;
        match compute {
            ComputeType::Bf16 if many && tile::multiplies(format, depth, ld) => Some(Self::Tile),
            ComputeType::F32 if many && by_rows(format) => Some(Self::PlainTile),
            _ => {
                let rows = rows.clamp(1, FEW_ROWS);
                let held = dot::held_bytes(format, compute, depth, rows);
                dot::multiplies(format, compute, depth).then_some(Self::Few { rows, held })
            }
        }
    }

    /// Rows of a block, and columns of its result.
    pub(super) fn extents(self, columns: usize, gated: bool) -> [usize; 2] {
        match self {
            Self::Few { rows, .. } => [rows, per_warp(columns, gated, rows) * WARPS],
            Self::Tile => [tile::ROWS, tile::columns(gated)],
            Self::PlainTile => [plain_tile::ROWS, plain_tile::columns(gated)],
        }
    }

    /// Threads and bytes of shared memory of a block.
    pub(super) const fn block(self) -> [u32; 2] {
        match self {
            Self::Few { held, .. } => [(WARPS * WARP) as u32, held as u32],
            Self::Tile => [tile::THREADS as u32, tile::SHARED as u32],
            Self::PlainTile => [plain_tile::THREADS as u32, plain_tile::SHARED as u32],
        }
    }
}

/// Operands, of one group.
struct Operands<'k> {
    x: P<'k>,
    weights: P<'k>,
    bias: Option<P<'k>>,
    residual: Option<(P<'k>, usize)>,
    out: P<'k>,
}

impl<'k> Operands<'k> {
    fn new(k: &'k Kb<'k>, s: &Linear) -> Self {
        let group = k.block_index(2);
        let mut args = (0..).map(|i| k.arg(i));
        let mut arg = || args.next().unwrap_or(k.shared(0));
        let x = arg().words(group * packed_words(s.k, s.compute));
        let weights = arg().bytes(group * (s.n * s.format.row_bytes(s.k)));
        let bias = s.bias.then(&mut arg).map(|b| b.words(group * s.n));
        let residual = s.residual_ld.map(|ld| (arg().words(group * s.columns()), ld));
        Self { x, weights, bias, residual, out: arg().words(group * s.columns()) }
    }

    /// Result of a sum, and of the sum of the gate's partner.
    fn finish(&self, s: &Linear, [row, c]: [I<'k>; 2], sum: F<'k>, up: Option<F<'k>>) -> F<'k> {
        let biased = |sum: F<'k>, c: I<'k>| self.bias.map_or(sum, |b| sum + b.words(c).load());
        let value = match (s.glu, up) {
            (Some(glu), Some(up)) => biased(sum, c).glu(biased(up, c + s.columns()), glu),
            _ => biased(sum, c),
        };
        self.residual.map_or(value, |(r, ld)| value + r.words(row * ld).words(c).load())
    }
}

/// Work of a warp with few rows.
pub(super) struct Few {
    /// Columns of the result.
    pub(super) per: usize,
    pub(super) gated: bool,
    pub(super) format: Format,
    pub(super) depth: usize,
    /// Whether rows are brought to shared memory first.
    pub(super) holds: bool,
}

/// Takes a result: number of the row, column in the block, the sum, that of the gate's partner.
type Finish<'a, 'k> = &'a dyn Fn(usize, I<'k>, F<'k>, Option<F<'k>>);

impl Few {
    /// The products of the warp's columns; `weight` is as in [`tile::Product`]. All threads must come here.
    pub(super) fn write<'k>(
        &self,
        k: &'k Kb<'k>,
        x: &Rows<'_, 'k>,
        weight: &dyn Fn(I<'k>, I<'k>) -> WeightRow<'k>,
        finish: Finish<'_, 'k>,
    ) {
        let first = k.warp_index() * self.per;
        let parts = 1 + usize::from(self.gated);
        let weights: Vec<_> = (0..parts)
            .flat_map(|part| (0..self.per).map(move |c| (part, c)))
            .map(|(part, c)| weight(first + c, k.i(part as i64)))
            .collect();
        let sums = if self.holds {
            let addresses = dot::hold(k, x, self.depth, WARPS * WARP);
            let held = Rows { at: &addresses, compute: x.compute, aligned: 4, held: true };
            products(k, &weights, self.format, self.depth, &held)
        } else {
            products(k, &weights, self.format, self.depth, x)
        };
        k.when(k.lane_index().equals(k.i(0)), || {
            for (c, own) in sums.iter().take(self.per).enumerate() {
                for (r, &sum) in own.iter().enumerate() {
                    finish(r, first + c, sum, self.gated.then(|| sums[self.per + c][r]));
                }
            }
        });
    }
}

impl GpuKernel for Linear {
    fn launch(&self) -> Option<Launch> {
        let method = self.method()?;
        let [rows, columns] = method.extents(self.columns(), self.glu.is_some());
        let [block, shared] = method.block();
        let tiles = Extent::fixed(self.columns().div_ceil(columns));
        Some(Launch { grid: [tiles, Extent::rows(rows), Extent::fixed(self.groups)], block, shared })
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let Some(method) = self.method() else {
            return k.fail("no such linear");
        };
        let o = Operands::new(k, self);
        let gated = self.glu.is_some();
        let [rows, columns] = method.extents(self.columns(), gated);
        // Rows and columns past the end repeat the last one, and are not stored.
        let last = k.row_count() - 1;
        let last_column = k.i(self.columns() as i64 - 1);
        let (first_row, first_column) = (k.block_index(1) * rows, k.block_index(0) * columns);
        let row_at = |row: I<'k>| o.x.words((first_row + row).min(last) * self.x_ld);
        let weight = |column: I<'k>, part: I<'k>| {
            let row = (first_column + column).min(last_column) + part * self.columns();
            WeightRow::new(k, o.weights, row, self.format, self.k)
        };
        let finish = |row: I<'k>, column: I<'k>, sum: F<'k>, up: Option<F<'k>>| {
            let (row, column) = (first_row + row, first_column + column);
            k.when(row.lt(last + 1).and(column.lt(last_column + 1)), || {
                let value = o.finish(self, [row, column], sum, up);
                o.out.words(row * self.out_ld).words(column).store(value);
            });
        };
        match method {
            LinearMethod::Few { rows, held } => {
                let at: Vec<_> = (0..rows).map(|r| row_at(k.i(r as i64))).collect();
                // A power of two divides both numbers where it divides the bits of both.
                let aligned =
                    self.x_ld | if self.groups > 1 { packed_words(self.k, self.compute) } else { 0 };
                let x = Rows { at: &at, compute: self.compute, aligned, held: false };
                let shape =
                    Few { per: columns / WARPS, gated, format: self.format, depth: self.k, holds: held > 0 };
                shape.write(k, &x, &weight, &|r, c, sum, up| finish(k.i(r as i64), c, sum, up));
            }
            LinearMethod::Tile => {
                let (depth, format) = (self.k, self.format);
                tile::Product { depth, format, gated, row: &row_at, weight: &weight, finish: &finish }
                    .write(k);
            }
            LinearMethod::PlainTile => {
                let (depth, form) = (self.k, self.compute);
                plain_tile::Product {
                    depth,
                    compute: form,
                    gated,
                    row: &row_at,
                    weight: &weight,
                    finish: &finish,
                }
                .write(k);
            }
        }
    }
}
