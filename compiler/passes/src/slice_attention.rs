//! Pass `slice_attention`: attention as several slices of its heads, each with a sum of its own.
//!
//! Slices are for hosts: each has the rows of the projections, the KV cache and the columns of the last projection
//! for some key-value heads, with the query heads that read them ([`moec_ir::heads`]). A layer costs one copy of its
//! rows to each host and one sum back.
//!
//! ```text
//! y = attention(x Qᵀ, x Kᵀ, x Vᵀ)        y_i = attention(x Q_iᵀ, x K_iᵀ, x V_iᵀ) O_iᵀ
//! out = y Oᵀ                        →    out = (y_0 + y_1) + y_2 …
//! ```
//!
//! As with [experts](super::slice_experts), sums are in the order of the slices, and a program with as many slices on
//! one host computes the same bits. Slices are of whole key-value heads, about equally many.

use moec_base::error::{Error, Result};
use moec_ir::heads::Heads;
use moec_ir::{
    Axis, Module, Node, NodeId, Op, Operand, Part, Patch, Scope, StateDecl, StateId, Type, ValueId, Weight,
    WeightExpr, WeightId,
};
use std::collections::BTreeMap;

/// Cuts the heads of every layer into as many slices as `slices` says of it. Layers whose heads cannot be separated,
/// or are fewer, stay whole.
///
/// # Errors
/// More weights or states than a plan can have. A bug of the compiler: attention of another form.
pub fn slice_attention(module: &mut Module, slices: &dyn Fn(u32) -> usize) -> Result<()> {
    let layers: Vec<_> = module.entries.iter().map(Heads::by_layer).collect();
    let mut declared = Declared::default();
    for (index, own) in layers.iter().enumerate() {
        // From the last layer on: the numbers of nodes before it stay.
        for (&layer, heads) in own.iter().rev() {
            let slices = slices(layer);
            let separate = |of: &BTreeMap<u32, Result<Heads, String>>| {
                of.get(&layer).is_some_and(|h| h.as_ref().is_ok_and(|h| h.count >= slices))
            };
            let Ok(heads) = heads else { continue };
            if slices < 2 || !layers.iter().all(separate) {
                continue;
            }
            let patch = split(module, index, heads, slices, &mut declared)?;
            let graph = module.entries.get_mut(index).ok_or_else(|| Error::bug("no such entry point"))?;
            patch.apply(graph).map_err(|e| Error::bug(e.to_string()))?;
        }
    }
    Ok(())
}

/// Slices of weights and states that several entry points share.
#[derive(Default)]
struct Declared {
    weights: BTreeMap<WeightId, Vec<WeightId>>,
    states: BTreeMap<StateId, Vec<StateId>>,
}

/// Number of the first head of slice `i`.
const fn start(count: usize, slices: usize, i: usize) -> usize {
    count * i / slices
}

impl Declared {
    /// The slices of a weight that has equally many rows, or columns, for each of `count` heads.
    fn weight(
        &mut self,
        module: &mut Module,
        id: WeightId,
        axis: Axis,
        [count, slices]: [usize; 2],
    ) -> Result<Vec<WeightId>> {
        if let Some(known) = self.weights.get(&id) {
            return Ok(known.clone());
        }
        let whole = module.weight(id).clone();
        let at = match axis {
            Axis::Rows => whole.shape.len().saturating_sub(2),
            Axis::Cols => whole.shape.len().saturating_sub(1),
        };
        let each = whole.shape.get(at).copied().unwrap_or(0) / count;
        let mut own = Vec::with_capacity(slices);
        for i in 0..slices {
            let [first, end] = [i, i + 1].map(|i| start(count, slices, i) * each);
            let (start, len, of) = (first, end - first, Box::new(whole.expr.clone()));
            let mut shape = whole.shape.clone();
            shape[at] = len;
            let expr = WeightExpr::Slice { axis, start, step: 1, len, of };
            own.push(WeightId(number(module.weights.len())?));
            let name = format!("{}.{}", whole.name, Part::of_slice(number(i)?));
            module.weights.push(Weight { name, shape, expr, ..whole.clone() });
        }
        self.weights.insert(id, own.clone());
        Ok(own)
    }

    /// The slices of a state; the first replaces it.
    fn state(
        &mut self,
        module: &mut Module,
        id: StateId,
        [count, slices]: [usize; 2],
    ) -> Result<Vec<StateId>> {
        if let Some(known) = self.states.get(&id) {
            return Ok(known.clone());
        }
        let whole = module.state(id).clone();
        let mut own = Vec::with_capacity(slices);
        for i in 0..slices {
            let name = format!("{}.{}", whole.name, Part::of_slice(number(i)?));
            let len = start(count, slices, i + 1) - start(count, slices, i);
            let slice = StateDecl { name, ty: of_heads(&whole.ty, len, count), ..whole.clone() };
            if let Some(first) = module.states.get_mut(id.0 as usize).filter(|_| i == 0) {
                *first = slice;
                own.push(id);
            } else {
                own.push(StateId(number(module.states.len())?));
                module.states.push(slice);
            }
        }
        self.states.insert(id, own.clone());
        Ok(own)
    }
}

/// The type of a value, or state, for `len` of `count` heads.
fn of_heads(ty: &Type, len: usize, count: usize) -> Type {
    let mut ty = ty.clone();
    // `[rows, channels]`, or `[slots, heads, rows, channels]` of a state.
    if let Some(extent) = ty.shape.get_mut(1) {
        *extent = *extent / count * len;
    }
    ty
}

/// Cuts the heads of a layer in one entry point.
fn split(
    module: &mut Module,
    entry: usize,
    heads: &Heads,
    slices: usize,
    declared: &mut Declared,
) -> Result<Patch> {
    let graph = module.entries.get(entry).ok_or_else(|| Error::bug("no such entry point"))?.clone();
    let (count, end) = (heads.count, heads.out());
    let node = |id: NodeId| graph.nodes.get(id.0 as usize).ok_or_else(|| Error::bug("no such node"));
    let projection = node(end)?;
    let &[out] = projection.outputs.as_slice() else { return Err(Error::bug("a projection of no value")) };
    let mut patch = Patch::new(format!("cut the heads of {}", projection.scope), &graph);
    heads.nodes.iter().for_each(|&id| patch.remove(id));
    let mut sum: Option<ValueId> = None;
    for i in 0..slices {
        let len = start(count, slices, i + 1) - start(count, slices, i);
        let scope = Scope { part: Part::of_heads(number(i)?), ..projection.scope.clone() };
        let mut own: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        let mut y = out;
        for &id in &heads.nodes {
            let whole = node(id)?;
            let mut op =
                whole.op.of_heads(len, count).ok_or_else(|| Error::bug("heads that are not apart"))?;
            let mut inputs = Vec::with_capacity(whole.inputs.len());
            for (at, &input) in whole.inputs.iter().enumerate() {
                inputs.push(match (&whole.op, input) {
                    (_, Operand::Value(v)) => Operand::Value(own.get(&v).copied().unwrap_or(v)),
                    (_, Operand::State(s)) => Operand::State(declared.state(module, s, [count, slices])?[i]),
                    // One slice adds the bias of the result.
                    (Op::Linear { .. }, Operand::Weight(bias)) if id == end && at > 1 => {
                        if i > 0 {
                            op = Op::Linear { bias: false };
                            continue;
                        }
                        Operand::Weight(bias)
                    }
                    (Op::Linear { .. } | Op::Attention(_), Operand::Weight(w)) => {
                        let rows = id != end && module.weight(w).shape.len() > 1;
                        let axis = if rows { Axis::Rows } else { Axis::Cols };
                        Operand::Weight(declared.weight(module, w, axis, [count, slices])?[i])
                    }
                    // Norms of heads have one weight for all.
                    (_, Operand::Weight(w)) => Operand::Weight(w),
                });
            }
            let outputs = whole.outputs.iter().map(|&v| {
                let ty = graph.ty(v);
                let new = match (id == end, i) {
                    (true, _) => patch.value(ty.clone()),
                    (false, 0) => {
                        patch.retype(v, of_heads(ty, len, count));
                        v
                    }
                    (false, _) => patch.value(of_heads(ty, len, count)),
                };
                own.insert(v, new);
                y = new;
                new
            });
            let outputs: Vec<ValueId> = outputs.collect();
            patch.add(end, Node { op, inputs, outputs, scope: scope.clone() });
        }
        sum = Some(match sum {
            None => y,
            Some(before) => {
                let to = if i + 1 == slices { out } else { patch.value(graph.ty(out).clone()) };
                let inputs = vec![before.into(), y.into()];
                let scope = projection.scope.clone();
                patch.add(end, Node { op: Op::Add, inputs, outputs: vec![to], scope });
                to
            }
        });
    }
    Ok(patch)
}

fn number(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::limit(format!("{n} is past what a plan can hold")))
}
