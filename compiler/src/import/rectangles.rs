//! Rectangles of a checkpoint's tensors: decoded, as they are stored, or soon.

use super::checkpoint::{Checkpoint, Dtype, Tensor, float};
use super::formats::{self, fp8, mxfp4, plain::Float};
use crate::error::{Error, Result};
use moec_ir::{Encoding, Format, Leaf, Source};
use std::ops::Range;

/// A failure of the source, as the languages know it.
type Failed = Box<dyn std::error::Error + Send + Sync>;

/// Where a rectangle lies in a leaf, as [`Source::read`] has it.
#[derive(Clone, Debug)]
struct Rect {
    lead: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Rows and columns of the whole.
    extent: (usize, usize),
}

/// Bytes that are copied and then looked at: they are still in the first-level cache.
const CHECKED: usize = 4096;

/// Bytes from row to row of a leaf, of which there are `bytes`: whatever the encoding, all rows take as many.
fn pitch(leaf: &Leaf, bytes: &[u8]) -> usize {
    bytes.len() / leaf.shape.iter().rev().skip(1).product::<usize>().max(1)
}

impl Rect {
    /// Its first byte in the tensor, and bytes from row to row, of numbers of `size` bytes. All fit in memory, so nothing
    /// overflows.
    fn bytes(&self, size: usize) -> (usize, usize) {
        let (rows, cols) = self.extent;
        (((self.lead * rows + self.rows.start) * cols + self.cols.start) * size, cols * size)
    }
}

impl Checkpoint {
    /// Checks that a rectangle of `numbers` numbers is within its leaf.
    fn rect(
        leaf: &Leaf,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        numbers: usize,
    ) -> Result<Rect> {
        let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
        let extent = (axis(1), axis(0));
        let ordered = rows.start <= rows.end && cols.start <= cols.end;
        let wanted = rows.len().checked_mul(cols.len());
        let within = lead < axis(2) && rows.end <= extent.0 && cols.end <= extent.1;
        let sized = leaf.shape.iter().try_fold(4_usize, |n, &d| n.checked_mul(d));
        if !ordered || !within || wanted != Some(numbers) || leaf.shape.len() > 3 || sized.is_none() {
            return Err(Error::bug(format!(
                "rectangle [{lead}, {rows:?}, {cols:?}] of {numbers} numbers asked of tensor `{}` {:?}",
                leaf.tensor, leaf.shape
            )));
        }
        Ok(Rect { lead, rows, cols, extent })
    }

    /// The tensor of a leaf, if it is stored plainly.
    fn plain(&self, leaf: &Leaf) -> Option<(&Tensor, Float)> {
        let t =
            self.get(&leaf.tensor).filter(|t| leaf.encoding == Encoding::Plain && t.shape == leaf.shape)?;
        Some((t, float(t.dtype)?))
    }

    /// A bug of ours: a leaf that does not describe its tensor.
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
        let (t, bytes) = self.data(&leaf.tensor)?;
        let (rows, cols) = at.extent;
        // Each row starts at (lead · rows + row) · cols; all fit in memory, so nothing overflows.
        let first_row = at.lead * rows + at.rows.start;
        let out = out.chunks_exact_mut(at.cols.len()).zip(first_row..);
        match &leaf.encoding {
            Encoding::Plain => {
                let float = self.float(&leaf.tensor, t)?;
                if t.shape != leaf.shape {
                    return Err(self.mismatch(leaf, t));
                }
                for (out, row) in out {
                    let from = (row * cols + at.cols.start) * float.bytes();
                    let stored = bytes.get(from..from + out.len() * float.bytes());
                    float.decode(stored.ok_or_else(|| self.mismatch(leaf, t))?, out);
                }
            }
            Encoding::Mxfp4 { scales } => {
                let blocks = cols / mxfp4::BLOCK;
                let (s, scales) = self.data(scales)?;
                let stored: usize = t.shape.iter().product();
                let fits = cols % mxfp4::BLOCK == 0
                    && stored.checked_mul(2) == Some(leaf.shape.iter().product())
                    && s.shape.iter().product::<usize>() * mxfp4::BYTES == stored;
                if !fits || t.dtype != Dtype::U8 || s.dtype != Dtype::U8 {
                    return Err(self.mismatch(leaf, t));
                }
                for (out, row) in out {
                    let bytes = bytes.get(row * blocks * mxfp4::BYTES..(row + 1) * blocks * mxfp4::BYTES);
                    let scales = scales.get(row * blocks..(row + 1) * blocks);
                    let (Some(bytes), Some(scales)) = (bytes, scales) else {
                        return Err(self.mismatch(leaf, t));
                    };
                    mxfp4::decode_row(bytes, scales, at.cols.clone(), out);
                }
            }
            Encoding::Fp8Block { scales: name } => {
                let (s, scales) = self.data(name)?;
                let float = self.float(name, s)?;
                let (high, wide) = (rows.div_ceil(fp8::BLOCK), cols.div_ceil(fp8::BLOCK));
                let leads = leaf.shape.iter().rev().nth(2).copied().unwrap_or(1);
                let fits = s.shape.iter().product::<usize>() == leads * high * wide && t.shape == leaf.shape;
                if !fits || t.dtype != Dtype::F8_E4M3 {
                    return Err(self.mismatch(leaf, t));
                }
                let mut factors = vec![0.0; wide];
                for (out, row) in out {
                    let block = (row / rows * high + row % rows / fp8::BLOCK) * wide * float.bytes();
                    let stored = bytes.get(row * cols + at.cols.start..row * cols + at.cols.end);
                    let (Some(stored), Some(s)) = (stored, scales.get(block..block + wide * float.bytes()))
                    else {
                        return Err(self.mismatch(leaf, t));
                    };
                    float.decode(s, &mut factors);
                    fp8::decode_row(stored, &factors, at.cols.start, out);
                }
            }
        }
        Ok(())
    }
}

impl Source for Checkpoint {
    fn read(
        &self,
        leaf: &Leaf,
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Failed> {
        let at = Self::rect(leaf, lead, rows, cols, out.len())?;
        if out.is_empty() {
            return Ok(());
        }
        // Whole rows: the pages of a strip of columns are those of its rows.
        self.touch(at.rows.len().saturating_mul(pitch(leaf, self.data(&leaf.tensor)?.1)));
        self.decode(leaf, &at, out)?;
        if !self.allows_nonfinite()
            && let Some(bad) = formats::first_non_finite(out)
        {
            let (row, col) = (at.rows.start + bad.at / at.cols.len(), at.cols.start + bad.at % at.cols.len());
            let index = [lead, row, col];
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
        lead: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [u8],
    ) -> Result<bool, Failed> {
        let Some((tensor, float)) = self.plain(leaf).filter(|(_, float)| float.format() == format) else {
            return Ok(false);
        };
        let size = float.bytes();
        let at = Self::rect(leaf, lead, rows, cols, out.len() / size)?;
        if out.is_empty() {
            return Ok(true);
        }
        let (from, pitch) = at.bytes(size);
        self.touch(at.rows.len().saturating_mul(pitch));
        let all = self.bytes(&leaf.tensor).and_then(|b| b.get(from..));
        let mut all = all.ok_or_else(|| self.mismatch(leaf, tensor))?;
        // Rows of the whole width lie together.
        let row = if at.cols.len() == at.extent.1 { out.len() } else { at.cols.len() * size };
        for out in out.chunks_mut(row) {
            for out in out.chunks_mut(CHECKED) {
                let stored = all.split_off(..out.len()).ok_or_else(|| self.mismatch(leaf, tensor))?;
                out.copy_from_slice(stored);
                if !float.all_finite(out) {
                    return Ok(false);
                }
            }
            all = all.get(pitch - row.min(pitch)..).unwrap_or_default();
        }
        Ok(true)
    }

    fn expect(&self, leaf: &Leaf, lead: usize, rows: Range<usize>, cols: Range<usize>) {
        let numbers = rows.len().saturating_mul(cols.len());
        let at = Self::rect(leaf, lead, rows, cols, numbers);
        let (Ok(at), Ok((tensor, bytes))) = (at, self.data(&leaf.tensor)) else { return };
        let (first, pitch) = (at.lead * at.extent.0 + at.rows.start, pitch(leaf, bytes));
        self.will_read(tensor, first * pitch..(first + at.rows.len()) * pitch);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::import::ImportOptions;
    use half::{bf16, f16};
    use moec_ir::{Axis, WeightExpr};
    use safetensors::tensor::{TensorView, serialize_to_file};

    /// Numbers of 2 × 3 × 5 with one in the last row that is not finite.
    fn numbers(last: f32) -> Vec<f32> {
        (0..30).map(|i| if i == 27 { last } else { i as f32 / 4.0 - 3.0 }).collect()
    }

    #[test]
    fn numbers_that_are_stored_in_the_format_are_copied() {
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
        let options = ImportOptions { allow_nonfinite: true };
        let checkpoint = Checkpoint::open(folder.path(), &options).unwrap();
        for ((_, format), last) in kinds.iter().flat_map(|k| bad.map(|b| (*k, b))) {
            let tensor = format!("{format} {last}");
            let leaf = Leaf { tensor, shape: vec![2, 3, 5], encoding: Encoding::Plain };
            let size = format.row_bytes(1);
            for (lead, rows, cols) in
                [(0, 0..3, 0..5), (1, 0..2, 0..5), (1, 1..3, 1..4), (1, 2..3, 3..5), (0, 1..1, 0..5)]
            {
                let n = rows.len() * cols.len();
                let mut values = vec![0.0; n];
                checkpoint.read(&leaf, lead, rows.clone(), cols.clone(), &mut values).unwrap();
                let dtype = kinds.iter().find(|k| k.1 == format).unwrap().0;
                let want: Vec<u8> = values.iter().flat_map(|&x| bytes(dtype, x)).collect();
                let mut out = vec![1; n * size];
                let done =
                    checkpoint.stored(&leaf, format, lead, rows.clone(), cols.clone(), &mut out).unwrap();
                assert_eq!(done, values.iter().all(|x| x.is_finite()), "{leaf:?} {lead} {rows:?} {cols:?}");
                assert!(!done || out == want, "{leaf:?} {lead} {rows:?} {cols:?}");
                // Through an expression, whatever it does to the order.
                let expr = WeightExpr::Transpose(Box::new(WeightExpr::Leaf(leaf.clone())));
                let mut turned = vec![1; n * size];
                let through =
                    expr.read_stored(format, lead, cols.clone(), rows.clone(), &checkpoint, &mut turned);
                assert_eq!(through.unwrap(), done);
                let cell = |i: usize| &turned[i * size..][..size];
                let same = |i: usize| {
                    cell(i % cols.len() * rows.len() + i / cols.len()) == &want[i * size..][..size]
                };
                assert!(!done || (0..n).all(same));
                checkpoint.expect(&leaf, lead, rows, cols);
            }
            let mut out = [0; 15 * 4];
            for other in Format::ALL.into_iter().filter(|f| *f != format) {
                assert!(!checkpoint.stored(&leaf, other, 0, 0..3, 0..5, &mut out[..30]).unwrap());
            }
            assert!(checkpoint.stored(&leaf, format, 2, 0..3, 0..5, &mut out[..15 * size]).is_err());
            assert!(checkpoint.stored(&leaf, format, 0, 0..3, 0..5, &mut out[..14 * size]).is_err());
            checkpoint.expect(&leaf, 7, 0..usize::MAX, 0..9);
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
