//! The naive reference: what a Graph means, in plain loops.
//!
//! Inputs and results of every node are f32; dot products, means and softmaxes are accumulated in f64, so
//! that this is the more exact side of every comparison. Nothing here is fast, and everything else is held
//! against it.

mod basic;
mod cache;
mod evaluator;
mod experts;
mod recurrent;
mod route;
mod tensor;

pub use evaluator::{Evaluator, Observer, WeightMap};
pub use tensor::{Data, Tensor};

use crate::infer::TypeError;
use crate::op::{Effect, Op};
use crate::types::Type;
use thiserror::Error;

/// Why a graph could not be evaluated.
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
        /// What is wrong.
        message: String,
    },
    /// A weight that cannot be read.
    #[error("weight {name} cannot be read")]
    Weight {
        /// Name of the weight.
        name: String,
        /// What the source says.
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
struct Args<'a> {
    op: &'static str,
    list: Vec<&'a Tensor>,
    /// Tokens of the prompt that the rows are part of; 0 where every row is a sequence of its own.
    sequence: usize,
}

impl<'a> Args<'a> {
    fn error(&self, message: impl Into<String>) -> EvalError {
        EvalError::Value { op: self.op, message: message.into() }
    }

    /// Operand `i`; its type has been checked.
    fn get(&self, i: usize) -> Result<&'a Tensor, EvalError> {
        self.list.get(i).copied().ok_or_else(|| self.error(format!("operand {i} is missing")))
    }

    fn f32(&self, i: usize) -> Result<&'a [f32], EvalError> {
        match &self.get(i)?.data {
            Data::F32(x) => Ok(x),
            Data::I32(_) => Err(self.error(format!("operand {i} holds integers"))),
        }
    }

    fn i32(&self, i: usize) -> Result<&'a [i32], EvalError> {
        match &self.get(i)?.data {
            Data::I32(x) => Ok(x),
            Data::F32(_) => Err(self.error(format!("operand {i} holds floats"))),
        }
    }

    fn rows(&self, i: usize) -> Result<usize, EvalError> {
        Ok(self.get(i)?.ty.rows())
    }

    fn cols(&self, i: usize) -> Result<usize, EvalError> {
        Ok(self.get(i)?.ty.cols())
    }

    /// Channels of a row in either form.
    fn channels(&self, i: usize) -> Result<usize, EvalError> {
        match *self.get(i)?.ty.shape.as_slice() {
            [_, channels, 1, 1] => Ok(channels),
            _ => self.cols(i),
        }
    }

    /// An index that must lie in `0 .. end`.
    fn index(&self, what: &str, index: i32, end: usize) -> Result<usize, EvalError> {
        usize::try_from(index)
            .ok()
            .filter(|&i| i < end)
            .ok_or_else(|| self.error(format!("{what} {index} is not in 0 .. {end}")))
    }
}

/// Evaluates one node on given operands, in the order of [`Op::signature`].
///
/// The result of an operator that [writes](Effect::Writes) a state is that state, in place: the list is empty. Every other
/// operator gives one tensor per result.
///
/// # Errors
/// Operands that do not fit, or numbers out of range.
pub fn op(op: &Op, args: Vec<Arg<'_>>) -> Result<Vec<Tensor>, EvalError> {
    op_in(op, args, 0)
}

/// As [`op`], for rows of a prompt of `sequence` tokens; 0 where every row is a sequence of its own. Only
/// [`Op::RopeAngles`] asks.
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
    let name = op.name();
    let error = |message: &str| EvalError::Value { op: name, message: message.to_owned() };
    if !args.iter().all(whole) {
        return Err(error("an operand's data do not fit its type"));
    }
    if op.effect() != Effect::None {
        let Arg::State(state) = args.remove(0) else {
            return Err(error("the state must be given as `Arg::State`"));
        };
        let a = Args { op: name, list: args.iter().map(as_tensor).collect(), sequence };
        let data = change(op, &a, state)?.map(Data::F32);
        return Ok(results.into_iter().zip(data).map(|(ty, data)| Tensor { ty, data }).collect());
    }
    let list = args.iter().map(as_tensor).collect();
    let data = compute(op, &Args { op: name, list, sequence }, &results)?;
    Ok(results.into_iter().zip(data).map(|(ty, data)| Tensor { ty, data }).collect())
}

fn as_tensor<'a>(arg: &'a Arg<'_>) -> &'a Tensor {
    match arg {
        Arg::Tensor(t) => t,
        Arg::State(t) => t,
    }
}

/// Evaluates an operator that changes `state`; the operands are those behind it. Gives its result where that is a value.
fn change(op: &Op, a: &Args<'_>, state: &mut Tensor) -> Result<Option<Vec<f32>>, EvalError> {
    match op {
        Op::CausalConv { act, bias } => recurrent::causal_conv(a, state, *act, *bias).map(Some),
        Op::DeltaRule { key_heads, heads } => {
            recurrent::outer_products(a, state, [*key_heads, *heads], true).map(Some)
        }
        Op::Ssd { groups, heads } => recurrent::outer_products(a, state, [*groups, *heads], false).map(Some),
        _ => cache::write(a, state).map(|()| None),
    }
}

fn compute(op: &Op, a: &Args<'_>, results: &[Type]) -> Result<Vec<Data>, EvalError> {
    let one = |x: Vec<f32>| Ok(vec![Data::F32(x)]);
    match op {
        Op::Embed => one(basic::embed(a)?),
        Op::RmsNorm { eps, groups, weight } => one(basic::rms_norm(a, *eps, *groups, *weight)?),
        Op::LayerNorm { eps } => one(basic::layer_norm(a, *eps)?),
        Op::Linear { bias } => one(basic::linear(a, *bias)?),
        Op::LinearGlu { glu, bias } => one(basic::linear_glu(a, *glu, *bias)?),
        Op::HeadLinear { heads } => one(basic::head_linear(a, *heads)?),
        Op::Conv1x1 { groups, bias } => one(basic::conv1x1(a, *groups, *bias)?),
        // With one place in every image, both forms have the same numbers in the same order.
        Op::ToNchw | Op::FromNchw => one(basic::map(a, |x| x)?),
        Op::RopeAngles { scale, switch } => one(cache::rope_angles(a, *scale, *switch)?),
        Op::Rope { heads, offset, style } => one(cache::rope(a, *heads, *offset, *style)?),
        // Handled by `change`, which holds the state.
        Op::CacheWrite | Op::CausalConv { .. } | Op::DeltaRule { .. } | Op::Ssd { .. } => Ok(Vec::new()),
        Op::Attention(d) => one(cache::attention(a, d)?),
        Op::Router(d) => {
            let (ids, weights) = route::router(a, d)?;
            Ok(vec![Data::I32(ids), Data::F32(weights)])
        }
        Op::Dispatch { experts, partial } => Ok(vec![Data::I32(experts::dispatch(a, *experts, *partial)?)]),
        Op::Fetch { .. } => Ok(vec![Data::I32(experts::table(a)?.to_vec())]),
        Op::Admit(d) => Ok(experts::admit(a, d)?.map(Data::I32).into()),
        Op::ExpertFfn { glu, bias, .. } => one(experts::expert_ffn(a, *glu, *bias, results)?),
        Op::NeuronFfn { glu, predict, .. } => one(experts::neuron_ffn(a, *glu, *predict, results)?),
        Op::Combine { partial } => one(experts::combine(a, *partial)?),
        Op::Add => one(basic::zip(a, |x, y| x + y)?),
        Op::Glu(glu) => one(basic::zip(a, |g, u| basic::glu(*glu, g, u))?),
        Op::Mul => one(basic::mul(a)?),
        Op::MulHeads { heads } => one(basic::mul_heads(a, *heads)?),
        Op::SoftCap { cap } => one(basic::map(a, |x| (f64::from(*cap) * f64::from(x / cap).tanh()) as f32)?),
        Op::ScaleCols => one(basic::scale_cols(a)?),
        Op::Scale { factor } => one(basic::map(a, |x| x * factor)?),
        Op::Clamp { lo, hi } => one(basic::map(a, |x| x.max(*lo).min(*hi))?),
        Op::Act(act) => one(basic::map(a, |x| basic::activate(*act, x))?),
        Op::Softplus => one(basic::map(a, basic::softplus)?),
        Op::Softmax => one(basic::softmax_rows(a)?),
        Op::Concat { heads } => one(basic::concat(a, *heads)?),
        Op::Slice { heads, start, len } => one(basic::slice(a, *heads, *start, *len)?),
        Op::GatherRows => one(basic::gather_rows(a)?),
    }
}
