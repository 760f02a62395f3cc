//! Journal of a decider's events and decisions: to be read, replayed, or compared.
//!
//! Replayed events give the same decisions ([`Journal::again`]). A simulation starts from the routing among
//! the events ([`Journal::requests`]).

use moec_ir::plan;
use moec_runtime::Result;
use moec_runtime::offload::paging::decider::{
    Decider, DeciderOptions, Decision, DiskProgress, Event, ExpertRequest, FrameEvent, Scores,
};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Recorded request of a layer for its experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RecordedRequest {
    /// Layer, counted over those with routed experts.
    pub layer: usize,
    /// Rows of the call.
    pub rows: usize,
    /// Experts per token of the call.
    pub k: usize,
    /// Experts in the order of the dispatch table.
    pub active: Vec<i32>,
    /// Experts that other units compute.
    pub accelerator_experts: Vec<i32>,
    /// Scores of the first row: those of the layer, then those of the layers ahead. They are not needed for a
    /// call of many rows.
    pub scores: Vec<Vec<f32>>,
}

impl RecordedRequest {
    /// The request as an event, with the measurements up to then.
    pub fn at(&self, stalled: Duration, disk: DiskProgress) -> ExpertRequest<'_> {
        let Self { layer, rows, k, ref active, ref accelerator_experts, ref scores } = *self;
        ExpertRequest {
            layer,
            rows,
            k,
            active,
            accelerator_experts,
            scored: scores.len(),
            scores: Scores::Recorded(scores),
            stalled,
            disk,
        }
    }

    /// Copies a request.
    fn of(request: &ExpertRequest<'_>) -> Self {
        let scored = if request.rows == 1 { request.scored } else { 0 };
        Self {
            layer: request.layer,
            rows: request.rows,
            k: request.k,
            active: request.active.to_vec(),
            accelerator_experts: request.accelerator_experts.to_vec(),
            scores: (0..scored).map(|i| request.scores.of(i).to_vec()).collect(),
        }
    }
}

/// An event that owns its data.
#[derive(Clone, Debug, PartialEq)]
pub enum JournalEvent {
    /// Request of a layer for its experts, with the measurements up to then: the waiting time, and the
    /// progress of the disk.
    Requested(RecordedRequest, Duration, DiskProgress),
    /// Any other event.
    Frame(FrameEvent),
}

/// A line of a journal.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// Event, and its time.
    Event(Duration, JournalEvent),
    /// Decision on it.
    Decision(Decision),
}

/// Lines, in order.
#[derive(Debug, Default)]
pub struct Journal {
    lines: Mutex<Vec<Line>>,
    most: usize,
}

impl Journal {
    /// Creates a journal for this many lines; later ones are dropped.
    pub fn new(most: usize) -> Self {
        Self { lines: Mutex::default(), most }
    }

    /// A copy of the recorded lines.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The recorded requests.
    pub fn requests(&self) -> Vec<RecordedRequest> {
        let request = |line| match line {
            Line::Event(_, JournalEvent::Requested(request, ..)) => Some(request),
            _ => None,
        };
        self.lines().into_iter().filter_map(request).collect()
    }

    /// The recorded decisions.
    pub fn decisions(&self) -> Vec<Decision> {
        let decision = |line| match line {
            Line::Decision(decision) => Some(decision),
            Line::Event(..) => None,
        };
        self.lines().into_iter().filter_map(decision).collect()
    }

    /// Passes all events at their times to a new decider, and returns its decisions: they equal the
    /// journal's, independent of the machine.
    ///
    /// # Errors
    /// As [`Decider::new`] and [`Decider::handle`].
    pub fn again(&self, paging: &plan::Paging, options: DeciderOptions<'_>) -> Result<Vec<Decision>> {
        let mut decider = Decider::new(paging, options)?;
        let mut decisions = Vec::new();
        for line in self.lines() {
            let Line::Event(now, event) = line else { continue };
            decisions.extend_from_slice(match &event {
                JournalEvent::Requested(request, stalled, disk) => {
                    decider.handle(now, Event::Requested(request.at(*stalled, *disk)))?
                }
                JournalEvent::Frame(event) => decider.handle(now, Event::Frame(*event))?,
            });
        }
        Ok(decisions)
    }

    pub(super) fn handled(&self, now: Duration, event: &Event<'_>) {
        let recorded = match *event {
            Event::Requested(request) => {
                JournalEvent::Requested(RecordedRequest::of(&request), request.stalled, request.disk)
            }
            Event::Frame(event) => JournalEvent::Frame(event),
        };
        self.add(Line::Event(now, recorded));
    }

    pub(super) fn decided(&self, decision: &Decision) {
        self.add(Line::Decision(*decision));
    }

    fn add(&self, line: Line) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < self.most {
            lines.push(line);
        }
    }
}
