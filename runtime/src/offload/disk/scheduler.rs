//! Scheduler of blocks: chooses the block to read next, and handles results.
//!
//! A fetch reads neighbouring extents into one buffer. It is cut into blocks, in order. As many blocks as the
//! reader's depth are in flight, those of urgent fetches first. An incomplete read is repeated a bounded
//! number of times, and then becomes a [`ReadError`]. All state is here and belongs to one thread. It owns
//! the buffer of a fetch until no read into it is in flight.

use super::buffer::Loaded;
use super::clock::Clock;
use super::error::{ReadError, ReadFault};
use super::event::{Event, Fetch, MAX_PARTS, Priority, Ticket};
use super::extent::{BLOCK, ExtentTable, checksum, checksum_after};
use super::files::Files;
use super::options::Options;
use super::progress::{Active, Block, ExtentProgress, extents, find, find_mut};
use super::reader::{Read, ReadResult};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Bytes in flight above which no prefetch is started: enough to keep a device busy. An urgent read waits for
/// no more than these.
const AHEAD: u64 = 2 << 20;

/// Counts since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) bytes: u64,
    pub(super) reads: u64,
    pub(super) repeated: u64,
    pub(super) failed: u64,
    pub(super) checked: u64,
}

pub(super) struct ReadScheduler {
    table: Arc<ExtentTable>,
    files: Arc<Files>,
    clock: Arc<dyn Clock>,
    options: Options,
    /// By buffer.
    active: Vec<Option<Active>>,
    /// Fetches with blocks to cut, by priority. Entries of fetches that have ended or changed are skipped.
    queues: [VecDeque<Ticket>; 2],
    /// Blocks in flight or to be read again; their index is in their token.
    blocks: Vec<Option<Block>>,
    /// Counter in the upper half of tokens, so that a duplicate result is not taken for another one.
    round: u32,
    rounds: Vec<u32>,
    free: Vec<u32>,
    again: VecDeque<u32>,
    /// Whether the operating system has returned `EAGAIN` or `EINTR` since the last start.
    retry_later: bool,
    pub(super) counts: Counts,
}

impl ReadScheduler {
    /// Creates a scheduler for `buffers` buffers and at most `depth` reads in flight.
    pub(super) fn new(
        table: Arc<ExtentTable>,
        files: Arc<Files>,
        clock: Arc<dyn Clock>,
        options: Options,
        buffers: usize,
        depth: usize,
    ) -> Self {
        Self {
            table,
            files,
            clock,
            options,
            active: std::iter::repeat_with(|| None).take(buffers).collect(),
            queues: std::array::from_fn(|_| VecDeque::with_capacity(2 * buffers + 1)),
            blocks: vec![None; depth],
            round: 0,
            rounds: vec![0; depth],
            free: (0..depth as u32).rev().collect(),
            again: VecDeque::with_capacity(depth),
            retry_later: false,
            counts: Counts::default(),
        }
    }

    /// Accepts a fetch, whose extents are neighbours in the table and fit its buffer.
    pub(super) fn add(&mut self, fetch: Fetch) {
        let Fetch { ticket, first, count, priority, buffer } = fetch;
        let mut parts = [ExtentProgress::default(); MAX_PARTS];
        for (part, extent) in parts.iter_mut().zip(extents(&self.table, first, count)) {
            part.left = extent.bytes;
        }
        if let Some(place) = self.active.get_mut(ticket.buffer as usize) {
            *place = Some(Active {
                ticket,
                first,
                count: count.min(MAX_PARTS as u32),
                priority,
                buffer,
                in_flight: 0,
                over: false,
                parts,
            });
            self.enqueue(ticket, priority);
        }
    }

    fn enqueue(&mut self, ticket: Ticket, priority: Priority) {
        let (active, queue) = (&self.active, &mut self.queues[priority as usize]);
        if queue.len() + 1 >= queue.capacity() {
            queue.retain(|&t| find(active, t).is_some_and(|f| f.priority == priority && f.unfinished()));
        }
        queue.push_back(ticket);
    }

    /// Makes a fetch urgent, if it has not ended.
    pub(super) fn raise(&mut self, ticket: Ticket) {
        if let Some(f) = find_mut(&mut self.active, ticket).filter(|f| f.priority != Priority::Demand) {
            f.priority = Priority::Demand;
            if f.unfinished() {
                self.enqueue(ticket, Priority::Demand);
            }
        }
    }

    /// Cancels a fetch, if it has not ended: no more of its blocks are read.
    pub(super) fn cancel(&mut self, ticket: Ticket, events: &mut VecDeque<Event>) {
        if find(&self.active, ticket).is_some_and(|f| !f.over) {
            events.push_back(Event::Cancelled { ticket });
            self.end(ticket, events);
        }
    }

    /// Reads in flight.
    pub(super) fn in_flight(&self) -> usize {
        self.blocks.len() - self.free.len() - self.again.len()
    }

    /// Whether to wait a moment before the next start: the operating system asked to try again, and no other
    /// read will end in the meantime.
    pub(super) fn should_pause(&mut self) -> bool {
        std::mem::take(&mut self.retry_later) && self.in_flight() == 0
    }

    /// The reads to start now: blocks to be read again, then new ones by urgency.
    pub(super) fn start(&mut self, reads: &mut Vec<Read>, events: &mut VecDeque<Event>) {
        let now = self.clock.now();
        while let Some(i) = self.again.pop_front() {
            match self.blocks[i as usize] {
                Some(block) if find(&self.active, block.ticket).is_some_and(|f| !f.over) => {
                    self.counts.repeated += 1;
                    self.begin(i, Block { since: now, ..block }, reads);
                }
                Some(block) => self.free(i, block.ticket, events),
                None => {}
            }
        }
        while !self.free.is_empty()
            && let Some(block) = self.next_block(now)
            && let Some(i) = self.free.pop()
        {
            if let Some(f) = find_mut(&mut self.active, block.ticket) {
                f.in_flight += 1;
            }
            self.begin(i, block, reads);
        }
    }

    /// The next block of the most urgent fetch.
    fn next_block(&mut self, now: Duration) -> Option<Block> {
        for priority in [Priority::Demand, Priority::Prefetch] {
            let full = self.in_flight() as u64 * u64::from(self.options.block_bytes) >= AHEAD;
            if full && priority == Priority::Prefetch {
                return None;
            }
            while let Some(&ticket) = self.queues[priority as usize].front() {
                let fetch = find_mut(&mut self.active, ticket).filter(|f| f.priority == priority && !f.over);
                let block = fetch.and_then(|f| {
                    let extents = extents(&self.table, f.first, f.count);
                    let mut parts = f.parts.iter_mut().zip(extents).enumerate();
                    let (i, (part, extent)) = parts.find(|(_, (p, e))| p.scheduled < e.bytes)?;
                    let bytes =
                        (extent.bytes - part.scheduled).min(u64::from(self.options.block_bytes)) as u32;
                    let at = part.scheduled;
                    part.scheduled += u64::from(bytes);
                    Some(Block {
                        ticket,
                        part: i as u32,
                        at,
                        bytes,
                        got: 0,
                        failures: 0,
                        interruptions: 0,
                        since: now,
                        overdue: false,
                    })
                });
                if block.is_some() {
                    return block;
                }
                self.queues[priority as usize].pop_front();
            }
        }
        None
    }

    /// Records a block as in flight under a new token.
    fn begin(&mut self, index: u32, block: Block, reads: &mut Vec<Read>) {
        let Some(f) = find(&self.active, block.ticket) else { return };
        let extents = extents(&self.table, f.first, f.count);
        let (Some(base), Some(e)) = (extents.first(), extents.get(block.part as usize)) else { return };
        let offset = e.offset + block.at + u64::from(block.got);
        self.round = self.round.wrapping_add(1);
        self.counts.reads += 1;
        reads.push(Read {
            token: u64::from(self.round) << 32 | u64::from(index),
            file: e.file,
            offset,
            bytes: (block.bytes - block.got).next_multiple_of(BLOCK as u32),
            at: f.buffer.addr().plus((offset - base.offset) as usize),
            buffer: block.ticket.buffer,
        });
        self.rounds[index as usize] = self.round;
        self.blocks[index as usize] = Some(block);
    }

    /// Handles the result of a read.
    pub(super) fn finish(&mut self, done: ReadResult, events: &mut VecDeque<Event>) {
        let (index, round) = (done.token as u32, (done.token >> 32) as u32);
        let known = self.rounds.get(index as usize) == Some(&round) && !self.again.contains(&index);
        let Some(mut block) = self.blocks.get(index as usize).copied().flatten().filter(|_| known) else {
            return;
        };
        let Some(f) = find_mut(&mut self.active, block.ticket) else { return };
        if f.over {
            return self.free(index, block.ticket, events);
        }
        let extent = f.first + block.part;
        let part = &mut f.parts[block.part as usize];
        let fault = match done.result {
            Ok(n) => {
                let missing = block.bytes - block.got;
                if n >= missing {
                    self.counts.bytes += u64::from(missing);
                    part.left -= u64::from(block.bytes);
                    let complete = part.left == 0;
                    let ticket = block.ticket;
                    self.blocks[index as usize] = None;
                    if self.options.verify_reads {
                        self.sum(ticket, block.part);
                    }
                    if complete {
                        self.complete(ticket, block.part, events);
                    }
                    self.free(index, ticket, events);
                    return self.deliver(ticket, events);
                }
                // The rest must begin at a multiple of BLOCK again.
                part.read_failed = true;
                let useful = n - n % BLOCK as u32;
                self.counts.bytes += u64::from(useful);
                block.got += useful;
                block.failures += u32::from(useful == 0);
                let attempts = block.failures;
                self.shortened(extent, block)
                    .or_else(|| (attempts > self.options.retries).then_some(ReadFault::Nothing { attempts }))
            }
            Err(errno @ (libc::EINTR | libc::EAGAIN)) => {
                block.interruptions += 1;
                self.retry_later = true;
                let attempts = block.interruptions;
                (attempts > self.options.interruptions).then_some(ReadFault::System { errno, attempts })
            }
            Err(errno) => {
                part.read_failed = true;
                block.failures += 1;
                let attempts = block.failures;
                (attempts > self.options.retries).then_some(ReadFault::System { errno, attempts })
            }
        };
        if let Some(fault) = fault {
            self.fail(block.ticket, extent, fault, events);
            self.free(index, block.ticket, events);
        } else {
            self.blocks[index as usize] = Some(block);
            self.again.push_back(index);
        }
    }

    /// Whether the file has become too short for a block.
    fn shortened(&self, extent: u32, block: Block) -> Option<ReadFault> {
        let e = self.table.extents().get(extent as usize)?;
        let found = self.files.size(e.file)?;
        (found < e.offset + block.at + u64::from(block.bytes)).then_some(ReadFault::Truncated { found })
    }

    /// Extends the checksum of a part over the bytes that have arrived without a gap, while later blocks are
    /// in flight. So little is left to do when the last one arrives.
    fn sum(&mut self, ticket: Ticket, part: u32) {
        let on_their_way = self.blocks.iter().flatten().filter(|b| b.ticket == ticket && b.part == part);
        let first = on_their_way.map(|b| b.at).min();
        let Some(f) = find_mut(&mut self.active, ticket) else { return };
        let extents = extents(&self.table, f.first, f.count);
        let (Some(base), Some(e)) = (extents.first(), extents.get(part as usize)) else { return };
        let state = &mut f.parts[part as usize];
        let (start, end) = (e.offset - base.offset, first.unwrap_or(state.scheduled));
        if end > state.summed {
            // SAFETY: the reads of all blocks before `end` have ended, and other blocks share no byte with
            // these.
            let bytes = unsafe { f.buffer.slice(start + state.summed..start + end) };
            (state.crc32c, state.summed) = (checksum_after(state.crc32c, bytes), end);
        }
    }

    /// Handles a part whose bytes have all arrived: compares the checksum if all are checked or a read has
    /// failed.
    fn complete(&mut self, ticket: Ticket, part: u32, events: &mut VecDeque<Event>) {
        let Some(f) = find_mut(&mut self.active, ticket) else { return };
        let extents = extents(&self.table, f.first, f.count);
        let (Some(base), Some(e)) = (extents.first(), extents.get(part as usize)) else { return };
        let state = &mut f.parts[part as usize];
        state.readings += 1;
        if let Some(expected) = e.crc32c.filter(|_| self.options.verify_reads || state.read_failed) {
            self.counts.checked += 1;
            let start = e.offset - base.offset;
            let found = if self.options.verify_reads {
                state.crc32c
            } else {
                // SAFETY: every read of this part has ended, and other parts share no byte with it.
                checksum(unsafe { f.buffer.slice(start..start + e.bytes) })
            };
            if found != expected {
                let attempts = state.readings;
                if attempts > self.options.retries {
                    let fault = ReadFault::Checksum { expected, found, attempts };
                    let extent = f.first + part;
                    return self.fail(ticket, extent, fault, events);
                }
                *state = ExtentProgress {
                    left: e.bytes,
                    readings: attempts,
                    read_failed: true,
                    ..ExtentProgress::default()
                };
                self.counts.repeated += 1;
                let priority = f.priority;
                return self.queues[priority as usize].push_front(ticket);
            }
        }
        if f.parts[..extents.len()].iter().any(|p| p.left > 0) {
            events.push_back(Event::Arrived { ticket, extent: f.first + part });
        }
    }

    /// Ends a fetch with an error.
    fn fail(&mut self, ticket: Ticket, extent: u32, fault: ReadFault, events: &mut VecDeque<Event>) {
        let Some(e) = self.table.extents().get(extent as usize) else { return };
        let path = self.table.files().get(e.file as usize).map(|f| f.path.clone()).unwrap_or_default();
        let error = ReadError { path, extent, expert: None, offset: e.offset, bytes: e.bytes, fault };
        self.counts.failed += 1;
        events.push_back(Event::Failed { ticket, error });
        self.end(ticket, events);
    }

    /// Ends a fetch; its buffer is free if no read holds it.
    fn end(&mut self, ticket: Ticket, events: &mut VecDeque<Event>) {
        if let Some(f) = find_mut(&mut self.active, ticket) {
            f.over = true;
            self.release(ticket, events);
        }
    }

    /// Frees the buffer of a fetch that is over, unless a read holds it.
    fn release(&mut self, ticket: Ticket, events: &mut VecDeque<Event>) {
        if find(&self.active, ticket).is_some_and(|f| f.over && f.in_flight == 0) {
            // Published last: the receiver of the event finds the buffer free.
            self.active[ticket.buffer as usize] = None;
            events.push_back(Event::Released { ticket });
        }
    }

    /// Removes a block that is no longer in flight. The last one of a fetch that is over frees the buffer.
    fn free(&mut self, index: u32, ticket: Ticket, events: &mut VecDeque<Event>) {
        self.blocks[index as usize] = None;
        self.free.push(index);
        if let Some(f) = find_mut(&mut self.active, ticket) {
            f.in_flight -= 1;
            self.release(ticket, events);
        }
    }

    /// Hands out a fetch whose parts have all arrived.
    fn deliver(&mut self, ticket: Ticket, events: &mut VecDeque<Event>) {
        let done = |f: &Active| !f.over && f.in_flight == 0 && f.parts.iter().all(|p| p.left == 0);
        if find(&self.active, ticket).is_some_and(done)
            && let Some(f) = self.active[ticket.buffer as usize].take()
        {
            let bytes = self.table.run(f.first, f.count).map_or(0, |run| run.bytes);
            events.push_back(Event::Done { ticket, loaded: Loaded::new(f.buffer, bytes) });
        }
    }

    /// Time at which the oldest read in flight exceeds its limit.
    pub(super) fn deadline(&self) -> Option<Duration> {
        let waiting = self.blocks.iter().flatten().filter(|b| !b.overdue);
        waiting.map(|b| b.since.saturating_add(self.options.time_limit)).min()
    }

    /// Ends fetches whose reads exceed the time limit. A read is not started twice: the first one may still
    /// write to its buffer. If such reads hold every place in the queue, fetches that wait for a place end as
    /// well.
    pub(super) fn expire(&mut self, events: &mut VecDeque<Event>) {
        let (now, limit) = (self.clock.now(), self.options.time_limit);
        for i in 0..self.blocks.len() {
            let Some(block) = &mut self.blocks[i] else { continue };
            if block.overdue || now < block.since.saturating_add(limit) {
                continue;
            }
            block.overdue = true;
            let (ticket, part) = (block.ticket, block.part);
            if let Some(f) = find(&self.active, ticket).filter(|f| !f.over) {
                self.fail(ticket, f.first + part, ReadFault::Stalled { limit }, events);
            }
        }
        if self.blocks.iter().all(|b| b.is_some_and(|b| b.overdue)) {
            self.fail_all(&ReadFault::Stalled { limit }, events);
        }
    }

    /// Ends every fetch.
    pub(super) fn fail_all(&mut self, fault: &ReadFault, events: &mut VecDeque<Event>) {
        for i in 0..self.active.len() {
            if let Some((ticket, first)) =
                self.active[i].as_ref().filter(|f| !f.over).map(|f| (f.ticket, f.first))
            {
                self.fail(ticket, first, fault.clone(), events);
            }
        }
    }

    /// Ends every fetch without events.
    pub(super) fn stop(&mut self) {
        for f in self.active.iter_mut().flatten() {
            f.over = true;
        }
        self.active
            .iter_mut()
            .filter(|f| f.as_ref().is_some_and(|f| f.in_flight == 0))
            .for_each(|f| *f = None);
    }
}

impl Drop for ReadScheduler {
    fn drop(&mut self) {
        // A read into these may still end: their memory is never freed.
        for f in self.active.drain(..).flatten().filter(|f| f.in_flight > 0) {
            std::mem::forget(f.buffer);
        }
    }
}
