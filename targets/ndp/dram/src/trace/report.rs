//! Report of a trace.
#![expect(clippy::cast_possible_truncation, reason = "indices of queues and ranks, which are short")]

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use crate::Clock;

/// Commands at both ends of a trace that the steady rate leaves out: the first ones, and the last ones.
const FIRST: u64 = 1024;
const LAST: usize = 64;

/// Clocks at which some reads and writes were issued, by their number in order of issue from 1.
///
/// Noted are the 1st, the 64th, the 1024th and every fourfold of that, the last one, and the one that 64
/// others follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IssueClocks {
    issued: u64,
    at: Vec<(u64, Clock)>,
    /// The clocks of the last 65, command `k` at `k % 65`.
    recent: [Clock; LAST + 1],
    next: u64,
}

impl Default for IssueClocks {
    fn default() -> Self {
        Self { issued: 0, at: Vec::new(), recent: [0; LAST + 1], next: 1 }
    }
}

impl IssueClocks {
    /// One more read or write was issued.
    pub(super) fn note(&mut self, clock: Clock) {
        self.issued += 1;
        self.recent[(self.issued % self.recent.len() as u64) as usize] = clock;
        if self.issued == self.next {
            self.at.push((self.issued, clock));
            self.next = match self.next {
                1 => LAST as u64,
                64 => FIRST,
                n => n.saturating_mul(4),
            };
        }
    }

    /// Reads and writes that were issued.
    pub fn issued(&self) -> u64 {
        self.issued
    }

    /// The clock of the last one.
    pub fn last(&self) -> Option<Clock> {
        let k = self.issued % self.recent.len() as u64;
        (self.issued > 0).then(|| self.recent[k as usize])
    }

    /// The clock of the one that 64 follow.
    pub fn before_last(&self) -> Option<Clock> {
        let k = self.issued.checked_sub(LAST as u64).filter(|&k| k > 0)? % self.recent.len() as u64;
        Some(self.recent[k as usize])
    }

    /// Clocks for each line between the 1024th and the 64th from the end; `None` if there are none between.
    pub fn steady(&self) -> Option<f64> {
        let lines = self.issued.checked_sub(FIRST + LAST as u64).filter(|&n| n > 0)?;
        let &(_, first) = self.at.iter().find(|(k, _)| *k == FIRST)?;
        Some((self.before_last()? - first) as f64 / lines as f64)
    }
}

/// Written as a map: the numbers below N − 64, then `"N-64"`, then `"N"`.
impl Serialize for IssueClocks {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        for (k, clock) in &self.at {
            map.serialize_entry(&k.to_string(), clock)?;
        }
        if let Some(clock) = self.before_last() {
            map.serialize_entry("N-64", &clock)?;
        }
        if let Some(clock) = self.last() {
            map.serialize_entry("N", &clock)?;
        }
        map.end()
    }
}

/// Result of a trace on a memory. All counts are over all channels that the trace names.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Reads and writes that were issued, N.
    pub column_commands: u64,
    /// The clocks at which some of them were issued.
    pub cycles: IssueClocks,
    /// `(c[N − 64] − c[1024]) / (N − 64 − 1024)`; null for fewer than 1089 commands.
    pub steady_cycles_per_line: Option<f64>,
    /// Activates.
    pub act: u64,
    /// Precharges, of one bank and of all banks of a rank alike.
    pub pre: u64,
    /// Refreshes.
    pub r#ref: u64,
    /// Requests of the trace.
    pub requests: u64,
    /// Reads that were answered from the write queue and needed no command.
    pub forwarded: u64,
    /// Writes that took the place of one that waited, and needed no command.
    pub merged: u64,
}
