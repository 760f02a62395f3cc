//! Static graphs and the experts that they compute: printing and parsing.

use super::attrs::{Attrs, Value};
use super::cursor::{Cursor, Parsed};
use super::items::with_attrs;
use super::lex::quote;
use crate::plan::{
    ExpertSet, GraphDecl, GraphGroup, GraphPart, HotNeurons, Overflow, PartAttention, Plan, Port,
};
use std::fmt;

fn ports(ports: &[Port]) -> String {
    let one = |p: &Port| format!("port(name = {}, shape = {:?})", quote(&p.name), p.shape);
    format!("[{}]", ports.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// Writes the graphs, sets and parts of a plan, a line each.
pub(super) fn write(f: &mut fmt::Formatter<'_>, plan: &Plan) -> fmt::Result {
    for (i, g) in plan.graphs.iter().enumerate() {
        let (inputs, outputs) = (ports(&g.inputs), ports(&g.outputs));
        write!(f, "graph {i} {} {}", quote(&g.package), quote(&g.function))?;
        let state = if g.stateful { ", stateful = true" } else { "" };
        writeln!(f, " {{inputs = {inputs}, outputs = {outputs}{state}}}")?;
    }
    for (i, s) in plan.sets.iter().enumerate() {
        let group = |g: &GraphGroup| {
            format!("group(graph = {}, capacity = {}, experts = {:?})", g.graph, g.capacity, g.experts)
        };
        let groups: Vec<_> = s.groups.iter().map(group).collect();
        write!(
            f,
            "set {i} {{layer = {}, overflow = {}, capacities = {:?}, groups = [{}]",
            s.layer,
            s.overflow,
            s.capacities,
            groups.join(", ")
        )?;
        if let Some(HotNeurons { batch, neurons }) = s.hot {
            write!(f, ", hot = hot(batch = {batch}, neurons = {neurons})")?;
        }
        writeln!(f, "}}")?;
    }
    for (i, p) in plan.parts.iter().enumerate() {
        write!(f, "part {i} {{graphs = {:?}, inputs = {}, outputs = {}", p.graphs, p.inputs, p.outputs)?;
        if let Some(PartAttention { angles, context, window, apart }) = p.attention {
            write!(f, ", attention = attention(angles = {angles}, context = {context}")?;
            if let Some(window) = window {
                write!(f, ", window = {window}")?;
            }
            f.write_str(if apart { ", apart = true)" } else { ")" })?;
        }
        writeln!(f, "}}")?;
    }
    Ok(())
}

/// A list whose items are words with arguments: `[port(…), …]`.
pub(super) fn items<'t, T>(
    c: &Cursor<'t>,
    a: &mut Attrs<'t>,
    key: &str,
    word: &str,
    read: impl Fn(&Cursor<'t>, &mut Attrs<'t>) -> Parsed<T>,
) -> Parsed<Vec<T>> {
    a.required(c, key, &format!("a list of `{word}(…)`"), |v, c| {
        let Value::List(list) = v else { return Ok(None) };
        let mut found = Vec::new();
        for item in list {
            match item {
                Value::Word(w, mut args) if w == word => {
                    found.push(read(c, &mut args)?);
                    args.finish(c)?;
                }
                _ => return Ok(None),
            }
        }
        Ok(Some(found))
    })
}

fn port<'t>(c: &Cursor<'t>, a: &mut Attrs<'t>) -> Parsed<Port> {
    let name = a.string(c, "name")?;
    let four = |v: Value<'t>, _: &Cursor<'t>| match v {
        Value::List(items) => Ok(items
            .into_iter()
            .map(Value::number)
            .collect::<Option<Vec<u32>>>()
            .and_then(|s| s.try_into().ok())),
        _ => Ok(None),
    };
    Ok(Port { name, shape: a.required(c, "shape", "four extents", four)? })
}

/// Reads a graph, behind its index.
pub(super) fn graph(c: &mut Cursor<'_>) -> Parsed<GraphDecl> {
    let package = c.string("a path")?;
    let function = c.string("a function")?;
    with_attrs(c, |c, a| {
        Ok(GraphDecl {
            package,
            function,
            inputs: items(c, a, "inputs", "port", port)?,
            outputs: items(c, a, "outputs", "port", port)?,
            stateful: a.flag(c, "stateful")?,
        })
    })
}

/// Reads a set of experts, behind its index.
pub(super) fn set(c: &mut Cursor<'_>) -> Parsed<ExpertSet> {
    with_attrs(c, |c, a| {
        Ok(ExpertSet {
            layer: a.int(c, "layer")?,
            overflow: a.variant(c, "overflow", "`prune` or `spill`", |word, _| Ok(Overflow::parse(word)))?,
            capacities: a.list(c, "capacities", "a list of capacities", Value::number)?,
            groups: items(c, a, "groups", "group", |c, a| {
                Ok(GraphGroup {
                    graph: a.int(c, "graph")?,
                    capacity: a.int(c, "capacity")?,
                    experts: a.list(c, "experts", "a list of experts", Value::number)?,
                })
            })?,
            hot: a.optional_variant(c, "hot", "`hot(…)`", |word, args| {
                if word != "hot" {
                    return Ok(None);
                }
                Ok(Some(HotNeurons { batch: args.int(c, "batch")?, neurons: args.int(c, "neurons")? }))
            })?,
        })
    })
}

/// Reads a part, behind its index.
pub(super) fn part(c: &mut Cursor<'_>) -> Parsed<GraphPart> {
    with_attrs(c, |c, a| {
        Ok(GraphPart {
            graphs: a.list(c, "graphs", "a list of graphs", Value::number)?,
            inputs: a.int(c, "inputs")?,
            outputs: a.int(c, "outputs")?,
            attention: a.optional_variant(c, "attention", "`attention(…)`", |word, args| {
                if word != "attention" {
                    return Ok(None);
                }
                Ok(Some(PartAttention {
                    angles: args.int(c, "angles")?,
                    context: args.int(c, "context")?,
                    window: args.optional_int(c, "window")?,
                    apart: args.flag(c, "apart")?,
                }))
            })?,
        })
    })
}
