//! Steps that are functions of the runtime: what other units compute, and what asks flash for experts.

use super::entry::Builder;
use super::frame::{Frame, Home};
use super::int;
use crate::offload::PartCut;
use moec_base::error::{Error, Result};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Arg, Builtin, Code, FETCHED, Grid, RowSpace, Step};
use moec_ir::{Graph, Node, Op, Operand, ValueId};

/// A function of the runtime, and the values that it reads and gives.
struct Call<'a> {
    code: Builtin,
    unit: u32,
    inputs: &'a [ValueId],
    outputs: &'a [ValueId],
}

impl Call<'_> {
    /// Its step: it gets values by their first columns.
    fn step(&self, frame: &mut Frame<'_>, at: usize, spaces: &[RowSpace]) -> Result<Step> {
        for &v in self.outputs {
            let home = frame.buffer(format!("%{}", v.0), frame.graph.ty(v), 0)?;
            frame.homes[v.0 as usize] = Some(home);
        }
        let mut args = Vec::new();
        for &v in self.inputs.iter().chain(self.outputs) {
            let ty = frame.graph.ty(v);
            match frame.home(v)? {
                Home::Buffer { buffer, column: 0, ld } if ty.shape.len() < 2 || ld == ty.cols() => {
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
    /// The step of a node that a unit beside the CPU takes part in. It gets values by their first columns.
    pub(super) fn offloaded(
        &self,
        frame: &mut Frame<'_>,
        at: usize,
        node: &Node,
        spaces: &[RowSpace],
    ) -> Result<Step> {
        let graph = frame.graph;
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
        call.step(frame, at, spaces)
    }

    /// The step of a part that static graphs compute.
    pub(super) fn part(
        &self,
        frame: &mut Frame<'_>,
        at: usize,
        cut: &PartCut,
        spaces: &[RowSpace],
    ) -> Result<Step> {
        let attends = self.statics.parts.get(cut.part as usize).is_some_and(|p| p.attention.is_some());
        let mut inputs = vec![cut.cut.x];
        inputs.extend(cut.cut.angles.filter(|_| attends));
        inputs.extend(attends.then_some([Graph::POS, Graph::SLOT]).into_iter().flatten());
        let code = Builtin::Part { part: cut.part };
        Call { code, unit: self.statics.unit, inputs: &inputs, outputs: &[cut.cut.y] }.step(frame, at, spaces)
    }
}

/// The step of a `fetch`: the table stays where it is. Of experts that live on several units it asks for the CPU's, and
/// there is none where those are none.
pub(super) fn fetched(
    frame: &mut Frame<'_>,
    at: usize,
    node: &Node,
    layer: usize,
    units: Option<&[u32]>,
    spaces: &[RowSpace],
) -> Result<Option<Step>> {
    let value = |operand: &Operand| match operand {
        Operand::Value(v) => Ok(*v),
        _ => Err(Error::bug("a `fetch` of something that is not a value")),
    };
    let table = node.inputs.first().ok_or_else(|| Error::bug("a `fetch` of nothing"))?;
    let (whole, out) = (value(table)?, node.outputs[0]);
    let mut home = frame.home(whole)?;
    frame.homes[out.0 as usize] = Some(home);
    if let Some(units) = units {
        for &unit in units {
            if let Some(&own) = frame.tables.get(&(whole, unit)) {
                frame.tables.insert((out, unit), own);
            }
        }
        if !units.contains(&0) {
            return Ok(None);
        }
        home = frame.tables.get(&(whole, 0)).copied().unwrap_or(home);
    }
    let (mut args, mut strides, mut rows) = (Vec::new(), [0; FETCHED], 0);
    let scores = node.inputs.iter().skip(1).zip(&mut strides);
    for (operand, stride) in scores {
        let v = value(operand)?;
        let Home::Buffer { buffer, column, ld } = frame.home(v)? else {
            return Err(Error::bug("scores that are a state"));
        };
        rows = frame.graph.ty(v).rows();
        *stride = int(ld)?;
        args.push(Arg::Buffer(buffer, int(column * 4)?));
    }
    let Home::Buffer { buffer, .. } = home else { return Err(Error::bug("a table that is a state")) };
    // The table's words tell for how many experts per token it is laid out.
    let words: usize = frame.graph.ty(value(table)?).shape.iter().product();
    let own = node.inputs.get(1).ok_or_else(|| Error::bug("a `fetch` without scores"))?;
    let bare = DispatchLayout { rows: 0, k: 0, experts: frame.graph.ty(value(own)?).cols() };
    let k = words.saturating_sub(bare.words()) / (2 * rows.max(1));
    args.push(Arg::Buffer(buffer, 0));
    let step = Step {
        unit: 0,
        code: Code::Builtin(Builtin::Fetch { layer: int(layer)?, rows: int(rows)?, k: int(k)?, strides }),
        args,
        rows: spaces[node.outputs[0].0 as usize],
        grid: Grid::One,
        barrier: true,
        deps: Vec::new(),
        node: int(at)?,
    };
    Ok(Some(step))
}
