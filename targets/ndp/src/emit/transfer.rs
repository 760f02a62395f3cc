//! Streams that move experts.

use super::{EmitError, region};
use crate::allocation::{DimmConfig, DramLayout, Move};
use crate::image::Shape;
use moec_ndp_isa::{Access, Layout, Lines, Op, Stream};

/// The stream that moves an expert from its old row sets to its new ones: over a DIMM-Link to another DIMM,
/// or between the layouts (TriMoE, §4.3). It belongs to the DIMM of the localized end, or to the old one of
/// two.
///
/// # Errors
/// A shape without an image, or with more lines than an instruction moves; an empty move.
pub fn transfer(shape: &Shape, dimm_config: &DimmConfig, moved: &Move) -> Result<Stream, EmitError> {
    let lines = u32::try_from(shape.image()?.lines).map_err(|_| EmitError::Long(*shape))?;
    let (from, to) = (&moved.from, &moved.to);
    let old = |layout| region("old", &from.rows, layout, Access::Read);
    let new = |layout| region("new", &to.rows, layout, Access::Write);
    let (src, dst) = (Lines { region: 0, line: 0 }, Lines { region: 1, line: 0 });
    let (name, dimm, regions, op) = match (from.layout, to.layout) {
        (DramLayout::Localized(a), DramLayout::Localized(b)) if a != b => {
            let op = Op::Migrate { src, dimm: b, rows: to.rows.clone(), lines };
            ("migrate", a, vec![old(Layout::Localized)], op)
        }
        (DramLayout::Localized(dimm), DramLayout::Striped) => {
            let op = Op::Relayout { src, dst, lines, to: Layout::Striped };
            ("stripe", dimm, vec![old(Layout::Localized), new(Layout::Striped)], op)
        }
        (DramLayout::Striped, DramLayout::Localized(dimm)) => {
            let op = Op::Relayout { src, dst, lines, to: Layout::Localized };
            ("localize", dimm, vec![old(Layout::Striped), new(Layout::Localized)], op)
        }
        (DramLayout::Localized(_), DramLayout::Localized(_)) | (DramLayout::Striped, DramLayout::Striped) => {
            return Err(EmitError::Stays);
        }
    };
    Ok(Stream {
        name: name.into(),
        system: dimm_config.system,
        dimm,
        geometry: dimm_config.geometry,
        tokens: 1,
        slots: 1,
        regions,
        code: vec![op.into()],
    })
}
