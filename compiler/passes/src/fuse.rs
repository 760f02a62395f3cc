//! Pass `fuse`: joins steps that pass rows to each other.
//!
//! The rows between two steps pass through memory, and steps that compute little per row take as long as
//! that. If the target has one kernel for both, the second step is removed. So are the rows between them if
//! no other step reads them. The target's rules keep every sum, product and rounding, so that results are
//! bitwise equal.
//!
//! This pass comes after `layout`, since it joins kernels, not operators. For example, rows converted once
//! for all matrices that multiply them are not a node of the Graph. Every buffer still has its own bytes, so
//! that a step may move to any point where its operands are written.

use moec_base::error::{Error, Result};
use moec_cpu::{CpuTarget, FusePosition, Fused, KernelSpec, Operand};
use moec_ir::graph::INPUTS;
use moec_ir::plan::{Arg, Code, Entry, Plan, Step};
use std::collections::HashMap;

/// Joins steps in every entry point wherever the target has a joined kernel.
///
/// # Errors
/// A bug of the compiler: a plan whose steps name kernels or buffers that it does not have.
pub fn fuse(plan: &mut Plan, kernels: &mut Vec<KernelSpec>, target: &CpuTarget) -> Result<()> {
    let mut entries = std::mem::take(&mut plan.entries);
    let mut all = Kernels::of(std::mem::take(kernels), plan, target);
    for entry in &mut entries {
        let mut at = 0;
        while at < entry.steps.len() {
            match find(entry, &all, at) {
                // The reading step is gone, or another rule may now match it.
                Some(pair) => at = apply(entry, &mut all, pair)?,
                None => at += 1,
            }
        }
        drop_unused(entry);
    }
    let scratch = all.specs.iter().map(|k| super::memory::aligned(target.scratch_bytes(k) as u64)).max();
    *kernels = all.specs;
    (plan.scratch_bytes, plan.entries) = (scratch.unwrap_or(0), entries);
    used(plan, kernels)
}

/// Kernels by their symbols.
struct Kernels<'t> {
    target: &'t CpuTarget,
    /// The plan without its entry points, with these kernels.
    plan: &'t mut Plan,
    specs: Vec<KernelSpec>,
    ids: HashMap<String, u32>,
}

impl<'t> Kernels<'t> {
    fn of(specs: Vec<KernelSpec>, plan: &'t mut Plan, target: &'t CpuTarget) -> Self {
        let ids = specs.iter().enumerate().map(|(i, k)| (target.symbol(k), i as u32)).collect();
        Self { target, plan, specs, ids }
    }

    fn id(&mut self, spec: KernelSpec) -> Result<u32> {
        let next = u32::try_from(self.specs.len()).map_err(|_| Error::limit("too many kernels"))?;
        let id = *self.ids.entry(self.target.symbol(&spec)).or_insert(next);
        if id == next {
            self.plan.kernels.push(self.target.reference(&spec));
            self.specs.push(spec);
        }
        Ok(id)
    }

    fn of_step(&self, step: &Step) -> Option<&KernelSpec> {
        match step.code {
            Code::Kernel(id) => self.specs.get(id as usize),
            Code::Builtin(_) => None,
        }
    }
}

/// Two steps that become one.
struct Pair {
    writer: usize,
    reader: usize,
    fused: Fused,
}

/// The writer of an operand of step `reader` that it can be joined with.
fn find(entry: &Entry, kernels: &Kernels<'_>, reader: usize) -> Option<Pair> {
    let step = &entry.steps[reader];
    let spec = kernels.of_step(step)?;
    let results = kernels.plan.results(step);
    let mut reads = (0..step.args.len()).filter(|&i| !results.contains(i));
    reads.find_map(|operand| {
        let Arg::Buffer(buffer, 0) = step.args[operand] else { return None };
        if (buffer as usize) < INPUTS || buffer == entry.logits {
            return None;
        }
        let (writer, result) = only_writer(entry, kernels.plan, buffer)?;
        let from = &entry.steps[writer];
        let times = entry.steps.iter().flat_map(|s| &s.args).filter(|a| is_of(a, buffer)).count();
        let joins =
            from.args[result] == step.args[operand] && from.rows == step.rows && from.unit == step.unit;
        // One use writes it and one reads it.
        let sole = times == 2;
        let fused = kernels
            .target
            .fused((kernels.of_step(from)?, result), (spec, operand), sole)
            .filter(|_| joins)?;
        Some(Pair { writer, reader, fused })
    })
}

fn is_of(arg: &Arg, buffer: u32) -> bool {
    matches!(arg, Arg::Buffer(b, _) if *b == buffer)
}

/// The only step that writes a buffer, and the argument by which it does; `None` if there are several or
/// none.
fn only_writer(entry: &Entry, plan: &Plan, buffer: u32) -> Option<(usize, usize)> {
    let mut found = entry.steps.iter().enumerate().flat_map(|(at, step)| {
        let args = step.args.iter().enumerate().filter(|(_, arg)| is_of(arg, buffer));
        args.filter(|&(i, _)| plan.results(step).contains(i)).map(move |(i, _)| (at, i))
    });
    let first = found.next()?;
    found.next().is_none().then_some(first)
}

/// Replaces two steps by one. Returns the next index to look at: the joined step, which may be joined again.
fn apply(entry: &mut Entry, kernels: &mut Kernels<'_>, pair: Pair) -> Result<usize> {
    let Pair { writer, reader, fused } = pair;
    let (from, to) = (&entry.steps[writer], &entry.steps[reader]);
    let argument = |&operand: &Operand| match operand {
        Operand::Writer(i) => from.args[i],
        Operand::Reader(i) => to.args[i],
    };
    let args = fused.args.iter().map(argument).collect();
    let grid = kernels.target.grid(&fused.spec);
    let node = if fused.place == FusePosition::Writer { from.node } else { to.node };
    let code = Code::Kernel(kernels.id(fused.spec)?);
    let step = Step { code, args, grid, node, ..to.clone() };
    let (kept, removed) =
        if fused.place == FusePosition::Writer { (writer, reader) } else { (reader, writer) };
    entry.steps[kept] = step;
    entry.steps.remove(removed);
    Ok(if removed < kept { kept - 1 } else { removed.min(entry.steps.len()) })
}

/// Removes buffers that no step touches, and the places that values had in them.
fn drop_unused(entry: &mut Entry) {
    let touched = |b: usize| {
        b < INPUTS
            || b == entry.logits as usize
            || entry.steps.iter().flat_map(|s| &s.args).any(|a| is_of(a, b as u32))
    };
    let used: Vec<bool> = (0..entry.buffers.len()).map(touched).collect();
    let number = |b: u32| used[..b as usize].iter().filter(|k| **k).count() as u32;
    for arg in entry.steps.iter_mut().flat_map(|s| &mut s.args) {
        if let Arg::Buffer(b, _) = arg {
            *b = number(*b);
        }
    }
    for place in &mut entry.locations {
        *place = place.filter(|p| used[p.buffer as usize]);
        if let Some(p) = place {
            p.buffer = number(p.buffer);
        }
    }
    entry.logits = number(entry.logits);
    let mut at = used.iter();
    entry.buffers.retain(|_| at.next().is_some_and(|k| *k));
}

/// Removes kernels that no step calls.
fn used(plan: &mut Plan, kernels: &mut Vec<KernelSpec>) -> Result<()> {
    let codes = || plan.entries.iter().flat_map(|e| &e.steps).map(|s| s.code);
    let calls = |id: usize| codes().any(|code| code == Code::Kernel(id as u32));
    let used: Vec<bool> = (0..kernels.len()).map(calls).collect();
    for step in plan.entries.iter_mut().flat_map(|e| &mut e.steps) {
        if let Code::Kernel(id) = &mut step.code {
            let before = used.get(..*id as usize).ok_or_else(|| Error::bug("a step without its kernel"))?;
            *id = before.iter().filter(|k| **k).count() as u32;
        }
    }
    let (mut a, mut b) = (used.iter(), used.iter());
    kernels.retain(|_| a.next().is_some_and(|k| *k));
    plan.kernels.retain(|_| b.next().is_some_and(|k| *k));
    Ok(())
}
