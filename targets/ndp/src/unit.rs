//! The unit of the runtime: DIMMs that execute the NDP command streams of a bundle, simulated.
//!
//! All data goes through the simulated DRAM, line by line. An expert's weights are written there when a step
//! first needs them, in the module and the rows that the artifact names. Rows are written to the inbox of the
//! module whose expert they chose, as bf16; the expert's stream runs; and its results are read from the
//! outbox. An expert with a new place is copied by the commands of [`crate::emit::transfer`]; steps find it at
//! its old place until the move is settled.
#![expect(
    clippy::cast_possible_truncation,
    reason = "numbers of a memory system below 2⁴⁰ lines, and of one layer"
)]

use crate::NAME;
use crate::allocation::{Boxes, DimmConfig, DramLayout, Expert, Move, RowAllocation, RowAllocator};
use crate::artifact::STRIPED;
use crate::emit::transfer;
use crate::image::{Packed, Shape};
use crate::machine::{Bus, Dimms, Program as Commands};
use moec_ir::Format;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Builtin, StreamSet};
use moec_ndp_isa::{LINE, Op, Stream};
use moec_runtime::bundle::BundleReader;
use moec_runtime::bundle::program::{Code, Program};
use moec_runtime::exec::unit::{self, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep};
use moec_runtime::platform::memory::{Addr, Region};
use moec_runtime::{Error, Result};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// NDP DIMMs.
#[derive(Default)]
pub struct DimmUnit {
    memory: Option<Region>,
    sets: Vec<Option<LoadedSet>>,
    machine: Option<Mutex<Machine>>,
}

/// The experts of a layer.
struct LoadedSet {
    /// Layer, counted over those with streams.
    layer: u32,
    shape: Shape,
    /// Bytes of one expert's packed matrices.
    bytes: [usize; 2],
    experts: usize,
}

struct Machine {
    dimms: Dimms,
    allocator: RowAllocator,
    /// Whether the weights of an expert are in the DIMMs, by layer and expert.
    written: Vec<Vec<bool>>,
    /// Commands that compute an expert in its DIMM, by layer and expert.
    commands: Vec<Vec<Commands>>,
    /// Experts that have been copied and are still computed at their old place.
    moving: BTreeMap<Expert, Moving>,
}

/// An expert with two places.
struct Moving {
    old: RowAllocation,
    /// Commands at its new place; `None`: it is striped there.
    commands: Option<Commands>,
    /// Whether its weights are at the new place.
    copied: bool,
}

/// Addresses of a stream's step, which the verifier has found.
struct Step<'a> {
    set: &'a LoadedSet,
    layout: DispatchLayout,
    /// Valid rows of `x`.
    valid: usize,
    x: Addr,
    table: &'a [i32],
    matrices: [Addr; 2],
    biases: Option<[Addr; 2]>,
    y: Addr,
}

impl DimmUnit {
    /// The experts of a set, and the machine.
    fn of_set(&self, set: u32) -> Result<(&LoadedSet, MutexGuard<'_, Machine>)> {
        let missing = || Error::plan(format!("streams {set} of `{NAME}` were not loaded"));
        let of = self.sets.get(set as usize).and_then(Option::as_ref).ok_or_else(missing)?;
        let machine = self.machine.as_ref().ok_or_else(missing)?;
        Ok((of, machine.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Runs the streams of a step's experts.
    fn run(&self, launch: &Launch<'_>, set: usize, rows: u32, k: u32) -> Result<()> {
        let missing = || Error::plan(format!("streams {set} of `{NAME}` were not loaded"));
        let set = self.sets.get(set).and_then(Option::as_ref).ok_or_else(missing)?;
        let machine = self.machine.as_ref().ok_or_else(missing)?;
        let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: set.experts };
        let &[x, table, gate_up, down, ref biases @ .., y] = launch.args else { return Err(missing()) };
        let biases = <[Addr; 2]>::try_from(biases).ok();
        // SAFETY: the verifier has found the whole table there; the step that writes it has ended.
        let table = unsafe { std::slice::from_raw_parts(table.of::<i32>(), layout.words()) };
        let step = Step { set, layout, valid: launch.n, x, table, matrices: [gate_up, down], biases, y };
        let mut machine = machine.lock().unwrap_or_else(PoisonError::into_inner);
        let word = |i: usize, most: usize| usize::try_from(table[i]).unwrap_or(0).min(most);
        let slots = layout.rows * layout.k;
        for rank in 0..word(0, layout.experts) {
            let expert = word(layout.expert() + rank, layout.experts - 1);
            let first = word(layout.start() + rank, slots);
            let end = word(layout.start() + rank + 1, slots).max(first);
            machine.expert(&step, expert, first, end)?;
        }
        Ok(())
    }
}

impl Machine {
    /// One expert on the rows of slots `first .. end`.
    fn expert(&mut self, step: &Step<'_>, expert: usize, first: usize, end: usize) -> Result<()> {
        let (set, shape) = (step.set, &step.set.shape);
        let at = Expert { layer: set.layer, number: expert as u32 };
        let fault = |e: &dyn std::fmt::Display| {
            Error::plan(format!("expert {expert} of layer {} in `{NAME}`: {e}", set.layer))
        };
        let allocation = self.place(at).ok_or_else(|| fault(&"it has no place"))?.clone();
        let DramLayout::Localized(dimm) = allocation.layout else {
            return Err(fault(&"it is striped over all DIMMs, so that no single DIMM computes it"));
        };
        self.write(step, expert, at)?;
        let hidden = shape.hidden as usize;
        let boxes = self.allocator.boxes().clone();
        let here = |rows| RowAllocation { layout: DramLayout::Localized(dimm), rows };
        let input = shape.input_lines() as usize * LINE as usize;
        let mut rows = vec![0; input * (end - first)];
        for (slot, row) in (first..end).zip(rows.chunks_exact_mut(input)) {
            let token = usize::try_from(step.table[step.layout.token() + slot]).unwrap_or(0);
            let token = token.min(step.valid.saturating_sub(1));
            // SAFETY: the verifier has found a row of `hidden` numbers there for every valid token.
            let x = unsafe { std::slice::from_raw_parts(step.x.of::<f32>().add(token * hidden), hidden) };
            for (&x, out) in x.iter().zip(row.chunks_exact_mut(2)) {
                out.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes());
            }
        }
        let line = |lines: u64| first as u64 * lines;
        self.dimms
            .write(&here(boxes.inbox.clone()), line(shape.input_lines()), &rows)
            .map_err(|e| fault(&e))?;
        let commands = &self.commands[set.layer as usize][expert];
        self.dimms.execute(commands, first as u32, (end - first) as u32).map_err(|e| fault(&e))?;
        let output = shape.output_lines() as usize * LINE as usize;
        let mut results = vec![0; output * (end - first)];
        self.dimms
            .read(&here(boxes.outbox.clone()), line(shape.output_lines()), &mut results)
            .map_err(|e| fault(&e))?;
        for (slot, row) in (first..end).zip(results.chunks_exact(output)) {
            // SAFETY: the verifier has found a row of `hidden` numbers there for every slot, which nothing
            // else uses now.
            let y = unsafe { std::slice::from_raw_parts_mut(step.y.of::<f32>().add(slot * hidden), hidden) };
            for (y, bytes) in y.iter_mut().zip(row.chunks_exact(4)) {
                *y = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        Ok(())
    }

    /// Writes the weights of an expert into its DIMMs, once.
    fn write(&mut self, step: &Step<'_>, expert: usize, at: Expert) -> Result<()> {
        let (set, shape) = (step.set, &step.set.shape);
        if self.written[at.layer as usize][expert] {
            return Ok(());
        }
        let fault =
            |e: &dyn std::fmt::Display| Error::plan(format!("expert {expert} of layer {}: {e}", set.layer));
        // SAFETY: the tables have an address for each expert, whose packed matrix has this many bytes; biases
        // are whole segments with a row for each expert, in f32.
        let (gate_up, down, biases) = unsafe {
            let matrix = |i: usize| {
                let address = step.matrices[i].of::<Addr>().add(expert).read();
                std::slice::from_raw_parts(address.ptr().cast_const(), set.bytes[i])
            };
            let vector = |at: Addr, n: usize| {
                std::slice::from_raw_parts(at.of::<f32>().add(expert * n).cast_const(), n)
            };
            let biases = step
                .biases
                .map(|[a, b]| (vector(a, 2 * shape.inner as usize), vector(b, shape.hidden as usize)));
            (matrix(0), matrix(1), biases)
        };
        let image = shape.pack(Packed { gate_up, down, biases }).map_err(|e| fault(&e))?;
        let allocation = self.place(at).ok_or_else(|| fault(&"it has no place"))?.clone();
        self.dimms.write(&allocation, 0, &image).map_err(|e| fault(&e))?;
        self.written[at.layer as usize][expert] = true;
        Ok(())
    }

    /// The place of an expert at which steps find it.
    fn place(&self, at: Expert) -> Option<&RowAllocation> {
        self.moving.get(&at).map_or_else(|| self.allocator.get(at), |moving| Some(&moving.old))
    }

    /// Copies an expert to a module, or over all of them.
    fn relocate(&mut self, set: &LoadedSet, expert: u32, layout: DramLayout) -> Result<()> {
        let at = Expert { layer: set.layer, number: expert };
        let moved = self.allocator.begin(at, layout).map_err(|e| fault(at, &e))?;
        match self.carry(set, expert as usize, &moved) {
            Ok((commands, copied)) => {
                self.moving.insert(at, Moving { old: moved.from, commands, copied });
                Ok(())
            }
            Err(e) => {
                // The expert stays at its old location.
                self.allocator.cancel(at).map_err(|e| fault(at, &e))?;
                Err(e)
            }
        }
    }

    /// Gives up the old place of an expert that has been copied.
    fn settle(&mut self, set: &LoadedSet, expert: u32) -> Result<()> {
        let at = Expert { layer: set.layer, number: expert };
        let moved = self.moving.remove(&at).ok_or_else(|| fault(at, &"it does not move"))?;
        self.allocator.settle(at).map_err(|e| fault(at, &e))?;
        // If a step has written it to the old place only, the next one writes it again.
        self.written[set.layer as usize][expert as usize] = moved.copied;
        if let Some(commands) = moved.commands {
            self.commands[set.layer as usize][expert as usize] = commands;
        }
        Ok(())
    }

    /// Has the commands of a move executed. Returns those of the expert for its new place, and whether its
    /// weights are there.
    fn carry(&mut self, set: &LoadedSet, expert: usize, moved: &Move) -> Result<(Option<Commands>, bool)> {
        let fault = |e: &dyn std::fmt::Display| fault(moved.expert, e);
        let commands = &self.commands[set.layer as usize][expert];
        let next = match moved.to.layout {
            DramLayout::Localized(dimm) => {
                let mut stream = commands.stream().clone();
                stream.dimm = dimm;
                stream.name = stream.name.trim_end_matches(STRIPED).into();
                if let Some(region) = stream.regions.first_mut() {
                    region.rows = moved.to.rows.clone();
                }
                Some(Commands::new(stream).map_err(|e| fault(&e))?)
            }
            DramLayout::Striped => None,
        };
        // An expert that no step has requested is written to its current place.
        let written = self.written[set.layer as usize][expert];
        if written {
            let stream = transfer(&set.shape, self.dimms.dimm_config(), moved).map_err(|e| fault(&e))?;
            let transfer = Commands::new(stream).map_err(|e| fault(&e))?;
            self.dimms.execute(&transfer, 0, 0).map_err(|e| fault(&e))?;
        }
        Ok((next, written))
    }
}

fn fault(at: Expert, e: &dyn std::fmt::Display) -> Error {
    Error::plan(format!("expert {} of layer {}: {e}", at.number, at.layer))
}

impl ComputeUnit for DimmUnit {
    fn name(&self) -> &'static str {
        NAME
    }

    fn executes(&self, builtin: Builtin) -> bool {
        matches!(builtin, Builtin::Streams { .. } | Builtin::Copy { .. })
    }

    fn load(&mut self, program: &Program, index: u32, bundle: &BundleReader) -> Result<()> {
        let mut machine: Option<Machine> = None;
        let mut layers = 0;
        for set in &program.streams {
            if set.unit != index {
                self.sets.push(None);
                continue;
            }
            let bad = |e: &dyn std::fmt::Display| Error::plan(format!("`{}`: {e}", set.artifact));
            let experts = crate::artifact::open(bundle, set).map_err(|e| bad(&e))?.experts;
            let first = experts.first().map(|e| &e.stream).ok_or_else(|| bad(&"no experts"))?;
            let (dimm_config, slots) =
                (DimmConfig { system: first.system, geometry: first.geometry }, first.slots);
            // The streams define how the halves join.
            let glu = moec_ir::Glu::Gated(moec_ir::Activation::Silu);
            let shape = Shape { hidden: set.hidden, inner: set.inner, glu, bias: set.bias };
            let starts = starts(program, set.layer);
            let machine = match &mut machine {
                Some(machine) => machine,
                none => none.insert(Machine {
                    dimms: Dimms::new(dimm_config, Bus::trimoe(), false).map_err(|e| bad(&e))?,
                    allocator: RowAllocator::new(dimm_config, shape, slots).map_err(|e| bad(&e))?,
                    written: Vec::new(),
                    commands: Vec::new(),
                    moving: BTreeMap::new(),
                }),
            };
            let same =
                *machine.dimms.dimm_config() == dimm_config && machine.allocator.boxes().slots == slots;
            if !same {
                return Err(bad(&"it is of another machine than the others"));
            }
            let mut commands = Vec::new();
            for (number, placed) in (0..).zip(experts) {
                let at = Expert { layer: layers, number };
                let start_dimm = starts.as_ref().and_then(|h| h.get(number as usize).copied());
                let layout = start_dimm.map_or(DramLayout::Localized(placed.stream.dimm), |m| {
                    u32::try_from(m).map_or(DramLayout::Striped, DramLayout::Localized)
                });
                let found = machine.allocator.allocate(at, layout).map_err(|e| bad(&e))?.clone();
                if !is_an_experts(&placed.stream, machine.allocator.boxes()) {
                    return Err(bad(&format!(
                        "the stream of expert {number} does more than compute the expert"
                    )));
                }
                let rows = placed.stream.regions.first().map(|r| r.rows.clone());
                if layout != DramLayout::Striped && Some(&found.rows) != rows.as_ref() {
                    return Err(bad(&format!(
                        "expert {number} is in {rows:?}, but {:?} are free",
                        found.rows
                    )));
                }
                commands.push(Commands::new(placed.stream).map_err(|e| bad(&e))?);
            }
            machine.written.push(vec![false; commands.len()]);
            let image = shape.image().map_err(|e| bad(&e))?;
            let bytes = [image.gate_up, image.down].map(|m| m.lines() as usize * LINE as usize);
            check(program, set, &bytes).map_err(|why| bad(&why))?;
            self.sets.push(Some(LoadedSet { layer: layers, shape, bytes, experts: commands.len() }));
            machine.commands.push(commands);
            layers += 1;
        }
        self.machine = machine.map(Mutex::new);
        Ok(())
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        let region = Region::new("the memory of `ndp`", bytes)?;
        let base = region.base();
        self.memory = Some(region);
        Ok(Some(base))
    }

    fn is_mapped(&self) -> bool {
        true
    }

    fn relocate(&self, set: u32, expert: u32, to: Option<u32>) -> Result<()> {
        let (set, mut machine) = self.of_set(set)?;
        machine.relocate(set, expert, to.map_or(DramLayout::Striped, DramLayout::Localized))
    }

    fn settle(&self, set: u32, expert: u32) -> Result<()> {
        let (set, mut machine) = self.of_set(set)?;
        machine.settle(set, expert)
    }

    unsafe fn submit(&self, launch: &Launch<'_>, _thread: PoolThread) {
        match launch.code {
            Code::Builtin(Builtin::Streams { set, rows, k }) => {
                if let Err(e) = self.run(launch, set as usize, rows, k) {
                    launch.fail(StepFault::Unit(e));
                }
            }
            Code::Builtin(builtin) => {
                // SAFETY: the caller's promise; the unit has one thread.
                if !unsafe { unit::copied(self, launch) } {
                    launch.fail(StepFault::Unknown(UnknownStep { unit: NAME, step: launch.step, builtin }));
                }
            }
            Code::Kernel(_) => {
                let why =
                    format!("step {} is a CPU kernel, which the backend `{NAME}` does not run", launch.step);
                launch.fail(StepFault::Unit(Error::plan(why)));
            }
        }
    }
}

/// The segments that steps of a set read are packed as its streams read them.
fn check(program: &Program, set: &StreamSet, bytes: &[usize; 2]) -> Result<(), String> {
    let of_set = |code| match code {
        plan::Code::Builtin(Builtin::Streams { set: s, .. }) => program.streams.get(s as usize) == Some(set),
        _ => false,
    };
    for step in program.entries.iter().flat_map(|e| &e.steps).filter(|s| of_set(s.code)) {
        for (arg, &bytes) in step.args.iter().skip(2).zip(bytes) {
            let segment = match *arg {
                plan::Arg::Matrices(i) => program.segments.get(i as usize),
                _ => None,
            };
            let fits = segment.is_some_and(|s| {
                crate::image::is_read(s.layout)
                    && s.format == Format::Bf16
                    && s.matrix_bytes() == Some(bytes as u64)
            });
            if !fits {
                return Err("its experts are packed in another layout than its streams read".to_owned());
            }
        }
    }
    Ok(())
}

/// The module of each expert of a layer when the first step begins, if experts are scheduled; −1: it is
/// striped over all of them.
fn starts(program: &Program, layer: u32) -> Option<Vec<i32>> {
    let (_, of) = program.experts.of_layer(Some(layer)).filter(|_| !program.experts.policy.is_fixed())?;
    Some(of.dimms.clone())
}

/// Whether a stream touches the rows of its expert and its boxes, and moves nothing to other DIMMs.
fn is_an_experts(stream: &Stream, boxes: &Boxes) -> bool {
    let rows: Vec<_> = stream.regions.iter().skip(1).map(|r| &r.rows).collect();
    let moves = |op: &Op| matches!(op, Op::Relayout { .. } | Op::Migrate { .. });
    rows == [&boxes.inbox, &boxes.outbox] && !stream.code.iter().any(|i| moves(&i.op))
}
