//! Runs a trace.

use std::io::BufRead;

use super::{Report, Requests, TraceError};
use crate::{Clock, Command, Controller, Geometry, HOST, Offer, Options, Request, Timing};

/// Memory that a trace is run on.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The chips.
    pub timing: Timing,
    /// Geometry that addresses refer to.
    pub geometry: Geometry,
    /// Queues and refresh.
    pub options: Options,
}

impl Setup {
    /// TriMoE's subchannels with this timing.
    pub fn new(timing: Timing, options: Options) -> Self {
        Self { timing, geometry: Geometry::trimoe(), options }
    }
}

/// Reads a trace to its end and tells when its reads and writes were issued.
///
/// The text is read as far as the queues take requests, never held.
pub fn simulate(from: impl BufRead, setup: &Setup) -> Result<Report, TraceError> {
    let mut memory = Memory::new(*setup);
    let mut requests = Requests::new(from, setup.geometry);
    let mut waiting = requests.next().transpose()?;
    let mut now: Clock = 1;
    // A full queue takes nothing before something has been sent.
    let mut blocked = false;
    loop {
        if let Some((channel, request)) = waiting.filter(|_| !blocked) {
            blocked = memory.offer(channel, request, now) == Offer::Full;
            if !blocked {
                waiting = requests.next().transpose()?;
            }
        }
        blocked &= !memory.step(now);
        if waiting.is_none() && memory.is_idle() {
            return Ok(memory.report());
        }
        now = if waiting.is_some() && !blocked { now + 1 } else { memory.next(now) };
    }
}

/// A channel that the trace has named.
struct Channel {
    number: usize,
    controller: Controller,
    next: Clock,
}

struct Memory {
    setup: Setup,
    channels: Vec<Channel>,
    report: Report,
}

impl Memory {
    fn new(setup: Setup) -> Self {
        Self { setup, channels: Vec::new(), report: Report::default() }
    }

    /// The place of a channel, which is there from the first clock on and refreshed, but made when it is
    /// named.
    fn place(&mut self, number: usize, now: Clock) -> usize {
        if let Some(place) = self.channels.iter().position(|c| c.number == number) {
            return place;
        }
        let controller = Controller::new(&self.setup.timing, self.setup.geometry, self.setup.options);
        let mut channel = Channel { number, controller, next: 1 };
        while channel.next < now {
            let clock = channel.next;
            channel.step(clock, &mut self.report);
        }
        self.channels.push(channel);
        self.channels.len() - 1
    }

    fn offer(&mut self, number: usize, request: Request, now: Clock) -> Offer {
        let place = self.place(number, now);
        let channel = &mut self.channels[place];
        let offer = channel.controller.offer(HOST, request, now);
        match offer {
            Offer::Full => return offer,
            Offer::Accepted => channel.next = now,
            Offer::Forwarded => self.report.forwarded += 1,
            Offer::Merged => self.report.merged += 1,
        }
        self.report.requests += 1;
        offer
    }

    /// Whether anything was sent.
    fn step(&mut self, now: Clock) -> bool {
        let mut sent = false;
        for channel in self.channels.iter_mut().filter(|c| c.next <= now) {
            sent |= channel.step(now, &mut self.report);
        }
        sent
    }

    fn next(&self, now: Clock) -> Clock {
        self.channels.iter().map(|c| c.next).min().unwrap_or(now).max(now + 1)
    }

    fn is_idle(&self) -> bool {
        self.channels.iter().all(|c| c.controller.is_idle())
    }

    fn report(mut self) -> Report {
        self.report.column_commands = self.report.cycles.issued();
        self.report.steady_cycles_per_line = self.report.cycles.steady();
        self.report
    }
}

impl Channel {
    fn step(&mut self, now: Clock, report: &mut Report) -> bool {
        let mut any = false;
        self.controller.step(now, |issued| {
            any = true;
            match issued.command {
                Command::Activate => report.act += 1,
                Command::Precharge | Command::PrechargeAll => report.pre += 1,
                Command::Refresh => report.r#ref += 1,
                Command::Read | Command::Write => report.cycles.note(issued.clock),
            }
        });
        self.next = self.controller.next(now);
        any
    }
}
