//! Rows times one weight panel, in whatever way formats and machine call for: the heart of `linear` and
//! of the experts.
//!
//! | weights | rows | how |
//! |---|---|---|
//! | f32, f16, bf16 | f32 | multiply-adds, weights widened in registers ([`super::micro`]) |
//! | bf16 | bf16 | dot products of pairs ([`super::micro`]) |
//! | q8, q4 | bytes | dot products of four bytes, one scale per group ([`super::bytes`]) |
//! | q8, q4 | f32, bf16 | the panel is unpacked once ([`super::unpack`]), then as the first two |

use super::micro::{Panel, product, row_groups};
use super::{bytes, unpack};
use crate::dsl::{F, I, Kb, P};
use crate::machine::Isa;
use crate::schedule::Schedule;
use crate::spec::Compute;
use moec_ir::types::{Format, GROUP};

/// Bytes of a panel.
pub(crate) fn panel_bytes(isa: &Isa, depth: usize, format: Format) -> usize {
    match format {
        Format::F32 | Format::F16 => format.bytes(depth * isa.nr),
        Format::Bf16 => depth.div_ceil(2) * isa.nr * 4,
        Format::Q8 => depth.div_ceil(GROUP) * isa.nr * 34,
        Format::Q4 => depth.div_ceil(GROUP) * isa.nr * 18,
    }
}

/// Bytes of scratch for products over `depth` channels.
pub(crate) fn scratch_bytes(
    isa: &Isa,
    depth: usize,
    format: Format,
    compute: Compute,
    schedule: Schedule,
) -> usize {
    match (format, compute) {
        (Format::F32 | Format::F16 | Format::Bf16, _) => 0,
        (_, Compute::I8) => bytes::scratch_bytes(isa, schedule),
        (_, compute) => panel_bytes(isa, unpack::depth(depth), unpack::format(compute)),
    }
}

/// Multiplies rows `first .. end` by a panel.
///
/// `row(i)` is the address of row `i`, in the form that [`Panel::compute`] names; `store(i, sums)` gets its
/// two vectors of columns.
pub(crate) fn multiply<'k>(
    k: &'k Kb<'k>,
    panel: &Panel<'k>,
    first: I<'k>,
    end: I<'k>,
    row: &dyn Fn(I<'k>) -> P<'k>,
    store: &dyn Fn(I<'k>, [F<'k>; 2]),
) {
    let panel = match (panel.format, panel.compute) {
        (Format::Q8 | Format::Q4, Compute::I8) => return bytes::multiply(k, panel, first, end, row, store),
        (Format::Q8 | Format::Q4, _) => unpack::unpack(k, panel),
        _ => *panel,
    };
    row_groups(k, panel.schedule.mr(&k.isa), first, end, |at, m| {
        let rows: Vec<_> = (0..m).map(|i| row(at + i)).collect();
        for (i, sums) in product(k, &rows, &panel).into_iter().enumerate() {
            store(at + i, sums);
        }
    });
}
