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

/// Numbers of a row that share a scale in formats of groups ([`Format::is_grouped`]).
pub const GROUP: usize = 32;

/// Output channels of which [`Format::Q4o`] stores one in INT8.
pub const OUTLIERS: usize = 16;

/// How a weight is stored in the bundle.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub enum Format {
    /// IEEE binary32.
    F32,
    /// The upper half of binary32.
    Bf16,
    /// IEEE binary16.
    F16,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −127..=127 times one bf16 scale.
    Q8,
    /// Groups of [`GROUP`] numbers of a row: whole codes in −8..=7 times one bf16 scale of either sign.
    Q4,
    /// Output channels (rows of a matrix) that share one f32 scale each: whole codes in −127..=127 of one row in
    /// [`OUTLIERS`], those that lose most by fewer bits, and codes in −8..=7 of all others.
    Q4o,
    /// Output channels that share one f32 scale each, all of them with codes in −8..=7: what [`Format::Q4o`] is without
    /// its outliers.
    Q4c,
    /// As [`Format::Q8`] with a scale of f16 and codes from −128 on: GGUF's Q8_0.
    Q8h,
    /// As [`Format::Q4`] with a scale of f16: GGUF's Q4_0.
    Q4h,
    /// Groups of [`GROUP`] numbers of a row: numbers of [`E2M1`] times a power of two (OCP Microscaling Formats 1.0, MXFP4). The scale
    /// is half of that power, as bf16.
    Mxfp4,
}

/// How the codes of a format lie, and what they stand for in multiples of the scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// A byte each: the code.
    Bytes,
    /// Half a byte each: the code, and 8.
    Nibbles,
    /// Half a byte each: the place of the code in [`E2M1`].
    E2m1,
}

/// The numbers of E2M1 by their bits (sign, two of exponent, one of mantissa), each twice itself: whole ones, whose scale is half of
/// the numbers'.
pub const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Format {
    /// Every format, in the order that messages list them.
    pub const ALL: [Self; 10] = [
        Self::F32,
        Self::Bf16,
        Self::F16,
        Self::Q8,
        Self::Q4,
        Self::Q8h,
        Self::Q4h,
        Self::Mxfp4,
        Self::Q4o,
        Self::Q4c,
    ];

    /// Name in the text form and in `model.toml`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Q8 => "q8",
            Self::Q4 => "q4",
            Self::Q4o => "q4o",
            Self::Q4c => "q4c",
            Self::Q8h => "q8h",
            Self::Q4h => "q4h",
            Self::Mxfp4 => "mxfp4",
        }
    }

    /// The format of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Whether numbers are stored in groups of [`GROUP`] with a common scale.
    pub const fn is_grouped(self) -> bool {
        self.group_bytes().is_some()
    }

    /// Whether the numbers of a row share one scale.
    pub const fn is_by_channel(self) -> bool {
        matches!(self, Self::Q4o | Self::Q4c)
    }

    /// Whether numbers are codes that have a scale in common, of a group or of a row.
    pub const fn is_quantised(self) -> bool {
        self.is_grouped() || self.is_by_channel()
    }

    /// How its codes lie; `None` where numbers stand alone.
    pub const fn coding(self) -> Option<Coding> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => None,
            Self::Q8 | Self::Q8h => Some(Coding::Bytes),
            Self::Q4 | Self::Q4h | Self::Q4o | Self::Q4c => Some(Coding::Nibbles),
            Self::Mxfp4 => Some(Coding::E2m1),
        }
    }

    /// The format of the scales of its codes; where it has none, it is itself.
    pub const fn scales(self) -> Self {
        match self {
            Self::F32 | Self::Q4o | Self::Q4c => Self::F32,
            Self::Bf16 | Self::Q8 | Self::Q4 | Self::Mxfp4 => Self::Bf16,
            Self::F16 | Self::Q8h | Self::Q4h => Self::F16,
        }
    }

    /// Whether it is there for the codes and scales of a published form, which it holds as they are.
    pub const fn is_published(self) -> bool {
        matches!(self, Self::Q8h | Self::Q4h | Self::Mxfp4)
    }

    /// Whether neurons can lie in it, each by itself.
    pub const fn holds_neurons(self) -> bool {
        !self.is_by_channel() && !self.is_published()
    }

    /// Bytes of a number as a checkpoint has it, [`crate::Source::stored`]: of groups its code and the scale of its group. 0 where no
    /// checkpoint has any.
    pub const fn stored_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
            Self::Q8h | Self::Q4h | Self::Mxfp4 => 3,
            Self::Q8 | Self::Q4 | Self::Q4o | Self::Q4c => 0,
        }
    }

    /// How many of a matrix's `rows` are stored as INT8 beside the others.
    pub const fn outliers(self, rows: usize) -> usize {
        match self {
            Self::Q4o => rows / OUTLIERS,
            _ => 0,
        }
    }

    /// Bytes of one group and its scale; `None` for the formats that have no groups.
    pub const fn group_bytes(self) -> Option<usize> {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 | Self::Q4o | Self::Q4c => None,
            Self::Q8 | Self::Q8h => Some(GROUP + 2),
            Self::Q4 | Self::Q4h | Self::Mxfp4 => Some(GROUP / 2 + 2),
        }
    }

    /// Bytes of a row of `cols` numbers in row-major order; the last group is stored whole, and so are rows of one scale,
    /// whose outliers lie elsewhere.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::F32 => cols * 4,
            Self::Bf16 | Self::F16 => cols * 2,
            Self::Q8 | Self::Q8h => cols.div_ceil(GROUP) * (GROUP + 2),
            Self::Q4 | Self::Q4h | Self::Mxfp4 => cols.div_ceil(GROUP) * (GROUP / 2 + 2),
            Self::Q4o | Self::Q4c => cols.div_ceil(GROUP) * (GROUP / 2) + 4,
        }
    }

    /// Bytes that one output channel of `depth` numbers takes of a panel. As [`Self::row_bytes`], but bf16
    /// lies in whole pairs.
    pub const fn column_bytes(self, depth: usize) -> usize {
        match self {
            Self::Bf16 => depth.div_ceil(2) * 4,
            _ => self.row_bytes(depth),
        }
    }

    /// Bytes that `elements` elements take in row-major order.
    pub const fn bytes(self, elements: usize) -> usize {
        self.row_bytes(elements)
    }

    /// Bits per number of long rows, scales of groups and outliers included.
    pub const fn bits(self) -> f64 {
        match self {
            Self::Q4o => 4.0 + 8.0 / OUTLIERS as f64,
            Self::Q4c => 4.0,
            _ => self.row_bytes(GROUP) as f64 * 8.0 / GROUP as f64,
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
