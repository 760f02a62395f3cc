//! Common parts of the tests: independent versions of the standard's rules, and request streams.
#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod monitor;
pub(crate) mod naive;

use moec_dram::{Address, Geometry, Kind, Options, Request};

/// One subchannel of the reference module.
pub(crate) fn geometry() -> Geometry {
    Geometry { columns: 64, ..Geometry::trimoe() }
}

pub(crate) fn options(queue: usize, refresh: bool) -> Options {
    Options { queue, refresh }
}

pub(crate) fn at(rank: u32, group: u32, bank: u32, row: u32, column: u32) -> Address {
    Address { rank, group, bank, row, column }
}

pub(crate) fn read(at: Address) -> Request {
    Request { kind: Kind::Read, at }
}

pub(crate) fn write(at: Address) -> Request {
    Request { kind: Kind::Write, at }
}

/// Reproducible pseudorandom numbers (xorshift64*).
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        ((self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % u64::from(n)) as u32
    }

    /// A line of one of the first `ranks` ranks and the first `rows` rows.
    pub(crate) fn line(&mut self, ranks: u32, rows: u32) -> Address {
        at(self.below(ranks), self.below(8), self.below(4), self.below(rows), self.below(64))
    }
}

/// The requests as a trace, all for one channel.
pub(crate) fn text(channel: usize, requests: &[Request]) -> String {
    let line = |r: &Request| {
        let kind = if r.kind == Kind::Read { 'R' } else { 'W' };
        let a = r.at;
        format!("{kind} {channel} {} {} {} {} {}\n", a.rank, a.group, a.bank, a.row, a.column)
    };
    requests.iter().map(line).collect()
}
