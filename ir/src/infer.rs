//! Operand checks of type inference, with the reason that operands do not fit.

use crate::types::{DType, Type};
use thiserror::Error;

/// Reason that a node, weight or entry is ill-typed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{at}: {message}")]
pub struct TypeError {
    /// Mnemonic of the operator, or what else is at fault.
    pub at: String,
    /// The fault, with the types found and expected.
    pub message: String,
}

impl TypeError {
    /// An error at a place.
    pub fn new(at: impl Into<String>, message: impl Into<String>) -> Self {
        Self { at: at.into(), message: message.into() }
    }

    /// The same error with an outer place prepended: `prefill[8] node 3 (add): …`.
    pub(crate) fn within(self, outer: &str) -> Self {
        Self { at: format!("{outer} ({})", self.at), message: self.message }
    }
}

/// Operands of one node, read with checks.
pub(crate) struct Operands<'a> {
    pub(crate) op: &'static str,
    pub(crate) types: &'a [&'a Type],
}

impl Operands<'_> {
    pub(crate) fn error(&self, message: impl Into<String>) -> TypeError {
        TypeError::new(self.op, message)
    }

    pub(crate) fn require(&self, holds: bool, message: impl FnOnce() -> String) -> Result<(), TypeError> {
        if holds { Ok(()) } else { Err(self.error(message())) }
    }

    pub(crate) fn get(&self, i: usize) -> Result<&Type, TypeError> {
        self.types.get(i).copied().ok_or_else(|| self.error(format!("operand {i} is missing")))
    }

    /// The shape of operand `i`, which must have this element type and `N` axes.
    pub(crate) fn shape<const N: usize>(
        &self,
        i: usize,
        what: &str,
        dtype: DType,
    ) -> Result<[usize; N], TypeError> {
        let ty = self.get(i)?;
        match <[usize; N]>::try_from(ty.shape.as_slice()) {
            Ok(shape) if ty.dtype == dtype => Ok(shape),
            _ => Err(self.error(format!("{what} is {ty}, expected {N} axes of {dtype}"))),
        }
    }

    pub(crate) fn matrix(&self, i: usize, what: &str) -> Result<[usize; 2], TypeError> {
        self.shape(i, what, DType::F32)
    }

    /// Rows of channels.
    pub(crate) fn rows(&self, i: usize, what: &str) -> Result<RowShape, TypeError> {
        let [count, channels] = self.matrix(i, what)?;
        Ok(RowShape { count, channels })
    }

    /// Operand `i` must have exactly this type.
    pub(crate) fn exact(&self, i: usize, what: &str, expected: &Type) -> Result<(), TypeError> {
        let ty = self.get(i)?;
        self.require(ty == expected, || format!("{what} is {ty}, expected {expected}"))
    }

    pub(crate) fn mul(&self, a: usize, b: usize) -> Result<usize, TypeError> {
        a.checked_mul(b).ok_or_else(|| self.error(format!("{a} · {b} overflows")))
    }

    /// `total / parts`, which must be whole.
    pub(crate) fn part(&self, total: usize, parts: usize, what: &str) -> Result<usize, TypeError> {
        self.require(parts > 0 && total > 0 && total.is_multiple_of(parts), || {
            format!("{total} channels do not divide into {parts} {what}")
        })?;
        Ok(total / parts)
    }
}

/// Rows of channels: `[rows, channels]`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowShape {
    pub(crate) count: usize,
    pub(crate) channels: usize,
}

impl RowShape {
    /// A tensor with the same rows and this many channels.
    pub(crate) fn of(self, channels: usize) -> Type {
        f32(&[self.count, channels])
    }

    pub(crate) fn ty(self) -> Type {
        self.of(self.channels)
    }
}

pub(crate) fn f32(shape: &[usize]) -> Type {
    Type::f32(shape)
}

pub(crate) fn i32(shape: &[usize]) -> Type {
    Type::i32(shape)
}
