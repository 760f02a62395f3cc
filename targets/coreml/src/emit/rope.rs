//! Rotary positions.
//!
//! The Neural Engine cannot gather rows of a table by position, so cosines and sines of the rows' positions
//! are an input: `angles[T, R, 1, 1]`, cosines first, as [`moec_ir::Op::RopeAngles`] gives them.

use super::Result;
use crate::program::{FunctionBuilder, OpKind, ValueId};
use moec_ir::RopeStyle;

/// Rotation of a head's channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rope {
    /// First channel.
    pub offset: usize,
    /// Number of channels `R`; even.
    pub channels: usize,
    /// Pairing.
    pub style: RopeStyle,
}

/// Cosines and sines of a chunk, each `[1, 1, R/2, T]`.
pub(super) struct Angles {
    cos: ValueId,
    sin: ValueId,
}

impl Rope {
    /// The input and its halves.
    pub(super) fn input(self, b: &mut FunctionBuilder, rows: usize) -> Result<Angles> {
        let angles = b.input("angles", &[rows, self.channels, 1, 1]);
        let angles = b.transpose(angles, &[2, 3, 1, 0])?;
        let half = self.channels / 2;
        Ok(Angles { cos: b.slice(angles, 2, 0, half)?, sin: b.slice(angles, 2, half, half)? })
    }

    /// Rotates `x[1, heads, dim, T]`.
    pub(super) fn apply(self, b: &mut FunctionBuilder, x: ValueId, angles: &Angles) -> Result<ValueId> {
        let &[_, heads, dim, rows] = b.shape(x) else { return Ok(x) };
        let (half, end) = (self.channels / 2, self.offset + self.channels);
        let rotated = b.slice(x, 2, self.offset, self.channels)?;
        let rotated = match self.style {
            RopeStyle::Half => {
                let (first, second) = (b.slice(rotated, 2, 0, half)?, b.slice(rotated, 2, half, half)?);
                let pair = rotate(b, first, second, angles.cos, angles.sin)?;
                b.concat(&pair, 2)?
            }
            RopeStyle::Interleaved => {
                // [heads, R/2, 2, T]: the pair has an axis of its own.
                let pairs = b.reshape(rotated, &[heads, half, 2, rows])?;
                let (first, second) = (b.slice(pairs, 2, 0, 1)?, b.slice(pairs, 2, 1, 1)?);
                let cos = b.reshape(angles.cos, &[1, half, 1, rows])?;
                let sin = b.reshape(angles.sin, &[1, half, 1, rows])?;
                let pair = rotate(b, first, second, cos, sin)?;
                let pairs = b.concat(&pair, 2)?;
                b.reshape(pairs, &[1, heads, self.channels, rows])?
            }
        };
        let mut parts = Vec::new();
        if self.offset > 0 {
            parts.push(b.slice(x, 2, 0, self.offset)?);
        }
        parts.push(rotated);
        if end < dim {
            parts.push(b.slice(x, 2, end, dim - end)?);
        }
        Ok(b.concat(&parts, 2)?)
    }
}

/// `(x·cos − y·sin, y·cos + x·sin)`.
fn rotate(
    b: &mut FunctionBuilder,
    x: ValueId,
    y: ValueId,
    cos: ValueId,
    sin: ValueId,
) -> Result<[ValueId; 2]> {
    let (xc, ys) = (b.binary(OpKind::Mul, x, cos)?, b.binary(OpKind::Mul, y, sin)?);
    let (yc, xs) = (b.binary(OpKind::Mul, y, cos)?, b.binary(OpKind::Mul, x, sin)?);
    Ok([b.binary(OpKind::Sub, xc, ys)?, b.binary(OpKind::Add, yc, xs)?])
}
