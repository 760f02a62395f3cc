//! Commands to a rank, and how long each keeps others waiting.

use crate::Timing;

/// A clock of the memory bus, counted from 1.
pub type Clock = u64;

/// Command to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Command {
    /// Opens a row of a bank.
    Activate,
    /// Closes the row of a bank.
    Precharge,
    /// Closes the rows of all banks of a rank.
    PrechargeAll,
    /// Reads a line of the open row.
    Read,
    /// Writes a line of the open row.
    Write,
    /// Refreshes all banks of a rank.
    Refresh,
}

use Command::*;

/// All commands, in the order of their numbers.
pub const COMMANDS: [Command; 6] = [Activate, Precharge, PrechargeAll, Read, Write, Refresh];

impl Command {
    /// Clocks on the command bus (JESD79-5, command truth table: those with a row or a column take two).
    pub const fn cycles(self) -> u32 {
        match self {
            Activate | Read | Write => 2,
            Precharge | PrechargeAll | Refresh => 1,
        }
    }

    /// Whether it moves a line: a read or a write.
    pub const fn is_column(self) -> bool {
        matches!(self, Read | Write)
    }
}

/// Among which commands a rule holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Scope {
    /// Commands of one port: its command bus and its data bus.
    Port,
    /// Commands of one port to different ranks.
    Others,
    /// Commands to one rank, whichever port they come from.
    Rank,
    /// Commands to one bank group.
    Group,
    /// Commands to one bank.
    Bank,
}

pub(crate) const SCOPES: usize = 5;

/// Least clocks between two commands.
struct Rule {
    scope: Scope,
    before: &'static [Command],
    after: &'static [Command],
    /// Between the ends of both commands, as the standard counts.
    clocks: i64,
}

/// Ready times by command; two places stay unused, for the sake of vectors.
pub(crate) type Ready = [Clock; 8];

/// The rules of a timing: what a command forbids, by scope, for how long.
#[derive(Debug)]
pub(crate) struct Gaps {
    /// `[scope][before][after]`, from first clock to first clock; 0: nothing.
    by: [[Ready; COMMANDS.len()]; SCOPES],
    pub(crate) faw: Clock,
    pub(crate) refi: Clock,
    pub(crate) read_latency: Clock,
    pub(crate) write_latency: Clock,
}

/// The table of JESD79-5's rules. Those of [`Scope::Port`] and [`Scope::Others`] are of buses, the rest of
/// chips.
fn rules(t: &Timing) -> Vec<Rule> {
    let n = |x: u32| i64::from(x);
    let rule = |scope, before, after, clocks| Rule { scope, before, after, clocks };
    let wrote = n(t.cwl) + n(t.bl);
    vec![
        // Data bus of a port, ranks alike: one burst after another.
        rule(Scope::Port, &[Read], &[Read], n(t.bl)),
        rule(Scope::Port, &[Write], &[Write], n(t.bl)),
        // Data bus of a port from one rank to another.
        rule(Scope::Others, &[Read], &[Read], n(t.bl) + n(t.cs)),
        rule(Scope::Others, &[Read], &[Write], n(t.bl) + n(t.cs).max(n(t.cl) - n(t.cwl))),
        rule(Scope::Others, &[Write], &[Read], wrote + n(t.cs) - n(t.cl)),
        // Columns of a rank.
        rule(Scope::Rank, &[Read], &[Read], n(t.ccd_s)),
        rule(Scope::Rank, &[Write], &[Write], n(t.ccd_s_wr)),
        rule(Scope::Rank, &[Read], &[Write], n(t.cl) + n(t.bl) + n(t.preamble) - n(t.cwl)),
        rule(Scope::Rank, &[Write], &[Read], wrote + n(t.wtr_s)),
        rule(Scope::Group, &[Read], &[Read], n(t.ccd_l)),
        rule(Scope::Group, &[Write], &[Write], n(t.ccd_l_wr)),
        rule(Scope::Group, &[Write], &[Read], wrote + n(t.wtr_l)),
        // Rows.
        rule(Scope::Rank, &[Activate], &[Activate], n(t.rrd_s)),
        rule(Scope::Group, &[Activate], &[Activate], n(t.rrd_l)),
        rule(Scope::Bank, &[Activate], &[Activate], n(t.rc)),
        rule(Scope::Bank, &[Activate], &[Read, Write], n(t.rcd)),
        rule(Scope::Bank, &[Activate], &[Precharge], n(t.ras)),
        rule(Scope::Bank, &[Precharge], &[Activate], n(t.rp)),
        rule(Scope::Bank, &[Read], &[Precharge], n(t.rtp)),
        rule(Scope::Bank, &[Write], &[Precharge], wrote + n(t.wr)),
        // All banks of a rank at once.
        rule(Scope::Rank, &[Activate], &[PrechargeAll], n(t.ras)),
        rule(Scope::Rank, &[Read], &[PrechargeAll], n(t.rtp)),
        rule(Scope::Rank, &[Write], &[PrechargeAll], wrote + n(t.wr)),
        rule(Scope::Rank, &[Precharge, PrechargeAll], &[Precharge, PrechargeAll], n(t.ppd)),
        rule(Scope::Rank, &[PrechargeAll], &[Activate], n(t.rp)),
        rule(Scope::Rank, &[Activate], &[Refresh], n(t.rc)),
        rule(Scope::Rank, &[Precharge, PrechargeAll], &[Refresh], n(t.rp)),
        rule(Scope::Rank, &[Refresh], &[Activate, PrechargeAll, Refresh], n(t.rfc)),
    ]
}

impl Gaps {
    pub(crate) fn of(t: &Timing) -> Self {
        let mut by = [[[0; 8]; COMMANDS.len()]; SCOPES];
        let mut raise = |scope: Scope, before: Command, after: Command, clocks: i64| {
            let gap = &mut by[scope as usize][before as usize][after as usize];
            *gap = (*gap).max(clocks.max(0) as Clock);
        };
        for rule in rules(t) {
            for &before in rule.before {
                for &after in rule.after {
                    // The chips count from the last clock of a command; the model notes its first.
                    let gap = rule.clocks + i64::from(before.cycles()) - i64::from(after.cycles());
                    raise(rule.scope, before, after, gap);
                }
            }
        }
        // Command buses: that of a port, and the pins of a rank where two ports reach it.
        for scope in [Scope::Port, Scope::Rank] {
            for before in COMMANDS {
                for after in COMMANDS {
                    raise(scope, before, after, i64::from(before.cycles()));
                }
            }
        }
        Self {
            by,
            faw: Clock::from(t.faw),
            refi: Clock::from(t.refi),
            read_latency: Clock::from(t.cl) + Clock::from(t.bl),
            write_latency: Clock::from(t.cwl) + Clock::from(t.bl),
        }
    }

    /// `command` goes out at `now`: what of this scope waits for it.
    pub(crate) fn apply(&self, scope: Scope, command: Command, now: Clock, ready: &mut Ready) {
        let gaps = &self.by[scope as usize][command as usize];
        for (ready, gap) in ready.iter_mut().zip(gaps) {
            *ready = (*ready).max(now + gap);
        }
    }
}
