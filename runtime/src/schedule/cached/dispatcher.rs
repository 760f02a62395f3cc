//! Dispatcher of cached experts: the unit of each expert of a layer, and transfers into frames (HybriMoE,
//! §IV).
//!
//! After the router of a layer, [`CachedDispatcher::divide`] assigns its experts to the GPU or the CPU. It
//! also returns the transfers that the GPU needs for that, with their frames. Then the scores of the layer
//! and the predictions of the next layers' gates are known: [`CachedDispatcher::predict`] chooses experts to
//! transfer ahead, as long as the link would be idle. In a prompt or a batch every row has scores: the cache
//! gets their mean, and the rows of a layer ahead add up to the loads that its schedule is simulated with.
//! If a token is decoded again after a little pass (MoBiLE, §III-B), the evicted token's routers predict in
//! place of the gates.
//!
//! Time is modelled: a layer takes the makespan of its schedule, and the time between two layers is in the
//! plan. So decisions are a function of routing, scores and costs, and a simulation with the same inputs
//! makes the same decisions. Nothing here moves a byte.
//!
//! Cache frames are shared by all layers. Each holds an expert from the start, and a [`Cache`] decides which
//! experts stay. If its policy lets some bypass it, a few frames are outside of the cache: an expert that
//! bypasses it stays there until the next one comes.

use super::prefetch::{self, PredictedLayer, Prefetch};
use crate::offload::cache::evicted::EvictedTokens;
use crate::offload::cache::odds::Odds;
use crate::offload::cache::{Cache, Event, EvictedExpertCounts, ExpertIndex, Key, Ranking, Setting};
use crate::schedule::costs::Costs;
use crate::schedule::decision::{Decision, FrameTransfer, Transfer};
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
    /// Solvers of a prompt, and of decoded tokens.
    pub solvers: [Solver; 2],
    /// Cache policy of the frames.
    pub cache_policy: Setting,
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

/// Rows of a dispatched layer.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Tokens by expert.
    pub loads: &'a [u32],
    /// Whether they belong to a prompt.
    pub prompt: bool,
    /// Experts of a token: fewer than the layer has in a little pass.
    pub k: usize,
}

/// Scores of the rows of a step.
#[derive(Clone, Copy)]
pub struct RowScores<'a> {
    /// Number of rows.
    pub rows: usize,
    /// Number of layers with scores: the dispatched one first, then those that gates predict.
    pub layers: usize,
    /// Logits of a layer (0: the dispatched one) for a row.
    pub logits: &'a dyn Fn(usize, usize) -> &'a [f32],
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
    /// Both, by the number of layers ahead.
    pub by_depth: [[u64; 2]; prefetch::DEPTH],
    /// Experts that the CPU had computed and that were transferred afterwards.
    pub kept: u64,
    /// Experts that were to be transferred but found no frame: the CPU computed them.
    pub without_frame: u64,
    /// Experts of tokens that were decoded again.
    pub second_pass: EvictedExpertCounts,
    /// Sum of the expected times of layers, in microseconds.
    pub makespan_us: f64,
    /// Sum of the expected times of transfers, in microseconds.
    pub link_us: f64,
}

/// Prediction of the experts of a layer.
#[derive(Clone, Debug, Default)]
struct Predicted {
    /// Index of the hit rates that it is compared with; `None`: of several rows, or compared already.
    hit_rates: Option<usize>,
    /// Experts in the order of their ranks.
    experts: Vec<u16>,
    /// By expert: expected tokens, and the probability that none of them comes.
    loads: Vec<(u32, f64)>,
}

/// Dispatches the experts of a plan to the GPU and the CPU.
pub struct CachedDispatcher {
    experts: ExpertIndex,
    solvers: [Solver; 2],
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
    uncached: VecDeque<Key>,
    /// Experts in transfer, and when each transfer ends.
    in_transfer: Vec<(Key, f64)>,
    /// The modelled time, the time when the link is idle, and the duration of the last layer.
    now: f64,
    link: f64,
    span: f64,
    /// The last layer, and the experts that the CPU computed there because no frame held them.
    layer: usize,
    missed: Vec<u16>,
    /// Whether the last layer belongs to a prompt, and its experts of a token.
    prompt: bool,
    k: usize,
    /// By layers ahead: how often the expert at a rank of the prediction of a single row is used. The last
    /// is that of evicted tokens.
    hit_rates: Vec<Odds>,
    evicted: EvictedTokens,
    /// By layer: the last prediction. Then the experts that were transferred for it, and how many layers
    /// ahead.
    predicted: Vec<Predicted>,
    transferred: Vec<(Key, usize)>,
    /// Maximum number of layers ahead whose experts are transferred.
    depth: usize,
    /// By expert: its mean score in the last layer.
    shares: Vec<f32>,
    best: Ranking,
    tasks: Vec<Task>,
    predicted_layers: Vec<PredictedLayer>,
    planned: Vec<Prefetch>,
    decision: Decision,
    frame_transfers: Vec<FrameTransfer>,
    counts: Counts,
}

impl CachedDispatcher {
    /// Creates a dispatcher.
    ///
    /// # Errors
    /// Negative or NaN times, experts that do not exist, a policy with frames per layer, or one that cannot
    /// keep the initial experts.
    pub fn new(setup: Setup) -> Result<Self, ScheduleError> {
        let Setup { costs, experts, solvers, cache_policy, ahead, window_us, cached, pinned, score } = setup;
        if cache_policy.to_string().ends_with("per-layer") {
            return Err(ScheduleError::Begin(
                "the cache policy must be shared by all layers, as the frames are",
            ));
        }
        if !window_us.is_finite() || window_us < 0.0 {
            let what = "the time between two layers";
            return Err(ScheduleError::Time { what, value: window_us });
        }
        let k = experts.layers().iter().map(|l| l.k).max().unwrap_or(1);
        let bypasses = cache_policy.to_string().contains("bypass=1");
        let bypassing =
            if bypasses { k.min((cached.len() - pinned.len().min(cached.len())) / BYPASS_SHARE) } else { 0 };
        let mut cache =
            Cache::with_pinned(&experts, (cached.len() - bypassing) as u64, &cache_policy, &pinned)?;
        let mut frames = vec![None; experts.count()];
        let mut uncached = VecDeque::with_capacity(cached.len());
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
                uncached.push_back(key);
            }
        }
        let most = experts.layers().iter().map(|l| l.experts).max().unwrap_or(0);
        let layers = experts.layers().len();
        Ok(Self {
            scheduler: TimelineScheduler::new(costs)?,
            ranking: Ranking::new(most, most),
            best: Ranking::new(most, k),
            shares: Vec::with_capacity(most),
            cache,
            frames,
            free: Vec::with_capacity(cached.len()),
            uncached,
            in_transfer: Vec::new(),
            now: 0.0,
            link: 0.0,
            span: 0.0,
            layer: 0,
            missed: Vec::with_capacity(most),
            prompt: false,
            k,
            hit_rates: (0..=ahead).map(|_| Odds::new(k, k)).collect(),
            evicted: EvictedTokens::new(layers, most),
            predicted: vec![
                Predicted {
                    hit_rates: None,
                    experts: Vec::with_capacity(most),
                    loads: vec![(0, 1.0); most],
                };
                layers
            ],
            transferred: Vec::new(),
            depth: prefetch::DEPTH,
            tasks: Vec::with_capacity(most),
            predicted_layers: Vec::new(),
            planned: Vec::new(),
            decision: Decision::default(),
            frame_transfers: Vec::new(),
            counts: Counts::default(),
            experts,
            solvers,
            ahead,
            window_us,
            score,
        })
    }

    /// Transfers experts for at most so many layers ahead.
    pub fn limit_depth(&mut self, layers: usize) {
        self.depth = layers.min(prefetch::DEPTH);
    }

    /// Counters of decisions so far.
    pub fn counts(&self) -> Counts {
        Counts { second_pass: self.evicted.counts(), ..self.counts }
    }

    /// Replaces the costs, for decisions from now on.
    ///
    /// # Errors
    /// Negative, NaN or infinite times.
    pub fn set_costs(&mut self, costs: Costs) -> Result<(), ScheduleError> {
        self.scheduler.set_costs(costs)
    }

    /// Costs of experts.
    pub fn costs(&self) -> &Costs {
        self.scheduler.costs()
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
    pub fn remove(&mut self, key: Key) {
        let passed = self.uncached.len();
        self.uncached.retain(|p| *p != key);
        if self.cache.release(key).unwrap_or(false) || self.uncached.len() < passed {
            self.release_frame(key);
        }
    }

    /// Assigns the experts of a layer. An expert that is not in the host's memory (`in_host_memory`) is not
    /// transferred: the CPU computes it when it arrives.
    ///
    /// # Errors
    /// A layer or an expert that does not exist.
    pub fn divide(
        &mut self,
        layer: usize,
        rows: Rows<'_>,
        in_host_memory: &dyn Fn(Key) -> bool,
    ) -> Result<&Decision, ScheduleError> {
        let Rows { loads, prompt, k } = rows;
        (self.prompt, self.k) = (prompt, k);
        self.now += self.span + self.window_us;
        let now = self.now;
        self.in_transfer.retain(|c| c.1 > now);
        self.learn(layer, loads);
        self.decision.clear(loads.len());
        let mut tasks = std::mem::take(&mut self.tasks);
        tasks.clear();
        self.missed.clear();
        let cpu = &self.scheduler.costs().cpu;
        let mut cpu_busy_us = 0.0;
        for (expert, &load) in (0..).zip(loads).filter(|l| *l.1 > 0) {
            let key = Key { layer: layer as u16, expert };
            let held = self.when(key, now);
            *if held.is_some() { &mut self.counts.hits } else { &mut self.counts.misses } += 1;
            if held.is_some() || in_host_memory(key) {
                tasks.push(Task { expert, load, held });
            } else {
                cpu_busy_us += cpu.table.at(load.into());
                self.missed.push(expert);
            }
        }
        let from_disk = self.missed.len();
        let free = Free { gpu: 0.0, cpu: cpu_busy_us, link: (self.link - now).max(0.0) };
        let policy = self.solvers[usize::from(!prompt)];
        let schedule = self.scheduler.schedule(policy, &tasks, free)?;
        self.span = schedule.makespan;
        self.link = now + schedule.done.link.max(free.link);
        self.counts.link_us += schedule.done.link - free.link;
        self.layer = layer;
        // The cache learns which experts are hits and which are transferred.
        let mut cache_accesses = Vec::with_capacity(tasks.len());
        for run in &schedule.runs {
            if run.unit == ExpertUnit::Cpu {
                self.decision.cpu_order.push(run.expert);
            }
            match (run.unit, tasks[run.task].held) {
                (ExpertUnit::Gpu, _) => self.decision.units[usize::from(run.expert)] = ExpertUnit::Gpu,
                (ExpertUnit::Cpu, None) => self.missed.push(run.expert),
                (ExpertUnit::Cpu, Some(_)) | (ExpertUnit::Near, _) => {}
            }
            if run.unit == ExpertUnit::Gpu || tasks[run.task].held.is_some() {
                cache_accesses.push(run.expert);
            }
        }
        // Those that come from disk arrive last.
        self.decision.cpu_order.extend_from_slice(&self.missed[..from_disk]);
        self.tasks = tasks;
        let Self {
            cache, frames, free, uncached, experts, decision, counts, missed, span, scheduler, ..
        } = self;
        let used = |key: &Key| usize::from(key.layer) == layer && cache_accesses.contains(&key.expert);
        cache.touch(layer, &cache_accesses, |event| match event {
            Event::Hit(_) => {}
            Event::Evict(key) => free.extend(unassign_frame(experts, frames, key)),
            Event::Load(key) | Event::Stream(key) => {
                let stays = matches!(event, Event::Load(_));
                let here = uncached.iter().position(|p| *p == key);
                // An expert that bypasses the cache has a frame already.
                if let Some(at) = here {
                    if stays {
                        uncached.remove(at);
                    }
                    return;
                }
                if let Some(frame) = free_or_bypassing_frame(experts, frames, free, uncached, &used) {
                    assign_frame(experts, frames, key, frame);
                    decision.transfers.push(Transfer::ToFrame(FrameTransfer { key, frame }));
                    counts.fetched += 1;
                    uncached.extend((!stays).then_some(key));
                } else {
                    decision.units[usize::from(key.expert)] = ExpertUnit::Cpu;
                    decision.cpu_order.push(key.expert);
                    counts.without_frame += 1;
                    missed.push(key.expert);
                    *span += scheduler.costs().cpu.table.at(loads[usize::from(key.expert)].into());
                }
            }
        })?;
        self.in_transfer.retain(|c| usize::from(c.0.layer) != layer);
        self.counts.makespan_us += self.span;
        self.decision.makespan_us = self.span;
        Ok(&self.decision)
    }

    /// Chooses experts to transfer ahead, while the last assigned layer is computed.
    ///
    /// # Errors
    /// An expert that does not exist.
    pub fn predict(
        &mut self,
        scores: RowScores<'_>,
        in_host_memory: &dyn Fn(Key) -> bool,
    ) -> Result<&[FrameTransfer], ScheduleError> {
        self.frame_transfers.clear();
        let layer = self.layer;
        if scores.rows == 0 || scores.layers == 0 {
            return Ok(&self.frame_transfers);
        }
        let ranked = self.ranking.of_rows(scores.rows, &|row| (scores.logits)(0, row), self.score);
        if self.cache.depth() > 0 {
            self.cache.score(layer, ranked)?;
        }
        self.shares.clear();
        self.shares.resize(ranked.len(), 0.0);
        for &(expert, share) in ranked {
            self.shares[usize::from(expert)] = share;
        }
        if self.is_little() {
            self.name_experts(scores);
        }
        let each = self.span + self.window_us;
        let again = self.evicted.of(layer).is_some();
        let left = self.experts.layers().len().saturating_sub(layer + 1);
        let depth = if again { left } else { self.ahead.min(scores.layers - 1) }.min(self.depth);
        self.predicted_layers.resize_with(depth, PredictedLayer::default);
        for ahead in 1..=depth {
            if again {
                self.predict_from_evicted(layer + ahead);
            } else {
                self.predict_from_gates(layer + ahead, ahead, scores);
            }
            self.expected_tasks(layer + ahead, ahead, each * ahead as f64, in_host_memory);
        }
        let busy = (self.link - self.now).max(0.0);
        let policy = self.solvers[usize::from(!self.prompt)];
        prefetch::plan(&mut self.scheduler, policy, &mut self.predicted_layers, busy, &mut self.planned);
        for at in 0..self.planned.len() {
            let planned = self.planned[at];
            let key = Key { layer: (layer + planned.ahead) as u16, expert: planned.expert };
            if self.prefetch_cached(key)? || self.prefetch_uncached(key) {
                self.counts.ahead += 1;
                self.counts.by_depth[planned.ahead - 1][0] += 1;
                self.transferred.push((key, planned.ahead));
            }
        }
        self.transfer_missed(self.now + each, in_host_memory)?;
        Ok(&self.frame_transfers)
    }

    /// Whether the last layer belongs to a little pass.
    fn is_little(&self) -> bool {
        self.experts.layers().get(self.layer).is_some_and(|l| self.k < l.k)
    }

    /// Records the experts that a full pass would use.
    fn name_experts(&mut self, scores: RowScores<'_>) {
        let k = self.experts.layers()[self.layer].k;
        for row in 0..scores.rows {
            for &(expert, _) in self.best.of_logits((scores.logits)(0, row), self.score).iter().take(k) {
                self.evicted.name(self.layer, expert);
            }
        }
    }

    /// Predicts a layer of a second pass: the experts that the evicted token named.
    fn predict_from_evicted(&mut self, layer: usize) {
        let (Some(named), Some(predicted)) = (self.evicted.of(layer), self.predicted.get_mut(layer)) else {
            return;
        };
        let of_evicted = self.hit_rates.len() - 1;
        predicted.clear(Some(of_evicted));
        // The rows of a batch name more experts than a token uses.
        let last = self.k.saturating_sub(1);
        for (place, &expert) in named.iter().enumerate() {
            predicted.add(expert, self.hit_rates[of_evicted].of(place.min(last)));
        }
    }

    /// Predicts a layer ahead: the first experts of the gate for each row, as many as a token uses.
    fn predict_from_gates(&mut self, layer: usize, ahead: usize, scores: RowScores<'_>) {
        let k = self.experts.layers().get(layer).map_or(0, |l| l.k).min(self.k);
        let Some(predicted) = self.predicted.get_mut(layer) else { return };
        predicted.clear((scores.rows == 1).then_some(ahead - 1));
        for row in 0..scores.rows {
            let ranked = self.best.of_logits((scores.logits)(ahead, row), self.score);
            for (place, &(expert, _)) in ranked.iter().take(k).enumerate() {
                predicted.add(expert, self.hit_rates[ahead - 1].of(place));
            }
        }
    }

    /// Expected tasks of a predicted layer, which begins in `start` microseconds.
    fn expected_tasks(
        &mut self,
        layer: usize,
        ahead: usize,
        start: f64,
        in_host_memory: &dyn Fn(Key) -> bool,
    ) {
        let predicted_layer = &mut self.predicted_layers[ahead - 1];
        predicted_layer.start = start;
        predicted_layer.tasks.clear();
        predicted_layer.probability.clear();
        let Some(predicted) = self.predicted.get(layer) else { return };
        for &expert in &predicted.experts {
            let key = Key { layer: layer as u16, expert };
            let held = when(&self.experts, &self.frames, &self.in_transfer, key, self.now + start);
            if held.is_some() || in_host_memory(key) {
                let (load, missed) = predicted.loads[usize::from(expert)];
                predicted_layer.tasks.push(Task { expert, load, held });
                predicted_layer.probability.push(1.0 - missed);
            }
        }
    }

    /// Transfers experts that the CPU computes now, the highest score first, as long as the link is idle
    /// until `end`.
    fn transfer_missed(
        &mut self,
        end: f64,
        in_host_memory: &dyn Fn(Key) -> bool,
    ) -> Result<(), ScheduleError> {
        let of = |e: u16| self.shares.get(usize::from(e)).copied().unwrap_or(0.0);
        let mut missed = std::mem::take(&mut self.missed);
        missed.sort_by(|&a, &b| of(b).total_cmp(&of(a)).then(a.cmp(&b)));
        for &expert in &missed {
            let key = Key { layer: self.layer as u16, expert };
            if self.link.max(self.now) >= end {
                break;
            }
            if in_host_memory(key) && self.prefetch_cached(key)? {
                self.counts.kept += 1;
            }
        }
        self.missed = missed;
        Ok(())
    }

    /// Transfers an expert that may be needed, if the policy keeps it.
    fn prefetch_cached(&mut self, key: Key) -> Result<bool, ScheduleError> {
        let Self { cache, frames, free, uncached, experts, frame_transfers, layer, .. } = self;
        // An expert that the current layer reads keeps its frame.
        let used = |key: &Key| usize::from(key.layer) == *layer;
        let mut taken = false;
        cache.ahead(key, |event| match event {
            Event::Evict(key) => free.extend(unassign_frame(experts, frames, key)),
            Event::Load(key) => {
                if let Some(at) = uncached.iter().position(|p| *p == key) {
                    uncached.remove(at);
                } else if let Some(frame) = free_or_bypassing_frame(experts, frames, free, uncached, &used) {
                    assign_frame(experts, frames, key, frame);
                    frame_transfers.push(FrameTransfer { key, frame });
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
    fn prefetch_uncached(&mut self, key: Key) -> bool {
        if self.holds(key) {
            return false;
        }
        let Self { frames, free, uncached, experts, frame_transfers, layer, transferred, .. } = self;
        let used = |key: &Key| usize::from(key.layer) == *layer || transferred.iter().any(|t| t.0 == *key);
        let Some(frame) = free_or_bypassing_frame(experts, frames, free, uncached, &used) else {
            return false;
        };
        assign_frame(experts, frames, key, frame);
        uncached.push_back(key);
        frame_transfers.push(FrameTransfer { key, frame });
        self.send(key);
        true
    }

    /// Starts the transfer of an expert.
    fn send(&mut self, key: Key) {
        let transfer_us = self.scheduler.costs().bring_us;
        self.link = self.link.max(self.now) + transfer_us;
        self.counts.link_us += transfer_us;
        self.in_transfer.push((key, self.link));
    }

    /// Compares the predictions of a layer with its actual experts.
    fn learn(&mut self, layer: usize, loads: &[u32]) {
        let used = |e: u16| loads.get(usize::from(e)).is_some_and(|&n| n > 0);
        let counts = &mut self.counts;
        self.transferred.retain(|(key, ahead)| {
            let own = usize::from(key.layer) == layer;
            let used = u64::from(own && used(key.expert));
            counts.predicted += used;
            counts.by_depth[ahead - 1][1] += used;
            !own
        });
        let Some(predicted) = self.predicted.get_mut(layer) else { return };
        if let Some(hit_rates) = predicted.hit_rates.take().and_then(|at| self.hit_rates.get_mut(at)) {
            predicted.experts.iter().enumerate().for_each(|(place, &e)| hit_rates.learn(place, used(e)));
        }
        predicted.clear(None);
        let little = self.experts.layers().get(layer).is_some_and(|l| self.k < l.k);
        if self.prompt {
            self.evicted.forget();
        } else {
            self.evicted.begin(layer, little);
            self.evicted.count(layer, (0..loads.len() as u16).filter(|&e| used(e)));
        }
    }

    /// Time from which on an expert is in a frame.
    fn when(&self, key: Key, from: f64) -> Option<f64> {
        when(&self.experts, &self.frames, &self.in_transfer, key, from)
    }

    fn release_frame(&mut self, key: Key) {
        self.free.extend(unassign_frame(&self.experts, &mut self.frames, key));
        self.in_transfer.retain(|c| c.0 != key);
    }
}

impl Predicted {
    /// Removes all experts.
    fn clear(&mut self, hit_rates: Option<usize>) {
        self.hit_rates = hit_rates;
        for expert in self.experts.drain(..) {
            self.loads[usize::from(expert)] = (0, 1.0);
        }
    }

    /// Adds a token that uses an expert with this probability.
    fn add(&mut self, expert: u16, probability: f64) {
        let Some((load, missed)) = self.loads.get_mut(usize::from(expert)) else { return };
        if *load == 0 {
            self.experts.push(expert);
        }
        *load += 1;
        *missed *= 1.0 - probability;
    }
}

fn when(
    experts: &ExpertIndex,
    frames: &[Option<u32>],
    in_transfer: &[(Key, f64)],
    key: Key,
    from: f64,
) -> Option<f64> {
    let id = experts.id(key.layer.into(), key.expert.into()).ok()?;
    frames.get(id as usize).copied().flatten()?;
    Some(in_transfer.iter().find(|c| c.0 == key).map_or(0.0, |c| (c.1 - from).max(0.0)))
}

/// Takes the frame of an expert away from it.
fn unassign_frame(experts: &ExpertIndex, frames: &mut [Option<u32>], key: Key) -> Option<u32> {
    let id = experts.id(key.layer.into(), key.expert.into()).ok()?;
    frames.get_mut(id as usize)?.take()
}

/// A free frame, or that of an expert that bypasses the cache and is not `used` now.
fn free_or_bypassing_frame(
    experts: &ExpertIndex,
    frames: &mut [Option<u32>],
    free: &mut Vec<u32>,
    uncached: &mut VecDeque<Key>,
    used: &dyn Fn(&Key) -> bool,
) -> Option<u32> {
    free.pop().or_else(|| {
        let at = uncached.iter().position(|key| !used(key))?;
        uncached.remove(at).and_then(|key| unassign_frame(experts, frames, key))
    })
}

/// Assigns a frame to an expert.
fn assign_frame(experts: &ExpertIndex, frames: &mut [Option<u32>], key: Key, frame: u32) {
    let id = experts.id(key.layer.into(), key.expert.into()).ok();
    if let Some(place) = id.and_then(|id| frames.get_mut(id as usize)) {
        *place = Some(frame);
    }
}
