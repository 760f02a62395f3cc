//! Weight files: tensors after a header of metadata each, aligned to 64 bytes.
//!
//! The format is MILBlob's, version 2. A file starts with 64 bytes (u32 count of blobs, u32 version). A
//! blob's metadata is 64 bytes: u32 `0xDEADBEEF`, u32 element type, u64 bytes, u64 offset of the data, u64
//! bits of padding in the last byte. All numbers are little-endian.

use super::error::{Flaw, PackageError};
use super::manifest;
use super::types::TensorType;
use moec_runtime::Error;
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::mapped::MappedFile;
use moec_runtime::platform::regular::{Limit, Refused, refused};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Bytes that headers and data are aligned to, and the size of a header.
pub const ALIGN: usize = 64;
const SENTINEL: u32 = 0xDEAD_BEEF;
const VERSION: u32 = 2;
/// Most weight files of a package.
const MAX_FILES: usize = 64;
/// Name of the model's folder in the names of weight files.
const MODEL_PATH: &str = "@model_path/";

/// A tensor in a weight file: which bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Blob {
    /// Number of the file, in the order in which the model names them.
    pub file: usize,
    /// Offset of the metadata, in bytes.
    pub header: usize,
    /// Offset of the data, in bytes.
    pub start: usize,
    /// Bytes of data.
    pub len: usize,
}

/// One weight file.
#[derive(Debug)]
struct File {
    /// Name in the model.
    name: String,
    map: Arc<MappedFile>,
}

/// The weight files of a package, mapped.
#[derive(Debug)]
pub struct Weights {
    package: BundleReader,
    /// Folder of the model.
    folder: String,
    files: Vec<File>,
    by_name: BTreeMap<String, usize>,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at.checked_add(4)?)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

impl Weights {
    /// No file yet; names are taken relative to the folder of the model.
    pub(super) fn new(package: &BundleReader, folder: &str) -> Self {
        Self {
            package: package.clone(),
            folder: folder.to_owned(),
            files: Vec::new(),
            by_name: BTreeMap::new(),
        }
    }

    /// Number of weight files that the model names.
    pub fn files(&self) -> usize {
        self.files.len()
    }

    /// Name of a file in the model, and the number of blobs that its header states.
    pub fn file(&self, index: usize) -> Option<(&str, u32)> {
        let file = self.files.get(index)?;
        Some((&file.name, u32_at(&file.map, 0)?))
    }

    /// The bytes of a blob, unchanged from the file; empty for a blob of another package.
    pub fn bytes(&self, blob: Blob) -> &[u8] {
        let end = blob.start.saturating_add(blob.len);
        self.files.get(blob.file).and_then(|f| f.map.get(blob.start..end)).unwrap_or_default()
    }

    /// Finds the blob of a tensor and checks its metadata.
    ///
    /// # Errors
    /// [`Flaw::Weight`] if the file is missing or outside of the package, or the metadata is not that of
    /// such a tensor.
    pub(super) fn find(&mut self, name: &str, offset: u64, ty: &TensorType) -> Result<Blob, Flaw> {
        let wrong = |message: String| Flaw::Weight { file: name.into(), offset, message };
        let file = self.open(name).map_err(wrong)?;
        let map = &self.files[file].map;
        let header = usize::try_from(offset).map_err(|_| wrong("past the end of the file".into()))?;
        if !header.is_multiple_of(ALIGN) || header < ALIGN {
            return Err(wrong(format!("metadata must be at multiples of {ALIGN} bytes after the header")));
        }
        let (Some(sentinel), Some(dtype), Some(len), Some(start)) = (
            u32_at(map, header),
            header.checked_add(4).and_then(|at| u32_at(map, at)),
            header.checked_add(8).and_then(|at| u64_at(map, at)),
            header.checked_add(16).and_then(|at| u64_at(map, at)),
        ) else {
            return Err(wrong(format!("past the end of the file of {} bytes", map.len())));
        };
        if sentinel != SENTINEL {
            return Err(wrong(format!("{sentinel:#010x} in place of {SENTINEL:#010x}")));
        }
        if Some(dtype) != ty.dtype.blob() {
            return Err(wrong(format!("element type number {dtype}, but the model has {}", ty.dtype)));
        }
        if len != ty.bytes() as u64 {
            return Err(wrong(format!("{len} bytes, {ty} has {}", ty.bytes())));
        }
        let inside = usize::try_from(start).ok().filter(|&s| {
            s.is_multiple_of(ALIGN)
                && s > header
                && s.checked_add(ty.bytes()).is_some_and(|end| end <= map.len())
        });
        let Some(start) = inside else {
            return Err(wrong(format!(
                "data at {start} + {len} bytes: not aligned, or not after the metadata and within the file"
            )));
        };
        Ok(Blob { file, header, start, len: ty.bytes() })
    }

    /// Number of the file of that name; maps it the first time.
    fn open(&mut self, name: &str) -> Result<usize, String> {
        if let Some(&index) = self.by_name.get(name) {
            return Ok(index);
        }
        if self.files.len() >= MAX_FILES {
            return Err(format!("more than {MAX_FILES} weight files"));
        }
        let relative = name.strip_prefix(MODEL_PATH).unwrap_or(name);
        let path = manifest::inside(&self.package, &self.folder, relative)
            .ok_or_else(|| "a path outside of the package".to_owned())?;
        let map = self.package.map(&path).map_err(|e| e.to_string())?;
        let version = u32_at(&map, 4).filter(|_| map.len() >= ALIGN);
        if version != Some(VERSION) {
            return Err(format!("not a weight file of version {VERSION}"));
        }
        self.files.push(File { name: name.into(), map });
        self.by_name.insert(name.into(), self.files.len() - 1);
        Ok(self.files.len() - 1)
    }
}

/// Reads a file whole, up to a limit.
pub(super) fn read(package: &BundleReader, name: &str, limit: u64) -> Result<Vec<u8>, PackageError> {
    let bound = Limit { what: "a part of a package", bytes: limit };
    package.read(name, bound).map_err(|source| match &source {
        Error::Io { path: Some(path), source: e, .. } => match refused(e) {
            Some(&Refused::Long { found: Some(bytes), .. }) => {
                PackageError::TooLarge { path: path.clone(), bytes, limit }
            }
            _ => PackageError::Read(source.into()),
        },
        _ => PackageError::Read(source.into()),
    })
}
