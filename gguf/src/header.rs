//! Header of a file: its metadata and the table of its tensors.

use crate::cursor::Cursor;
use crate::layout;
use crate::tensor::{Entry, Tensor};
use crate::types::Type;
use crate::{Error, Value};
use std::collections::{HashMap, HashSet};

const MAGIC: &[u8; 4] = b"GGUF";
/// Default alignment, in bytes.
const ALIGNMENT: u64 = 32;
/// Most axes of a tensor.
const AXES: u32 = 4;
/// Fewest bytes of a key with its value: length, type, one byte.
const LEAST_KEY: u64 = 13;
/// Fewest bytes of a tensor in the table: length of the name, number of axes, type, offset.
const LEAST_TENSOR: u64 = 24;

/// The header of a file.
#[derive(Clone, Debug)]
pub struct Header<'a> {
    version: u32,
    alignment: u64,
    keys: Vec<(&'a str, Value<'a>)>,
    /// Index of each key.
    by_name: HashMap<&'a str, usize>,
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Header<'a> {
    /// Reads the header of the file that is `bytes`. No byte of a tensor is looked at.
    ///
    /// # Errors
    /// Fails if the file is malformed; the error says where.
    pub fn read(bytes: &'a [u8]) -> Result<Self, Error> {
        if bytes.get(..MAGIC.len()) != Some(MAGIC) {
            return Err(Error::Magic(bytes.iter().take(MAGIC.len()).copied().collect()));
        }
        let mut at = Cursor::new(bytes, MAGIC.len());
        let what = || "its header".to_owned();
        let version = at.u32(&what)?;
        if matches!(version.swap_bytes(), 1..=0xffff) && version > 0xffff {
            return Err(Error::BigEndian);
        }
        if !matches!(version, 2 | 3) {
            return Err(Error::Version(version));
        }
        let (tensors, keys) = (at.u64(&what)?, at.u64(&what)?);
        let (keys, by_name) = read_keys(&mut at, keys)?;
        let mut header = Self { version, alignment: ALIGNMENT, keys, by_name, tensors: Vec::new() };
        header.alignment = header.find_alignment()?;
        let entries = read_tensors(&mut at, tensors)?;
        header.tensors = layout::locate_tensors(entries, header.alignment, at.at(), bytes.len())?;
        Ok(header)
    }

    /// The version of the format.
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// Alignment of tensors, in bytes.
    pub const fn alignment(&self) -> u64 {
        self.alignment
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        self.by_name.get(key).and_then(|&i| self.keys.get(i)).map(|(_, value)| value)
    }

    /// Every key with its value, as written.
    pub fn keys(&self) -> impl Iterator<Item = (&'a str, &Value<'a>)> {
        self.keys.iter().map(|(key, value)| (*key, value))
    }

    /// Every tensor, in the order of their data.
    pub fn tensors(&self) -> &[Tensor<'a>] {
        &self.tensors
    }

    fn find_alignment(&self) -> Result<u64, Error> {
        const KEY: &str = "general.alignment";
        let Some(value) = self.get(KEY) else { return Ok(ALIGNMENT) };
        let expected = "a whole number";
        let mistyped = || Error::Mistyped { key: KEY.to_owned(), found: value.kind(), expected };
        let n = value.as_u64().ok_or_else(mistyped)?;
        if n.is_power_of_two() && (8..=1 << 30).contains(&n) {
            Ok(n)
        } else {
            Err(Error::Alignment(n.to_string()))
        }
    }
}

type Keys<'a> = (Vec<(&'a str, Value<'a>)>, HashMap<&'a str, usize>);

fn read_keys<'a>(at: &mut Cursor<'a>, n: u64) -> Result<Keys<'a>, Error> {
    let n = at.has_all(n, LEAST_KEY, &|| format!("its {n} keys"))?;
    let (mut keys, mut by_name) = (Vec::new(), HashMap::new());
    for i in 0..n {
        let name = at.text(&|| format!("key {i}"))?;
        if name.is_empty() {
            return Err(Error::Nameless(format!("key {i}")));
        }
        let value = Value::read(at, &|| format!("`{name}`"))?;
        if by_name.insert(name, i).is_some() {
            return Err(Error::KeyTwice(name.to_owned()));
        }
        keys.push((name, value));
    }
    Ok((keys, by_name))
}

fn read_tensors<'a>(at: &mut Cursor<'a>, n: u64) -> Result<Vec<Entry<'a>>, Error> {
    at.has_all(n, LEAST_TENSOR, &|| format!("the table of its {n} tensors"))?;
    let (mut tensors, mut seen) = (Vec::new(), HashSet::new());
    for i in 0..n {
        let entry = read_tensor(at, i)?;
        if !seen.insert(entry.name) {
            return Err(Error::TensorTwice(entry.name.to_owned()));
        }
        tensors.push(entry);
    }
    Ok(tensors)
}

fn read_tensor<'a>(at: &mut Cursor<'a>, i: u64) -> Result<Entry<'a>, Error> {
    let name = at.text(&|| format!("the name of tensor {i}"))?;
    if name.is_empty() {
        return Err(Error::Nameless(format!("tensor {i}")));
    }
    let what = || format!("tensor `{name}` of the table");
    let wrong = |why: String| Error::Shape { tensor: name.to_owned(), why };
    let axes = at.u32(&what)?;
    if !(1..=AXES).contains(&axes) {
        return Err(wrong(format!("has {axes} axes, expected 1 to {AXES}")));
    }
    let mut extents = Vec::new();
    for _ in 0..axes {
        extents.push(at.u64(&what)?);
    }
    let id = at.u32(&what)?;
    let offset = at.u64(&what)?;
    let kind = Type::of(id).ok_or_else(|| Error::Type { tensor: name.to_owned(), id })?;
    if extents.contains(&0) {
        return Err(wrong(format!("has no numbers: its extents are {extents:?}")));
    }
    let row = extents.first().copied().unwrap_or_default();
    if !row.is_multiple_of(kind.block as u64) {
        return Err(wrong(format!(
            "has rows of {row} numbers, which are not whole blocks of {} ({})",
            kind.block, kind.name
        )));
    }
    let blocks = extents.iter().try_fold(1_u64, |n, &extent| n.checked_mul(extent));
    let size = blocks.and_then(|n| (n / kind.block as u64).checked_mul(kind.bytes as u64));
    let shape: Option<Vec<usize>> = extents.iter().rev().map(|&n| usize::try_from(n).ok()).collect();
    match (size, shape) {
        (Some(size), Some(shape)) => Ok(Entry { name, kind, shape, size, offset }),
        _ => Err(wrong(format!("is too large: its extents are {extents:?}"))),
    }
}
