//! Rectangles of a checkpoint's tensors: decoded, in stored form, or announced for later reads.

use super::checkpoint::{Checkpoint, Tensor};
use super::encodings::{self, Conversion, Encoding, squeezed};
use super::quantised::Decoder;
use moec_base::error::{Error, Result};
use moec_ir::{Encoding as Stored, Format, Leaf, Source};
use std::ops::Range;

/// A failure of the source, as an error of the IR.
type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Position of a rectangle in a leaf, in the form of [`Source::read`].
#[derive(Clone, Debug)]
struct Rect {
    matrix: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Rows and columns of the whole leaf.
    extent: (usize, usize),
}

/// Bytes that are copied and then checked while they are still in the first-level cache.
const CHECKED: usize = 4096;

impl Checkpoint {
    /// Checks that a rectangle of `numbers` numbers is within its leaf.
    fn rect(
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        numbers: usize,
    ) -> Result<Rect> {
        let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
        let extent = (axis(1), axis(0));
        let ordered = rows.start <= rows.end && cols.start <= cols.end;
        let area = rows.len().checked_mul(cols.len());
        let within = matrix < axis(2) && rows.end <= extent.0 && cols.end <= extent.1;
        let sized = leaf.shape.iter().try_fold(4_usize, |n, &d| n.checked_mul(d));
        if !ordered || !within || area != Some(numbers) || leaf.shape.len() > 3 || sized.is_none() {
            return Err(Error::bug(format!(
                "rectangle [{matrix}, {rows:?}, {cols:?}] of {numbers} numbers requested of tensor `{}` {:?}",
                leaf.tensor, leaf.shape
            )));
        }
        Ok(Rect { matrix, rows, cols, extent })
    }

    /// The stored numbers of a plain leaf, after a check of their number.
    fn numbers(&self, leaf: &Leaf) -> Result<Numbers<'_>> {
        let (tensor, bytes) = self.data(&leaf.tensor)?;
        let encoding = encodings::of(self.encodings(), &tensor.dtype)
            .ok_or_else(|| self.unsupported(&leaf.tensor, tensor))?;
        let (cols, rows) = leaf.shape.split_last().map_or((1, &[][..]), |(cols, rows)| (*cols, rows));
        let rows = rows.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        let pitch = encoding.row_bytes(cols);
        let size = rows.zip(pitch).and_then(|(rows, pitch)| rows.checked_mul(pitch));
        match pitch {
            Some(pitch) if squeezed(&tensor.shape).eq(squeezed(&leaf.shape)) && size == Some(bytes.len()) => {
                Ok(Numbers { tensor, encoding, bytes, pitch })
            }
            _ => Err(self.mismatch(leaf, tensor)),
        }
    }

    /// The error for a leaf that does not describe its tensor, which is a bug of moec.
    fn mismatch(&self, leaf: &Leaf, t: &Tensor) -> Error {
        Error::bug(format!(
            "weight {:?} ({:?}) does not fit tensor `{}`, {} {:?} in `{}`",
            leaf.shape,
            leaf.encoding,
            leaf.tensor,
            t.dtype,
            t.shape,
            self.file_of(&leaf.tensor)
        ))
    }

    fn decode(&self, leaf: &Leaf, at: &Rect, out: &mut [f32]) -> Result<()> {
        if let Stored::Coded(coded) = &leaf.encoding {
            let decoder = Decoder::of(self, leaf, coded)?;
            self.touch(decoder.bytes(at.matrix, &at.rows).len());
            let whole = decoder.decode(at.matrix, at.rows.clone(), at.cols.clone(), out);
            return if whole { Ok(()) } else { Err(self.mismatch(leaf, self.tensor(&leaf.tensor)?)) };
        }
        let numbers = self.numbers(leaf)?;
        // Whole rows, since the pages of a strip of columns are those of its rows.
        self.touch(at.rows.len().saturating_mul(numbers.pitch));
        let first_row = at.matrix * at.extent.0 + at.rows.start;
        for (out, row) in out.chunks_exact_mut(at.cols.len()).zip(first_row..) {
            let stored = self.blocks(leaf, at, &numbers, row)?;
            (numbers.encoding.decode)(stored, at.cols.start, out);
        }
        Ok(())
    }
}

impl Checkpoint {
    /// Copies a rectangle of numbers in their stored form; returns `false` if one is not finite.
    fn copy(
        &self,
        leaf: &Leaf,
        at: &Rect,
        numbers: &Numbers<'_>,
        all_finite: fn(&[u8]) -> bool,
        out: &mut [u8],
    ) -> Result<bool> {
        let (size, pitch) = (numbers.encoding.bytes, numbers.pitch);
        let from = (at.matrix * at.extent.0 + at.rows.start) * pitch + at.cols.start * size;
        let mut all = numbers.bytes.get(from..).ok_or_else(|| self.mismatch(leaf, numbers.tensor))?;
        // Rows of the whole width are contiguous.
        let row = if at.cols.len() == at.extent.1 { out.len() } else { at.cols.len() * size };
        for out in out.chunks_mut(row) {
            for out in out.chunks_mut(CHECKED) {
                let stored = all.split_off(..out.len()).ok_or_else(|| self.mismatch(leaf, numbers.tensor))?;
                out.copy_from_slice(stored);
                if !all_finite(out) {
                    return Ok(false);
                }
            }
            all = all.get(pitch - row.min(pitch)..).unwrap_or_default();
        }
        Ok(true)
    }

    /// Copies codes and scales of a rectangle; returns `false` if a number is not finite.
    fn copy_codes<const N: usize>(
        &self,
        leaf: &Leaf,
        at: &Rect,
        numbers: &Numbers<'_>,
        take: fn(&[u8], usize, &mut [[u8; N]]) -> bool,
        out: &mut [u8],
    ) -> Result<bool> {
        for (i, out) in out.as_chunks_mut::<N>().0.chunks_exact_mut(at.cols.len()).enumerate() {
            let row = at.matrix * at.extent.0 + at.rows.start + i;
            let stored = self.blocks(leaf, at, numbers, row)?;
            if !take(stored, at.cols.start, out) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The blocks of a row with a rectangle's columns; rows are counted over all matrices.
    fn blocks<'a>(&self, leaf: &Leaf, at: &Rect, numbers: &Numbers<'a>, row: usize) -> Result<&'a [u8]> {
        let Encoding { block, bytes, .. } = *numbers.encoding;
        let blocks = at.cols.start / block..at.cols.end.div_ceil(block);
        let from = row * numbers.pitch;
        let stored = numbers.bytes.get(from + blocks.start * bytes..from + blocks.end * bytes);
        stored.ok_or_else(|| self.mismatch(leaf, numbers.tensor))
    }
}

/// The stored numbers of a leaf. All are in memory, so no offset overflows.
struct Numbers<'a> {
    tensor: &'a Tensor,
    encoding: &'static Encoding,
    bytes: &'a [u8],
    /// Bytes from row to row.
    pitch: usize,
}

impl Source for Checkpoint {
    fn read(
        &self,
        leaf: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Failed> {
        let at = Self::rect(leaf, matrix, rows, cols, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        self.decode(leaf, &at, out)?;
        if !self.allows_nonfinite()
            && let Some(bad) = encodings::first_non_finite(out)
        {
            let (row, col) = (at.rows.start + bad.at / at.cols.len(), at.cols.start + bad.at % at.cols.len());
            let index = [matrix, row, col];
            let index = &index[3 - leaf.shape.len().clamp(1, 3)..];
            let (file, tensor) = (self.file_of(&leaf.tensor), &leaf.tensor);
            return Err(Error::input(format!(
                "tensor `{tensor}` in `{file}` is {} at {index:?}",
                out[bad.at]
            ))
            .hint("the checkpoint is damaged, or its training diverged: download it again, or set `allow_nonfinite = true` under `[model]`")
            .into());
        }
        Ok(())
    }

    fn stored(
        &self,
        leaf: &Leaf,
        format: Format,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [u8],
    ) -> Result<bool, Failed> {
        if let Stored::Coded(coded) = &leaf.encoding {
            let at = Self::rect(leaf, matrix, rows, cols, out.len() / format.stored_bytes().max(1))?;
            let decoder = Decoder::of(self, leaf, coded)?;
            self.touch(decoder.bytes(at.matrix, &at.rows).len());
            return Ok(decoder.take(format, at.matrix, at.rows, at.cols, out.as_chunks_mut().0));
        }
        let Ok(numbers) = self.numbers(leaf) else { return Ok(false) };
        let Some(native) = numbers.encoding.native_format.filter(|native| native.format == format) else {
            return Ok(false);
        };
        let at = Self::rect(leaf, matrix, rows, cols, out.len() / format.stored_bytes().max(1))?;
        if out.is_empty() {
            return Ok(true);
        }
        self.touch(at.rows.len().saturating_mul(numbers.pitch));
        Ok(match native.conversion {
            Conversion::Whole(all_finite) => self.copy(leaf, &at, &numbers, all_finite, out)?,
            Conversion::Coded(take) => self.copy_codes(leaf, &at, &numbers, take, out)?,
            Conversion::Fine(take) => self.copy_codes(leaf, &at, &numbers, take, out)?,
        })
    }

    fn will_read(&self, leaf: &Leaf, matrix: usize, rows: Range<usize>, cols: Range<usize>) {
        let numbers = rows.len().saturating_mul(cols.len());
        let at = Self::rect(leaf, matrix, rows, cols, numbers);
        let Ok(at) = at else { return };
        if let Stored::Coded(coded) = &leaf.encoding {
            if let (Ok(decoder), Ok(tensor)) = (Decoder::of(self, leaf, coded), self.tensor(&leaf.tensor)) {
                self.will_read_bytes(tensor, decoder.bytes(at.matrix, &at.rows));
            }
            return;
        }
        let Ok(Numbers { tensor, pitch, .. }) = self.numbers(leaf) else { return };
        let first = at.matrix * at.extent.0 + at.rows.start;
        self.will_read_bytes(tensor, first * pitch..(first + at.rows.len()) * pitch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ImportOptions;
    use half::{bf16, f16};
    use moec_ir::{Axis, Encoding, WeightExpr};
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};

    /// Numbers of shape 2 × 3 × 5; one in the last row is not finite.
    fn numbers(last: f32) -> Vec<f32> {
        (0..30).map(|i| if i == 27 { last } else { i as f32 / 4.0 - 3.0 }).collect()
    }

    #[test]
    fn numbers_already_in_the_format_are_copied() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = |dtype: Dtype, x: f32| match dtype {
            Dtype::F32 => x.to_le_bytes().to_vec(),
            Dtype::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
            _ => bf16::from_f32(x).to_le_bytes().to_vec(),
        };
        let kinds = [(Dtype::F32, Format::F32), (Dtype::BF16, Format::Bf16), (Dtype::F16, Format::F16)];
        let bad = [f32::NAN, f32::INFINITY, 0.5];
        let stored =
            |dtype, last| numbers(last).into_iter().flat_map(|x| bytes(dtype, x)).collect::<Vec<u8>>();
        let all: Vec<(String, Dtype, Vec<u8>)> = kinds
            .iter()
            .flat_map(|(d, f)| bad.map(|last| (format!("{f} {last}"), *d, stored(*d, last))))
            .collect();
        let views = all.iter().map(|(n, d, b)| (n, TensorView::new(*d, vec![2, 3, 5], b).unwrap()));
        serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let options = ImportOptions { allow_nonfinite: true };
        let checkpoint = Checkpoint::open(folder.path(), &options).unwrap();
        for ((_, format), last) in kinds.iter().flat_map(|k| bad.map(|b| (*k, b))) {
            let tensor = format!("{format} {last}");
            let leaf = Leaf { tensor, shape: vec![2, 3, 5], encoding: Encoding::Plain };
            let size = format.row_bytes(1);
            for (matrix, rows, cols) in
                [(0, 0..3, 0..5), (1, 0..2, 0..5), (1, 1..3, 1..4), (1, 2..3, 3..5), (0, 1..1, 0..5)]
            {
                let n = rows.len() * cols.len();
                let mut values = vec![0.0; n];
                checkpoint.read(&leaf, matrix, rows.clone(), cols.clone(), &mut values).unwrap();
                let dtype = kinds.iter().find(|k| k.1 == format).unwrap().0;
                let want: Vec<u8> = values.iter().flat_map(|&x| bytes(dtype, x)).collect();
                let mut out = vec![1; n * size];
                let done =
                    checkpoint.stored(&leaf, format, matrix, rows.clone(), cols.clone(), &mut out).unwrap();
                assert_eq!(done, values.iter().all(|x| x.is_finite()), "{leaf:?} {matrix} {rows:?} {cols:?}");
                assert!(!done || out == want, "{leaf:?} {matrix} {rows:?} {cols:?}");
                // The same through an expression, which may reorder the numbers.
                let expr = WeightExpr::Transpose(Box::new(WeightExpr::Leaf(leaf.clone())));
                let mut turned = vec![1; n * size];
                let through =
                    expr.read_stored(format, matrix, cols.clone(), rows.clone(), &checkpoint, &mut turned);
                assert_eq!(through.unwrap(), done);
                let cell = |i: usize| &turned[i * size..][..size];
                let same = |i: usize| {
                    cell(i % cols.len() * rows.len() + i / cols.len()) == &want[i * size..][..size]
                };
                assert!(!done || (0..n).all(same));
                checkpoint.will_read(&leaf, matrix, rows, cols);
            }
            let mut out = [0; 15 * 4];
            for other in Format::ALL.into_iter().filter(|f| *f != format) {
                assert!(!checkpoint.stored(&leaf, other, 0, 0..3, 0..5, &mut out[..30]).unwrap());
            }
            assert!(checkpoint.stored(&leaf, format, 2, 0..3, 0..5, &mut out[..15 * size]).is_err());
            assert!(checkpoint.stored(&leaf, format, 0, 0..3, 0..5, &mut out[..14 * size]).is_err());
            checkpoint.will_read(&leaf, 7, 0..usize::MAX, 0..9);
            let slice = WeightExpr::Slice {
                axis: Axis::Cols,
                start: 0,
                step: 2,
                len: 3,
                of: Box::new(WeightExpr::Leaf(leaf.clone())),
            };
            assert!(slice.read_stored(format, 0, 0..3, 0..3, &checkpoint, &mut out[..9 * size]).unwrap());
            let scaled = WeightExpr::ScaleCols {
                by: Box::new(WeightExpr::Const(vec![1.0; 5])),
                of: Box::new(WeightExpr::Leaf(leaf)),
            };
            assert!(!scaled.read_stored(format, 0, 0..3, 0..5, &checkpoint, &mut out[..15 * size]).unwrap());
        }
    }
}
