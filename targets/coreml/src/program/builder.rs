//! Appends operators to a function, inferring shapes.
#![expect(clippy::cast_possible_truncation, reason = "values of one function")]

use super::infer::{self, Shapes};
use super::op::{Arg, Mode, Op, OpKind};
use super::{Function, ProgramError, Value, ValueId, WeightRef};
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, ProgramError>;

/// A function that grows. Every method that appends fails where shapes do not fit.
pub struct FunctionBuilder<'a> {
    function: Function,
    weights: &'a mut Vec<WeightRef>,
    /// Constants that the function has: a weight is named once, however often it is read.
    constants: BTreeMap<usize, ValueId>,
}

impl<'a> FunctionBuilder<'a> {
    /// An empty function of a program with these weights, to which it adds its own.
    pub fn new(name: impl Into<String>, weights: &'a mut Vec<WeightRef>) -> Self {
        let function = Function {
            name: name.into(),
            values: Vec::new(),
            inputs: Vec::new(),
            states: Vec::new(),
            ops: Vec::new(),
            outputs: Vec::new(),
        };
        Self { function, weights, constants: BTreeMap::new() }
    }

    /// Shape of a value.
    pub fn shape(&self, id: ValueId) -> &[usize] {
        self.function.values.get(id.index()).map_or(&[], |v| &v.shape)
    }

    /// An input.
    pub fn input(&mut self, name: &str, shape: &[usize]) -> ValueId {
        let id = self.value(Some(name), shape.to_vec());
        self.function.inputs.push(id);
        id
    }

    /// A state.
    pub fn state(&mut self, name: &str, shape: &[usize]) -> ValueId {
        let id = self.value(Some(name), shape.to_vec());
        self.function.states.push(id);
        id
    }

    /// The function, with these values as results under these names.
    pub fn finish(mut self, outputs: &[(&str, ValueId)]) -> Function {
        for (name, id) in outputs {
            if let Some(value) = self.function.values.get_mut(id.index()) {
                (*name).clone_into(&mut value.name);
            }
            self.function.outputs.push(*id);
        }
        self.function
    }

    fn value(&mut self, name: Option<&str>, shape: Vec<usize>) -> ValueId {
        let id = ValueId(self.function.values.len() as u32);
        let name = name.map_or_else(|| format!("t{}", id.0), str::to_owned);
        self.function.values.push(Value { name, shape, about: None });
        id
    }

    /// Appends an operator; gives its results.
    pub fn op(&mut self, op: OpKind, args: &[(&str, Arg)]) -> Result<Vec<ValueId>> {
        let args = args.iter().map(|(name, arg)| ((*name).to_owned(), arg.clone())).collect();
        let mut op = Op { op, args, results: Vec::new() };
        let values = &self.function.values;
        let value = |id: ValueId| values.get(id.index()).map(|v| &*v.shape);
        let shapes = infer::results(&op, &Shapes { value, weights: self.weights });
        let shapes = shapes.map_err(|what| {
            ProgramError::op(&self.function.name, self.function.ops.len(), op.op.name(), what)
        })?;
        op.results = shapes.into_iter().map(|shape| self.value(None, shape)).collect();
        let results = op.results.clone();
        self.function.ops.push(op);
        Ok(results)
    }

    /// Appends an operator that has one result.
    pub fn one(&mut self, op: OpKind, args: &[(&str, Arg)]) -> Result<ValueId> {
        let results = self.op(op, args)?;
        results.first().copied().ok_or_else(|| {
            ProgramError::op(&self.function.name, self.function.ops.len() - 1, op.name(), "it has no result")
        })
    }

    /// A weight, as a constant. The same numbers in the same shape are one weight, whatever they are called.
    pub fn weight(&mut self, weight: &WeightRef) -> Result<ValueId> {
        let same = |w: &WeightRef| {
            (&w.file, w.offset, &w.shape, w.blocks)
                == (&weight.file, weight.offset, &weight.shape, weight.blocks)
        };
        let index = self.weights.iter().position(same).unwrap_or_else(|| {
            self.weights.push(weight.clone());
            self.weights.len() - 1
        });
        if let Some(&id) = self.constants.get(&index) {
            return Ok(id);
        }
        let id = self.one(OpKind::Const, &[("weight", Arg::Int(index))])?;
        self.constants.insert(index, id);
        Ok(id)
    }

    /// A constant with one number everywhere; a scalar for an empty shape.
    pub fn splat(&mut self, number: f32, shape: &[usize]) -> Result<ValueId> {
        self.one(OpKind::Const, &[("splat", Arg::Float(number)), ("shape", Arg::Ints(shape.to_vec()))])
    }

    /// `x[N, C, H, W]` by `weight[O, C, 1, 1]`, plus `bias[O]`: `[N, O, H, W]`.
    pub fn conv(&mut self, x: ValueId, weight: &WeightRef, bias: Option<&WeightRef>) -> Result<ValueId> {
        self.grouped_conv(x, weight, bias, 1)
    }

    /// Like [`Self::conv`], with channels in independent groups: `weight[O, C / groups, 1, 1]`.
    pub fn grouped_conv(
        &mut self,
        x: ValueId,
        weight: &WeightRef,
        bias: Option<&WeightRef>,
        groups: usize,
    ) -> Result<ValueId> {
        let mut args = vec![("x", Arg::Value(x)), ("weight", Arg::Value(self.weight(weight)?))];
        args.extend((groups != 1).then_some(("groups", Arg::Int(groups))));
        if let Some(bias) = bias {
            args.push(("bias", Arg::Value(self.weight(bias)?)));
        }
        self.one(OpKind::Conv, &args)
    }

    /// An operator on `x` alone: `silu`, `sigmoid`, `relu`, `abs`.
    pub fn unary(&mut self, op: OpKind, x: ValueId) -> Result<ValueId> {
        self.one(op, &[("x", Arg::Value(x))])
    }

    /// An operator on `x` and `y` with broadcasting: `add`, `sub`, `mul`, `real_div`, `maximum`, `minimum`.
    pub fn binary(&mut self, op: OpKind, x: ValueId, y: ValueId) -> Result<ValueId> {
        self.one(op, &[("x", Arg::Value(x)), ("y", Arg::Value(y))])
    }

    /// The same with a number on the right.
    pub fn scalar(&mut self, op: OpKind, x: ValueId, number: f32) -> Result<ValueId> {
        let y = self.splat(number, &[])?;
        self.binary(op, x, y)
    }

    /// `gelu` in a mode.
    pub fn gelu(&mut self, x: ValueId, mode: Mode) -> Result<ValueId> {
        self.one(OpKind::Gelu, &[("x", Arg::Value(x)), ("mode", Arg::Mode(mode))])
    }

    /// `min(max(x, low), high)`.
    pub fn clip(&mut self, x: ValueId, low: f32, high: f32) -> Result<ValueId> {
        self.one(
            OpKind::Clip,
            &[("x", Arg::Value(x)), ("alpha", Arg::Float(low)), ("beta", Arg::Float(high))],
        )
    }

    /// `1 / √(x + epsilon)`.
    pub fn rsqrt(&mut self, x: ValueId, epsilon: f32) -> Result<ValueId> {
        self.one(OpKind::Rsqrt, &[("x", Arg::Value(x)), ("epsilon", Arg::Float(epsilon))])
    }

    /// `exp(x) / Σ exp(x)` along an axis.
    pub fn softmax(&mut self, x: ValueId, axis: usize) -> Result<ValueId> {
        self.one(OpKind::Softmax, &[("x", Arg::Value(x)), ("axis", Arg::Int(axis))])
    }

    /// A reduction along one axis that stays, with extent 1.
    pub fn reduce(&mut self, op: OpKind, x: ValueId, axis: usize) -> Result<ValueId> {
        self.one(op, &[("x", Arg::Value(x)), ("axes", Arg::Ints(vec![axis])), ("keep_dims", Arg::Bool(true))])
    }

    /// `x · y` over the last two axes, with `y` transposed if requested.
    pub fn matmul(&mut self, x: ValueId, y: ValueId, transpose_y: bool) -> Result<ValueId> {
        self.one(
            OpKind::Matmul,
            &[
                ("x", Arg::Value(x)),
                ("y", Arg::Value(y)),
                ("transpose_x", Arg::Bool(false)),
                ("transpose_y", Arg::Bool(transpose_y)),
            ],
        )
    }

    /// Axes in another order.
    pub fn transpose(&mut self, x: ValueId, perm: &[usize]) -> Result<ValueId> {
        self.one(OpKind::Transpose, &[("x", Arg::Value(x)), ("perm", Arg::Ints(perm.to_vec()))])
    }

    /// Changes the shape of a value; without an operator if the shape is the same.
    pub fn reshape(&mut self, x: ValueId, shape: &[usize]) -> Result<ValueId> {
        if self.shape(x) == shape {
            return Ok(x);
        }
        self.one(OpKind::Reshape, &[("x", Arg::Value(x)), ("shape", Arg::Ints(shape.to_vec()))])
    }

    /// `start .. start + len` of an axis; no operator where that is all of it.
    pub fn slice(&mut self, x: ValueId, axis: usize, start: usize, len: usize) -> Result<ValueId> {
        let mut size = self.shape(x).to_vec();
        let mut begin = vec![0; size.len()];
        if let (Some(b), Some(s)) = (begin.get_mut(axis), size.get_mut(axis)) {
            if start == 0 && len == *s {
                return Ok(x);
            }
            (*b, *s) = (start, len);
        }
        self.one(
            OpKind::SliceBySize,
            &[("x", Arg::Value(x)), ("begin", Arg::Ints(begin)), ("size", Arg::Ints(size))],
        )
    }

    /// `x` repeated along its axes.
    pub fn tile(&mut self, x: ValueId, reps: &[usize]) -> Result<ValueId> {
        self.one(OpKind::Tile, &[("x", Arg::Value(x)), ("reps", Arg::Ints(reps.to_vec()))])
    }

    /// `x` with `update` in the place of what begins at `begin`.
    pub fn slice_update(&mut self, x: ValueId, update: ValueId, begin: &[usize]) -> Result<ValueId> {
        let end = begin.iter().zip(self.shape(update)).map(|(b, n)| b.saturating_add(*n)).collect();
        self.one(
            OpKind::SliceUpdate,
            &[
                ("x", Arg::Value(x)),
                ("update", Arg::Value(update)),
                ("begin", Arg::Ints(begin.to_vec())),
                ("end", Arg::Ints(end)),
            ],
        )
    }

    /// The contents of a state.
    pub fn read_state(&mut self, state: ValueId) -> Result<ValueId> {
        self.one(OpKind::ReadState, &[("state", Arg::Value(state))])
    }

    /// New contents of a state.
    pub fn write_state(&mut self, state: ValueId, value: ValueId) -> Result<()> {
        self.op(OpKind::WriteState, &[("state", Arg::Value(state)), ("value", Arg::Value(value))]).map(|_| ())
    }

    /// Values joined along an axis; no operator for a single one.
    pub fn concat(&mut self, values: &[ValueId], axis: usize) -> Result<ValueId> {
        match values {
            [one] => Ok(*one),
            _ => self
                .one(OpKind::Concat, &[("values", Arg::Values(values.to_vec())), ("axis", Arg::Int(axis))]),
        }
    }
}
