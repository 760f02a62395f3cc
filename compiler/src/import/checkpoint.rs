//! A Hugging Face checkpoint on disk: its tensors by name, mapped and decoded on demand.

use super::formats::plain::Float;
use super::map::Map;
use super::{ModelSpec, folder, header, shards, tokenizer};
use crate::error::{Error, Result};
use indexmap::IndexMap;
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
const RESIDENT: usize = 64 << 20;

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
        crate::hashing::hex(&crate::hashing::sha256(text.as_bytes()))
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
    pub(super) fn touch(&self, bytes: usize) {
        if self.touched.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes) > RESIDENT {
            self.release();
        }
    }

    /// Whether numbers that are not finite are taken.
    pub(super) fn allows_nonfinite(&self) -> bool {
        self.options.allow_nonfinite
    }

    /// Has the system fetch bytes of a tensor that will be read soon.
    pub(super) fn will_read(&self, t: &Tensor, bytes: Range<usize>) {
        self.files[t.file].1.will_read(t.bytes.start + bytes.start..t.bytes.start + bytes.end);
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

    pub(super) fn data(&self, tensor: &str) -> Result<(&Tensor, &[u8])> {
        let missing = || missing(self.file_of(tensor), tensor);
        let t = self.tensors.get(tensor).ok_or_else(missing)?;
        Ok((t, self.bytes(tensor).ok_or_else(missing)?))
    }

    pub(super) fn float(&self, tensor: &str, t: &Tensor) -> Result<Float> {
        float(t.dtype).ok_or_else(|| {
            Error::limit(format!("tensor `{tensor}` in `{}` is stored as {}", self.file_of(tensor), t.dtype))
                .hint(
                    "a tensor may be F32, BF16 or F16; quantised ones MXFP4, or FP8 E4M3 with block factors",
                )
        })
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
