//! Element types and tensor types.

use bincode::{Decode, Encode};
use std::fmt;

pub use crate::format::{
    Codes, Coding, E2M1, E5M3, E5M3_UNIT, FINE_BYTES, FINE_GROUP, FINE_STORED, Fine, Format, FormatSpec,
    GROUP, Granularity, IQ4_GRID, LARGEST, OUTLIERS, Plane, Q2_PATTERNS, Q2S_PATTERNS, Q3_GRID, Q4N_GRID,
};

/// Element type of a value at run time. Activations are `F32`; ids and positions are `I32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// 32-bit signed integer.
    I32,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        4
    }

    /// Name in the text form.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::I32 => "i32",
        }
    }
}

/// Type of a value: element type and static shape, outermost axis first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Type {
    /// Element type.
    pub dtype: DType,
    /// Extents, outermost first.
    pub shape: Vec<usize>,
}

impl Type {
    /// An `f32` tensor.
    pub fn f32(shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype: DType::F32, shape: shape.into() }
    }

    /// An `i32` tensor.
    pub fn i32(shape: impl Into<Vec<usize>>) -> Self {
        Self { dtype: DType::I32, shape: shape.into() }
    }

    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.elements() * self.dtype.bytes()
    }

    /// Extent of the first axis (token rows of an activation); 1 for a scalar.
    pub fn rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(1)
    }

    /// Extent of the last axis; 1 for a scalar.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype.name(), self.shape)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
