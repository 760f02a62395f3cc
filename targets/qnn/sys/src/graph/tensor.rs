//! Tensors of a graph, and where the bytes of constant ones come from.

use super::{DType, Quant};
use crate::error::{Error, Result};
use bincode::{Decode, Encode};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::PathBuf;

/// A tensor of one graph: its place in the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct TensorId(pub(super) u32);

impl TensorId {
    /// Its place in [`GraphSpec::tensors`](super::GraphSpec::tensors).
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Role of a tensor in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Role {
    /// Written by the caller before the graph is executed.
    Input,
    /// Read by the caller after it.
    Output,
    /// Between nodes.
    Native,
    /// Constant.
    Static,
}

/// A tensor of a graph.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct TensorSpec {
    /// Name, of its own in the graph.
    pub name: String,
    /// Role in the graph.
    pub role: Role,
    /// Type of its elements.
    pub dtype: DType,
    /// Sizes, outermost first.
    pub dims: Vec<u32>,
    /// Values of its stored numbers.
    pub quant: Quant,
    /// Bytes of a constant tensor; `None` for others.
    pub data: Option<Data>,
}

/// Source of a constant tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Data {
    /// Bytes in memory.
    Bytes(Vec<u8>),
    /// A part of a file, which is read when the graph is composed.
    File {
        /// The file.
        path: PathBuf,
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

impl Data {
    /// Bytes that it gives.
    pub fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::File { len, .. } => *len,
        }
    }

    /// Whether it has no data.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes.
    ///
    /// # Errors
    /// [`Error::Io`] if the file cannot be read, is shorter, or is not a regular one.
    pub fn read(&self) -> Result<Vec<u8>> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.clone()),
            Self::File { path, offset, len } => {
                let failed = |e| Error::io(path, e);
                // Before it is opened: a pipe would be waited for.
                let found = std::fs::metadata(path).map_err(failed)?;
                if !found.is_file() {
                    return Err(Error::io(path, "it is not a regular file"));
                }
                let end = offset.checked_add(*len);
                if end.is_none_or(|end| end > found.len()) {
                    let has = found.len();
                    return Err(Error::io(path, format!("{len} bytes from {offset} on, and it has {has}")));
                }
                let mut file = std::fs::File::open(path).map_err(failed)?;
                file.seek(SeekFrom::Start(*offset)).map_err(failed)?;
                // The file has at least this many bytes.
                let mut bytes = vec![0; usize::try_from(*len).map_err(|e| Error::io(path, e))?];
                file.read_exact(&mut bytes).map_err(failed)?;
                Ok(bytes)
            }
        }
    }
}

impl TensorSpec {
    /// Elements; none if there are more than fit.
    pub fn elements(&self) -> Option<usize> {
        self.dims.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim as usize))
    }

    /// Bytes of its elements; none if they are more than QNN's 32 bits count.
    pub fn bytes(&self) -> Option<usize> {
        let bytes = self.elements()?.checked_mul(self.dtype.bytes())?;
        u32::try_from(bytes).is_ok().then_some(bytes)
    }

    /// Fault of the tensor, if it has one.
    pub(super) fn fault(&self) -> Option<String> {
        if self.name.is_empty() || self.name.contains('\0') {
            return Some("its name is empty or has a zero byte".into());
        }
        if self.dims.is_empty() || self.dims.contains(&0) || self.dims.len() > 8 {
            return Some(format!("its sizes are {:?}, and must be one to eight, none of them 0", self.dims));
        }
        let Some(bytes) = self.bytes() else {
            return Some("it has 4 GiB or more".into());
        };
        match &self.data {
            Some(_) if self.role != Role::Static => return Some("it has data, but is not constant".into()),
            None if self.role == Role::Static => return Some("it is constant, but has no data".into()),
            Some(data) if data.len() != bytes as u64 => {
                return Some(format!("it has {} bytes of data, expected {bytes}", data.len()));
            }
            _ => {}
        }
        self.quant_fault()
    }

    fn quant_fault(&self) -> Option<String> {
        let positive = |scale: &f32| scale.is_finite() && *scale > 0.0;
        match (&self.quant, self.dtype.bits()) {
            (Quant::None, _) => None,
            (Quant::Tensor { scale, .. }, Some(_)) if positive(scale) => None,
            (Quant::Tensor { scale, .. }, Some(_)) => Some(format!("its scale is {scale}")),
            (Quant::Channels { axis, bits, scales }, Some(width @ (8 | 32))) => {
                if *bits != width && (*bits, width) != (4, 8) {
                    return Some(format!("its channels have {bits} bits, but {} has {width}", self.dtype));
                }
                let len = self.dims.get(*axis as usize).copied();
                if len.map(|n| n as usize) != Some(scales.len()) {
                    return Some(format!(
                        "it has {} scales for axis {axis} of {:?}",
                        scales.len(),
                        self.dims
                    ));
                }
                (!scales.iter().all(positive)).then(|| "one of its scales is not above zero".into())
            }
            (Quant::Channels { .. }, Some(_)) => Some(format!("channels of {} have no scales", self.dtype)),
            (_, None) => Some(format!("{} is not a quantised type", self.dtype)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_part_is_read_or_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights");
        std::fs::write(&file, b"0123456789").unwrap();
        let part = |path: &std::path::Path, offset, len| Data::File { path: path.into(), offset, len }.read();
        assert_eq!(part(&file, 7, 3).unwrap(), b"789");
        assert_eq!(part(&file, 10, 0).unwrap(), b"");
        for (offset, len) in [(7, 4), (11, 0), (0, 1 << 50), (u64::MAX, 1)] {
            let why = part(&file, offset, len).unwrap_err().to_string();
            assert!(why.contains("and it has 10"), "{why}");
        }
        assert!(part(folder.path(), 0, 0).unwrap_err().to_string().contains("not a regular file"));
        assert!(matches!(part(&folder.path().join("none"), 0, 0), Err(Error::Io { .. })));
    }
}
