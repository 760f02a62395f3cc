//! Element types, storage formats and tensor types.

use bincode::{Decode, Encode};
use std::fmt;

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

/// How a weight is stored in the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Codes of 8 bits in groups of [`GROUP`], one bf16 scale each.
    Q8,
    /// Codes of 4 bits in groups of [`GROUP`], one bf16 scale each.
    Q4,
}

/// Numbers that share a scale in q8 and q4.
pub const GROUP: usize = 32;

impl Format {
    /// Every format, in the order that messages list them.
    pub const ALL: [Self; 5] = [Self::F32, Self::Bf16, Self::F16, Self::Q8, Self::Q4];

    /// Name in the text form and in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
        }
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Bytes that `elements` elements take.
    pub const fn bytes(self, elements: usize) -> usize {
        match self {
            Self::F32 => elements * 4,
            Self::Bf16 | Self::F16 => elements * 2,
            Self::Q8 => elements.div_ceil(GROUP) * (GROUP + 2),
            Self::Q4 => elements.div_ceil(GROUP) * (GROUP / 2 + 2),
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

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
