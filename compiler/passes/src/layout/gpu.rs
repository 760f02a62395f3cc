//! GPU kernels, for units that launch their own instead of the CPU's.

use super::entry::{Builder, Placed};
use super::int;
use crate::memory::aligned;
use moec_base::error::{Error, Result};
use moec_cpu::{GpuTarget, NodeView, Selection, Work};
use moec_ir::plan::{Builtin, CacheOrder, Code, GpuKernel, Grid, StateKind};
use moec_ir::{Graph, Module, Node, Operand};

/// Rows that a matrix of a node multiplies at once; for an expert, the average of a call.
fn rows(module: &Module, graph: &Graph, node: &Node) -> usize {
    match node.inputs.get(2) {
        Some(&Operand::Weight(w)) if node.op.expert_ffn().is_some() => {
            graph.ty(node.outputs[0]).rows().div_ceil(module.weight(w).matrices().max(1))
        }
        _ => graph.kind.rows(),
    }
}

impl Builder<'_> {
    /// Kernels for a node on a unit.
    ///
    /// # Errors
    /// Fails if the unit has no kernel for the operator.
    pub(super) fn select(&self, unit: u32, view: &NodeView<'_>, node: &Node) -> Result<Selection> {
        let (selected, name) = match self.threads.get(&unit) {
            Some(threads) => (threads.select(view), &*self.assignment.units[unit as usize].name),
            None => (self.target.select(view), self.target.name()),
        };
        selected.map_err(|e| {
            Error::limit(format!("target `{name}` cannot run `{}` in `{}`", node.op.name(), node.scope))
                .because(e)
        })
    }

    /// The code of a piece of work on a unit, and its work items.
    ///
    /// # Errors
    /// Fails if there is no such kernel for the unit's GPU.
    pub(super) fn code(
        &mut self,
        unit: u32,
        work: &Work,
        place: &Placed<'_>,
        graph: &Graph,
    ) -> Result<(Code, Grid)> {
        let Some(threads) = self.threads.get(&unit) else {
            return match work {
                Work::Kernel(spec) => {
                    self.scratch = self.scratch.max(aligned(self.target.scratch_bytes(spec) as u64));
                    Ok((Code::Kernel(self.kernel(spec)?), self.target.grid(spec)))
                }
                Work::Builtin(builtin) => Ok((Code::Builtin(*builtin), Grid::One)),
            };
        };
        let name = &self.assignment.units[unit as usize].name;
        let refused = || {
            Error::limit(format!("`{name}` cannot run `{}` in `{}`", place.node.op.name(), place.node.scope))
        };
        let kernel = threads.kernel_of(work, rows(self.module, graph, place.node)).ok_or_else(refused)?;
        let launch = threads.launch(&kernel).map_err(|e| {
            refused()
                .because(e)
                .hint("keep it on the CPU under `[placement]`, or choose another format for its weights")
        })?;
        let grid = threads.grid(&kernel);
        let artifact = format!("artifacts/{name}.ptx");
        let symbol = kernel.symbol();
        let known = self.launches.iter().position(|k| (k.unit, &k.symbol) == (unit, &symbol));
        let index = known.unwrap_or(self.launches.len());
        if known.is_none() {
            let (operands, results) = (int(kernel.operands())?, kernel.results());
            self.launches.push(GpuKernel { unit, artifact, symbol, operands, results, launch });
            self.gpu_kernels.push(kernel);
        }
        Ok((Code::Builtin(Builtin::Launch { kernel: int(index)? }), grid))
    }

    /// Order of a tensor of the KV cache in a memory, as the unit of that memory reads it.
    pub(super) fn cache_order(&self, memory: u32, values: bool) -> CacheOrder {
        self.threads_of(memory).map_or_else(|| self.target.cache_order(values), GpuTarget::cache_order)
    }

    /// Order of a state of `rows` rows that every token changes, likewise.
    pub(super) fn folded_order(&self, memory: u32, kind: StateKind, rows: usize) -> CacheOrder {
        let threads = self.threads_of(memory);
        threads.map_or_else(|| self.target.folded_order(kind, rows), GpuTarget::folded_order)
    }

    /// The GPU target of the unit of a memory.
    fn threads_of(&self, memory: u32) -> Option<&GpuTarget> {
        let of = |unit: u32| memory > 0 && self.assignment.memory(unit) == memory;
        self.threads.iter().find(|&(&unit, _)| of(unit)).map(|(_, threads)| threads)
    }

    /// Checks that a unit with kernels of its own runs no experts that change their unit at run time or stay
    /// on disk. Their weights are stored in the CPU's layout.
    ///
    /// # Errors
    /// Fails if the plan has such experts.
    pub(super) fn check_threads(&self) -> Result<()> {
        let Some(kernel) = self.launches.first() else { return Ok(()) };
        let name = &self.assignment.units[kernel.unit as usize].name;
        let refused = |what: &str, hint: &str| {
            Err(Error::limit(format!("{what} cannot be shared with `{name}`, which has its own GPU kernels"))
                .because("its kernels read weights in rows, and those of the other units in panels")
                .hint(hint))
        };
        let policy = &self.assignment.experts.policy;
        let mut units = self.assignment.experts.layers.iter().flat_map(|l| &l.units);
        let on_gpu = units.any(|u| self.threads.contains_key(u));
        if on_gpu && self.paged && policy.cached().is_none() {
            return refused(
                "experts that stay on disk",
                "remove `budget` under `[memory]`, or cache experts on the unit: `policy` under `[placement]`",
            );
        }
        if policy.cold().is_some() {
            return refused(
                "experts that are assigned in every step",
                "choose a target whose unit runs the CPU's kernels",
            );
        }
        Ok(())
    }
}
