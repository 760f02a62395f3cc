//! Gated feed-forward networks: an expert of a group, and dense ones of all tokens.

use super::write::Writer;
use super::{EmitError, Limits, Raw, Result, check_rows, checked, legal, within};
use crate::legalise::language::{Attr, Form};
use crate::legalise::{Legal, Term};
use crate::program::{Array, Counted, FunctionBuilder, Mode, OpKind, Program, ValueId};
use moec_ir::{Activation, Glu};

/// Weights of gated networks of one size, one after the other along the first axis.
#[derive(Clone, Debug)]
pub struct Networks {
    /// `[G·I, H]`.
    pub gate: Raw,
    /// `[G·I, H]`.
    pub up: Raw,
    /// `[G·H, I]`.
    pub down: Raw,
    /// `[G·I]`, of gate and of up.
    pub gate_up_bias: Option<[Raw; 2]>,
    /// `[G·H]`.
    pub down_bias: Option<Raw>,
}

impl Networks {
    /// Refuses weights of other shapes than those of `count` networks.
    pub(super) fn check(&self, graph: &str, count: usize, hidden: usize, inner: usize) -> Result<()> {
        for (name, raw) in [("gate", &self.gate), ("up", &self.up)] {
            raw.expect(graph, name, &[count * inner, hidden])?;
        }
        self.down.expect(graph, "down", &[count * hidden, inner])?;
        for (name, raw) in ["gate_bias", "up_bias"].into_iter().zip(self.gate_up_bias.iter().flatten()) {
            raw.expect(graph, name, &[count * inner])?;
        }
        self.down_bias.as_ref().map_or(Ok(()), |bias| bias.expect(graph, "down_bias", &[count * hidden]))
    }

    /// Networks `first .. first + len` of `count`.
    pub(super) fn part(&self, first: usize, len: usize, count: usize) -> Self {
        let cut = |raw: &Raw| {
            let each = raw.shape.first().map_or(0, |n| n / count.max(1));
            raw.rows(first * each, len * each)
        };
        Self {
            gate: cut(&self.gate),
            up: cut(&self.up),
            down: cut(&self.down),
            gate_up_bias: self.gate_up_bias.as_ref().map(|both| both.each_ref().map(cut)),
            down_bias: self.down_bias.as_ref().map(cut),
        }
    }

    /// The arrays that they become.
    pub(super) fn arrays(&self, counted: Counted) -> impl Iterator<Item = Array> {
        let biases = self.gate_up_bias.iter().flatten().chain(&self.down_bias);
        [&self.gate, &self.up, &self.down].into_iter().chain(biases).flat_map(move |raw| raw.arrays(counted))
    }

    /// `down(glu(gate(x), up(x)))` along axis 1 of `x`, whose channels are those of `groups` networks side by
    /// side: three 1×1 convolutions. `at` ends the names of the weights.
    pub(super) fn apply(
        &self,
        b: &mut FunctionBuilder,
        x: ValueId,
        glu: Glu,
        groups: usize,
        at: &str,
    ) -> Result<ValueId> {
        let conv = |b: &mut FunctionBuilder, x, what: &str, raw: &Raw, bias: Option<&Raw>| {
            let bias = bias.map(|raw| raw.weight(&format!("{what}_bias{at}"), raw.shape.clone()));
            b.grouped_conv(x, &raw.conv(&format!("{what}{at}")), bias.as_ref(), groups)
        };
        let [gate_bias, up_bias] = match &self.gate_up_bias {
            Some([gate, up]) => [Some(gate), Some(up)],
            None => [None, None],
        };
        let g = conv(b, x, "gate", &self.gate, gate_bias)?;
        let u = conv(b, x, "up", &self.up, up_bias)?;
        let joined = join(b, glu, g, u)?;
        Ok(conv(b, joined, "down", &self.down, self.down_bias.as_ref())?)
    }
}

/// `glu(g, u)` element by element, see [`Glu`].
pub(super) fn join(b: &mut FunctionBuilder, glu: Glu, g: ValueId, u: ValueId) -> Result<ValueId> {
    Ok(match glu {
        Glu::Gated(act) => {
            let g = activate(b, act, g)?;
            b.binary(OpKind::Mul, g, u)?
        }
        Glu::DRelu => {
            let (g, u) = (b.unary(OpKind::Relu, g)?, b.unary(OpKind::Relu, u)?);
            b.binary(OpKind::Mul, g, u)?
        }
        Glu::FatRelu { .. } => return Err(EmitError::Join("FATReLU")),
        Glu::Cats { .. } => return Err(EmitError::Join("SiLU with a threshold")),
        Glu::Ungated(_) => return Err(EmitError::NoGate),
        Glu::Limited { limit } => {
            let g = activate(b, Activation::Silu, g)?;
            let (g, u) = (b.scalar(OpKind::Minimum, g, limit)?, b.clip(u, -limit, limit)?);
            b.binary(OpKind::Mul, g, u)?
        }
        Glu::Clamped { alpha, limit } => {
            let g = b.scalar(OpKind::Minimum, g, limit)?;
            let u = b.clip(u, -limit, limit)?;
            let u = b.scalar(OpKind::Add, u, 1.0)?;
            let slope = b.scalar(OpKind::Mul, g, alpha)?;
            let gate = b.unary(OpKind::Sigmoid, slope)?;
            let product = b.binary(OpKind::Mul, u, g)?;
            b.binary(OpKind::Mul, product, gate)?
        }
    })
}

fn activate(b: &mut FunctionBuilder, act: Activation, x: ValueId) -> Result<ValueId> {
    Ok(match act {
        Activation::Silu => b.unary(OpKind::Silu, x)?,
        Activation::Sigmoid => b.unary(OpKind::Sigmoid, x)?,
        Activation::Relu => b.unary(OpKind::Relu, x)?,
        Activation::Relu2 => {
            let x = b.unary(OpKind::Relu, x)?;
            b.binary(OpKind::Mul, x, x)?
        }
        Activation::Gelu => b.gelu(x, Mode::Exact)?,
        Activation::GeluTanh => b.gelu(x, Mode::TanhApproximation)?,
    })
}

/// A scalar gate on the result of a network: `sigmoid(w · x)`.
#[derive(Clone, Debug)]
pub struct Gate {
    /// `[1, H]`.
    pub weight: Raw,
}

/// A network that every token passes: a shared expert, or a dense layer.
#[derive(Clone, Debug)]
pub struct Dense {
    /// Name of the graph.
    pub name: String,
    /// Channels of a token.
    pub hidden: usize,
    /// Channels between up and down.
    pub intermediate: usize,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Weights.
    pub weights: Networks,
    /// Gate of a shared expert (Qwen2-MoE).
    pub gate: Option<Gate>,
    /// Rows of each function.
    pub rows: Vec<usize>,
}

impl Dense {
    /// Writes the program: a function `rows{T}` for each number of rows.
    ///
    /// # Errors
    /// Weights of other shapes, rows that the unit does not take, or more bytes than a graph may have.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        check_rows(&self.name, "numbers of rows", &self.rows, limits)?;
        self.weights.check(&self.name, 1, self.hidden, self.intermediate)?;
        if let Some(gate) = &self.gate {
            gate.weight.expect(&self.name, "gate", &[1, self.hidden])?;
        }
        let (mut weights, layout, legal) = (Vec::new(), limits.layout(), self.legal(limits)?);
        let functions = self.rows.iter().map(|&rows| {
            let mut b = FunctionBuilder::new(format!("rows{rows}"), &mut weights);
            let x = b.input("x", &[rows, self.hidden, 1, 1]);
            let results = Writer::new(&legal, &mut b, (layout, limits), (rows, x)).results()?;
            let outputs: Vec<_> = results.into_iter().map(|y| ("y", y)).collect();
            Ok(b.finish(&outputs))
        });
        let functions = functions.collect::<Result<_>>()?;
        let description = format!(
            "Gated network `{}` of all tokens, {} channels with {} between",
            self.name, self.hidden, self.intermediate
        );
        let program = Program { name: self.name.clone(), description, weights, functions };
        let bytes = program.counted_bytes(limits.counted);
        within(&self.name, limits, 1, "layers", |layers| if layers == 0 { 0 } else { bytes })?;
        checked(program, limits)
    }

    /// Its computation on the unit.
    ///
    /// # Errors
    /// No form of it is one that the unit runs.
    pub fn legal(&self, limits: &Limits) -> Result<Legal> {
        let (mut t, w) = (Term::new(), &self.weights);
        let x = t.input(self.hidden);
        let [gate_bias, up_bias] = match &w.gate_up_bias {
            Some([gate, up]) => [Some(gate), Some(up)],
            None => [None, None],
        };
        let gate = t.linear(x, "gate", &w.gate, gate_bias);
        let up = t.linear(x, "up", &w.up, up_bias);
        let glu = t.attr(Attr::Glu(self.glu));
        let joined = t.add(Form::Glu([glu, gate, up]));
        let mut y = t.linear(joined, "down", &w.down, w.down_bias.as_ref());
        if let Some(gate) = &self.gate {
            let logit = t.linear(x, "gate", &gate.weight, None);
            let share = t.add(Form::Sigmoid(logit));
            y = t.add(Form::Mul([y, share]));
        }
        t.result(y);
        legal(&self.name, &t, limits.layout())
    }
}
