//! The naive reference: what a Graph means, in plain loops.
//!
//! Inputs and results of every node are f32. Dot products, means and softmaxes are accumulated in f64, so
//! that this is the more exact side of every comparison. It is slow, and the reference for everything else.

mod evaluator;
mod tensor;

pub use evaluator::{Evaluator, Observer, WeightMap};
pub use tensor::{Data, Tensor};

use crate::infer::TypeError;
use crate::op::{Effect, Op};
use crate::types::Type;
use std::cell::Cell;
use thiserror::Error;

/// Reason that a graph could not be evaluated.
#[derive(Debug, Error)]
pub enum EvalError {
    /// Operands that do not fit the operator.
    #[error(transparent)]
    Type(#[from] TypeError),
    /// A number that is out of range: an id, a position, a slot, an expert.
    #[error("{op}: {message}")]
    Value {
        /// Mnemonic of the operator.
        op: &'static str,
        /// The fault.
        message: String,
    },
    /// A weight that cannot be read.
    #[error("weight {name} cannot be read")]
    Weight {
        /// Name of the weight.
        name: String,
        /// Error of the source.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A call that does not fit the entry point.
    #[error("{0}")]
    Call(String),
}

/// One operand of [`op`].
#[derive(Debug)]
pub enum Arg<'a> {
    /// A value, a weight, or a state that is only read.
    Tensor(&'a Tensor),
    /// The state that an operator with an [`Effect`] changes.
    State(&'a mut Tensor),
}

/// The operands of one node, with errors that name it.
pub(crate) struct Args<'a> {
    op: &'static str,
    pub(crate) list: Vec<&'a Tensor>,
    /// The state that the operator changes, if it changes one.
    state: Cell<Option<&'a mut Tensor>>,
    /// Types of the results.
    pub(crate) results: &'a [Type],
    /// Tokens of the prompt that the rows are part of; 0 where every row is a sequence of its own.
    pub(crate) sequence: usize,
}

impl<'a> Args<'a> {
    pub(crate) fn error(&self, message: impl Into<String>) -> EvalError {
        EvalError::Value { op: self.op, message: message.into() }
    }

    /// Operand `i`; its type has been checked.
    pub(crate) fn get(&self, i: usize) -> Result<&'a Tensor, EvalError> {
        self.list.get(i).copied().ok_or_else(|| self.error(format!("operand {i} is missing")))
    }

    pub(crate) fn f32(&self, i: usize) -> Result<&'a [f32], EvalError> {
        match &self.get(i)?.data {
            Data::F32(x) => Ok(x),
            Data::I32(_) => Err(self.error(format!("operand {i} holds integers"))),
        }
    }

    /// A weight that is there if `there` says so.
    pub(crate) fn weight(&self, i: usize, there: bool) -> Result<Option<&'a [f32]>, EvalError> {
        if there { self.f32(i).map(Some) } else { Ok(None) }
    }

    /// The state to change, once.
    pub(crate) fn state(&self) -> Result<&'a mut Tensor, EvalError> {
        self.state.take().ok_or_else(|| self.error("the state must be given as `Arg::State`"))
    }

    pub(crate) fn i32(&self, i: usize) -> Result<&'a [i32], EvalError> {
        match &self.get(i)?.data {
            Data::I32(x) => Ok(x),
            Data::F32(_) => Err(self.error(format!("operand {i} holds floats"))),
        }
    }

    pub(crate) fn rows(&self, i: usize) -> Result<usize, EvalError> {
        Ok(self.get(i)?.ty.rows())
    }

    pub(crate) fn cols(&self, i: usize) -> Result<usize, EvalError> {
        Ok(self.get(i)?.ty.cols())
    }

    /// An index that must be in `0 .. end`.
    pub(crate) fn index(&self, what: &str, index: i32, end: usize) -> Result<usize, EvalError> {
        usize::try_from(index)
            .ok()
            .filter(|&i| i < end)
            .ok_or_else(|| self.error(format!("{what} {index} is not in 0 .. {end}")))
    }
}

/// Evaluates one node on given operands, in the order of [`Op::signature`].
///
/// The result of an operator that [writes](Effect::Writes) its state is that state, changed in place: the
/// list is empty. Every other operator gives one tensor per result.
///
/// # Errors
/// Operands that do not fit, or numbers out of range.
pub fn op(op: &Op, args: Vec<Arg<'_>>) -> Result<Vec<Tensor>, EvalError> {
    op_in(op, args, 0)
}

/// As [`op`], for rows of a prompt of `sequence` tokens; 0 where every row is a sequence of its own. Only
/// [`Op::RopeAngles`] requires.
///
/// # Errors
/// As [`op`].
pub fn op_in(op: &Op, mut args: Vec<Arg<'_>>, sequence: usize) -> Result<Vec<Tensor>, EvalError> {
    let tensor = |arg: &Arg<'_>| -> Type {
        match arg {
            Arg::Tensor(t) => t.ty.clone(),
            Arg::State(t) => t.ty.clone(),
        }
    };
    let types: Vec<Type> = args.iter().map(tensor).collect();
    let results = op.infer(&types.iter().collect::<Vec<_>>())?;
    let whole = |arg: &Arg<'_>| match arg {
        Arg::Tensor(t) => t.is_whole(),
        Arg::State(t) => t.is_whole(),
    };
    if !args.iter().all(whole) {
        let message = "an operand's data do not fit its type".to_owned();
        return Err(EvalError::Value { op: op.name(), message });
    }
    let state = match op.effect() {
        Effect::None => None,
        Effect::Writes | Effect::Updates => match args.remove(0) {
            Arg::State(state) => Some(state),
            Arg::Tensor(_) => None,
        },
    };
    let list = args.iter().map(as_tensor).collect();
    let a = Args { op: op.name(), list, state: Cell::new(state), results: &results, sequence };
    let data = op.eval(&a)?;
    Ok(results.into_iter().zip(data).map(|(ty, data)| Tensor { ty, data }).collect())
}

fn as_tensor<'a>(arg: &'a Arg<'_>) -> &'a Tensor {
    match arg {
        Arg::Tensor(t) => t,
        Arg::State(t) => t,
    }
}
