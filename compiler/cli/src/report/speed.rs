//! Expected speed: a model of the time of each entry point's calls on the CPU, and the resulting tokens per
//! second.
//!
//! A call takes the sum of its steps:
//!
//! * A matrix step takes the longer of its arithmetic, at the peaks of all threads, and of its reading, at the bandwidth of the
//!   memory: the costs that schedules are chosen by ([`moec_cpu::Estimate`]). Work items that do not divide evenly among threads lengthen it.
//!   On this machine it takes as long as its kernel was measured to take with weights from memory, if it was (`moec build --tune`, `moec fit`).
//! * Attention, and any other step that reads a state, takes the longer of its arithmetic in f32 and of
//!   reading the state of a sequence of [`Machine::tokens`] tokens has in the state.
//! * Every other step takes the time to move its buffers through the cache and to read its weights. No
//!   neurons are skipped.
//! * A step after a barrier waits for all threads, which costs the device's `dispatch_cost_us`.
//!
//! Sampling reads all logits once. Weights and states that fit together into the last-level cache are read
//! from there.
//!
//! Steps of other units, and experts that a run reads from SSD, are not in the model: such an entry point has
//! a time of its CPU steps, and no rate.

use moec_base::{Error, Result};
use moec_bundle::read::Bundle;
use moec_cpu::{CpuTarget, Figures};
use moec_device::{Device, NATIVE, UnitKind};
use moec_ir::graph::Node;
use moec_ir::plan::{Arg, Builtin, Code, Entry, Plan, StateKind, Step};
use moec_ir::{EntryKind, Module, Op};
use moec_passes::decisions::{Decisions, KernelDecision};
use moec_passes::tune;
use moec_runtime::platform::cpu;
use std::collections::HashMap;

/// Bytes per second that a core reads from the last-level cache: 16 bytes per cycle at 3 GHz, between the 10 of Sapphire Rapids and the 27 of
/// Zen 4 (chipsandcheese.com, A Peek at Sapphire Rapids; Zen 4, Part 2).
const CACHE: f64 = 48e9;
/// Bytes per second that all cores read where the device file gives no figure: four fifths of two channels of DDR4-3200.
const MEMORY: f64 = 41e9;
/// Most bytes per second that one core reads of what a whole memory gives.
const ONE_CORE: f64 = 40e9;
/// Seconds of a barrier where the device file gives no figure.
const BARRIER: f64 = 1e-6;

/// A value of the machine, for readers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Assumption {
    /// Description.
    pub(crate) what: &'static str,
    /// Its value with the unit.
    pub(crate) value: String,
    /// The device file's source, or the assumption.
    pub(crate) source: String,
}

/// Figures of a machine in the model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Machine {
    /// Threads that share the work items of a step.
    pub(crate) threads: usize,
    /// Tokens that each sequence holds.
    pub(crate) tokens: usize,
    /// Rates of one core.
    figures: Figures,
    /// Bytes per second that one core, and that all cores read of weights and states.
    read: [f64; 2],
    /// Seconds of a barrier.
    barrier: f64,
    /// Whether times of kernels that were measured are of this machine.
    timed: bool,
    /// Sources of these.
    pub(crate) assumptions: Vec<Assumption>,
}

/// Seconds of the parts of a call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Parts {
    /// Matrix steps.
    pub(crate) matrices: f64,
    /// Of these, steps that the memory bounds.
    pub(crate) reading: f64,
    /// Attention, and other steps that read a state.
    pub(crate) states: f64,
    /// All other steps.
    pub(crate) others: f64,
    /// Barriers.
    pub(crate) barriers: f64,
    /// Sampling.
    pub(crate) sampling: f64,
}

impl Parts {
    /// Their sum.
    pub(crate) fn seconds(&self) -> f64 {
        self.matrices + self.states + self.others + self.barriers + self.sampling
    }
}

/// Expected speed of an entry point.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Expected {
    /// Entry point.
    pub(crate) entry: String,
    /// Whether it reads a chunk of a prompt; else it decodes.
    pub(crate) prompt: bool,
    /// Rows of a call: tokens.
    pub(crate) rows: usize,
    /// Seconds of a call on the CPU.
    pub(crate) parts: Parts,
    /// Tokens per second; `None` if the call includes other units or reads from SSD.
    pub(crate) rate: Option<f64>,
}

impl Machine {
    /// The machine that a bundle was built for, or that of another device file.
    ///
    /// # Errors
    /// A device whose CPU has no kernels.
    pub(crate) fn of(bundle: &Bundle, device: Option<&Device>) -> Result<Self> {
        let own = device.is_none().then(|| bundle.device()).transpose()?;
        let Some(device) = device.or(own.as_ref()) else { return Err(Error::bug("no device")) };
        let target = CpuTarget::new(device).map_err(|e| {
            Error::limit(format!("nothing is known of the CPU of `{}`", device.name)).because(e)
        })?;
        // A build records no more of `native` than its features: it is this machine, if the bundle's code
        // runs here.
        let here = (device.name == NATIVE && !bundle.is_foreign()).then(cpu::cores);
        Ok(Self::new(device, target.figures(), here, &bundle.plan))
    }

    /// Model of a device. `figures`: those of one core. `here`: the cores of this machine, if it is the
    /// device.
    pub(crate) fn new(device: &Device, figures: &Figures, here: Option<usize>, plan: &Plan) -> Self {
        let mut assumptions = Vec::new();
        let mut note = |what, value: String, source: &str| {
            assumptions.push(Assumption { what, value, source: source.to_owned() });
        };
        let unit = device.units.iter().find(|u| u.kind == UnitKind::Cpu);
        // A unit of one core is a unit of measurement.
        let stated = unit.and_then(|u| u.cores).filter(|n| *n > 1).map(|n| n as usize);
        let (threads, source) = match (stated, here) {
            (Some(n), _) => (n, "the device file"),
            (None, Some(n)) => (n, "cores of this machine"),
            (None, None) => (figures.cores.max(1) as usize, "assumed"),
        };
        note("threads", threads.to_string(), source);
        let memory = device.memories.iter().find(|m| Some(m.name.as_str()) == device.cpu_memory());
        let memory = memory.and_then(|m| m.bandwidth.last()).filter(|b| b.rate() > 0.0);
        let held: u64 = plan.segments.iter().map(|s| s.bytes).sum::<u64>()
            + plan.states.iter().filter_map(moec_ir::plan::StateBuf::live_bytes).sum::<u64>();
        let cached = figures.last_cache.is_some_and(|bytes| held <= bytes);
        let read = if cached {
            let source = "weights and states fit into the last-level cache; assumed: 16 bytes per cycle at 3 GHz for each core";
            note("reading", format!("{:.0} GB/s", CACHE * threads as f64 / 1e9), source);
            [CACHE, CACHE * threads as f64]
        } else if let Some(b) = memory {
            note("reading", format!("{:.1} GB/s", b.rate()), &b.source);
            [ONE_CORE.min(b.rate() * 1e9), b.rate() * 1e9]
        } else {
            let all = MEMORY.min(figures.read.value * threads as f64);
            let source = format!(
                "{}; 41 GB/s for all cores, four fifths of two channels of DDR4-3200",
                figures.read.source
            );
            note("reading", format!("{:.1} GB/s", all / 1e9), &source);
            [figures.read.value, all]
        };
        for (what, rate) in [("f32", &figures.f32), ("bf16", &figures.bf16), ("int8", &figures.bytes)] {
            note(what, format!("{:.0} GOP/s a core", rate.value / 1e9), &rate.source);
        }
        let dispatch = unit.and_then(|u| u.dispatch_cost_us.as_ref());
        let barrier = dispatch.map_or(BARRIER, |f| f.value * 1e-6);
        note(
            "a barrier",
            format!("{:.2} µs", barrier * 1e6),
            dispatch.map_or("assumed", |f| f.source.as_str()),
        );
        // As `run bench` measures by default, half of the tokens that it decodes included.
        let most = plan.model.max_context as usize;
        let prompt = 512.min(most / 2).max(1);
        let tokens = (prompt + 64.min(most.saturating_sub(prompt)) / 2).min(most.max(1));
        // Kernels are timed with weights from memory.
        let timed = here.is_some() && !cached;
        Self { threads, tokens, figures: figures.clone(), read, barrier, timed, assumptions }
    }

    /// Factor by which a step takes longer than its work items would if they were divided evenly among the threads.
    fn uneven(&self, items: usize) -> f64 {
        let items = items.max(1);
        (items.div_ceil(self.threads) * self.threads) as f64 / items as f64
    }

    /// Seconds of the arithmetic and of the reads of a step. `arithmetic`: seconds on one core.
    fn seconds(&self, items: usize, arithmetic: f64, bytes: f64, [one, all]: [f64; 2]) -> (f64, f64) {
        let share = self.uneven(items) / self.threads as f64;
        (arithmetic * share, (bytes * share / one).max(bytes / all))
    }

    /// Operations per second of a core, by the name of the arithmetic.
    fn peak(&self, compute: &str) -> f64 {
        let f = &self.figures;
        match compute {
            "bf16" => f.bf16.value,
            "i8" => f.bytes.value,
            _ => f.f32.value,
        }
    }
}

/// Expected speed of every entry point.
pub(crate) fn expected(
    plan: &Plan,
    module: &Module,
    decisions: &Decisions,
    machine: &Machine,
) -> Vec<Expected> {
    let of = |(at, entry): (usize, &Entry)| {
        let nodes = module.entries.get(at).map_or(&[][..], |g| &g.nodes);
        let call = Call::new(plan, entry, nodes, decisions, machine);
        let parts = call.parts();
        let rows = entry.kind.rows();
        // Without the steps of other units, or the reads from SSD, a call is not whole.
        let whole = plan.paging.is_none() && entry.steps.iter().all(|s| s.unit == 0);
        Expected {
            entry: entry.kind.to_string(),
            prompt: matches!(entry.kind, EntryKind::Prefill(_)),
            rows,
            parts,
            rate: whole.then(|| rows as f64 / parts.seconds()).filter(|rate| rate.is_finite()),
        }
    };
    plan.entries.iter().enumerate().map(of).filter(|e| e.parts.matrices > 0.0).collect()
}

/// A call of an entry point.
struct Call<'a> {
    plan: &'a Plan,
    entry: &'a Entry,
    nodes: &'a [Node],
    /// Matrix kernels by index and rows.
    kernels: HashMap<(u32, usize), &'a KernelDecision>,
    /// Share of a layer's experts that a row needs.
    chosen: f64,
    machine: &'a Machine,
}

impl<'a> Call<'a> {
    fn new(
        plan: &'a Plan,
        entry: &'a Entry,
        nodes: &'a [Node],
        decisions: &'a Decisions,
        machine: &'a Machine,
    ) -> Self {
        let name = entry.kind.to_string();
        let own = decisions.kernels.iter().filter(|d| d.entry == name);
        let kernels = own.map(|d| ((d.kernel, d.rows), d)).collect();
        let chosen = entry.steps.iter().find_map(|step| match step.code {
            Code::Builtin(Builtin::Dispatch { k, experts, .. }) => {
                Some(f64::from(k) / f64::from(experts.max(1)))
            }
            _ => None,
        });
        Self { plan, entry, nodes, kernels, chosen: chosen.unwrap_or(1.0), machine }
    }

    fn parts(&self) -> Parts {
        let mut parts = Parts::default();
        for step in self.entry.steps.iter().filter(|s| s.unit == 0) {
            let rows = tune::rows(self.entry, step.rows);
            if step.barrier {
                parts.barriers += self.machine.barrier;
            }
            let decision = match step.code {
                Code::Kernel(id) => self.kernels.get(&(id, rows)),
                Code::Builtin(_) => None,
            };
            if let Some(d) = decision {
                let (arithmetic, reading) = self.matrix(step, rows, d);
                let measured = d.seconds().filter(|_| self.machine.timed);
                let seconds = measured.unwrap_or(arithmetic.max(reading));
                parts.matrices += seconds;
                if reading > arithmetic {
                    parts.reading += seconds;
                }
            } else if let Some(seconds) = self.state(step, rows) {
                parts.states += seconds;
            } else {
                parts.others += self.other(step, rows);
            }
        }
        let logits = match self.entry.kind {
            EntryKind::Prefill(_) => 1,
            kind => kind.rows(),
        };
        parts.sampling = (logits * self.plan.model.vocab as usize * 4) as f64 / CACHE;
        parts
    }

    /// Seconds of arithmetic and of reading of a matrix step.
    fn matrix(&self, step: &Step, rows: usize, d: &KernelDecision) -> (f64, f64) {
        let p = &d.predicted;
        let (operations, bytes) = (p.gops * p.ms * 1e6, p.gb_per_s * p.ms * 1e6);
        let arithmetic = operations * p.overhead / self.machine.peak(&d.compute);
        let items = step.grid.items(rows, d.load.matrices);
        self.machine.seconds(items, arithmetic, bytes, self.machine.read)
    }

    /// Seconds of a step that reads a state; `None`: it reads none, or only adds rows to one.
    fn state(&self, step: &Step, rows: usize) -> Option<f64> {
        let op = self.nodes.get(step.node as usize).map(|n| &n.op)?;
        if matches!(op, Op::CacheWrite) {
            return None;
        }
        // Rows of a prompt are of one sequence, and see half of the chunk on average.
        let prompt = matches!(self.entry.kind, EntryKind::Prefill(_));
        let (sequences, seen) = if prompt { (1, rows / 2) } else { (rows, self.machine.tokens) };
        let mut bytes = None;
        for arg in &step.args {
            let Arg::State(i) = *arg else { continue };
            let Some(s) = self.plan.states.get(i as usize) else { continue };
            let [slots, _, positions, _] = s.shape.map(f64::from);
            let share = match s.kind {
                StateKind::Cache => seen as f64 / positions,
                StateKind::Ring { window } => (seen as f64).min(f64::from(window)) / positions,
                StateKind::Recurrent | StateKind::Convolution => 1.0,
            };
            let of_slot = s.live_bytes().unwrap_or(0) as f64 / slots.max(1.0);
            *bytes.get_or_insert(0.0) += of_slot * share.min(1.0) * sequences as f64;
        }
        let operations = match op {
            Op::Attention(d) => {
                let seen = d.window.map_or(seen, |w| seen.min(w));
                2.0 * (rows * d.heads * (d.qk_dim + d.v_dim) * seen) as f64
            }
            _ => 0.0,
        };
        let arithmetic = operations / self.machine.figures.f32.value;
        let items = step.grid.items(rows, 1);
        let (arithmetic, reading) = self.machine.seconds(items, arithmetic, bytes?, self.machine.read);
        Some(arithmetic.max(reading))
    }

    /// Seconds of a step that is no product of a matrix and reads no state.
    fn other(&self, step: &Step, rows: usize) -> f64 {
        // An argument other than ids is a table, of which each id reads one row.
        let table = step.args.iter().any(|arg| matches!(arg, Arg::Buffer(0, _)));
        let (mut moved, mut weights) = (0.0, 0.0);
        for arg in &step.args {
            match *arg {
                Arg::Buffer(i, _) => {
                    let buffer = self.entry.buffers.get(i as usize);
                    moved += buffer.map_or(0.0, |b| b.bytes as f64) * rows as f64
                        / self.entry.kind.rows().max(1) as f64;
                }
                Arg::Segment(s) | Arg::Matrices(s) => {
                    let Some(segment) = self.plan.segments.get(s as usize) else { continue };
                    let (_, rows_of, _) = segment.extents();
                    let read = match arg {
                        Arg::Matrices(_) => rows as f64 * self.chosen,
                        _ if table => rows as f64 / f64::from(rows_of.max(1)),
                        _ => 1.0,
                    };
                    weights += segment.bytes as f64 * read.min(1.0);
                }
                Arg::State(_) => {}
            }
        }
        let items = step.grid.items(rows, 1);
        let cache = [CACHE, CACHE * self.machine.threads as f64];
        let (_, moving) = self.machine.seconds(items, 0.0, moved, cache);
        let (_, reading) = self.machine.seconds(items, 0.0, weights, self.machine.read);
        moving + reading
    }
}
