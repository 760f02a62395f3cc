//! Steps that call functions of the runtime: experts and subgraphs of other units, capacity limits, and
//! requests for experts on disk.

use super::entry::Builder;
use super::entry_layout::{EntryLayout, ValueLocation};
use super::int;
use crate::outline_graphs::SubgraphCall;
use moec_base::error::{Error, Result};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Arg, Builtin, Code, Grid, MAX_REQUEST_SCORES, RowSpace, Step};
use moec_ir::{Graph, Node, Op, Operand, ValueId};

/// A function of the runtime, with the values that it reads and writes.
struct Call<'a> {
    code: Builtin,
    unit: u32,
    inputs: &'a [ValueId],
    outputs: &'a [ValueId],
}

impl Call<'_> {
    /// The step of the call. Its values must be whole buffers, not views.
    fn step(&self, entry: &mut EntryLayout<'_>, at: usize, spaces: &[RowSpace]) -> Result<Step> {
        for &v in self.outputs {
            let location = entry.buffer(format!("%{}", v.0), entry.graph.ty(v), 0)?;
            entry.locations[v.0 as usize] = Some(location);
        }
        let mut args = Vec::new();
        for &v in self.inputs.iter().chain(self.outputs) {
            let ty = entry.graph.ty(v);
            match entry.location(v)? {
                ValueLocation::Buffer { buffer, column: 0, ld } if ty.shape.len() < 2 || ld == ty.cols() => {
                    args.push(Arg::Buffer(buffer, 0));
                }
                _ => {
                    return Err(Error::bug(format!(
                        "%{} is a view, which {:?} does not take",
                        v.0, self.code
                    )));
                }
            }
        }
        Ok(Step {
            unit: self.unit,
            code: Code::Builtin(self.code),
            args,
            rows: spaces[self.outputs[0].0 as usize],
            grid: Grid::One,
            barrier: self.unit == 0,
            deps: Vec::new(),
            node: int(at)?,
        })
    }
}

impl Builder<'_> {
    /// The step of a node of static graphs: experts, or a capacity limit. Its values must be whole buffers,
    /// not views.
    pub(super) fn outlined(
        &self,
        entry: &mut EntryLayout<'_>,
        at: usize,
        node: &Node,
        spaces: &[RowSpace],
    ) -> Result<Step> {
        let graph = entry.graph;
        let decoded = (!graph.kind.is_prefill()).then(|| graph.kind.rows() as u32);
        let set = node.scope.layer.and_then(|layer| self.statics.set(layer, decoded));
        let set = set.ok_or_else(|| Error::bug(format!("no set of experts for `{}`", node.scope)))?;
        let value = |i: usize| match node.inputs.get(i) {
            Some(&Operand::Value(v)) => Ok(v),
            _ => Err(Error::bug(format!("`{}` without operand {i}", node.op.name()))),
        };
        let (code, inputs, unit) = if let Op::LimitCapacity(_) = node.op {
            let (ids, added) = (value(0)?, value(1)?);
            let (k, channels) = (int(graph.ty(ids).cols())?, int(graph.ty(added).cols())?);
            (Builtin::LimitCapacity { set: int(set)?, k, channels }, vec![ids, added], 0)
        } else {
            let (x, table) = (value(0)?, value(1)?);
            let (rows, slots) = (graph.ty(x).rows(), graph.ty(node.outputs[0]).rows());
            let (k, hidden) = (int(slots / rows.max(1))?, int(graph.ty(x).cols())?);
            let code = Builtin::Experts { set: int(set)?, rows: int(rows)?, k, hidden };
            (code, vec![x, table], self.statics.unit)
        };
        let call = Call { code, unit, inputs: &inputs, outputs: &node.outputs };
        call.step(entry, at, spaces)
    }

    /// The step of a subgraph that static graphs compute.
    pub(super) fn part(
        &self,
        entry: &mut EntryLayout<'_>,
        at: usize,
        call: &SubgraphCall,
        spaces: &[RowSpace],
    ) -> Result<Step> {
        let attends = self.statics.parts.get(call.part as usize).is_some_and(|p| p.attention.is_some());
        let mut inputs = vec![call.boundary.x];
        inputs.extend(call.boundary.angles.filter(|_| attends));
        inputs.extend(attends.then_some([Graph::POS, Graph::SLOT]).into_iter().flatten());
        let code = Builtin::Subgraph { subgraph: call.part };
        Call { code, unit: self.statics.unit, inputs: &inputs, outputs: &[call.boundary.y] }
            .step(entry, at, spaces)
    }
}

/// The step of a `request_experts`: the table stays where it is. If several units have experts, it requests
/// the CPU's; there is no step if the CPU has none.
pub(super) fn request_experts(
    entry: &mut EntryLayout<'_>,
    at: usize,
    node: &Node,
    layer: usize,
    units: Option<&[u32]>,
    spaces: &[RowSpace],
) -> Result<Option<Step>> {
    let value = |operand: &Operand| match operand {
        Operand::Value(v) => Ok(*v),
        _ => Err(Error::bug("a `request_experts` of something that is not a value")),
    };
    let table = node.inputs.first().ok_or_else(|| Error::bug("a `request_experts` of nothing"))?;
    let (whole, out) = (value(table)?, node.outputs[0]);
    let mut location = entry.location(whole)?;
    entry.locations[out.0 as usize] = Some(location);
    if let Some(units) = units {
        for &unit in units {
            if let Some(&own) = entry.tables.get(&(whole, unit)) {
                entry.tables.insert((out, unit), own);
            }
        }
        if !units.contains(&0) {
            return Ok(None);
        }
        location = entry.tables.get(&(whole, 0)).copied().unwrap_or(location);
    }
    let (mut args, mut strides, mut rows) = (Vec::new(), [0; MAX_REQUEST_SCORES], 0);
    let scores = node.inputs.iter().skip(1).zip(&mut strides);
    for (operand, stride) in scores {
        let v = value(operand)?;
        let ValueLocation::Buffer { buffer, column, ld } = entry.location(v)? else {
            return Err(Error::bug("scores that are a state"));
        };
        rows = entry.graph.ty(v).rows();
        *stride = int(ld)?;
        args.push(Arg::Buffer(buffer, int(column * 4)?));
    }
    let ValueLocation::Buffer { buffer, .. } = location else {
        return Err(Error::bug("a table that is a state"));
    };
    // The words of the table imply its number of experts per token.
    let words: usize = entry.graph.ty(value(table)?).shape.iter().product();
    let own = node.inputs.get(1).ok_or_else(|| Error::bug("a `request_experts` without scores"))?;
    let bare = DispatchLayout { rows: 0, k: 0, experts: entry.graph.ty(value(own)?).cols() };
    let k = words.saturating_sub(bare.words()) / (2 * rows.max(1));
    args.push(Arg::Buffer(buffer, 0));
    let step = Step {
        unit: 0,
        code: Code::Builtin(Builtin::RequestExperts {
            layer: int(layer)?,
            rows: int(rows)?,
            k: int(k)?,
            strides,
        }),
        args,
        rows: spaces[node.outputs[0].0 as usize],
        grid: Grid::One,
        barrier: true,
        deps: Vec::new(),
        node: int(at)?,
    };
    Ok(Some(step))
}
