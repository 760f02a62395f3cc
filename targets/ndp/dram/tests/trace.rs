//! Traces: parsing, errors, and the report.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod support;

use std::io::{BufReader, Read};

use moec_dram::trace::{Report, Setup, simulate};
use moec_dram::{Command, Controller, Geometry, HOST, Issued, Offer, Options, Request, Timing};
use proptest::prelude::*;
use support::{Dice, at, options, read, text, write};

fn run(trace: &str, o: Options) -> Report {
    simulate(trace.as_bytes(), &Setup::new(Timing::trimoe(), o)).expect("the trace is right")
}

fn refused(trace: &str) -> String {
    let setup = Setup::new(Timing::trimoe(), Options::default());
    simulate(trace.as_bytes(), &setup).expect_err("the trace is wrong").to_string()
}

/// Serves the requests by stepping through every clock.
fn tick_by_tick(requests: &[Request], o: Options) -> Vec<Issued> {
    let mut c = Controller::new(&Timing::trimoe(), Geometry::trimoe(), o);
    let (mut log, mut now, mut left) = (Vec::new(), 1, requests.iter().peekable());
    while left.peek().is_some() || !c.is_idle() {
        if let Some(&&request) = left.peek()
            && c.offer(HOST, request, now) != Offer::Full
        {
            left.next();
        }
        c.step(now, |i| log.push(i));
        now += 1;
    }
    log
}

#[test]
fn an_empty_trace_has_an_empty_report() {
    for trace in ["", "\n\n", "  \r\n"] {
        let report = run(trace, Options::default());
        assert_eq!(report, Report::default());
        let json = serde_json::to_string(&report).expect("json");
        assert!(json.starts_with(
            r#"{"column_commands":0,"cycles":{},"steady_cycles_per_line":null,"act":0,"pre":0,"ref":0"#
        ));
    }
}

#[test]
fn first_line_needs_an_activate_and_a_read() {
    let t = Timing::trimoe();
    let report = run("R 0 0 0 0 0 0\n", Options::default());
    // The activate goes at clock 1.
    assert_eq!(report.cycles.last(), Some(1 + u64::from(t.rcd)));
    assert_eq!((report.act, report.pre, report.r#ref, report.column_commands), (1, 0, 0, 1));
    let json = serde_json::to_value(&report).expect("json");
    assert_eq!(json["cycles"], serde_json::json!({ "1": 35, "N": 35 }));
}

#[test]
fn dram_page_contains_its_example() {
    let page = include_str!("../../../../docs/ndp-dram.md");
    let trace = "R 0 0 0 0 17 0\nR 0 0 0 0 17 1\nW 0 0 1 0 17 0\n";
    let json = serde_json::to_string(&run(trace, Options::default())).expect("json");
    assert!(page.contains(&format!("```text\n{trace}```")), "{trace}");
    assert!(page.contains(&format!("```json\n{json}\n```")), "{json}");
}

#[test]
fn report_marks_follow_the_contract() {
    let keys = |n: u32| {
        let requests: Vec<Request> = (0..n).map(|i| read(at(0, i % 8, 0, 0, i / 8 % 64))).collect();
        let report = run(&text(0, &requests), options(32, false));
        let json = serde_json::to_value(&report).expect("json");
        let keys = json["cycles"].as_object().expect("a map").keys().cloned().collect::<Vec<_>>();
        (keys.join(" "), report)
    };
    assert_eq!(keys(63).0, "1 N");
    assert_eq!(keys(64).0, "1 64 N");
    assert_eq!(keys(65).0, "1 64 N-64 N");
    assert_eq!(keys(1024).0, "1 64 1024 N-64 N");
    let (all, report) = keys(1088);
    assert_eq!((all.as_str(), report.steady_cycles_per_line), ("1 64 1024 N-64 N", None));
    let (_, report) = keys(1089);
    assert_eq!(report.steady_cycles_per_line, Some(8.0));
    let (all, report) = keys(70_000);
    assert_eq!(all, "1 64 1024 4096 16384 65536 N-64 N");
    // One line each 8 clocks, the first at 35.
    let json = serde_json::to_value(&report).expect("json");
    for (key, k) in
        [("1", 1_u64), ("64", 64), ("1024", 1024), ("65536", 65_536), ("N-64", 69_936), ("N", 70_000)]
    {
        assert_eq!(json["cycles"][key], 35 + 8 * (k - 1), "{key}");
    }
}

#[test]
fn addresses_out_of_range_are_rejected_with_their_line() {
    for (trace, expected) in [
        ("R 0 0 0 0 0 0\nR 64 0 0 0 0 0\n", "line 2: channel `64`; allowed are 0 to 63"),
        ("R 0 4 0 0 0 0\n", "line 1: rank `4`; allowed are 0 to 3"),
        ("\nW 0 0 8 0 0 0\n", "line 2: bank group `8`; allowed are 0 to 7"),
        ("W 0 0 0 4 0 0", "line 1: bank `4`; allowed are 0 to 3"),
        ("R 0 0 0 0 131072 0", "line 1: row `131072`; allowed are 0 to 131071"),
        ("R 0 0 0 0 0 128", "line 1: column `128`; allowed are 0 to 127"),
        ("R 0 0 0 0 -1 0", "line 1: row `-1`; allowed are 0 to 131071"),
        ("R 0 0 0 0 99999999999999999999 0", "line 1: row `99999999999999999999`; allowed are 0 to 131071"),
        ("R 0 0 0 0 0x1 0", "line 1: row `0x1`; allowed are 0 to 131071"),
        ("X 0 0 0 0 0 0", "line 1: `X` is not a kind of request; write R or W"),
        ("r 0 0 0 0 0 0", "line 1: `r` is not a kind of request; write R or W"),
        ("R 0 0 0 0 0", "line 1: 6 words; a request is seven: `R|W channel rank bankgroup bank row column`"),
        (
            "R 0 0 0 0 0 0 0 0",
            "line 1: 9 words; a request is seven: `R|W channel rank bankgroup bank row column`",
        ),
        (
            "R 0 0 0 0 0 0 \u{1f980}",
            "line 1: 8 words; a request is seven: `R|W channel rank bankgroup bank row column`",
        ),
    ] {
        assert_eq!(refused(trace), expected);
    }
    let long = refused(&format!("R 0 0 0 0 0 0{}", " ".repeat(10_000)));
    assert!(long.starts_with("line 1: longer than 256 bytes"), "{long}");
}

#[test]
fn non_utf8_trace_is_rejected() {
    let setup = Setup::new(Timing::trimoe(), Options::default());
    let error = simulate(&[0xff, 0xfe, 0x00, b'\n'][..], &setup).expect_err("no text");
    assert!(error.to_string().starts_with("line 1: 1 words"), "{error}");
}

#[test]
fn unreadable_trace_is_reported_with_its_line() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("the disk is gone"))
        }
    }
    let from = "R 0 0 0 0 0 0\n".as_bytes().chain(Broken);
    let setup = Setup::new(Timing::trimoe(), Options::default());
    let error = simulate(BufReader::new(from), &setup).expect_err("broken");
    assert_eq!(error.to_string(), "line 2: the trace cannot be read: the disk is gone");
}

/// A trace of two million lines is read as needed; the reader generates it.
#[test]
fn long_trace_is_streamed_not_stored() {
    struct Lines(u64, Vec<u8>);
    impl Read for Lines {
        fn read(&mut self, to: &mut [u8]) -> std::io::Result<usize> {
            if self.1.is_empty() && self.0 < 2_000_000 {
                let i = self.0;
                self.0 += 1;
                self.1 =
                    format!("R 0 0 {} {} {} {}\n", i % 8, i / 512 % 4, i / 2048, i / 8 % 64).into_bytes();
            }
            let n = self.1.len().min(to.len());
            to[..n].copy_from_slice(&self.1[..n]);
            self.1.drain(..n);
            Ok(n)
        }
    }
    let setup = Setup::new(Timing::trimoe(), options(8, false));
    let report = simulate(BufReader::new(Lines(0, Vec::new())), &setup).expect("the trace is right");
    assert_eq!(report.column_commands, 2_000_000);
    let steady = report.steady_cycles_per_line.expect("long");
    assert!((8.0..8.05).contains(&steady), "{steady}");
}

#[test]
fn reads_of_queued_writes_need_no_command() {
    // The first write opens its row and leaves the queue; the second then waits in the queue for the same
    // bank.
    let report = run("W 0 0 0 0 0 0\nW 0 0 0 0 1 0\nR 0 0 0 0 1 0\nW 0 0 0 0 1 0\n", options(32, false));
    assert_eq!((report.requests, report.column_commands), (4, 2));
    assert_eq!((report.forwarded, report.merged), (1, 1));
}

/// Channels depend on each other only by the order in which requests are offered.
#[test]
fn channels_are_independent() {
    let mut dice = Dice(9);
    let requests: Vec<Request> = (0..3000).map(|_| read(dice.line(4, 1000))).collect();
    let alone = run(&text(0, &requests), options(32, true));
    let elsewhere = run(&text(63, &requests), options(32, true));
    assert_eq!(alone, elsewhere);
    // Two channels in parallel: one request per clock keeps both busy, so the time is the same.
    let both: String = requests.iter().flat_map(|r| [text(0, &[*r]), text(5, &[*r])]).collect();
    let both = run(&both, options(32, true));
    assert_eq!((both.column_commands, both.act), (2 * alone.column_commands, 2 * alone.act));
    let (one, two) = (alone.cycles.last().expect("lines"), both.cycles.last().expect("lines"));
    assert!(two <= one + one / 100, "{one} alone, {two} together");
}

/// A channel whose first request comes late has been refreshed from the start.
#[test]
fn channel_used_late_was_refreshed_before() {
    let t = Timing::trimoe();
    let rows = 1000;
    let first: Vec<Request> = (0..rows).map(|row| read(at(0, 0, 0, row, 0))).collect();
    let trace = text(0, &first) + "R 1 0 0 0 0 0\n";
    let report = run(&trace, options(1, true));
    let periods = report.cycles.last().expect("lines") / u64::from(t.refi);
    assert!(periods >= 11, "{periods}");
    assert_eq!(report.r#ref, 2 * 4 * periods);
}

fn any_requests() -> impl Strategy<Value = Vec<Request>> {
    let line = (0..4_u32, 0..8_u32, 0..4_u32, 0..3_u32, 0..4_u32, any::<bool>());
    let one = line.prop_map(|(rank, group, bank, row, column, reads)| {
        let at = at(rank, group, bank, row, column);
        if reads { read(at) } else { write(at) }
    });
    prop::collection::vec(one, 0..2000)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Skipping idle clocks does not change the report.
    #[test]
    fn report_matches_stepping_every_clock(requests in any_requests(), queue in 1..40_usize, refresh: bool) {
        let report = run(&text(0, &requests), options(queue, refresh));
        let log = tick_by_tick(&requests, options(queue, refresh));
        let count = |c: &[Command]| log.iter().filter(|i| c.contains(&i.command)).count() as u64;
        prop_assert_eq!(report.act, count(&[Command::Activate]));
        prop_assert_eq!(report.pre, count(&[Command::Precharge, Command::PrechargeAll]));
        prop_assert_eq!(report.r#ref, count(&[Command::Refresh]));
        let columns: Vec<u64> = log.iter().filter(|i| i.command.is_column()).map(|i| i.clock).collect();
        prop_assert_eq!(report.column_commands, columns.len() as u64);
        prop_assert_eq!(report.cycles.last(), columns.last().copied());
        let before = columns.len().checked_sub(65).map(|k| columns[k]);
        prop_assert_eq!(report.cycles.before_last(), before);
        prop_assert_eq!(report.requests, requests.len() as u64);
        prop_assert_eq!(report.requests, report.column_commands + report.forwarded + report.merged);
    }

    /// No bytes make it panic.
    #[test]
    fn any_trace_text_is_read_or_rejected(text in "([RWX] ?[0-9 ]{0,30}\n?){0,20}") {
        let setup = Setup::new(Timing::trimoe(), Options::default());
        let _ = simulate(text.as_bytes(), &setup);
    }
}
