//! Executor of decisions: it passes events in and carries decisions out, in a run and in a simulation alike.
//!
//! An I/O executor passes the events of the disk to its [`Decider`], in their order, with the time of the
//! disk's clock. It makes the disk carry out the decisions. Frames are the buffers of the disk, by index.

use super::decider::{Decider, Decision, DiskProgress, Event, ExpertRequest, FrameEvent};
use crate::error::{Error, Result};
use crate::offload::cache::Key;
use crate::offload::disk::{self, Disk, Loaded, Priority, ReadError, Ticket};
use crate::platform::memory::Addr;
use std::time::Duration;

/// Observer of an executor.
pub trait Watch {
    /// The decider got an event and has decided.
    fn handled(&mut self, now: Duration, event: &Event<'_>);
    /// A decision, before it is carried out. `base` is the first byte of the frame that it fills, if any.
    fn decided(&mut self, decision: &Decision, base: Option<Addr>);
    /// A read that began at `since` has ended now.
    fn read(&mut self, key: Key, priority: Priority, since: Duration, now: Duration);
}

/// A read in flight.
#[derive(Clone, Copy, Debug)]
struct Flight {
    ticket: Ticket,
    key: Key,
    priority: Priority,
    since: Duration,
}

/// A decider, and its frames.
pub struct IoExecutor {
    /// Decider.
    pub decider: Decider,
    /// Read in flight into each frame.
    flights: Vec<Option<Flight>>,
    /// Expert in each frame; holding it keeps the frame from being freed.
    loaded: Vec<Option<Loaded>>,
    /// First byte of every frame that was ever filled.
    bases: Vec<Option<Addr>>,
    /// Reason that a requested expert could not be read.
    pub error: Option<Box<ReadError>>,
}

impl IoExecutor {
    /// Creates an executor for as many frames as the disk has buffers.
    pub fn new(decider: Decider, frames: usize) -> Self {
        Self {
            decider,
            flights: vec![None; frames],
            loaded: std::iter::repeat_with(|| None).take(frames).collect(),
            bases: vec![None; frames],
            error: None,
        }
    }

    /// Handles a layer's request for its experts, after all events of the disk.
    ///
    /// # Errors
    /// A layer that does not exist; a reader that has failed.
    pub fn request(
        &mut self,
        disk: &dyn Disk,
        request: ExpertRequest<'_>,
        watch: &mut dyn Watch,
    ) -> Result<()> {
        // A cancelled call is over: its reads are cancelled as well.
        self.error = None;
        let stats = disk.stats();
        let disk_has = DiskProgress { bytes: stats.bytes, busy: stats.busy };
        self.publish(disk, Event::Requested(ExpertRequest { disk: disk_has, ..request }), watch)
    }

    /// Handles all events of the disk.
    ///
    /// # Errors
    /// A reader that has failed.
    pub fn handle_disk_events(&mut self, disk: &dyn Disk, watch: &mut dyn Watch) -> Result<()> {
        while let Some(event) = disk.poll() {
            self.handle(disk, event, watch)?;
        }
        Ok(())
    }

    fn handle(&mut self, disk: &dyn Disk, event: disk::Event, watch: &mut dyn Watch) -> Result<()> {
        match event {
            disk::Event::Arrived { ticket, extent } => {
                let (frame, part) = (ticket.buffer() as u32, (extent % 2) as u8);
                self.publish_frame_event(disk, FrameEvent::Arrived { frame, part }, watch)
            }
            disk::Event::Done { ticket, loaded } => {
                let at = ticket.buffer();
                if let Some(flight) = self.flights[at].take() {
                    self.loaded[at] = Some(loaded);
                    watch.read(flight.key, flight.priority, flight.since, disk.now());
                } else {
                    // It was cancelled too late. Its frame is free as soon as the decider gets the event.
                    drop(loaded);
                }
                self.publish_frame_event(disk, FrameEvent::Done { frame: at as u32 }, watch)
            }
            disk::Event::Failed { ticket, error } => {
                let at = ticket.buffer();
                let key = self.flights[at].take().map(|flight| flight.key);
                let was = self.decider.is_broken();
                let result = self.publish_frame_event(disk, FrameEvent::Failed { frame: at as u32 }, watch);
                if self.decider.is_broken() && !was {
                    let expert = key.map(|key| (key.layer.into(), key.expert.into()));
                    self.error.get_or_insert_with(|| Box::new(ReadError { expert, ..error }));
                }
                result
            }
            disk::Event::Released { ticket } => {
                self.publish_frame_event(disk, FrameEvent::Released { frame: ticket.buffer() as u32 }, watch)
            }
            disk::Event::Cancelled { .. } => Ok(()),
        }
    }

    /// Passes an event to the decider, and carries out its decisions.
    ///
    /// # Errors
    /// A reader that has failed.
    pub fn publish_frame_event(
        &mut self,
        disk: &dyn Disk,
        event: FrameEvent,
        watch: &mut dyn Watch,
    ) -> Result<()> {
        self.publish(disk, Event::Frame(event), watch)
    }

    fn publish(&mut self, disk: &dyn Disk, event: Event<'_>, watch: &mut dyn Watch) -> Result<()> {
        let now = disk.now();
        self.decider.handle(now, event)?;
        watch.handled(now, &event);
        let mut refused = Ok(());
        let mut lost = Vec::new();
        for i in 0..self.decider.decisions().len() {
            let decision = self.decider.decisions()[i];
            watch.decided(&decision, self.base(&decision));
            if let (frame, Err(e)) = self.carry_out(disk, decision, now) {
                if let Error::Read(e) = &e {
                    self.error.get_or_insert_with(|| e.clone());
                }
                refused = refused.and(Err(e));
                lost.push(frame);
            }
        }
        // A thread that waits for these would never wake up.
        for frame in lost {
            let result = self.publish_frame_event(disk, FrameEvent::Failed { frame }, watch);
            let result = result.and(self.publish_frame_event(disk, FrameEvent::Released { frame }, watch));
            refused = refused.and(result);
        }
        refused
    }

    fn base(&self, decision: &Decision) -> Option<Addr> {
        let Decision::Use { frame, .. } = *decision else { return None };
        self.bases.get(frame as usize).copied().flatten()
    }

    /// Makes the disk carry out a decision. The frame of a read that it refuses is returned with the error.
    fn carry_out(&mut self, disk: &dyn Disk, decision: Decision, now: Duration) -> (u32, Result<()>) {
        match decision {
            Decision::Load { frame, key, first, parts, priority } => {
                let extent = 2 * self.decider.id(key) as u32 + u32::from(first);
                let at = frame as usize;
                let started =
                    disk.buffers().claim(frame).ok_or_else(|| Error::plan(format!("frame {frame} is taken")));
                let started = started.and_then(|buffer| {
                    self.bases[at] = Some(buffer.addr());
                    disk.submit(extent, parts.into(), priority, buffer)
                });
                let started = started.map(|ticket| {
                    self.flights[at] = Some(Flight { ticket, key, priority, since: now });
                });
                return (frame, started);
            }
            Decision::RaisePriority { frame, .. } => {
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
            Decision::Enqueue { .. }
            | Decision::Use { .. }
            | Decision::Evict { .. }
            | Decision::ReadFailed { .. } => {}
        }
        (0, Ok(()))
    }
}
