//! Layout of one entry point: its buffers, and the locations of its values.

use super::int;
use crate::memory::aligned;
use moec_base::error::{Error, Result};
use moec_ir::plan::Buffer;
use moec_ir::{Graph, Node, Op, Operand, Type, ValueId};
use std::collections::HashMap;

/// Location of a value.
#[derive(Clone, Copy)]
pub(super) enum ValueLocation {
    Buffer { buffer: u32, column: usize, ld: usize },
    State(u32),
}

/// Layout of one entry point while it is built.
pub(super) struct EntryLayout<'g> {
    pub(super) graph: &'g Graph,
    pub(super) locations: Vec<Option<ValueLocation>>,
    pub(super) buffers: Vec<Buffer>,
    pub(super) end: u64,
    /// Rows converted to another format, by their location, the kernel that converts them, and the memory of
    /// the result.
    pub(super) forms: HashMap<(u32, usize, String, u32), ValueLocation>,
    /// Tables of units that share the experts of a layer, by the whole table and the unit.
    pub(super) tables: HashMap<(ValueId, u32), ValueLocation>,
}

impl EntryLayout<'_> {
    /// Adds a buffer in a memory.
    pub(super) fn buffer(&mut self, name: String, ty: &Type, memory: u32) -> Result<ValueLocation> {
        let (rows, ld) = match ty.shape.as_slice() {
            &[n] => (n, 1),
            shape => (shape[..shape.len() - 1].iter().product(), ty.cols()),
        };
        let bytes = ty.bytes() as u64;
        let buffer = int(self.buffers.len())?;
        self.buffers.push(Buffer {
            name,
            memory,
            offset: self.end,
            bytes,
            dtype: ty.dtype,
            rows: int(rows)?,
            stride: int(ld)?,
        });
        self.end += aligned(bytes);
        Ok(ValueLocation::Buffer { buffer, column: 0, ld })
    }

    pub(super) fn location(&self, v: ValueId) -> Result<ValueLocation> {
        self.locations[v.0 as usize].ok_or_else(|| Error::bug(format!("%{} has no place", v.0)))
    }
}

/// Makes slices of whole rows views of their source. Returns true if that completes the node.
pub(super) fn view(entry: &mut EntryLayout<'_>, node: &Node) -> Result<bool> {
    let (&Op::Slice { heads: 1, start, .. }, &[Operand::Value(source)]) = (&node.op, node.inputs.as_slice())
    else {
        return Ok(false);
    };
    if let ValueLocation::Buffer { buffer, column, ld } = entry.location(source)? {
        entry.locations[node.outputs[0].0 as usize] =
            Some(ValueLocation::Buffer { buffer, column: column + start, ld });
        return Ok(true);
    }
    Ok(false)
}

/// Location of the result of a cache write.
pub(super) fn written_state(node: &Node) -> Result<ValueLocation> {
    match node.inputs.first() {
        Some(Operand::State(s)) => Ok(ValueLocation::State(s.0)),
        _ => Err(Error::bug("a cache write without its state")),
    }
}
