//! Times of experts, compared with the unit's rates.

use moec_dram::{Kind, Layout, Options, Path, Timing};
use moec_ir::{Activation, Glu};
use moec_ndp::allocation::{DimmConfig, DramLayout, RowAllocator};
use moec_ndp::emit::{Output, emit};
use moec_ndp::image::Shape;
use moec_ndp::machine::{Bus, GFLOPS, Program, channel, time, times};
use moec_ndp_isa::Place;

/// DeepSeek-V2's, 47.2 MB.
const DEEPSEEK: Shape = Shape { hidden: 5120, inner: 1536, glu: Glu::Gated(Activation::Silu), bias: false };

fn program(shape: Shape, slots: u32) -> Program {
    let dimm_config = DimmConfig::trimoe();
    let mut allocator = RowAllocator::new(dimm_config, shape, slots).expect("an allocator");
    let rows =
        allocator.allocate(crate::common::EXPERT, DramLayout::Localized(0)).expect("room").rows.clone();
    let stream = emit(&shape, &dimm_config, 0, rows, allocator.boxes(), Output::Slots).expect("a stream");
    Program::new(stream).expect("it is verified")
}

fn bytes(shape: &Shape) -> f64 {
    shape.image().expect("an image").lines as f64 * 64.0
}

#[test]
fn single_token_runs_at_the_internal_bandwidth() {
    let (timing, bus) = (Timing::trimoe(), Bus::trimoe());
    let best = 153.6 * (1.0 - f64::from(timing.rfc) / f64::from(timing.refi));
    for slots in [1, 512] {
        let report = time(&program(DEEPSEEK, slots), &bus, 1);
        let rate = bytes(&DEEPSEEK) / report.ns;
        assert!(rate > 0.95 * best && rate <= best, "{rate} GB/s of {best}");
    }
}

/// The combined bus, and a whole expert, take as long as the cycle-level model of the private buses.
#[test]
fn expert_time_matches_the_cycle_level_model() {
    let channel = channel(&DimmConfig::trimoe(), Timing::trimoe(), Options::default());
    let (lines, bus) = ((bytes(&DEEPSEEK) / 64.0) as u64, Bus::trimoe());
    let simulated = channel.timing.microseconds(channel.stream_cycles(Path::Ndp, lines)) * 1000.0;
    let read = lines as f64 * bus.read_ns;
    assert!((read / simulated - 1.0).abs() < 0.005, "{read} ns by the bus, {simulated} clock by clock");
    let computed = time(&program(DEEPSEEK, 512), &bus, 1).ns;
    assert!(
        (computed / simulated - 1.0).abs() < 0.01,
        "{computed} ns for a token, {simulated} clock by clock"
    );
}

/// The DRAM model reads lines in the order in which the layout places them.
#[test]
fn cycle_level_model_visits_localized_lines_in_order() {
    let dimm_config = DimmConfig::trimoe();
    let geometry = channel(&dimm_config, Timing::trimoe(), Options::default()).geometry;
    let buses = dimm_config.geometry.subchannels * dimm_config.geometry.ranks;
    for bus in 0..buses {
        let (subchannel, rank) =
            (bus % dimm_config.geometry.subchannels, bus / dimm_config.geometry.subchannels);
        let one = moec_dram::Geometry { ranks: 1, ..geometry };
        let requests = Layout::LOCALIZED.requests(Kind::Read, one, (rank, 7), 5000);
        for (number, request) in (0..).zip(requests) {
            let line = number * u64::from(buses) + u64::from(bus);
            let place =
                moec_ndp_isa::Layout::Localized.place(&dimm_config.geometry, 7, line).expect("a place");
            let at = request.at;
            let read = (subchannel, at.rank, at.group, at.bank, at.row, at.column);
            let Place { subchannel, rank, bank_group, bank, row, column } = place;
            assert_eq!((subchannel, rank, bank_group, bank, row, column), read, "line {line}");
        }
    }
}

#[test]
fn several_tokens_are_bound_by_the_multipliers() {
    let (program, bus) = (program(DEEPSEEK, 512), Bus::trimoe());
    let weights = bytes(&DEEPSEEK) / 2.0;
    for tokens in [2, 3, 8, 17, 64] {
        let ns = time(&program, &bus, tokens).ns;
        let least = f64::from(tokens) * weights * 2.0 / GFLOPS;
        assert!(ns >= least && ns < 1.03 * least, "{tokens} tokens: {ns} ns, {least} at 256 GFLOPS");
    }
}

/// With one bandwidth and no latency, the time of a token is the bytes read divided by the bandwidth. At the
/// ridge point, the 16 clocks of each token take as long as the read of a tile.
#[test]
fn plain_bus_time_follows_the_roofline() {
    let program = program(DEEPSEEK, 512);
    let one = |gbs: f64| time(&program, &Bus::plain(gbs), 1).ns;
    assert!((one(153.6) * 153.6 / bytes(&DEEPSEEK) - 1.0).abs() < 0.005);
    // 4 KB in 16 ns.
    let compute = bytes(&DEEPSEEK) / 256.0;
    assert!((one(512.0) / compute - 1.0).abs() < 0.01, "{} of {compute}", one(512.0));
    assert!((one(128.0) / compute - 2.0).abs() < 0.01, "{} of {compute}", one(128.0));
}

#[test]
fn costs_grow_with_tokens() {
    let (program, bus) = (program(DEEPSEEK, 512), Bus::trimoe());
    let table = times(&program, &bus, &[0, 1, 2, 4, 8, 16, 32, 512]);
    assert_eq!(table[0], (0, 0.0));
    assert!(table.windows(2).all(|pair| pair[0].1 < pair[1].1), "{table:?}");
}

#[test]
fn ndp_reads_are_counted() {
    let program = program(DEEPSEEK, 512);
    let report = time(&program, &Bus::plain(100.0), 3);
    let image = DEEPSEEK.image().expect("an image");
    assert_eq!(report.tiles, (image.gate_up.weights() + image.down.weights()) / 2048);
    assert_eq!(report.read, image.lines + 3 * DEEPSEEK.input_lines());
    assert_eq!(report.written, 3 * DEEPSEEK.output_lines());
    assert_eq!(report.flops, 6 * (image.gate_up.weights() + image.down.weights()));
    let [mem, gemv, act, link] = report.busy;
    assert!(mem > 0.0 && act > 0.0 && link == 0.0 && gemv <= report.ns);
}
