//! Printing modules.

use super::lex::{is_word, quote};
use crate::graph::{Graph, INPUTS, Module, Node, Operand, StateDecl, ValueId};
use crate::scope::Scope;
use crate::state::StateKind;
use crate::weights::Weight;
use std::borrow::Cow;
use std::fmt;

/// A name as it is, or quoted.
fn name(text: &str) -> Cow<'_, str> {
    if is_word(text) { Cow::Borrowed(text) } else { Cow::Owned(quote(text)) }
}

impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name: n, shape, class, format, expr } = self;
        write!(f, "weight @{}: {format}{shape:?} {} = {expr}", name(n), class.name())
    }
}

impl fmt::Display for StateDecl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "state ${}: {}", name(&self.name), self.ty)?;
        // Most are caches, which is not worth a word.
        if self.kind == StateKind::Cache { Ok(()) } else { write!(f, " {}", self.kind) }
    }
}

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// A value of a graph with its type: `%7: f32[256, 192]`.
struct Typed<'a>(&'a Graph, ValueId);

impl fmt::Display for Typed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.values.get(self.1.0 as usize) {
            Some(ty) => write!(f, "{}: {ty}", self.1),
            // Not a verified graph: printed all the same, for a search for the fault.
            None => write!(f, "{}: ?", self.1),
        }
    }
}

fn operand(module: &Module, o: Operand) -> String {
    match o {
        Operand::Value(v) => v.to_string(),
        Operand::Weight(w) => match module.weights.get(w.0 as usize) {
            Some(weight) => format!("@{}", name(&weight.name)),
            None => format!("@?{}", w.0),
        },
        Operand::State(s) => match module.states.get(s.0 as usize) {
            Some(state) => format!("${}", name(&state.name)),
            None => format!("$?{}", s.0),
        },
    }
}

fn write_node(f: &mut fmt::Formatter<'_>, module: &Module, graph: &Graph, node: &Node) -> fmt::Result {
    let outputs: Vec<_> = node.outputs.iter().map(|&v| Typed(graph, v).to_string()).collect();
    let inputs: Vec<_> = node.inputs.iter().map(|&o| operand(module, o)).collect();
    let space = if inputs.is_empty() { "" } else { " " };
    write!(f, "  {} = {}{space}{}", outputs.join(", "), node.op.name(), inputs.join(", "))?;
    writeln!(f, "{}", super::ops::attributes(&node.op))
}

fn write_graph(f: &mut fmt::Formatter<'_>, module: &Module, graph: &Graph) -> fmt::Result {
    writeln!(f, "\nentry {} -> {} {{", graph.kind, graph.output)?;
    let inputs = graph.values.len().min(INPUTS) as u32;
    let inputs: Vec<_> = (0..inputs).map(|v| Typed(graph, ValueId(v)).to_string()).collect();
    writeln!(f, "  inputs {}", inputs.join(", "))?;
    let mut scope = &Scope::default();
    for node in &graph.nodes {
        if node.scope != *scope {
            scope = &node.scope;
            writeln!(f, "  scope {}", name(&scope.to_string()))?;
        }
        write_node(f, module, graph, node)?;
    }
    writeln!(f, "}}")
}

impl fmt::Display for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for weight in &self.weights {
            writeln!(f, "{weight}")?;
        }
        for state in &self.states {
            writeln!(f, "{state}")?;
        }
        for graph in &self.entries {
            write_graph(f, self, graph)?;
        }
        Ok(())
    }
}
