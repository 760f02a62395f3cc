//! Weights as raw f16, or as codes with scales: the helper builds packages from them.
//!
//! Codes and scales are those of the CPU's kernels for the same weights: one function rounds both, by the
//! same importance of channels.

use crate::emit::Raw;
use crate::program::Blocks;
use crate::subgraphs;
use half::f16;
use moec_backend::Numbers;
use moec_backend::error::{Error, Result, io_error};
use moec_device::DeviceUnit;
use moec_ir::Weight;
use moec_ir::types::GROUP;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Numbers that are converted at once.
const STRIP: usize = 1 << 18;

/// A rectangle of one matrix of a weight.
struct WeightRect<'a> {
    weight: &'a Weight,
    matrix: usize,
    rows: Range<usize>,
    cols: Range<usize>,
}

/// A raw file while it is written. Tensors with the same bytes are in it once, so that a package stores them
/// once.
pub(super) struct RawFile {
    path: PathBuf,
    name: String,
    /// Key of `[placement]` that keeps the weights elsewhere.
    key: &'static str,
    out: BufWriter<File>,
    offset: u64,
    known: HashMap<[u8; 32], u64>,
}

impl RawFile {
    /// A new file of that name in `folder`; `key` is the key of `[placement]` that put its weights there.
    pub(super) fn create(folder: &Path, name: &str, key: &'static str) -> Result<Self> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(|e| io_error("write", &path, &e))?;
        let out = BufWriter::new(file);
        Ok(Self { path, name: name.to_owned(), key, out, offset: 0, known: HashMap::new() })
    }

    /// Appends rows of some entries of a weight's first axis, one entry after the other: `[entries · rows,
    /// cols]`, or `[entries · rows]` of a weight that has a vector for each.
    ///
    /// # Errors
    /// A number that its storage does not hold; a file that cannot be read or written.
    pub(super) fn stacked(
        &mut self,
        weight: &Weight,
        entries: &[u32],
        rows: Range<usize>,
        unit: &DeviceUnit,
        numbers: &dyn Numbers,
    ) -> Result<Raw> {
        // A bias has one axis after that of the experts: its entries are rows of one matrix.
        let vector = weight.shape.len() == 2;
        let part = |&e: &u32| {
            let e = e as usize;
            let (matrix, rows, cols) =
                if vector { (0, e..e + 1, rows.clone()) } else { (e, rows.clone(), 0..weight.cols()) };
            WeightRect { weight, matrix, rows, cols }
        };
        let parts: Vec<_> = entries.iter().map(part).collect();
        let count = entries.len() * rows.len();
        let shape = if vector { vec![count] } else { vec![count, weight.cols()] };
        let bits = if vector { None } else { subgraphs::code_bits(unit, weight) };
        self.append(&parts, shape, bits, numbers)
    }

    /// Appends weights, joined along their first axis.
    ///
    /// # Errors
    /// As [`Self::stacked`].
    pub(super) fn joined(
        &mut self,
        weights: &[&Weight],
        unit: &DeviceUnit,
        numbers: &dyn Numbers,
    ) -> Result<Raw> {
        let (shape, bits) = subgraphs::joined(unit, weights);
        let matrices = weights.iter().flat_map(|&weight| {
            (0..weight.matrices()).map(move |matrix| WeightRect {
                weight,
                matrix,
                rows: 0..weight.rows(),
                cols: 0..weight.cols(),
            })
        });
        self.append(&matrices.collect::<Vec<_>>(), shape, bits, numbers)
    }

    /// Appends parts of weights, one after the other, strip by strip; scales of codes follow all of them.
    fn append(
        &mut self,
        parts: &[WeightRect<'_>],
        shape: Vec<usize>,
        bits: Option<u8>,
        numbers: &dyn Numbers,
    ) -> Result<Raw> {
        let start = self.offset;
        let (mut sha, mut scales) = (Sha256::new(), Vec::new());
        sha.update([bits.unwrap_or(16)]);
        for part in parts {
            self.strips(part, bits, numbers, &mut sha, &mut scales)?;
        }
        // Codes of whole groups are an even number of bytes, so that scales are aligned.
        let scales_at = self.offset - start;
        self.put(&scales, &mut sha)?;
        let offset = *self.known.entry(sha.finalize().into()).or_insert(start);
        if offset != start {
            self.out.seek(SeekFrom::Start(start)).map_err(|e| io_error("write", &self.path, &e))?;
            self.offset = start;
        }
        let blocks = bits.map(|bits| Blocks { bits, size: GROUP, scales: offset + scales_at });
        Ok(Raw { file: self.name.clone(), offset, shape, blocks })
    }

    fn strips(
        &mut self,
        part: &WeightRect<'_>,
        bits: Option<u8>,
        numbers: &dyn Numbers,
        sha: &mut Sha256,
        scales: &mut Vec<u8>,
    ) -> Result<()> {
        let WeightRect { weight, matrix, rows, cols } = part;
        let strip = (STRIP / cols.len().max(1)).clamp(1, rows.len().max(1));
        let (mut read, mut bytes) = (Vec::new(), Vec::new());
        let rounding = bits.map(|_| numbers.rounding(weight, *matrix));
        for first in rows.clone().step_by(strip) {
            let some = first..(first + strip).min(rows.end);
            read.resize(some.len() * cols.len(), 0.0_f32);
            numbers.read(weight, *matrix, some, cols.clone(), &mut read)?;
            bytes.clear();
            if let Some(rounding) = &rounding {
                let groups = rounding.groups(&read, cols.len()).map_err(|x| self.refused(weight, x))?;
                for (scale, codes) in groups {
                    // bf16 has fewer digits than f16, so that a scale is exact from 2⁻¹⁷ on. A smaller one is
                    // rounded to a multiple of 2⁻²⁴: no weight of its group is off by more than 2⁻¹⁸.
                    scales.extend_from_slice(&self.half(weight, scale)?.to_le_bytes());
                    self.half(weight, scale * 128.0)?;
                    bytes.extend(codes.map(i8::cast_unsigned));
                }
            } else {
                for &x in &read {
                    bytes.extend_from_slice(&self.half(weight, x)?.to_le_bytes());
                }
            }
            self.put(&bytes, sha)?;
        }
        Ok(())
    }

    fn put(&mut self, bytes: &[u8], sha: &mut Sha256) -> Result<()> {
        sha.update(bytes);
        self.out.write_all(bytes).map_err(|e| io_error("write", &self.path, &e))?;
        self.offset += bytes.len() as u64;
        Ok(())
    }

    fn half(&self, weight: &Weight, x: f32) -> Result<f16> {
        let half = f16::from_f32(x);
        if half.is_finite() { Ok(half) } else { Err(self.refused(weight, x)) }
    }

    fn refused(&self, weight: &Weight, x: f32) -> Error {
        Error::input(format!("`{}` holds {x:e}, which is not an f16", weight.name))
            .because("the Neural Engine computes in f16, whose largest number is 65504")
            .hint(format!("set `{} = \"cpu\"` under `[placement]`", self.key))
    }

    /// Ends the file; gives its bytes.
    pub(super) fn finish(mut self) -> Result<u64> {
        let failed = |e| io_error("write", &self.path, &e);
        self.out.flush().map_err(failed)?;
        self.out.get_ref().set_len(self.offset).map_err(failed)?;
        Ok(self.offset)
    }
}
