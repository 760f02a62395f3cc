//! Rules that look at one function.

use super::{HARD_GRAPH_BYTES, Scope};
use crate::exec::operators as executable;
use crate::package::{Blob, Dtype, Function, Op, Origin, Place, Stored, ValueId};
use crate::program::{Counted, ELEMENT};
use std::collections::BTreeSet;

/// Operators that people expect on the Neural Engine and that it lacks, with what to do.
const LACKING: &[(&str, &str)] = &[
    ("topk", "route on the CPU"),
    ("argsort", "sort on the CPU"),
    ("reduce_argmax", "choose on the CPU"),
    ("reduce_argmin", "choose on the CPU"),
    ("gather", "gather rows on the CPU"),
    ("gather_along_axis", "gather rows on the CPU"),
    ("gather_nd", "gather rows on the CPU"),
    ("scatter", "scatter rows on the CPU"),
    ("scatter_along_axis", "scatter rows on the CPU"),
    ("scatter_nd", "scatter rows on the CPU"),
    ("non_zero", "its result has no fixed shape"),
    ("cond", "export one function per branch"),
    ("while_loop", "unroll it"),
    ("dynamic_quantize", "quantise weights only"),
];

/// Alignment of capacities: the Neural Engine's, and a tile of rows.
const ROWS: usize = 16;
/// Alignment of the innermost dimension of states.
const STATE: usize = 32;
/// Outputs that a grouped convolution must stay below.
const GROUPED: usize = 65_536;

fn at(function: &str, op: &Op) -> Place {
    Place::item(function, op.label())
}

fn value(function: &str, f: &Function, id: ValueId) -> Place {
    Place::item(function, format!("value `{}`", f.values[id.0].name))
}

pub(super) fn operators(scope: &mut Scope<'_>, name: &str, f: &Function) {
    let known = executable();
    for op in &f.ops {
        let lacking = LACKING.iter().find(|(kind, _)| *kind == op.kind);
        match lacking {
            Some((_, hint)) => {
                scope.error(at(name, op), format!("the Neural Engine has no such operator: {hint}"));
            }
            None if known.contains(&op.kind.as_str()) => {}
            None => scope.error(at(name, op), "an operator that moec neither emits nor executes"),
        }
    }
}

/// Whether a value is a weight: a constant, or made of constants when the model is loaded.
fn is_weight(f: &Function, id: ValueId) -> bool {
    let constant = |id| f.constant(id).is_some_and(|c| c.ty.elements() > 1);
    constant(id) || f.source(id).is_some_and(|op| op.kind.starts_with("constexpr_"))
}

pub(super) fn projections(scope: &mut Scope<'_>, name: &str, f: &Function) {
    for op in &f.ops {
        let weight = |p| op.arg(p).filter(|&id| is_weight(f, id));
        match op.kind.as_str() {
            "linear" => scope.error(at(name, op), "`linear`: write it as a 1×1 convolution"),
            "matmul" if weight("x").or(weight("y")).is_some() => {
                scope.error(at(name, op), "`matmul` with weights: write it as a 1×1 convolution");
            }
            "conv" => {
                let shape = op.arg("weight").and_then(|id| f.value(id)).map(|v| &v.ty.shape);
                if shape.is_some_and(|s| s.len() != 4 || s[2..].iter().any(|&d| d != 1)) {
                    scope.error(
                        at(name, op),
                        format!("weight of shape {shape:?}: not `[outputs, inputs, 1, 1]`"),
                    );
                }
            }
            _ => {}
        }
    }
}

pub(super) fn types(scope: &mut Scope<'_>, name: &str, f: &Function) {
    for (i, v) in f.values.iter().enumerate() {
        let place = || value(name, f, ValueId(i));
        match (&v.origin, v.ty.dtype) {
            (Origin::Constant(c), Dtype::F32) if c.ty.elements() > 1 => {
                scope.error(place(), format!("a constant of {}: expected fp16", v.ty));
            }
            // Parameters, and what `constexpr` operators read.
            (Origin::Constant(_), _) | (_, Dtype::F16) | (Origin::Input, Dtype::I32) => {}
            _ => scope.error(place(), format!("{}: expected fp16", v.ty)),
        }
    }
}

pub(super) fn ranks(scope: &mut Scope<'_>, name: &str, f: &Function) {
    for (i, v) in f.values.iter().enumerate() {
        let message = || format!("{} dimensions; the Neural Engine takes four", v.ty.shape.len());
        match v.ty.shape.len() {
            // A table of `constexpr_lut_to_dense` has two dimensions more than the weight.
            _ if matches!(v.origin, Origin::Constant(_)) => {}
            0..=4 => {}
            5 => scope.warning(value(name, f, ValueId(i)), message()),
            _ => scope.error(value(name, f, ValueId(i)), message()),
        }
    }
}

pub(super) fn slices(scope: &mut Scope<'_>, name: &str, f: &Function) {
    for op in f.ops.iter().filter(|op| op.kind.starts_with("slice_")) {
        let dynamic = ["begin", "end", "size"]
            .into_iter()
            .find(|p| op.arg(p).is_some_and(|id| f.constant(id).is_none()));
        let Some(parameter) = dynamic else { continue };
        let message = format!("`{parameter}` is computed: the Neural Engine slices at constants");
        match op.kind.as_str() {
            // Exporters write caches so; whether it stays on the Neural Engine depends on the operating
            // system.
            "slice_update" => {
                scope.warning(at(name, op), message + "; write the cache by a mask or a matrix product");
            }
            _ => scope.error(at(name, op), message),
        }
    }
}

pub(super) fn capacities(scope: &mut Scope<'_>, name: &str, f: &Function) {
    if let Some(capacity) = name.strip_prefix("cap").and_then(|n| n.parse::<usize>().ok()) {
        if capacity == 0 || !capacity.is_multiple_of(ROWS) {
            scope.error(Place::function(name), format!("a capacity of {capacity}: not a multiple of {ROWS}"));
        }
        for &id in f.inputs.iter().filter(|_| capacity > 0) {
            let shape = &f.values[id.0].ty.shape;
            if !shape.first().is_some_and(|d| d.is_multiple_of(capacity)) {
                scope.error(
                    value(name, f, id),
                    format!("shape {shape:?} holds no whole groups of {capacity} rows"),
                );
            }
        }
    }
    for op in f.ops.iter().filter(|op| op.kind == "conv") {
        let shape = op.arg("x").and_then(|id| f.value(id)).map_or(&[][..], |v| &v.ty.shape);
        let places: usize = shape.iter().enumerate().filter(|(i, _)| *i != 1).map(|(_, d)| d).product();
        if !places.is_multiple_of(ROWS) {
            scope.warning(at(name, op), format!("{places} rows: not a multiple of {ROWS}"));
        }
    }
}

pub(super) fn grouped(scope: &mut Scope<'_>, name: &str, f: &Function) {
    for op in f.ops.iter().filter(|op| op.kind == "conv") {
        let groups = op.arg("groups").and_then(|id| f.constant(id)?.integers(&scope.package.weights));
        let outputs = op.arg("weight").and_then(|id| f.value(id)?.ty.shape.first().copied()).unwrap_or(0);
        if groups.is_some_and(|g| g.first().is_some_and(|&g| g > 1)) && outputs >= GROUPED {
            scope.error(
                at(name, op),
                format!("{outputs} outputs in groups: fewer than {GROUPED} are possible"),
            );
        }
    }
}

pub(super) fn states(scope: &mut Scope<'_>, name: &str, f: &Function) {
    let limit = scope.limits.states;
    if f.states.len() > limit {
        scope.error(Place::function(name), format!("{} states, more than {limit}", f.states.len()));
    }
    for &id in &f.states {
        let uses = |kinds: [&str; 2], parameters: [&str; 2]| {
            let with =
                |op: &&Op| kinds.iter().zip(parameters).any(|(k, p)| op.kind == *k && op.arg(p) == Some(id));
            f.ops.iter().any(|op| with(&op))
        };
        if !uses(["read_state", "coreml_update_state"], ["input", "state"]) {
            scope.error(value(name, f, id), "a state that is never read");
        }
        if !uses(["write_state", "coreml_update_state"], ["input", "state"]) {
            scope.error(value(name, f, id), "a state that is never written");
        }
        let shape = &f.values[id.0].ty.shape;
        if !shape.last().is_some_and(|d| d.is_multiple_of(STATE)) {
            let message =
                format!("a state of shape {shape:?}: the last dimension is not a multiple of {STATE}");
            scope.error(value(name, f, id), message);
        }
    }
}

/// The weights that a function reads, each once.
pub(super) fn blobs(f: &Function) -> BTreeSet<Blob> {
    let blob = |v: &crate::package::Value| match &v.origin {
        Origin::Constant(c) => match c.stored {
            Stored::Blob(blob) => Some(blob),
            _ => None,
        },
        _ => None,
    };
    f.values.iter().filter_map(blob).collect()
}

pub(super) fn last_axis(scope: &mut Scope<'_>, name: &str, f: &Function) {
    let bytes = scope.limits.last_axis_bytes;
    if bytes <= ELEMENT as usize {
        return;
    }
    for (i, v) in f.values.iter().enumerate() {
        let id = ValueId(i);
        let computed = f.source(id).is_some_and(|op| !op.kind.starts_with("constexpr_"));
        if computed && !f.outputs.contains(&id) && v.ty.shape.last() == Some(&1) && v.ty.elements() > 1 {
            scope.error(
                value(name, f, id),
                format!("{}: a last axis of 1 is padded to {bytes} bytes; put rows there", v.ty),
            );
        }
    }
}

/// Rows are the entries of a tensor's first axis: if their bytes are a multiple of the alignment, each begins
/// aligned in a tensor that does (NPUMoE, §3.2).
pub(super) fn aligned(scope: &mut Scope<'_>, name: &str, f: &Function) {
    let unit = scope.limits.row_bytes;
    for &id in f.inputs.iter().chain(&f.outputs).chain(&f.states) {
        let Some(v) = f.value(id) else { continue };
        let row = v.ty.bytes() / v.ty.shape.first().copied().unwrap_or(1).max(1);
        if !row.is_multiple_of(unit.max(1)) {
            let message = format!("{}: rows of {row} bytes are not multiples of {unit}", v.ty);
            scope.warning(value(name, f, id), message);
        }
    }
}

/// Bytes of a function's weights as dense f16 numbers.
fn dense_bytes(f: &Function) -> u64 {
    let halves = |elements: usize| elements as u64 * ELEMENT;
    let constexpr = |op: &&Op| op.kind.starts_with("constexpr_");
    let made: u64 = f
        .ops
        .iter()
        .filter(constexpr)
        .flat_map(|op| &op.results)
        .map(|id| halves(f.values[id.0].ty.elements()))
        .sum();
    let read: BTreeSet<ValueId> =
        f.ops.iter().filter(constexpr).flat_map(|op| op.args.values().flatten().copied()).collect();
    let mut seen = BTreeSet::new();
    let plain = f.values.iter().enumerate().filter_map(|(i, v)| match &v.origin {
        Origin::Constant(c) if !read.contains(&ValueId(i)) => match c.stored {
            Stored::Blob(blob) => seen.insert(blob).then_some(blob.len as u64),
            _ => None,
        },
        _ => None,
    });
    made + plain.sum::<u64>()
}

pub(super) fn size(scope: &mut Scope<'_>, name: &str, f: &Function) {
    let bytes: u64 = match scope.limits.counted {
        Counted::Stored => blobs(f).iter().map(|b| b.len as u64).sum(),
        Counted::Dense => dense_bytes(f),
    };
    let limit = scope.limits.graph_bytes.min(HARD_GRAPH_BYTES - 1);
    if bytes > limit {
        let message =
            format!("{bytes} bytes of weights, more than {limit}: put fewer experts or rows into a graph");
        scope.error(Place::function(name), message);
    }
}
