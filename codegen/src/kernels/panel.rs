//! What matrix kernels multiply: weight panels, the rows that meet them, and where results go.

use crate::dsl::{I, LINE, P};
use crate::schedule::Schedule;
use crate::spec::Compute;
use moec_ir::types::Format;

/// A weight panel: `depth` input channels of [`Isa::nr`] columns.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'k> {
    /// Its first element.
    pub(crate) weights: P<'k>,
    /// Input channels.
    pub(crate) depth: usize,
    /// Format of the weights.
    pub(crate) format: Format,
    /// Form of the rows that meet them: f32, or pairs of bf16.
    pub(crate) compute: Compute,
    /// How work is cut.
    pub(crate) schedule: Schedule,
}

/// Rows that meet a panel.
pub(crate) struct PanelRows<'r, 'k> {
    /// The first, and the one behind the last.
    pub(crate) range: [I<'k>; 2],
    /// Where a row lies, in the form that [`Panel::compute`] names.
    pub(crate) at: &'r dyn Fn(I<'k>) -> P<'k>,
    /// Words from row to row, where that is the same for all.
    pub(crate) apart: Option<usize>,
    /// The panel that is wanted next, which need not be mapped.
    pub(crate) next: Option<P<'k>>,
    /// Where results go.
    pub(crate) out: Results<'k>,
}

/// Where the columns of a panel go.
#[derive(Clone, Copy)]
pub(crate) struct Results<'k> {
    /// Those of row 0.
    pub(crate) at: P<'k>,
    /// Words from row to row.
    pub(crate) ld: usize,
    /// Bytes of a row.
    pub(crate) bytes: usize,
    /// Whether they are whole lines in every row, if they are in row 0.
    pub(crate) lines: bool,
}

/// Asks for the `bytes` that lie `ahead` of an address, unless that is 0.
pub(super) fn fetch(from: P<'_>, bytes: usize, ahead: usize) {
    for line in (0..bytes).step_by(LINE).filter(|_| ahead > 0) {
        from.beyond(ahead + line).prefetch();
    }
}
