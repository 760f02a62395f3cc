//! An operation with its arguments at hand.

use super::error::Fault;
use super::gemm::GemmRows;
use super::tensor::{Data, Tensor, checked_elements};
use crate::package::{Constant, Dtype, Function, Op, Origin, TensorType, ValueId, Weights};
use std::borrow::Cow;
use std::sync::Arc;

/// An operation and the values that it may read.
pub(super) struct Call<'a> {
    pub(super) function: &'a Function,
    pub(super) op: &'a Op,
    pub(super) weights: &'a Weights,
    /// Values that have been computed, by number.
    pub(super) values: &'a [Option<Arc<Tensor>>],
    /// Threads that may be used.
    pub(super) threads: usize,
}

/// A floating-point argument, widened.
pub(super) struct Floats {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) values: Vec<f32>,
}

impl<'a> Call<'a> {
    /// The argument, where there is one.
    pub(super) fn optional(&self, parameter: &'static str) -> Result<Option<ValueId>, Fault> {
        match self.op.args.get(parameter).map_or(&[][..], Vec::as_slice) {
            [] => Ok(None),
            &[id] => Ok(Some(id)),
            many => Err(Fault::argument(parameter, format!("{} values in place of one", many.len()))),
        }
    }

    fn required(&self, parameter: &'static str) -> Result<ValueId, Fault> {
        self.optional(parameter)?.ok_or(Fault::Missing(parameter))
    }

    /// Type of a value of this function.
    fn ty_of(&self, parameter: &'static str, id: ValueId) -> Result<&'a TensorType, Fault> {
        self.function.value(id).map(|v| &v.ty).ok_or(Fault::Missing(parameter))
    }

    /// Type of an argument.
    pub(super) fn ty(&self, parameter: &'static str) -> Result<&'a TensorType, Fault> {
        self.ty_of(parameter, self.required(parameter)?)
    }

    /// An argument that is a tensor; a constant is decoded.
    pub(super) fn tensor(&self, parameter: &'static str) -> Result<Arc<Tensor>, Fault> {
        self.tensor_of(parameter, self.required(parameter)?)
    }

    /// All arguments of a parameter that takes several.
    pub(super) fn tensors(&self, parameter: &'static str) -> Result<Vec<Arc<Tensor>>, Fault> {
        let ids = self.op.args.get(parameter).ok_or(Fault::Missing(parameter))?;
        ids.iter().map(|&id| self.tensor_of(parameter, id)).collect()
    }

    fn tensor_of(&self, parameter: &'static str, id: ValueId) -> Result<Arc<Tensor>, Fault> {
        if let Some(constant) = self.function.constant(id) {
            return self.decode(parameter, constant).map(Arc::new);
        }
        let value = self.values.get(id.0).and_then(Option::as_ref);
        value.cloned().ok_or_else(|| Fault::argument(parameter, "a state; `read_state` gives its value"))
    }

    /// A constant as a tensor.
    fn decode(&self, parameter: &'static str, constant: &Constant) -> Result<Tensor, Fault> {
        let ty = &constant.ty;
        let data = match ty.dtype {
            Dtype::F16 | Dtype::F32 => {
                let values = self.numbers_of(parameter, constant)?;
                return Tensor::rounded(ty.dtype, ty.shape.clone(), values)
                    .map_err(|fault| Fault::argument(parameter, fault.to_string()));
            }
            Dtype::I32 => Data::I32(self.integers_of(constant).iter().map(|&x| x as i32).collect()),
            Dtype::Bool => Data::Bool(self.integers_of(constant).iter().map(|&x| x != 0).collect()),
            dtype => {
                return Err(Fault::argument(
                    parameter,
                    format!("a tensor of {dtype} cannot be computed with"),
                ));
            }
        };
        Tensor::new(&ty.shape, data).ok_or_else(|| Fault::argument(parameter, "damaged constant"))
    }

    fn integers_of(&self, constant: &Constant) -> Vec<i64> {
        constant.integers(self.weights).unwrap_or_default()
    }

    fn numbers_of(&self, parameter: &'static str, constant: &Constant) -> Result<Vec<f32>, Fault> {
        let count = checked_elements(&constant.ty.shape);
        let count =
            count.ok_or_else(|| Fault::argument(parameter, format!("{} is too large", constant.ty)))?;
        let mut values = vec![0.0; count];
        if !constant.floats(self.weights, 0, &mut values) {
            return Err(Fault::argument(parameter, "a string in place of numbers"));
        }
        Ok(values)
    }

    /// A floating-point argument.
    pub(super) fn floats(&self, parameter: &'static str) -> Result<Floats, Fault> {
        let ty = self.ty(parameter)?;
        if !ty.dtype.is_float() {
            let message = format!("{} in place of fp16 or fp32", ty.dtype);
            return Err(Fault::argument(parameter, message));
        }
        self.numbers(parameter)
    }

    /// An argument of any numeric type.
    pub(super) fn numbers(&self, parameter: &'static str) -> Result<Floats, Fault> {
        let id = self.required(parameter)?;
        let TensorType { dtype, shape } = self.ty_of(parameter, id)?.clone();
        let values = match self.function.constant(id) {
            Some(constant) => self.numbers_of(parameter, constant)?,
            None => self.tensor_of(parameter, id)?.to_f32(),
        };
        Ok(Floats { dtype, shape, values })
    }

    /// Runs `body` with an argument that is read row by row: a constant stays where it is stored.
    pub(super) fn with_rows<T>(
        &self,
        parameter: &'static str,
        body: impl FnOnce(GemmRows<'_>) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let id = self.required(parameter)?;
        if let Some(constant) = self.function.constant(id) {
            return body(GemmRows::Stored(constant, self.weights));
        }
        let tensor = self.tensor_of(parameter, id)?;
        match tensor.data() {
            Data::F16(v) => body(GemmRows::Half(v)),
            Data::F32(v) => body(GemmRows::Single(v)),
            _ => Err(Fault::argument(parameter, "integers in place of fp16 or fp32")),
        }
    }

    /// An argument of integers or booleans, where there is one.
    pub(super) fn integers(&self, parameter: &'static str) -> Result<Option<Vec<i64>>, Fault> {
        let Some(id) = self.optional(parameter)? else { return Ok(None) };
        let wrong = || Fault::argument(parameter, "expected integers");
        if let Some(constant) = self.function.constant(id) {
            return constant.integers(self.weights).map(Some).ok_or_else(wrong);
        }
        match self.tensor_of(parameter, id)?.data() {
            Data::I32(v) => Ok(Some(v.iter().map(|&x| x.into()).collect())),
            _ => Err(wrong()),
        }
    }

    /// One integer, where there is one.
    pub(super) fn integer(&self, parameter: &'static str) -> Result<Option<i64>, Fault> {
        match self.integers(parameter)?.as_deref() {
            None => Ok(None),
            Some(&[x]) => Ok(Some(x)),
            Some(_) => Err(Fault::argument(parameter, "expected a single integer")),
        }
    }

    /// One boolean, or the default if there is no argument.
    pub(super) fn flag(&self, parameter: &'static str) -> Result<bool, Fault> {
        Ok(self.integer(parameter)?.is_some_and(|x| x != 0))
    }

    /// One floating-point number, where there is one.
    pub(super) fn scalar(&self, parameter: &'static str) -> Result<Option<f32>, Fault> {
        if self.optional(parameter)?.is_none() {
            return Ok(None);
        }
        match self.floats(parameter)?.values.as_slice() {
            &[x] => Ok(Some(x)),
            _ => Err(Fault::argument(parameter, "expected a single number")),
        }
    }

    /// A string, where there is one.
    pub(super) fn text(&self, parameter: &'static str) -> Result<Option<Cow<'a, str>>, Fault> {
        let Some(id) = self.optional(parameter)? else { return Ok(None) };
        let text = self.function.constant(id).and_then(Constant::text);
        text.map(|t| Some(Cow::Borrowed(t))).ok_or_else(|| Fault::argument(parameter, "expected a string"))
    }

    /// Name and type of the state that an argument is.
    pub(super) fn state(&self, parameter: &'static str) -> Result<(&'a str, &'a TensorType), Fault> {
        match self.function.value(self.required(parameter)?) {
            Some(value) if value.origin == Origin::State => Ok((&value.name, &value.ty)),
            _ => Err(Fault::argument(parameter, "expected a state")),
        }
    }

    /// One axis of `rank`; negative ones count from the end.
    pub(super) fn axis(
        &self,
        parameter: &'static str,
        rank: usize,
        default: Option<i64>,
    ) -> Result<usize, Fault> {
        let axis = self.integer(parameter)?.or(default).ok_or(Fault::Missing(parameter))?;
        normal(parameter, axis, rank)
    }

    /// Different axes of `rank`, sorted; all of them without an argument.
    pub(super) fn axes(&self, parameter: &'static str, rank: usize) -> Result<Vec<usize>, Fault> {
        let Some(axes) = self.integers(parameter)? else { return Ok((0..rank).collect()) };
        let mut axes: Vec<usize> =
            axes.iter().map(|&a| normal(parameter, a, rank)).collect::<Result<_, _>>()?;
        axes.sort_unstable();
        if axes.windows(2).any(|w| w[0] == w[1]) {
            return Err(Fault::argument(parameter, "an axis is named twice"));
        }
        Ok(axes)
    }
}

/// An axis of `rank`; negative ones count from the end.
pub(super) fn normal(parameter: &'static str, axis: i64, rank: usize) -> Result<usize, Fault> {
    let from_end = if axis < 0 { axis.checked_add(rank as i64) } else { Some(axis) };
    from_end
        .and_then(|a| usize::try_from(a).ok())
        .filter(|&a| a < rank)
        .ok_or_else(|| Fault::argument(parameter, format!("axis {axis} of a tensor of rank {rank}")))
}
