//! Element types and tensor types of Core ML programs.

use super::error::Flaw;
use super::proto;
use std::fmt;

/// Type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Dtype {
    Bool,
    String,
    F16,
    F32,
    I4,
    I8,
    I16,
    I32,
    I64,
    U1,
    U2,
    U3,
    U4,
    U6,
    U8,
    U16,
    U32,
    U64,
}

/// Element types: name, number in `MIL.proto`, number in blob metadata (0: never in a blob), bits.
const TABLE: [(Dtype, &str, i32, u32, u32); 18] = [
    (Dtype::Bool, "bool", 1, 0, 8),
    (Dtype::String, "string", 2, 0, 0),
    (Dtype::F16, "fp16", 10, 1, 16),
    (Dtype::F32, "fp32", 11, 2, 32),
    (Dtype::I4, "int4", 25, 8, 4),
    (Dtype::I8, "int8", 21, 4, 8),
    (Dtype::I16, "int16", 22, 6, 16),
    (Dtype::I32, "int32", 23, 14, 32),
    (Dtype::I64, "int64", 24, 0, 64),
    (Dtype::U1, "uint1", 37, 9, 1),
    (Dtype::U2, "uint2", 36, 10, 2),
    (Dtype::U3, "uint3", 39, 12, 3),
    (Dtype::U4, "uint4", 35, 11, 4),
    (Dtype::U6, "uint6", 38, 13, 6),
    (Dtype::U8, "uint8", 31, 3, 8),
    (Dtype::U16, "uint16", 32, 7, 16),
    (Dtype::U32, "uint32", 33, 15, 32),
    (Dtype::U64, "uint64", 34, 0, 64),
];

impl Dtype {
    fn row(self) -> &'static (Self, &'static str, i32, u32, u32) {
        // Every type has a row (tested); the first one is a fallback so that nothing can panic.
        TABLE.iter().find(|row| row.0 == self).unwrap_or(&TABLE[0])
    }

    /// Type of that number in `MIL.proto`.
    pub fn from_mil(number: i32) -> Option<Self> {
        TABLE.iter().find(|row| row.2 == number).map(|row| row.0)
    }

    /// Type of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        TABLE.iter().find(|row| row.1 == name).map(|row| row.0)
    }

    /// Type of that number in `FeatureTypes.proto`.
    pub fn from_feature(number: i32) -> Option<Self> {
        match number {
            65_568 => Some(Self::F32),
            65_552 => Some(Self::F16),
            131_104 => Some(Self::I32),
            131_080 => Some(Self::I8),
            _ => None,
        }
    }

    /// Name, as Core ML writes it.
    pub fn name(self) -> &'static str {
        self.row().1
    }

    /// Number in `MIL.proto`.
    pub fn mil(self) -> i32 {
        self.row().2
    }

    /// Number in the metadata of a blob; `None` where such elements are never in one.
    pub fn blob(self) -> Option<u32> {
        Some(self.row().3).filter(|&n| n != 0)
    }

    /// Bits of an element; 0 for strings.
    pub fn bits(self) -> usize {
        self.row().4 as usize
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::F32)
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Type of a tensor: element type and fixed shape. A scalar has rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// Element type.
    pub dtype: Dtype,
    /// Sizes of the dimensions, outermost first; none is 0.
    pub shape: Vec<usize>,
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape)
    }
}

/// Most dimensions of a tensor. Core ML's own limit is 5.
pub const MAX_RANK: usize = 8;
/// Most elements of a tensor.
pub const MAX_ELEMENTS: usize = 1 << 31;

/// Number of elements of a shape, if it is within [`MAX_RANK`] and [`MAX_ELEMENTS`] and no dimension is 0.
pub fn elements(shape: &[usize]) -> Option<usize> {
    if shape.len() > MAX_RANK {
        return None;
    }
    let count = shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d))?;
    (1..=MAX_ELEMENTS).contains(&count).then_some(count)
}

impl TensorType {
    /// Number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the elements where they are packed without gaps, a last part of a byte counted whole.
    pub fn bytes(&self) -> usize {
        // Below 2³¹ elements of at most 64 bits: no overflow in 64 bits.
        (self.elements() * self.dtype.bits()).div_ceil(8)
    }

    /// Reads a tensor type.
    pub(crate) fn read(ty: &proto::TensorType) -> Result<Self, Flaw> {
        let dtype = Dtype::from_mil(ty.data_type)
            .ok_or_else(|| Flaw::Unsupported(format!("element type number {}", ty.data_type)))?;
        if usize::try_from(ty.rank) != Ok(ty.dimensions.len()) {
            return Err(Flaw::Invalid(format!("rank {} with {} dimensions", ty.rank, ty.dimensions.len())));
        }
        let shape = (ty.dimensions.iter())
            .map(|d| {
                let size = d.constant.ok_or(Flaw::Flexible)?.size;
                usize::try_from(size).map_err(|_| Flaw::Invalid(format!("a dimension of {size}")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if elements(&shape).is_none() {
            return Err(Flaw::Invalid(format!(
                "shape {shape:?}: a tensor has 1 to {MAX_ELEMENTS} elements in at most {MAX_RANK} dimensions"
            )));
        }
        Ok(Self { dtype, shape })
    }

    /// The same as a message.
    pub fn write(&self) -> proto::TensorType {
        let dimension =
            |&d: &usize| proto::Dimension { constant: Some(proto::ConstantDimension { size: d as u64 }) };
        proto::TensorType {
            data_type: self.dtype.mil(),
            rank: self.shape.len() as i64,
            dimensions: self.shape.iter().map(dimension).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_has_unique_codes() {
        for (i, a) in TABLE.iter().enumerate() {
            assert_eq!(a.0.name(), a.1);
            assert_eq!(Dtype::from_mil(a.2), Some(a.0));
            assert_eq!(Dtype::from_name(a.1), Some(a.0));
            assert!(TABLE[..i].iter().all(|b| b.2 != a.2 && (b.3 != a.3 || a.3 == 0) && b.0 != a.0));
        }
    }

    #[test]
    fn elements_are_counted_without_overflow() {
        assert_eq!(elements(&[]), Some(1));
        assert_eq!(elements(&[2, 3]), Some(6));
        assert_eq!(elements(&[2, 0]), None);
        assert_eq!(elements(&[usize::MAX, 2]), None);
        assert_eq!(elements(&[1; 9]), None);
        assert_eq!(elements(&[1 << 31]), Some(1 << 31));
        assert_eq!(elements(&[1 << 16, 1 << 16]), None);
    }

    #[test]
    fn partial_bytes_are_rounded_up() {
        let ty = |dtype, n| TensorType { dtype, shape: vec![n] };
        assert_eq!(ty(Dtype::U3, 3).bytes(), 2);
        assert_eq!(ty(Dtype::I4, 4).bytes(), 2);
        assert_eq!(ty(Dtype::F16, 5).bytes(), 10);
    }
}
