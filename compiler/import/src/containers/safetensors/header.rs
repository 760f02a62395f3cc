//! The header of a safetensors file, and its error messages.
//!
//! The `safetensors` crate decides whether a header is valid. Its errors seldom name a tensor. So a header
//! that it refuses is parsed again, leniently, to find the tensor.

use moec_base::error::{Error, Result};
use safetensors::tensor::{Dtype, SafeTensorError, SafeTensors, TensorInfo};
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;

/// Longest header that is read; the limit of the `safetensors` crate.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the length field before the header.
const LENGTH: usize = 8;
const DAMAGED: &str = "the file is damaged or is not a safetensors file; download it again";

/// Contents of a valid header.
pub(crate) struct Header {
    /// Tensors in the order of their data.
    pub(crate) tensors: Vec<(String, TensorInfo)>,
    /// First byte of the data in the file; offsets of tensors count from there.
    pub(crate) data: usize,
}

/// Reads the header of the file that `bytes` maps; no byte of a tensor is read.
pub(crate) fn read(file: &str, bytes: &[u8]) -> Result<Header> {
    let json = json_of(file, bytes)?;
    let names: Entries<IgnoredAny> = parse(file, json)?;
    if let Some(duplicate) = first_repeated(&names.0) {
        return Err(Error::input(format!("tensor `{duplicate}` occurs twice in the header of `{file}`"))
            .hint(DAMAGED));
    }
    drop(names);
    let (length, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| explain(file, bytes, json, &e))?;
    let tensors = metadata.offset_keys().into_iter().filter_map(|name| {
        let info = metadata.info(&name)?.clone();
        Some((name, info))
    });
    Ok(Header { tensors: tensors.collect(), data: LENGTH + length })
}

/// The JSON text of the header.
fn json_of<'a>(file: &str, bytes: &'a [u8]) -> Result<&'a [u8]> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH>() else {
        return Err(Error::input(format!(
            "`{file}` is {} bytes long, too short for a safetensors file",
            bytes.len()
        ))
        .hint("the download may have been cut short; download it again"));
    };
    let length = u64::from_le_bytes(*length);
    if length > MAX_HEADER {
        return Err(Error::input(format!(
            "the header of `{file}` claims {length} bytes, more than the {MAX_HEADER} that are read"
        ))
        .hint(DAMAGED));
    }
    usize::try_from(length).ok().and_then(|length| rest.get(..length)).ok_or_else(|| {
        Error::input(format!("`{file}` ends inside its header"))
            .because(format!("the header takes {length} bytes, of which the file has {}", rest.len()))
            .hint("the download may have been cut short; download it again")
    })
}

fn parse<T: for<'de> serde::Deserialize<'de>>(file: &str, json: &[u8]) -> Result<Entries<T>> {
    serde_json::from_slice(json)
        .map_err(|e| Error::input(format!("the header of `{file}` is not valid")).because(e).hint(DAMAGED))
}

/// The entries of a JSON object as written, with repeated keys.
pub(crate) struct Entries<T>(pub(crate) Vec<(String, T)>);

impl<'de, T: serde::Deserialize<'de>> serde::Deserialize<'de> for Entries<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V<T>(PhantomData<T>);
        impl<'de, T: serde::Deserialize<'de>> Visitor<'de> for V<T> {
            type Value = Entries<T>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        d.deserialize_map(V(PhantomData))
    }
}

/// The first key that is repeated.
pub(crate) fn first_repeated<T>(entries: &[(String, T)]) -> Option<&str> {
    let mut seen = HashSet::with_capacity(entries.len());
    entries.iter().map(|(name, _)| name.as_str()).find(|name| !seen.insert(*name))
}

/// One tensor of a header that was refused.
struct Span {
    name: String,
    start: usize,
    end: usize,
}

/// Finds the reason why the crate refused the header.
fn explain(file: &str, bytes: &[u8], json: &[u8], refused: &SafeTensorError) -> Error {
    let data = bytes.len() - LENGTH - json.len();
    let entries: Entries<Value> = match parse(file, json) {
        Ok(entries) => entries,
        Err(e) => return e,
    };
    let mut spans = Vec::new();
    for (name, entry) in entries.0 {
        if name == "__metadata__" {
            continue;
        }
        match span(&entry) {
            Ok((start, end)) => spans.push(Span { name, start, end }),
            Err(why) => {
                return Error::input(format!("tensor `{name}` in the header of `{file}` is not valid"))
                    .because(why)
                    .hint(DAMAGED);
            }
        }
    }
    spans.sort_by_key(|s| (s.start, s.end));
    spread(file, &spans, data).unwrap_or_else(|| {
        Error::input(format!("the header of `{file}` is not valid")).because(refused).hint(DAMAGED)
    })
}

/// Checks one tensor by itself and returns its size in bytes.
fn span(entry: &Value) -> Result<(usize, usize), String> {
    let dtype = entry.get("dtype").ok_or("it has no dtype")?;
    let dtype: Dtype = serde_json::from_value(dtype.clone()).map_err(|_| format!("unknown dtype {dtype}"))?;
    let shape = entry.get("shape").ok_or("it has no shape")?;
    let shape: Vec<usize> =
        serde_json::from_value(shape.clone()).map_err(|_| format!("shape {shape} is not a list of sizes"))?;
    let offsets = entry.get("data_offsets").ok_or("it has no data_offsets")?;
    let (start, end): (usize, usize) = serde_json::from_value(offsets.clone())
        .map_err(|_| format!("data_offsets {offsets} are not two byte offsets"))?;
    let bits = shape.iter().try_fold(dtype.bitsize(), |n, &d| n.checked_mul(d));
    let bytes = bits.ok_or_else(|| format!("the size of shape {shape:?} overflows"))? / 8;
    match end.checked_sub(start) {
        Some(n) if n == bytes => Ok((start, end)),
        Some(n) => Err(format!("{dtype} of shape {shape:?} takes {bytes} bytes, but its offsets span {n}")),
        None => Err(format!("its offsets {start} .. {end} run backwards")),
    }
}

/// Checks that the tensors, sorted by offset, fill the `data` bytes of the file exactly.
fn spread(file: &str, spans: &[Span], data: usize) -> Option<Error> {
    let last = spans.iter().max_by_key(|s| s.end)?;
    if last.end > data {
        return Some(
            Error::input(format!(
                "`{file}` is cut short: tensor `{}` ends past the end of the file",
                last.name
            ))
            .because(format!("the tensors take {} bytes, of which the file has {data}", last.end))
            .hint("the download may have been cut short; download it again"),
        );
    }
    for pair in spans.windows(2) {
        let [a, b] = pair else { continue };
        if b.start < a.end {
            let message = format!("tensors `{}` and `{}` overlap in `{file}`", a.name, b.name);
            let cause = format!("bytes {} .. {} and {} .. {} of the data", a.start, a.end, b.start, b.end);
            return Some(Error::input(message).because(cause).hint(DAMAGED));
        }
    }
    let mut end = 0;
    for s in spans {
        if s.start != end {
            let message = format!(
                "bytes {end} .. {} before tensor `{}` in `{file}` belong to no tensor",
                s.start, s.name
            );
            return Some(Error::input(message).hint(DAMAGED));
        }
        end = s.end;
    }
    (end < data).then(|| {
        Error::input(format!("`{file}` has {} bytes after its last tensor", data - end)).hint(DAMAGED)
    })
}
