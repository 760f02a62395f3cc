//! Steps of experts that NDP command streams compute.

use super::entry::{Builder, Placed};
use super::entry_layout::{EntryLayout, ValueLocation};
use super::int;
use moec_backend::CommandStreams;
use moec_base::error::{Error, Result};
use moec_cpu::Selection;
use moec_ir::plan::{Arg, Builtin, Code, Grid, Layout, Step, StreamSet};
use moec_ir::{Op, Operand};

impl Builder<'_> {
    /// The step of a layer's experts on a unit with NDP command streams. It takes rows without conversion,
    /// and weights in the layout of the CPU's kernels.
    pub(super) fn streamed(
        &mut self,
        entry: &mut EntryLayout<'_>,
        place: &Placed<'_>,
        selection: &Selection,
        unit: u32,
        streams: &dyn CommandStreams,
    ) -> Result<Step> {
        let (node, graph) = (place.node, entry.graph);
        let &Op::ExpertFfn { bias, .. } = &node.op else { return Err(Error::bug("a stream of no experts")) };
        let layer = node.scope.layer.ok_or_else(|| Error::bug("experts of no layer"))?;
        let value = |i: usize| match node.inputs.get(i) {
            Some(&Operand::Value(v)) => Ok(v),
            _ => Err(Error::bug("experts without rows")),
        };
        let whole = |location: ValueLocation, cols: usize| match location {
            ValueLocation::Buffer { buffer, column: 0, ld } if ld == cols => Ok(Arg::Buffer(buffer, 0)),
            _ => Err(Error::bug("rows of experts that are a view, which streams do not take")),
        };
        let (x, table, y) = (value(0)?, value(1)?, node.outputs[0]);
        let (rows, hidden, slots) = (graph.ty(x).rows(), graph.ty(x).cols(), graph.ty(y).rows());
        let own = entry.tables.get(&(table, unit)).copied();
        let own = own.map_or_else(|| entry.location(table), Ok)?;
        let ValueLocation::Buffer { buffer: table, .. } = own else {
            return Err(Error::bug("a table that is a state"));
        };
        let mut args = vec![whole(entry.location(x)?, hidden)?, Arg::Buffer(table, 0)];
        let memory = self.assignment.memory(unit);
        for input in 2..node.inputs.len() {
            let Operand::Weight(w) = node.inputs[input] else {
                return Err(Error::bug("an operand that is not a weight"));
            };
            if input > 3 {
                let segment = self.segment(w, Layout::Rows, false, 0)?;
                self.residents.insert((memory, segment), Vec::new());
                args.push(Arg::Segment(segment));
                continue;
            }
            let layout =
                selection.layouts.iter().find(|(i, _)| *i == input).map_or(Layout::Rows, |(_, l)| *l);
            if !streams.reads(layout) {
                let name = &self.assignment.units[unit as usize].name;
                return Err(Error::limit(format!("`{name}` does not read weights as `{}` packs them", self.target.name()))
                    .because(format!("they are stored as {layout:?}"))
                    .hint("its CPU needs AVX-512; or keep experts on the CPU: `experts = \"cpu\"` under `[placement]`"));
            }
            let segment = self.segment(w, layout, false, 0)?;
            self.experts.entry((0, layer)).or_default()[input - 2] = segment;
            self.make_resident(layer, memory, segment)?;
            args.push(Arg::Matrices(segment));
        }
        args.push(whole(entry.location(y)?, hidden)?);
        let shape = match node.inputs.get(3) {
            Some(&Operand::Weight(w)) => self.module.weight(w).shape.clone(),
            _ => Vec::new(),
        };
        let &[experts, _, inner] = shape.as_slice() else {
            return Err(Error::bug("experts whose matrices have no three axes"));
        };
        let set = StreamSet {
            layer,
            unit,
            artifact: format!(
                "artifacts/layers.{layer}.{}.streams",
                self.assignment.units[unit as usize].name
            ),
            experts: int(experts)?,
            hidden: int(hidden)?,
            inner: int(inner)?,
            bias,
        };
        let known = self.streams.iter().position(|s| (s.layer, s.unit) == (layer, unit));
        let index = known.unwrap_or(self.streams.len());
        if known.is_none() {
            self.streams.push(set);
        }
        let code = Builtin::Streams { set: int(index)?, rows: int(rows)?, k: int(slots / rows.max(1))? };
        Ok(Step {
            unit,
            code: Code::Builtin(code),
            args,
            rows: place.rows,
            grid: Grid::One,
            barrier: false,
            deps: Vec::new(),
            node: int(place.at)?,
        })
    }
}
