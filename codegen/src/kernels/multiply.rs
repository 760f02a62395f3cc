//! Rows times one weight panel, in whatever way formats and machine call for: the heart of `linear` and
//! of the experts.
//!
//! | weights | rows | how |
//! |---|---|---|
//! | f32, f16, bf16 | f32 | multiply-adds, weights widened in registers ([`super::micro`]) |
//! | bf16 | bf16 | dot products of pairs ([`super::micro`]); on NEON two rows at a time ([`super::squares`]) |
//! | q2 to q8, q2s, q4n, q8h, q4h, mxfp4 | bytes | dot products of four bytes, one scale per group ([`super::bytes`]) |
//! | q2k to q6k, iq4xs | bytes | the same with a scale for each run, less the minimum times the row's sum ([`super::fine`]) |
//! | q4o, q4c | bytes | the same, one scale per column; rows of wider codes beside ([`super::outliers`]) |
//! | all of codes | f32, bf16 | the panel is unpacked once ([`super::unpack`]), then as the others |
//! | bf16 | bf16, on tile registers | [`super::amx`] |

use super::micro::{QUARTERS, product, row_groups};
pub(crate) use super::panel::panel_bytes;
use super::panel::{Panel, PanelRows};
use super::{amx, bytes, unpack};
use crate::dsl::{F, I, Kb};
use crate::machine::Isa;
use crate::schedule::{Schedule, least};
use crate::spec::ComputeType;
use moec_ir::types::Format;

/// Bytes of scratch for products over `depth` channels.
pub(crate) fn scratch_bytes(
    isa: &Isa,
    depth: usize,
    format: Format,
    compute: ComputeType,
    schedule: Schedule,
) -> usize {
    let unpacked = unpacked_bytes(isa, depth, format, compute);
    match compute {
        ComputeType::I8 => unpacked + bytes::scratch_bytes(isa, schedule),
        ComputeType::Bf16 if isa.tiles => unpacked + amx::scratch_bytes(isa),
        _ => unpacked,
    }
}

/// Bytes at the beginning of the scratch that hold an unpacked panel.
fn unpacked_bytes(isa: &Isa, depth: usize, format: Format, compute: ComputeType) -> usize {
    if !format.is_quantised() || compute == ComputeType::I8 {
        return 0;
    }
    panel_bytes(isa, unpack::depth(depth), unpack::format(compute))
}

/// Whether such products run on tile registers. Rows must then be a fixed distance apart.
pub(crate) fn on_tiles(isa: &Isa, compute: ComputeType) -> bool {
    isa.tiles && compute == ComputeType::Bf16
}

/// Multiplies rows by a panel; `store(i, sums)` gets the two vectors of columns of row `i`.
///
/// `again` is true where the call before, in the same kernel call, had the same panel.
pub(crate) fn multiply<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    rows: &PanelRows<'_, 'k>,
    again: Option<I<'k>>,
    store: &dyn Fn(I<'k>, [F<'k>; 2]),
) {
    let [first, end] = rows.range;
    let ready = match (panel.format, panel.compute) {
        (format, ComputeType::I8) if format.is_quantised() => {
            return bytes::multiply(k, panel, first, end, rows.at, store);
        }
        (format, _) if format.is_quantised() => {
            match again {
                Some(again) => k.branch(again, || {}, || unpack::unpack(k, panel)),
                None => unpack::unpack(k, panel),
            }
            unpack::unpacked(k, panel)
        }
        _ => *panel,
    };
    if on_tiles(&k.isa, panel.compute) {
        let scratch = k.scratch().bytes(unpacked_bytes(&k.isa, panel.depth, panel.format, panel.compute));
        let bytes = panel_bytes(&k.isa, panel.depth, panel.format);
        let next = rows.next.unwrap_or_else(|| panel.weights.beyond(bytes));
        return amx::multiply(k, &ready, rows, scratch, amx::NextPanel::of(next, bytes), store);
    }
    let mr = k.isa.mr;
    row_groups(k, mr, first, end, |at, m| {
        let later = rows.next.filter(|_| m >= least(mr) && panel.schedule.ahead > 0).map(|next| {
            // The first group of rows wants its panel faster than memory gives it. Those that follow find it
            // in the second-level cache and leave memory idle: time to fetch the next one.
            let pass = (at - first).div(k.i(m as i64)).min(k.i(QUARTERS as i64 - 1));
            let bytes = panel_bytes(&k.isa, panel.depth, panel.format);
            next.bytes(pass * (bytes / QUARTERS))
        });
        let rows: Vec<_> = (0..m).map(|i| (rows.at)(at + i)).collect();
        for (i, sums) in product(k, &rows, &ready, later).into_iter().enumerate() {
            store(at + i, sums);
        }
    });
}

/// Ends the products of a kernel call.
pub(crate) fn finish(k: &Kb<'_>, compute: ComputeType) {
    if on_tiles(&k.isa, compute) {
        k.release_tiles();
        k.fence_stores();
    }
}
