//! The timing rules of JESD79-5, written differently from the model: for pairs of commands in a history.

use moec_dram::{Address, Clock, Command, Geometry, HOST, Issued, Timing};

use Command::*;

/// Monitor that checks the commands of a subchannel against the rules.
pub(crate) struct Monitor {
    t: Timing,
    g: Geometry,
    /// Recent commands that may still matter, without refreshes.
    recent: Vec<Issued>,
    refreshed: Vec<Vec<Clock>>,
    rows: Vec<Option<u32>>,
    activates: Vec<Vec<Clock>>,
    /// For each bus (the host's, then one per rank): end of the last burst, and its rank.
    bursts: Vec<Option<(Clock, u32)>>,
}

impl Monitor {
    pub(crate) fn new(t: Timing, g: Geometry) -> Self {
        let ranks = g.ranks as usize;
        Self {
            t,
            g,
            recent: Vec::new(),
            refreshed: vec![Vec::new(); ranks],
            rows: vec![None; ranks * 32],
            activates: vec![Vec::new(); ranks],
            bursts: vec![None; ranks + 1],
        }
    }

    fn bank(&self, at: &Address) -> usize {
        ((at.rank * self.g.groups + at.group) * self.g.banks + at.bank) as usize
    }

    pub(crate) fn row(&self, at: &Address) -> Option<u32> {
        self.rows[self.bank(at)]
    }

    pub(crate) fn any_open(&self, rank: u32) -> bool {
        let banks = (self.g.groups * self.g.banks) as usize;
        let first = rank as usize * banks;
        self.rows[first..first + banks].iter().any(Option::is_some)
    }

    pub(crate) fn refreshes(&self, rank: u32) -> &[Clock] {
        &self.refreshed[rank as usize]
    }

    /// First clock at which a command may start after the commands so far.
    pub(crate) fn earliest(&self, port: usize, c: Command, at: &Address) -> Clock {
        let mut earliest = 0;
        for p in &self.recent {
            earliest = earliest.max(p.clock + self.gap(p, port, c, at));
        }
        if let Some(&last) = self.refreshed[at.rank as usize].last() {
            // A refresh takes one clock on the command bus, an activate two; its last clock counts.
            earliest = earliest.max(last + u64::from(self.t.rfc) + 1 - cycles(c));
        }
        let activates = &self.activates[at.rank as usize];
        if c == Activate && activates.len() >= 4 {
            earliest = earliest.max(activates[activates.len() - 4] + u64::from(self.t.faw));
        }
        earliest
    }

    /// Minimum distance from the first clock of `p` to that of `c`.
    fn gap(&self, p: &Issued, port: usize, c: Command, at: &Address) -> Clock {
        let t = &self.t;
        let n = |x: u32| i64::from(x);
        let (cl, cwl, bl) = (n(t.cl), n(t.cwl), n(t.bl));
        let rank = p.at.rank == at.rank;
        let all = matches!(p.command, PrechargeAll) || matches!(c, PrechargeAll | Refresh);
        let group = rank && p.at.group == at.group;
        let bank = group && p.at.bank == at.bank;
        let rule = if rank {
            match (p.command, c) {
                (Activate, Activate) if bank => n(t.rc),
                (Activate, Activate) if group => n(t.rrd_l),
                (Activate, Activate) => n(t.rrd_s),
                (Activate, Read | Write) if bank => n(t.rcd),
                (Activate, Precharge | PrechargeAll) if bank || all => n(t.ras),
                (Activate, Refresh) => n(t.rc),
                (Read, Read) => n(if group { t.ccd_l } else { t.ccd_s }),
                (Write, Write) => n(if group { t.ccd_l_wr } else { t.ccd_s_wr }),
                (Read, Write) => cl + bl + n(t.preamble) - cwl,
                (Write, Read) => cwl + bl + n(if group { t.wtr_l } else { t.wtr_s }),
                (Read, Precharge | PrechargeAll) if bank || all => n(t.rtp),
                (Write, Precharge | PrechargeAll) if bank || all => cwl + bl + n(t.wr),
                (Precharge, Activate) if bank => n(t.rp),
                (PrechargeAll, Activate) | (Precharge | PrechargeAll, Refresh) => n(t.rp),
                (Precharge | PrechargeAll, Precharge | PrechargeAll) => n(t.ppd),
                _ => return cycles(p.command),
            }
        } else if p.port == port {
            match (p.command, c) {
                (Read, Read) => bl + n(t.cs),
                (Read, Write) => bl + n(t.cs).max(cl - cwl),
                (Write, Read) => cwl + bl + n(t.cs) - cl,
                (Write, Write) => bl,
                _ => return cycles(p.command),
            }
        } else {
            return 0;
        };
        // The standard counts from the last clock of one command to the last clock of the next.
        let first = rule + cycles(p.command) as i64 - cycles(c) as i64;
        first.max(cycles(p.command) as i64) as Clock
    }

    /// Records a command; fails if it violates a rule.
    pub(crate) fn note(&mut self, i: &Issued) -> Result<(), String> {
        let earliest = self.earliest(i.port, i.command, &i.at);
        if i.clock < earliest {
            return Err(format!("{i:?} comes before clock {earliest}"));
        }
        let bank = self.bank(&i.at);
        let rank = i.at.rank as usize;
        match i.command {
            Activate if self.rows[bank].is_some() => return Err(format!("{i:?} of an open bank")),
            Activate => {
                self.rows[bank] = Some(i.at.row);
                self.activates[rank].push(i.clock);
            }
            Precharge if self.rows[bank].is_none() => return Err(format!("{i:?} of a closed bank")),
            Precharge => self.rows[bank] = None,
            PrechargeAll => {
                let banks = self.rows.len() / self.refreshed.len();
                self.rows[rank * banks..(rank + 1) * banks].fill(None);
            }
            Read | Write if self.rows[bank] != Some(i.at.row) => {
                return Err(format!("{i:?} of a closed row"));
            }
            Read | Write => self.burst(i)?,
            Refresh if self.any_open(i.at.rank) => return Err(format!("{i:?} with rows open")),
            Refresh => self.refreshed[rank].push(i.clock),
        }
        if i.command != Refresh {
            self.recent.push(*i);
        }
        let horizon = i.clock.saturating_sub(400);
        self.recent.retain(|p| p.clock >= horizon);
        Ok(())
    }

    /// Checks that bursts do not overlap, on the bus of the port and on the pins of the rank.
    fn burst(&mut self, i: &Issued) -> Result<(), String> {
        let read = i.command == Read;
        let latency = if read { self.t.cl } else { self.t.cwl };
        let start = i.clock + 1 + u64::from(latency);
        let end = start + u64::from(self.t.bl);
        let host = (i.port == HOST).then_some(0);
        for bus in host.into_iter().chain([1 + i.at.rank as usize]) {
            if let Some((last, rank)) = self.bursts[bus] {
                // A read from another rank needs a gap; a write may follow without an idle clock.
                let idle = if rank != i.at.rank && read { self.t.cs } else { 0 };
                if start < last + u64::from(idle) {
                    return Err(format!(
                        "data of {i:?} on bus {bus} before clock {}",
                        last + u64::from(idle)
                    ));
                }
            }
            self.bursts[bus] = Some((end, i.at.rank));
        }
        Ok(())
    }
}

/// Number of clocks on the command bus.
fn cycles(c: Command) -> Clock {
    match c {
        Activate | Read | Write => 2,
        _ => 1,
    }
}
