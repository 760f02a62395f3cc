//! The least time that a machine needs for a step: its roofline (Williams, Waterman and Patterson, *Roofline: An
//! Insightful Visual Performance Model for Multicore Architectures*, 2009).

use moec_cpu::ComputeType;
use moec_cpu::roofline::Roofline;
use moec_ir::graph::Node;
use moec_ir::op::Effect;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Plan, RowSpace, Segment, StateBuf, Step};
use moec_ir::types::Type;
use moec_runtime::Row;
use std::time::Duration;

/// A call of an entry point.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Call {
    rows: f64,
    sequences: f64,
    /// Positions of a sequence after the call.
    length: f64,
    /// Mean number of positions that a row sees, its own included.
    seen: f64,
}

impl Call {
    pub(super) fn of(rows: &[Row]) -> Self {
        let positions = rows.iter().map(|row| row.pos as f64 + 1.0);
        let mut slots: Vec<u32> = rows.iter().map(|row| row.slot).collect();
        slots.dedup();
        Self {
            rows: rows.len() as f64,
            sequences: slots.len() as f64,
            length: positions.clone().fold(0.0, f64::max),
            seen: positions.sum::<f64>() / rows.len().max(1) as f64,
        }
    }
}

/// Arithmetic of a step, and bytes that it must read from memory and write to it. Rows of activations do not count:
/// caches may hold them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Work {
    /// A multiply-add is two.
    pub(super) operations: f64,
    /// Bytes of weights and states, each once.
    pub(super) bytes: f64,
    compute: ComputeType,
}

impl Work {
    /// Of a step of the CPU; `None` for one without weights and states. Every choice of an expert counts as
    /// equally likely.
    pub(super) fn of(plan: &Plan, entry: &Entry, step: &Step, node: &Node, call: Call) -> Option<Self> {
        let Code::Kernel(kernel) = step.code else { return None };
        let compute = ComputeType::of_symbol(&plan.kernels.get(kernel as usize)?.symbol);
        let rows = match step.rows {
            RowSpace::Tokens => call.rows,
            RowSpace::Outputs => call.rows.min(f64::from(entry.out_rows)),
        };
        let mut work = Self { compute, ..Self::default() };
        let mut states = Vec::new();
        for arg in &step.args {
            match *arg {
                Arg::Segment(i) | Arg::Matrices(i) => {
                    let segment = plan.segments.get(i as usize)?;
                    if node.op.is_embedding() {
                        work.bytes += rows * segment.bytes as f64 / f64::from(segment.extents().1);
                    } else {
                        work.add_weight(segment, entry, step, rows);
                    }
                }
                Arg::State(i) => states.push(plan.states.get(i as usize)?),
                Arg::Buffer(..) => {}
            }
        }
        for state in &states {
            work.bytes += call.sequences * moved(state, node.op.effect(), call);
        }
        if let Some(state) = states.first() {
            let ty = Type::f32(state.shape.map(|n| n as usize));
            work.operations += 2.0 * rows * node.op.multiply_adds(&ty, call.seen);
        }
        (work.bytes > 0.0).then_some(work)
    }

    /// Adds a matrix, or the matrices of the experts that the rows choose.
    fn add_weight(&mut self, segment: &Segment, entry: &Entry, step: &Step, rows: f64) {
        let (matrices, outputs, inputs) = segment.extents();
        let numbers = f64::from(outputs) * f64::from(inputs);
        let matrices = f64::from(matrices);
        let k = step.grid.table().and_then(|table| chosen(entry, step, table)).unwrap_or(matrices);
        let read = matrices * (1.0 - (1.0 - k / matrices).powf(rows));
        // A vector is added to rows, or scales them.
        if outputs > 1 {
            self.operations += 2.0 * rows * k * numbers;
        }
        self.bytes += read * segment.bytes as f64 / matrices;
    }

    /// Least time on a machine with all threads.
    pub(super) fn limit(&self, machine: &Roofline) -> Duration {
        let name = match self.compute {
            ComputeType::I8 => "int8",
            other => other.name(),
        };
        let peak = machine.best(name).or_else(|| machine.best(ComputeType::F32.name()));
        let arithmetic = peak.map_or(0.0, |peak| self.operations / (peak.gops.all * 1e9));
        let memory = self.bytes / (machine.read_gb_per_s.all * 1e9);
        Duration::try_from_secs_f64(arithmetic.max(memory)).unwrap_or_default()
    }
}

/// Experts that a row chooses, by the `dispatch` that writes the table of a step.
fn chosen(entry: &Entry, step: &Step, table: u32) -> Option<f64> {
    let table = step.args.get(table as usize)?;
    entry.steps.iter().find_map(|s| match s.code {
        Code::Builtin(Builtin::Dispatch { k, .. }) if s.args[1..].contains(table) => Some(f64::from(k)),
        _ => None,
    })
}

/// Bytes of a state that a call moves for a sequence.
fn moved(state: &StateBuf, effect: Effect, call: Call) -> f64 {
    let slot = state.slot_bytes().unwrap_or(0) as f64;
    if state.kind.needs_snapshots() {
        return 2.0 * slot;
    }
    let positions = f64::from(state.shape[2]);
    let touched = if effect == Effect::Writes { call.rows / call.sequences } else { call.length };
    slot * touched.min(positions) / positions
}
