//! Tensors of the evaluator.

use crate::types::{DType, Type};

/// The elements of a tensor, row-major.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// Floats.
    F32(Vec<f32>),
    /// Integers.
    I32(Vec<i32>),
}

/// A tensor with its type.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Element type and shape.
    pub ty: Type,
    /// Elements, as many as the type says.
    pub data: Data,
}

impl Tensor {
    /// An `f32` tensor; `data` holds as many elements as the shape says.
    pub fn f32(shape: impl Into<Vec<usize>>, data: Vec<f32>) -> Self {
        Self { ty: Type::f32(shape), data: Data::F32(data) }
    }

    /// An `i32` tensor; `data` holds as many elements as the shape says.
    pub fn i32(shape: impl Into<Vec<usize>>, data: Vec<i32>) -> Self {
        Self { ty: Type::i32(shape), data: Data::I32(data) }
    }

    /// Zeros of a type.
    pub fn zeros(ty: Type) -> Self {
        let data = match ty.dtype {
            DType::F32 => Data::F32(vec![0.0; ty.elements()]),
            DType::I32 => Data::I32(vec![0; ty.elements()]),
        };
        Self { ty, data }
    }

    /// The floats; empty for an integer tensor.
    pub fn as_f32(&self) -> &[f32] {
        match &self.data {
            Data::F32(x) => x,
            Data::I32(_) => &[],
        }
    }

    /// The integers; empty for a float tensor.
    pub fn as_i32(&self) -> &[i32] {
        match &self.data {
            Data::I32(x) => x,
            Data::F32(_) => &[],
        }
    }

    /// Whether the data are of the element type and number that the type says.
    pub(super) fn is_whole(&self) -> bool {
        let (dtype, len) = match &self.data {
            Data::F32(x) => (DType::F32, x.len()),
            Data::I32(x) => (DType::I32, x.len()),
        };
        let elements = self.ty.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        dtype == self.ty.dtype && elements == Some(len)
    }
}
