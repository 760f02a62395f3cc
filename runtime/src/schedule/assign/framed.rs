//! Experts that a unit with frames and the processor divide (HybriMoE): [`Director`] decides, frames are places in the unit's
//! memory, and the link brings.

use super::link::Link;
use super::{Assigned, Divider, Hands, Step};
use crate::error::{Error, Result};
use crate::offload::cache::{CachedLayer, ExpertIndex, Key, Setting};
use crate::platform::memory::Addr;
use crate::schedule::hybrid::director::{Bring, Setup};
use crate::schedule::hybrid::{Costs, Director, Policy, UnitCosts};
use crate::schedule::makespan::Table;
use moec_ir::plan::{Hybrid, Schedule};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What a director of a plan's schedule knows from the start.
///
/// # Errors
/// Times that are none, names that are no policy's.
pub fn setup(s: &Schedule, hybrid: &Hybrid) -> Result<Setup> {
    let wrong = |e: &dyn std::fmt::Display| Error::Plan(format!("its schedule: {e}"));
    let table = |points: &[(u32, f64)]| Table::new(points.to_vec()).map_err(|e| wrong(&e));
    let [gpu, cpu, link] = hybrid.first_us;
    let costs = Costs {
        gpu: UnitCosts { table: table(&s.times.hot)?, first_us: gpu },
        cpu: UnitCosts { table: table(&s.times.processor)?, first_us: cpu },
        transfer_us: s.times.bring_us,
        first_transfer_us: link,
    };
    let policy = |name: &String| {
        Policy::named(name).ok_or_else(|| wrong(&format_args!("no policy is called `{name}`")))
    };
    let layer = |l: &moec_ir::plan::ScheduledLayer| CachedLayer {
        experts: l.modules.len(),
        k: hybrid.k as usize,
        bytes: 1,
    };
    let layers: Vec<CachedLayer> = s.layers.iter().map(layer).collect();
    let key = |layer: u32, expert: u32| Key { layer: layer as u16, expert: expert as u16 };
    Ok(Setup {
        costs,
        experts: ExpertIndex::new(&layers).map_err(|e| wrong(&e))?,
        divides: [policy(&hybrid.divides[0])?, policy(&hybrid.divides[1])?],
        keeps: hybrid.keeps.parse::<Setting>().map_err(|e| wrong(&e))?,
        ahead: hybrid.ahead as usize,
        window_us: s.window_us,
        cached: (0..)
            .zip(&s.layers)
            .flat_map(|(l, layer)| layer.cached.iter().map(move |&e| key(l, e)))
            .collect(),
        pinned: hybrid.pinned.iter().map(|&(l, e)| key(l, e)).collect(),
        score: hybrid.score,
    })
}

/// Divides experts between frames and the processor.
pub(super) struct Framed {
    director: Director,
    /// Who begins in each frame, and where its matrices lie: known when the first step runs.
    begins: Vec<Key>,
    places: Vec<Vec<Addr>>,
    /// By frame: the ticket of who was brought there last.
    tickets: Vec<u64>,
    /// By layer: the ticket that the unit's steps wait for.
    needs: Arc<[AtomicU64]>,
    gone: Vec<Key>,
    brings: Vec<Bring>,
}

impl Framed {
    pub(super) fn new(s: &Schedule, hybrid: &Hybrid, needs: Arc<[AtomicU64]>) -> Result<Self> {
        let setup = setup(s, hybrid)?;
        let begins = setup.cached.clone();
        let director = Director::new(setup).map_err(|e| Error::Plan(format!("its schedule: {e}")))?;
        let tickets = vec![0; begins.len()];
        Ok(Self {
            director,
            begins,
            places: Vec::new(),
            tickets,
            needs,
            gone: Vec::new(),
            brings: Vec::new(),
        })
    }

    /// Looks up the frames, and lets those experts go that the host's memory has lost.
    ///
    /// # Safety
    /// As [`Divider::divide`].
    unsafe fn begin(&mut self, hands: &Hands<'_>) {
        if self.places.is_empty() {
            // SAFETY: the caller's promise.
            let place = |key: &Key| unsafe { hands.frame(key.layer.into(), key.expert.into()) };
            self.places = self.begins.iter().map(place).collect();
        }
        self.gone.clear();
        hands.link.take_gone(&mut self.gone);
        for &key in &self.gone {
            self.director.lose(key);
        }
    }

    /// # Safety
    /// As [`Divider::divide`].
    unsafe fn bring(&mut self, hands: &Hands<'_>) {
        for &Bring { key, frame } in &self.brings {
            let place = self.places.get(frame as usize).map_or(&[][..], Vec::as_slice);
            // SAFETY: the caller's promise; the frame's last expert has left it, and is computed by nobody now.
            let ticket = unsafe { hands.bring(key.layer.into(), key.expert.into(), place) };
            if let Some(last) = self.tickets.get_mut(frame as usize) {
                *last = ticket;
            }
        }
    }
}

fn wrong(e: &dyn std::fmt::Display) -> Error {
    Error::Plan(format!("its schedule: {e}"))
}

impl Divider for Framed {
    unsafe fn divide(
        &mut self,
        step: &Step<'_>,
        hands: &Hands<'_>,
        kinds: &mut [usize],
        _done: &mut Assigned,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(hands) };
        let division = self.director.divide(step.layer, step.loads, step.prompt, step.there);
        let division = division.map_err(|e| wrong(&e))?;
        for (kind, &on_gpu) in kinds.iter_mut().zip(&division.on_gpu) {
            *kind = usize::from(on_gpu);
        }
        self.brings.clone_from(&division.brings);
        // SAFETY: the caller's promise.
        unsafe { self.bring(hands) };
        let key = |expert: usize| Key { layer: step.layer as u16, expert: expert as u16 };
        let here =
            kinds.iter().enumerate().filter(|k| *k.1 == 1).filter_map(|(e, _)| self.director.frame(key(e)));
        let ticket = here.filter_map(|frame| self.tickets.get(frame as usize)).max();
        if let Some(need) = self.needs.get(step.layer) {
            need.store(ticket.copied().unwrap_or(0), Ordering::Release);
        }
        Ok(())
    }

    unsafe fn foresee<'s>(
        &mut self,
        hands: &Hands<'_>,
        scored: usize,
        scores: &dyn Fn(usize) -> &'s [f32],
        there: &dyn Fn(Key) -> bool,
    ) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.begin(hands) };
        let brings = self.director.foresee(scored, scores, there).map_err(|e| wrong(&e))?;
        self.brings.clear();
        self.brings.extend_from_slice(brings);
        // SAFETY: as above.
        unsafe { self.bring(hands) };
        Ok(())
    }

    fn add(&self, done: &mut Assigned) {
        let counts = self.director.counts();
        done.makespan_us = counts.makespan_us;
        done.fetched = counts.fetched;
        done.frames = Some(counts);
    }
}

/// By layer, the ticket that steps of the unit wait for.
pub(super) fn needs(layers: usize) -> Arc<[AtomicU64]> {
    (0..layers).map(|_| AtomicU64::new(0)).collect()
}

/// Waits until whom a layer's steps read has come.
pub(super) fn wait(link: &Link, needs: &[AtomicU64], layer: usize) {
    if let Some(need) = needs.get(layer) {
        link.wait(need.load(Ordering::Acquire));
    }
}
