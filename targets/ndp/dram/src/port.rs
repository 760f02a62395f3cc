//! One way to the ranks: its queues, its buses, and its next command.
#![expect(clippy::cast_possible_truncation, reason = "indices of queues and ranks, which are short")]

use crate::chips::{Chips, Slot};
use crate::command::{Clock, Command, Ready, Scope};
use crate::{Kind, Request};

/// Age in clocks from which a read (or a write while writes are drained) is served before all others of its
/// port; no other port precedes it at its rank. Refresh closes all rows far more often. So within a port, a
/// request waits that long only if another row is hit repeatedly without refresh.
pub const PATIENCE: Clock = 1 << 16;

/// Never.
pub(crate) const NEVER: Clock = Clock::MAX;

#[derive(Clone, Copy, Debug)]
pub(crate) struct Entry {
    pub(crate) request: Request,
    pub(crate) slot: Slot,
    since: Clock,
    /// Next command that it needs, and the first clock at which its bank takes that. [`NEVER`]: not before
    /// another request has come to the row that it would close.
    command: Command,
    ready: Clock,
}

impl Entry {
    fn new(chips: &Chips, request: Request, since: Clock) -> Self {
        let slot = chips.slot(&request.at);
        let mut entry = Self { request, slot, since, command: Command::Activate, ready: 0 };
        entry.update(chips);
        entry
    }

    /// Something was sent to its bank group.
    fn update(&mut self, chips: &Chips) {
        self.command = chips.next(self.slot, self.request.at.row, self.column());
        let spoils = self.command == Command::Precharge && chips.is_claimed(self.slot);
        self.ready = if spoils { NEVER } else { chips.bank_ready(self.command, self.slot) };
    }

    fn column(&self) -> Command {
        match self.request.kind {
            Kind::Read => Command::Read,
            Kind::Write => Command::Write,
        }
    }
}

/// Queue that a request waits in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Queue {
    /// Its row was opened for it.
    Opened,
    Reads,
    Writes,
}

/// Next command of a port.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pick {
    Refresh(u32),
    Request(Queue, usize),
}

/// A command, and the first clock at which it can go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) at: Clock,
    pub(crate) command: Command,
    pub(crate) pick: Pick,
}

impl Plan {
    /// No command to send.
    const NONE: Self = Self { at: NEVER, command: Command::Refresh, pick: Pick::Refresh(0) };
}

/// Fate of a request that was offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// The request waits in its queue.
    Accepted,
    /// A read of a line that waits to be written: answered from the write queue, no command is needed.
    Forwarded,
    /// A write of a line that waits to be written: that write takes its place.
    Merged,
    /// Its queue is full.
    Full,
}

/// The next refresh, as a port sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refreshing {
    /// No refresh is due that concerns the port: it reads and writes.
    No,
    /// This rank's is to be sent, and no read or write until then.
    Mine(u32),
    /// Another port is about to refresh this port's rank.
    Others,
}

/// Queues of one master and its place on the buses.
#[derive(Debug)]
pub(crate) struct Port {
    number: usize,
    depth: usize,
    /// All three in the order of arrival.
    opened: Vec<Entry>,
    reads: Vec<Entry>,
    writes: Vec<Entry>,
    draining: bool,
    command_bus: Ready,
    /// The first rank that it reaches.
    first: u32,
    /// By rank, the constraints of this port's data bus between ranks.
    data_bus: Vec<Ready>,
    /// For each rank: when it and its buses accept each command, as of the last plan.
    ranks: Vec<Ready>,
    /// Next command; `None`: to be found out.
    plan: Option<Plan>,
    /// The refresh that the plan was made in view of.
    refreshing: Refreshing,
}

impl Port {
    /// A port that reaches `ranks` ranks from `first` on.
    pub(crate) fn new(number: usize, depth: usize, first: u32, ranks: u32) -> Self {
        Self {
            number,
            depth,
            opened: Vec::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            draining: false,
            command_bus: [0; 8],
            first,
            data_bus: vec![[0; 8]; ranks as usize],
            ranks: vec![[0; 8]; ranks as usize],
            plan: None,
            refreshing: Refreshing::No,
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.opened.is_empty() && self.reads.is_empty() && self.writes.is_empty()
    }

    /// The clock of the next command, if that is known.
    pub(crate) fn known(&self) -> Option<Clock> {
        self.plan.map(|p| p.at)
    }

    pub(crate) fn forget(&mut self) {
        self.plan = None;
    }

    /// A request arrives before clock `now`.
    pub(crate) fn offer(&mut self, chips: &Chips, request: Request, now: Clock) -> Offer {
        let waits = self.writes.iter().any(|w| w.request.at == request.at);
        let queue = match (request.kind, waits) {
            (Kind::Read, true) => return Offer::Forwarded,
            (Kind::Write, true) => return Offer::Merged,
            (Kind::Read, false) => &mut self.reads,
            (Kind::Write, false) => &mut self.writes,
        };
        if queue.len() >= self.depth {
            return Offer::Full;
        }
        let entry = Entry::new(chips, request, now);
        queue.push(entry);
        self.amend(entry, now);
        Offer::Accepted
    }

    /// Keeps the plan true when a request has arrived, without looking at all others again.
    fn amend(&mut self, entry: Entry, now: Clock) {
        let Some(plan) = self.plan else { return };
        // The queues have no influence during a refresh, or if an opened request goes first at this very
        // clock.
        let first = matches!(plan.pick, Pick::Request(Queue::Opened, _)) && plan.at <= now;
        if self.refreshing != Refreshing::No || first {
            return;
        }
        let was = self.draining;
        if self.set_mode(now) != was {
            self.plan = None;
        } else if (entry.request.kind == Kind::Write) == self.draining {
            // The new request is the youngest, so it goes first only if its clock is earlier.
            let (queue, list) = self.queue();
            let at = self.clock(&entry).max(now);
            if at < plan.at {
                let pick = Pick::Request(queue, list.len() - 1);
                self.plan = Some(Plan { at, command: entry.command, pick });
            }
        }
    }

    /// Switches between reading and writing: writes wait until four fifths of their queue are full or no read
    /// waits, and continue until less than a fifth is left.
    fn set_mode(&mut self, now: Clock) -> bool {
        let (writes, depth) = (5 * self.writes.len(), self.depth);
        let starved = self.reads.first().is_some_and(|r| now - r.since > PATIENCE);
        let enough = if self.draining { writes >= depth } else { writes > 4 * depth };
        self.draining = !starved && (enough || self.reads.is_empty());
        self.draining
    }

    /// Whether the oldest request of the current direction waits for this rank, and has waited for too long.
    pub(crate) fn is_starved(&self, rank: u32, now: Clock) -> bool {
        let oldest = [self.opened.first(), self.queue().1.first()];
        oldest.into_iter().flatten().any(|e| e.slot.rank == rank && now - e.since > PATIENCE)
    }

    fn queue(&self) -> (Queue, &[Entry]) {
        if self.draining { (Queue::Writes, &self.writes) } else { (Queue::Reads, &self.reads) }
    }

    /// The entry with the earliest clock; of those that could go at once, the oldest.
    fn earliest(&self, queue: Queue, list: &[Entry], now: Clock) -> Plan {
        let (mut first, mut index) = (NEVER, 0);
        for (i, entry) in list.iter().enumerate() {
            let at = self.clock(entry);
            if at < first {
                (first, index) = (at, i);
                if at <= now {
                    break;
                }
            }
        }
        if first == NEVER {
            return Plan::NONE;
        }
        Plan { at: first.max(now), command: list[index].command, pick: Pick::Request(queue, index) }
    }

    /// Notes when a rank and the ways to it take each command.
    fn look(&mut self, chips: &Chips, rank: u32) {
        let place = (rank - self.first) as usize;
        let ways = self.command_bus.iter().zip(&self.data_bus[place]).zip(chips.rank_ready(rank));
        for (ready, ((&command, &data), &chip)) in self.ranks[place].iter_mut().zip(ways) {
            *ready = command.max(data).max(chip);
        }
        if chips.reserved(rank).is_some_and(|port| port != self.number) {
            self.ranks[place] = [NEVER; 8];
        }
    }

    /// The first clock at which an entry's command can go, as far as [`Port::look`] has seen.
    fn clock(&self, entry: &Entry) -> Clock {
        let rank = &self.ranks[(entry.slot.rank - self.first) as usize];
        entry.ready.max(rank[entry.command as usize])
    }

    /// A command was sent to a bank group, or to all of a rank, by this port or another one.
    pub(crate) fn update(&mut self, chips: &Chips, rank: u32, touched: impl Fn(Slot) -> bool) {
        for list in [&mut self.opened, &mut self.reads, &mut self.writes] {
            list.iter_mut().filter(|e| touched(e.slot)).for_each(|e| e.update(chips));
        }
        // The command can only delay other requests of the rank: a plan for another rank stays valid, unless
        // a touched request can go as early.
        let Some(plan) = self.plan.filter(|plan| plan.at < NEVER && self.rank(plan) != Some(rank)) else {
            self.plan = None;
            return;
        };
        self.look(chips, rank);
        let lists = [&self.opened, &self.reads, &self.writes];
        let mut entries = lists.into_iter().flatten().filter(|e| touched(e.slot));
        if entries.any(|e| self.clock(e) <= plan.at) {
            self.plan = None;
        }
    }

    /// The rank that a plan is for.
    fn rank(&self, plan: &Plan) -> Option<u32> {
        let list = match plan.pick {
            Pick::Refresh(rank) => return Some(rank),
            Pick::Request(Queue::Opened, index) => self.opened.get(index),
            Pick::Request(Queue::Reads, index) => self.reads.get(index),
            Pick::Request(Queue::Writes, index) => self.writes.get(index),
        };
        list.map(|entry| entry.slot.rank)
    }

    /// Next command if nothing else happens: first what a row was opened for, then a refresh that is due,
    /// then reads or writes.
    pub(crate) fn plan(&mut self, chips: &Chips, refreshing: Refreshing, now: Clock) -> Plan {
        if let Some(plan) = self.plan {
            return plan;
        }
        for place in 0..self.ranks.len() as u32 {
            self.look(chips, self.first + place);
        }
        let mut best = self.earliest(Queue::Opened, &self.opened, now);
        if best.at > now {
            let other = match refreshing {
                Refreshing::Mine(rank) => self.refresh_plan(chips, rank, now),
                Refreshing::Others => Plan::NONE,
                Refreshing::No => self.queued_plan(now),
            };
            if other.at < best.at {
                best = other;
            }
        }
        (self.plan, self.refreshing) = (Some(best), refreshing);
        best
    }

    fn refresh_plan(&self, chips: &Chips, rank: u32, now: Clock) -> Plan {
        let command = chips.next_refresh(rank);
        if command == Command::PrechargeAll && chips.is_rank_claimed(rank) {
            return Plan::NONE;
        }
        let c = command as usize;
        let at = chips.rank_ready(rank)[c].max(self.command_bus[c]).max(now);
        Plan { at, command, pick: Pick::Refresh(rank) }
    }

    fn queued_plan(&mut self, now: Clock) -> Plan {
        self.set_mode(now);
        let (queue, list) = self.queue();
        match list.first() {
            Some(oldest) if now - oldest.since > PATIENCE => self.earliest(queue, &list[..1], now),
            _ => self.earliest(queue, list, now),
        }
    }

    /// The planned command goes out: buses are taken, queues change. Gives the request that it was for.
    pub(crate) fn issue(&mut self, chips: &mut Chips, plan: Plan, now: Clock) -> Option<Request> {
        chips.gaps.apply(Scope::Port, plan.command, now, &mut self.command_bus);
        let (queue, index) = match plan.pick {
            Pick::Refresh(rank) => {
                chips.issue_rank(plan.command, rank, now);
                return None;
            }
            Pick::Request(queue, index) => (queue, index),
        };
        let list = match queue {
            Queue::Opened => &mut self.opened,
            Queue::Reads => &mut self.reads,
            Queue::Writes => &mut self.writes,
        };
        let entry = list[index];
        chips.issue(plan.command, entry.slot, entry.request.at.row, now);
        if plan.command.is_column() {
            list.remove(index);
            if queue == Queue::Opened {
                chips.unclaim(entry.slot);
            }
            for (rank, ready) in self.data_bus.iter_mut().enumerate() {
                if rank != (entry.slot.rank - self.first) as usize {
                    chips.gaps.apply(Scope::Others, plan.command, now, ready);
                }
            }
        } else if plan.command == Command::Activate {
            list.remove(index);
            let place = self.opened.partition_point(|e| e.since <= entry.since);
            self.opened.insert(place, entry);
        }
        Some(entry.request)
    }
}
