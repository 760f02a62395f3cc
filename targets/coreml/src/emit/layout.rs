//! Axis of a tensor that holds the rows inside of a graph.

use super::Result;
use crate::program::{FunctionBuilder, ValueId};

/// Layout between the boundaries of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// `[rows, channels, 1, 1]`, as at the boundary (NPUMoE, §4.2).
    Rows,
    /// `[1, channels, 1, rows]`. Where the last axis is padded to 64 bytes, a last axis of 1 takes up 32
    /// times its data; this layout costs a transposition at each end instead.
    Columns,
}

impl Layout {
    /// Converts from `x[rows, channels, 1, 1]`.
    pub(super) fn enter(self, b: &mut FunctionBuilder, x: ValueId) -> Result<ValueId> {
        Ok(match self {
            Self::Rows => x,
            Self::Columns => b.transpose(x, &[2, 1, 3, 0])?,
        })
    }

    /// Converts to `[rows, channels, 1, 1]`.
    pub(super) fn leave(self, b: &mut FunctionBuilder, y: ValueId) -> Result<ValueId> {
        Ok(match self {
            Self::Rows => y,
            Self::Columns => b.transpose(y, &[3, 1, 0, 2])?,
        })
    }
}
