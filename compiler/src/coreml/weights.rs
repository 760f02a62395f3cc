//! Weights as raw f16: what the helper builds packages from.

use crate::bundle::partial::io_error;
use crate::error::{Error, Result};
use half::f16;
use moec_coreml::emit::Raw;
use moec_ir::{Source, Weight};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Numbers that are converted at once.
const STRIP: usize = 1 << 18;

/// A raw file on its way. Tensors of the same bytes stand in it once, so that a package stores them once.
pub(super) struct RawFile {
    path: PathBuf,
    name: String,
    /// Key of `[placement]` that keeps the weights elsewhere.
    home: &'static str,
    out: BufWriter<File>,
    offset: u64,
    known: HashMap<[u8; 32], u64>,
}

impl RawFile {
    /// A new file of that name in `folder`; `home` is the key of `[placement]` that put its weights there.
    pub(super) fn create(folder: &Path, name: &str, home: &'static str) -> Result<Self> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(|e| io_error("write", &path, &e))?;
        let out = BufWriter::new(file);
        Ok(Self { path, name: name.to_owned(), home, out, offset: 0, known: HashMap::new() })
    }

    /// Appends entry `lead` of a weight's first axis.
    ///
    /// # Errors
    /// A number that f16 does not hold; a file that cannot be read or written.
    pub(super) fn entry(&mut self, weight: &Weight, lead: usize, source: &dyn Source) -> Result<Raw> {
        // A bias has one axis behind that of the experts: its entries are rows of one matrix.
        let vector = weight.shape.len() == 2;
        let part = if vector { (0..1, lead..lead + 1) } else { (lead..lead + 1, 0..weight.rows()) };
        let shape = weight.shape.get(1..).unwrap_or_default().to_vec();
        self.append(&[(weight, part.0, part.1)], shape, source)
    }

    /// Appends weights, joined along their first axis.
    ///
    /// # Errors
    /// As [`Self::entry`].
    pub(super) fn joined(&mut self, weights: &[&Weight], source: &dyn Source) -> Result<Raw> {
        let mut shape = weights.first().map(|w| w.shape.clone()).unwrap_or_default();
        if let Some(first) = shape.first_mut() {
            *first = weights.iter().filter_map(|w| w.shape.first()).sum();
        }
        let parts: Vec<_> = weights.iter().map(|w| (*w, 0..w.lead(), 0..w.rows())).collect();
        self.append(&parts, shape, source)
    }

    /// Appends parts of weights, one behind the other, strip by strip: leading entries, and rows of each.
    fn append(
        &mut self,
        parts: &[(&Weight, Range<usize>, Range<usize>)],
        shape: Vec<usize>,
        source: &dyn Source,
    ) -> Result<Raw> {
        let start = self.offset;
        let mut sha = Sha256::new();
        for (weight, leads, rows) in parts {
            for lead in leads.clone() {
                self.strips(weight, lead, rows.clone(), source, &mut sha)?;
            }
        }
        let offset = *self.known.entry(sha.finalize().into()).or_insert(start);
        if offset != start {
            self.out.seek(SeekFrom::Start(start)).map_err(|e| io_error("write", &self.path, &e))?;
            self.offset = start;
        }
        Ok(Raw { file: self.name.clone(), offset, shape })
    }

    fn strips(
        &mut self,
        weight: &Weight,
        lead: usize,
        rows: Range<usize>,
        source: &dyn Source,
        sha: &mut Sha256,
    ) -> Result<()> {
        let cols = weight.cols();
        let strip = (STRIP / cols.max(1)).clamp(1, rows.len().max(1));
        let (mut numbers, mut bytes) = (Vec::new(), Vec::new());
        for first in rows.clone().step_by(strip) {
            let part = first..(first + strip).min(rows.end);
            numbers.resize(part.len() * cols, 0.0_f32);
            weight
                .expr
                .read(lead, part, 0..cols, source, &mut numbers)
                .map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))?;
            bytes.clear();
            for &x in &numbers {
                let half = f16::from_f32(x);
                if !half.is_finite() {
                    return Err(Error::input(format!("`{}` holds {x:e}, which is no f16", weight.name))
                        .because("the Neural Engine computes in f16, whose largest number is 65504")
                        .hint(format!("set `{} = \"cpu\"` under `[placement]`", self.home)));
                }
                bytes.extend_from_slice(&half.to_le_bytes());
            }
            sha.update(&bytes);
            self.out.write_all(&bytes).map_err(|e| io_error("write", &self.path, &e))?;
            self.offset += bytes.len() as u64;
        }
        Ok(())
    }

    /// Ends the file; gives its bytes.
    pub(super) fn finish(mut self) -> Result<u64> {
        let failed = |e| io_error("write", &self.path, &e);
        self.out.flush().map_err(failed)?;
        self.out.get_ref().set_len(self.offset).map_err(failed)?;
        Ok(self.offset)
    }
}
