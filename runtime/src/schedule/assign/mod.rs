//! Experts that several units can run: who runs them in this call, and what moves before the next.
//!
//! A `Divider` decides; what is here knows the units. At every dispatch of such a layer one lane counts rows and asks, and what
//! has to be brought for the layer is. There are two dividers, one for each kind of device:
//!
//! * `modules`: memory modules that compute, beside them a unit with frames of each layer ([`crate::schedule::makespan`]).
//! * `framed`: a unit whose frames are shared by all layers ([`crate::schedule::hybrid`]). It hears the scores of routers, too, and brings
//!   experts ahead, over the `link`: a thread of its own in every call, so that lanes and the unit compute meanwhile.

mod framed;
mod link;
mod modules;

use crate::bundle::program::Program;
use crate::error::{Error, Result};
use crate::exec::unit::{StepFault, Unit, Units};
use crate::offload::cache::Key;
use crate::offload::paging::OnFlash;
use crate::platform::memory::Addr;
use crate::schedule::hybrid::director::Counts;
use crate::schedule::makespan::{
    Costs, Dram, MakespanError, NdpCosts, Policy, Refinement, Setup, Table, Window,
};
use moec_ir::plan::{Refine, Schedule, Segment};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use framed::Framed;
pub use framed::setup as director_setup;
pub(crate) use link::Link;
use link::{Job, Way};
use modules::Modules;

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
    /// What became of frames that all layers share, where there are any.
    pub frames: Option<Counts>,
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

/// A layer asks who computes its experts.
struct Step<'a> {
    layer: usize,
    /// Rows by expert.
    loads: &'a [u32],
    /// Whether a prompt is read.
    prompt: bool,
    /// Whether an expert is in the host's memory.
    there: &'a dyn Fn(Key) -> bool,
}

/// What a divider works with.
struct Hands<'a> {
    units: Units<'a>,
    layers: &'a [Layer],
    hot: Option<usize>,
    cold: Option<usize>,
    /// By layer, what is copied where an expert is brought to the hot unit.
    matrices: &'a [Vec<Matrices>],
    link: &'a Link,
    /// Whether pages of what was brought are given back.
    forgets: bool,
}

/// The entry of an expert in a table of addresses.
fn entry(table: Addr, expert: usize) -> Addr {
    table.plus(expert * size_of::<Addr>())
}

impl<'a> Hands<'a> {
    fn hot(&self) -> Option<&'a (dyn Unit + 'a)> {
        self.hot.and_then(|unit| self.units.get(unit))
    }

    fn matrices(&self, layer: usize) -> &[Matrices] {
        self.matrices.get(layer).map_or(&[], Vec::as_slice)
    }

    /// Where the matrices of an expert lie that the hot unit holds.
    ///
    /// # Safety
    /// As [`Divider::divide`].
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

    /// Has an expert brought into a frame of the hot unit, whose table then names it. Gives its ticket.
    ///
    /// # Safety
    /// As [`Divider::divide`]; nobody reads the frame before the ticket is over.
    unsafe fn bring(&self, layer: usize, expert: usize, frame: &[Addr]) -> u64 {
        let Some(unit) = self.hot() else { return 0 };
        let way = |(m, &to): (&Matrices, &Addr)| Way {
            // SAFETY: tables have an address for each expert, and the processor's are in its memory.
            from: unsafe { entry(m.from, expert).of::<Addr>().read() },
            to,
            entry: entry(m.to, expert),
            bytes: m.bytes,
        };
        let ways = self.matrices(layer).iter().zip(frame).map(way).collect();
        // SAFETY: the caller's promise.
        unsafe { self.link.push(Job { ways, forgets: self.forgets }, unit) }
    }
}

/// Decides who computes the experts of each layer.
trait Divider: Send {
    /// Says in `kinds` who computes each expert, and has brought whom that needs: 0 the processor, 1 the hot unit, 2 the cold one.
    ///
    /// # Safety
    /// One lane comes here, while no step runs that reads experts of this layer or of the one that comes next; the tables that
    /// [`Assigner::bind`] was given are alive.
    unsafe fn divide(
        &mut self,
        step: &Step<'_>,
        hands: &Hands<'_>,
        kinds: &mut [usize],
        done: &mut Assigned,
    ) -> Result<()>;

    /// Has brought whom layers ahead may want, while the layer that was divided last is computed.
    ///
    /// # Safety
    /// As [`Self::divide`], but for the steps of the layer that was divided.
    unsafe fn foresee<'s>(
        &mut self,
        _hands: &Hands<'_>,
        _scored: usize,
        _scores: &dyn Fn(usize) -> &'s [f32],
        _there: &dyn Fn(Key) -> bool,
    ) -> Result<()> {
        Ok(())
    }

    /// Adds what only it knows.
    fn add(&self, done: &mut Assigned);
}

struct State {
    divider: Box<dyn Divider>,
    /// By expert: rows, and the index of its unit among the homes.
    loads: Vec<u32>,
    homes: Vec<u32>,
    /// By expert: 0 the processor, 1 the hot unit, 2 the cold one; kept for its memory.
    kinds: Vec<usize>,
    /// Experts of the last layer that others than the processor compute.
    beside: Vec<i32>,
    /// The last job that was told ahead.
    ahead: u64,
    done: Assigned,
    /// Whether a move has failed: where experts lie is then not what the divider knows.
    broken: bool,
}

/// Assigns the experts of a plan with a schedule.
pub(crate) struct Assigner {
    layers: Vec<Layer>,
    hot: Option<usize>,
    cold: Option<usize>,
    matrices: OnceLock<Vec<Vec<Matrices>>>,
    state: Mutex<State>,
    link: Arc<Link>,
    /// By layer, what the hot unit's steps wait for; none where nothing is brought beside them.
    needs: Arc<[AtomicU64]>,
    /// Who knows what the host's memory holds, where experts stay on flash.
    pager: Option<OnFlash>,
    forgets: bool,
}

impl Assigner {
    /// For the schedule of a program; `None` where it has none.
    ///
    /// # Errors
    /// Layers that differ in the number of their experts, times that are none.
    pub(crate) fn new(program: &Program, pager: Option<OnFlash>) -> Result<Option<Arc<Self>>> {
        let Some(s) = &program.schedule else { return Ok(None) };
        let experts = s.layers.first().map_or(0, |l| l.modules.len());
        if s.layers.iter().any(|l| l.modules.len() != experts) {
            return Err(Error::Plan("its schedule: layers with different numbers of experts".into()));
        }
        let mut layers = Vec::new();
        for layer in &s.layers {
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
                segments: layer.to_bring().to_vec(),
            });
        }
        let needs = framed::needs(if s.hybrid.is_some() { layers.len() } else { 0 });
        let divider: Box<dyn Divider> = match &s.hybrid {
            Some(hybrid) => Box::new(Framed::new(s, hybrid, Arc::clone(&needs))?),
            None => Box::new(Modules::new(s, experts)?),
        };
        let state = State {
            divider,
            loads: vec![0; experts],
            homes: vec![0; experts],
            kinds: vec![0; experts],
            beside: Vec::with_capacity(experts),
            ahead: 0,
            done: Assigned::default(),
            broken: false,
        };
        let link = Arc::new(Link::default());
        if let (Some(OnFlash::Experts(pager)), Some(_)) = (&pager, &s.hybrid) {
            pager.tell(Arc::<Link>::clone(&link));
        }
        Ok(Some(Arc::new(Self {
            layers,
            hot: s.hot.map(|u| u as usize),
            cold: s.cold.map(|u| u as usize),
            matrices: OnceLock::new(),
            state: Mutex::new(state),
            link,
            needs,
            forgets: pager.is_some() && s.layers.iter().any(|l| !l.brought.is_empty()),
            pager,
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

    /// The layer of the schedule whose experts a step of a unit reads, if they are brought while the plan runs.
    pub(crate) fn brings(&self, unit: usize, segment: u32) -> Option<usize> {
        let hot = self.hot == Some(unit) && !self.needs.is_empty();
        self.layers.iter().position(|l| hot && l.segments.contains(&segment))
    }

    /// Experts of a layer that was assigned, counted over those with routed experts, where its divider hears scores.
    pub(crate) fn experts(&self, layer: usize) -> Option<usize> {
        (layer < self.needs.len()).then(|| self.lock().loads.len())
    }

    /// The link, with the unit at its end, where something is brought beside the steps.
    pub(crate) fn link(&self) -> Option<(&Link, usize)> {
        self.hot.filter(|_| !self.needs.is_empty()).map(|hot| (&*self.link, hot))
    }

    /// Waits until whom the steps of a layer read has come.
    pub(crate) fn wait(&self, layer: usize) {
        framed::wait(&self.link, &self.needs, layer);
    }

    /// What was done so far.
    pub(crate) fn done(&self) -> Assigned {
        let state = self.lock();
        let mut done = state.done;
        state.divider.add(&mut done);
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hands<'a>(&'a self, units: Units<'a>) -> Hands<'a> {
        Hands {
            units,
            layers: &self.layers,
            hot: self.hot,
            cold: self.cold,
            matrices: self.matrices.get().map_or(&[], Vec::as_slice),
            link: &self.link,
            forgets: self.forgets,
        }
    }

    /// Whether an expert is in the host's memory.
    fn there(&self, key: Key) -> bool {
        match &self.pager {
            Some(OnFlash::Experts(pager)) => pager.holds(key),
            _ => true,
        }
    }

    /// Assigns the experts that `ids` choose in a step of a layer, and brings weights where they are missed. `give` gets the index
    /// of each expert's unit among the homes.
    ///
    /// # Safety
    /// As [`Divider::divide`].
    pub(crate) unsafe fn dispatch(
        &self,
        layer: usize,
        ids: &[i32],
        prompt: bool,
        units: Units<'_>,
        fail: &dyn Fn(StepFault),
        give: &mut dyn FnMut(&[u32]),
    ) {
        let mut state = self.lock();
        if state.broken {
            fail(StepFault::Unit(Error::Plan(
                "an expert could not be moved before: the model must be opened anew".into(),
            )));
        // SAFETY: the caller's promise.
        } else if let Err(e) = unsafe { self.assign(&mut state, layer, ids, prompt, units) } {
            state.broken = true;
            fail(StepFault::Unit(e));
        }
        give(&state.homes);
    }

    /// # Safety
    /// As [`Self::dispatch`].
    unsafe fn assign(
        &self,
        state: &mut State,
        layer: usize,
        ids: &[i32],
        prompt: bool,
        units: Units<'_>,
    ) -> Result<()> {
        let State { divider, loads, homes, kinds, beside, done, .. } = state;
        loads.fill(0);
        for &id in ids {
            if let Some(load) = usize::try_from(id).ok().and_then(|e| loads.get_mut(e)) {
                *load += 1;
            }
        }
        kinds.fill(0);
        let step = Step { layer, loads, prompt, there: &|key| self.there(key) };
        // SAFETY: the caller's promise.
        unsafe { divider.divide(&step, &self.hands(units), kinds, done)? };
        let places = self.layers[layer].places;
        beside.clear();
        for (expert, ((home, &kind), &rows)) in (0..).zip(homes.iter_mut().zip(&*kinds).zip(&*loads)) {
            *home = places[kind];
            done.experts[[1, 0, 2][kind]] += u64::from(rows > 0);
            done.rows[[1, 0, 2][kind]] += u64::from(rows);
            beside.extend((rows > 0 && kind > 0).then_some(expert));
        }
        Ok(())
    }

    /// Gives `ask` the experts of the last layer that others than the processor compute, once nobody is on the way any more who
    /// was brought ahead of it: what it asks for may take the place of these in the host's memory.
    pub(crate) fn beside<T>(&self, ask: impl FnOnce(&[i32]) -> T) -> T {
        let state = self.lock();
        self.link.wait(state.ahead);
        ask(&state.beside)
    }

    /// Has brought whom layers ahead may want: `scores(0)` are the logits of the layer that was assigned last, and behind them stand
    /// those that the gates of the next layers give.
    ///
    /// # Safety
    /// As [`Divider::foresee`].
    pub(crate) unsafe fn foresee<'s>(
        &self,
        scored: usize,
        scores: &dyn Fn(usize) -> &'s [f32],
        units: Units<'_>,
        fail: &dyn Fn(StepFault),
    ) {
        let mut state = self.lock();
        if state.broken {
            return;
        }
        let there = |key| self.there(key);
        // SAFETY: the caller's promise.
        if let Err(e) = unsafe { state.divider.foresee(&self.hands(units), scored, scores, &there) } {
            state.broken = true;
            fail(StepFault::Unit(e));
        }
        state.ahead = self.link.last();
    }
}
