//! Simulation of a system on a prompt: timeline, energy, and numbers of dropped and padded rows.

use super::constants::Constants;
use super::energy::Energy;
use super::model::Model;
use super::timeline::{Queue, TaskKind, Timeline, queues};
use super::units::Units;
use super::work::{Call, CallUnits, Work};
use moec_ir::placement::{ExpertTable, Overflow};
use moec_profile::loads::Loads;

/// Setting of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct Scenario<'a> {
    /// The model.
    pub model: &'a Model,
    /// The device.
    pub units: &'a Units<'a>,
    /// Constants that are not in the device file.
    pub constants: Constants,
    /// Recorded loads that passes decide by.
    pub calibration: &'a Loads,
    /// Share of the recorded chunks that a capacity covers.
    pub coverage: f64,
    /// Treatment of tokens past a capacity.
    pub overflow: Overflow,
}

/// A prompt, and tokens decoded after it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Tokens of a chunk.
    pub chunk: u32,
    /// `[chunks][MoE layers][experts]`: tokens of the chunk that chose each expert.
    pub chunks: Vec<Vec<Vec<u32>>>,
    /// The same for every decoded token.
    pub decode: Vec<Vec<Vec<u32>>>,
}

/// Result of a simulation.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Tasks and their times.
    pub timeline: Timeline,
    /// Microseconds that the CPU works: tasks of its queue, and its work for running graphs of experts.
    pub cpu_us: f64,
    /// Microseconds that the NPU works.
    pub npu_us: f64,
    /// Joules.
    pub energy: Energy,
    /// Tokens of the prompt and decoded ones.
    pub tokens: u64,
    /// (token, expert) pairs of the routers.
    pub routed: u64,
    /// Pairs that were dropped.
    pub dropped: u64,
    /// Rows of experts that graphs computed.
    pub rows: u64,
    /// Rows of these that are padding.
    pub padding: u64,
}

/// Units of a system's parts in prompts and in decoding.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Queue of attention in prompts.
    pub attention: Queue,
    /// Queue of attention in decoding.
    pub decode_attention: Queue,
    /// Queue of dense and shared networks in prompts.
    pub dense: Queue,
    /// Queue of dense and shared networks in decoding.
    pub decode_dense: Queue,
    /// Tables of the experts; `None`: all on the CPU.
    pub tables: Option<Vec<ExpertTable>>,
    /// Batch of the entry point that decodes: its units of groups.
    pub decode_batch: u32,
    /// True if graphs stay on the NPU.
    pub resident: bool,
}

impl Prompt {
    /// Its tokens.
    pub fn tokens(&self) -> u32 {
        self.chunk.saturating_mul(self.chunks.len() as u32)
    }
}

impl Scenario<'_> {
    /// Runs a prompt.
    pub fn run(&self, placed: &Placed, prompt: &Prompt) -> Outcome {
        let mut work = Work::new(self.model, self.units, self.constants);
        let context = prompt.tokens() + prompt.decode.len() as u32;
        let place = CallUnits {
            attention: placed.attention,
            dense: placed.dense,
            tables: placed.tables.as_deref(),
            batch: None,
            resident: placed.resident,
        };
        let decoding = CallUnits {
            attention: placed.decode_attention,
            dense: placed.decode_dense,
            tables: placed.tables.as_deref(),
            batch: Some(placed.decode_batch),
            resident: placed.resident,
        };
        let first = prompt.chunks.iter().map(|loads| (prompt.chunk, loads, place));
        let then = prompt.decode.iter().map(|loads| (1, loads, decoding));
        let mut outcome = Outcome::default();
        for (i, (rows, loads, place)) in first.chain(then).enumerate() {
            // The last chunk computes the first token, and every decoded token the next one.
            let head = i + 1 >= prompt.chunks.len();
            work.add(&Call { call: i as u32, rows, context, loads, head }, &place);
            self.account(&mut outcome, loads, &place);
        }
        let (tasks, mut names) = (work.tasks(), queues(self.units.device));
        // Further queues of a unit follow all others; those without tasks are left out.
        let device = self.units.device;
        let used = tasks.iter().map(|t| t.queue + 1).max().unwrap_or(0);
        names.truncate(used.max(device.units.len() + device.links.len()));
        outcome.timeline = Timeline::of(tasks, names);
        let line = &outcome.timeline;
        let (cpu, npu) = (Queue::Cpu.of(self.units), self.units.npu_queues());
        let hosting = self.constants.hosting * line.working_us(&npu, Some(TaskKind::Experts));
        outcome.cpu_us = (line.busy_us(cpu) + hosting).min(line.wall_us);
        outcome.npu_us = line.working_us(&npu, None);
        outcome.energy = Energy::of(line, outcome.cpu_us, self.units);
        outcome.tokens = u64::from(context);
        outcome
    }

    /// Counts the pairs of a call: routed, dropped, computed by graphs.
    fn account(&self, outcome: &mut Outcome, loads: &[Vec<u32>], place: &CallUnits<'_>) {
        for (i, layer) in loads.iter().enumerate() {
            outcome.routed += layer.iter().map(|&n| u64::from(n)).sum::<u64>();
            let Some(table) = place.tables.and_then(|t| t.get(i)) else { continue };
            let load = |e: u32| layer.get(e as usize).copied().unwrap_or(0);
            for group in place.graphs(table, self.units).map(|(_, group)| group) {
                let most = group.experts.iter().map(|&e| load(e)).max().unwrap_or(0);
                if most == 0 {
                    continue;
                }
                let capacity = table.tiers.get(group.tier as usize).copied().unwrap_or(0);
                let capacity = group.rows(most, capacity);
                for &e in &group.experts {
                    outcome.rows += u64::from(capacity);
                    outcome.padding += u64::from(capacity.saturating_sub(load(e)));
                    let spills = table.experts.get(e as usize).is_some_and(|r| r.fallback.is_some());
                    outcome.dropped += if spills { 0 } else { u64::from(load(e).saturating_sub(capacity)) };
                }
            }
        }
    }
}

impl Outcome {
    /// Joules per token.
    pub fn joules_per_token(&self) -> f64 {
        self.energy.total_j() / self.tokens.max(1) as f64
    }
}
