//! Executor of decisions: passes events in and carries decisions out, the same for a run and for a simulation of one.
//!
//! An I/O executor notifies its [`Decider`] the events of the disk, in the order in which they come, with the time of the disk's clock, and
//! has the disk do what the decider says. Frames are the buffers of the disk, by index.

use super::decider::{Decider, Decision, DiskProgress, Event, ExpertRequest, News};
use crate::error::{Error, Result};
use crate::offload::cache::Key;
use crate::offload::disk::{self, Disk, Loaded, Priority, ReadError, Ticket};
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
pub struct IoExecutor {
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

impl IoExecutor {
    /// For as many frames as the disk has buffers.
    pub fn new(decider: Decider, frames: usize) -> Self {
        Self {
            decider,
            flights: vec![None; frames],
            loaded: std::iter::repeat_with(|| None).take(frames).collect(),
            bases: vec![None; frames],
            error: None,
        }
    }

    /// A layer requests its experts, when the events of the disk was heard.
    ///
    /// # Errors
    /// A layer that there is not; a reader that has broken down.
    pub fn request(
        &mut self,
        disk: &dyn Disk,
        request: ExpertRequest<'_>,
        watch: &mut dyn Watch,
    ) -> Result<()> {
        // A call that was given up is over: its reads are given up as well.
        self.error = None;
        let stats = disk.stats();
        let disk_has = DiskProgress { bytes: stats.bytes, busy: stats.busy };
        self.publish(disk, Event::Requested(ExpertRequest { disk: disk_has, ..request }), watch)
    }

    /// Handles all events of the disk.
    ///
    /// # Errors
    /// A reader that has broken down.
    pub fn take_news(&mut self, disk: &dyn Disk, watch: &mut dyn Watch) -> Result<()> {
        while let Some(event) = disk.poll() {
            self.hear(disk, event, watch)?;
        }
        Ok(())
    }

    fn hear(&mut self, disk: &dyn Disk, event: disk::Event, watch: &mut dyn Watch) -> Result<()> {
        match event {
            disk::Event::Arrived { ticket, extent } => {
                let (frame, part) = (ticket.buffer() as u32, (extent % 2) as u8);
                self.news(disk, News::Arrived { frame, part }, watch)
            }
            disk::Event::Done { ticket, loaded } => {
                let at = ticket.buffer();
                if let Some(flight) = self.flights[at].take() {
                    self.loaded[at] = Some(loaded);
                    watch.read(flight.key, flight.priority, flight.since, disk.now());
                } else {
                    // It was given up too late. Its frame is free as soon as the decider hears of it.
                    drop(loaded);
                }
                self.news(disk, News::Done { frame: at as u32 }, watch)
            }
            disk::Event::Failed { ticket, error } => {
                let at = ticket.buffer();
                let key = self.flights[at].take().map(|flight| flight.key);
                let was = self.decider.is_broken();
                let result = self.news(disk, News::Failed { frame: at as u32 }, watch);
                if self.decider.is_broken() && !was {
                    let expert = key.map(|key| (key.layer.into(), key.expert.into()));
                    self.error.get_or_insert_with(|| Box::new(ReadError { expert, ..error }));
                }
                result
            }
            disk::Event::Released { ticket } => {
                self.news(disk, News::Released { frame: ticket.buffer() as u32 }, watch)
            }
            disk::Event::Cancelled { .. } => Ok(()),
        }
    }

    /// Notifies the decider, and does as it says.
    ///
    /// # Errors
    /// A reader that has broken down.
    pub fn news(&mut self, disk: &dyn Disk, news: News, watch: &mut dyn Watch) -> Result<()> {
        self.publish(disk, Event::News(news), watch)
    }

    fn publish(&mut self, disk: &dyn Disk, event: Event<'_>, watch: &mut dyn Watch) -> Result<()> {
        let now = disk.now();
        self.decider.hear(now, event)?;
        watch.heard(now, &event);
        let mut refused = Ok(());
        let mut lost = Vec::new();
        for i in 0..self.decider.said().len() {
            let decision = self.decider.said()[i];
            watch.decided(&decision, self.base(&decision));
            if let (frame, Err(e)) = self.carry_out(disk, decision, now) {
                if let Error::Read(e) = &e {
                    self.error.get_or_insert_with(|| e.clone());
                }
                refused = refused.and(Err(e));
                lost.push(frame);
            }
        }
        // A thread that waits for these would wait for ever.
        for frame in lost {
            let result = self.news(disk, News::Failed { frame }, watch);
            let result = result.and(self.news(disk, News::Released { frame }, watch));
            refused = refused.and(result);
        }
        refused
    }

    fn base(&self, decision: &Decision) -> Option<Addr> {
        let Decision::Use { frame, .. } = *decision else { return None };
        self.bases.get(frame as usize).copied().flatten()
    }

    /// Has the disk do what was decided. The frame of a read that it refuses comes with the error.
    fn carry_out(&mut self, disk: &dyn Disk, decision: Decision, now: Duration) -> (u32, Result<()>) {
        match decision {
            Decision::Load { frame, key, first, parts, priority } => {
                let extent = 2 * self.decider.id(key) as u32 + u32::from(first);
                let at = frame as usize;
                let begun =
                    disk.buffers().claim(frame).ok_or_else(|| Error::plan(format!("frame {frame} is taken")));
                let begun = begun.and_then(|buffer| {
                    self.bases[at] = Some(buffer.addr());
                    disk.submit(extent, parts.into(), priority, buffer)
                });
                let begun = begun.map(|ticket| {
                    self.flights[at] = Some(Flight { ticket, key, priority, since: now });
                });
                return (frame, begun);
            }
            Decision::Hurry { frame, .. } => {
                if let Some(flight) = self.flights[frame as usize] {
                    disk.raise(flight.ticket);
                }
            }
            Decision::Evict { frame: Some(frame), .. } => {
                if let Some(flight) = self.flights[frame as usize].take() {
                    disk.cancel(flight.ticket);
                }
                self.loaded[frame as usize] = None;
            }
            Decision::Want { .. } | Decision::Use { .. } | Decision::Evict { .. } | Decision::Lost { .. } => {
            }
        }
        (0, Ok(()))
    }
}
