//! Executes a Program: sequences in, logits out.

use crate::admission::Tallies;
use crate::assign::{Assigned, Assigner};
use crate::available::available;
use crate::beside::{self, Beside, Executor};
use crate::call::{Bound, Extent, Places, Threads, Walk, bind};
use crate::cpu;
use crate::error::{Error, Result};
use crate::events::Events;
use crate::graphs::Graphs;
use crate::memory::{Addr, Region};
use crate::offload::GraphUnit;
use crate::overflow::Tally;
use crate::owned::{Arrival, How, MovingStore, OwnedStore};
use crate::paging::{self, OnFlash, Paging};
use crate::pool::Pool;
use crate::processor::Processor;
use crate::program::Program;
use crate::states::States;
use crate::store::{CheckLevel, MappedStore, Store};
use crate::timeline::Timeline;
use crate::unit::{self, BadExpert, StepFault, Unit};
use crate::weights::{self, Choice, Held, Weights};
use moec_ir::EntryKind;
use moec_ir::plan::{ALIGN, Builtin, Code, Entry, UnitRef};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// How to run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Threads; `None`: `MOEC_THREADS`, else one per core.
    pub threads: Option<usize>,
    /// How much of the bundle is checked first.
    pub check: CheckLevel,
    /// Whether no weights stay on flash, those neither that the plan would leave there.
    pub resident: bool,
    /// Where weights lie that do not stay on flash. Those beside experts on flash are mapped: [`Weights::Own`] is refused there.
    pub weights: Weights,
    /// Whether mapped weights come from disk only when they are first read. Otherwise those that the first prompt has not
    /// touched follow it in the background. [`Weights::Auto`] then maps them.
    pub lazy: bool,
    /// How experts on flash are handled; `None`: as the environment asks.
    pub paging: Option<Paging>,
    /// Looked at between calls of entry points: once true, work ends with [`Error::Interrupted`].
    pub stop: Option<&'static AtomicBool>,
}

/// Which rows of a prefill give logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None: only the KV cache is filled.
    None,
    /// The last one, from which generation goes on.
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Intermediate results of all entry points.
    pub arena: u64,
    /// Kernel scratch of all threads.
    pub scratch: u64,
    /// Packed weights.
    pub weights: u64,
    /// KV cache when every slot is full; the system backs only what was written.
    pub kv: u64,
    /// Frames of experts on flash; they hold a part of `weights`.
    pub frames: u64,
}

/// A program with its memory and threads.
///
/// One call at a time; sequences live in the slots of the KV cache. Kernels are trusted: see
/// [`crate::abi::KernelFn`].
pub struct Engine<'p> {
    pub(crate) program: &'p Program,
    /// By index in the plan; none for those that no step names.
    pub(crate) units: Vec<Option<Box<dyn Unit + 'p>>>,
    /// Those beside the processor, with their scratch.
    pub(crate) threads: Vec<(usize, Addr)>,
    pub(crate) beside: Beside,
    tallies: Arc<Tallies>,
    assigner: Option<Arc<Assigner>>,
    pager: Option<OnFlash>,
    timeline: Option<Arc<Timeline>>,
    pub(crate) store: Box<dyn Store + 'p>,
    /// Why weights lie where they do, for people.
    why: String,
    /// Whether the store is still to load what the first prompt leaves.
    preload: bool,
    pub(crate) arena: Region,
    pub(crate) states: States<'p>,
    pub(crate) bound: Vec<Bound>,
    pub(crate) scratch: Region,
    pub(crate) scratch_stride: usize,
    pub(crate) taken: Vec<AtomicUsize>,
    pub(crate) events: Events,
    pub(crate) pool: Pool,
    /// Rows of a call, kept for the next one.
    rows: Vec<Row>,
    stop: Option<&'static AtomicBool>,
}

impl<'p> Engine<'p> {
    /// Checks this machine and the bundle's files, maps the weights or begins to read them ([`Options::weights`])
    /// and takes the memory. Static graphs are loaded where the system executes them: on macOS, by Core ML.
    ///
    /// # Errors
    /// What [`cpu::check`], [`MappedStore::open`] or [`OwnedStore::open`] find; memory or threads
    /// refused, [`Error::NoRoom`]; a graph that does not load, or a unit that nothing here executes.
    pub fn open(program: &'p Program, bundle: &Path, options: Options) -> Result<Self> {
        #[cfg(target_os = "macos")]
        if !program.graphs.is_empty() {
            let graphs = Box::new(crate::coreml::CoreMl::new()?);
            return Self::with_graphs(program, bundle, graphs, bundle, options);
        }
        Self::with_units(program, bundle, &mut |_| None, bundle, options)
    }

    /// As [`Engine::open`], for a program with static graphs, which `graphs` executes. They are loaded from the folder
    /// `packages`.
    ///
    /// # Errors
    /// As [`Engine::open`]; a graph that does not load.
    pub fn with_graphs(
        program: &'p Program,
        bundle: &Path,
        graphs: Box<dyn Graphs>,
        packages: &Path,
        options: Options,
    ) -> Result<Self> {
        let mut graphs = Some(graphs);
        let runs = |unit: &UnitRef| {
            let steps = program.entries.iter().flat_map(|e| &e.steps);
            let of_graphs =
                |code| matches!(code, Code::Builtin(Builtin::Experts { .. } | Builtin::Part { .. }));
            steps.filter(|s| of_graphs(s.code)).any(|s| program.units.get(s.unit as usize) == Some(unit))
        };
        let mut bring = |unit: &UnitRef| graphs.take_if(|_| runs(unit)).map(Executor::Graphs);
        Self::with_units(program, bundle, &mut bring, packages, options)
    }

    /// As [`Engine::open`], with what executes the units beside the processor, which `executor` brings: it is asked for every
    /// unit that has steps. Static graphs are loaded from the folder `packages`.
    ///
    /// # Errors
    /// As [`Engine::open`]; a graph that does not load, a unit without an executor.
    pub fn with_units(
        program: &'p Program,
        bundle: &Path,
        executor: &mut dyn FnMut(&UnitRef) -> Option<Executor>,
        packages: &Path,
        options: Options,
    ) -> Result<Self> {
        let tallies = Arc::new(Tallies::of(&program.sets));
        let mut units = bring(program, executor, packages, &tallies)?;
        let mut options = options;
        let (store, pager, why): (Box<dyn Store + 'p>, _, _) =
            if program.paging.is_some() && !options.resident {
                if options.weights == Weights::Own {
                    return Err(Error::OwnUnderBudget);
                }
                let how = options.paging.map_or_else(Paging::from_env, Ok)?;
                options.threads = Some(paging::threads(program, options.threads)?);
                let (store, pager) = paging::open(program, bundle, options.check, &how)?;
                (Box::new(store), Some(pager), Choice::under_budget().why)
            } else {
                let (store, why) = weights_of(program, bundle, options)?;
                (store, None, why)
            };
        let assigner = Assigner::new(program)?;
        let processor = Processor::new(program, pager.clone(), Arc::clone(&tallies), assigner.clone());
        units[0] = Some(Box::new(processor));
        let mut engine = Self::with_parts(program, store, units, (tallies, assigner), Some(bundle), options)?;
        (engine.pager, engine.why) = (pager, why);
        Ok(engine)
    }

    /// As [`Engine::open`], with weights from another store; [`Options::weights`] says nothing then.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn with_store(program: &'p Program, store: Box<dyn Store + 'p>, options: Options) -> Result<Self> {
        let tallies = Arc::new(Tallies::of(&program.sets));
        let mut units: Vec<Option<Box<dyn Unit + 'p>>> = program.units.iter().map(|_| None).collect();
        units[0] = Some(Box::new(Processor::new(program, None, Arc::clone(&tallies), None)));
        Self::with_parts(program, store, units, (tallies, None), None, options)
    }

    fn with_parts(
        program: &'p Program,
        store: Box<dyn Store + 'p>,
        mut units: Vec<Option<Box<dyn Unit + 'p>>>,
        (tallies, assigner): (Arc<Tallies>, Option<Arc<Assigner>>),
        bundle: Option<&Path>,
        options: Options,
    ) -> Result<Self> {
        unit::check(&units, program)?;
        cpu::check(&program.target)?;
        let lanes = cpu::threads(options.threads)?;
        let arena = Region::new("activations", program.arena_bytes())?;
        let beside = beside::open(program, &mut units, bundle)?;
        let states = States::new(program, &beside.states)?;
        // One more line between threads, so that the prefetcher of one does not pull at the next.
        let stride = program.scratch_bytes.checked_next_multiple_of(ALIGN).and_then(|b| b.checked_add(ALIGN));
        let used = |u: usize| program.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit as usize == u);
        let others: Vec<usize> = (1..units.len()).filter(|&u| units[u].is_some() && used(u)).collect();
        // Units that compute in the processor's memory have their scratch there.
        let scratches = (lanes + others.len()) as u64;
        let scratch_bytes = stride.and_then(|s| s.checked_mul(scratches)).unwrap_or(u64::MAX);
        let scratch = Region::new("scratch", scratch_bytes)?;
        let stride = stride.unwrap_or(0) as usize;
        let at = |i: usize| scratch.base().plus((lanes + i) * stride);
        let own = |u: usize| beside.scratch.get(u).copied().flatten();
        let threads: Vec<_> =
            others.iter().enumerate().map(|(i, &u)| (u, own(u).unwrap_or_else(|| at(i)))).collect();
        let arenas: Vec<Option<Addr>> =
            [Some(arena.base())].into_iter().chain(beside.arenas.iter().copied()).collect();
        let places = Places {
            arenas: &arenas,
            states: states.addresses(),
            store: store.as_ref(),
            residents: &beside.residents,
        };
        let all = program.entries.iter().map(|entry| bind(program, entry, &places));
        let bound: Vec<Bound> = all.collect::<Result<_>>()?;
        if let Some(assigner) = &assigner {
            // Experts are copied to the hot unit at any dispatch: by then all must be there.
            store.arrival().map_or(Ok(()), Arrival::wait_all)?;
            assigner.bind(program, &|s| places.matrices(program, 0, s), &|s| {
                let hot = program.schedule.as_ref().and_then(|s| s.hot)?;
                places.matrices(program, hot, s)
            })?;
        }
        let most = bound.iter().map(Bound::len).max().unwrap_or(0);
        let events = bound.iter().map(|b| b.events().len()).max().unwrap_or(0);
        Ok(Self {
            program,
            units,
            beside,
            tallies,
            assigner,
            pager: None,
            timeline: None,
            store,
            why: "as asked".to_owned(),
            preload: !options.lazy,
            arena,
            states,
            bound,
            scratch,
            scratch_stride: stride,
            taken: (0..most).map(|_| AtomicUsize::new(0)).collect(),
            events: Events::new(events, lanes + threads.len()),
            pool: Pool::new(lanes, threads.len(), cpu::pinning(lanes))?,
            threads,
            rows: Vec::with_capacity(program.entries.iter().map(|e| e.kind.rows()).max().unwrap_or(0)),
            stop: options.stop,
        })
    }

    /// The program that runs.
    pub fn program(&self) -> &'p Program {
        self.program
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        self.pool.lanes()
    }

    /// What the plan takes.
    pub fn memory(&self) -> Memory {
        Memory {
            arena: self.arena.bytes() as u64,
            scratch: self.scratch.bytes() as u64,
            weights: self.store.bytes(),
            kv: self.states.bytes(),
            frames: self.paging().map_or(0, |p| p.frame_bytes),
        }
    }

    /// Bytes that were taken of each memory beside the processor's, by the names that the plan gives them.
    pub fn memories_beside(&self) -> impl Iterator<Item = (&str, u64)> {
        let names = self.program.memories.iter().skip(1).map(|m| &*m.name);
        names.zip(self.beside.bytes.iter().copied())
    }

    /// Where weights lie, and why.
    pub fn weights(&self) -> Held {
        let held = self.store.held();
        if held.why.is_empty() { Held { why: self.why.clone(), ..held } } else { held }
    }

    /// Waits until weights are where they are to stay, and takes them from there.
    ///
    /// # Errors
    /// Some cannot be read.
    pub fn settle(&mut self) -> Result<()> {
        self.begin_preload();
        self.store.settle()?;
        self.follow()
    }

    /// Begins to load what nobody has asked for, once, if it is to be loaded.
    fn begin_preload(&mut self) {
        if std::mem::take(&mut self.preload) {
            self.store.preload();
        }
    }

    /// Takes weights from where they have moved to.
    fn follow(&mut self) -> Result<()> {
        if !self.store.moves()? {
            return Ok(());
        }
        let arenas: Vec<Option<Addr>> =
            [Some(self.arena.base())].into_iter().chain(self.beside.arenas.iter().copied()).collect();
        let places = Places {
            arenas: &arenas,
            states: self.states.addresses(),
            store: self.store.as_ref(),
            residents: &self.beside.residents,
        };
        let all = self.program.entries.iter().map(|entry| bind(self.program, entry, &places));
        // Until all are there the addresses of before hold.
        self.bound = all.collect::<Result<_>>()?;
        self.store.leave();
        Ok(())
    }

    /// Waits until all weights may be read.
    ///
    /// # Errors
    /// Some do not come: a file that cannot be read or was changed.
    pub(crate) fn wait_for_weights(&self) -> Result<()> {
        self.store.arrival().map_or(Ok(()), Arrival::wait_all)
    }

    /// What became of the (token, expert) pairs of each set of experts with fixed capacities, by layer, since the engine
    /// was opened; empty where there are none.
    pub fn tallies(&self) -> Vec<(u32, Tally)> {
        self.tallies.all()
    }

    /// What became of experts that are assigned while the plan runs; `None` where none are.
    pub fn assigned(&self) -> Option<Assigned> {
        self.assigner.as_ref().map(|a| a.done())
    }

    /// Writes down from now on what every thread and the disk do.
    pub fn watch(&mut self) -> Arc<Timeline> {
        let timeline = Arc::new(Timeline::new(self.threads() + self.threads.len()));
        if let Some(pager) = &self.pager {
            pager.watch(Arc::clone(&timeline));
        }
        self.timeline = Some(Arc::clone(&timeline));
        timeline
    }

    /// What a step of an entry point is, in a word or two.
    pub fn step_name(&self, entry: u32, step: u32) -> String {
        let Some(e) = self.program.entries.get(entry as usize) else { return String::new() };
        let what = match e.steps.get(step as usize).map(|s| s.code) {
            Some(Code::Builtin(Builtin::Fetch { layer, .. })) => format!("fetch of layer {layer}"),
            Some(Code::Builtin(Builtin::Wake { layer, .. })) => format!("wake of layer {layer}"),
            Some(Code::Builtin(Builtin::Dispatch { .. })) => "dispatch".to_owned(),
            _ => self.bound[entry as usize].half(step as usize).map_or_else(
                || format!("step {step}"),
                |h| format!("layer {} {}", h.layer, ["gate and up", "down"][h.part.min(1)]),
            ),
        };
        format!("{} {what}", e.kind)
    }

    /// What the store of experts on flash did since the engine was opened; `None` where all weights are mapped.
    pub fn paging(&self) -> Option<paging::Report> {
        self.pager.as_ref().map(OnFlash::report)
    }

    /// Tokens in a slot; 0 if there is no such slot.
    pub fn len(&self, slot: u32) -> usize {
        self.states.len(slot).unwrap_or(0)
    }

    /// Whether a slot holds no tokens.
    pub fn is_empty(&self, slot: u32) -> bool {
        self.len(slot) == 0
    }

    /// Forgets the sequence in a slot. Where experts are assigned while the plan runs, they stay where they have moved to: units
    /// round differently, so that the same tokens may then give other last bits than in an engine that has just been opened.
    ///
    /// # Errors
    /// [`Error::BadSlot`].
    pub fn reset(&mut self, slot: u32) -> Result<()> {
        self.states.zero(slot)
    }

    /// Keeps what the states hold of a slot, so that [`Engine::rewind`] can go back to here, and gives the position. Where all
    /// states are caches nothing is copied: a sequence goes back to any position. Others have room for as many snapshots as
    /// the plan says; the earliest of a slot goes where there is none left.
    ///
    /// # Errors
    /// [`Error::BadSlot`]; [`Error::State`] where a state has no room, or after a call that failed in the slot.
    pub fn snapshot(&mut self, slot: u32) -> Result<usize> {
        self.states.snapshot(slot)
    }

    /// Makes a slot exactly what it was behind its first `pos` tokens. Snapshots of later positions go.
    ///
    /// # Errors
    /// [`Error::BadSlot`], [`Error::Gap`]; [`Error::State`] where a ring has overwritten what is seen from there, or another
    /// state that is no cache has no snapshot.
    /// Nothing is changed then.
    pub fn rewind(&mut self, slot: u32, pos: usize) -> Result<()> {
        self.states.rewind(slot, pos)
    }

    /// Makes the sequence in slot `to` a copy of the one in slot `from`: copies what the states hold of it, as far as they
    /// are filled. Snapshots are not copied, and those of `to` go.
    ///
    /// # Errors
    /// [`Error::BadSlot`]; [`Error::State`] for a state that a static graph keeps, and after a call that failed in `from`.
    pub fn fork(&mut self, from: u32, to: u32) -> Result<()> {
        self.states.fork(from, to)
    }

    /// Appends `ids` to the sequence in `slot` at position `start`, in chunks of the entry points that
    /// there are. Tokens at `start` and later are replaced, as [`Engine::rewind`] can.
    ///
    /// `sink` gets the position in the sequence and the logits (`f32[vocab]`) of every row that `want`
    /// names, in order. Its error ends the work.
    ///
    /// # Errors
    /// Before any work: an empty prompt, an id outside of the vocabulary, more tokens than the context
    /// holds, a slot that is not there, a hole before `start`, a state that does not go back to it. Then: [`Error::Interrupted`], a router
    /// that makes up experts, and what `sink` returns.
    pub fn prefill(
        &mut self,
        slot: u32,
        start: usize,
        ids: &[u32],
        want: Want,
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let room = |e: &Entry| match want {
            Want::All => e.kind.rows().min(e.out_rows as usize),
            Want::None | Want::Last => e.kind.rows(),
        };
        if ids.is_empty() {
            return Err(Error::EmptyPrompt);
        }
        let what = if start == 0 { "the prompt has" } else { "the sequence would have" };
        self.check_context(what, start.saturating_add(ids.len()))?;
        ids.iter().try_for_each(|&id| self.check_id(id))?;
        self.states.check_rewind(slot, start)?;
        let prefill = |k| matches!(k, EntryKind::Prefill(_));
        let seq_len = start + ids.len();
        let mut done = 0;
        while done < ids.len() {
            let left = ids.len() - done;
            let (entry, room) = self.pick(prefill, room, left).ok_or(Error::NoEntry("prefill"))?;
            let n = left.min(room);
            let rows = (done..done + n).map(|i| Row { slot, pos: start + i, id: ids[i] });
            let wanted = match want {
                Want::All => 0..n,
                Want::Last if done + n == ids.len() => n - 1..n,
                Want::None | Want::Last => 0..0,
            };
            self.call(entry, rows, wanted.clone(), seq_len)?;
            for (i, row) in wanted.enumerate() {
                sink(start + done + row, self.logits(entry, i))?;
            }
            done += n;
        }
        // The first prompt has read most of what it will ever need, in the order of its steps. What is left, decoding would
        // ask for piece by piece.
        self.begin_preload();
        Ok(())
    }

    /// Appends one token to each of the sequences in `batch` (`slot`, position, id), in the smallest
    /// decode entry point that takes them all, or in several calls of the largest. `sink` gets the index
    /// in the batch and the logits (`f32[vocab]`) of each, in order.
    ///
    /// # Errors
    /// As [`Engine::prefill`]; also a slot that the batch names twice.
    pub fn decode(
        &mut self,
        batch: &[(u32, usize, u32)],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.decode_in(EntryKind::Decode, batch, sink)
    }

    /// As [`Engine::decode`], in the little entry points, whose routers choose fewer experts. What they leave in the states
    /// is theirs; decoding the same position again replaces it, for which a snapshot is taken where a state needs one.
    ///
    /// # Errors
    /// As [`Engine::decode`] and [`Engine::snapshot`]; a program without little entry points.
    pub fn decode_little(
        &mut self,
        batch: &[(u32, usize, u32)],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.decode_in(EntryKind::Little, batch, sink)
    }

    /// Decodes in the entry points of one kind.
    fn decode_in(
        &mut self,
        kind: fn(u32) -> EntryKind,
        batch: &[(u32, usize, u32)],
        sink: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        for (i, &(slot, pos, id)) in batch.iter().enumerate() {
            self.check_context("the sequence would have", pos.saturating_add(1))?;
            self.check_id(id)?;
            self.states.check_rewind(slot, pos)?;
            if batch[..i].iter().any(|&(other, ..)| other == slot) {
                return Err(Error::SlotTwice(slot));
            }
        }
        if matches!(kind(0), EntryKind::Little(_)) {
            self.states.keep(batch.iter().map(|&(slot, pos, _)| (slot, pos)))?;
        }
        let decode = |k: EntryKind| k == kind(k.rows() as u32);
        let room = |e: &Entry| e.kind.rows().min(e.out_rows as usize);
        let mut done = 0;
        while done < batch.len() {
            let left = batch.len() - done;
            let (entry, room) = self.pick(decode, room, left).ok_or(Error::NoEntry(kind(0).name()))?;
            let n = left.min(room);
            let rows = batch[done..done + n].iter().map(|&(slot, pos, id)| Row { slot, pos, id });
            // Every row is a sequence of its own, which ends with it.
            self.call(entry, rows, 0..n, 0)?;
            for i in 0..n {
                sink(done + i, self.logits(entry, i))?;
            }
            done += n;
        }
        Ok(())
    }

    /// Of the entry points of a kind, the one with the smallest room that is enough for `left` rows, else the
    /// one with the largest; and its room.
    fn pick(
        &self,
        kind: impl Fn(EntryKind) -> bool,
        room: impl Fn(&Entry) -> usize,
        left: usize,
    ) -> Option<(usize, usize)> {
        let of_kind = || {
            let entries = self.program.entries.iter().enumerate().filter(|(_, e)| kind(e.kind));
            entries.map(|(i, e)| (i, room(e)))
        };
        let enough = of_kind().filter(|(_, room)| *room >= left).min_by_key(|(_, room)| *room);
        enough.or_else(|| of_kind().max_by_key(|(_, room)| *room))
    }

    fn check_context(&self, what: &'static str, needed: usize) -> Result<()> {
        let max = self.program.model.max_context as usize;
        if needed > max { Err(Error::Context { what, needed, max }) } else { Ok(()) }
    }

    fn check_id(&self, id: u32) -> Result<()> {
        let vocab = self.program.model.vocab;
        if id >= vocab { Err(Error::BadId { id, vocab }) } else { Ok(()) }
    }

    /// Runs an entry point on all threads. The processor allocates nothing, as long as it has no more rows than its entry point and
    /// no expert changes its place.
    fn call(
        &mut self,
        entry: usize,
        rows: impl Iterator<Item = Row>,
        wanted: Range<usize>,
        seq_len: usize,
    ) -> Result<()> {
        if self.stop.is_some_and(|s| s.load(Ordering::Relaxed)) {
            return Err(Error::Interrupted);
        }
        self.follow()?;
        let mut kept = std::mem::take(&mut self.rows);
        kept.clear();
        kept.extend(rows);
        let done = self.walk(entry, &kept, wanted, seq_len);
        self.rows = kept;
        done
    }

    fn walk(&mut self, entry: usize, rows: &[Row], wanted: Range<usize>, seq_len: usize) -> Result<()> {
        let extent = self.begin(entry, rows, wanted, seq_len)?;
        let fault = OnceLock::new();
        let walk = Walk {
            bound: &self.bound[entry],
            units: &self.units,
            taken: &self.taken,
            events: &self.events,
            fault: &fault,
            extent,
            arrival: self.store.arrival().filter(|a| !a.is_complete()),
            timeline: self.timeline.as_deref().map(|t| (t, entry as u32)),
        };
        let threads = Threads {
            lanes: self.pool.lanes(),
            scratch: (self.scratch.base(), self.scratch_stride),
            beside: &self.threads,
        };
        self.pool.run(&|index, barrier| {
            // SAFETY: the program is verified, and `begin` has checked the rows; all threads of the pool walk the
            // same steps, each with its own part of the scratch; `&mut self` keeps every other use of
            // the memory away.
            unsafe { threads.walk(&walk, 0..walk.bound.len(), index, barrier) }
        });
        self.end(rows, fault.into_inner())
    }

    /// Writes the inputs of an entry point, and padding behind them.
    pub(crate) fn begin(
        &mut self,
        entry: usize,
        rows: &[Row],
        wanted: impl Iterator<Item = usize> + Clone,
        seq_len: usize,
    ) -> Result<Extent> {
        let outputs = wanted.clone().count();
        let e = self.program.entries.get(entry).ok_or(Error::NoEntry("such"))?;
        if rows.len() > e.kind.rows()
            || outputs > e.out_rows as usize
            || wanted.clone().any(|w| w >= rows.len())
        {
            return Err(Error::Plan(format!(
                "{} does not take {} rows and {} outputs",
                e.kind,
                rows.len(),
                outputs
            )));
        }
        let (kind, out_rows) = (e.kind, e.out_rows as usize);
        for row in rows {
            self.check_id(row.id)?;
            self.check_context("the sequence would have", row.pos.saturating_add(1))?;
            let slots = self.program.model.slots;
            if row.slot >= slots {
                return Err(Error::BadSlot { slot: row.slot, slots });
            }
        }
        self.states.begin(rows.iter().map(|row| (row.slot, row.pos)))?;
        self.write(entry, 0, kind.rows(), 0, rows.iter().map(|r| r.id as i32));
        self.write(entry, 1, kind.rows(), -1, rows.iter().map(|r| r.pos as i32));
        self.write(entry, 2, kind.rows(), 0, rows.iter().map(|r| r.slot as i32));
        self.write(entry, 3, out_rows, -1, wanted.map(|w| w as i32));
        self.taken.iter().for_each(|t| t.store(0, Ordering::Relaxed));
        let lanes = self.pool.lanes();
        self.events.reset(self.bound[entry].events().iter().map(|&unit| if unit == 0 { lanes } else { 1 }));
        Ok(Extent { n: rows.len(), m: outputs, seq_len })
    }

    /// Fills an input buffer with `words` words: the values, then padding.
    fn write(
        &mut self,
        entry: usize,
        buffer: usize,
        words: usize,
        pad: i32,
        values: impl Iterator<Item = i32>,
    ) {
        let at = self.arena.base().plus(self.program.entries[entry].buffers[buffer].offset as usize);
        let at = at.of::<i32>();
        for (i, value) in values.chain(std::iter::repeat(pad)).take(words).enumerate() {
            // SAFETY: the verifier has found `words` aligned words in the buffer, and `&mut self` says that
            // no step is running.
            unsafe { at.add(i).write(value) };
        }
    }

    /// Books what a call has done.
    pub(crate) fn end(&mut self, rows: &[Row], fault: Option<StepFault>) -> Result<()> {
        match fault {
            Some(StepFault::Expert(BadExpert { step, expert, experts })) => {
                return Err(Error::BadExpert { expert, experts, step });
            }
            Some(StepFault::Unknown(unknown)) => return Err(unknown.into()),
            Some(StepFault::Unit(e) | StepFault::Flash(e) | StepFault::Weights(e)) => return Err(e),
            None => {}
        }
        self.states.end(rows.iter().map(|row| (row.slot, row.pos)));
        Ok(())
    }

    /// A row of the logits of the last call of an entry point.
    fn logits(&self, entry: usize, row: usize) -> &[f32] {
        let e = &self.program.entries[entry];
        let logits = &e.buffers[e.logits as usize];
        let at = self.arena.base().plus(logits.offset as usize);
        // SAFETY: `row < out_rows`, for which the verifier has found room; the arena is initialised memory
        // and nothing writes to it while `self` is borrowed.
        unsafe {
            let first = at.of::<f32>().add(row * logits.stride as usize);
            std::slice::from_raw_parts(first, self.program.model.vocab as usize)
        }
    }
}

/// What executes each unit of a program that has steps, the processor aside.
fn bring<'p>(
    program: &'p Program,
    executor: &mut dyn FnMut(&UnitRef) -> Option<Executor>,
    packages: &Path,
    tallies: &Arc<Tallies>,
) -> Result<Vec<Option<Box<dyn Unit + 'p>>>> {
    let mut units: Vec<Option<Box<dyn Unit + 'p>>> = Vec::with_capacity(program.units.len());
    for (i, of) in program.units.iter().enumerate() {
        let used = program.entries.iter().flat_map(|e| &e.steps).any(|s| s.unit as usize == i);
        if i == 0 || !used {
            units.push(None);
            continue;
        }
        units.push(Some(match executor(of).ok_or_else(|| Error::NoUnit(of.name.clone()))? {
            Executor::Unit(mut unit) => {
                unit.load(program, i as u32, packages)?;
                unit
            }
            Executor::Graphs(mut graphs) => {
                graphs.load(packages, &program.graphs, program.model.slots as usize)?;
                Box::new(GraphUnit::new(program, graphs, Arc::clone(tallies)))
            }
        }));
    }
    Ok(units)
}

/// A store of all weights that the processor's steps read, mapped or in memory of our own, and why so.
fn weights_of<'p>(
    program: &'p Program,
    bundle: &Path,
    options: Options,
) -> Result<(Box<dyn Store + 'p>, String)> {
    if program.memories.iter().any(|m| !m.residents.is_empty()) && options.weights != Weights::Own {
        // Memory of our own holds whole files, and a part of these weights is elsewhere.
        let here = program.segments_of(0);
        let store = MappedStore::open_some(program, bundle, options.check, &|i| here.contains(&i))?;
        return Ok((Box::new(store), "other memories hold a part of them".to_owned()));
    }
    let needed = weights::needed(program, cpu::threads(options.threads)?);
    let choice = weights::choose(options.weights, options.lazy, needed, available())?;
    // Who asks for `own` by name waits for it. So does who has all files hashed, which takes longer than to fill it.
    let may_move = options.weights == Weights::Auto && options.check != CheckLevel::All;
    let store: Box<dyn Store + 'p> = if !choice.own {
        Box::new(MappedStore::open(program, bundle, options.check)?)
    } else if may_move && MovingStore::is_worth(program, bundle)? {
        Box::new(MovingStore::open(program, bundle, options.check, &How::from_env()?)?)
    } else {
        Box::new(OwnedStore::open(program, bundle, options.check, &How::from_env()?)?)
    };
    Ok((store, choice.why))
}
