//! Order of instructions: events and hazards, by vector clocks over the straight line of one iteration.
//!
//! A clock has one number per engine: the number of its instructions that are known to have completed. All
//! slabs begin at multiples of 64 bytes. So two slabs share a byte exactly if they share one of the buffer's
//! 64-byte lines. Hazards in the buffer are therefore found line by line.
#![expect(
    clippy::cast_possible_truncation,
    reason = "lengths and operands of a stream are checked before its order"
)]

use crate::fault::{Fault, named};
use crate::op::{Engine, Op};
use crate::stream::{Instruction, Stream};
use crate::uses::{LinesUse, SlabUse};
use crate::{ALIGN, BUFFER, EVENTS};
use std::ops::Range;

/// Engines.
const N: usize = Engine::ALL.len();

/// Instructions of each engine, counted from 1.
type Clock = [u32; N];

/// Last accesses of a line of the buffer: the count of an instruction of each engine, 0 for none.
#[derive(Clone, Copy, Default)]
struct Last {
    reads: Clock,
    writes: Clock,
}

/// Lines of a region that an instruction touches.
struct Access {
    region: u16,
    lines: Range<u64>,
    writes: bool,
    engine: usize,
    count: u32,
}

/// Written bytes of a line: in blocks that have this token, this many bytes. No pair implies another.
#[derive(Clone, Default)]
struct Filled(Vec<(u8, u64)>);

impl Filled {
    fn holds(&self, bytes: u8, token: u64) -> bool {
        self.0.iter().any(|&(held, since)| held >= bytes && since <= token)
    }

    fn fill(&mut self, bytes: u8, token: u64) {
        if !self.holds(bytes, token) {
            self.0.retain(|&(held, since)| held > bytes || since < token);
            self.0.push((bytes, token));
        }
    }
}

struct Order<'s> {
    stream: &'s Stream,
    /// Knowledge of each engine when it begins its next instruction.
    clocks: [Clock; N],
    /// Index of each instruction of each engine, by its count less 1.
    indices: [Vec<usize>; N],
    /// Clock of an event once it was signalled, and its signaller.
    events: [Option<(Clock, usize)>; EVENTS as usize],
    buffer: Vec<Last>,
    /// Bytes at the beginning of each line of the buffer that hold something.
    filled: Vec<Filled>,
    /// Since the last barrier.
    memory: Vec<Access>,
}

/// Checks events, hazards and first writes.
pub(super) fn check(stream: &Stream) -> Result<(), Fault> {
    let lines = (BUFFER / ALIGN) as usize;
    let mut order = Order {
        stream,
        clocks: [[0; N]; N],
        indices: Default::default(),
        events: [None; EVENTS as usize],
        buffer: vec![Last::default(); lines],
        filled: vec![Filled::default(); lines],
        memory: Vec::new(),
    };
    for (index, instruction) in stream.code.iter().enumerate() {
        match instruction.op.engine() {
            Some(engine) => order.execute(index, instruction, engine)?,
            None => order.barrier(&instruction.op),
        }
    }
    Ok(())
}

impl Order<'_> {
    /// All engines are idle: everything is known to all.
    fn barrier(&mut self, op: &Op) {
        let all = std::array::from_fn(|engine| self.indices[engine].len() as u32);
        self.clocks = [all; N];
        self.memory.clear();
        if matches!(op, Op::Loop | Op::End) {
            self.events = [None; EVENTS as usize];
            self.filled.iter_mut().for_each(|filled| filled.0.clear());
        }
    }

    fn execute(&mut self, index: usize, instruction: &Instruction, engine: Engine) -> Result<(), Fault> {
        let at = |message: String| Fault::instruction(self.stream, index, message);
        let own = engine.index();
        let mut clock = self.clocks[own];
        for event in instruction.waits.iter() {
            let Some((known, _)) = self.events[usize::from(event)] else {
                return Err(at(format!("nothing before it signals e{event}: it would never end")));
            };
            for (mine, theirs) in clock.iter_mut().zip(known) {
                *mine = theirs.max(*mine);
            }
        }
        if let Some(event) = instruction.signal
            && let Some((_, other)) = self.events[usize::from(event)]
        {
            return Err(at(format!("instruction {other} already signals e{event}: use another event")));
        }
        self.indices[own].push(index);
        clock[own] = self.indices[own].len() as u32;
        // Reads come first: the instruction's own results are not yet there.
        let (reads, writes): (Vec<_>, Vec<_>) = instruction.op.slabs().into_iter().partition(|o| o.reads);
        for operand in reads.iter().chain(&writes) {
            self.slab(index, own, &clock, operand)?;
        }
        for operand in instruction.op.lines() {
            self.lines(index, own, &clock, &operand)?;
        }
        self.clocks[own] = clock;
        if let Some(event) = instruction.signal {
            self.events[usize::from(event)] = Some((clock, index));
        }
        Ok(())
    }

    /// Hazards in the buffer, and reads of what nothing has written.
    fn slab(&mut self, index: usize, own: usize, clock: &Clock, operand: &SlabUse) -> Result<(), Fault> {
        let align = u64::from(ALIGN);
        for bytes in operand.ranges(self.stream.tokens) {
            for line in bytes.start / align..bytes.end.div_ceil(align) {
                let held = (bytes.end - line * align).min(align) as u8;
                let token = first_token(operand, line * align);
                let at = line as usize;
                let (last, filled) = (&mut self.buffer[at], &mut self.filled[at]);
                let hazard = if operand.writes {
                    unknown(&last.writes, clock).or_else(|| unknown(&last.reads, clock))
                } else {
                    unknown(&last.writes, clock)
                };
                if let Some(other) = hazard {
                    let what = format!("bytes {}..{} of the buffer", line * align, (line + 1) * align);
                    return Err(self.hazard(index, other, &what));
                }
                if operand.reads && !filled.holds(held, token) {
                    let message = format!(
                        "it reads bytes of {}..{} of the buffer that nothing before it in this iteration has written for \
                         token {token}: load or init the {}",
                        line * align,
                        (line + 1) * align,
                        operand.name
                    );
                    return Err(Fault::instruction(self.stream, index, message));
                }
                if operand.reads {
                    last.reads[own] = clock[own];
                }
                if operand.writes {
                    last.writes[own] = clock[own];
                    filled.fill(held, token);
                }
            }
        }
        Ok(())
    }

    /// Hazards in DRAM.
    fn lines(&mut self, index: usize, own: usize, clock: &Clock, operand: &LinesUse) -> Result<(), Fault> {
        let LinesUse { lines, stride, count, writes } = *operand;
        let last = u64::from(self.stream.slots.saturating_sub(1)).saturating_mul(stride);
        let all = lines.line..lines.line.saturating_add(last).saturating_add(count);
        let hazard = self.memory.iter().find(|access| {
            access.region == lines.region
                && (writes || access.writes)
                && access.lines.start < all.end
                && all.start < access.lines.end
                && clock[access.engine] < access.count
        });
        if let Some(access) = hazard {
            let name = self.stream.regions.get(usize::from(lines.region)).map_or("", |region| &region.name);
            let (start, end) = (all.start.max(access.lines.start), all.end.min(access.lines.end));
            let what = format!("lines {start}..{end} of region `{name}`");
            return Err(self.hazard(index, (access.engine, access.count), &what));
        }
        self.memory.push(Access { region: lines.region, lines: all, writes, engine: own, count: clock[own] });
        Ok(())
    }

    fn hazard(&self, index: usize, (engine, count): (usize, u32), what: &str) -> Fault {
        let other = self.indices[engine].get((count as usize).saturating_sub(1)).copied().unwrap_or_default();
        let message = format!(
            "it accesses {what}, maybe at the same time as {}, and one of them writes: let {other} signal an event, \
             and {index} wait for it",
            named(self.stream, other)
        );
        Fault::instruction(self.stream, index, message)
    }
}

/// The first token whose vector reaches past this byte, one that the operand touches.
fn first_token(operand: &SlabUse, byte: u64) -> u64 {
    let end = u64::from(operand.slab.base) + operand.bytes;
    let past = byte.checked_sub(end).and_then(|rest| rest.checked_div(u64::from(operand.slab.stride)));
    past.map_or(0, |before| before + 1)
}

/// The first access that is not known to have completed: its engine and count.
fn unknown(accesses: &Clock, clock: &Clock) -> Option<(usize, u32)> {
    let mut pairs = accesses.iter().zip(clock).enumerate();
    pairs.find(|(_, (access, known))| access > known).map(|(engine, (&access, _))| (engine, access))
}
