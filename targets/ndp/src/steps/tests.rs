//! Simulated times follow from rates and byte counts.

use super::*;
use moec_dram::{Options, Timing};
use moec_runtime::schedule::scheduled::*;
use moec_runtime::schedule::{Costs, NearCosts, Solver, System as Policy, TRIMOE, Table, trimoe};
use moec_sim::systems::{EN_KTRANSFORMERS, EN_KTRANSFORMERS_HELD, KLOTSKI};

/// Bytes of an expert (32 MB).
const BYTES: f64 = 32e6;
const EXPERTS: usize = 8;
const DIMMS: usize = 4;

fn table(us: f64) -> Table {
    Table::new(vec![(1, us), (2, 2.0 * us)]).expect("tokens ascend")
}

/// A machine of 4 DIMMs on 2 channels, at peak rates.
fn system() -> System {
    System { channels: 2, all_dimms: DIMMS, ..System::trimoe(Rates::peak(), BYTES as u64) }
}

fn setup(system: Policy) -> Setup {
    let costs = Costs {
        gpu: Some(table(10.0).into()),
        cpu: table(5.0).into(),
        near: Some(NearCosts {
            table: table(100.0),
            internal_us: BYTES * 1e-3 / 153.6,
            link_us: BYTES * 1e-3 / 25.0,
        }),
        bring_us: BYTES * 1e-3 / 64.0,
        first_bring_us: 0.0,
        launch_us: 0.0,
        striped_us: BYTES * 1e-3 / 76.8,
        localized_us: BYTES * 1e-3 / 38.4,
        row_us: 4096.0 * 1e-3 / 64.0,
    };
    let window = Window { pcie_us: 0.0, link_us: 0.0 };
    Setup { system, costs, layers: 1, experts: EXPERTS, memories: DIMMS, frames: 0, window }
}

const GREEDY: Policy = trimoe("greedy", Solver::Cheapest, false);
const CPU_ONLY: Policy = EN_KTRANSFORMERS_HELD;

fn placed(setup: Setup, layouts: [Layout; EXPERTS]) -> Simulator {
    let frames = setup.frames;
    let mut simulator = Simulator::new(setup, system()).expect("a machine");
    let places = layouts.map(|layout| Place { layout, cached: false }).to_vec();
    let placement = Placement::new(places, DIMMS, frames).expect("a placement");
    simulator.scheduler_mut().place(0, &placement).expect("a layer");
    simulator.record();
    simulator
}

fn layer(simulator: &mut Simulator, loads: [u32; EXPERTS]) -> LayerReport {
    simulator.layer(0, &loads, Before::default(), Rows::default()).expect("a step")
}

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() < 1e-3 * expected.max(1.0), "{found} for {expected}");
}

#[test]
fn striped_expert_on_cpu_uses_all_channels() {
    let mut simulator = placed(setup(CPU_ONLY), [Layout::Striped; EXPERTS]);
    let report = layer(&mut simulator, [1, 1, 0, 0, 0, 0, 0, 0]);
    // Two experts of 32 MB at 76.8 GB/s; the prediction is the same, since nothing else reads.
    let each = BYTES / 76.8 * 1e-3;
    close(report.experts_us, 2.0 * each);
    close(report.predicted_us, report.experts_us);
    close(report.busy.cpu, 2.0 * each);
    close(report.busy.cpu_calc, 10.0);
    report.busy.channel.iter().for_each(|&c| close(c, 2.0 * each));
    // If arithmetic takes longer, the memory idles.
    let report = layer(&mut simulator, [200, 0, 0, 0, 0, 0, 0, 0]);
    close(report.experts_us, 1000.0);
}

#[test]
fn ndp_units_work_in_parallel() {
    let local = |d: usize| Layout::Local((d % DIMMS) as u16);
    let mut simulator = placed(setup(GREEDY), std::array::from_fn(local));
    let report = layer(&mut simulator, [1, 1, 1, 1, 1, 0, 0, 0]);
    // DIMM 0 has two experts. Each is read at 153.6 GB/s, which takes longer than the 100 µs of arithmetic.
    let each = BYTES / 153.6 * 1e-3;
    close(report.experts_us, 2.0 * each);
    let expected = [2.0, 1.0, 1.0, 1.0].map(|n| n * each);
    for (found, expected) in report.busy.ndp.iter().zip(expected) {
        close(*found, expected);
    }
    close(report.error(), 0.0);
}

#[test]
fn cpu_and_pcie_contend_for_the_channels() {
    // Arithmetic is short on both, so transfers limit both. Greedy gives everything to the CPU, Best some
    // experts to the GPU.
    let best = EN_KTRANSFORMERS;
    let mut simulator = placed(setup(best), [Layout::Striped; EXPERTS]);
    let report = layer(&mut simulator, [1; EXPERTS]);
    let fetched = report.busy.pcie * 64.0 / BYTES * 1e3;
    assert!(fetched.round() >= 1.0 && (fetched - fetched.round()).abs() < 1e-6, "{fetched}");
    // All eight experts are read over the two channels, by either unit: that is the lower bound. The
    // prediction is below it.
    let least = EXPERTS as f64 * BYTES / 76.8 * 1e-3;
    assert!(report.experts_us > 0.999 * least, "{} for {least}", report.experts_us);
    assert!(report.error() < -0.2, "{}", report.error());
}

#[test]
fn host_reads_slow_memory_bound_ndp_units() {
    let mut layouts = [Layout::Local(0); EXPERTS];
    layouts[7] = Layout::Striped;
    let mut simulator = placed(setup(GREEDY), layouts);
    let alone = layer(&mut simulator, [1, 1, 1, 0, 0, 0, 0, 0]).experts_us;
    let both = layer(&mut simulator, [1, 1, 1, 0, 0, 0, 0, 1]);
    // The host reads a quarter of the striped expert from DIMM 0, byte for byte the same cost.
    close(both.experts_us, alone + BYTES / 4.0 / 153.6 * 1e-3);
    // A unit that is limited by arithmetic is not slowed down.
    let alone = layer(&mut simulator, [3, 0, 0, 0, 0, 0, 0, 0]).experts_us;
    close(alone, 300.0);
    let both = layer(&mut simulator, [3, 0, 0, 0, 0, 0, 0, 1]);
    close(both.busy.ndp[0], 300.0);
}

#[test]
fn weights_travel_while_others_are_calculated() {
    let mut simulator = placed(setup(KLOTSKI), [Layout::Striped; EXPERTS]);
    let report = layer(&mut simulator, [3; EXPERTS]);
    // 30 µs of arithmetic overlap with the 500 µs of each transfer, except for the last.
    close(report.experts_us, EXPERTS as f64 * BYTES / 64.0 * 1e-3 + 30.0);
    close(report.busy.gpu, 240.0);
    close(report.busy.gpu_domain, report.experts_us);
}

#[test]
fn rows_are_copied_around_host_computation() {
    let mut simulator = placed(setup(CPU_ONLY), [Layout::Striped; EXPERTS]);
    let rows = Rows { to_host: 6.4e6, to_gpu: 3.2e6, prompt: false };
    let before = Before { calc_us: 70.0, host_bytes: 0.0 };
    let report = simulator.layer(0, &[1, 0, 0, 0, 0, 0, 0, 0], before, rows).expect("a step");
    close(report.before_us, 70.0);
    close(report.rows_us, 50.0);
    close(report.experts_us, 100.0 + BYTES / 76.8 * 1e-3);
    let report = simulator.layer(0, &[0; EXPERTS], before, rows).expect("a step");
    assert_eq!((report.experts_us, report.rows_us), (0.0, 0.0));
}

#[test]
fn a_cache_on_the_host_is_read_over_pcie() {
    let mut simulator = placed(setup(CPU_ONLY), [Layout::Striped; EXPERTS]);
    let before = Before { calc_us: 70.0, host_bytes: 64e6 };
    let report = simulator.layer(0, &[0; EXPERTS], before, Rows::default()).expect("a step");
    close(report.before_us, 1000.0);
}

#[test]
fn attention_runs_on_the_cpu_without_a_gpu() {
    let mut setup = setup(GREEDY);
    setup.costs.gpu = None;
    let mut simulator = placed(setup, [Layout::Striped; EXPERTS]);
    let before = Before { calc_us: 70.0, host_bytes: 76.8e6 };
    let rows = Rows { to_host: 1e6, to_gpu: 1e6, prompt: false };
    let report = simulator.layer(0, &[1, 0, 0, 0, 0, 0, 0, 0], before, rows).expect("a step");
    close(report.before_us, 1000.0);
    assert_eq!(report.rows_us, 0.0);
    assert!(simulator.events().iter().all(|e| e.track == Track::Cpu), "{:?}", simulator.events());
}

/// The simulated GPU computes all experts of a prompt; those of the other layer lose their frames.
#[test]
fn prompts_are_streamed_to_the_gpu() {
    let policy = Policy { prefill: Solver::Gpu, ..GREEDY };
    let setup = Setup { layers: 2, frames: 4, ..setup(policy) };
    let mut simulator = Simulator::new(setup, system()).expect("a machine");
    simulator.record();
    let rows = Rows { prompt: true, ..Rows::default() };
    for layer in 0..2 {
        simulator.layer(layer, &[9; EXPERTS], Before::default(), rows).expect("a step");
        let cached = |layer| simulator.scheduler().placement(layer).expect("a layer").cached();
        assert_eq!((cached(layer), cached(1 - layer)), (4, 0));
    }
    let computed: Vec<&Event> = simulator.events().iter().filter(|e| e.name.contains("token")).collect();
    assert_eq!(computed.len(), 2 * EXPERTS);
    assert!(computed.iter().all(|e| e.track == Track::Gpu), "{computed:?}");
}

/// Four layers whose popular experts alternate, so that many experts move.
fn turning(moves_take_time: bool, link_gbs: f64) -> (Vec<StepReport>, Simulator) {
    let window = Window { pcie_us: 2000.0, link_us: 2000.0 };
    let policy = TRIMOE;
    let setup = Setup { layers: 4, frames: 1, window, ..setup(policy) };
    let system = System { link_gbs, moves_take_time, ..system() };
    let mut simulator = Simulator::new(setup, system).expect("a machine");
    simulator.record();
    let loads = |step: usize| -> Vec<Vec<u32>> {
        let load = |e: usize| if (e + 2 * (step / 3)).is_multiple_of(EXPERTS) { 90 } else { (e % 3) as u32 };
        vec![(0..EXPERTS).map(load).collect(); 4]
    };
    let step =
        |s: usize| simulator.step(&loads(s), Before { calc_us: 50.0, host_bytes: 0.0 }, Rows::default());
    let reports = (0..12).map(step).collect::<Result<_, _>>().expect("steps");
    (reports, simulator)
}

#[test]
fn simulated_experts_run_once_without_overlap_per_unit() {
    let (reports, simulator) = turning(true, 25.0);
    let events = simulator.events();
    let computed = events.iter().filter(|e| e.name.contains("token")).count();
    let active: usize = (0..12)
        .map(|s| (0..EXPERTS).filter(|e| (e + 2 * (s / 3)).is_multiple_of(EXPERTS) || e % 3 > 0).count() * 4)
        .sum();
    assert_eq!(computed, active);
    assert!(reports.iter().flat_map(|r| &r.layers).any(|l| l.moves > 0));
    assert!(events.iter().any(|e| matches!(e.track, Track::Link(_))));
    let mut units: Vec<&Event> = events.iter().filter(|e| !e.name.contains(" of expert ")).collect();
    units.sort_by(|a, b| a.track.cmp(&b.track).then(a.begin_us.total_cmp(&b.begin_us)));
    for pair in units.windows(2).filter(|p| p[0].track == p[1].track) {
        assert!(pair[0].end_us <= pair[1].begin_us + 1e-6, "{pair:?}");
    }
    assert!(events.iter().all(|e| e.begin_us <= e.end_us));
    // Nothing is busy for longer than the layer takes.
    for layer in reports.iter().flat_map(|r| &r.layers) {
        let b = &layer.busy;
        let all = b.memory.iter().chain(&b.link).chain(&b.channel).chain(&b.ndp);
        for busy in all.chain([&b.gpu, &b.gpu_domain, &b.cpu, &b.pcie]) {
            assert!(*busy <= layer.experts_us * (1.0 + 1e-6) + 1e-6, "{busy} of {}", layer.experts_us);
        }
    }
}

#[test]
fn layers_wait_for_experts_in_transfer() {
    let total = |r: &[StepReport]| r.iter().map(StepReport::total_us).sum::<f64>();
    let stalled = |r: &[StepReport]| r.iter().flat_map(|s| &s.layers).map(|l| l.stalled_us).sum::<f64>();
    let (free, _) = turning(false, 25.0);
    let (fast, _) = turning(true, 25.0);
    let (slow, _) = turning(true, 0.5);
    assert_eq!(stalled(&free), 0.0);
    assert!(total(&free) <= total(&fast) + 1e-6 && total(&fast) < total(&slow));
    assert!(stalled(&slow) > 0.0);
}

#[test]
fn the_same_steps_take_the_same_time() {
    let (a, first) = turning(true, 25.0);
    let (b, second) = turning(true, 25.0);
    assert_eq!((a, first.events()), (b, second.events()));
}

#[test]
fn invalid_simulator_inputs_are_reported() {
    let none = System { channels: 0, ..system() };
    assert!(matches!(Simulator::new(setup(GREEDY), none), Err(StepsError::Count { what: "channels", .. })));
    let still = System { pcie_gbs: 0.0, ..system() };
    let error = Simulator::new(setup(GREEDY), still).expect_err("no rate");
    assert_eq!(error.to_string(), "the rate of PCIe must be a finite number above 0, not 0");
    let mut rates = Rates::peak();
    rates.striped_weight = f64::NAN;
    assert!(Simulator::new(setup(GREEDY), System { rates, ..system() }).is_err());
    let mut simulator = Simulator::new(setup(GREEDY), system()).expect("a machine");
    let before = Before { calc_us: -1.0, host_bytes: 0.0 };
    assert!(simulator.layer(0, &[0; EXPERTS], before, Rows::default()).is_err());
    assert!(simulator.layer(0, &[0; 3], Before::default(), Rows::default()).is_err());
    assert!(matches!(
        simulator.step(&[], Before::default(), Rows::default()),
        Err(StepsError::Layers { found: 0, layers: 1 })
    ));
}

#[test]
fn measured_rates_are_below_bus_peaks() {
    let (measured, peak) = (Rates::measure(Timing::trimoe(), Options::default()), Rates::peak());
    let part = |found: f64, peak: f64| (0.8..1.0).contains(&(found / peak));
    assert!(part(measured.private_gbs, peak.private_gbs), "{measured:?}");
    assert!(part(measured.striped_gbs, peak.striped_gbs), "{measured:?}");
    assert!(part(measured.localized_gbs, peak.localized_gbs), "{measured:?}");
    // A read by the host costs its own time and that of the rows that it closes. Equation 6 taken literally
    // would give 4.
    for weight in [measured.striped_weight, measured.localized_weight] {
        assert!((1.0..4.0).contains(&weight), "{measured:?}");
    }
}
