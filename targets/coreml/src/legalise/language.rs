//! The language of Core ML's legalisation: operators of a part of a model in the e-graph.
//!
//! Two forms of values exist. *Rows*, `[rows, channels]`, are what the Graph computes with and what crosses
//! the border of a program. *Channels-first* values are what a convolution takes. Operators on the channels
//! of a row take either form; linear layers and attention take rows, convolutions take channels-first values.
//! [`Fact::nchw`] says which form a value has.
#![expect(clippy::cast_possible_truncation, reason = "nodes of one part")]

use crate::emit::{Norm, Raw, Rope};
use egg::{Analysis, DidMerge, EGraph, Id, define_language};
use moec_ir::Glu;
use std::fmt;
use std::str::FromStr;

/// A leaf of the language: an index into a table of [`Facts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Leaf {
    /// Into [`Facts::inputs`].
    Input(u32),
    /// Into [`Facts::weights`].
    Weight(u32),
    /// Into [`Facts::attrs`].
    Attr(u32),
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(i) => write!(f, "%{i}"),
            Self::Weight(i) => write!(f, "@{i}"),
            Self::Attr(i) => write!(f, "#{i}"),
        }
    }
}

impl FromStr for Leaf {
    type Err = ();
    /// Rules bind leaves by variables and never name one.
    fn from_str(_: &str) -> Result<Self, ()> {
        Err(())
    }
}

define_language! {
    /// One e-node; its children are documented at each variant.
    #[allow(missing_docs, reason = "each variant is the operator of its name")]
    pub enum Form {
        "linear" = Linear([Id; 2]),               // x, w
        "linear_bias" = LinearBias([Id; 3]),      // x, w, b
        "head_linear" = HeadLinear([Id; 3]),      // heads, x, w
        "attention" = Attention(Box<[Id]>),       // channels of its result, then its operands
        "conv1x1" = Conv1x1([Id; 2]),             // x, w
        "conv1x1_bias" = Conv1x1Bias([Id; 3]),    // x, w, b
        "conv1x1_groups" = Conv1x1Groups([Id; 3]), // groups, x, w
        "to_nchw" = ToNchw(Id),
        "from_nchw" = FromNchw(Id),
        "by_head" = ByHead([Id; 2]),              // heads, x: a head's channels get an axis of their own
        "norm" = Norm([Id; 2]),                   // attr, x
        "clamp" = Clamp([Id; 2]),                 // bound, x
        "rope" = Rope([Id; 3]),                   // attr, x, angles
        "slice" = Slice([Id; 2]),                 // attr, x
        "concat" = Concat([Id; 3]),               // heads, a, b
        "glu" = Glu([Id; 3]),                     // attr, gate, up
        "sigmoid" = Sigmoid(Id),
        "mul" = Mul([Id; 2]),                     // a, b of as many channels, or of one
        Leaf(Leaf),
    }
}

/// Attributes of an operator.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// Heads of a layer, groups of a convolution.
    Heads(usize),
    /// Channels of what attention gives.
    Channels(usize),
    /// Channels `start .. start + len` of each head.
    Slice {
        /// Heads.
        heads: usize,
        /// First channel.
        start: usize,
        /// Channels.
        len: usize,
    },
    /// Bound on magnitudes.
    Bound(f32),
    /// Function that joins gate and up.
    Glu(Glu),
    /// A rotation of each of this many heads.
    Rope(Rope, usize),
    /// A norm: its name in the program, the norm, and its groups where channels are those of heads.
    Norm(&'static str, Norm, Option<usize>),
}

/// A weight of a part.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Its name in the program.
    pub name: String,
    /// `[out, in]` of a matrix, `[heads, out, in]` of matrices of heads, `[out]` of a bias.
    pub raw: Raw,
}

impl Weight {
    /// Channels that a layer with it gives.
    fn channels(&self) -> usize {
        match *self.raw.shape {
            [heads, out, _] => heads * out,
            [out, ..] => out,
            [] => 0,
        }
    }
}

/// Facts about an e-class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Fact {
    /// Channels of a row; of a weight, those that its layer gives.
    pub channels: usize,
    /// Whether it is channels-first.
    pub nchw: bool,
}

/// The analysis, and the tables after leaves.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Channels of inputs, which are rows.
    pub inputs: Vec<usize>,
    /// Weights.
    pub weights: Vec<Weight>,
    /// Attributes; equal ones share an entry.
    pub attrs: Vec<Attr>,
}

impl Facts {
    /// The leaf of an attribute.
    pub fn attr(&mut self, attr: Attr) -> Form {
        let at = self.attrs.iter().position(|a| *a == attr).unwrap_or_else(|| {
            self.attrs.push(attr);
            self.attrs.len() - 1
        });
        Form::Leaf(Leaf::Attr(at as u32))
    }
}

/// The attribute of a class.
fn attr_of(graph: &EGraph<Form, Facts>, id: Id) -> Option<Attr> {
    graph[id].nodes.iter().find_map(|n| match n {
        Form::Leaf(Leaf::Attr(i)) => graph.analysis.attrs.get(*i as usize).cloned(),
        _ => None,
    })
}

impl Analysis<Form> for Facts {
    type Data = Fact;

    fn make(graph: &mut EGraph<Form, Self>, node: &Form, _: Id) -> Fact {
        let fact = |id: &Id| graph[*id].data;
        let attr = |id: &Id| attr_of(graph, *id);
        let rows = |channels| Fact { channels, nchw: false };
        match node {
            Form::Leaf(Leaf::Input(i)) => rows(graph.analysis.inputs.get(*i as usize).copied().unwrap_or(0)),
            Form::Leaf(Leaf::Weight(i)) => {
                rows(graph.analysis.weights.get(*i as usize).map_or(0, Weight::channels))
            }
            Form::Leaf(Leaf::Attr(_)) => Fact::default(),
            Form::Linear([_, w]) | Form::LinearBias([_, w, _]) | Form::HeadLinear([_, _, w]) => fact(w),
            Form::Conv1x1([_, w]) | Form::Conv1x1Bias([_, w, _]) | Form::Conv1x1Groups([_, _, w]) => {
                Fact { nchw: true, ..fact(w) }
            }
            Form::Attention(of) => match of.first().and_then(attr) {
                Some(Attr::Channels(n)) => rows(n),
                _ => Fact::default(),
            },
            Form::ToNchw(x) => Fact { nchw: true, ..fact(x) },
            Form::FromNchw(x) => Fact { nchw: false, ..fact(x) },
            Form::ByHead([_, x])
            | Form::Norm([_, x])
            | Form::Clamp([_, x])
            | Form::Rope([_, x, _])
            | Form::Glu([_, x, _])
            | Form::Sigmoid(x)
            | Form::Mul([x, _]) => fact(x),
            Form::Slice([a, x]) => match attr(a) {
                Some(Attr::Slice { heads, len, .. }) => Fact { channels: heads * len, ..fact(x) },
                _ => fact(x),
            },
            Form::Concat([_, a, b]) => Fact { channels: fact(a).channels + fact(b).channels, ..fact(a) },
        }
    }

    fn merge(&mut self, _: &mut Fact, _: Fact) -> DidMerge {
        DidMerge(false, false)
    }
}
