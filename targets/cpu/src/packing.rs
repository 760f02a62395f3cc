//! Packed weights: from expressions over checkpoint tensors to segments, and back.

use moec_codegen::pack::{self, Feedback, Geometry, Weighting, feedback};
use moec_ir::plan::{Layout, Segment};
use moec_ir::types::GROUP;
use moec_ir::{Format, Source, Weight};
use std::error::Error;
use std::fmt;
use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

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
    /// The importance of its channels is not what packing takes.
    #[error("the importance of matrix {lead} of weight `{name}` is not {cols} finite numbers from 0 on")]
    Importance {
        /// Weight.
        name: String,
        /// Matrix.
        lead: usize,
        /// Input channels.
        cols: usize,
    },
    /// The segment could not be written.
    #[error(transparent)]
    Write(#[from] io::Error),
}

/// How much errors of weights matter, by input channel: say the mean square of what the channel carries.
/// Grouped formats choose scales and codes by it.
pub trait WeightImportance: fmt::Debug {
    /// For matrix `lead` (0 but for experts and heads) of a weight, by its name in the Graph: one number per
    /// input channel (column), finite and not negative, of which only the proportions count. `None`: all
    /// channels of that matrix matter the same.
    fn importance(&self, weight: &str, lead: usize) -> Option<&[f32]>;

    /// For matrices `lead` of a weight: how errors of its columns make up for each other, where that is known.
    fn feedback(&self, weight: &str, lead: Range<usize>) -> Vec<Option<Arc<Feedback>>>;

    /// Whether weights are those of packed segments, and are packed as they were.
    fn stored(&self) -> bool {
        false
    }
}

/// Weights that are read back from packed segments.
#[derive(Clone, Copy, Debug)]
pub struct Stored;

impl WeightImportance for Stored {
    fn importance(&self, _: &str, _: usize) -> Option<&[f32]> {
        None
    }

    fn feedback(&self, _: &str, lead: Range<usize>) -> Vec<Option<Arc<Feedback>>> {
        vec![None; lead.len()]
    }

    fn stored(&self) -> bool {
        true
    }
}

/// Matrices whose feedback is held at once.
const MATRICES_AT_ONCE: usize = 16;

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
    // Padding adds less than a panel per matrix and a group per row.
    let bound = (lead as u128) * (rows as u128 + 4096) * (cols as u128 + GROUP as u128) * 4;
    (bound < u128::from(u64::MAX)).then(|| pack::packed_bytes(layout, format, lead, rows, cols))
}

fn geometry(segment: &Segment) -> Option<Geometry> {
    let shape: Vec<usize> = segment.shape.iter().map(|&d| d as usize).collect();
    let [lead, rows, cols] = extents(&shape)?;
    Some(Geometry { layout: segment.layout, format: segment.format, lead, rows, cols })
}

/// Packs matrices `matrices` of a weight in the order of its segment, panel by panel. `importance` tells grouped formats which errors
/// matter; `None`: all the same. `done` hears of the bytes read, as they will be written.
///
/// # Errors
/// [`PackError`].
pub fn pack(
    segment: &Segment,
    weight: &Weight,
    source: &dyn Source,
    importance: Option<&dyn WeightImportance>,
    matrices: Range<usize>,
    out: &mut impl Write,
    done: &mut dyn FnMut(u64),
) -> Result<(), PackError> {
    let g = geometry(segment).ok_or_else(|| io::Error::other("a weight of four axes"))?;
    let by = |lead: usize| importance.and_then(|i| i.importance(&weight.name, lead));
    let usable = |w: &[f32]| w.len() == g.cols && w.iter().all(|w| w.is_finite() && *w >= 0.0);
    if let Some(lead) = matrices.clone().find(|&lead| by(lead).is_some_and(|w| !usable(w))) {
        return Err(PackError::Importance { name: weight.name.clone(), lead, cols: g.cols });
    }
    let matrix = g.bytes() / (g.lead.max(1) as u64);
    let per_row = matrix / (g.rows.max(1) as u64);
    let mut read = |lead: usize, rows: Range<usize>, into: &mut [f32]| {
        let bytes = per_row * rows.len() as u64;
        weight.expr.read(lead, rows, 0..g.cols, source, into).map_err(PackError::Read)?;
        if let Some(x) = into.iter().find(|x| !pack::holds(g.format, **x)) {
            let (name, format) = (weight.name.clone(), g.format);
            return Err(PackError::Range { name, format, value: *x });
        }
        done(bytes);
        Ok::<(), PackError>(())
    };
    let Some(importance) = importance.filter(|i| feedback::gains(g.format) && !i.stored()) else {
        let stored = importance.is_some_and(WeightImportance::stored);
        let part = Geometry { lead: matrices.len(), ..g };
        pack::pack(
            &part,
            &|lead| Weighting { stored, ..Weighting::of(by(matrices.start + lead)) },
            |l, r, x| read(matrices.start + l, r, x),
            out,
        )?;
        return Ok(());
    };
    for first in matrices.clone().step_by(MATRICES_AT_ONCE) {
        let some = first..(first + MATRICES_AT_ONCE).min(matrices.end);
        let feedback = importance.feedback(&weight.name, some.clone());
        let weighting = |lead: usize| Weighting {
            importance: by(first + lead),
            feedback: feedback.get(lead).and_then(Option::as_deref),
            stored: false,
        };
        let part = Geometry { lead: some.len(), ..g };
        pack::pack(&part, &weighting, |l, r, x| read(first + l, r, x), out)?;
    }
    Ok(())
}

/// Groups of rows of `cols` numbers in a grouped format, as packing rounds them: scale and codes. The scale is a bf16
/// number.
///
/// # Errors
/// The first number that is past what the format holds.
pub fn groups(
    format: Format,
    rows: &[f32],
    cols: usize,
    weighting: Weighting<'_>,
) -> Result<impl Iterator<Item = (f32, [i8; GROUP])>, f32> {
    match rows.iter().find(|x| !pack::holds(format, **x)) {
        Some(x) => Err(*x),
        None => {
            Ok(pack::groups(format, rows, cols, weighting).into_iter().map(|g| (g.scale.to_f32(), g.codes)))
        }
    }
}

/// One matrix of a segment, as a weight of its own, and its bytes.
fn matrix<'p>(
    segment: &Segment,
    g: Geometry,
    packed: &'p [u8],
    lead: usize,
) -> io::Result<(Geometry, &'p [u8])> {
    if lead >= g.lead {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let at = usize::try_from(segment.pitch).ok().and_then(|pitch| pitch.checked_mul(lead));
    let bytes = at.and_then(|at| packed.get(at..)).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok((Geometry { lead: 1, ..g }, bytes))
}

/// Reads a rectangle of a packed weight back as f32. `packed` is the whole segment, from its first matrix on.
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
    let (g, packed) = matrix(segment, g, packed, lead)?;
    if cols == (0..g.cols) {
        return pack::unpack_rows(&g, packed, 0, rows, out);
    }
    let mut row = vec![0.0; g.cols];
    for (r, out) in rows.zip(out.chunks_exact_mut(cols.len().max(1))) {
        pack::unpack_rows(&g, packed, 0, r..r + 1, &mut row)?;
        out.copy_from_slice(row.get(cols.clone()).ok_or(io::ErrorKind::InvalidInput)?);
    }
    Ok(())
}

/// Rounds a whole weight as it was when it was packed into `segment`, whose bytes are `packed`: grouped formats
/// keep the scales that were chosen then, and their codes if these were rounded with feedback (`fed`).
///
/// # Errors
/// A segment that is too short, or numbers that are not the whole of it.
pub fn round_as_packed(segment: &Segment, packed: &[u8], fed: bool, values: &mut [f32]) -> io::Result<()> {
    let g = geometry(segment).ok_or(io::ErrorKind::InvalidInput)?;
    let numbers = g.rows * g.cols;
    if values.len() != g.lead * numbers {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (lead, values) in values.chunks_exact_mut(numbers.max(1)).enumerate() {
        let (g, packed) = matrix(segment, g, packed, lead)?;
        pack::round_as_packed(&g, packed, 0, 0..g.rows, fed, values)?;
    }
    Ok(())
}
