//! Executor of decisions: passes events in and carries decisions out, the same for a run and for a simulation of one.
//!
//! A desk tells its [`Decider`] what flash has to tell, in the order in which flash tells it, with the time of flash's clock, and
//! has flash do what the decider says. Frames are the buffers of flash, by index.

use super::decider::{Asked, Decider, Decision, Event, News, Seen};
use crate::error::{Error, Result};
use crate::offload::cache::Key;
use crate::offload::flash::{self, Disk, Loaded, Priority, ReadError, Ticket};
use crate::platform::memory::Addr;
use std::time::Duration;

/// Looks on.
pub trait Watch {
    /// The decider was told an event, and has decided.
    fn heard(&mut self, now: Duration, event: &Event<'_>);
    /// A decision, before it is carried out; `base` is the first byte of its frame, where it has one that is being filled.
    fn decided(&mut self, decision: &Decision, base: Option<Addr>);
    /// A read that began at `since` has ended now.
    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration);
}

/// A read under way.
#[derive(Clone, Copy, Debug)]
struct Flight {
    ticket: Ticket,
    key: Key,
    priority: Priority,
    since: Duration,
}

/// A decider, and the frames that it decides about.
pub struct Desk {
    /// Decider.
    pub decider: Decider,
    /// Read in flight into each frame.
    flights: Vec<Option<Flight>>,
    /// Expert in each frame: held so that the frame is its own.
    loaded: Vec<Option<Loaded>>,
    /// First byte of every frame that was ever filled.
    bases: Vec<Option<Addr>>,
    /// Reason that a requested expert could not be read.
    pub error: Option<Box<ReadError>>,
}

impl Desk {
    /// For as many frames as flash has buffers.
    pub fn new(decider: Decider, frames: usize) -> Self {
        Self {
            decider,
            flights: vec![None; frames],
            loaded: std::iter::repeat_with(|| None).take(frames).collect(),
            bases: vec![None; frames],
            error: None,
        }
    }

    /// A layer asks for its experts, when what flash had to tell was heard.
    ///
    /// # Errors
    /// A layer that there is not; a reader that has broken down.
    pub fn ask(&mut self, flash: &dyn Disk, asked: Asked<'_>, watch: &mut dyn Watch) -> Result<()> {
        // A call that was given up is over: its reads are given up as well.
        self.error = None;
        let stats = flash.stats();
        let flash_has = Seen { bytes: stats.bytes, busy: stats.busy };
        self.tell(flash, Event::Asked(Asked { flash: flash_has, ..asked }), watch)
    }

    /// Hears everything that flash has to tell.
    ///
    /// # Errors
    /// A reader that has broken down.
    pub fn take_news(&mut self, flash: &dyn Disk, watch: &mut dyn Watch) -> Result<()> {
        while let Some(event) = flash.poll() {
            self.hear(flash, event, watch)?;
        }
        Ok(())
    }

    fn hear(&mut self, flash: &dyn Disk, event: flash::Event, watch: &mut dyn Watch) -> Result<()> {
        match event {
            flash::Event::Arrived { ticket, extent } => {
                let (frame, part) = (ticket.buffer() as u32, (extent % 2) as u8);
                self.news(flash, News::Arrived { frame, part }, watch)
            }
            flash::Event::Done { ticket, loaded } => {
                let at = ticket.buffer();
                if let Some(flight) = self.flights[at].take() {
                    self.loaded[at] = Some(loaded);
                    watch.read(flight.key, flight.priority, flight.since, flash.now());
                } else {
                    // It was given up too late. Its frame is free as soon as the decider hears of it.
                    drop(loaded);
                }
                self.news(flash, News::Done { frame: at as u32 }, watch)
            }
            flash::Event::Failed { ticket, error } => {
                let at = ticket.buffer();
                let key = self.flights[at].take().map(|flight| flight.key);
                let was = self.decider.is_broken();
                let told = self.news(flash, News::Failed { frame: at as u32 }, watch);
                if self.decider.is_broken() && !was {
                    let expert = key.map(|key| (key.layer.into(), key.expert.into()));
                    self.error.get_or_insert_with(|| Box::new(ReadError { expert, ..error }));
                }
                told
            }
            flash::Event::Released { ticket } => {
                self.news(flash, News::Released { frame: ticket.buffer() as u32 }, watch)
            }
            flash::Event::Cancelled { .. } => Ok(()),
        }
    }

    /// Tells the decider, and does as it says.
    ///
    /// # Errors
    /// A reader that has broken down.
    pub fn news(&mut self, flash: &dyn Disk, news: News, watch: &mut dyn Watch) -> Result<()> {
        self.tell(flash, Event::News(news), watch)
    }

    fn tell(&mut self, flash: &dyn Disk, event: Event<'_>, watch: &mut dyn Watch) -> Result<()> {
        let now = flash.now();
        self.decider.hear(now, event)?;
        watch.heard(now, &event);
        let mut refused = Ok(());
        let mut lost = Vec::new();
        for i in 0..self.decider.said().len() {
            let decision = self.decider.said()[i];
            watch.decided(&decision, self.base(&decision));
            if let (frame, Err(e)) = self.carry_out(flash, decision, now) {
                if let Error::Read(e) = &e {
                    self.error.get_or_insert_with(|| e.clone());
                }
                refused = refused.and(Err(e));
                lost.push(frame);
            }
        }
        // A thread that waits for these would wait for ever.
        for frame in lost {
            let told = self.news(flash, News::Failed { frame }, watch);
            let told = told.and(self.news(flash, News::Released { frame }, watch));
            refused = refused.and(told);
        }
        refused
    }

    fn base(&self, decision: &Decision) -> Option<Addr> {
        let Decision::Use { frame, .. } = *decision else { return None };
        self.bases.get(frame as usize).copied().flatten()
    }

    /// Has flash do what was decided. The frame of a read that it refuses comes with the error.
    fn carry_out(&mut self, flash: &dyn Disk, decision: Decision, now: Duration) -> (u32, Result<()>) {
        match decision {
            Decision::Load { frame, key, first, parts, priority } => {
                let extent = 2 * self.decider.id(key) as u32 + u32::from(first);
                let at = frame as usize;
                let begun = flash
                    .buffers()
                    .claim(frame)
                    .ok_or_else(|| Error::plan(format!("frame {frame} is taken")));
                let begun = begun.and_then(|buffer| {
                    self.bases[at] = Some(buffer.addr());
                    flash.submit(extent, parts.into(), priority, buffer)
                });
                let begun = begun.map(|ticket| {
                    self.flights[at] = Some(Flight { ticket, key, priority, since: now });
                });
                return (frame, begun);
            }
            Decision::Hurry { frame, .. } => {
                if let Some(flight) = self.flights[frame as usize] {
                    flash.raise(flight.ticket);
                }
            }
            Decision::Evict { frame: Some(frame), .. } => {
                if let Some(flight) = self.flights[frame as usize].take() {
                    flash.cancel(flight.ticket);
                }
                self.loaded[frame as usize] = None;
            }
            Decision::Want { .. } | Decision::Use { .. } | Decision::Evict { .. } | Decision::Lost { .. } => {
            }
        }
        (0, Ok(()))
    }
}
