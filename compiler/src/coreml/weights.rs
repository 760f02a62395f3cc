//! Weights of experts as raw f16: what the helper builds packages from.

use crate::bundle::partial::io_error;
use crate::error::{Error, Result};
use half::f16;
use moec_coreml::emit::Raw;
use moec_ir::{Source, Weight};
use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

/// Numbers that are converted at once.
const STRIP: usize = 1 << 18;

/// A raw file on its way.
pub(super) struct RawFile {
    path: PathBuf,
    name: String,
    out: BufWriter<File>,
    offset: u64,
}

impl RawFile {
    /// A new file of that name in `folder`.
    pub(super) fn create(folder: &Path, name: &str) -> Result<Self> {
        let path = folder.join(name);
        let file = File::create(&path).map_err(|e| io_error("write", &path, &e))?;
        Ok(Self { path, name: name.to_owned(), out: BufWriter::new(file), offset: 0 })
    }

    /// Appends entry `lead` of a weight's first axis, strip by strip.
    ///
    /// # Errors
    /// A number that f16 does not hold; a file that cannot be read or written.
    pub(super) fn append(&mut self, weight: &Weight, lead: usize, source: &dyn Source) -> Result<Raw> {
        // A bias has one axis behind that of the experts: its entries are rows of one matrix.
        let vector = weight.shape.len() == 2;
        let (rows, cols) = if vector { (1, weight.cols()) } else { (weight.rows(), weight.cols()) };
        let strip = (STRIP / cols.max(1)).clamp(1, rows.max(1));
        let start = self.offset;
        let (mut numbers, mut bytes) = (Vec::new(), Vec::new());
        for first in (0..rows).step_by(strip) {
            let end = (first + strip).min(rows);
            let (at, part) = if vector { (0, lead..lead + 1) } else { (lead, first..end) };
            numbers.resize((end - first) * cols, 0.0_f32);
            weight
                .expr
                .read(at, part, 0..cols, source, &mut numbers)
                .map_err(|e| Error::input(format!("`{}` cannot be read", weight.name)).because(e))?;
            bytes.clear();
            for &x in &numbers {
                let half = f16::from_f32(x);
                if !half.is_finite() {
                    return Err(Error::input(format!("`{}` holds {x:e}, which is no f16", weight.name))
                        .because("the Neural Engine computes in f16, whose largest number is 65504")
                        .hint("set `experts = \"cpu\"` under `[placement]`"));
                }
                bytes.extend_from_slice(&half.to_le_bytes());
            }
            self.out.write_all(&bytes).map_err(|e| io_error("write", &self.path, &e))?;
            self.offset += bytes.len() as u64;
        }
        let shape = if vector { vec![cols] } else { vec![rows, cols] };
        Ok(Raw { file: self.name.clone(), offset: start, shape })
    }

    /// Ends the file.
    pub(super) fn finish(mut self) -> Result<()> {
        self.out.flush().map_err(|e| io_error("write", &self.path, &e))
    }
}
