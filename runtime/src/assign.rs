//! Experts that several units can run: who runs them in this call, and what moves before the next.
//!
//! The scheduler of [`crate::makespan`] decides; what is here knows the units. At every dispatch of such a layer one lane counts
//! rows, asks, brings the experts that the hot unit misses into its frames, and then has done what moves for the layer that
//! comes next. Weights of a layer are touched while no step of it runs: its own dispatch has not ended yet, and the layer that
//! comes next has not begun.

use crate::error::{Error, Result};
use crate::makespan::{
    Action, Costs, Dram, Home, Layout, MakespanError, NdpCosts, Place, Placement, Policy, Refinement,
    Scheduler, Setup, Table, Window,
};
use crate::memory::Addr;
use crate::program::Program;
use crate::unit::{StepFault, Units};
use moec_ir::plan::{Refine, Schedule, ScheduledLayer, Segment};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What became of the experts of a schedule since the engine was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Assigned {
    /// Experts, counted once in each step, that the hot unit, the processor and the modules ran.
    pub experts: [u64; 3],
    /// Rows of these.
    pub rows: [u64; 3],
    /// Experts that were brought to the hot unit because a step needed them there.
    pub fetched: u64,
    /// Experts that were brought there, given another layout, and moved to another module ahead of a step.
    pub moves: [u64; 3],
    /// Experts whose class was what the predictor had said, of all that were looked at.
    pub predicted: [u64; 2],
    /// Sum over steps of what the scheduler expects them to take, in microseconds.
    pub makespan_us: f64,
}

/// The schedule of a plan as its scheduler has it, for layers of `experts` experts.
///
/// # Errors
/// Times that are none.
pub fn setup(s: &Schedule, experts: usize) -> Result<Setup, MakespanError> {
    let refinement = match s.refine {
        Refine::None => Refinement::None,
        Refine::Bottleneck => Refinement::Paper,
        Refine::Full => Refinement::Full,
    };
    let each = |us: f64| us / s.expert_bytes.max(1) as f64;
    let (t, curve) = (&s.times, |points: &Vec<(u32, f64)>| Table::new(points.clone()));
    let ndp = match s.cold {
        Some(_) => Some(NdpCosts {
            table: curve(&t.cold)?,
            internal_us_per_byte: each(t.internal_us),
            link_us_per_byte: each(t.link_us),
        }),
        None => None,
    };
    let costs = Costs {
        gpu: s.hot.map(|_| curve(&t.hot)).transpose()?,
        cpu: curve(&t.processor)?,
        ndp,
        pcie_us_per_byte: each(t.bring_us),
        dram: Dram { striped_us_per_byte: each(t.striped_us), localized_us_per_byte: each(t.localized_us) },
        expert_bytes: s.expert_bytes.max(1),
        token_bytes: s.row_bytes,
    };
    Ok(Setup {
        policy: Policy::TriMoe { refinement, migrate: s.moves },
        costs,
        layers: s.layers.len(),
        experts,
        dimms: s.modules as usize,
        frames: s.frames as usize,
        window: Window { pcie_us: s.window_us, link_us: s.window_us },
    })
}

/// Matrices of a layer's experts in two memories, each with a table of their addresses.
#[derive(Clone, Copy, Debug)]
struct Matrices {
    /// The processor's table.
    from: Addr,
    /// The hot unit's.
    to: Addr,
    /// Bytes of a matrix.
    bytes: usize,
}

/// What is fixed of a layer.
struct Layer {
    /// Index of its homes.
    homes: u32,
    /// Indices into the units of these: the processor, the hot unit, the cold one.
    places: [u32; 3],
    /// Index of the streams of the cold unit.
    set: Option<u32>,
    segments: Vec<u32>,
}

struct State {
    scheduler: Scheduler,
    /// By layer: the expert in each frame of the hot unit.
    frames: Vec<Vec<u32>>,
    /// Moves that wait until their layer's own next step.
    waiting: Vec<Action>,
    /// By expert: rows, and the index of its unit among the homes.
    loads: Vec<u32>,
    homes: Vec<u32>,
    /// By expert: 0 the processor, 1 the hot unit, 2 the cold one; kept for its memory.
    kinds: Vec<usize>,
    done: Assigned,
    /// Whether a move has failed: where experts lie is then not what the scheduler knows.
    broken: bool,
}

/// Assigns the experts of a plan with a schedule.
pub(crate) struct Assigner {
    layers: Vec<Layer>,
    hot: Option<usize>,
    cold: Option<usize>,
    window: Option<Window>,
    /// By layer, what is copied where an expert is brought to the hot unit.
    matrices: OnceLock<Vec<Vec<Matrices>>>,
    state: Mutex<State>,
}

impl Assigner {
    /// For the schedule of a program; `None` where it has none.
    ///
    /// # Errors
    /// Layers that differ in the number of their experts, times that are none.
    pub(crate) fn new(program: &Program) -> Result<Option<Arc<Self>>> {
        let Some(s) = &program.schedule else { return Ok(None) };
        let bad = |e: MakespanError| Error::Plan(format!("its schedule: {e}"));
        let experts = s.layers.first().map_or(0, |l| l.modules.len());
        if s.layers.iter().any(|l| l.modules.len() != experts) {
            return Err(Error::Plan("its schedule: layers with different numbers of experts".into()));
        }
        let setup = setup(s, experts).map_err(bad)?;
        let window = s.moves.then_some(setup.window);
        let mut scheduler = Scheduler::new(setup).map_err(bad)?;
        let mut layers = Vec::new();
        for (index, layer) in s.layers.iter().enumerate() {
            let placement =
                Placement::new(places(layer), s.modules as usize, s.frames as usize).map_err(bad)?;
            scheduler.place(index, &placement).map_err(bad)?;
            let homes = program.homes.get(layer.homes as usize);
            let homes = homes.ok_or_else(|| Error::Plan("its schedule names no homes".into()))?;
            let place = |unit: Option<u32>| {
                let at = unit.and_then(|unit| homes.units.iter().position(|&u| u == unit));
                at.map_or(0, |at| at as u32)
            };
            let of = |s: &moec_ir::plan::StreamSet, unit| (s.layer, Some(s.unit)) == (homes.layer, unit);
            layers.push(Layer {
                homes: layer.homes,
                places: [place(Some(0)), place(s.hot), place(s.cold)],
                set: program.streams.iter().position(|x| of(x, s.cold)).map(|i| i as u32),
                segments: layer.segments.clone(),
            });
        }
        let frames = s.layers.iter().map(|l| l.cached.clone()).collect();
        let state = State {
            scheduler,
            frames,
            waiting: Vec::new(),
            loads: vec![0; experts],
            homes: vec![0; experts],
            kinds: Vec::with_capacity(experts),
            done: Assigned::default(),
            broken: false,
        };
        Ok(Some(Arc::new(Self {
            layers,
            hot: s.hot.map(|u| u as usize),
            cold: s.cold.map(|u| u as usize),
            window,
            matrices: OnceLock::new(),
            state: Mutex::new(state),
        })))
    }

    /// Says where matrices lie: `processor` and `hot` give the address of a segment's table in the processor's memory and in
    /// that of the hot unit.
    ///
    /// # Errors
    /// A segment that is in one of them only.
    pub(crate) fn bind(
        &self,
        program: &Program,
        processor: &dyn Fn(u32) -> Option<Addr>,
        hot: &dyn Fn(u32) -> Option<Addr>,
    ) -> Result<()> {
        // A unit that works in the processor's memory finds all experts there.
        let apart = self.hot.is_some_and(|unit| program.memory_of(unit as u32) != 0);
        let mut all = Vec::new();
        for layer in &self.layers {
            let mut of = Vec::new();
            for &segment in layer.segments.iter().filter(|_| apart) {
                let bytes = program.segments.get(segment as usize).and_then(Segment::matrix_bytes);
                let found = processor(segment).zip(hot(segment)).zip(bytes);
                let ((from, to), bytes) = found.ok_or_else(|| {
                    Error::Plan(format!("segment {segment} is not where its schedule looks"))
                })?;
                of.push(Matrices { from, to, bytes: bytes as usize });
            }
            all.push(of);
        }
        let _ = self.matrices.set(all);
        Ok(())
    }

    /// The layer of the schedule whose homes have this index.
    pub(crate) fn layer(&self, homes: u32) -> Option<usize> {
        self.layers.iter().position(|l| l.homes == homes)
    }

    /// What was done so far.
    pub(crate) fn done(&self) -> Assigned {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let tally = state.scheduler.tally();
        Assigned { predicted: [tally.right, tally.experts], ..state.done }
    }

    /// Assigns the experts that `ids` choose in a step of a layer, brings weights where they are missed, and moves what moves
    /// for the layer that comes next. `give` gets the index of each expert's unit among the homes.
    ///
    /// # Safety
    /// One lane comes here, while no step runs that reads experts of this layer or of the one that comes next; the tables that
    /// [`Self::bind`] was given are alive.
    pub(crate) unsafe fn dispatch(
        &self,
        layer: usize,
        ids: &[i32],
        units: Units<'_>,
        fail: &dyn Fn(StepFault),
        give: &mut dyn FnMut(&[u32]),
    ) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.broken {
            fail(StepFault::Unit(Error::Plan(
                "an expert could not be moved before: the model must be opened anew".into(),
            )));
        // SAFETY: the caller's promise.
        } else if let Err(e) = unsafe { self.assign(&mut state, layer, ids, units) } {
            state.broken = true;
            fail(StepFault::Unit(e));
        }
        give(&state.homes);
    }

    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn assign(&self, state: &mut State, layer: usize, ids: &[i32], units: Units<'_>) -> Result<()> {
        for action in std::mem::take(&mut state.waiting) {
            // SAFETY: the caller's promise.
            unsafe { self.act(state, layer, action, units)? };
        }
        state.loads.fill(0);
        for &id in ids {
            if let Some(load) = usize::try_from(id).ok().and_then(|e| state.loads.get_mut(e)) {
                *load += 1;
            }
        }
        let bad = |e: MakespanError| Error::Plan(format!("its schedule: {e}"));
        let schedule = state.scheduler.dispatch(layer, &state.loads).map_err(bad)?;
        state.done.makespan_us += schedule.makespan_us;
        let of = |home: &Option<Home>| match home {
            Some(Home::Gpu) => 1,
            Some(Home::Ndp(_)) => 2,
            Some(Home::Cpu) | None => 0,
        };
        let mut kinds = std::mem::take(&mut state.kinds);
        kinds.clear();
        kinds.extend(schedule.homes.iter().map(of));
        // SAFETY: the caller's promise.
        unsafe { self.bring_missing(state, layer, &mut kinds, units) };
        let places = self.layers[layer].places;
        for ((home, &kind), &rows) in state.homes.iter_mut().zip(&kinds).zip(&state.loads) {
            *home = places[kind];
            state.done.experts[[1, 0, 2][kind]] += u64::from(rows > 0);
            state.done.rows[[1, 0, 2][kind]] += u64::from(rows);
        }
        state.kinds = kinds;
        let Some(window) = self.window else { return Ok(()) };
        let next = (layer + 1) % self.layers.len();
        let moves = state.scheduler.moves_for(next, window).map_err(bad)?;
        let actions: Vec<Action> = moves.iter().map(|m| m.action).collect();
        if next == layer {
            state.waiting = actions;
            return Ok(());
        }
        for action in actions {
            // SAFETY: the caller's promise.
            unsafe { self.act(state, next, action, units)? };
        }
        Ok(())
    }

    /// Brings the experts to the hot unit that it is to run and does not hold, in frames of those that it is not to run now.
    /// Where there is none, the processor runs them.
    ///
    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn bring_missing(&self, state: &mut State, layer: usize, kinds: &mut [usize], units: Units<'_>) {
        for expert in 0..kinds.len() {
            if kinds[expert] != 1 || state.frames[layer].contains(&(expert as u32)) {
                continue;
            }
            let idle = state.frames[layer].iter().position(|&held| kinds[held as usize] != 1);
            match idle {
                Some(frame) => {
                    // SAFETY: the caller's promise.
                    unsafe { self.bring(state, layer, expert as u32, frame, units) };
                    state.done.fetched += 1;
                }
                None => kinds[expert] = 0,
            }
        }
    }

    /// Does what the scheduler has decided to move.
    ///
    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn act(&self, state: &mut State, layer: usize, action: Action, units: Units<'_>) -> Result<()> {
        match action {
            Action::Prefetch { expert, evict } => {
                let frames = &state.frames[layer];
                let here = frames.contains(&u32::from(expert));
                let frame = frames.iter().position(|&held| Some(held) == evict.map(u32::from));
                // What a step has brought since may have taken the frame.
                if let Some(frame) = frame.or(Some(0)).filter(|_| !here && !frames.is_empty()) {
                    // SAFETY: the caller's promise.
                    unsafe { self.bring(state, layer, u32::from(expert), frame, units) };
                    state.done.moves[0] += 1;
                }
            }
            Action::Relayout { expert, to } => {
                self.relocate(layer, u32::from(expert), to.dimm(), units)?;
                state.done.moves[1] += 1;
            }
            Action::Rebalance { expert, to, .. } => {
                self.relocate(layer, u32::from(expert), Some(to), units)?;
                state.done.moves[2] += 1;
            }
        }
        Ok(())
    }

    fn relocate(&self, layer: usize, expert: u32, to: Option<u16>, units: Units<'_>) -> Result<()> {
        match (self.cold.and_then(|u| units.get(u)), self.layers[layer].set) {
            (Some(unit), Some(set)) => unit.relocate(set, expert, to.map(u32::from)),
            _ => Ok(()),
        }
    }

    /// Copies an expert into a frame of the hot unit, whose table then names it.
    ///
    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn bring(&self, state: &mut State, layer: usize, expert: u32, frame: usize, units: Units<'_>) {
        let Some(unit) = self.hot.and_then(|u| units.get(u)) else { return };
        let held = std::mem::replace(&mut state.frames[layer][frame], expert);
        let entry = |table: Addr, e: u32| table.plus(e as usize * size_of::<Addr>());
        for m in self.matrices.get().and_then(|all| all.get(layer)).into_iter().flatten() {
            let mut place = Addr::read_only(std::ptr::null());
            // SAFETY: tables have an address for each expert, that of the processor is in its memory; the hot unit's names the
            // frame under the expert that it held, which nobody reads now.
            unsafe {
                let from = entry(m.from, expert).of::<Addr>().read();
                let slot = Addr::read_only((&raw mut place).cast());
                unit.copy(entry(m.to, held), slot, size_of::<Addr>());
                unit.copy(from, place, m.bytes);
                unit.copy(slot, entry(m.to, expert), size_of::<Addr>());
            }
        }
    }
}

/// The places of a layer's experts when its first step begins.
fn places(layer: &ScheduledLayer) -> Vec<Place> {
    let layout = |m: i32| u16::try_from(m).map_or(Layout::Striped, Layout::Local);
    let cached = |e: usize| layer.cached.contains(&(e as u32));
    layer.modules.iter().enumerate().map(|(e, &m)| Place { layout: layout(m), cached: cached(e) }).collect()
}
