//! Time of a stream: engines side by side, between barriers and events.
//!
//! The unit runs at 1 GHz, and an instruction begins in the clock in which its engine is free and its events
//! are there.
//!
//! - GEMV: a tile of 2048 weights times one token takes [`TILE_CLOCKS`], since 256 bit-serial multipliers
//!   take 8 numbers of 16 bits each: 256 GFLOPS (TriMoE, §4.1 and Table 1). Short tiles take as long. Tiles
//!   come through a FIFO of [`FIFO`]: the next ones are requested while one is multiplied, as many as hide
//!   the latency of the DRAM.
//! - ACT: 256 numbers a clock, and 256 in [`EXP_CLOCKS`] where there is an exponential: TriMoE gives 256
//!   units for exponentials and products and no rate; they are taken to be bit-serial like the multipliers,
//!   16 bits.
//! - MEM and GEMV share the DRAM's private buses, a tile or a token's vector at a time, in the order of their
//!   requests.
//! - LINK: lines that leave the DIMM or come to it go over a DIMM-Link of [`LINK_GBS`], and all of them over
//!   the private buses. What that takes of the buses of other DIMMs, a sixth of their time at most, is not
//!   held against these.
//!
//! Bandwidth of the buffer is not modelled: it is on the chip, with a port for each engine.

use super::clock::{Bus, Traffic};
use super::program::Program;
use super::report::Report;
use moec_ndp_isa::{Activation, Glu, Instruction, LINE, Op, PAIR_LINES, PANEL, Stream, TILE_PAIRS};
use std::collections::VecDeque;

/// Clocks of a tile and a token.
pub const TILE_CLOCKS: u32 = 16;
/// Clocks of 256 exponentials.
pub const EXP_CLOCKS: u32 = 16;
/// Numbers that the activation unit works on at once.
pub const ACT_WIDTH: u32 = 256;
/// Tiles of 4 KB between DRAM and multipliers.
pub const FIFO: usize = 4;
/// GB/s of a DIMM-Link (TriMoE, Table 1).
pub const LINK_GBS: f64 = 25.0;
/// Lines that a link takes at a time.
const LINK_LINES: u64 = 64;

/// Time and work of a stream for `n` tokens.
pub fn time(program: &Program, bus: &Bus, n: u32) -> Report {
    let stream = program.stream();
    let (mut report, mut code) = (Report::default(), stream.code.as_slice());
    while let Some(first) = code.first() {
        let looped = first.op == Op::Loop;
        let from = usize::from(looped);
        let ends = if looped { |op: &Op| *op == Op::End } else { |op: &Op| *op == Op::Loop };
        let end = code[from..].iter().position(|i| ends(&i.op)).map_or(code.len(), |at| from + at);
        let body = &code[from..end];
        if looped {
            let tokens = stream.tokens.max(1);
            report = report.plus(block(stream, body, bus, tokens), u64::from(n / tokens));
            if !n.is_multiple_of(tokens) {
                report = report.plus(block(stream, body, bus, n % tokens), 1);
            }
        } else {
            report = report.plus(block(stream, body, bus, 0), 1);
        }
        code = &code[(end + from).min(code.len())..];
    }
    report
}

/// Microseconds of a stream for each number of tokens, for a scheduler's cost table.
pub fn times(program: &Program, bus: &Bus, tokens: &[u32]) -> Vec<(u32, f64)> {
    tokens.iter().map(|&n| (n, time(program, bus, n).ns / 1000.0)).collect()
}

/// Rest of an instruction.
struct Job<'a> {
    op: &'a Op,
    signal: Option<u8>,
    start: f64,
    /// Time of its next part's request.
    next: f64,
    /// Time when its parts so far are complete.
    end: f64,
    /// Parts that are done: tiles, tokens, or lines of a link.
    done: u64,
    /// Times when the tiles in the FIFO have been multiplied.
    fifo: VecDeque<f64>,
}

/// Queue of one engine.
#[derive(Default)]
struct EngineQueue<'a> {
    waiting: VecDeque<&'a Instruction>,
    job: Option<Job<'a>>,
    free: f64,
}

/// Straight code: a block of tokens, or the code outside of loops.
fn block(stream: &Stream, code: &[Instruction], bus: &Bus, tokens: u32) -> Report {
    let mut state = State {
        report: Report::default(),
        traffic: Traffic::new(*bus),
        events: [None; 32],
        tokens,
        others: stream.system.count().map_or(0.0, |dimms| 1.0 - 1.0 / f64::from(dimms)),
    };
    let mut now = 0.0;
    for section in code.split(|i| i.op == Op::Barrier) {
        now = state.run_section(section, now);
    }
    state.report.ns = now;
    state.report
}

struct State {
    report: Report,
    traffic: Traffic,
    events: [Option<f64>; 32],
    tokens: u32,
    /// The part of striped lines on other DIMMs.
    others: f64,
}

impl State {
    /// Runs the instructions between two barriers, from `now` on; gives when all are done.
    fn run_section(&mut self, code: &[Instruction], now: f64) -> f64 {
        let mut queues: [EngineQueue<'_>; 4] = Default::default();
        for lane in &mut queues {
            lane.free = now;
        }
        for instruction in code {
            if let Some(engine) = instruction.op.engine() {
                queues[engine.index()].waiting.push_back(instruction);
            }
        }
        // The engine with the earliest next part executes it. Of equal ones the first engine does.
        loop {
            for lane in &mut queues {
                self.begin(lane);
            }
            let asking =
                queues.iter_mut().enumerate().filter_map(|(e, lane)| Some((lane.job.as_ref()?.next, e)));
            let Some((_, engine)) = asking.min_by(|a, b| a.0.total_cmp(&b.0)) else { break };
            let lane = &mut queues[engine];
            let Some(mut job) = lane.job.take() else { break };
            if self.part(&mut job) {
                lane.job = Some(job);
            } else {
                lane.free = job.end;
                self.report.busy[engine] += job.end - job.start;
                if let Some(event) = job.signal.and_then(|event| self.events.get_mut(usize::from(event))) {
                    *event = Some(job.end);
                }
            }
        }
        queues.iter().map(|lane| lane.free).fold(now, f64::max)
    }

    /// Begins a lane's next instruction, if its engine is idle and its events are known.
    fn begin(&self, lane: &mut EngineQueue<'_>) {
        let Some(first) = lane.waiting.front().filter(|_| lane.job.is_none()) else { return };
        let known = first
            .waits
            .iter()
            .try_fold(lane.free, |latest, event| Some(latest.max((*self.events.get(usize::from(event))?)?)));
        if let (Some(start), Some(first)) = (known, lane.waiting.pop_front_if(|_| known.is_some())) {
            let (op, signal) = (&first.op, first.signal);
            lane.job =
                Some(Job { op, signal, start, next: start, end: start, done: 0, fifo: VecDeque::new() });
        }
    }

    /// Executes one more part of an instruction; returns false if it was the last one.
    fn part(&mut self, job: &mut Job<'_>) -> bool {
        match *job.op {
            Op::Gemv { panels, pairs, .. } => self.tile(job, u64::from(panels), pairs),
            Op::Load { stride, lines, .. } => {
                // Data that all tokens share is read once.
                let vectors = if stride == 0 { self.tokens.min(1) } else { self.tokens };
                self.vector(job, u64::from(vectors), u64::from(lines), false)
            }
            Op::Store { lines, .. } => self.vector(job, u64::from(self.tokens), u64::from(lines), true),
            Op::Relayout { lines, .. } => self.linked(job, u64::from(lines), self.others),
            Op::Migrate { lines, .. } => self.linked(job, u64::from(lines), 1.0),
            ref op => {
                job.end = job.start + f64::from(act_clocks(op)) * f64::from(self.tokens);
                false
            }
        }
    }

    fn tile(&mut self, job: &mut Job<'_>, panels: u64, pairs: u32) -> bool {
        let per_panel = u64::from(pairs.div_ceil(TILE_PAIRS));
        if self.tokens == 0 || job.done == panels * per_panel {
            return false;
        }
        let before = (job.done % per_panel) as u32 * TILE_PAIRS;
        let lines = u64::from((pairs - before).min(TILE_PAIRS) * PAIR_LINES);
        let there = self.traffic.read(job.next, lines);
        job.end = job.end.max(there) + f64::from(TILE_CLOCKS * self.tokens);
        job.done += 1;
        job.fifo.push_back(job.end);
        // The tile that makes room for the next one.
        let room = if job.fifo.len() < FIFO { None } else { job.fifo.pop_front() };
        job.next = room.unwrap_or(job.start);
        self.report.tiles += 1;
        self.report.read += lines;
        self.report.flops += 2 * lines * u64::from(LINE / 2) * u64::from(self.tokens);
        job.done < panels * per_panel
    }

    fn vector(&mut self, job: &mut Job<'_>, vectors: u64, lines: u64, write: bool) -> bool {
        if job.done == vectors {
            return false;
        }
        let (count, there) = if write {
            (&mut self.report.written, self.traffic.write(job.next, lines))
        } else {
            (&mut self.report.read, self.traffic.read(job.next, lines))
        };
        *count += lines;
        (job.end, job.next) = (there, self.traffic.free());
        job.done += 1;
        job.done < vectors
    }

    /// Lines between DIMMs: each is read on one and written on one, and `share` of them go over the link.
    fn linked(&mut self, job: &mut Job<'_>, lines: u64, share: f64) -> bool {
        let part = LINK_LINES.min(lines - job.done);
        let there = self.traffic.read(job.next, part);
        let begins = job.end.max(there);
        // The next part is read while this one is on the link.
        (job.next, job.end) = (begins, begins + part as f64 * share * f64::from(LINE) / LINK_GBS);
        job.done += part;
        self.report.read += part;
        self.report.written += part;
        let more = job.done < lines;
        if !more {
            self.report.linked += (lines as f64 * share).round() as u64;
        }
        more
    }
}

/// Clocks of the activation unit for a token.
fn act_clocks(op: &Op) -> u32 {
    let exponential = |kind: &Activation| *kind != Activation::Relu;
    let (count, exponentials) = match op {
        Op::Act { kind, count, .. } => (*count, exponential(kind)),
        Op::Glu { kind, count, .. } => {
            let with = match kind {
                Glu::Gated(function) => exponential(function),
                Glu::DRelu => false,
                Glu::Clamped { .. } => true,
            };
            (*count, with)
        }
        Op::Init { count, .. }
        | Op::Mul { count, .. }
        | Op::Scale { count, .. }
        | Op::Reduce { count, .. }
        | Op::Convert { count, .. } => (*count, false),
        _ => (0, false),
    };
    count.div_ceil(ACT_WIDTH) * if exponentials { EXP_CLOCKS } else { 1 }
}

/// Rate of the multipliers: two operations for each weight of a tile in its clocks of 1 ns, 256 as in Table
/// 1.
pub const GFLOPS: f64 = (2 * TILE_PAIRS * 2 * PANEL / TILE_CLOCKS) as f64;
