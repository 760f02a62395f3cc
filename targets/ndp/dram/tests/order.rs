//! The order of commands follows the timing rules and equals a naive controller's; no request starves.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod support;

use std::collections::HashMap;

use moec_dram::{
    Clock, Command, Controller, Feed, Geometry, HOST, Issued, Kind, Layout, Offer, Options, Request, TIMINGS,
    Timing, serve,
};
use proptest::prelude::*;
use support::monitor::Monitor;
use support::{Dice, at, geometry, naive, options, read, write};

/// All commands of a controller; with several feeds, the controller has private ports.
fn log(t: &Timing, g: Geometry, o: Options, feeds: &[Vec<Request>]) -> Vec<Issued> {
    let mut controller =
        if feeds.len() > 1 { Controller::with_private_ports(t, g, o) } else { Controller::new(t, g, o) };
    let feeds = feeds.iter().map(|f| -> Feed<'_> { Box::new(f.iter().copied()) }).collect();
    let mut log = Vec::new();
    let served = serve(&mut controller, feeds, Clock::MAX, |i| log.push(i));
    assert!(served.iter().all(|s| s.complete), "{served:?}");
    log
}

/// Checks that the log obeys the rules, and that every rank is refreshed in time.
fn check(t: Timing, g: Geometry, o: Options, log: &[Issued]) {
    let mut monitor = Monitor::new(t, g);
    for issued in log {
        monitor.note(issued).expect("the rules of the standard");
    }
    let end = log.last().map_or(0, |i| i.clock);
    for rank in 0..g.ranks {
        let refi = u64::from(t.refi);
        let times = monitor.refreshes(rank);
        if !o.refresh {
            assert_eq!(times.len(), 0);
            continue;
        }
        assert!(
            times.len() as u64 + 1 >= end / refi,
            "rank {rank}: {} refreshes in {end} clocks",
            times.len()
        );
        for (k, &clock) in times.iter().enumerate() {
            let due = (k as u64 + 1) * refi;
            // Requests whose rows are open go first, and each rank waits for the recovery after its last
            // write. The standard permits a refresh to be late by four periods.
            let late = due + 1000 + 150 * u64::from(rank);
            assert!((due..late).contains(&clock), "refresh {k} of rank {rank} at {clock}, due at {due}");
        }
    }
}

/// Requests for few rows, so that there are hits, conflicts, and reads of queued writes.
fn requests(rank: Option<u32>, ranks: u32, most: usize) -> impl Strategy<Value = Vec<Request>> {
    let line = (0..ranks, 0..8_u32, 0..4_u32, 0..3_u32, 0..4_u32, any::<bool>());
    let one = line.prop_map(move |(r, group, bank, row, column, reads)| {
        let at = at(rank.unwrap_or(r), group, bank, row, column);
        if reads { read(at) } else { write(at) }
    });
    prop::collection::vec(one, 0..most)
}

fn small(mut t: Timing) -> Timing {
    // Frequent refreshes, so that short streams contain some.
    (t.refi, t.rfc) = (2000, 300);
    t
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// With one port, the commands and their clocks are the naive controller's, and obey the rules.
    #[test]
    fn single_port_matches_the_naive_controller(
        requests in requests(None, 4, 400), queue in 1..40_usize, refresh: bool, set in 0..2_usize,
    ) {
        let (t, o) = (small(TIMINGS[set].1), options(queue, refresh));
        let fast = log(&t, geometry(), o, std::slice::from_ref(&requests));
        check(t, geometry(), o, &fast);
        let slow = naive::run(t, geometry(), o, std::slice::from_ref(&requests));
        prop_assert_eq!(fast, slow);
    }

    /// The host, and the private buses of two ranks.
    #[test]
    fn private_ports_match_the_naive_controller(
        host in requests(None, 2, 200), first in requests(Some(0), 1, 200), second in requests(Some(1), 1, 200),
        queue in 1..40_usize, refresh: bool,
    ) {
        let (t, o) = (small(Timing::trimoe()), options(queue, refresh));
        let g = Geometry { ranks: 2, ..geometry() };
        let feeds = [host, first, second];
        let fast = log(&t, g, o, &feeds);
        check(t, g, o, &fast);
        prop_assert_eq!(fast, naive::run(t, g, o, &feeds));
    }

    /// Every request is served once: by its own command, or by a queued write to the same line.
    #[test]
    fn every_request_is_served_once(requests in requests(None, 4, 600), queue in 1..40_usize) {
        let t = small(Timing::trimoe());
        let mut c = Controller::new(&t, geometry(), options(queue, true));
        let mut outstanding: HashMap<_, i64> = HashMap::new();
        let (mut now, mut left) = (1, requests.iter().peekable());
        while left.peek().is_some() || !c.is_idle() {
            if let Some(&&request) = left.peek() {
                match c.offer(HOST, request, now) {
                    Offer::Full => {}
                    Offer::Accepted => {
                        *outstanding.entry((request.kind, request.at)).or_default() += 1;
                        left.next();
                    }
                    Offer::Forwarded | Offer::Merged => {
                        // A write of this line waits.
                        prop_assert!(outstanding.get(&(Kind::Write, request.at)).is_some_and(|&n| n > 0));
                        left.next();
                    }
                }
            }
            c.step(now, |i| {
                let kind = match i.command {
                    Command::Read => Kind::Read,
                    Command::Write => Kind::Write,
                    _ => return,
                };
                *outstanding.entry((kind, i.at)).or_default() -= 1;
            });
            now += 1;
        }
        prop_assert!(outstanding.values().all(|&n| n == 0), "{outstanding:?}");
    }
}

/// Long streams of all kinds obey the rules, with the real refresh period.
#[test]
fn long_streams_obey_the_timing_rules() {
    for (name, t) in TIMINGS {
        let mut dice = Dice(7);
        let mixed = (0..30_000).map(|_| {
            let line = dice.line(4, 3000);
            if dice.below(3) == 0 { write(line) } else { read(line) }
        });
        let mixed: Vec<Request> = mixed.collect();
        let striped = Layout::STRIPED.requests(Kind::Write, geometry(), (0, 0), 30_000).collect();
        for feed in [mixed, striped] {
            let log = log(&t, geometry(), options(32, true), &[feed]);
            assert!(log.len() > 30_000, "{name}: {}", log.len());
            check(t, geometry(), options(32, true), &log);
        }
    }
}

/// The host and the units of all ranks at once, each with its own stream.
#[test]
fn shared_ranks_obey_the_timing_rules() {
    let t = Timing::trimoe();
    let one = Geometry { ranks: 1, ..geometry() };
    let host = Layout::STRIPED.requests(Kind::Read, geometry(), (0, 1 << 16), 10_000).collect();
    let private = (0..4).map(|rank| Layout::LOCALIZED.requests(Kind::Read, one, (rank, 0), 10_000).collect());
    let feeds: Vec<Vec<Request>> = std::iter::once(host).chain(private).collect();
    let log = log(&t, geometry(), options(32, true), &feeds);
    assert_eq!(log.iter().filter(|i| i.command.is_column()).count(), 50_000);
    check(t, geometry(), options(32, true), &log);
}

/// Two runs send the same commands at the same clocks.
#[test]
fn order_is_deterministic() {
    let mut dice = Dice(3);
    let feed: Vec<Request> = (0..5000).map(|_| read(dice.line(4, 100))).collect();
    let run = || log(&Timing::trimoe(), geometry(), options(32, true), std::slice::from_ref(&feed));
    assert_eq!(run(), run());
}

/// Repeated hits of one row do not starve a request for another row of the bank, even without refresh.
#[test]
fn no_request_starves() {
    for (refresh, bound) in [(true, 2 * 9375), (false, moec_dram::PATIENCE + 2000)] {
        let t = Timing::trimoe();
        let mut c = Controller::new(&t, geometry(), options(32, refresh));
        let other = at(0, 0, 0, 1, 0);
        let (mut served, mut hits) = (None, 0_u32);
        for now in 1..200_000 {
            // The 40th request is for the other row; all others hit.
            let hit = at(0, 0, 0, 0, hits % 64);
            let request = if hits == 40 { other } else { hit };
            if c.offer(HOST, read(request), now) == Offer::Accepted {
                hits += 1;
            }
            c.step(now, |i| {
                if i.command == Command::Read && i.at == other {
                    served = Some(i.clock);
                }
            });
        }
        let clock = served.expect("it is served");
        assert!(clock < bound + 500, "refresh {refresh}: served at {clock}");
        assert!(clock > 5000, "refresh {refresh}: hits went first until {clock}");
    }
}

/// Neither port of a rank starves the other. Consecutive reads leave no room for the turnaround that a write
/// needs.
#[test]
fn no_port_starves() {
    let t = Timing::trimoe();
    let one = Geometry { ranks: 1, ..geometry() };
    for (busy, other) in [(HOST, 1), (1, HOST)] {
        let mut c = Controller::with_private_ports(&t, one, options(32, false));
        let mut reads =
            Layout::LOCALIZED.requests(Kind::Read, Geometry { banks: 2, ..one }, (0, 0), u64::MAX);
        let (mut waiting, mut served) = (reads.next(), 0);
        for now in 1..400_000 {
            if let Some(request) = waiting
                && c.offer(busy, request, now) == Offer::Accepted
            {
                waiting = reads.next();
            }
            // Writes to banks that the reads do not use.
            if now % 1000 == 0 && now <= 4000 {
                c.offer(other, write(at(0, 0, 3, 0, (now / 1000) as u32)), now);
            }
            c.step(now, |i| served += u32::from(i.command == Command::Write));
        }
        assert_eq!(served, 4, "port {other}");
    }
}
