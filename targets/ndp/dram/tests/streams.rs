//! Streams of experts: extrapolated times compared with simulated ones, private buses, host and units
//! together.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]

mod support;

use moec_dram::{
    Bus, Channel, Clock, Controller, Feed, Geometry, HOST, Kind, Layout, Path, Placement, Request, Timing,
    serve, trace,
};
use support::{geometry, options, text};

const PATHS: [Path; 3] = [Path::Ndp, Path::Host(Placement::Striped), Path::Host(Placement::Localized)];

/// Simulates the first subchannel of a channel to the end; returns the clocks of the host and of the first
/// module's unit.
fn simulated(channel: &Channel, placement: Placement, host: u64, ndp: u64, busy: u32) -> (Clock, Clock) {
    let g = channel.geometry;
    let all = Geometry { ranks: g.ranks * channel.dimms, ..g };
    let one = Geometry { ranks: 1, ..g };
    let half = g.rows / 2;
    let mut feeds: Vec<Feed<'_>> = vec![match placement {
        Placement::Striped => {
            Box::new(Layout::STRIPED.requests(Kind::Read, all, (0, half), host.div_ceil(2)))
        }
        Placement::Localized => {
            Box::new(Layout::LOCALIZED.requests(Kind::Read, g, (0, half), host.div_ceil(2)))
        }
    }];
    for rank in 0..busy * g.ranks {
        // Lines i of the module with i mod 8 twice the rank's number are on this bus.
        let lines = (0..ndp).filter(|i| i % 8 == u64::from(rank % g.ranks) * 2).count() as u64;
        feeds.push(Box::new(Layout::LOCALIZED.requests(Kind::Read, one, (rank, 0), lines)));
    }
    let mut c = Controller::with_private_ports(&channel.timing, all, channel.options);
    let served = serve(&mut c, feeds, Clock::MAX, |_| {});
    assert!(served.iter().all(|s| s.complete));
    let unit = served[1..].iter().take(g.ranks as usize).map(|s| s.finished).max().unwrap_or(0);
    (served[HOST].finished, unit)
}

#[test]
fn short_streams_are_simulated_exactly() {
    for refresh in [false, true] {
        let channel = Channel::trimoe(Timing::trimoe(), options(32, refresh));
        for lines in [0, 1, 7, 8, 9, 1000, 30_001] {
            let (_, ndp) = simulated(&channel, Placement::Localized, 0, lines, 1);
            assert_eq!(channel.stream_cycles(Path::Ndp, lines), ndp, "{lines}");
            for placement in [Placement::Striped, Placement::Localized] {
                let (host, _) = simulated(&channel, placement, lines, 0, 0);
                assert_eq!(
                    channel.stream_cycles(Path::Host(placement), lines),
                    host,
                    "{placement:?} {lines}"
                );
            }
        }
    }
}

/// The bound that the documentation of [`Channel::stream_cycles`] states.
#[test]
fn long_streams_are_within_half_a_percent() {
    for (name, timing) in moec_dram::TIMINGS {
        for refresh in [false, true] {
            let channel = Channel::trimoe(timing, options(32, refresh));
            for path in PATHS {
                for lines in [200_000_u64, 737_280] {
                    let (host, ndp) = match path {
                        Path::Ndp => simulated(&channel, Placement::Localized, 0, lines, 1),
                        Path::Host(placement) => simulated(&channel, placement, lines, 0, 0),
                    };
                    let whole = host.max(ndp) as f64;
                    let fast = channel.stream_cycles(path, lines) as f64;
                    let off = (fast / whole - 1.0).abs();
                    assert!(off < 0.005, "{name} {refresh} {path:?} {lines}: {fast}, simulated {whole}");
                }
            }
        }
    }
}

/// The bound that the documentation of [`Channel::together`] states.
#[test]
fn concurrent_streams_are_within_five_percent() {
    let channel = Channel::trimoe(Timing::trimoe(), options(32, true));
    for placement in [Placement::Striped, Placement::Localized] {
        for (host, ndp, busy) in
            [(92_160, 737_280, 1), (368_640, 368_640, 2), (600_000, 600_000, 1), (5000, 5000, 2)]
        {
            let fast = channel.together(placement, host, ndp, busy);
            let (whole_host, whole_ndp) = simulated(&channel, placement, host, ndp, busy);
            for (fast, whole) in [(fast.host, whole_host), (fast.ndp, whole_ndp)] {
                let off = (fast as f64 / whole as f64 - 1.0).abs();
                assert!(off < 0.05, "{placement:?} {host} {ndp} {busy}: {fast}, simulated {whole}");
            }
        }
    }
}

/// Each side slows the other down; the host loses less, since it has priority.
#[test]
fn concurrent_streams_take_longer_than_each_alone() {
    let channel = Channel::trimoe(Timing::trimoe(), options(32, true));
    for placement in [Placement::Striped, Placement::Localized] {
        let both = channel.together(placement, 737_280, 737_280, 2);
        assert_eq!(both.host_alone, channel.stream_cycles(Path::Host(placement), 737_280));
        assert_eq!(both.ndp_alone, channel.stream_cycles(Path::Ndp, 737_280));
        let (host, ndp) = (both.host_slowdown(), both.ndp_slowdown());
        assert!((1.0..1.05).contains(&host), "{placement:?}: {host}");
        // At least the host's share of the columns of a rank.
        let share = if placement == Placement::Striped { 8.0 } else { 4.0 };
        assert!(ndp > 1.0 + 0.9 / share && ndp < 2.5, "{placement:?}: {ndp}");
    }
}

/// Eight private buses take as long as eight channels of a trace with the same lines; without refresh, to the
/// clock. A trace offers one request per clock, and otherwise the last line arrives at the same clock.
#[test]
fn private_buses_match_channels_of_a_trace() {
    let t = Timing::trimoe();
    let lines = 40_000;
    let g = Geometry { ranks: 1, ..geometry() };
    let one: Vec<Request> = Layout::LOCALIZED.requests(Kind::Read, g, (0, 0), lines / 8).collect();
    let trace: String = one.iter().flat_map(|r| (0..8).map(|bus| text(bus, &[*r]))).collect();
    let setup = trace::Setup::new(t, options(32, false));
    let report = trace::simulate(trace.as_bytes(), &setup).expect("the trace is right");
    let last = report.cycles.last().expect("lines");
    let channel = Channel::trimoe(t, options(32, false));
    // From the read command to the end of its data.
    let unit = channel.stream_cycles(Path::Ndp, lines) - u64::from(t.cl + t.bl);
    assert!(last.abs_diff(unit) <= 64, "trace {last}, unit {unit}");
    let steady = report.steady_cycles_per_line.expect("long enough");
    assert!((1.0..1.002).contains(&steady), "{steady}");
}

/// In row-major order most banks are idle: a shallow queue contains only one or two banks.
#[test]
fn placement_along_rows_is_slow() {
    let t = Timing::trimoe();
    let one = Geometry { ranks: 1, ..geometry() };
    let gbs = |queue: usize| {
        let mut c = Controller::new(&t, one, options(queue, false));
        let feed = Layout::ROW_MAJOR.requests(Kind::Read, one, (0, 0), 50_000);
        let served = serve(&mut c, vec![Box::new(feed)], Clock::MAX, |_| {});
        8.0 * 64.0 * 50_000.0 / t.microseconds(served[0].finished) / 1000.0
    };
    let shallow = gbs(8);
    // tCCD_L per line; the next bank of the group is opened while the last lines of a row are read.
    let by_hand = 8.0 * t.bus_gbs() * f64::from(t.bl) / f64::from(t.ccd_l);
    assert!((shallow / by_hand - 1.0).abs() < 0.05, "{shallow}, by hand {by_hand}");
    assert!(gbs(128) > 1.2 * shallow);
}

/// A bus with all requests at once is as fast as a controller; requested tile by tile, two tiles ahead, it is
/// nearly so.
#[test]
fn bus_requested_over_time_matches_the_controller() {
    let t = Timing::trimoe();
    let one = Geometry { ranks: 1, ..geometry() };
    let requests: Vec<Request> = Layout::LOCALIZED.requests(Kind::Read, one, (0, 0), 40_000).collect();
    let mut c = Controller::new(&t, one, options(32, true));
    let whole = serve(&mut c, vec![Box::new(requests.iter().copied())], Clock::MAX, |_| {})[0].finished;

    let mut bus = Bus::new(&t, geometry(), options(32, true));
    for &request in &requests {
        bus.request(0, request);
    }
    assert_eq!(bus.arrived(40_000), Some(whole));
    assert_eq!(bus.arrived(40_001), None);

    // Tiles of 8 lines; when a tile has arrived, the tile after the next is requested.
    let mut bus = Bus::new(&t, geometry(), options(32, true));
    let mut tiles = requests.chunks(8);
    let (mut there, mut lines) = (0, 0);
    for _ in 0..3 {
        tiles.next().into_iter().flatten().for_each(|&r| bus.request(0, r));
    }
    while lines < 40_000 {
        lines += 8;
        let clock = bus.arrived(lines).expect("it has been requested");
        assert!(clock > there);
        there = clock;
        tiles.next().into_iter().flatten().for_each(|&r| bus.request(there, r));
    }
    assert!(there.abs_diff(whole) < whole / 50, "{there}, all at once {whole}");
    // A late request is served late.
    bus.request(there + 1_000_000, requests[0]);
    let late = bus.arrived(40_001).expect("it has been requested");
    assert!(late > there + 1_000_000 && late < there + 1_003_000, "{late}");
}
