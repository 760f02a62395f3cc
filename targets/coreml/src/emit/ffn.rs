//! Gated feed-forward networks: an expert of a group, and dense ones of all tokens.

use super::{Layout, Limits, Raw, Result, check_rows, checked, within};
use crate::program::{FunctionBuilder, Mode, OpKind, Program, ValueId};
use moec_ir::{Activation, Glu};

/// Weights of one network, as [`moec_ir::Op::ExpertFfn`] has them for one expert.
#[derive(Clone, Debug)]
pub struct Expert {
    /// Name, for people.
    pub name: String,
    /// `[2·I, H]`: gate, then up.
    pub gate_up: Raw,
    /// `[H, I]`.
    pub down: Raw,
    /// `[2·I]`.
    pub gate_up_bias: Option<Raw>,
    /// `[H]`.
    pub down_bias: Option<Raw>,
}

impl Expert {
    /// Refuses weights of other shapes.
    pub(super) fn check(&self, graph: &str, hidden: usize, intermediate: usize) -> Result<()> {
        let name = |tensor: &str| format!("{}.{tensor}", self.name);
        self.gate_up.expect(graph, &name("gate_up"), &[2 * intermediate, hidden])?;
        self.down.expect(graph, &name("down"), &[hidden, intermediate])?;
        if let Some(bias) = &self.gate_up_bias {
            bias.expect(graph, &name("gate_up_bias"), &[2 * intermediate])?;
        }
        self.down_bias.as_ref().map_or(Ok(()), |bias| bias.expect(graph, &name("down_bias"), &[hidden]))
    }

    /// Elements of the arrays that it becomes.
    pub(super) fn arrays(&self) -> impl Iterator<Item = u64> {
        let half = |raw: &Raw| [crate::program::elements(&raw.shape) / 2; 2];
        let whole = |raw: &Raw| crate::program::elements(&raw.shape);
        let biases = self.gate_up_bias.iter().flat_map(half).chain(self.down_bias.iter().map(whole));
        half(&self.gate_up).into_iter().chain([whole(&self.down)]).chain(biases.collect::<Vec<_>>())
    }

    /// `down(glu(gate(x), up(x)))` along axis 1 of `x`: three 1×1 convolutions.
    pub(super) fn apply(&self, b: &mut FunctionBuilder, x: ValueId, glu: Glu) -> Result<ValueId> {
        let half = self.gate_up.shape.first().map_or(0, |n| n / 2);
        let part = |b: &mut FunctionBuilder, what: &str, start| {
            let weight = self.gate_up.rows(start, half).conv(&format!("{}.{what}", self.name));
            let bias = self
                .gate_up_bias
                .as_ref()
                .map(|raw| raw.rows(start, half).weight(&format!("{}.{what}_bias", self.name), [half]));
            b.conv(x, &weight, bias.as_ref())
        };
        let (g, u) = (part(b, "gate", 0)?, part(b, "up", half)?);
        let joined = join(b, glu, g, u)?;
        let down = self.down.conv(&format!("{}.down", self.name));
        let bias = self.down_bias.as_ref();
        let bias = bias.map(|raw| raw.weight(&format!("{}.down_bias", self.name), raw.shape.clone()));
        Ok(b.conv(joined, &down, bias.as_ref())?)
    }
}

/// `glu(g, u)` element by element, see [`Glu`].
fn join(b: &mut FunctionBuilder, glu: Glu, g: ValueId, u: ValueId) -> Result<ValueId> {
    Ok(match glu {
        Glu::Gated(act) => {
            let g = activate(b, act, g)?;
            b.binary(OpKind::Mul, g, u)?
        }
        Glu::DRelu => {
            let (g, u) = (b.unary(OpKind::Relu, g)?, b.unary(OpKind::Relu, u)?);
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
    /// How gate and up join.
    pub glu: Glu,
    /// Weights.
    pub weights: Expert,
    /// Gate of a shared expert (Qwen2-MoE).
    pub gate: Option<Gate>,
    /// Rows of each function.
    pub rows: Vec<usize>,
    /// Layout inside.
    pub layout: Layout,
}

impl Dense {
    /// Writes the program: a function `rows{T}` for each number of rows.
    ///
    /// # Errors
    /// Weights of other shapes, rows that the unit does not take, or more bytes than a graph may have.
    pub fn emit(&self, limits: &Limits) -> Result<Program> {
        check_rows(&self.name, "numbers of rows", &self.rows, limits)?;
        self.weights.check(&self.name, self.hidden, self.intermediate)?;
        if let Some(gate) = &self.gate {
            gate.weight.expect(&self.name, "gate", &[1, self.hidden])?;
        }
        let mut weights = Vec::new();
        let functions = self.rows.iter().map(|&rows| {
            let mut b = FunctionBuilder::new(format!("rows{rows}"), &mut weights);
            let input = b.input("x", &[rows, self.hidden, 1, 1]);
            let x = self.layout.enter(&mut b, input)?;
            let mut y = self.weights.apply(&mut b, x, self.glu)?;
            if let Some(gate) = &self.gate {
                let logit = b.conv(x, &gate.weight.conv("gate"), None)?;
                let share = b.unary(OpKind::Sigmoid, logit)?;
                y = b.binary(OpKind::Mul, y, share)?;
            }
            let y = self.layout.leave(&mut b, y)?;
            Ok(b.finish(&[("y", y)]))
        });
        let functions = functions.collect::<Result<_>>()?;
        let program = Program { name: self.name.clone(), weights, functions };
        let bytes = program.weight_bytes();
        within(&self.name, limits, 1, "layers", |layers| if layers == 0 { 0 } else { bytes })?;
        checked(program, limits)
    }
}
