//! Legalisation: a part of a model as its Graph computes it becomes what a program for the Neural Engine
//! computes.
//!
//! A [`Term`] states the part in linear layers over rows. All [rules](rules::all) run to saturation over its
//! e-graph (egg, Willsey et al., POPL 2021), and extraction takes the cheapest form that the unit runs. In it
//! every layer is a 1×1 convolution, everything between two of them is channels-first, and transpositions are
//! as few as possible. [`crate::emit`] writes the [`Legal`] term, operator by operator.
//!
//! Limits are counts, never times, so that a build is reproducible.
#![expect(clippy::cast_possible_truncation, reason = "nodes of one part")]

pub mod language;
pub mod rules;
#[cfg(test)]
mod tests;

use crate::emit::Raw;
use crate::emit::layout::Layout;
use egg::{CostFunction, EGraph, Extractor, Id, Language, RecExpr, Runner, SimpleScheduler};
use language::{Attr, Facts, Form, Leaf, Weight};
use std::collections::BTreeMap;
use std::time::Duration;

/// Most iterations of saturation; parts need six or seven.
const ITERATIONS: usize = 32;
/// Most e-nodes of a part.
const NODES: usize = 20_000;

/// A part of a model, in linear layers over rows.
#[derive(Clone, Debug, Default)]
pub struct Term {
    nodes: RecExpr<Form>,
    facts: Facts,
    roots: Vec<Id>,
}

impl Term {
    /// An empty term.
    pub fn new() -> Self {
        Self::default()
    }

    /// An input: rows with this many channels.
    pub fn input(&mut self, channels: usize) -> Id {
        self.facts.inputs.push(channels);
        let at = self.facts.inputs.len() - 1;
        self.nodes.add(Form::Leaf(Leaf::Input(at as u32)))
    }

    fn weight(&mut self, name: impl Into<String>, raw: &Raw) -> Id {
        self.facts.weights.push(Weight { name: name.into(), raw: raw.clone() });
        let at = self.facts.weights.len() - 1;
        self.nodes.add(Form::Leaf(Leaf::Weight(at as u32)))
    }

    /// `x Wᵀ`, plus a bias.
    pub fn linear(&mut self, x: Id, name: &str, weight: &Raw, bias: Option<&Raw>) -> Id {
        let w = self.weight(name, weight);
        match bias {
            None => self.nodes.add(Form::Linear([x, w])),
            Some(bias) => {
                let b = self.weight(format!("{name}_bias"), bias);
                self.nodes.add(Form::LinearBias([x, w, b]))
            }
        }
    }

    /// A linear layer for each head: `weight[heads, out, in]`.
    pub fn head_linear(&mut self, heads: usize, x: Id, name: &str, weight: &Raw) -> Id {
        let (h, w) = (self.attr(Attr::Heads(heads)), self.weight(name, weight));
        self.nodes.add(Form::HeadLinear([h, x, w]))
    }

    /// An attribute.
    pub fn attr(&mut self, attr: Attr) -> Id {
        let leaf = self.facts.attr(attr);
        self.nodes.add(leaf)
    }

    /// An operator over what was added before.
    pub fn add(&mut self, node: Form) -> Id {
        self.nodes.add(node)
    }

    /// Makes a value one of the part's results.
    pub fn result(&mut self, value: Id) {
        self.roots.push(value);
    }

    /// The e-graph of the term, with the class of each of its nodes.
    fn egraph(&self) -> (EGraph<Form, Facts>, Vec<Id>) {
        let mut graph = EGraph::new(self.facts.clone());
        let mut classes: Vec<Id> = Vec::new();
        for node in self.nodes.as_ref() {
            let node = node.clone().map_children(|id| classes[usize::from(id)]);
            classes.push(graph.add(node));
        }
        graph.rebuild();
        (graph, classes)
    }

    /// The cheapest equal term that the unit runs, with rows in the layout `layout` inside of a graph; `None`
    /// if no rule leads to one.
    pub(crate) fn legalise(&self, layout: Layout) -> Option<Legal> {
        let (graph, classes) = self.egraph();
        let rules: Vec<_> = rules::all().into_iter().map(|(_, rule)| rule).collect();
        let runner = Runner::<_, _, ()>::new(Facts::default())
            .with_egraph(graph)
            .with_scheduler(SimpleScheduler)
            .with_iter_limit(ITERATIONS)
            .with_node_limit(NODES)
            .with_time_limit(Duration::MAX)
            .run(&rules);
        let graph = &runner.egraph;
        let extractor = Extractor::new(graph, Cost { graph, layout });
        let mut made = Extraction { graph, extractor, nodes: Vec::new(), known: BTreeMap::new() };
        let roots = self.roots.iter().map(|root| {
            let class = classes[usize::from(*root)];
            made.extractor.find_best_cost(class).is_finite().then(|| made.class(class))
        });
        let roots = roots.collect::<Option<Vec<_>>>()?;
        Some(Legal { nodes: made.nodes, facts: graph.analysis.clone(), roots })
    }
}

/// Writes the cheapest nodes of classes in an order of computation, each once.
struct Extraction<'a> {
    graph: &'a EGraph<Form, Facts>,
    extractor: Extractor<'a, Cost<'a>, Form, Facts>,
    nodes: Vec<Form>,
    known: BTreeMap<Id, Id>,
}

impl Extraction<'_> {
    fn class(&mut self, class: Id) -> Id {
        let class = self.graph.find(class);
        if let Some(&at) = self.known.get(&class) {
            return at;
        }
        let node = self.extractor.find_best_node(class).clone().map_children(|id| self.class(id));
        let at = Id::from(self.nodes.len());
        self.nodes.push(node);
        self.known.insert(class, at);
        at
    }
}

/// Cost of an operator: one for itself, and of a transposition each number of a row that it reads and writes.
///
/// Operators that the unit does not run have infinite cost: linear layers, and operators on the channels of
/// rows, which a program cannot express.
struct Cost<'a> {
    graph: &'a EGraph<Form, Facts>,
    layout: Layout,
}

impl CostFunction<Form> for Cost<'_> {
    type Cost = f64;

    fn cost<C: FnMut(Id) -> f64>(&mut self, node: &Form, mut costs: C) -> f64 {
        let own = match node {
            Form::Leaf(_) => 0.0,
            Form::Linear(_) | Form::LinearBias(_) | Form::HeadLinear(_) => f64::INFINITY,
            Form::Attention(_) | Form::Conv1x1(_) | Form::Conv1x1Bias(_) | Form::Conv1x1Groups(_) => 1.0,
            Form::ToNchw(x) | Form::FromNchw(x) => match self.layout {
                Layout::Rows => 1.0,
                Layout::Columns => 1.0 + 2.0 * self.graph[*x].data.channels as f64,
            },
            Form::ByHead([_, x])
            | Form::Norm([_, x])
            | Form::Clamp([_, x])
            | Form::Rope([_, x, _])
            | Form::Slice([_, x])
            | Form::Concat([_, x, _])
            | Form::Glu([_, x, _])
            | Form::Sigmoid(x)
            | Form::Mul([x, _]) => {
                if self.graph[*x].data.nchw {
                    1.0
                } else {
                    f64::INFINITY
                }
            }
        };
        node.fold(own, |sum, id| sum + costs(id))
    }
}

/// Number of operators of each kind in a legal term.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Convolutions; one for all heads of a layer that has a matrix for each.
    pub convolutions: usize,
    /// Values that become channels-first or rows.
    pub layout_changes: usize,
}

/// A part of a model in the form that the Neural Engine runs.
#[derive(Clone, Debug)]
pub struct Legal {
    nodes: Vec<Form>,
    facts: Facts,
    roots: Vec<Id>,
}

impl Legal {
    /// An operator.
    pub(crate) fn node(&self, id: Id) -> Option<&Form> {
        self.nodes.get(usize::from(id))
    }

    /// Results, in the order of [`Term::result`].
    pub(crate) fn roots(&self) -> &[Id] {
        &self.roots
    }

    /// The weight that a leaf is.
    pub(crate) fn weight(&self, id: Id) -> Option<&Weight> {
        match self.node(id)? {
            Form::Leaf(Leaf::Weight(i)) => self.facts.weights.get(*i as usize),
            _ => None,
        }
    }

    /// The attribute that a leaf is.
    pub(crate) fn attr(&self, id: Id) -> Option<&Attr> {
        match self.node(id)? {
            Form::Leaf(Leaf::Attr(i)) => self.facts.attrs.get(*i as usize),
            _ => None,
        }
    }

    /// Number of its convolutions and layout changes.
    pub fn counts(&self) -> Counts {
        let count = |of: fn(&Form) -> bool| self.nodes.iter().filter(|n| of(n)).count();
        Counts {
            convolutions: count(|n| {
                matches!(n, Form::Conv1x1(_) | Form::Conv1x1Bias(_) | Form::Conv1x1Groups(_))
            }),
            layout_changes: count(|n| matches!(n, Form::ToNchw(_) | Form::FromNchw(_))),
        }
    }
}
