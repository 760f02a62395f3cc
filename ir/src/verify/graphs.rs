//! Checks of modules; [`super`] lists the invariants.

use super::{VerifyError, require};
use crate::graph::{Graph, Module, Operand};
use crate::op::{Effect, Kind, Op};
use crate::plan::{RowSpace, StateKind};
use crate::types::{DType, Type};
use crate::weights::WeightExpr;
use std::collections::HashSet;

pub(super) fn check(module: &Module) -> Result<(), VerifyError> {
    let mut names = HashSet::new();
    for w in &module.weights {
        let at = || format!("weight {}", w.name);
        require(!w.name.is_empty(), at, || "no name".into())?;
        require(names.insert(&w.name), at, || "declared twice".into())?;
        w.check()?;
        require(!has_nan(&w.expr), at, || "a constant is NaN".into())?;
    }
    names.clear();
    for s in &module.states {
        let at = || format!("state {}", s.name);
        require(!s.name.is_empty(), at, || "no name".into())?;
        require(names.insert(&s.name), at, || "declared twice".into())?;
        let cache = s.ty.dtype == DType::F32 && s.ty.shape.len() == 4 && sized(&s.ty);
        require(cache, at, || format!("{} is not f32[slots, heads, rows, dim]", s.ty))?;
        require(s.kind != StateKind::Ring { window: 0 }, at, || "a ring without a window".into())?;
    }
    let mut kinds = HashSet::new();
    let mut vocab = None;
    for graph in &module.entries {
        let at = || graph.kind.to_string();
        require(kinds.insert(graph.kind), at, || "declared twice".into())?;
        check_entry(module, graph)?;
        let cols = graph.ty(graph.output).cols();
        let first = *vocab.get_or_insert(cols);
        require(cols == first, at, || format!("{cols} logits per row, other entries {first}"))?;
    }
    Ok(())
}

/// Nonzero extents, and a size in bytes that an address space holds.
fn sized(ty: &Type) -> bool {
    let bytes = ty.shape.iter().try_fold(ty.dtype.bytes(), |n, &d| n.checked_mul(d));
    bytes.is_some_and(|n| n > 0 && isize::try_from(n).is_ok())
}

fn has_nan(expr: &WeightExpr) -> bool {
    match expr {
        WeightExpr::Leaf(_) => false,
        WeightExpr::Const(values) => values.iter().any(|x| x.is_nan()),
        WeightExpr::Transpose(of)
        | WeightExpr::Slice { of, .. }
        | WeightExpr::Split { of, .. }
        | WeightExpr::Join(of)
        | WeightExpr::Map { of, .. }
        | WeightExpr::Repeat { of, .. }
        | WeightExpr::Arrange { of, .. } => has_nan(of),
        WeightExpr::Concat { of, .. } | WeightExpr::Stack(of) => of.iter().any(has_nan),
        WeightExpr::ScaleCols { of, by } | WeightExpr::ScaleMatrices { of, by } => has_nan(of) || has_nan(by),
    }
}

fn check_entry(module: &Module, graph: &Graph) -> Result<(), VerifyError> {
    let entry = || graph.kind.to_string();
    let rows = graph.kind.rows();
    let inputs: Vec<_> = graph.values.iter().take(4).collect();
    let [ids, pos, slot, wanted] = inputs[..] else {
        return Err(VerifyError::new(entry(), "fewer values than graph inputs"));
    };
    let tokens = Type::i32([rows]);
    let out_rows = wanted.rows();
    require(rows > 0, entry, || "no rows".into())?;
    for (v, ty) in [ids, pos, slot].into_iter().enumerate() {
        require(*ty == tokens, entry, || format!("input %{v} is {ty}, expected {tokens}"))?;
    }
    require(*wanted == Type::i32([out_rows]) && out_rows > 0, entry, || {
        format!("input %3 is {wanted}, expected i32[R]")
    })?;

    let types = graph.infer_all(module)?;
    for (v, (have, want)) in graph.values.iter().zip(&types).enumerate() {
        require(
            have == want,
            || format!("{} %{v}", graph.kind),
            || format!("declared {have}, expected {want}"),
        )?;
        require(sized(have), || format!("{} %{v}", graph.kind), || format!("the size of {have} overflows"))?;
    }
    for (i, node) in graph.nodes.iter().enumerate() {
        require(!crate::text::ops::has_nan(&node.op), || at_node(graph, i), || "an attribute is NaN".into())?;
    }
    check_states(graph)?;
    check_windows(module, graph)?;
    check_row_spaces(module, graph)?;

    let output = graph.values.get(graph.output.0 as usize);
    let is_logits = output.is_some_and(|ty| *ty == Type::f32([out_rows, ty.cols()]));
    require(is_logits, entry, || {
        let found = output.map_or("nothing".into(), Type::to_string);
        format!("output %{} is {found}, expected f32[{out_rows}, vocab]", graph.output.0)
    })?;
    let space = graph.row_spaces(module)[graph.output.0 as usize];
    require(space == RowSpace::Outputs, entry, || {
        format!("output %{} has token rows; gather_rows is missing", graph.output.0)
    })
}

fn at_node(graph: &Graph, i: usize) -> String {
    let node = &graph.nodes[i];
    format!("{} node {i} ({}) in \"{}\"", graph.kind, node.op.name(), node.scope)
}

/// At most one write per state, and no reader that bypasses it. Operand kinds are checked already.
fn check_states(graph: &Graph) -> Result<(), VerifyError> {
    let mut written = HashSet::new();
    for (i, node) in graph.nodes.iter().enumerate() {
        if let (true, Some(Operand::State(s))) = (node.op.effect() != Effect::None, node.inputs.first()) {
            require(written.insert(*s), || at_node(graph, i), || format!("state {} is written twice", s.0))?;
        }
    }
    for (i, node) in graph.nodes.iter().enumerate() {
        for input in &node.inputs {
            if let (Operand::State(s), Effect::None) = (input, node.op.effect()) {
                require(
                    !written.contains(s),
                    || at_node(graph, i),
                    || format!("state {} is written in this entry: read the result of the write", s.0),
                )?;
            }
        }
    }
    Ok(())
}

/// Attention over a ring sees no more positions than the ring keeps for it. Operand kinds are checked
/// already.
fn check_windows(module: &Module, graph: &Graph) -> Result<(), VerifyError> {
    let written = |operand: &Operand| match operand {
        Operand::Value(v) => graph.def(*v).and_then(|n| graph.nodes[n.0 as usize].inputs.first().copied()),
        other => Some(*other),
    };
    for (i, node) in graph.nodes.iter().enumerate() {
        let Op::Attention(desc) = &node.op else { continue };
        for operand in &node.inputs {
            let Some(Operand::State(s)) = written(operand) else { continue };
            let Some(state) = module.states.get(s.0 as usize) else { continue };
            let StateKind::Ring { window } = state.kind else { continue };
            let retained = (window as usize).min(state.ty.shape[2]);
            let fits = desc.window.is_some_and(|w| w <= retained);
            require(
                fits,
                || at_node(graph, i),
                || {
                    let sees = desc.window.map_or("all positions".to_owned(), |w| format!("{w} positions"));
                    format!("it reads {sees}, but the ring {:?} keeps {retained}", state.name)
                },
            )?;
        }
    }
    Ok(())
}

fn check_row_spaces(module: &Module, graph: &Graph) -> Result<(), VerifyError> {
    let spaces = graph.row_spaces(module);
    for (i, node) in graph.nodes.iter().enumerate() {
        let signature = node.op.signature();
        let mut used = node.inputs.iter().enumerate().filter_map(|(at, input)| match input {
            Operand::Value(v) if signature.get(at) != Some(&Kind::State) => Some(spaces[v.0 as usize]),
            _ => None,
        });
        let fits = if matches!(node.op, Op::GatherRows) {
            used.eq([RowSpace::Tokens, RowSpace::Outputs])
        } else {
            let first = used.next();
            used.all(|s| Some(s) == first)
                && (node.op.effect() == Effect::None || first != Some(RowSpace::Outputs))
        };
        require(fits, || at_node(graph, i), || "token rows and output rows mix".into())?;
    }
    Ok(())
}
