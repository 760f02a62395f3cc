//! Tensors that go in and out, and between operations.

use super::error::Fault;
use crate::package::{Dtype, TensorType, elements};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Elements of a tensor, in row-major order.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    /// fp16.
    F16(Vec<f16>),
    /// fp32.
    F32(Vec<f32>),
    /// int32.
    I32(Vec<i32>),
    /// bool.
    Bool(Vec<bool>),
}

/// Evaluates to the same kind of [`Data`], with `$map` applied to the elements `$v`.
macro_rules! same_kind {
    ($data:expr, $v:ident => $map:expr) => {
        match $data {
            Data::F16($v) => Data::F16($map),
            Data::F32($v) => Data::F32($map),
            Data::I32($v) => Data::I32($map),
            Data::Bool($v) => Data::Bool($map),
        }
    };
}
pub(super) use same_kind;

impl Data {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            Self::F16(v) => v.len(),
            Self::F32(v) => v.len(),
            Self::I32(v) => v.len(),
            Self::Bool(v) => v.len(),
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Element type.
    pub fn dtype(&self) -> Dtype {
        match self {
            Self::F16(_) => Dtype::F16,
            Self::F32(_) => Dtype::F32,
            Self::I32(_) => Dtype::I32,
            Self::Bool(_) => Dtype::Bool,
        }
    }
}

/// Number of elements of a shape, if that many may be computed.
pub(super) fn checked_elements(shape: &[usize]) -> Option<usize> {
    elements(shape).filter(|&n| n <= super::MAX_COMPUTED)
}

/// A tensor: as many elements as its shape has places.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    shape: Vec<usize>,
    data: Data,
}

impl Tensor {
    /// A tensor of these elements; `None` if their number is not that of the shape.
    pub fn new(shape: &[usize], data: Data) -> Option<Self> {
        (elements(shape) == Some(data.len())).then(|| Self { shape: shape.to_vec(), data })
    }

    /// An fp16 tensor of numbers, rounded; `None` if their number is not that of the shape.
    ///
    /// ```
    /// use moec_coreml::exec::Tensor;
    /// let x = Tensor::f16(&[1, 2], &[0.5, 0.1]).unwrap();
    /// assert_eq!(x.to_f32(), [0.5, 0.099975586]);
    /// ```
    pub fn f16(shape: &[usize], values: &[f32]) -> Option<Self> {
        Self::new(shape, Data::F16(halves(values)))
    }

    /// Zeros. `None` for element types that have no tensors here, and for impossible shapes.
    pub fn zeros(ty: &TensorType) -> Option<Self> {
        let n = elements(&ty.shape)?;
        let data = match ty.dtype {
            Dtype::F16 => Data::F16(vec![f16::ZERO; n]),
            Dtype::F32 => Data::F32(vec![0.0; n]),
            Dtype::I32 => Data::I32(vec![0; n]),
            Dtype::Bool => Data::Bool(vec![false; n]),
            _ => return None,
        };
        Some(Self { shape: ty.shape.clone(), data })
    }

    /// Shape, outermost dimension first.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Elements.
    pub fn data(&self) -> &Data {
        &self.data
    }

    /// Type.
    pub fn ty(&self) -> TensorType {
        TensorType { dtype: self.data.dtype(), shape: self.shape.clone() }
    }

    /// The elements as f32; booleans are 0 and 1, integers beyond 2²⁴ are rounded.
    pub fn to_f32(&self) -> Vec<f32> {
        match &self.data {
            Data::F16(v) => {
                let mut out = vec![0.0; v.len()];
                v.convert_to_f32_slice(&mut out);
                out
            }
            Data::F32(v) => v.clone(),
            Data::I32(v) => v.iter().map(|&x| x as f32).collect(),
            Data::Bool(v) => v.iter().map(|&x| f32::from(u8::from(x))).collect(),
        }
    }

    /// The same elements in another shape of as many places.
    pub(super) fn reshaped(&self, shape: Vec<usize>) -> Option<Self> {
        (elements(&shape) == Some(self.data.len())).then(|| Self { shape, data: self.data.clone() })
    }

    /// The elements that a view shows.
    pub(super) fn view(&self, view: &View) -> Self {
        Self { shape: view.shape.clone(), data: same_kind!(&self.data, v => view.take(v)) }
    }

    /// Results of a floating-point operation, rounded to `dtype`.
    pub(super) fn rounded(dtype: Dtype, shape: Vec<usize>, values: Vec<f32>) -> Result<Self, Fault> {
        let overflow = |index: usize| Fault::Overflow { index, value: values[index], dtype };
        if dtype == Dtype::F32 {
            return match values.iter().position(|x| !x.is_finite()) {
                Some(index) => Err(overflow(index)),
                None => Ok(Self { shape, data: Data::F32(values) }),
            };
        }
        let rounded = halves(&values);
        match rounded.iter().position(|x| !x.is_finite()) {
            Some(index) => Err(overflow(index)),
            None => Ok(Self { shape, data: Data::F16(rounded) }),
        }
    }
}

/// Rounds to the nearest fp16 number, ties to even.
fn halves(values: &[f32]) -> Vec<f16> {
    let mut out = vec![f16::ZERO; values.len()];
    out.convert_from_f32_slice(values);
    out
}

/// Strides of a tensor without gaps.
pub(super) fn strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    strides
}

/// Places of a tensor in another order: element `[i, j, …]` is at `offset + i·strides[0] + j·strides[1] + …`.
#[derive(Clone, Debug)]
pub(super) struct View {
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

impl View {
    /// A tensor of that shape, whole.
    pub(super) fn whole(shape: &[usize]) -> Self {
        Self { offset: 0, shape: shape.to_vec(), strides: strides(shape) }
    }

    /// The dimensions in another order.
    pub(super) fn permuted(&self, perm: &[usize]) -> Self {
        Self {
            offset: self.offset,
            shape: perm.iter().map(|&p| self.shape[p]).collect(),
            strides: perm.iter().map(|&p| self.strides[p]).collect(),
        }
    }

    /// Part of one dimension: `len` places from `start`, every `step`-th.
    pub(super) fn part(mut self, axis: usize, start: usize, len: usize, step: usize) -> Self {
        self.offset += start * self.strides[axis];
        self.shape[axis] = len;
        self.strides[axis] *= step;
        self
    }

    /// Repeated along dimensions of size 1, and along new outer ones, to fill a shape. `None` if it does not
    /// fit.
    pub(super) fn broadcast(&self, shape: &[usize]) -> Option<Self> {
        let missing = shape.len().checked_sub(self.shape.len())?;
        let mut strides = vec![0; shape.len()];
        for (i, (&own, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            match own {
                d if d == shape[missing + i] => strides[missing + i] = stride,
                1 => {}
                _ => return None,
            }
        }
        Some(Self { offset: self.offset, shape: shape.to_vec(), strides })
    }

    /// Calls `row` with the place of the first element of every row (of the innermost dimension), in order.
    pub(super) fn rows(&self, mut row: impl FnMut(usize)) {
        let outer = self.shape.len().saturating_sub(1);
        let mut index = vec![0; outer];
        let mut at = self.offset;
        loop {
            row(at);
            let mut axis = outer;
            loop {
                let Some(next) = axis.checked_sub(1) else { return };
                axis = next;
                index[axis] += 1;
                at += self.strides[axis];
                if index[axis] < self.shape[axis] {
                    break;
                }
                at -= self.strides[axis] * self.shape[axis];
                index[axis] = 0;
            }
        }
    }

    /// Length and stride of a row.
    pub(super) fn row(&self) -> (usize, usize) {
        (self.shape.last().copied().unwrap_or(1), self.strides.last().copied().unwrap_or(1))
    }

    /// The elements shown, of a tensor that the view was made for.
    pub(super) fn take<T: Copy>(&self, from: &[T]) -> Vec<T> {
        let (len, stride) = self.row();
        let mut out = Vec::with_capacity(self.shape.iter().product());
        self.rows(|at| match stride {
            1 => out.extend_from_slice(&from[at..at + len]),
            _ => out.extend((0..len).map(|i| from[at + i * stride])),
        });
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_views_select_the_right_elements() {
        let x: Vec<usize> = (0..24).collect();
        let whole = View::whole(&[2, 3, 4]);
        assert_eq!(whole.take(&x), x);
        assert_eq!(whole.permuted(&[2, 0, 1]).take(&x)[..7], [0, 4, 8, 12, 16, 20, 1]);
        assert_eq!(whole.clone().part(2, 1, 2, 2).part(1, 2, 1, 1).take(&x), [9, 11, 21, 23]);
        let row = View::whole(&[2]).broadcast(&[3, 2]).map(|v| v.take(&[5, 6]));
        assert_eq!(row, Some(vec![5, 6, 5, 6, 5, 6]));
        assert!(View::whole(&[2]).broadcast(&[2, 3]).is_none());
        assert_eq!(View::whole(&[]).take(&[7]), [7]);
    }

    #[test]
    fn rounding_names_the_first_element_out_of_range() {
        let rounded = |x: &[f32]| Tensor::rounded(Dtype::F16, vec![x.len()], x.to_vec());
        assert!(rounded(&[65519.0, -65519.0]).is_ok());
        let fault = Fault::Overflow { index: 1, value: 65520.0, dtype: Dtype::F16 };
        assert_eq!(rounded(&[1.0, 65520.0]), Err(fault));
        assert!(matches!(rounded(&[f32::NAN]), Err(Fault::Overflow { index: 0, .. })));
        assert!(Tensor::rounded(Dtype::F32, vec![1], vec![65520.0]).is_ok());
    }
}
