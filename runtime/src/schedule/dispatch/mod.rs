//! Experts that several units can run: their units in this call, and the moves before the next.
//!
//! At every dispatch of such a layer one thread counts rows and calls the policy: [`Running`] if experts are
//! scheduled over memories, [`CachedDispatcher`] if they are cached in frames. It then starts the transfers
//! that the decision needs. A dispatcher also gets the routers' scores and transfers experts ahead. Transfers
//! go through the `transfer_queue`: in every call a thread of its own serves it, while the other threads and
//! the unit compute. The unit begins with the experts that it holds, and continues with each of the others as
//! its transfer ends (`waves`).

pub mod plan;
mod transfer_queue;
mod waves;

use super::cached::CachedDispatcher;
use super::cached::dispatcher::{Counts, RowScores, Rows};
use super::decision::{FrameTransfer, Transfer};
use super::error::ScheduleError;
use super::scheduled::{ExpertUnit as Scheduled, Running, StepLoads};
use super::warm_up::{COSTS, CostCheck, PlannedWork};
use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::builtin::ExpertOrder;
use crate::exec::unit::{ComputeUnit, StepFault, Units};
use crate::offload::cache::Key;
use crate::offload::paging::AnyPager;
use crate::platform::memory::Addr;
use moec_ir::plan::{ExpertLayer, ExpertPolicy, Segment, StreamSet};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

pub(crate) use transfer_queue::TransferQueue;
use transfer_queue::{Job, MatrixTransfer};
use waves::Waves;

/// Statistics of experts that are assigned at run time, since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Assigned {
    /// Experts, counted once in each step, by the unit that ran them: the hot unit, the CPU and the NDP
    /// DIMMs.
    pub experts: [u64; 3],
    /// Rows of these experts.
    pub rows: [u64; 3],
    /// Experts that were transferred to the hot unit because a step needed them there.
    pub fetched: u64,
    /// Experts whose moves ahead of a step have begun: to the hot unit, to another layout, and to another
    /// DIMM.
    pub moves: [u64; 3],
    /// Moves that, by the plan's times, did not end in their window, and experts on the hot unit whose step
    /// waited for one.
    pub late_moves: [u64; 2],
    /// Steps of prompts whose experts were all streamed through the frames of the hot unit.
    pub streamed: u64,
    /// Experts whose class was predicted correctly, and all experts with a prediction.
    pub predicted: [u64; 2],
    /// Sum over steps of the times that the scheduler expects, in microseconds.
    pub makespan_us: f64,
    /// Counters of the frames that all layers share, if there are any.
    pub frames: Option<Counts>,
    /// Costs that were measured in the first calls, beside the plan's.
    pub costs: [Option<CostCheck>; COSTS],
}

/// Matrices of a layer's experts in two memories, each with a table of their addresses.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    /// The CPU's table.
    from: Addr,
    /// The hot unit's.
    to: Addr,
    /// Bytes of a matrix.
    bytes: usize,
}

/// Constants of a layer.
struct Layer {
    /// Indices into its units, as [`Scheduled`] numbers them: the hot unit, the CPU, the cold unit.
    places: [u32; 3],
    /// Index of the cold unit's NDP command streams.
    set: Option<u32>,
    segments: Vec<u32>,
    /// Segments that the CPU's steps read.
    of_cpu: Vec<u32>,
}

/// Scheduler of experts.
enum Core {
    Scheduled(Box<Running>),
    Cached(Box<CachedDispatcher>),
}

impl Core {
    /// The frame of an expert of the layer that was dispatched last.
    fn frame(&self, key: Key) -> Option<u32> {
        match self {
            Self::Scheduled(running) => running.frame(key),
            Self::Cached(dispatcher) => dispatcher.frame(key),
        }
    }
}

/// Units and tables that transfers use.
struct DeviceContext<'a> {
    units: Units<'a>,
    layers: &'a [Layer],
    hot: Option<usize>,
    cold: Option<usize>,
    /// By layer: the matrices that are copied when an expert is transferred to the hot unit.
    matrices: &'a [Vec<Matrices>],
    transfers: &'a TransferQueue,
    moves: &'a TransferQueue,
    /// Whether the pages of transferred experts are released.
    forgets: bool,
}

/// The entry of an expert in a table of addresses.
fn entry(table: Addr, expert: usize) -> Addr {
    table.plus(expert * size_of::<Addr>())
}

impl<'a> DeviceContext<'a> {
    fn hot(&self) -> Option<&'a (dyn ComputeUnit + 'a)> {
        self.hot.and_then(|unit| self.units.get(unit))
    }

    fn matrices(&self, layer: usize) -> &[Matrices] {
        self.matrices.get(layer).map_or(&[], Vec::as_slice)
    }

    /// Addresses of the matrices of an expert that the hot unit holds.
    ///
    /// # Safety
    /// As [`Assigner::dispatch`].
    unsafe fn frame(&self, layer: usize, expert: usize) -> Vec<Addr> {
        let Some(unit) = self.hot() else { return Vec::new() };
        let place = |m: &Matrices| {
            let mut place = Addr::read_only(std::ptr::null());
            let slot = Addr::read_only((&raw mut place).cast());
            // SAFETY: tables have an address for each expert.
            unsafe { unit.copy(entry(m.to, expert), slot, size_of::<Addr>()) };
            place
        };
        self.matrices(layer).iter().map(place).collect()
    }

    /// Starts the transfer of an expert into a frame of the hot unit; the unit's table then names it.
    ///
    /// # Safety
    /// As [`Assigner::dispatch`]; no step reads the frame before its ticket is done.
    unsafe fn transfer_to_frame(
        &self,
        FrameTransfer { key, frame }: FrameTransfer,
        frames: &[Vec<Addr>],
        tickets: &mut [u64],
    ) {
        let (layer, expert, frame) = (key.layer.into(), key.expert.into(), frame as usize);
        let (Some(unit), Some(frame), Some(ticket)) = (self.hot(), frames.get(frame), tickets.get_mut(frame))
        else {
            return;
        };
        let transfer = |(m, &to): (&Matrices, &Addr)| MatrixTransfer {
            // SAFETY: tables have an address for each expert, and the CPU's table is in its memory.
            from: unsafe { entry(m.from, expert).of::<Addr>().read() },
            to,
            entry: entry(m.to, expert),
            bytes: m.bytes,
        };
        let transfers = self.matrices(layer).iter().zip(frame).map(transfer).collect();
        // SAFETY: guaranteed by the caller.
        *ticket = unsafe { self.transfers.push(Job::Copy { transfers, forgets: self.forgets }, unit) };
    }

    /// The cold unit, and its streams of a layer.
    fn streams(&self, layer: u16) -> Option<(&'a (dyn ComputeUnit + 'a), u32)> {
        self.cold.and_then(|u| self.units.get(u)).zip(self.layers[usize::from(layer)].set)
    }

    /// Starts transfers in their order.
    ///
    /// # Safety
    /// As [`Self::transfer_to_frame`].
    unsafe fn start(&self, transfers: &[Transfer], transit: &mut Transit) -> Result<()> {
        for transfer in transfers {
            match *transfer {
                Transfer::ToFrame(transfer) => {
                    let Transit { frames, tickets, .. } = transit;
                    // SAFETY: guaranteed by the caller.
                    unsafe { self.transfer_to_frame(transfer, frames, tickets) };
                }
                Transfer::Relocate { key, to } => {
                    self.settle(transit, key.layer, |r| r.key == key)?;
                    let Some((unit, set)) = self.streams(key.layer) else { continue };
                    let job = Job::Relocate { set, expert: key.expert.into(), to: to.map(u32::from) };
                    // SAFETY: it has no addresses.
                    let ticket = unsafe { self.moves.push(job, unit) };
                    transit.relocations.push(Relocation { key, ticket, has_ended: false });
                }
            }
        }
        Ok(())
    }

    /// Waits for the moves of some experts of a layer inside of the cold unit's memory: from now on they are
    /// at their new places alone.
    fn settle(
        &self,
        transit: &mut Transit,
        layer: u16,
        is_meant: impl Fn(&Relocation) -> bool,
    ) -> Result<()> {
        let Some((unit, set)) = self.streams(layer) else { return Ok(()) };
        let mut result = Ok(());
        transit.relocations.retain(|r| {
            let meant = r.key.layer == layer && is_meant(r) && result.is_ok();
            if meant {
                self.moves.wait(r.ticket);
                result = self.moves.check().and_then(|()| unit.settle(set, r.key.expert.into()));
            }
            !meant
        });
        result
    }
}

fn bad(e: ScheduleError) -> Error {
    Error::plan(format!("its experts: {e}"))
}

/// Move of an expert inside of the cold unit's memory.
struct Relocation {
    key: Key,
    ticket: u64,
    /// Whether it has ended by the plan's times: the expert's next step needs it at its new place.
    has_ended: bool,
}

/// Transfers that have begun.
struct Transit {
    /// By frame: the addresses of its matrices, looked up when the first step runs.
    frames: Vec<Vec<Addr>>,
    /// By frame: the ticket of its last transfer.
    tickets: Vec<u64>,
    relocations: Vec<Relocation>,
    /// Moves that begin when the experts of the last dispatched layer have been computed.
    pending: Vec<Transfer>,
}

struct State {
    core: Core,
    /// Initial expert of each frame.
    begins: Vec<Key>,
    transit: Transit,
    /// Experts that the host's memory has lost; a buffer kept for reuse.
    evicted: Vec<Key>,
    /// By expert: rows, and the index of its unit among those of the layer.
    loads: Vec<u32>,
    chosen: Vec<u32>,
    /// By expert: its rank among those of its unit in the dispatch table.
    ranks: Vec<u64>,
    /// Experts of the last layer that units other than the CPU compute.
    accelerator_experts: Vec<i32>,
    /// The last transfer that was submitted ahead.
    ahead: u64,
    done: Assigned,
    /// Whether a move has failed: the locations of experts are then unknown.
    broken: bool,
}

/// Assigns the experts of a plan whose units are not fixed.
pub(crate) struct Assigner {
    layers: Vec<Layer>,
    hot: Option<usize>,
    cold: Option<usize>,
    matrices: OnceLock<Vec<Vec<Matrices>>>,
    state: Mutex<State>,
    transfers: Arc<TransferQueue>,
    /// Moves inside of the cold unit's memory, if there are any.
    moves: Option<TransferQueue>,
    waves: Waves,
    /// Store that knows the experts in the host's memory, if experts are on disk.
    pager: Option<AnyPager>,
    forgets: bool,
}

impl Assigner {
    /// Creates the assigner for the experts of a program; `None` if their units are fixed.
    ///
    /// # Errors
    /// Negative or infinite times, an unknown policy.
    pub(crate) fn new(program: &Program, pager: Option<AnyPager>) -> Result<Option<Arc<Self>>> {
        let placed = &program.experts;
        let (hot, cold) = (placed.policy.hot(), placed.policy.cold());
        let experts = placed.layers.iter().map(|l| l.starts.len()).max().unwrap_or(0);
        let layer = |layer: &ExpertLayer| {
            let place = |unit: Option<u32>| {
                let at = unit.and_then(|unit| layer.units.iter().position(|&u| u == unit));
                at.map_or(0, |at| at as u32)
            };
            let of = |s: &StreamSet| (s.layer, Some(s.unit)) == (layer.layer, cold);
            Layer {
                places: [place(hot), place(Some(0)), place(cold)],
                set: program.streams.iter().position(of).map(|i| i as u32),
                segments: layer.to_bring().to_vec(),
                of_cpu: layer.segments.clone(),
            }
        };
        let layers: Vec<Layer> = placed.layers.iter().map(layer).collect();
        let moves = matches!(&placed.policy, ExpertPolicy::Scheduled(s) if s.moves);
        let (core, begins, layers_with_transfers) = match &placed.policy {
            ExpertPolicy::Fixed => return Ok(None),
            ExpertPolicy::Scheduled(s) => {
                let windows = s.moves.then(|| plan::windows(s)).transpose().map_err(bad)?;
                let running = Running::new(plan::scheduler(placed, s).map_err(bad)?, windows);
                let begins = running.begins();
                // A unit in the CPU's memory finds all experts there.
                let apart = hot.is_some_and(|hot| program.memory_of(hot) != 0);
                let with_frames = if apart && !begins.is_empty() { layers.len() } else { 0 };
                (Core::Scheduled(Box::new(running)), begins, with_frames)
            }
            ExpertPolicy::Cached(c) => {
                let setup = plan::dispatcher_setup(placed, c).map_err(bad)?;
                let begins = setup.cached.clone();
                (Core::Cached(Box::new(CachedDispatcher::new(setup).map_err(bad)?)), begins, layers.len())
            }
        };
        let state = State {
            core,
            transit: Transit {
                frames: Vec::new(),
                tickets: vec![0; begins.len()],
                relocations: Vec::new(),
                pending: Vec::new(),
            },
            begins,
            evicted: Vec::new(),
            loads: vec![0; experts],
            chosen: vec![0; experts],
            ranks: vec![0; experts],
            accelerator_experts: Vec::with_capacity(experts),
            ahead: 0,
            done: Assigned::default(),
            broken: false,
        };
        let transfers = Arc::new(TransferQueue::default());
        if let (Some(AnyPager::Experts(pager)), true) = (&pager, layers_with_transfers > 0) {
            pager.set_eviction_listener(Arc::<TransferQueue>::clone(&transfers));
        }
        Ok(Some(Arc::new(Self {
            layers,
            hot: hot.map(|u| u as usize),
            cold: cold.map(|u| u as usize),
            matrices: OnceLock::new(),
            state: Mutex::new(state),
            transfers,
            moves: moves.then(TransferQueue::default),
            waves: Waves::new(layers_with_transfers),
            forgets: pager.is_some() && placed.layers.iter().any(|l| !l.brought.is_empty()),
            pager,
        })))
    }

    /// Sets the locations of matrices: `cpu` and `hot` return the address of a segment's table in the CPU's
    /// memory and in that of the hot unit.
    ///
    /// # Errors
    /// A segment that is in only one of them.
    pub(crate) fn bind(
        &self,
        program: &Program,
        cpu: &dyn Fn(u32) -> Option<Addr>,
        hot: &dyn Fn(u32) -> Option<Addr>,
    ) -> Result<()> {
        // A unit that uses the CPU's memory finds all experts there.
        let apart = self.hot.is_some_and(|unit| program.memory_of(unit as u32) != 0);
        let mut all = Vec::new();
        for layer in &self.layers {
            let mut of = Vec::new();
            for &segment in layer.segments.iter().filter(|_| apart) {
                let bytes = program.segments.get(segment as usize).and_then(Segment::matrix_bytes);
                let found = cpu(segment).zip(hot(segment)).zip(bytes);
                let ((from, to), bytes) = found.ok_or_else(|| {
                    Error::plan(format!("segment {segment} is not where its experts are brought from"))
                })?;
                of.push(Matrices { from, to, bytes: bytes as usize });
            }
            all.push(of);
        }
        let _ = self.matrices.set(all);
        Ok(())
    }

    /// Number of experts of a layer that is assigned at run time, numbered over those with routed experts, if
    /// its gates are applied ahead.
    pub(crate) fn experts(&self, layer: usize) -> Option<usize> {
        (layer < self.waves.layers()).then(|| self.lock().loads.len())
    }

    /// The queues of transfers that run in parallel to the steps, each with the unit whose memory they are
    /// for.
    pub(crate) fn queues(&self) -> [Option<(&TransferQueue, usize)>; 2] {
        let hot = self.hot.filter(|_| self.waves.layers() > 0);
        [hot.map(|hot| (&*self.transfers, hot)), self.moves.as_ref().zip(self.cold)]
    }

    /// The layer whose experts a step reads, if experts move between steps.
    pub(crate) fn moving_layer(&self, segment: u32) -> Option<usize> {
        let moves = self.moves.is_some();
        self.layers
            .iter()
            .position(|l| moves && (l.segments.contains(&segment) || l.of_cpu.contains(&segment)))
    }

    /// Begins the moves that wait for the experts of the last dispatched layer.
    ///
    /// # Safety
    /// As [`Self::dispatch`]; the steps on the experts of the last dispatched layer have ended.
    pub(crate) unsafe fn computed(&self, units: Units<'_>, fail: &dyn Fn(StepFault)) {
        let mut state = self.lock();
        let device = self.device(units);
        // SAFETY: guaranteed by the caller.
        if let Err(e) = unsafe { Self::begin_moves(&mut state, &device) } {
            state.broken = true;
            fail(StepFault::Unit(e));
        }
    }

    /// Begins the moves that are pending.
    ///
    /// # Safety
    /// As [`Self::computed`].
    unsafe fn begin_moves(state: &mut State, device: &DeviceContext<'_>) -> Result<()> {
        let pending = std::mem::take(&mut state.transit.pending);
        // SAFETY: guaranteed by the caller.
        unsafe { device.start(&pending, &mut state.transit) }
    }

    /// The next experts of a layer that the hot unit computes together, as a range of those in its dispatch
    /// table; those before `from` have been computed. Waits for one if none has been transferred. `None`
    /// after the last.
    pub(crate) fn next_wave(&self, layer: usize, from: usize) -> Option<Range<usize>> {
        self.waves.next(layer, from, &self.transfers)
    }

    /// Transfers experts to cache frames for at most so many layers ahead.
    pub(crate) fn limit_depth(&self, layers: usize) {
        if let Core::Cached(dispatcher) = &mut self.lock().core {
            dispatcher.limit_depth(layers);
        }
    }

    /// Begins to measure the costs of experts and transfers, which correct the plan's.
    pub(crate) fn begin_warm_up(&self) {
        if let Core::Cached(dispatcher) = &self.lock().core {
            self.waves.begin_warm_up(dispatcher.costs().clone());
        }
    }

    /// The work of a wave of the hot unit, if it is to be timed.
    pub(crate) fn timed_wave(&self, layer: usize, wave: Range<usize>) -> Option<PlannedWork> {
        self.waves.timed_wave(layer, wave)
    }

    /// The CPU's experts in a layer, if they are to be timed.
    pub(crate) fn timed_cpu(&self, layer: usize) -> Option<PlannedWork> {
        self.waves.timed_cpu(layer)
    }

    /// Adds the time that some work took.
    pub(crate) fn took(&self, work: PlannedWork, time: Duration) {
        self.waves.took(work, time);
    }

    /// The layer whose experts a step of the CPU reads, if another unit computes some of them.
    pub(crate) fn divided_layer(&self, segment: u32) -> Option<usize> {
        let layers = self.layers.iter().take(self.waves.layers());
        layers.enumerate().find(|(_, l)| l.of_cpu.contains(&segment)).map(|(layer, _)| layer)
    }

    /// Statistics so far.
    pub(crate) fn done(&self) -> Assigned {
        let state = self.lock();
        let mut done = state.done;
        match &state.core {
            Core::Scheduled(running) => {
                let (counters, counts) = (running.scheduler().counters(), running.counts());
                (done.fetched, done.moves, done.streamed) = (counts.fetched, counts.begun, counts.streamed);
                done.late_moves = [counts.late, counts.awaited];
                done.predicted = [counters.right, counters.experts];
            }
            Core::Cached(dispatcher) => {
                let counts = dispatcher.counts();
                (done.makespan_us, done.fetched) = (counts.makespan_us, counts.fetched);
                (done.frames, done.costs) = (Some(counts), self.waves.checks());
            }
        }
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn device<'a>(&'a self, units: Units<'a>) -> DeviceContext<'a> {
        DeviceContext {
            units,
            layers: &self.layers,
            hot: self.hot,
            cold: self.cold,
            matrices: self.matrices.get().map_or(&[], Vec::as_slice),
            transfers: &self.transfers,
            moves: self.moves.as_ref().unwrap_or(&self.transfers),
            forgets: self.forgets,
        }
    }

    /// Whether an expert is in the host's memory.
    fn in_host_memory(&self, key: Key) -> bool {
        match &self.pager {
            Some(AnyPager::Experts(pager)) => pager.holds(key),
            _ => true,
        }
    }

    /// Assigns the experts that `ids` choose in a step of a layer, `k` for each row, and transfers missing
    /// weights. `give` gets the index of each expert's unit among those of the layer, and the order of each
    /// unit's experts.
    ///
    /// # Safety
    /// Only one thread calls this, while no step runs that reads experts of this layer or of the next one.
    /// The tables that [`Self::bind`] was given are alive.
    pub(crate) unsafe fn dispatch(
        &self,
        layer: usize,
        (ids, k): (&[i32], usize),
        prompt: bool,
        units: Units<'_>,
        fail: &dyn Fn(StepFault),
        give: &mut dyn FnMut(ExpertOrder<'_>),
    ) {
        let mut state = self.lock();
        if state.broken {
            fail(StepFault::Unit(Error::plan(
                "an expert could not be moved before: the model must be opened anew",
            )));
        // SAFETY: guaranteed by the caller.
        } else if let Err(e) = unsafe { self.assign(&mut state, layer, (ids, k), prompt, units) } {
            state.broken = true;
            fail(StepFault::Unit(e));
        }
        give(ExpertOrder { units: &state.chosen, ranks: &state.ranks });
    }

    /// Implements [`Self::dispatch`].
    ///
    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn assign(
        &self,
        state: &mut State,
        layer: usize,
        (ids, k): (&[i32], usize),
        prompt: bool,
        units: Units<'_>,
    ) -> Result<()> {
        let device = self.device(units);
        // SAFETY: guaranteed by the caller.
        unsafe { self.begin(state, &device) };
        if let Some(moves) = &self.moves {
            moves.check()?;
            // Steps that are traced begin no moves.
            // SAFETY: guaranteed by the caller.
            unsafe { Self::begin_moves(state, &device)? };
        }
        if let (Some(costs), Core::Cached(dispatcher)) =
            (self.waves.dispatched(layer, &self.transfers), &mut state.core)
        {
            dispatcher.set_costs(costs).map_err(bad)?;
        }
        let State { core, transit, loads, chosen, ranks, accelerator_experts, done, .. } = state;
        loads.fill(0);
        for &id in ids {
            if let Some(load) = usize::try_from(id).ok().and_then(|e| loads.get_mut(e)) {
                *load += 1;
            }
        }
        let decision = match core {
            Core::Scheduled(running) => {
                running.divide(layer, StepLoads { loads, rows: ids.len() / k.max(1), prompt })
            }
            Core::Cached(dispatcher) => {
                dispatcher.divide(layer, Rows { loads, prompt, k }, &|key| self.in_host_memory(key))
            }
        };
        let decision = decision.map_err(bad)?;
        for relocation in &mut transit.relocations {
            relocation.has_ended |= decision.moved.contains(&relocation.key);
        }
        // An expert without rows is waited for when it has some.
        let has_rows = |e: u16| loads.get(usize::from(e)).is_some_and(|&n| n > 0);
        device.settle(transit, layer as u16, |r| r.has_ended && has_rows(r.key.expert))?;
        // SAFETY: guaranteed by the caller; no step reads the experts that the frames held.
        unsafe { device.start(&decision.transfers, transit)? };
        transit.pending.extend_from_slice(&decision.moves);
        ranks.fill(0);
        for (rank, &expert) in (0..).zip(&decision.cpu_order) {
            ranks[usize::from(expert)] = rank;
        }
        done.makespan_us += decision.makespan_us;
        let places = self.layers[layer].places;
        accelerator_experts.clear();
        for (expert, ((to, &unit), &rows)) in (0..).zip(chosen.iter_mut().zip(&decision.units).zip(&*loads)) {
            let at = unit as usize;
            *to = places[at];
            done.experts[at] += u64::from(rows > 0);
            done.rows[at] += u64::from(rows);
            accelerator_experts.extend((rows > 0 && unit != Scheduled::Cpu).then_some(expert));
        }
        if self.waves.layers() > 0 {
            let arrived = self.transfers.done();
            let is_hot = |e: &&i32| chosen[**e as usize] == places[Scheduled::Gpu as usize];
            for &expert in accelerator_experts.iter().filter(is_hot) {
                let frame = core.frame(Key { layer: layer as u16, expert: expert as u16 });
                let ticket =
                    frame.and_then(|frame| transit.tickets.get(frame as usize)).copied().unwrap_or(0);
                ranks[expert as usize] = if ticket <= arrived { 0 } else { ticket };
            }
            let hot = accelerator_experts.iter().filter(is_hot);
            let hot = hot.map(|&e| (ranks[e as usize], loads[e as usize]));
            let on_cpu = loads.iter().zip(&*chosen).filter(|(rows, at)| **rows > 0 && **at == places[1]);
            self.waves.set(layer, hot, on_cpu.map(|(&rows, _)| rows));
        }
        Ok(())
    }

    /// Looks up the frames before the first step, and removes the experts that the host's memory has lost.
    ///
    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn begin(&self, state: &mut State, device: &DeviceContext<'_>) {
        if state.transit.frames.is_empty() {
            // SAFETY: guaranteed by the caller.
            let frame = |key: &Key| unsafe { device.frame(key.layer.into(), key.expert.into()) };
            state.transit.frames = state.begins.iter().map(frame).collect();
        }
        if let Core::Cached(dispatcher) = &mut state.core {
            state.evicted.clear();
            self.transfers.take_evicted(&mut state.evicted);
            state.evicted.iter().for_each(|&key| dispatcher.remove(key));
        }
    }

    /// Calls `request` with the experts of the last layer that units other than the CPU compute, once all
    /// transfers that were submitted ahead have ended. The experts that it requests may replace these in the
    /// host's memory.
    pub(crate) fn accelerator_experts<T>(&self, request: impl FnOnce(&[i32]) -> T) -> T {
        let state = self.lock();
        self.transfers.wait(state.ahead);
        request(&state.accelerator_experts)
    }

    /// Transfers experts that layers ahead of the last assigned one may need.
    ///
    /// # Safety
    /// As [`Self::dispatch`], except for the steps of the layer that was dispatched.
    pub(crate) unsafe fn predict(&self, scores: RowScores<'_>, units: Units<'_>, fail: &dyn Fn(StepFault)) {
        let mut state = self.lock();
        if state.broken {
            return;
        }
        let device = self.device(units);
        // SAFETY: guaranteed by the caller.
        unsafe { self.begin(&mut state, &device) };
        let State { core, transit: Transit { frames, tickets, .. }, .. } = &mut *state;
        if let Core::Cached(dispatcher) = core {
            match dispatcher.predict(scores, &|key| self.in_host_memory(key)) {
                Ok(transfers) => {
                    for &transfer in transfers {
                        // SAFETY: guaranteed by the caller; no step reads the expert that the frame held.
                        unsafe { device.transfer_to_frame(transfer, frames, tickets) };
                    }
                }
                Err(e) => {
                    state.broken = true;
                    fail(StepFault::Unit(bad(e)));
                }
            }
        }
        state.ahead = self.transfers.last();
    }
}
