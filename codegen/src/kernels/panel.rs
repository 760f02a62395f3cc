//! Operands of matrix kernels: weight panels, the rows that they multiply, and the results.

use crate::dsl::{F, I, Kb, LINE, P, Span};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::ComputeType;
use moec_ir::plan::Layout;
use moec_ir::types::{Coding, Format, GROUP};

/// A packed matrix.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    /// Output channels, and whether a gate and its up projection share a panel.
    pub(crate) outputs: (usize, bool),
    /// Input channels.
    pub(crate) depth: usize,
    /// Format of the weights.
    pub(crate) format: Format,
    /// Format of the rows that they multiply.
    pub(crate) compute: ComputeType,
    /// Division of work.
    pub(crate) schedule: Schedule,
}

impl Matrix {
    /// Its bytes.
    pub(crate) fn bytes(&self, k: &Kb<'_>) -> usize {
        let (outputs, gated) = self.outputs;
        let nr = k.isa.nr as u32;
        let layout = if gated { Layout::GluPanels { nr } } else { Layout::Panels { nr } };
        layout.matrix_bytes(self.format, outputs as u64, self.depth).unwrap_or(0) as usize
    }

    /// Panel `p`, where the matrix begins at `at`.
    pub(crate) fn panel<'k>(&self, k: &'k Kb<'k>, at: P<'k>, p: I<'k>) -> Panel<'k> {
        let Self { outputs: (outputs, gated), depth, format, compute, schedule } = *self;
        let (panels, bytes) = (panels(&k.isa, outputs, gated), panel_bytes(&k.isa, depth, format));
        let outliers = (format.outliers(depth) > 0).then(|| at.bytes(panels * bytes));
        Panel { weights: at.bytes(p * bytes), depth, format, compute, schedule, outliers }
    }
}

/// Panels of a weight of `n` rows. A gated panel holds half of its columns from either half of the rows.
pub(crate) fn panels(isa: &Isa, n: usize, glu: bool) -> usize {
    if glu { (n / 2).div_ceil(isa.nr / 2) } else { n.div_ceil(isa.nr) }
}

/// A weight panel: `depth` input channels of [`Isa::nr`] columns.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'k> {
    /// Its first element.
    pub(crate) weights: P<'k>,
    /// Input channels.
    pub(crate) depth: usize,
    /// Format of the weights.
    pub(crate) format: Format,
    /// Format of the rows that they multiply: f32, or pairs of bf16.
    pub(crate) compute: ComputeType,
    /// Division of work.
    pub(crate) schedule: Schedule,
    /// The matrix's table of input channels with wider codes ([`Layout`]), if it has any.
    pub(crate) outliers: Option<P<'k>>,
}

impl<'k> Panel<'k> {
    /// The end, after the codes of all groups: the scales of its columns, f32, where they are the same for all
    /// groups.
    pub(crate) fn channel_scales(&self, k: &Kb<'k>) -> P<'k> {
        self.weights.bytes(self.depth.div_ceil(GROUP) * group_bytes(self.format, k.isa.nr))
    }

    /// The scales of a group, from a column on, with what is beside them: those of its blocks, or those after
    /// the blocks of all groups, where groups have more than one.
    pub(super) fn group_scales(&self, k: &'k Kb<'k>, index: I<'k>, group: P<'k>, column: usize) -> P<'k> {
        let (nr, bytes) = (k.isa.nr, self.format.scale_bytes());
        let scales = if self.format.group_bytes().is_some() {
            group.bytes(nr * self.format.block_bytes())
        } else {
            let blocks = (self.format.group() / GROUP) as i64;
            self.channel_scales(k).bytes(index.div(k.i(blocks)) * (nr * bytes))
        };
        scales.bytes(column * bytes)
    }

    /// `body(input channel, weights)` for each of its outliers, with the weights of all columns.
    pub(crate) fn each_outlier(&self, k: &'k Kb<'k>, body: impl FnOnce(I<'k>, [F<'k>; 2])) {
        let Some(table) = self.outliers else { return };
        let (nr, count) = (k.isa.nr, self.format.outliers(self.depth));
        let codes = self.channel_scales(k).words(nr);
        let scales = [0, k.lanes()].map(|c| codes.bytes(count * nr).words(c).load_vec(Span::Full));
        k.each(0, count, 1, |i| {
            // Within the matrix, whatever the table says.
            let channel = table.words(i).load_int().max(k.i(0)).min(k.i(self.depth as i64 - 1));
            let codes = codes.bytes(i * nr);
            let weights =
                [0, 1].map(|half| codes.bytes(half * k.lanes()).load_codes().to_float() * scales[half]);
            body(channel, weights);
        });
    }
}

/// Bytes of a panel.
pub(crate) fn panel_bytes(isa: &Isa, depth: usize, format: Format) -> usize {
    format.column_bytes(depth) * isa.nr
}

/// Bytes of a group of a panel of codes, and of its scales if it has its own.
pub(super) const fn group_bytes(format: Format, nr: usize) -> usize {
    match format.group_bytes() {
        Some(bytes) => nr * bytes,
        None => nr * format.block_bytes(),
    }
}

/// Whether the codes of a panel are nibbles, each 8 more than its code.
pub(crate) fn is_nibbles(format: Format) -> bool {
    format.coding() == Some(Coding::Nibbles) && format.grid().is_empty()
}

/// Rows that are multiplied by a panel.
pub(crate) struct PanelRows<'r, 'k> {
    /// The first, and the one after the last.
    pub(crate) range: [I<'k>; 2],
    /// Address of a row, in the compute type [`Panel::compute`].
    pub(crate) at: &'r dyn Fn(I<'k>) -> P<'k>,
    /// Words from row to row, where that is the same for all.
    pub(crate) row_stride: Option<usize>,
    /// Panel to prefetch; the address may be unmapped.
    pub(crate) next: Option<P<'k>>,
    /// Destination of results.
    pub(crate) out: Results<'k>,
}

/// Destination of a panel's columns.
#[derive(Clone, Copy)]
pub(crate) struct Results<'k> {
    /// Address of row 0.
    pub(crate) at: P<'k>,
    /// Words from row to row.
    pub(crate) ld: usize,
    /// Bytes of a row.
    pub(crate) bytes: usize,
    /// Whether they are whole lines in every row, if they are in row 0.
    pub(crate) lines: bool,
}

/// Prefetches the `bytes` that lie `ahead` of an address, unless that is 0.
pub(super) fn fetch(from: P<'_>, bytes: usize, ahead: usize) {
    for line in (0..bytes).step_by(LINE).filter(|_| ahead > 0) {
        from.beyond(ahead + line).prefetch();
    }
}
