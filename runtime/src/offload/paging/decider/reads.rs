//! Reads: pending, in flight, and their results.

use super::{Decider, Decision, Frame, Held, WHOLE, Want, Why};
use crate::offload::flash::Priority;
use std::collections::VecDeque;

impl Decider {
    /// An expert is to be read.
    pub(super) fn want(&mut self, want: Want, priority: Priority, passes: bool) {
        let Want { id, first, parts } = want;
        self.held[id] = Held::Wanted;
        self.queues[priority as usize].push_back(want);
        self.out.push(Decision::Want { key: self.keys[id], first, parts, priority, passes });
    }

    /// Raises the priority of a prefetch that is needed now.
    pub(super) fn hurry(&mut self, id: usize) {
        let whole = Want { id, first: 0, parts: 2 };
        match self.held[id] {
            Held::Reading(frame) => self.out.push(Decision::Hurry { frame, key: self.keys[id] }),
            // Still waiting for a frame among those that are read ahead.
            Held::Wanted => self.queues[Priority::Demand as usize].push_back(whole),
            // The cache thinks that it is there, and its read has failed.
            Held::No => self.want(whole, Priority::Demand, false),
            Held::Here(_) => {}
        }
    }

    /// An expert leaves its frame.
    pub(super) fn evict(&mut self, id: usize) {
        self.parts[id] = 0;
        self.why[id] = Why::Asked;
        let (frame, reading) = match std::mem::take(&mut self.held[id]) {
            Held::No => return,
            Held::Wanted => (None, false),
            Held::Reading(frame) => {
                self.frames[frame as usize] = Frame::Draining;
                (Some(frame), true)
            }
            Held::Here(frame) => {
                self.set_free(frame);
                (Some(frame), false)
            }
        };
        self.out.push(Decision::Evict { key: self.keys[id], frame, reading });
    }

    fn set_free(&mut self, frame: u32) {
        self.frames[frame as usize] = Frame::Free;
        self.free.push(frame);
    }

    /// Starts reads as long as frames are free.
    pub(super) fn pump(&mut self) {
        for priority in [Priority::Demand, Priority::Prefetch] {
            while let Some(&want) = self.queues[priority as usize].front() {
                // It went, or came, since.
                if self.held[want.id] == Held::Wanted {
                    let Some(frame) = self.free.pop() else { return };
                    self.frames[frame as usize] = Frame::Reading(want);
                    self.held[want.id] = Held::Reading(frame);
                    let Want { id, first, parts } = want;
                    self.out.push(Decision::Load { frame, key: self.keys[id], first, parts, priority });
                }
                self.queues[priority as usize].pop_front();
            }
        }
    }

    /// Bytes that were asked for and are not there.
    pub(super) fn pending(&self) -> u64 {
        let wanted = self.queues.iter().flatten().filter(|w| self.held[w.id] == Held::Wanted);
        let reading = self.frames.iter().filter_map(|f| match f {
            Frame::Reading(want) => Some(want),
            _ => None,
        });
        wanted.chain(reading).map(|w| self.place(w.id).bytes).sum()
    }

    /// Use of a frame; a frame that does not exist has none.
    fn frame(&self, frame: u32) -> Frame {
        self.frames.get(frame as usize).copied().unwrap_or_default()
    }

    /// A part of an expert is there.
    pub(super) fn arrived(&mut self, frame: u32, part: u8) {
        // A cancelled read is not reported.
        let Frame::Reading(want) = self.frame(frame) else { return };
        if self.parts[want.id] & (1 << part) == 0 && part < 2 {
            self.parts[want.id] |= 1 << part;
            self.out.push(Decision::Use { frame, key: self.keys[want.id], part, first: want.first });
        }
    }

    pub(super) fn done(&mut self, frame: u32) {
        match self.frame(frame) {
            Frame::Reading(want) => {
                self.counts.preloaded += u64::from(self.why[want.id] == Why::Start);
                for part in want.first..want.first + want.parts {
                    self.arrived(frame, part);
                }
                self.held[want.id] = Held::Here(frame);
                self.frames[frame as usize] = Frame::Full;
            }
            // It had ended before it was given up.
            Frame::Draining => self.released(frame),
            Frame::Free | Frame::Full => {}
        }
    }

    pub(super) fn failed(&mut self, frame: u32) {
        let Frame::Reading(Want { id, .. }) = self.frame(frame) else { return };
        self.frames[frame as usize] = Frame::Draining;
        (self.held[id], self.parts[id]) = (Held::No, 0);
        // What was not requested is read again once it is.
        let asked = self.why[id] == Why::Asked;
        self.broken |= asked;
        self.out.push(Decision::Lost { frame, key: self.keys[id], asked });
    }

    pub(super) fn released(&mut self, frame: u32) {
        if matches!(self.frame(frame), Frame::Draining) {
            self.set_free(frame);
            self.pump();
        }
    }

    /// A part of an expert that only passes through is computed.
    pub(super) fn computed(&mut self, at: usize, part: u8) {
        let Some(&turn) = self.order.get(at) else { return };
        if !turn.passes || !(self.split || part == 1) {
            return;
        }
        self.evict(turn.id);
        if part == 0 {
            // Down matrices are read in the order in which they will be computed, whichever finished first: with all
            // frames taken by later ones no thread could go on.
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

    /// Forgets everything: after an error the cache believes in experts that are not there.
    pub(super) fn reset(&mut self) {
        for id in 0..self.keys.len() {
            self.evict(id);
        }
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.guests.clear();
        self.cache.reset();
        self.broken = false;
    }

    /// Whether an expert is there.
    pub(super) fn is_whole(&self, id: usize) -> bool {
        self.parts[id] == WHOLE
    }
}
