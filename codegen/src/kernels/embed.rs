//! Rows of a table as f32: the embedding of a token's id.

use super::panel::panel_bytes;
use super::{GpuKernel, Kernel, Rule, fine};
use crate::dsl::{I, Kb, P};
use crate::machine::Isa;
use crate::spec::Symbol;
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::{Coding, Format, GROUP};

/// Rows of a work item.
const ROWS: usize = 8;

/// `[ids i32, table, out]`: rows of the table, as f32. Ids must be in `0 .. vocab`.
#[derive(Clone, Debug, PartialEq)]
pub struct Embed {
    /// Rows of the table.
    pub vocab: usize,
    /// Columns.
    pub hidden: usize,
    /// Format of the table.
    pub format: Format,
    /// Whether the table is stored in panels, because a head shares it or its format has no single rows;
    /// otherwise row by row.
    pub panels: bool,
    /// Row distance of `out`.
    pub out_ld: usize,
}

impl Kernel for Embed {
    fn kind(&self) -> &'static str {
        "embed"
    }

    fn name(&self, s: &mut Symbol, isa: &Isa) {
        s.word("embed").num("v", self.vocab).num("h", self.hidden).word(self.format.name());
        s.option("p", self.panels.then_some(isa.nr)).num("o", self.out_ld);
    }

    fn grid(&self, _isa: &Isa) -> Grid {
        Grid::Tiles { rows: ROWS as u32, tiles: 1 }
    }

    fn args(&self) -> usize {
        3
    }

    fn layout(&self, isa: &Isa) -> Option<Layout> {
        Some(if self.panels { Layout::Panels { nr: isa.nr as u32 } } else { Layout::Rows })
    }

    fn rules(&self, _isa: &Isa) -> Vec<Rule> {
        vec![
            (self.out_ld >= self.hidden, "rows of the output overlap"),
            (self.holds(), "single rows in a format that needs whole panels"),
        ]
    }

    fn on_gpu(&self) -> Option<&dyn GpuKernel> {
        Some(self)
    }

    fn write<'k>(&self, k: &'k Kb<'k>) {
        let &Self { hidden, format, panels, out_ld, .. } = self;
        let (ids, table, out) = (k.arg(0), k.arg(1), k.arg(2));
        k.rows(ROWS, |row| {
            let id = ids.words(row).load_int();
            let out = out.words(row * out_ld);
            if panels {
                return column(k, format, table, id, hidden, out);
            }
            if format.is_grouped() {
                return grouped(k, format, table.bytes(id * format.row_bytes(hidden)), hidden, out);
            }
            let from = table.elements(id * hidden, format);
            k.columns(hidden, |c, span| {
                out.words(c).store_vec(from.elements(c, format).load_weights(format, span), span);
            });
        });
    }
}

impl Embed {
    /// Whether the table can be stored so. Panels of scales of two levels can be read column by column.
    const fn holds(&self) -> bool {
        self.format.holds_rows() || self.panels && self.format.has_fine_scales()
    }
}

/// Row `id` of a table in panels, as f32: a column of one of them.
fn column<'k>(k: &'k Kb<'k>, format: Format, table: P<'k>, id: I<'k>, hidden: usize, out: P<'k>) {
    let nr = k.isa.nr;
    let (panel, column) = (id.div(k.i(nr as i64)), id.rem(k.i(nr as i64)));
    let panel = table.bytes(panel * panel_bytes(&k.isa, hidden, format));
    if format.has_fine_scales() {
        return fine::write_column(k, format, panel, column, hidden, out);
    }
    if format.is_grouped() {
        return column_of_codes(k, format, panel, column, hidden, out);
    }
    k.each(0, hidden, 1, |c| {
        let value = match format {
            Format::F32 => panel.words(c * nr + column).load(),
            Format::F16 => panel.halves(c * nr + column).load_f16(),
            // Pairs of channels are adjacent.
            _ => {
                let upper = c & 1;
                panel.halves((c - upper) * nr + column * 2 + upper).load_bf16()
            }
        };
        out.words(c).store(value);
    });
}

/// As [`column`], of codes: a word holds four of them, and of nibbles four more, 16 channels on.
fn column_of_codes<'k>(
    k: &'k Kb<'k>,
    format: Format,
    panel: P<'k>,
    column: I<'k>,
    hidden: usize,
    out: P<'k>,
) {
    let (nr, grid) = (k.isa.nr, format.grid());
    let words = (format.row_bytes(GROUP) - 2) / 4;
    let halves = if format.coding() == Some(Coding::Bytes) { 1 } else { 2 };
    let group = |g: I<'k>, count: usize| {
        let (from, out) = (panel.bytes(g * panel_bytes(&k.isa, GROUP, format)), out.words(g * GROUP));
        let scale = from.words(words * nr).halves(column).load_scale(format);
        for (i, half) in (0..words).flat_map(|i| (0..halves).map(move |half| (i, half))) {
            let word = from.words(column + i * nr).load_int().narrow();
            for j in 0..4 {
                let nibble = || word.logical_shr(8 * j as i64 + 4 * half as i64) & 15;
                let code = match halves {
                    1 => word.signed_byte(j),
                    _ if grid.is_empty() => nibble() - 8,
                    _ => nibble().codes_at(grid, 0).signed_byte(0),
                };
                let at = half * GROUP / 2 + 4 * i + j;
                if at < count {
                    out.words(at).store(code.to_float() * scale);
                }
            }
        }
    };
    each_group(k, hidden, group);
}

/// A row of codes, then of scales, as f32. Vectors of codes are read whole: the last group is padded.
fn grouped<'k>(k: &'k Kb<'k>, format: Format, from: P<'k>, hidden: usize, out: P<'k>) {
    let (bytes, grid) = (format.row_bytes(GROUP) - 2, format.grid());
    let scales = from.bytes(hidden.div_ceil(GROUP) * bytes);
    let group = |g: I<'k>, count: usize| {
        let (scale, from, out) =
            (scales.bytes(g * 2).load_scale(format), from.bytes(g * bytes), out.words(g * GROUP));
        for at in (0..count).step_by(k.lanes()) {
            let codes = from.bytes(at % bytes).load_bytes();
            let nibble = |codes: I<'k>| if at < bytes { codes & 15 } else { codes.shr(4) };
            // The sign of a byte, in all of its lane.
            let signed = |codes: I<'k>| codes.shl(24).shr(24);
            let codes = match format.coding() {
                Some(Coding::Nibbles) if grid.is_empty() => nibble(codes) - 8,
                Some(Coding::Nibbles) => signed(nibble(codes).codes_at(grid, 0)),
                _ => signed(codes),
            };
            out.words(at).store_vec(codes.to_float() * scale, k.span(count - at));
        }
    };
    each_group(k, hidden, group);
}

/// `body(group, numbers in it)` for each group of a row.
pub(super) fn each_group<'k>(k: &'k Kb<'k>, cols: usize, body: impl Fn(I<'k>, usize)) {
    let whole = cols / GROUP;
    if whole > 0 {
        k.each(0, whole, 1, |g| body(g, GROUP));
    }
    if cols > whole * GROUP {
        body(k.i(whole as i64), cols - whole * GROUP);
    }
}
