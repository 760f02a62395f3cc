//! Positions of a layer's keys and values, and how a chunk is written to them.
//!
//! **State.** One state of a graph, `kv[parts, kv_heads, context, width]`. The width is that of the widest
//! part, up to the unit's multiple; what is beyond is zero.
//!
//! **Place of a chunk.** The Neural Engine slices at fixed places only, so the start of a chunk cannot be an
//! input of the slice. There are two methods, both static:
//!
//! * At any position: the input `write[1, 1, context, T]` has a 1 where row `t` is stored at position `p`,
//!   else 0, and the state becomes `kv · (1 − Σₜ write) + write · new`. Zeros and ones are exact in f16, so
//!   what is not written stays as it was to the bit, and padding rows, whose columns are zero, write nothing.
//!   It costs a product of the size of one head's scores and passes over the state.
//! * At a fixed position ([`Chunk::start`]): `slice_update` between constants, and the scores cover no more
//!   than what has been written by then. A prompt that is read in whole chunks calls one function after the
//!   other: half of the scores on average, and functions share weights, so that they cost no memory. Padding
//!   rows are stored as well; these places are overwritten before a mask makes them visible.

use super::{EmitError, Limits, Result, check_rows};
use crate::program::{FunctionBuilder, OpKind, ValueId};

/// Value that a mask adds to a score that does not count. Finite: −∞ would make NaN of a row without any
/// other.
pub const MASKED: f32 = -1e4;

/// Rows that enter together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Rows `T`.
    pub rows: usize,
    /// Position of the first, if that is fixed.
    pub start: Option<usize>,
}

impl Chunk {
    /// Name of its function: `chunk{T}` or `chunk{T}_at{P}`.
    pub fn function(self) -> String {
        match self.start {
            None => format!("chunk{}", self.rows),
            Some(start) => format!("chunk{}_at{start}", self.rows),
        }
    }

    /// Describes, for people, how chunks are written to the state.
    pub(super) fn written(chunks: &[Self]) -> &'static str {
        if chunks.iter().any(|c| c.start.is_some()) {
            "chunks with a place of their own are written there by slice_update, all others by a product with `write`"
        } else {
            "rows are written by a product with `write`"
        }
    }

    /// Positions `W` that its rows may look at, of a cache that holds `context`.
    pub fn window(self, context: usize) -> usize {
        self.start.map_or(context, |start| start + self.rows)
    }

    /// Fails if the unit does not support a chunk, if a chunk occurs twice, or if one ends past the context.
    pub(super) fn check(graph: &str, chunks: &[Self], context: usize, limits: &Limits) -> Result<()> {
        for (i, chunk) in chunks.iter().enumerate() {
            let end = chunk.start.unwrap_or(0).saturating_add(chunk.rows);
            if end > context || chunks[..i].contains(chunk) {
                return Err(EmitError::Description {
                    graph: graph.to_owned(),
                    what: format!("{chunk:?} comes twice, or does not fit {context} positions"),
                });
            }
        }
        let mut rows: Vec<_> = chunks.iter().map(|c| c.rows).collect();
        rows.sort_unstable();
        rows.dedup();
        check_rows(graph, "numbers of rows", &rows, limits)
    }
}

/// Stores `new[parts, kv_heads, T, width]` in the state `kv[parts, kv_heads, context, width]`; gives the
/// positions that the chunk may look at, `[parts, kv_heads, W, width]`.
pub(super) fn store(b: &mut FunctionBuilder, new: ValueId, chunk: Chunk, context: usize) -> Result<ValueId> {
    let mut shape = b.shape(new).to_vec();
    if let Some(positions) = shape.get_mut(2) {
        *positions = context;
    }
    let width = shape.last().copied().unwrap_or(0);
    let state = b.state("kv", &shape);
    let old = b.read_state(state)?;
    let kv = if let Some(start) = chunk.start {
        b.slice_update(old, new, &[0, 0, start, 0])?
    } else {
        let write = b.input("write", &[1, 1, context, chunk.rows]);
        // Number of writes to each position, as wide as a row of the state: a sum over the last axis would
        // leave it at 1.
        let one = b.splat(1.0, &[1; 4])?;
        let ones = b.tile(one, &[1, 1, chunk.rows, width])?;
        let written = b.matmul(write, ones, false)?;
        let keep = b.binary(OpKind::Sub, one, written)?;
        let kept = b.binary(OpKind::Mul, old, keep)?;
        let placed = b.matmul(write, new, false)?;
        b.binary(OpKind::Add, kept, placed)?
    };
    b.write_state(state, kv)?;
    Ok(b.slice(kv, 2, 0, chunk.window(context))?)
}

/// Zeros after the channels of `x[1, heads, T, dim]`, up to `width`.
pub(super) fn fill(b: &mut FunctionBuilder, x: ValueId, width: usize) -> Result<ValueId> {
    let mut shape = b.shape(x).to_vec();
    let Some(channels) = shape.last_mut() else { return Ok(x) };
    if *channels == width {
        return Ok(x);
    }
    *channels = width.saturating_sub(*channels);
    // Repeated from one number: an array of zeros would be stored, once for every shape.
    let zero = b.splat(0.0, &[1; 4])?;
    let zeros = b.tile(zero, &shape)?;
    Ok(b.concat(&[x, zeros], 3)?)
}
