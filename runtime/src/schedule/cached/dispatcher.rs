//! Dispatcher of cached experts: the unit of each expert of a layer, and transfers into frames (HybriMoE,
//! §IV).
//!
//! After the router of a layer, [`CachedDispatcher::divide`] assigns its experts to the GPU or the CPU. It
//! also returns the transfers that the GPU needs for that, with their frames. Then the scores of the layer
//! and the predictions of the next layers' gates are known: [`CachedDispatcher::predict`] chooses experts to
//! transfer ahead, as long as the link would be idle.
//!
//! Time is modelled: a layer takes the makespan of its schedule, and the time between two layers is in the
//! plan. So decisions are a function of routing and scores, and a simulation with the same inputs makes the
//! same decisions. Nothing here moves a byte.
//!
//! Cache frames are shared by all layers. Each holds an expert from the start, and a [`Cache`] decides which
//! experts stay. If its policy lets some bypass it, a few frames are outside of the cache: an expert that
//! bypasses it stays there until the next one comes.

use super::prefetch::{self, Outlook, Prefetch};
use crate::offload::cache::odds::Odds;
use crate::offload::cache::{Cache, Event, ExpertIndex, Key, Ranking, Setting};
use crate::schedule::costs::Costs;
use crate::schedule::decision::{Bring, Decision, Transfer};
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::Solver;
use crate::schedule::scheduled::ExpertUnit;
use crate::schedule::timelines::{Free, Task, TimelineScheduler};
use moec_ir::op::Score;
use std::collections::VecDeque;

/// If the policy lets experts bypass the cache, one frame in this many is for these, at most as many as a
/// token chooses.
const BYPASS_SHARE: usize = 4;

/// Initial settings of a dispatcher.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Costs of an expert.
    pub costs: Costs,
    /// All experts, each with a size of one byte: the cache counts frames.
    pub experts: ExpertIndex,
    /// Solvers for the experts of a prompt, and of decoded tokens.
    pub divides: [Solver; 2],
    /// Cache policy of the frames.
    pub keeps: Setting,
    /// Number of layers ahead that are predicted.
    pub ahead: usize,
    /// Microseconds between the experts of two layers.
    pub window_us: f64,
    /// Initial experts of frames: one for each of these, in this order.
    pub cached: Vec<Key>,
    /// Those of them that are never evicted.
    pub pinned: Vec<Key>,
    /// Function that turns the router's logits into scores.
    pub score: Score,
}

/// Counters of decisions so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counts {
    /// Experts that layers used that were in a frame or in transfer: counted once in each step.
    pub hits: u64,
    /// Experts that layers used and that were in no frame.
    pub misses: u64,
    /// Experts that were transferred because a step needed them.
    pub fetched: u64,
    /// Experts that were transferred ahead, as predicted by gates.
    pub ahead: u64,
    /// Of these, those that the next step of their layer used.
    pub predicted: u64,
    /// Experts that the CPU had computed and that were transferred afterwards.
    pub kept: u64,
    /// Experts that were to be transferred but found no frame: the CPU computed them.
    pub turned_away: u64,
    /// Sum of the expected times of layers, in microseconds.
    pub makespan_us: f64,
    /// Sum of the expected times of transfers, in microseconds.
    pub link_us: f64,
}

/// Dispatches the experts of a plan to the GPU and the CPU.
pub struct CachedDispatcher {
    experts: ExpertIndex,
    divides: [Solver; 2],
    ahead: usize,
    window_us: f64,
    score: Score,
    scheduler: TimelineScheduler,
    cache: Cache,
    ranking: Ranking,
    /// By number of the expert: its frame.
    frames: Vec<Option<u32>>,
    free: Vec<u32>,
    /// Experts in frames outside of the cache, the oldest first.
    passing: VecDeque<Key>,
    /// Experts in transfer, and when each transfer ends.
    coming: Vec<(Key, f64)>,
    /// The modelled time, the time when the link is idle, and the duration of the last layer.
    now: f64,
    link: f64,
    span: f64,
    /// The last layer, and the experts that the CPU computed there because no frame held them.
    layer: usize,
    missed: Vec<u16>,
    /// By layers ahead: how often the expert at a rank of the prediction is used.
    odds: Vec<Odds>,
    /// By layer: how many layers ahead it was last predicted, and the predicted experts. Then the experts
    /// that were transferred for it.
    predicted: Vec<(usize, Vec<u16>)>,
    announced: Vec<Key>,
    tasks: Vec<Task>,
    outlooks: Vec<Outlook>,
    planned: Vec<Prefetch>,
    decision: Decision,
    brings: Vec<Bring>,
    counts: Counts,
}

impl CachedDispatcher {
    /// Creates a dispatcher.
    ///
    /// # Errors
    /// Negative or NaN times, experts that do not exist, a policy with frames per layer, or one that cannot
    /// keep the initial experts.
    pub fn new(setup: Setup) -> Result<Self, ScheduleError> {
        let Setup { costs, experts, divides, keeps, ahead, window_us, cached, pinned, score } = setup;
        if keeps.to_string().ends_with("per-layer") {
            return Err(ScheduleError::Begin("frames are shared by all layers, and their policy is not"));
        }
        if !window_us.is_finite() || window_us < 0.0 {
            let what = "what lies between two layers";
            return Err(ScheduleError::Time { what, value: window_us });
        }
        let k = experts.layers().iter().map(|l| l.k).max().unwrap_or(1);
        let bypasses = keeps.to_string().contains("bypass=1");
        let bypassing =
            if bypasses { k.min((cached.len() - pinned.len().min(cached.len())) / BYPASS_SHARE) } else { 0 };
        let mut cache = Cache::with_pinned(&experts, (cached.len() - bypassing) as u64, &keeps, &pinned)?;
        let mut frames = vec![None; experts.count()];
        let mut passing = VecDeque::with_capacity(cached.len());
        for (frame, &key) in (0..).zip(&cached) {
            let id = experts.id(key.layer.into(), key.expert.into())? as usize;
            if frames[id].replace(frame).is_some() {
                return Err(ScheduleError::Begin("an expert begins in two frames"));
            }
            if pinned.contains(&key) && !cache.ahead(key, |_| {})? {
                return Err(ScheduleError::Begin("an expert that never leaves has no frame"));
            }
        }
        // The last ones of each layer bypass the cache.
        for &key in cached.iter().filter(|key| !pinned.contains(key)) {
            if cache.used() >= cache.capacity() || !cache.ahead(key, |_| {})? {
                passing.push_back(key);
            }
        }
        let most = experts.layers().iter().map(|l| l.experts).max().unwrap_or(0);
        let layers = experts.layers().len();
        Ok(Self {
            scheduler: TimelineScheduler::new(costs)?,
            ranking: Ranking::new(most, cache.depth() * k),
            cache,
            frames,
            free: Vec::with_capacity(cached.len()),
            passing,
            coming: Vec::new(),
            now: 0.0,
            link: 0.0,
            span: 0.0,
            layer: 0,
            missed: Vec::with_capacity(most),
            odds: (0..ahead).map(|_| Odds::new(k, k)).collect(),
            predicted: vec![(0, Vec::with_capacity(k)); layers],
            announced: Vec::new(),
            tasks: Vec::with_capacity(most),
            outlooks: Vec::new(),
            planned: Vec::new(),
            decision: Decision::default(),
            brings: Vec::new(),
            counts: Counts::default(),
            experts,
            divides,
            ahead,
            window_us,
            score,
        })
    }

    /// Counters of decisions so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether an expert is in a frame or in transfer.
    pub fn holds(&self, key: Key) -> bool {
        self.frame(key).is_some()
    }

    /// The frame of an expert.
    pub fn frame(&self, key: Key) -> Option<u32> {
        let id = self.experts.id(key.layer.into(), key.expert.into()).ok()?;
        self.frames.get(id as usize).copied().flatten()
    }

    /// Removes an expert that has left the host's memory from its frame, unless it is pinned.
    pub fn lose(&mut self, key: Key) {
        let passed = self.passing.len();
        self.passing.retain(|p| *p != key);
        if self.cache.release(key).unwrap_or(false) || self.passing.len() < passed {
            self.leave(key);
        }
    }

    /// Assigns the experts of a layer; `loads` are the tokens by expert. An expert that is not in the host's
    /// memory (`there`) is not transferred: the CPU computes it when it arrives.
    ///
    /// # Errors
    /// A layer or an expert that does not exist.
    pub fn divide(
        &mut self,
        layer: usize,
        loads: &[u32],
        prompt: bool,
        there: &dyn Fn(Key) -> bool,
    ) -> Result<&Decision, ScheduleError> {
        self.now += self.span + self.window_us;
        let now = self.now;
        self.coming.retain(|c| c.1 > now);
        self.learn(layer, loads);
        self.decision.clear(loads.len());
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.clear();
        self.missed.clear();
        let cpu = &self.scheduler.costs().cpu;
        let mut late = 0.0;
        for (expert, &load) in (0..).zip(loads).filter(|l| *l.1 > 0) {
            let key = Key { layer: layer as u16, expert };
            let held = self.when(key, now);
            *if held.is_some() { &mut self.counts.hits } else { &mut self.counts.misses } += 1;
            if held.is_some() || there(key) {
                tasks.push(Task { expert, load, held });
            } else {
                late += cpu.table.at(load.into());
                self.missed.push(expert);
            }
        }
        let free = Free { gpu: 0.0, cpu: late, link: (self.link - now).max(0.0) };
        let policy = self.divides[usize::from(!prompt)];
        let schedule = self.scheduler.schedule(policy, &tasks, free)?;
        self.span = schedule.makespan;
        self.link = now + schedule.done.link.max(free.link);
        self.counts.link_us += schedule.done.link - free.link;
        self.layer = layer;
        // The cache learns which experts are hits and which are transferred.
        let mut comes = Vec::with_capacity(tasks.len());
        for run in &schedule.runs {
            match (run.unit, tasks[run.task].held) {
                (ExpertUnit::Gpu, _) => self.decision.units[usize::from(run.expert)] = ExpertUnit::Gpu,
                (ExpertUnit::Cpu, None) => self.missed.push(run.expert),
                (ExpertUnit::Cpu, Some(_)) | (ExpertUnit::Near, _) => {}
            }
            if run.unit == ExpertUnit::Gpu || tasks[run.task].held.is_some() {
                comes.push(run.expert);
            }
        }
        self.tasks = tasks;
        let Self { cache, frames, free, passing, experts, decision, counts, missed, span, scheduler, .. } =
            self;
        let used = |key: &Key| usize::from(key.layer) == layer && comes.contains(&key.expert);
        cache.touch(layer, &comes, |event| match event {
            Event::Hit(_) => {}
            Event::Evict(key) => free.extend(take(experts, frames, key)),
            Event::Load(key) | Event::Stream(key) => {
                let stays = matches!(event, Event::Load(_));
                let here = passing.iter().position(|p| *p == key);
                // An expert that bypasses the cache has a frame already.
                if let Some(at) = here {
                    if stays {
                        passing.remove(at);
                    }
                    return;
                }
                if let Some(frame) = vacant(experts, frames, free, passing, &used) {
                    give(experts, frames, key, frame);
                    decision.transfers.push(Transfer::Bring(Bring { key, frame }));
                    counts.fetched += 1;
                    passing.extend((!stays).then_some(key));
                } else {
                    decision.units[usize::from(key.expert)] = ExpertUnit::Cpu;
                    counts.turned_away += 1;
                    missed.push(key.expert);
                    *span += scheduler.costs().cpu.table.at(loads[usize::from(key.expert)].into());
                }
            }
        })?;
        self.coming.retain(|c| usize::from(c.0.layer) != layer);
        self.counts.makespan_us += self.span;
        self.decision.makespan_us = self.span;
        Ok(&self.decision)
    }

    /// Chooses experts to transfer ahead, while the last assigned layer is computed. `scores(0)` are its
    /// router's logits of a token, followed by those of the gates of the next `scored − 1` layers. Several
    /// tokens have no scores.
    ///
    /// # Errors
    /// An expert that does not exist.
    pub fn predict<'s>(
        &mut self,
        scored: usize,
        scores: &dyn Fn(usize) -> &'s [f32],
        there: &dyn Fn(Key) -> bool,
    ) -> Result<&[Bring], ScheduleError> {
        self.brings.clear();
        let layer = self.layer;
        if scored == 0 {
            return Ok(&self.brings);
        }
        if self.cache.depth() > 0 {
            let ranked = self.ranking.of_logits(scores(0), self.score);
            self.cache.score(layer, ranked)?;
        }
        let each = self.span + self.window_us;
        let depth = self.ahead.min(scored - 1);
        self.outlooks.resize_with(depth, Outlook::default);
        for ahead in 1..=depth {
            self.look(layer + ahead, ahead, each * ahead as f64, scores(ahead), there);
        }
        let busy = (self.link - self.now).max(0.0);
        let policy = self.divides[1];
        prefetch::plan(&mut self.scheduler, policy, &mut self.outlooks, busy, &mut self.planned);
        for at in 0..self.planned.len() {
            let planned = self.planned[at];
            let key = Key { layer: (layer + planned.ahead) as u16, expert: planned.expert };
            if self.invite(key)? || self.pass(key) {
                self.counts.ahead += 1;
                self.announced.push(key);
            }
        }
        self.follow(scores(0), self.now + each, there)?;
        Ok(&self.brings)
    }

    /// Predicted uses of a layer ahead: the first experts of the gate, as many as a token chooses.
    fn look(&mut self, layer: usize, ahead: usize, start: f64, logits: &[f32], there: &dyn Fn(Key) -> bool) {
        let mut outlook = std::mem::take(&mut self.outlooks[ahead - 1]);
        outlook.start = start;
        outlook.tasks.clear();
        outlook.probability.clear();
        let k = self.experts.layers().get(layer).map_or(0, |l| l.k);
        let mut best = Ranking::new(logits.len(), k);
        let (_, named) = &mut self.predicted[layer.min(self.experts.layers().len() - 1)];
        named.clear();
        for (place, &(expert, _)) in best.of_logits(logits, self.score).iter().take(k).enumerate() {
            named.push(expert);
            let key = Key { layer: layer as u16, expert };
            let held = when(&self.experts, &self.frames, &self.coming, key, self.now + start);
            if held.is_some() || there(key) {
                outlook.tasks.push(Task { expert, load: 1, held });
                outlook.probability.push(self.odds[ahead - 1].of(place));
            }
        }
        self.predicted[layer.min(self.experts.layers().len() - 1)].0 = ahead;
        self.outlooks[ahead - 1] = outlook;
    }

    /// Transfers experts that the CPU computes now, the highest score first, as long as the link is idle
    /// until `end`.
    fn follow(&mut self, logits: &[f32], end: f64, there: &dyn Fn(Key) -> bool) -> Result<(), ScheduleError> {
        let of = |e: u16| logits.get(usize::from(e)).copied().unwrap_or(f32::NEG_INFINITY);
        let mut missed = std::mem::take(&mut self.missed);
        missed.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
        for &expert in &missed {
            let key = Key { layer: self.layer as u16, expert };
            if self.link.max(self.now) >= end {
                break;
            }
            if there(key) && self.invite(key)? {
                self.counts.kept += 1;
            }
        }
        self.missed = missed;
        Ok(())
    }

    /// Transfers an expert that may be needed, if the policy keeps it.
    fn invite(&mut self, key: Key) -> Result<bool, ScheduleError> {
        let Self { cache, frames, free, passing, experts, brings, layer, .. } = self;
        // An expert that the current layer reads keeps its frame.
        let used = |key: &Key| usize::from(key.layer) == *layer;
        let mut taken = false;
        cache.ahead(key, |event| match event {
            Event::Evict(key) => free.extend(take(experts, frames, key)),
            Event::Load(key) => {
                if let Some(at) = passing.iter().position(|p| *p == key) {
                    passing.remove(at);
                } else if let Some(frame) = vacant(experts, frames, free, passing, &used) {
                    give(experts, frames, key, frame);
                    brings.push(Bring { key, frame });
                    taken = true;
                }
            }
            Event::Hit(_) | Event::Stream(_) => {}
        })?;
        if taken {
            self.send(key);
        }
        Ok(taken)
    }

    /// Transfers an expert that the policy would not keep to a frame outside of the cache, unless the experts
    /// there are still to be used.
    fn pass(&mut self, key: Key) -> bool {
        if self.holds(key) {
            return false;
        }
        let Self { frames, free, passing, experts, brings, layer, announced, .. } = self;
        let used = |key: &Key| usize::from(key.layer) == *layer || announced.contains(key);
        let Some(frame) = vacant(experts, frames, free, passing, &used) else { return false };
        give(experts, frames, key, frame);
        passing.push_back(key);
        brings.push(Bring { key, frame });
        self.send(key);
        true
    }

    /// Starts the transfer of an expert.
    fn send(&mut self, key: Key) {
        let way = self.scheduler.costs().bring_us;
        self.link = self.link.max(self.now) + way;
        self.counts.link_us += way;
        self.coming.push((key, self.link));
    }

    /// Compares the predictions of a layer with its actual experts.
    fn learn(&mut self, layer: usize, loads: &[u32]) {
        let used = |e: u16| loads.get(usize::from(e)).is_some_and(|&n| n > 0);
        let counts = &mut self.counts;
        self.announced.retain(|key| {
            let own = usize::from(key.layer) == layer;
            counts.predicted += u64::from(own && used(key.expert));
            !own
        });
        let Some((ahead, named)) = self.predicted.get_mut(layer) else { return };
        if let Some(odds) = ahead.checked_sub(1).and_then(|at| self.odds.get_mut(at)) {
            named.iter().enumerate().for_each(|(place, &e)| odds.learn(place, used(e)));
        }
        *ahead = 0;
        named.clear();
    }

    /// Time from which on an expert is in a frame.
    fn when(&self, key: Key, from: f64) -> Option<f64> {
        when(&self.experts, &self.frames, &self.coming, key, from)
    }

    fn leave(&mut self, key: Key) {
        self.free.extend(take(&self.experts, &mut self.frames, key));
        self.coming.retain(|c| c.0 != key);
    }
}

fn when(
    experts: &ExpertIndex,
    frames: &[Option<u32>],
    coming: &[(Key, f64)],
    key: Key,
    from: f64,
) -> Option<f64> {
    let id = experts.id(key.layer.into(), key.expert.into()).ok()?;
    frames.get(id as usize).copied().flatten()?;
    Some(coming.iter().find(|c| c.0 == key).map_or(0.0, |c| (c.1 - from).max(0.0)))
}

/// Takes the frame of an expert away from it.
fn take(experts: &ExpertIndex, frames: &mut [Option<u32>], key: Key) -> Option<u32> {
    let id = experts.id(key.layer.into(), key.expert.into()).ok()?;
    frames.get_mut(id as usize)?.take()
}

/// A free frame, or that of an expert that bypasses the cache and is not `used` now.
fn vacant(
    experts: &ExpertIndex,
    frames: &mut [Option<u32>],
    free: &mut Vec<u32>,
    passing: &mut VecDeque<Key>,
    used: &dyn Fn(&Key) -> bool,
) -> Option<u32> {
    free.pop().or_else(|| {
        let at = passing.iter().position(|key| !used(key))?;
        passing.remove(at).and_then(|key| take(experts, frames, key))
    })
}

/// Assigns a frame to an expert.
fn give(experts: &ExpertIndex, frames: &mut [Option<u32>], key: Key, frame: u32) {
    let id = experts.id(key.layer.into(), key.expert.into()).ok();
    if let Some(place) = id.and_then(|id| frames.get_mut(id as usize)) {
        *place = Some(frame);
    }
}
