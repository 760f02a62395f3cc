//! Packed weights: from expressions over checkpoint tensors to segments, and back.

use moec_codegen::pack::{self, Geometry};
use moec_ir::plan::{Layout, Segment};
use moec_ir::{Format, Source, Weight};
use std::error::Error;
use std::io::{self, Write};
use std::ops::Range;

/// Why a weight could not be packed.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Its tensors could not be read.
    #[error("{0}")]
    Read(Box<dyn Error + Send + Sync>),
    /// A number is past what the format holds.
    #[error("weight `{name}` holds {value:e}, which is past what {format} can hold")]
    Range {
        /// Weight.
        name: String,
        /// Format.
        format: Format,
        /// Number.
        value: f32,
    },
    /// The segment could not be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// Extents of a weight as `[lead, rows, cols]`.
fn extents(shape: &[usize]) -> Option<[usize; 3]> {
    match *shape {
        [c] => Some([1, 1, c]),
        [r, c] => Some([1, r, c]),
        [l, r, c] => Some([l, r, c]),
        _ => None,
    }
}

/// Bytes of a packed weight; `None` where they are past what 64 bits hold.
pub fn packed_bytes(layout: Layout, format: Format, shape: &[usize]) -> Option<u64> {
    let [lead, rows, cols] = extents(shape)?;
    // Padding adds less than a panel per matrix.
    let bound = (lead as u128) * (rows as u128 + 4096) * (cols as u128) * 4;
    (bound < u128::from(u64::MAX)).then(|| pack::packed_bytes(layout, format, lead, rows, cols))
}

fn geometry(segment: &Segment) -> Option<Geometry> {
    let shape: Vec<usize> = segment.shape.iter().map(|&d| d as usize).collect();
    let [lead, rows, cols] = extents(&shape)?;
    Some(Geometry { layout: segment.layout, format: segment.format, lead, rows, cols })
}

/// Packs a weight in the order of its segment, panel by panel. `done` hears of the bytes written.
///
/// # Errors
/// [`PackError`].
pub fn pack(
    segment: &Segment,
    weight: &Weight,
    source: &dyn Source,
    out: &mut impl Write,
    done: &mut dyn FnMut(u64),
) -> Result<(), PackError> {
    let g = geometry(segment).ok_or_else(|| io::Error::other("a weight of four axes"))?;
    let matrix = g.bytes() / (g.lead.max(1) as u64);
    let per_row = matrix / (g.rows.max(1) as u64);
    let read = |lead: usize, rows: Range<usize>, into: &mut [f32]| {
        let bytes = per_row * rows.len() as u64;
        weight.expr.read(lead, rows, 0..g.cols, source, into).map_err(PackError::Read)?;
        if let Some(x) = into.iter().find(|x| !pack::round(g.format, **x).is_finite() && x.is_finite()) {
            let (name, format) = (weight.name.clone(), g.format);
            return Err(PackError::Range { name, format, value: *x });
        }
        done(bytes);
        Ok::<(), PackError>(())
    };
    pack::pack(&g, read, out)?;
    Ok(())
}

/// Reads a rectangle of a packed weight back as f32. `packed` is the whole segment.
///
/// # Errors
/// A segment that is too short, or a rectangle outside of it.
pub fn unpack(
    segment: &Segment,
    packed: &[u8],
    lead: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    out: &mut [f32],
) -> io::Result<()> {
    let g = geometry(segment).ok_or(io::ErrorKind::InvalidInput)?;
    if cols == (0..g.cols) {
        return pack::unpack_rows(&g, packed, lead, rows, out);
    }
    let mut row = vec![0.0; g.cols];
    for (r, out) in rows.zip(out.chunks_exact_mut(cols.len().max(1))) {
        pack::unpack_rows(&g, packed, lead, r..r + 1, &mut row)?;
        out.copy_from_slice(row.get(cols.clone()).ok_or(io::ErrorKind::InvalidInput)?);
    }
    Ok(())
}

/// Rounds numbers to what a format holds.
pub fn round(format: Format, values: &mut [f32]) {
    for x in values {
        *x = pack::round(format, *x);
    }
}
