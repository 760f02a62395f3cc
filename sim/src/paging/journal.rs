//! Journal of a decider's events and decisions: to be read, replayed, or compared.
//!
//! Replayed events give the same decisions ([`Journal::again`]). A simulation starts from the routing among
//! the events ([`Journal::requests`]).

use moec_ir::plan;
use moec_runtime::Result;
use moec_runtime::offload::paging::decider::{
    Decider, Decision, DiskProgress, Event, ExpertRequest, How, News, Scores,
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
    pub beside: Vec<i32>,
    /// Scores of the first row: those of the layer, then those of the layers ahead. They are not needed for a
    /// call of many rows.
    pub scores: Vec<Vec<f32>>,
}

impl RecordedRequest {
    /// The request as an event, with the measurements up to then.
    pub fn at(&self, stalled: Duration, disk: DiskProgress) -> ExpertRequest<'_> {
        let Self { layer, rows, k, ref active, ref beside, ref scores } = *self;
        ExpertRequest {
            layer,
            rows,
            k,
            active,
            beside,
            scored: scores.len(),
            scores: Scores::Kept(scores),
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
            beside: request.beside.to_vec(),
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
    News(News),
}

/// A line of a journal.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// Event, and its time.
    Heard(Duration, JournalEvent),
    /// Decision on it.
    Said(Decision),
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
            Line::Heard(_, JournalEvent::Requested(request, ..)) => Some(request),
            _ => None,
        };
        self.lines().into_iter().filter_map(request).collect()
    }

    /// The recorded decisions.
    pub fn decisions(&self) -> Vec<Decision> {
        let said = |line| match line {
            Line::Said(decision) => Some(decision),
            Line::Heard(..) => None,
        };
        self.lines().into_iter().filter_map(said).collect()
    }

    /// Passes all events at their times to a new decider, and returns its decisions: they equal the
    /// journal's, independent of the machine.
    ///
    /// # Errors
    /// As [`Decider::new`] and [`Decider::hear`].
    pub fn again(&self, paging: &plan::Paging, how: How<'_>) -> Result<Vec<Decision>> {
        let mut decider = Decider::new(paging, how)?;
        let mut said = Vec::new();
        for line in self.lines() {
            let Line::Heard(now, heard) = line else { continue };
            said.extend_from_slice(match &heard {
                JournalEvent::Requested(request, stalled, disk) => {
                    decider.hear(now, Event::Requested(request.at(*stalled, *disk)))?
                }
                JournalEvent::News(news) => decider.hear(now, Event::News(*news))?,
            });
        }
        Ok(said)
    }

    pub(super) fn heard(&self, now: Duration, event: &Event<'_>) {
        let heard = match *event {
            Event::Requested(request) => {
                JournalEvent::Requested(RecordedRequest::of(&request), request.stalled, request.disk)
            }
            Event::News(news) => JournalEvent::News(news),
        };
        self.add(Line::Heard(now, heard));
    }

    pub(super) fn decided(&self, decision: &Decision) {
        self.add(Line::Said(*decision));
    }

    fn add(&self, line: Line) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < self.most {
            lines.push(line);
        }
    }
}
