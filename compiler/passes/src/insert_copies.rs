//! Pass `insert_copies`: puts values that a unit reads into its own memory.
//!
//! Before this pass a step names the buffer of a value, in any memory. If a unit reads a value of another
//! memory, a copy is inserted before it, once for all readers until the value is written again. If a unit
//! writes a value of another memory, it writes into its own buffer, and a copy after it brings the result
//! back. For experts that copies the slots of their table, so that the rows of several units are in one
//! buffer.
//!
//! A copy is a step of the unit whose memory is not the CPU's: its queue moves the bytes, and the CPU goes
//! on.
//!
//! This pass comes after `fuse`, since kernels that become one leave nothing to copy between them.

use super::memory::aligned;
use moec_base::error::{Error, Result};
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Arg, Buffer, Builtin, Code, Entry, Grid, Plan, RowSpace, Span, Step};
use std::collections::HashMap;

/// Inserts copies in every entry point.
///
/// # Errors
/// Fails if a value would be copied where the plan has no link, or if sizes exceed a plan's fields.
pub fn insert_copies(plan: &mut Plan) -> Result<()> {
    let memories: Vec<u32> = plan.units.iter().map(|u| u.memory).collect();
    let shape =
        Shape { experts: plan.placement.experts.iter().map(|t| (t.experts.len(), t.k as usize)).collect() };
    let mut entries = std::mem::take(&mut plan.entries);
    for entry in &mut entries {
        let mut inserter = CopyInserter {
            plan,
            memories: &memories,
            shape: &shape,
            steps: Vec::new(),
            copies: HashMap::new(),
            spaces: HashMap::new(),
            end: entry.buffers.iter().map(|b| b.offset + aligned(b.bytes)).max().unwrap_or(0),
        };
        let steps = std::mem::take(&mut entry.steps);
        for step in steps {
            inserter.step(entry, step)?;
        }
        inserter.logits(entry)?;
        entry.steps = inserter.steps;
    }
    plan.entries = entries;
    for (m, memory) in plan.memories.iter_mut().enumerate() {
        let buffers = plan.entries.iter().flat_map(|e| &e.buffers).filter(|b| b.memory as usize == m);
        memory.arena_bytes = buffers.map(|b| b.offset + aligned(b.bytes)).max().unwrap_or(0);
    }
    let linked = |a: u32, b: u32| plan.links.iter().any(|l| (l.from, l.to) == (a.min(b), a.max(b)));
    for entry in &plan.entries {
        for step in &entry.steps {
            let Code::Builtin(Builtin::Copy { .. }) = step.code else { continue };
            let [.., Arg::Buffer(from, _), Arg::Buffer(to, _)] = step.args.as_slice() else { continue };
            let [from, to] = [from, to].map(|&b| entry.buffers[b as usize].memory);
            if !linked(from, to) {
                let name = |m: u32| plan.memories[m as usize].name.clone();
                return Err(Error::limit(format!("no link leads from `{}` to `{}`", name(from), name(to)))
                    .hint("units that exchange values need one in the device file"));
            }
        }
    }
    Ok(())
}

/// Possible shapes of dispatch tables: experts, and experts per token, by layer.
struct Shape {
    experts: Vec<(usize, usize)>,
}

/// State of the pass in one entry point.
struct CopyInserter<'a> {
    /// The plan without its entry points.
    plan: &'a Plan,
    /// Memory of each unit.
    memories: &'a [u32],
    shape: &'a Shape,
    steps: Vec<Step>,
    /// By buffer and memory: the copy there, as long as it equals the buffer.
    copies: HashMap<(u32, u32), u32>,
    /// Rows of the step that last wrote a buffer.
    spaces: HashMap<u32, RowSpace>,
    end: u64,
}

impl CopyInserter<'_> {
    fn memory(&self, unit: u32) -> u32 {
        self.memories.get(unit as usize).copied().unwrap_or(0)
    }

    /// Adds a step and the copies that it requires.
    fn step(&mut self, entry: &mut Entry, mut step: Step) -> Result<()> {
        let written = self.plan.results(&step);
        let own = self.memory(step.unit);
        let mut back = Vec::new();
        let table = match step.code {
            Code::Builtin(Builtin::Streams { .. }) => Some(1),
            _ => step.grid.table(),
        };
        let table = table.and_then(|at| step.args.get(at as usize).copied());
        for i in 0..step.args.len() {
            let Arg::Buffer(b, offset) = step.args[i] else { continue };
            if entry.buffers[b as usize].memory == own {
                continue;
            }
            let local = if written.contains(i) {
                if offset != 0
                    || step.args.iter().filter(|a| matches!(a, Arg::Buffer(o, _) if *o == b)).count() > 1
                {
                    return Err(Error::bug("a part of a value that another memory holds is written"));
                }
                // The copy back must not overwrite rows that other units have already written.
                let local = self.local(entry, b, own, "'")?;
                back.push((local, b));
                local
            } else {
                self.copy_in(entry, b, step.unit, step.node)?
            };
            step.args[i] = Arg::Buffer(local, offset);
        }
        for i in written.indices() {
            if let Arg::Buffer(b, _) = step.args[i] {
                self.forget(b);
                self.spaces.insert(b, step.rows);
            }
        }
        let (unit, rows, node) = (step.unit, step.rows, step.node);
        self.steps.push(step);
        for (from, to) in back {
            let of = match table {
                Some(Arg::Buffer(table, _)) => Some(self.slots(entry, table, to)?),
                _ => None,
            };
            self.copy(entry, (from, to), unit, rows, node, of);
            self.forget(to);
            self.spaces.insert(to, rows);
        }
        Ok(())
    }

    /// Drops the copies of a buffer whose contents have changed.
    fn forget(&mut self, b: u32) {
        self.copies.retain(|&(of, _), _| of != b);
    }

    /// Copies the logits to the memory where the engine reads them.
    fn logits(&mut self, entry: &mut Entry) -> Result<()> {
        let logits = entry.logits;
        if entry.buffers[logits as usize].memory == 0 {
            return Ok(());
        }
        let node = self.steps.last().map_or(0, |s| s.node);
        entry.logits = self.copy_in(entry, logits, 0, node)?;
        Ok(())
    }

    /// The buffer in the memory of `unit` with the contents of `b`, which is in another memory.
    fn copy_in(&mut self, entry: &mut Entry, b: u32, unit: u32, node: u32) -> Result<u32> {
        let own = self.memory(unit);
        if let Some(&copy) = self.copies.get(&(b, own)) {
            return Ok(copy);
        }
        // The queue of the unit whose memory is not the CPU's. Copies between two other memories go through
        // the CPU's.
        let theirs = entry.buffers[b as usize].memory;
        if own != 0 && theirs != 0 {
            let between = self.copy_in(entry, b, 0, node)?;
            let copy = self.copy_in(entry, between, unit, node)?;
            self.copies.insert((b, own), copy);
            return Ok(copy);
        }
        let copy = self.local(entry, b, own, "")?;
        let queue = if own == 0 { self.unit_of(theirs) } else { unit };
        let rows = self.spaces.get(&b).copied().unwrap_or(RowSpace::Tokens);
        self.copy(entry, (b, copy), queue, rows, node, None);
        self.copies.insert((b, own), copy);
        Ok(copy)
    }

    /// The first unit of a memory.
    fn unit_of(&self, memory: u32) -> u32 {
        self.memories.iter().position(|&m| m == memory).unwrap_or(0) as u32
    }

    /// A new buffer like `b` in a memory.
    fn local(&mut self, entry: &mut Entry, b: u32, memory: u32, mark: &str) -> Result<u32> {
        let index = u32::try_from(entry.buffers.len()).map_err(|_| Error::limit("too many buffers"))?;
        let like = &entry.buffers[b as usize];
        let new = Buffer {
            name: format!("{}@{memory}{mark}", like.name),
            memory,
            offset: self.end,
            ..like.clone()
        };
        self.end += aligned(new.bytes);
        entry.buffers.push(new);
        Ok(index)
    }

    /// Adds a copy of the rows of `from`, or of the slots of a table.
    fn copy(
        &mut self,
        entry: &Entry,
        (from, to): (u32, u32),
        unit: u32,
        rows: RowSpace,
        node: u32,
        slots: Option<(u32, Span)>,
    ) {
        let b = &entry.buffers[from as usize];
        let valid = match rows {
            RowSpace::Tokens => entry.kind.rows() as u32,
            RowSpace::Outputs => entry.out_rows,
        };
        let (table, words, span) = match slots {
            Some((table, span)) => (Some(table), b.stride, span),
            None if b.rows == valid => (None, b.stride, Span::Rows),
            None => (None, b.rows * b.stride, Span::Whole),
        };
        let ends = [from, to].map(|b| Arg::Buffer(b, 0));
        let args: Vec<Arg> = table.map(|t| Arg::Buffer(t, 0)).into_iter().chain(ends).collect();
        self.steps.push(Step {
            unit,
            code: Code::Builtin(Builtin::Copy { words, span }),
            args,
            rows,
            grid: Grid::One,
            barrier: false,
            deps: Vec::new(),
            node,
        });
    }

    /// The table in the CPU's memory, and the slots of a buffer that the table names, with one row for each.
    fn slots(&self, entry: &Entry, table: u32, y: u32) -> Result<(u32, Span)> {
        let (words, slots) = (&entry.buffers[table as usize], entry.buffers[y as usize].rows as usize);
        let rows = entry.kind.rows();
        let fits = |&(experts, k): &(usize, usize)| {
            let layout = DispatchLayout { rows, k, experts };
            slots == rows * k && layout.words() == words.rows as usize * words.stride as usize
        };
        // Small entry points have fewer choices than their layers.
        let mut shapes =
            self.shape.experts.iter().flat_map(|&(experts, k)| (1..=k).map(move |k| (experts, k)));
        let (experts, k) =
            shapes.find(fits).ok_or_else(|| Error::bug("experts whose table has another layout"))?;
        Ok((table, Span::Slots { rows: rows as u32, k: k as u32, experts: experts as u32 }))
    }
}
