//! A checkpoint from the text of a filetest: a `config.json`, and names and shapes of tensors, which are all
//! zero.

use moec_base::error::{Error, Result, io_error};
use moec_base::scratch::Scratch;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::Path;

/// Size limit of all tensors of such a checkpoint.
const MOST: u64 = 16 << 20;

/// Writes the checkpoint into a temporary folder. `tensors` has a line `NAME: bf16[ROWS, COLUMNS]` for each.
///
/// # Errors
/// Fails if a line is invalid, with its place in the file at `path`, or a write fails.
pub(super) fn write(config: &str, tensors: &str, path: &Path) -> Result<Scratch> {
    let mut header = Map::new();
    let mut end = 0_u64;
    for (i, line) in tensors.lines().enumerate() {
        let line = line.split(';').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let (name, shape) = tensor(line).ok_or_else(|| {
            Error::input(format!("`{}:{}`: `{line}` is not a tensor", path.display(), i + 1))
                .hint("write `model.norm.weight: bf16[64]`")
        })?;
        let bytes = shape.iter().try_fold(2_u64, |n, &d| n.checked_mul(d));
        let next = bytes.and_then(|b| end.checked_add(b)).filter(|&b| b <= MOST).ok_or_else(|| {
            Error::input(format!("`{}:{}`: the tensors are too large for a test", path.display(), i + 1))
        })?;
        let about = json!({"dtype": "BF16", "shape": shape, "data_offsets": [end, next]});
        header.insert(name.to_owned(), about);
        end = next;
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + end as usize, 0);
    let folder = Scratch::with_room("run a pass on a checkpoint", bytes.len() as u64)?;
    for (name, bytes) in [("config.json", config.trim_start().as_bytes()), ("model.safetensors", &bytes)] {
        let path = folder.path().join(name);
        fs::write(&path, bytes).map_err(|e| io_error("write", &path, &e))?;
    }
    Ok(folder)
}

/// Name and shape: `model.norm.weight: bf16[64]`.
fn tensor(line: &str) -> Option<(&str, Vec<u64>)> {
    let (name, ty) = line.split_once(':')?;
    let axes = ty.trim().strip_prefix("bf16[")?.strip_suffix(']')?;
    let shape = axes.split(',').map(|d| d.trim().parse().ok()).collect::<Option<_>>()?;
    Some((name.trim(), shape))
}
