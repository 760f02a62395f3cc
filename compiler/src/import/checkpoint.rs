//! A Hugging Face checkpoint on disk: its tensors by name, mapped and decoded on demand.

use super::formats::{self, fp8, mxfp4, plain::Float};
use super::map::Map;
use super::{ModelSpec, folder, header, shards, tokenizer};
use crate::error::{Error, Result};
use indexmap::IndexMap;
use moec_ir::{Encoding, Leaf, Source};
pub use safetensors::tensor::Dtype;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How checkpoints are read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ImportOptions {
    /// Accept numbers that are infinite or not a number.
    pub allow_nonfinite: bool,
}

/// An open checkpoint. Its files are mapped, and nothing is decoded before it is asked for.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<(String, Map)>,
    tensors: IndexMap<String, Tensor>,
    options: ImportOptions,
    /// Its tokenizer, from when it was first asked for.
    tokenizer: OnceLock<Option<Vec<u8>>>,
    /// Bytes of the maps that were looked at since they were last let go.
    touched: AtomicUsize,
}

/// Bytes of the checkpoint that reading may keep in memory. They are the system's cache and come back when
/// they are wanted, but they count as this process's own.
const RESIDENT: usize = 128 << 20;

/// A tensor as the checkpoint stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Index of its file.
    file: usize,
    /// Stored element type.
    pub dtype: Dtype,
    /// Stored shape.
    pub shape: Vec<usize>,
    /// Its bytes in the file.
    bytes: Range<usize>,
}

/// Where a rectangle lies in a leaf, as [`Source::read`] has it.
#[derive(Clone, Debug)]
struct Rect {
    lead: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    /// Rows and columns of the whole.
    extent: (usize, usize),
}

impl Checkpoint {
    /// Opens the checkpoint of a folder: `model.safetensors`, or the shards that
    /// `model.safetensors.index.json` names. Reads the headers only.
    ///
    /// # Errors
    /// Files that are missing, cut short, outside of the folder or not valid; tensors that are there
    /// twice, or not where the index says.
    pub fn open(dir: &Path, options: &ImportOptions) -> Result<Self> {
        if !dir.is_dir() {
            return Err(Error::input(format!("`{}` is not a folder", dir.display()))
                .hint("give the folder of a Hugging Face checkpoint"));
        }
        let shards = shards::find(dir)?;
        let mut open = Self {
            dir: dir.to_owned(),
            files: Vec::new(),
            tensors: IndexMap::new(),
            options: options.clone(),
            tokenizer: OnceLock::new(),
            touched: AtomicUsize::new(0),
        };
        for (name, path) in shards.files {
            let map = Map::open(&path).map_err(|e| folder::unreadable(&name, &e))?;
            open.add(name, map)?;
        }
        for (tensor, file) in &shards.tensors {
            let said = &open.files[*file].0;
            match open.tensors.get(tensor) {
                Some(t) if t.file == *file => {}
                found => {
                    let error = Error::input(format!("`{said}` has no tensor `{tensor}`"))
                        .hint("index and shards are not of the same checkpoint; download them again");
                    let error = error.because(format!("`{}` says that it is there", shards::INDEX));
                    return Err(match found {
                        Some(t) => error.because(format!("it is in `{}`", open.files[t.file].0)),
                        None => error,
                    });
                }
            }
        }
        Ok(open)
    }

    fn add(&mut self, name: String, map: Map) -> Result<()> {
        let header = header::read(&name, &map)?;
        let file = self.files.len();
        for (tensor, info) in header.tensors {
            let (start, end) = info.data_offsets;
            let bytes = header.data + start..header.data + end;
            let new = Tensor { file, dtype: info.dtype, shape: info.shape, bytes };
            if let Some(old) = self.tensors.insert(tensor.clone(), new) {
                let first = &self.files[old.file].0;
                return Err(Error::input(format!("tensor `{tensor}` is both in `{first}` and in `{name}`"))
                    .hint("remove the files that are not of this checkpoint, or download it again"));
            }
        }
        self.files.push((name, map));
        Ok(())
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The text of its tokenizer, if it has one that fits the model.
    ///
    /// # Errors
    /// A file that is no tokenizer, or one of another model.
    pub fn tokenizer(&self, spec: &ModelSpec) -> Result<Option<&[u8]>> {
        let read = if let Some(read) = self.tokenizer.get() {
            read
        } else {
            let read = tokenizer::read(&self.dir, spec)?;
            self.tokenizer.get_or_init(|| read)
        };
        Ok(read.as_deref())
    }

    /// SHA-256 over the names, types and shapes of the tensors and their places in the files.
    pub fn fingerprint(&self) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        for (name, t) in self.tensors() {
            let _ = writeln!(text, "{name} {} {:?} {:?} {:?}", t.file, t.dtype, t.shape, t.bytes);
        }
        crate::bundle::hashing::hex(&crate::bundle::hashing::sha256(text.as_bytes()))
    }

    /// Names of the files that hold tensors, relative to the folder, and their sizes in bytes.
    pub fn files(&self) -> impl Iterator<Item = (&str, u64)> {
        self.files.iter().map(|(name, map)| (name.as_str(), map.len() as u64))
    }

    /// A tensor.
    pub fn get(&self, tensor: &str) -> Option<&Tensor> {
        self.tensors.get(tensor)
    }

    /// Every tensor, by file and then in the order of its data.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The file that holds a tensor; the index or the only file for one that is not there.
    pub fn file_of(&self, tensor: &str) -> &str {
        match (self.tensors.get(tensor), self.files.as_slice()) {
            (Some(t), files) => &files[t.file].0,
            (None, [(only, _)]) => only,
            (None, _) => shards::INDEX,
        }
    }

    /// Counts bytes about to be read; past [`RESIDENT`] all maps are let go, so that memory does not grow
    /// with the model.
    fn touch(&self, bytes: usize) {
        if self.touched.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > RESIDENT {
            self.release();
        }
    }

    /// Lets go of all maps: what is read of them again comes from the files.
    pub(crate) fn release(&self) {
        self.touched.store(0, Ordering::Relaxed);
        self.files.iter().for_each(|(_, map)| map.release(0..map.len()));
    }

    /// A tensor's stored bytes, row-major.
    pub fn bytes(&self, tensor: &str) -> Option<&[u8]> {
        let t = self.tensors.get(tensor)?;
        self.files[t.file].1.get(t.bytes.clone())
    }

    fn stored(&self, tensor: &str) -> Result<(&Tensor, &[u8])> {
        let missing = || missing(self.file_of(tensor), tensor);
        let t = self.tensors.get(tensor).ok_or_else(missing)?;
        Ok((t, self.bytes(tensor).ok_or_else(missing)?))
    }

    fn float(&self, tensor: &str, t: &Tensor) -> Result<Float> {
        float(t.dtype).ok_or_else(|| {
            Error::limit(format!("tensor `{tensor}` in `{}` is stored as {}", self.file_of(tensor), t.dtype))
                .hint(
                    "a tensor may be F32, BF16 or F16; quantised ones MXFP4, or FP8 E4M3 with block factors",
                )
        })
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
        let (t, bytes) = self.stored(&leaf.tensor)?;
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
                let (s, scales) = self.stored(scales)?;
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
                let (s, scales) = self.stored(name)?;
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
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let axis = |i: usize| leaf.shape.iter().rev().nth(i).copied().unwrap_or(1);
        let extent = (axis(1), axis(0));
        let wanted = rows.len().checked_mul(cols.len());
        let within = lead < axis(2) && rows.end <= extent.0 && cols.end <= extent.1;
        let sized = leaf.shape.iter().try_fold(4_usize, |n, &d| n.checked_mul(d));
        if !within || wanted != Some(out.len()) || leaf.shape.len() > 3 || sized.is_none() {
            return Err(Error::bug(format!(
                "rectangle [{lead}, {rows:?}, {cols:?}] of {} numbers asked of tensor `{}` {:?}",
                out.len(),
                leaf.tensor,
                leaf.shape
            ))
            .into());
        }
        if out.is_empty() {
            return Ok(());
        }
        // Whole rows: the pages of a strip of columns are those of its rows.
        self.touch(rows.len().saturating_mul(extent.1).saturating_mul(4));
        let at = Rect { lead, rows, cols, extent };
        self.decode(leaf, &at, out)?;
        if !self.options.allow_nonfinite
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
}

/// The floating-point format of a stored type that holds one number per element.
pub(crate) fn float(dtype: Dtype) -> Option<Float> {
    match dtype {
        Dtype::F32 => Some(Float::F32),
        Dtype::BF16 => Some(Float::Bf16),
        Dtype::F16 => Some(Float::F16),
        _ => None,
    }
}

/// The error for a tensor that is not there.
pub(crate) fn missing(file: &str, tensor: &str) -> Error {
    Error::input(format!("`{file}` has no tensor `{tensor}`"))
        .hint("the download may be incomplete, or `config.json` may be that of another model")
}
