//! Layout of neuron bundles in a file, and the memory that they are read into.

use moec_runtime::error::{Error, Result};
use moec_runtime::offload::disk::{BLOCK, Class, Extent, ExtentTable, FileEntry};
use moec_runtime::offload::neurons::Shape;

/// Memory for each part, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// For first parts.
    pub gates: u64,
    /// For second parts.
    pub up_down: u64,
}

/// The extents of a file that holds bundles, one after the other from `offset` on: two for each neuron, or
/// one if [`Shape::up_down`] is 0.
///
/// # Errors
/// [`Error::Bundle`] for parts that are not whole blocks of [`BLOCK`], or more than the file holds.
pub fn extents(file: FileEntry, offset: u64, shape: Shape) -> Result<ExtentTable> {
    let wrong = |what: &str| Err(Error::plan(format!("bundles of neurons {what}")));
    if !shape.gate.is_multiple_of(BLOCK) || !shape.up_down.is_multiple_of(BLOCK) {
        return wrong("have parts of whole blocks of 4096 bytes");
    }
    let count = u64::from(shape.matrices) * u64::from(shape.neurons);
    let all = shape.gate.checked_add(shape.up_down).and_then(|b| b.checked_mul(count));
    if all.and_then(|b| b.checked_add(offset)).is_none_or(|end| end > file.bytes) {
        return wrong("pass the end of their file");
    }
    let mut at = offset;
    let parts = (0..count).flat_map(|_| [shape.gate, shape.up_down]).filter(|&bytes| bytes > 0);
    let extent = |bytes| {
        at += bytes;
        Extent { file: 0, offset: at - bytes, bytes, crc32c: None }
    };
    let extents = parts.map(extent).collect();
    ExtentTable::new(vec![file], extents)
}

/// Size classes of a store's buffers: the parts that memory holds, and a cluster of each part that bypasses
/// the cache.
pub fn classes(shape: Shape, memory: Memory) -> Vec<Class> {
    let count = u64::from(shape.matrices) * u64::from(shape.neurons);
    let class = |bytes: u64, memory: u64| {
        let kept = memory.checked_div(bytes).unwrap_or(0).min(count);
        let count = u32::try_from(kept + u64::from(shape.cluster)).unwrap_or(u32::MAX);
        (bytes > 0).then_some(Class { bytes, count })
    };
    [class(shape.gate, memory.gates), class(shape.up_down, memory.up_down)].into_iter().flatten().collect()
}
