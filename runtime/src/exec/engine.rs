//! Executes a Program: sequences in, logits out.

use crate::bundle::program::Program;
use crate::error::Result;
use crate::exec::accelerators::AcceleratorMemories;
use crate::exec::call::{Bound, Places, bind};
use crate::exec::capacity_limit::SetCounters;
use crate::exec::overflow::{OverflowCounters, Overflowed};
use crate::exec::timeline::Timeline;
use crate::exec::traffic::{HostReads, HostTraffic};
use crate::exec::unit::{ComputeUnit, Units};
use crate::kv::states::States;
use crate::offload::border::Border;
use crate::offload::paging::{self, AnyPager, Paging};
use crate::platform::memory::{Addr, Region};
use crate::schedule::dispatch::{Assigned, Assigner};
use crate::sync::events::Events;
use crate::sync::pool::Pool;
use crate::weights::owned::LoadProgress;
use crate::weights::store::{CheckLevel, Store};
use crate::weights::{Demand, WeightPlacement, Weights};
use moec_ir::plan::{Builtin, Code, UnitRef};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

mod calls;
mod open;

pub(crate) use calls::{long_rope_threshold, most_rows};

/// Options of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Threads; `None`: `MOEC_THREADS`, else one per core.
    pub threads: Option<usize>,
    /// Whether worker threads are bound to cores ([`Pool::new`]). An error if there are more threads than
    /// cores.
    pub pin: bool,
    /// Extent of the checks of the bundle before it runs.
    pub check: CheckLevel,
    /// Whether all weights are loaded, even those that the plan leaves on disk.
    pub resident: bool,
    /// Place of weights that do not stay on disk. With experts on disk the other weights are mapped, and
    /// [`Weights::Ram`] is refused.
    pub weights: Weights,
    /// Whether mapped weights are read from disk only when first used; [`Weights::Auto`] then maps them.
    /// Otherwise weights that the first prompt has not used are loaded in the background after it.
    pub lazy: bool,
    /// Options of experts on disk; `None`: from the environment.
    pub paging: Option<Paging>,
    /// Maximum number of layers ahead whose experts are transferred to the frames of a unit; `None`: as the
    /// policy has it.
    pub ahead: Option<usize>,
    /// Whether experts are divided by the plan's costs, which the first calls else correct by what they
    /// measure. Equal calls then have equal decisions, and equal bits.
    pub fixed_costs: bool,
    /// Stop flag, read between calls of entry points: once true, work ends with
    /// [`crate::Error::Interrupted`].
    pub stop: Option<&'static AtomicBool>,
    /// Sequences that the caller plans to hold. The engine does not open if the memory for them is not free.
    /// `None`: no check.
    pub demand: Option<Demand>,
    /// Warns the user, in one line, of a problem that does not end the run.
    pub warn: Option<fn(&str)>,
}

/// Rows of a prefill that give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: only the KV cache is filled.
    None,
    /// The last row, from which generation continues.
    Last,
    /// Every one.
    All,
}

/// One token row of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// KV-cache slot of its sequence.
    pub slot: u32,
    /// Position in the sequence.
    pub pos: usize,
    /// Token.
    pub id: u32,
}

/// Bytes that the plan takes, known before anything is allocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Intermediate results of all entry points.
    pub arena: u64,
    /// Kernel scratch of all threads.
    pub scratch: u64,
    /// Packed weights.
    pub weights: u64,
    /// KV cache when every slot is full; the operating system backs only written pages ([`Options::demand`]).
    pub kv: u64,
    /// Bytes among them of snapshots of recurrent states.
    pub snapshots: u64,
    /// Cache frames of experts on disk; they hold some of `weights`.
    pub frames: u64,
}

/// A program with its memory and threads.
///
/// One call at a time; sequences live in the slots of the KV cache. Kernels are trusted: see
/// [`crate::bundle::abi::KernelFn`].
pub struct Engine<'p> {
    pub(crate) program: &'p Program,
    /// By index in the plan; `None` for units that no step names.
    pub(crate) units: Vec<Option<Box<dyn ComputeUnit + 'p>>>,
    /// Accelerators, with their scratch.
    pub(crate) unit_threads: Vec<(usize, Addr)>,
    pub(crate) accelerators: AcceleratorMemories,
    counters: Arc<SetCounters>,
    assigner: Option<Arc<Assigner>>,
    pager: Option<AnyPager>,
    timeline: Option<Arc<Timeline>>,
    pub(crate) store: Box<dyn Store + 'p>,
    /// Reason for the place of the weights, for people.
    why: String,
    /// Whether the store must still load the weights that the first prompt did not use.
    preload: bool,
    pub(crate) arena: Region,
    pub(crate) states: States<'p>,
    pub(crate) bound: Vec<Bound>,
    pub(crate) scratch: Region,
    pub(crate) scratch_stride: usize,
    pub(crate) taken: Vec<AtomicUsize>,
    pub(crate) events: Events,
    pub(crate) pool: Pool,
    /// Rows of a call; the memory is used again by the next one.
    rows: Vec<Row>,
    stop: Option<&'static AtomicBool>,
    warn: Option<fn(&str)>,
    /// Callback for one warning about more overflow than expected.
    warn_overflow: Option<fn(&str)>,
    /// Entry point of the last call.
    last: Option<usize>,
    /// Border between loaded artifacts and the cache, if it moves.
    border: Option<Border>,
    /// Bytes of weights that are locked in memory.
    locked: u64,
}

impl<'p> Engine<'p> {
    /// The program that runs.
    pub fn program(&self) -> &'p Program {
        self.program
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Memory of the plan.
    pub fn memory(&self) -> Memory {
        Memory {
            arena: self.arena.bytes() as u64,
            scratch: self.scratch.bytes() as u64,
            weights: self.store.bytes(),
            kv: self.states.bytes(),
            snapshots: self.states.snapshot_bytes(),
            frames: self.paging().map_or(0, |p| p.frame_bytes),
        }
    }

    /// Bytes that were allocated in each memory other than the CPU's, by its name in the plan.
    pub fn accelerator_memories(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.memories.iter().skip(1).map(|m| &*m.name);
        names.zip(self.accelerators.bytes.iter().copied())
    }

    /// Place of the weights, and the reason.
    pub fn weights(&self) -> WeightPlacement {
        let held = self.store.held();
        if held.why.is_empty() { WeightPlacement { why: self.why.clone(), ..held } } else { held }
    }

    /// Waits until weights are at their final place, and uses them there.
    ///
    /// # Errors
    /// As [`Store::moves`].
    pub fn settle(&mut self) -> Result<()> {
        self.begin_preload();
        self.store.settle();
        self.follow()
    }

    /// Begins to load the weights that no step has used yet, once, unless they are lazy. Called after the
    /// first token. The first prompt reads most weights in the order of its steps; decoding would read the
    /// rest piece by piece.
    fn begin_preload(&mut self) {
        if std::mem::take(&mut self.preload) {
            self.store.preload();
        }
    }

    /// Uses weights at their new place, if they have moved.
    fn follow(&mut self) -> Result<()> {
        let moved = self.store.moves()?;
        if let Some((warn, text)) = self.warn.zip(self.store.warning()) {
            warn(&text);
        }
        if !moved {
            return Ok(());
        }
        let arenas: Vec<Option<Addr>> =
            [Some(self.arena.base())].into_iter().chain(self.accelerators.arenas.iter().copied()).collect();
        let places = Places {
            arenas: &arenas,
            states: self.states.addresses(),
            store: self.store.as_ref(),
            residents: &self.accelerators.residents,
        };
        let all = self
            .program
            .entries
            .iter()
            .map(|entry| bind(self.program, entry, &places, self.assigner.as_deref()));
        // The old addresses are used until all entry points are bound.
        self.bound = all.collect::<Result<_>>()?;
        self.store.leave();
        Ok(())
    }

    /// Waits until all weights may be read.
    ///
    /// # Errors
    /// Weights that cannot be loaded: a file that cannot be read or was changed.
    pub(crate) fn wait_for_weights(&self) -> Result<()> {
        self.store.load_progress().map_or(Ok(()), LoadProgress::wait_all)
    }

    /// Counts of (token, expert) pairs since the engine was opened, by layer, for each set of experts with
    /// fixed capacities. Empty if there are no such sets.
    pub fn overflow_counters(&self) -> Vec<(u32, OverflowCounters)> {
        self.counters.all()
    }

    /// Pairs past the capacities of experts since the engine was opened, and their expected number. `None` if
    /// no experts have capacities.
    pub fn overflowed(&self) -> Option<Overflowed> {
        Overflowed::of(&self.overflow_counters(), &self.program.placement)
    }

    /// Turns warnings about overflow off, for input of random ids.
    pub(crate) fn ignore_overflow(&mut self) {
        self.warn_overflow = None;
    }

    /// Warns once if more pairs overflow than the plan expects.
    pub(crate) fn warn_of_overflow(&mut self) {
        let Some(warn) = self.warn_overflow else { return };
        if let Some(over) = self.overflowed().filter(Overflowed::exceeds) {
            warn(&format!(
                "{over}: this text is not like that of the calibration; name some of it as `text` under `[calibrate]`, and \
                 build again"
            ));
            self.warn_overflow = None;
        }
    }

    /// Experts that decoding calls have computed with since the engine was opened. An expert counts once for
    /// all rows of a call; counts are summed over layers and calls.
    pub fn decoded_experts(&self) -> u64 {
        self.counters.decoded()
    }

    /// Statistics of experts that are assigned at run time; `None` if there are none.
    pub fn assigned(&self) -> Option<Assigned> {
        self.assigner.as_ref().map(|a| a.done())
    }

    /// Starts to record the work of every thread and of the disk.
    pub fn watch(&mut self) -> Arc<Timeline> {
        let timeline = Arc::new(Timeline::new(self.threads() + self.unit_threads.len()));
        if let Some(pager) = &self.pager {
            pager.watch(Arc::clone(&timeline));
        }
        self.timeline = Some(Arc::clone(&timeline));
        timeline
    }

    /// Name of a step of an entry point, in a word or two.
    pub fn step_name(&self, entry: u32, step: u32) -> String {
        let Some(e) = self.program.entries.get(entry as usize) else { return String::new() };
        let what = match e.steps.get(step as usize).map(|s| s.code) {
            Some(Code::Builtin(Builtin::RequestExperts { layer, .. })) => {
                format!("request_experts of layer {layer}")
            }
            Some(Code::Builtin(Builtin::RequestNeurons { layer, .. })) => {
                format!("neuron request of layer {layer}")
            }
            Some(Code::Builtin(Builtin::Dispatch { .. })) => "dispatch".to_owned(),
            _ => self.bound[entry as usize].layer_part(step as usize).map_or_else(
                || format!("step {step}"),
                |h| {
                    let clusters = e.steps.get(step as usize).is_some_and(|s| s.grid.has_clusters());
                    let part = if clusters { "neurons" } else { ["gate and up", "down"][h.part.index()] };
                    format!("layer {} {part}", h.layer)
                },
            ),
        };
        format!("{} {what}", e.kind)
    }

    /// Statistics of the store of experts on disk since the engine was opened; `None` if no experts stay on
    /// disk.
    pub fn paging(&self) -> Option<paging::Report> {
        let loads = self.units.iter().flatten().map(|unit| unit.loads()).find(|loads| loads.bytes > 0);
        let report = self.pager.as_ref().map(AnyPager::report)?;
        Some(paging::Report { loads: loads.unwrap_or_default(), locked: self.locked, ..report })
    }

    /// Messages between this host and others since the engine was opened; `None` if there are no others.
    pub fn traffic(&self) -> Option<HostTraffic> {
        let of_units = self.units.iter().flatten().filter_map(|unit| unit.traffic());
        let sum = of_units.reduce(|mut sum, of| {
            sum += of;
            sum
        });
        Some(HostTraffic { waited: self.events.waited(), ..sum? })
    }

    /// Experts that each other host has read from its disk since the engine was opened, by the name of its unit. Asks
    /// the hosts.
    pub fn reads_of_hosts(&self) -> Vec<(&str, HostReads)> {
        let of = |(unit, by): (&'p UnitRef, &Option<Box<dyn ComputeUnit + 'p>>)| {
            Some((&*unit.name, by.as_ref()?.reads()?))
        };
        self.program.units.iter().zip(&self.units).filter_map(of).collect()
    }

    /// Tokens in a slot; 0 if there is no such slot.
    pub fn len(&self, slot: u32) -> usize {
        self.states.len(slot).unwrap_or(0)
    }

    /// Whether a slot holds no tokens.
    pub fn is_empty(&self, slot: u32) -> bool {
        self.len(slot) == 0
    }

    /// Forgets the sequence in a slot. Experts that are assigned at run time stay where they have moved to.
    /// Units round differently, so the same tokens may then give other last bits than in a new engine.
    ///
    /// # Errors
    /// [`crate::Error::Request`].
    pub fn reset(&mut self, slot: u32) -> Result<()> {
        self.states.zero(slot, Units(&self.units))
    }

    /// Takes a snapshot of a slot's states, so that [`Engine::rewind`] can go back to here, and returns the
    /// position. If all states are caches nothing is copied: a sequence can go back to any position. Other
    /// states have room for the plan's number of snapshots, which all slots share. If the room is used up,
    /// the snapshot that saves least is evicted.
    ///
    /// # Errors
    /// [`crate::Error::Request`]; [`crate::Error::State`] if a state has no room, or after a call that failed
    /// in the slot.
    pub fn snapshot(&mut self, slot: u32) -> Result<usize> {
        self.states.snapshot(slot, Units(&self.units))
    }

    /// Prepares for tokens at a position that may be taken back: goes there, and ensures that
    /// [`Engine::rewind`] can go back to it until the next `keep`.
    ///
    /// # Errors
    /// As [`Engine::rewind`] and [`Engine::snapshot`].
    pub(crate) fn keep(&mut self, slot: u32, pos: usize) -> Result<()> {
        self.states.keep([(slot, pos)].into_iter(), Units(&self.units))
    }

    /// Restores a slot exactly as it was after its first `pos` tokens. Snapshots of later positions are
    /// dropped.
    ///
    /// # Errors
    /// [`crate::Error::Request`]; [`crate::Error::State`] if a ring has overwritten positions that are seen
    /// from there, or another state that is not a cache has no snapshot. Nothing is changed then.
    pub fn rewind(&mut self, slot: u32, pos: usize) -> Result<()> {
        self.states.rewind(slot, pos, Units(&self.units))
    }

    /// Furthest position up to `most` to which [`Engine::rewind`], and from which [`Engine::fork`], is
    /// possible; 0 if only the beginning is.
    pub fn resumes(&self, slot: u32, most: usize) -> usize {
        self.states.resumes(slot, most)
    }

    /// Makes the sequence in slot `to` a copy of the first `tokens` tokens of slot `from`, by copying the
    /// filled parts of the states. Both slots then share the snapshots of these tokens; other snapshots of
    /// `to` are dropped.
    ///
    /// # Errors
    /// As [`Engine::rewind`] of `from`; [`crate::Error::State`] for a state that a static graph keeps.
    pub fn fork(&mut self, from: u32, to: u32, tokens: usize) -> Result<()> {
        self.states.fork(from, to, tokens, Units(&self.units))
    }
}
