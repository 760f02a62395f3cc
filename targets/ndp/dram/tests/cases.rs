//! Streams whose rates are computed by hand, compared with the model's rates, as in the table of
//! `docs/ndp-dram.md`. A test checks that the page has these numbers.

mod support;

use std::collections::BTreeMap;

use moec_dram::{Channel, Path, Placement, Request, Timing, trace};
use support::{Dice, at, options, read, text, write};

/// Number of lines of a case's stream.
const LINES: u32 = 20_000;

/// Addresses that change the bank group with every line, then the column, then the bank.
fn groups(i: u32) -> moec_dram::Address {
    at(0, i % 8, i / 512 % 4, i / 2048, i / 8 % 64)
}

fn one_group(i: u32) -> moec_dram::Address {
    at(0, 0, i / 64 % 4, i / 256, i % 64)
}

/// Reads of the first two banks of each group, writes of the others.
fn in_turn(i: u32) -> Request {
    let (writes, i) = (i % 2, i / 2);
    let at = at(0, i % 8, i / 512 % 2 + 2 * writes, i / 1024, i / 8 % 64);
    if writes == 0 { read(at) } else { write(at) }
}

struct Case {
    name: &'static str,
    requests: fn() -> Vec<Request>,
    queue: usize,
    /// Clocks per line without refresh, computed by hand; and the permitted deviation, as a share.
    by_hand: fn(&Timing) -> f64,
    near: f64,
}

fn lines(f: impl FnMut(u32) -> Request) -> Vec<Request> {
    (0..LINES).map(f).collect()
}

fn random(ranks: u32) -> Vec<Request> {
    let mut dice = Dice(5);
    lines(|_| read(dice.line(ranks, 1 << 16)))
}

/// Clocks of a write: activate, write, recovery and precharge. The next activate follows at once.
fn write_cycle(t: &Timing) -> f64 {
    f64::from(t.rcd + t.cwl + t.bl + t.wr + t.rp)
}

/// The queue of 32 drains from 26 writes to 6, so there are 20 reads and 20 writes between two turnarounds of
/// the bus: from reads to writes, and back within a rank.
fn turns(t: &Timing) -> f64 {
    let to_write = t.cl + t.bl + t.preamble - t.cwl;
    let to_read = t.cwl + t.bl + t.wtr_s;
    f64::from(t.bl) + f64::from(to_write - t.bl + to_read - t.bl) / 40.0
}

const CASES: [Case; 9] = [
    Case {
        name: "reads over bank groups",
        requests: || lines(|i| read(groups(i))),
        queue: 32,
        by_hand: |t| f64::from(t.bl.max(t.ccd_s)),
        near: 0.001,
    },
    Case {
        name: "reads of one bank group",
        requests: || lines(|i| read(one_group(i))),
        queue: 32,
        by_hand: |t| f64::from(t.ccd_l),
        near: 0.002,
    },
    Case {
        name: "reads of random lines of a rank",
        requests: || random(1),
        queue: 32,
        // An activate for each line: four in tFAW, one in tRRD_S; 32 banks in tRC would be 3.5.
        by_hand: |t| f64::from(t.faw) / 4.0,
        near: 0.001,
    },
    Case {
        name: "reads of one bank, each another row",
        requests: || lines(|i| read(at(0, 0, 0, i, 0))),
        queue: 32,
        by_hand: |t| f64::from(t.rc),
        near: 0.001,
    },
    Case {
        name: "the same in turn over 8 bank groups",
        requests: || lines(|i| read(at(0, i % 8, 0, i, 0))),
        queue: 32,
        by_hand: |t| f64::from(t.rc) / 8.0,
        near: 0.001,
    },
    Case {
        name: "writes over bank groups",
        requests: || lines(|i| write(groups(i))),
        queue: 32,
        by_hand: |t| f64::from(t.bl.max(t.ccd_s_wr)),
        near: 0.001,
    },
    Case {
        name: "writes of one bank group",
        requests: || lines(|i| write(one_group(i))),
        queue: 32,
        by_hand: |t| f64::from(t.ccd_l_wr),
        near: 0.001,
    },
    Case {
        name: "writes of one bank, each another row",
        requests: || lines(|i| write(at(0, 0, 0, i, 0))),
        queue: 32,
        by_hand: write_cycle,
        near: 0.001,
    },
    Case {
        name: "reads and writes in turn over bank groups",
        requests: || lines(in_turn),
        queue: 32,
        by_hand: turns,
        near: 0.02,
    },
];

fn steady(case: &Case, t: Timing, refresh: bool) -> f64 {
    let setup = trace::Setup::new(t, options(case.queue, refresh));
    let requests = (case.requests)();
    let report = trace::simulate(text(0, &requests).as_bytes(), &setup).expect("the trace is right");
    assert_eq!(report.column_commands, u64::from(LINES));
    report.steady_cycles_per_line.expect("long enough")
}

#[test]
fn stream_times_match_hand_calculation() {
    for (name, t) in moec_dram::TIMINGS {
        for case in &CASES {
            let (measured, by_hand) = (steady(case, t, false), (case.by_hand)(&t));
            let off = (measured / by_hand - 1.0).abs();
            assert!(off <= case.near, "{name}, {}: {measured}, by hand {by_hand}", case.name);
        }
    }
}

/// Random lines over four ranks cost changes of rank, and the queue gathers lines of a rank.
#[test]
fn rank_changes_cost_time() {
    let t = Timing::trimoe();
    let case = Case { name: "", requests: || random(4), queue: 32, by_hand: |_| 0.0, near: 0.0 };
    let measured = steady(&case, t, false);
    assert!(measured > f64::from(t.bl) * 1.01, "{measured}");
    assert!(measured < f64::from(t.bl + t.cs), "{measured}");
    // With a queue of one, every line waits for the bus to change the rank.
    let in_turn = || lines(|i| read(at(i % 4, i / 4 % 8, 0, 0, i / 32 % 64)));
    let case = Case { requests: in_turn, queue: 1, ..case };
    let measured = steady(&case, t, false);
    assert!((measured - f64::from(t.bl + t.cs)).abs() < 0.2, "{measured}");
}

/// During a refresh a rank cannot be read: its rows are closed, refreshed, and opened again.
#[test]
fn refresh_costs_eleven_to_twelve_percent() {
    let t = Timing::trimoe();
    for case in &CASES[..2] {
        let share = 1.0 - steady(case, t, false) / steady(case, t, true);
        let line = (case.by_hand)(&t);
        let by_hand = (f64::from(t.rtp + t.rp + t.rfc + t.rcd) - line) / f64::from(t.refi);
        assert!((0.11..0.12).contains(&share), "{}: {share}", case.name);
        assert!(share >= by_hand - 0.002, "{}: {share}, by hand at least {by_hand}", case.name);
    }
    // Chips of 16 Gb are refreshed faster; the 11 % of a module of 128 GB apply to chips of 32 Gb.
    let of16 = t.with_density(16).expect("a density of the standard");
    let share = 1.0 - steady(&CASES[0], of16, false) / steady(&CASES[0], of16, true);
    assert!((0.08..0.09).contains(&share), "{share}");
}

/// Lines of an expert of 47 MB, read by its module's unit and by the host.
const EXPERT: u64 = 737_280;

#[test]
fn an_expert_streams_at_the_rate_of_its_buses() {
    let t = Timing::trimoe();
    let gbs = |path, refresh| {
        let channel = Channel::trimoe(t, options(32, refresh));
        channel.rate_gbs(EXPERT, channel.stream_cycles(path, EXPERT))
    };
    let bus = t.bus_gbs();
    assert!((bus - 19.2).abs() < 1e-9);
    let ndp = gbs(Path::Ndp, false);
    assert!(ndp >= 0.95 * 8.0 * bus && ndp <= 8.0 * bus, "{ndp}");
    let share = 1.0 - gbs(Path::Ndp, true) / ndp;
    assert!((0.11..0.12).contains(&share), "{share}");
    // Eight lines of a rank, then the next rank's.
    let striped = gbs(Path::Host(Placement::Striped), false);
    let by_hand = 2.0 * bus * 64.0 / f64::from(8 * t.bl + t.cs);
    assert!((striped / by_hand - 1.0).abs() < 0.001, "{striped}, by hand {by_hand}");
    let localized = gbs(Path::Host(Placement::Localized), false);
    assert!(localized > 0.95 * 2.0 * bus && localized < 2.0 * bus, "{localized}");
}

/// The page's table has these numbers: `| name | by hand | trimoe | with refresh |`.
#[test]
fn dram_page_contains_the_stream_table() {
    let page = include_str!("../../../../docs/ndp-dram.md");
    let rows: BTreeMap<&str, Vec<&str>> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| "))
        .map(|line| line.split('|').map(str::trim).collect::<Vec<_>>())
        .map(|cells| (cells[0], cells[1..].to_vec()))
        .collect();
    let t = Timing::trimoe();
    for case in &CASES {
        let row = rows.get(case.name).unwrap_or_else(|| panic!("no row for {}", case.name));
        let numbers = [(case.by_hand)(&t), steady(case, t, false), steady(case, t, true)];
        let written: Vec<String> = numbers.iter().map(|n| format!("{n:.2}")).collect();
        assert_eq!(row[..3], written, "{}", case.name);
    }
}
