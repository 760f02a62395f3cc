//! Reads: pending, in flight, and their results.

use super::{Decider, Decision, ExpertState, FrameState, PendingRead, ReadReason, WHOLE};
use crate::offload::disk::Priority;
use std::collections::VecDeque;

impl Decider {
    /// An expert is to be read.
    pub(super) fn enqueue_read(&mut self, read: PendingRead, priority: Priority, bypasses: bool) {
        let PendingRead { id, first, parts } = read;
        self.locations[id] = ExpertState::Requested;
        self.queues[priority as usize].push_back(read);
        self.out.push(Decision::Enqueue { key: self.keys[id], first, parts, priority, bypasses });
    }

    /// Raises the priority of a prefetch that is needed now.
    pub(super) fn raise_priority(&mut self, id: usize) {
        let whole = PendingRead { id, first: 0, parts: 2 };
        match self.locations[id] {
            ExpertState::Reading(frame) => {
                self.out.push(Decision::RaisePriority { frame, key: self.keys[id] });
            }
            // Still waiting for a frame in the queue of prefetches.
            ExpertState::Requested => self.queues[Priority::Demand as usize].push_back(whole),
            // The cache counts it as resident, but its read has failed.
            ExpertState::OnDisk => self.enqueue_read(whole, Priority::Demand, false),
            ExpertState::InFrame(_) => {}
        }
    }

    /// Removes an expert from its frame.
    pub(super) fn evict(&mut self, id: usize) {
        self.parts[id] = 0;
        self.read_reasons[id] = ReadReason::Requested;
        let (frame, reading) = match std::mem::take(&mut self.locations[id]) {
            ExpertState::OnDisk => return,
            ExpertState::Requested => (None, false),
            ExpertState::Reading(frame) => {
                self.frames[frame as usize] = FrameState::Draining;
                (Some(frame), true)
            }
            ExpertState::InFrame(frame) => {
                self.set_free(frame);
                (Some(frame), false)
            }
        };
        self.out.push(Decision::Evict { key: self.keys[id], frame, reading });
    }

    fn set_free(&mut self, frame: u32) {
        self.frames[frame as usize] = FrameState::Free;
        self.free.push(frame);
    }

    /// Starts reads as long as frames are free.
    pub(super) fn start_reads(&mut self) {
        for priority in [Priority::Demand, Priority::Prefetch] {
            while let Some(&read) = self.queues[priority as usize].front() {
                // It was evicted, or has arrived, in the meantime.
                if self.locations[read.id] == ExpertState::Requested {
                    let Some(frame) = self.free.pop() else { return };
                    self.frames[frame as usize] = FrameState::Reading(read);
                    self.locations[read.id] = ExpertState::Reading(frame);
                    let PendingRead { id, first, parts } = read;
                    self.out.push(Decision::Load { frame, key: self.keys[id], first, parts, priority });
                }
                self.queues[priority as usize].pop_front();
            }
        }
    }

    /// Bytes that were requested and have not arrived.
    pub(super) fn pending(&self) -> u64 {
        let queued = self.queues.iter().flatten().filter(|w| self.locations[w.id] == ExpertState::Requested);
        let reading = self.frames.iter().filter_map(|f| match f {
            FrameState::Reading(read) => Some(read),
            _ => None,
        });
        queued.chain(reading).map(|w| self.layer_info(w.id).bytes).sum()
    }

    /// Use of a frame; a frame that does not exist has none.
    fn frame(&self, frame: u32) -> FrameState {
        self.frames.get(frame as usize).copied().unwrap_or_default()
    }

    /// Handles the arrival of a part of an expert.
    pub(super) fn arrived(&mut self, frame: u32, part: u8) {
        // A cancelled read is not reported.
        let FrameState::Reading(read) = self.frame(frame) else { return };
        if self.parts[read.id] & (1 << part) == 0 && part < 2 {
            self.parts[read.id] |= 1 << part;
            self.out.push(Decision::Use { frame, key: self.keys[read.id], part, first: read.first });
        }
    }

    pub(super) fn done(&mut self, frame: u32) {
        match self.frame(frame) {
            FrameState::Reading(read) => {
                self.counts.preloaded += u64::from(self.read_reasons[read.id] == ReadReason::Start);
                for part in read.first..read.first + read.parts {
                    self.arrived(frame, part);
                }
                self.locations[read.id] = ExpertState::InFrame(frame);
                self.frames[frame as usize] = FrameState::Full;
            }
            // It had ended before it was cancelled.
            FrameState::Draining => self.released(frame),
            FrameState::Free | FrameState::Full => {}
        }
    }

    pub(super) fn failed(&mut self, frame: u32) {
        let FrameState::Reading(PendingRead { id, .. }) = self.frame(frame) else { return };
        self.frames[frame as usize] = FrameState::Draining;
        (self.locations[id], self.parts[id]) = (ExpertState::OnDisk, 0);
        // An expert that was not requested is read again once it is.
        let requested = self.read_reasons[id] == ReadReason::Requested;
        self.broken |= requested;
        self.out.push(Decision::ReadFailed { frame, key: self.keys[id], requested });
    }

    pub(super) fn released(&mut self, frame: u32) {
        if matches!(self.frame(frame), FrameState::Draining) {
            self.set_free(frame);
            self.start_reads();
        }
    }

    /// Handles the end of the computation of a part of an expert that bypasses the cache.
    pub(super) fn computed(&mut self, at: usize, part: u8) {
        let Some(&expert) = self.order.get(at) else { return };
        if !expert.bypasses || !(self.split || part == 1) {
            return;
        }
        self.evict(expert.id);
        if part == 0 {
            // Down matrices are read in the order in which they will be computed, whichever expert finished
            // first. If later experts took all frames, no thread could go on.
            self.gate_up_done[at] = true;
            while let Some(&expert) = self.order.get(self.next)
                && (self.gate_up_done[self.next] || !expert.bypasses)
            {
                if expert.bypasses {
                    self.enqueue_read(
                        PendingRead { id: expert.id, first: 1, parts: 1 },
                        Priority::Demand,
                        true,
                    );
                }
                self.next += 1;
            }
        }
        self.start_reads();
    }

    /// Forgets everything: after an error the cache counts experts as resident that are not.
    pub(super) fn reset(&mut self) {
        for id in 0..self.keys.len() {
            self.evict(id);
        }
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.prefetched.clear();
        self.cache.reset();
        self.broken = false;
    }

    /// Whether all of an expert has arrived.
    pub(super) fn is_whole(&self, id: usize) -> bool {
        self.parts[id] == WHOLE
    }
}
