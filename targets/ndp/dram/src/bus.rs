//! One private bus, for a caller whose next request depends on earlier data.

use std::collections::VecDeque;

use crate::{Clock, Command, Controller, Geometry, HOST, Offer, Options, Request, Timing};

/// One private bus and its rank, with requests that arrive over time.
///
/// Requests are served in the order in which they are made. Each is offered at its clock or after those
/// before it, one per clock. Rows stay open and refresh continues between requests, so a bus keeps its state.
#[derive(Debug)]
pub struct Bus {
    controller: Controller,
    requests: VecDeque<(Clock, Request)>,
    /// The last data of each line that has come and was not queried, in the order of issue.
    ends: VecDeque<Clock>,
    /// Lines before those.
    forgotten: u64,
    /// The last of what came so far.
    latest: Clock,
    /// The clock that is simulated next.
    now: Clock,
}

impl Bus {
    /// An idle rank of one bus at clock 1; `geometry.ranks` does not matter.
    pub fn new(timing: &Timing, geometry: Geometry, options: Options) -> Self {
        let one = Geometry { ranks: 1, ..geometry };
        Self {
            controller: Controller::new(timing, one, options),
            requests: VecDeque::new(),
            ends: VecDeque::new(),
            forgotten: 0,
            latest: 0,
            now: 1,
        }
    }

    /// Requests a line of rank 0, at clock `from` at the earliest. A clock that has been simulated already
    /// means the next one.
    pub fn request(&mut self, from: Clock, request: Request) {
        self.requests.push_back((from, request));
    }

    /// The clock at which the first `lines` of all lines were there, in the order of issue; `None` if fewer
    /// have been requested. Simulates as far as that needs. Later questions request no fewer lines.
    pub fn arrived(&mut self, lines: u64) -> Option<Clock> {
        while self.forgotten + (self.ends.len() as u64) < lines {
            if self.requests.is_empty() && self.controller.is_idle() {
                return None;
            }
            self.step();
        }
        while self.forgotten < lines {
            self.latest = self.latest.max(self.ends.pop_front()?);
            self.forgotten += 1;
        }
        Some(self.latest)
    }

    /// Goes to the next clock at which something can happen.
    fn step(&mut self) {
        let mut full = false;
        if let Some(&(from, request)) = self.requests.front()
            && from <= self.now
        {
            match self.controller.offer(HOST, request, self.now) {
                Offer::Full => full = true,
                Offer::Accepted => _ = self.requests.pop_front(),
                Offer::Forwarded | Offer::Merged => {
                    self.requests.pop_front();
                    self.ends.push_back(self.now);
                }
            }
        }
        let (read, write) = (self.controller.read_latency(), self.controller.write_latency());
        let (now, ends) = (self.now, &mut self.ends);
        self.controller.step(now, |issued| match issued.command {
            Command::Read => ends.push_back(now + read),
            Command::Write => ends.push_back(now + write),
            _ => {}
        });
        let next = self.controller.next(now);
        // A full queue takes nothing before something is sent.
        let offer = self.requests.front().filter(|_| !full).map(|&(from, _)| from.max(now + 1));
        self.now = offer.map_or(next, |clock| clock.min(next));
    }
}
