//! Journal of a decider's events and decisions: to be read, replayed, or compared.
//!
//! Told again, the events give the same decisions ([`Journal::again`]);
//! what of them is routing ([`Journal::asks`]) is what a simulation starts from.

use moec_ir::plan;
use moec_runtime::Result;
use moec_runtime::offload::paging::decider::{Asked, Decider, Decision, Event, How, News, Scores, Seen};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// A layer has asked for its experts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ask {
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
    /// Scores of the first row: its own, then those of the layers ahead. They are not needed for a call of many rows.
    pub scores: Vec<Vec<f32>>,
}

impl Ask {
    /// The same as an event, with what was measured until then.
    pub fn asked(&self, stalled: Duration, flash: Seen) -> Asked<'_> {
        let Self { layer, rows, k, ref active, ref beside, ref scores } = *self;
        Asked {
            layer,
            rows,
            k,
            active,
            beside,
            scored: scores.len(),
            scores: Scores::Kept(scores),
            stalled,
            flash,
        }
    }

    /// Request of a step.
    fn of(asked: &Asked<'_>) -> Self {
        let scored = if asked.rows == 1 { asked.scored } else { 0 };
        Self {
            layer: asked.layer,
            rows: asked.rows,
            k: asked.k,
            active: asked.active.to_vec(),
            beside: asked.beside.to_vec(),
            scores: (0..scored).map(|i| asked.scores.of(i).to_vec()).collect(),
        }
    }
}

/// An event that can be kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// A layer has asked, with what was measured until then: waiting, and what flash had done.
    Asked(Ask, Duration, Seen),
    /// Anything else.
    News(News),
}

/// A line of a journal.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// Event, and its time.
    Heard(Duration, Heard),
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
    /// For so many lines; what comes after them is not written down.
    pub fn new(most: usize) -> Self {
        Self { lines: Mutex::default(), most }
    }

    /// A copy of what was written down.
    pub fn lines(&self) -> Vec<Line> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The routing of it.
    pub fn asks(&self) -> Vec<Ask> {
        let ask = |line| match line {
            Line::Heard(_, Heard::Asked(ask, ..)) => Some(ask),
            _ => None,
        };
        self.lines().into_iter().filter_map(ask).collect()
    }

    /// The decisions of it.
    pub fn decisions(&self) -> Vec<Decision> {
        let said = |line| match line {
            Line::Said(decision) => Some(decision),
            Line::Heard(..) => None,
        };
        self.lines().into_iter().filter_map(said).collect()
    }

    /// Tells a decider of its own all events at their times, and gives what it says: the journal's decisions, whatever the
    /// machine was doing when they were made.
    ///
    /// # Errors
    /// As [`Decider::new`] and [`Decider::hear`].
    pub fn again(&self, paging: &plan::Paging, how: How<'_>) -> Result<Vec<Decision>> {
        let mut decider = Decider::new(paging, how)?;
        let mut said = Vec::new();
        for line in self.lines() {
            let Line::Heard(now, heard) = line else { continue };
            said.extend_from_slice(match &heard {
                Heard::Asked(ask, stalled, flash) => {
                    decider.hear(now, Event::Asked(ask.asked(*stalled, *flash)))?
                }
                Heard::News(news) => decider.hear(now, Event::News(*news))?,
            });
        }
        Ok(said)
    }

    pub(super) fn heard(&self, now: Duration, event: &Event<'_>) {
        let heard = match *event {
            Event::Asked(asked) => Heard::Asked(Ask::of(&asked), asked.stalled, asked.flash),
            Event::News(news) => Heard::News(news),
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
