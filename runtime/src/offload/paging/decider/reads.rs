//! Reads: pending, in flight, and their results.

use super::{Decider, Decision, ExpertState, FrameState, WHOLE, Want, Why};
use crate::offload::disk::Priority;
use std::collections::VecDeque;

impl Decider {
    /// An expert is to be read.
    pub(super) fn want(&mut self, want: Want, priority: Priority, passes: bool) {
        let Want { id, first, parts } = want;
        self.held[id] = ExpertState::Requested;
        self.queues[priority as usize].push_back(want);
        self.out.push(Decision::Want { key: self.keys[id], first, parts, priority, passes });
    }

    /// Raises the priority of a prefetch that is needed now.
    pub(super) fn hurry(&mut self, id: usize) {
        let whole = Want { id, first: 0, parts: 2 };
        match self.held[id] {
            ExpertState::Reading(frame) => self.out.push(Decision::Hurry { frame, key: self.keys[id] }),
            // Still waiting for a frame in the queue of prefetches.
            ExpertState::Requested => self.queues[Priority::Demand as usize].push_back(whole),
            // The cache counts it as resident, but its read has failed.
            ExpertState::No => self.want(whole, Priority::Demand, false),
            ExpertState::Here(_) => {}
        }
    }

    /// Removes an expert from its frame.
    pub(super) fn evict(&mut self, id: usize) {
        self.parts[id] = 0;
        self.why[id] = Why::Requested;
        let (frame, reading) = match std::mem::take(&mut self.held[id]) {
            ExpertState::No => return,
            ExpertState::Requested => (None, false),
            ExpertState::Reading(frame) => {
                self.frames[frame as usize] = FrameState::Draining;
                (Some(frame), true)
            }
            ExpertState::Here(frame) => {
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
    pub(super) fn pump(&mut self) {
        for priority in [Priority::Demand, Priority::Prefetch] {
            while let Some(&want) = self.queues[priority as usize].front() {
                // It was evicted, or has arrived, in the meantime.
                if self.held[want.id] == ExpertState::Requested {
                    let Some(frame) = self.free.pop() else { return };
                    self.frames[frame as usize] = FrameState::Reading(want);
                    self.held[want.id] = ExpertState::Reading(frame);
                    let Want { id, first, parts } = want;
                    self.out.push(Decision::Load { frame, key: self.keys[id], first, parts, priority });
                }
                self.queues[priority as usize].pop_front();
            }
        }
    }

    /// Bytes that were requested and have not arrived.
    pub(super) fn pending(&self) -> u64 {
        let wanted = self.queues.iter().flatten().filter(|w| self.held[w.id] == ExpertState::Requested);
        let reading = self.frames.iter().filter_map(|f| match f {
            FrameState::Reading(want) => Some(want),
            _ => None,
        });
        wanted.chain(reading).map(|w| self.place(w.id).bytes).sum()
    }

    /// Use of a frame; a frame that does not exist has none.
    fn frame(&self, frame: u32) -> FrameState {
        self.frames.get(frame as usize).copied().unwrap_or_default()
    }

    /// Handles the arrival of a part of an expert.
    pub(super) fn arrived(&mut self, frame: u32, part: u8) {
        // A cancelled read is not reported.
        let FrameState::Reading(want) = self.frame(frame) else { return };
        if self.parts[want.id] & (1 << part) == 0 && part < 2 {
            self.parts[want.id] |= 1 << part;
            self.out.push(Decision::Use { frame, key: self.keys[want.id], part, first: want.first });
        }
    }

    pub(super) fn done(&mut self, frame: u32) {
        match self.frame(frame) {
            FrameState::Reading(want) => {
                self.counts.preloaded += u64::from(self.why[want.id] == Why::Start);
                for part in want.first..want.first + want.parts {
                    self.arrived(frame, part);
                }
                self.held[want.id] = ExpertState::Here(frame);
                self.frames[frame as usize] = FrameState::Full;
            }
            // It had ended before it was cancelled.
            FrameState::Draining => self.released(frame),
            FrameState::Free | FrameState::Full => {}
        }
    }

    pub(super) fn failed(&mut self, frame: u32) {
        let FrameState::Reading(Want { id, .. }) = self.frame(frame) else { return };
        self.frames[frame as usize] = FrameState::Draining;
        (self.held[id], self.parts[id]) = (ExpertState::No, 0);
        // An expert that was not requested is read again once it is.
        let requested = self.why[id] == Why::Requested;
        self.broken |= requested;
        self.out.push(Decision::Lost { frame, key: self.keys[id], requested });
    }

    pub(super) fn released(&mut self, frame: u32) {
        if matches!(self.frame(frame), FrameState::Draining) {
            self.set_free(frame);
            self.pump();
        }
    }

    /// Handles the end of the computation of a part of an expert that bypasses the cache.
    pub(super) fn computed(&mut self, at: usize, part: u8) {
        let Some(&turn) = self.order.get(at) else { return };
        if !turn.passes || !(self.split || part == 1) {
            return;
        }
        self.evict(turn.id);
        if part == 0 {
            // Down matrices are read in the order in which they will be computed, whichever expert finished
            // first. If later experts took all frames, no thread could go on.
            self.passed[at] = true;
            while let Some(&turn) = self.order.get(self.next)
                && (self.passed[self.next] || !turn.passes)
            {
                if turn.passes {
                    self.want(Want { id: turn.id, first: 1, parts: 1 }, Priority::Demand, true);
                }
                self.next += 1;
            }
        }
        self.pump();
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
