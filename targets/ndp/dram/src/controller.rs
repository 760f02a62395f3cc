//! The controller of one channel: ports, refresh, and the order of commands.

use std::collections::VecDeque;

use crate::chips::{Chips, Slot};
use crate::command::{Clock, Command};
use crate::port::{NEVER, Offer, Pick, Port, Refreshing};
use crate::{Address, Geometry, Request, Timing};

/// The port of the host in every controller.
pub const HOST: usize = 0;

/// Options of a controller other than its timing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Requests that each of the two queues of a port holds; at least 1.
    pub queue: usize,
    /// Whether ranks are refreshed.
    pub refresh: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { queue: 32, refresh: true }
    }
}

/// A command that is sent to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Its first clock on the command bus.
    pub clock: Clock,
    /// The port that sent it.
    pub port: usize,
    /// The command.
    pub command: Command,
    /// Destination; of a command to all banks only the rank counts, and the rest is 0.
    pub at: Address,
}

/// A controller with an open-page policy and first-ready, first-come-first-served order.
///
/// It has one port, the host's, which reaches all ranks over one bus; with [`Controller::with_private_ports`]
/// one more for each rank. Each port has two queues, for reads and writes. At every clock the ports are
/// polled in their order, and each sends one command at most:
///
/// 1. the oldest request whose row was opened for it, if the chips are ready for it;
/// 2. a refresh that is due, or what it needs. It goes over the host's port, rank by rank. Until the last one
///    is sent the host opens and reads nothing else, and a private port nothing of the rank whose refresh is
///    due;
/// 3. the oldest request whose next command the chips are ready for, of the reads or, while writes are
///    drained, of the writes. A row is not closed while the request that it was opened for has yet to come.
///
/// A request leaves its queue when its row is opened for it, or with its own command. Nothing looks at rows
/// beyond that: of two requests that are ready the older one goes, be it a hit or not.
#[derive(Debug)]
pub struct Controller {
    chips: Chips,
    ports: Vec<Port>,
    ranks: u32,
    refreshes: VecDeque<u32>,
    due: Clock,
}

impl Controller {
    /// A controller whose ranks are the host's alone. `geometry.channels` does not matter here.
    pub fn new(timing: &Timing, geometry: Geometry, options: Options) -> Self {
        let depth = options.queue.max(1);
        Self {
            chips: Chips::new(timing, geometry),
            ports: vec![Port::new(HOST, depth, 0, geometry.ranks)],
            ranks: geometry.ranks,
            refreshes: VecDeque::new(),
            due: if options.refresh { Clock::from(timing.refi.max(1)) } else { NEVER },
        }
    }

    /// A controller whose ranks have one more way each: port `1 + rank` reaches this rank alone, over buses
    /// of its own.
    pub fn with_private_ports(timing: &Timing, geometry: Geometry, options: Options) -> Self {
        let mut controller = Self::new(timing, geometry, options);
        let port = |rank| Port::new(1 + rank as usize, options.queue.max(1), rank, 1);
        controller.ports.extend((0..geometry.ranks).map(port));
        controller
    }

    /// Ports, the host's included.
    pub fn ports(&self) -> usize {
        self.ports.len()
    }

    /// Whether no request waits.
    pub fn is_idle(&self) -> bool {
        self.ports.iter().all(Port::is_idle)
    }

    /// Offers a request before clock `now`. The address is one of the geometry, and of the port's rank.
    pub fn offer(&mut self, port: usize, request: Request, now: Clock) -> Offer {
        self.ports[port].offer(&self.chips, request, now)
    }

    /// The first clock after `now`, at which [`Controller::step`] was called last, at which it has something
    /// to do if no request is offered.
    pub fn next(&self, now: Clock) -> Clock {
        let port = |p: &Port| p.known().unwrap_or(now + 1);
        self.ports.iter().map(port).min().unwrap_or(NEVER).min(self.due).max(now + 1)
    }

    /// Sends what can go at clock `now`. Clocks must not be left out that [`Controller::next`] named, nor
    /// those before which a request was offered.
    pub fn step(&mut self, now: Clock, mut sent: impl FnMut(Issued)) {
        if now >= self.due {
            self.refreshes.extend(0..self.ranks);
            self.due += self.chips.gaps.refi;
            self.ports.iter_mut().for_each(Port::forget);
        }
        for port in 0..self.ports.len() {
            let refreshing = self.refreshing(port);
            let plan = self.ports[port].plan(&self.chips, refreshing, now);
            if plan.at > now {
                continue;
            }
            let request = self.ports[port].issue(&mut self.chips, plan, now);
            if plan.command == Command::Refresh {
                self.refreshes.pop_front();
            }
            let rank = match plan.pick {
                Pick::Refresh(rank) => rank,
                Pick::Request(..) => 0,
            };
            let at = request.map_or(Address { rank, group: 0, bank: 0, row: 0, column: 0 }, |r| r.at);
            sent(Issued { clock: now, port, command: plan.command, at });
            if plan.command.is_column() {
                self.give_way(port, at.rank, now);
            }
            self.notify(port, plan.command, at, request.is_some());
        }
    }

    /// A port has read or written at a rank: is it the other one's turn?
    fn give_way(&mut self, sender: usize, rank: u32, now: Clock) {
        let private = 1 + rank as usize;
        let other = if sender == HOST { private } else { HOST };
        if self.ports.get(other).is_some_and(|p| p.is_starved(rank, now)) {
            self.chips.reserve(rank, Some(other));
        } else if self.chips.reserved(rank) == Some(sender) {
            self.chips.reserve(rank, None);
        }
    }

    /// Updates the queues of each port that a command to `at` affects: its sender, the host, and the rank's
    /// own port; all of them if a refresh has been sent and another rank is next.
    fn notify(&mut self, sender: usize, command: Command, at: Address, one_bank: bool) {
        let group = self.chips.slot(&at).group;
        for (number, port) in self.ports.iter_mut().enumerate() {
            if number == sender || command == Command::Refresh {
                port.forget();
            }
            if [HOST, 1 + at.rank as usize].contains(&number) {
                let touched = |s: Slot| if one_bank { s.group == group } else { s.rank == at.rank };
                port.update(&self.chips, at.rank, touched);
            }
        }
    }

    fn refreshing(&self, port: usize) -> Refreshing {
        match self.refreshes.front() {
            Some(&rank) if port == HOST => Refreshing::Mine(rank),
            Some(&rank) if port == 1 + rank as usize => Refreshing::Others,
            _ => Refreshing::No,
        }
    }

    /// Clocks from a read command to the last of its data.
    pub fn read_latency(&self) -> Clock {
        self.chips.gaps.read_latency
    }

    /// Clocks from a write command to the last of its data.
    pub fn write_latency(&self) -> Clock {
        self.chips.gaps.write_latency
    }
}
