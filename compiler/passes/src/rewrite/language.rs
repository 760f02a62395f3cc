//! The Graph as an egg language: operators that rules name, and all others opaque.
//!
//! Attributes are leaves, so that a rule can bind and compare them. Numbers live in tables of
//! [`Facts`], never in global interners: the same input gives the same e-graph in every process.

use egg::{Analysis, DidMerge, EGraph, Id, define_language};
use moec_ir::{Activation, Format, Glu, Op, WeightClass};
use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;

/// A leaf of the language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Atom {
    /// An activation, which as a GLU kind means `act(gate) · up`.
    Kind(Activation),
    /// An attribute: index into [`Facts::attrs`].
    Attr(u32),
    /// A value from outside of the region.
    Value(u32),
    /// A weight.
    Weight(u32),
    /// A state.
    State(u32),
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kind(k) => f.write_str(k.name()),
            Self::Attr(i) => write!(f, "#{i}"),
            Self::Value(i) => write!(f, "%{i}"),
            Self::Weight(i) => write!(f, "@{i}"),
            Self::State(i) => write!(f, "${i}"),
        }
    }
}

impl FromStr for Atom {
    type Err = ();
    /// Rules name activations only; the other leaves are bound by variables.
    fn from_str(s: &str) -> Result<Self, ()> {
        Activation::ALL.into_iter().find(|a| a.name() == s).map(Self::Kind).ok_or(())
    }
}

/// An opaque operator: index into [`Facts::others`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Opaque(pub u32);

impl fmt::Display for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op{}", self.0)
    }
}

impl FromStr for Opaque {
    type Err = ();
    /// Rules never name opaque operators.
    fn from_str(_: &str) -> Result<Self, ()> {
        Err(())
    }
}

define_language! {
    /// One e-node; its children are listed with each variant.
    #[allow(missing_docs, reason = "each variant is the operator of its name")]
    pub enum Moe {
        "linear" = Linear([Id; 2]),               // x, w
        "linear_bias" = LinearBias([Id; 3]),      // x, w, b
        "linear_glu" = LinearGlu([Id; 3]),        // kind, x, w
        "linear_glu_bias" = LinearGluBias([Id; 4]), // kind, x, w, b
        "head_linear" = HeadLinear([Id; 3]),      // attr, x, w
        "expert_ffn" = ExpertFfn([Id; 5]),        // kind, x, dispatch, gate_up, down
        "expert_ffn_bias" = ExpertFfnBias([Id; 7]), // …, gate_up_bias, down_bias
        "rms_norm" = RmsNorm([Id; 3]),            // attr, x, w
        "rms_unit" = RmsUnit([Id; 2]),            // attr, x
        "scale_cols" = ScaleCols([Id; 2]),        // x, w
        "act" = Act([Id; 2]),                     // kind, x
        "glu" = Glu([Id; 3]),                     // kind, gate, up
        "mul" = Mul([Id; 2]),
        "add" = Add([Id; 2]),
        "scale" = Scale([Id; 2]),                 // attr, x
        "clamp" = Clamp([Id; 2]),                 // attr, x
        "slice" = Slice([Id; 2]),                 // attr, x
        "concat" = Concat([Id; 3]),               // attr, a, b
        "w_rows" = WRows([Id; 2]),                // weights joined along output channels
        "w_scale" = WScale([Id; 2]),              // weight with its input channels scaled
        "first" = First(Id),
        "second" = Second(Id),
        Atom(Atom),
        Other(Opaque, Vec<Id>),
    }
}

/// Attributes of an operator, as a leaf.
#[derive(Clone, Debug, PartialEq)]
pub enum Attr {
    /// Of a root mean square norm.
    Rms {
        /// Added to the mean square.
        eps: f32,
        /// Groups of channels.
        groups: usize,
        /// True if every reader of the norm can take its scale into exact f32 weights.
        foldable: bool,
    },
    /// Factor of a scale.
    Factor(f32),
    /// Bounds of a clamp.
    Bounds(f32, f32),
    /// Of a slice.
    Slice {
        /// Heads.
        heads: usize,
        /// First channel.
        start: usize,
        /// Channels.
        len: usize,
    },
    /// Heads of a concat or of a linear layer head by head.
    Heads(usize),
    /// A GLU other than plain `act(gate) · up`.
    Glu(Glu),
}

/// Facts about an e-class.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Fact {
    /// Shape; empty for attributes and for operators with two results.
    pub shape: Vec<usize>,
    /// Storage, of weights.
    pub storage: Option<(Format, WeightClass)>,
    /// Attribute, of attribute leaves.
    pub attr: Option<u32>,
}

impl Fact {
    /// Channels of rows: extent of the last axis.
    pub fn channels(&self) -> usize {
        self.shape.last().copied().unwrap_or(0)
    }
    /// Elements.
    pub fn elements(&self) -> usize {
        if self.shape.is_empty() { 0 } else { self.shape.iter().product() }
    }
}

/// The analysis: tables of the leaves, and shapes.
#[derive(Default)]
pub struct Facts {
    /// Attributes.
    pub attrs: Vec<Attr>,
    /// Opaque operators with the shapes of their results.
    pub others: Vec<(Op, Vec<Vec<usize>>)>,
    /// Facts of values, weights and states.
    pub leaves: HashMap<Atom, Fact>,
}

impl Facts {
    /// The leaf of an attribute; equal attributes share one.
    pub fn attr(&mut self, attr: Attr) -> Moe {
        let at = self.attrs.iter().position(|a| *a == attr).unwrap_or_else(|| {
            self.attrs.push(attr);
            self.attrs.len() - 1
        });
        Moe::Atom(Atom::Attr(at as u32))
    }
}

/// Name of the Graph operator that an e-node becomes; empty for leaves and weight expressions.
pub fn op_name(egraph: &EGraph<Moe, Facts>, enode: &Moe) -> &'static str {
    match enode {
        Moe::Linear(_) | Moe::LinearBias(_) => "linear",
        Moe::LinearGlu(_) | Moe::LinearGluBias(_) => "linear_glu",
        Moe::HeadLinear(_) => "head_linear",
        Moe::ExpertFfn(_) | Moe::ExpertFfnBias(_) => "expert_ffn",
        Moe::RmsNorm(_) | Moe::RmsUnit(_) => "rms_norm",
        Moe::ScaleCols(_) => "scale_cols",
        Moe::Act([kind, _]) => egraph[*kind]
            .nodes
            .iter()
            .find_map(|n| match n {
                Moe::Atom(Atom::Kind(k)) => Some(k.name()),
                _ => None,
            })
            .unwrap_or_default(),
        Moe::Glu(_) => "glu",
        Moe::Mul(_) => "mul",
        Moe::Add(_) => "add",
        Moe::Scale(_) => "scale",
        Moe::Clamp(_) => "clamp",
        Moe::Slice(_) => "slice",
        Moe::Concat(_) => "concat",
        Moe::Other(op, _) => egraph.analysis.others[op.0 as usize].0.name(),
        Moe::WRows(_) | Moe::WScale(_) | Moe::First(_) | Moe::Second(_) | Moe::Atom(_) => "",
    }
}

/// The attribute of a class of attribute leaves.
pub fn attr_of(egraph: &EGraph<Moe, Facts>, id: Id) -> Option<Attr> {
    egraph[id].data.attr.map(|i| egraph.analysis.attrs[i as usize].clone())
}

impl Analysis<Moe> for Facts {
    type Data = Fact;

    fn make(egraph: &mut EGraph<Moe, Self>, enode: &Moe, _: Id) -> Fact {
        let shape = |id: &Id| egraph[*id].data.shape.clone();
        let with_channels = |mut s: Vec<usize>, channels: usize| {
            if let Some(last) = s.last_mut() {
                *last = channels;
            }
            s
        };
        let rows_of = |w: &Id| shape(w).iter().rev().nth(1).copied().unwrap_or(0);
        let value = |shape: Vec<usize>| Fact { shape, ..Fact::default() };
        match enode {
            Moe::Atom(atom @ Atom::Attr(i)) => {
                Fact { attr: Some(*i), ..egraph.analysis.leaves.get(atom).cloned().unwrap_or_default() }
            }
            Moe::Atom(atom) => egraph.analysis.leaves.get(atom).cloned().unwrap_or_default(),
            Moe::Linear([x, w]) | Moe::LinearBias([x, w, _]) => value(with_channels(shape(x), rows_of(w))),
            Moe::LinearGlu([_, x, w]) | Moe::LinearGluBias([_, x, w, _]) => {
                value(with_channels(shape(x), rows_of(w) / 2))
            }
            Moe::HeadLinear([_, x, w]) => {
                let heads = shape(w).first().copied().unwrap_or(0);
                value(with_channels(shape(x), heads * rows_of(w)))
            }
            Moe::ExpertFfn([_, x, _, _, _])
            | Moe::ExpertFfnBias([_, x, ..])
            | Moe::RmsNorm([_, x, _])
            | Moe::RmsUnit([_, x])
            | Moe::ScaleCols([x, _])
            | Moe::Act([_, x])
            | Moe::Glu([_, x, _])
            | Moe::Mul([x, _])
            | Moe::Add([x, _])
            | Moe::Scale([_, x])
            | Moe::Clamp([_, x]) => value(shape(x)),
            Moe::Slice([a, x]) => match attr_of(egraph, *a) {
                Some(Attr::Slice { heads, len, .. }) => value(with_channels(shape(x), heads * len)),
                _ => Fact::default(),
            },
            Moe::Concat([_, a, b]) => {
                let channels = egraph[*a].data.channels() + egraph[*b].data.channels();
                value(with_channels(shape(a), channels))
            }
            Moe::WRows([a, b]) => {
                let (mut s, other) = (shape(a), shape(b));
                let at = s.len().saturating_sub(2);
                if let (Some(x), Some(y)) = (s.get_mut(at), other.get(at)) {
                    *x += y;
                }
                Fact { shape: s, ..egraph[*a].data.clone() }
            }
            Moe::WScale([w, _]) => egraph[*w].data.clone(),
            Moe::First(x) | Moe::Second(x) => {
                let which = usize::from(matches!(enode, Moe::Second(_)));
                let shapes = egraph[*x].nodes.iter().find_map(|n| match n {
                    Moe::Other(op, _) => egraph.analysis.others[op.0 as usize].1.get(which).cloned(),
                    _ => None,
                });
                value(shapes.unwrap_or_default())
            }
            Moe::Other(op, _) => match egraph.analysis.others[op.0 as usize].1.as_slice() {
                [one] => value(one.clone()),
                _ => Fact::default(),
            },
        }
    }

    fn merge(&mut self, _: &mut Fact, _: Fact) -> DidMerge {
        DidMerge(false, false)
    }
}
