//! State of a controller's ranks: open rows, and when each command may come next.

use crate::command::{Clock, Command, Gaps, Ready, Scope};
use crate::{Address, Geometry, Timing};

/// Row of a bank that has none open.
const CLOSED: u32 = u32::MAX;

/// Destination of a request, as indices over all ranks of the controller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) rank: u32,
    pub(crate) group: u32,
    pub(crate) bank: u32,
}

#[derive(Clone, Debug, Default)]
struct Rank {
    ready: Ready,
    /// The last four activates, the oldest at `oldest`.
    activates: [Option<Clock>; 4],
    oldest: usize,
    open: u32,
    /// Banks that are claimed.
    claimed: u32,
    /// Port with priority over all others here.
    reserved: Option<usize>,
}

/// All ranks of one controller.
#[derive(Debug)]
pub(crate) struct Chips {
    pub(crate) gaps: Gaps,
    geometry: Geometry,
    ranks: Vec<Rank>,
    groups: Vec<Ready>,
    banks: Vec<Ready>,
    /// The open row of each bank.
    rows: Vec<u32>,
    /// Banks with a row that was opened for a request which has not come to it yet.
    claimed: Vec<bool>,
}

impl Chips {
    pub(crate) fn new(timing: &Timing, geometry: Geometry) -> Self {
        let ranks = geometry.ranks as usize;
        let groups = ranks * geometry.groups as usize;
        let banks = groups * geometry.banks as usize;
        Self {
            gaps: Gaps::of(timing),
            geometry,
            ranks: vec![Rank::default(); ranks],
            groups: vec![[0; 8]; groups],
            banks: vec![[0; 8]; banks],
            rows: vec![CLOSED; banks],
            claimed: vec![false; banks],
        }
    }

    pub(crate) fn slot(&self, at: &Address) -> Slot {
        let group = at.rank * self.geometry.groups + at.group;
        Slot { rank: at.rank, group, bank: group * self.geometry.banks + at.bank }
    }

    /// The command that a request for `row` needs next; `column` where the row is open.
    pub(crate) fn next(&self, slot: Slot, row: u32, column: Command) -> Command {
        match self.rows[slot.bank as usize] {
            CLOSED => Command::Activate,
            open if open == row => column,
            _ => Command::Precharge,
        }
    }

    /// The command that a refresh of `rank` needs next.
    pub(crate) fn next_refresh(&self, rank: u32) -> Command {
        if self.ranks[rank as usize].open > 0 { Command::PrechargeAll } else { Command::Refresh }
    }

    /// Whether closing the rows of this bank would waste an activate.
    pub(crate) fn is_claimed(&self, slot: Slot) -> bool {
        self.claimed[slot.bank as usize]
    }

    /// Whether closing all rows of the rank would waste an activate.
    pub(crate) fn is_rank_claimed(&self, rank: u32) -> bool {
        self.ranks[rank as usize].claimed > 0
    }

    /// The first clock at which the bank and its group take the command. The rank has a say, too.
    pub(crate) fn bank_ready(&self, command: Command, slot: Slot) -> Clock {
        let c = command as usize;
        self.groups[slot.group as usize][c].max(self.banks[slot.bank as usize][c])
    }

    /// The port that alone may send to the rank, but for refresh.
    pub(crate) fn reserved(&self, rank: u32) -> Option<usize> {
        self.ranks[rank as usize].reserved
    }

    pub(crate) fn reserve(&mut self, rank: u32, port: Option<usize>) {
        self.ranks[rank as usize].reserved = port;
    }

    /// The first clocks at which a rank takes each command.
    pub(crate) fn rank_ready(&self, rank: u32) -> &Ready {
        &self.ranks[rank as usize].ready
    }

    /// A command goes to one bank.
    pub(crate) fn issue(&mut self, command: Command, slot: Slot, row: u32, now: Clock) {
        let rank = &mut self.ranks[slot.rank as usize];
        let bank = slot.bank as usize;
        self.gaps.apply(Scope::Rank, command, now, &mut rank.ready);
        self.gaps.apply(Scope::Group, command, now, &mut self.groups[slot.group as usize]);
        self.gaps.apply(Scope::Bank, command, now, &mut self.banks[bank]);
        match command {
            Command::Activate => {
                rank.activates[rank.oldest] = Some(now);
                rank.oldest = (rank.oldest + 1) % rank.activates.len();
                if let Some(first) = rank.activates[rank.oldest] {
                    let next = &mut rank.ready[Command::Activate as usize];
                    *next = (*next).max(first + self.gaps.faw);
                }
                (self.rows[bank], self.claimed[bank]) = (row, true);
                rank.open += 1;
                rank.claimed += 1;
            }
            Command::Precharge => {
                self.rows[bank] = CLOSED;
                rank.open -= 1;
            }
            _ => {}
        }
    }

    /// The request that a row was opened for has come to it.
    pub(crate) fn unclaim(&mut self, slot: Slot) {
        self.claimed[slot.bank as usize] = false;
        self.ranks[slot.rank as usize].claimed -= 1;
    }

    /// A command goes to all banks of a rank.
    pub(crate) fn issue_rank(&mut self, command: Command, rank: u32, now: Clock) {
        let state = &mut self.ranks[rank as usize];
        self.gaps.apply(Scope::Rank, command, now, &mut state.ready);
        if command == Command::PrechargeAll {
            state.open = 0;
            let banks = self.geometry.banks_per_rank() as usize;
            let first = rank as usize * banks;
            self.rows[first..first + banks].fill(CLOSED);
        }
    }
}
