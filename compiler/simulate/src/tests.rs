//! Tests of the invariants of timelines.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::perfetto;
use super::systems::{ABLATIONS, BASE, OURS, SYSTEMS, System};
use moec_costs::constants::Constants;
use moec_costs::energy::Energy;
use moec_costs::model::{Model, ModelLayer, Moe};
use moec_costs::request::prompt;
use moec_costs::run::{Outcome, Prompt, Scenario};
use moec_costs::timeline::{Queue, Span, Task, TaskKind, Timeline, queues, queues_of};
use moec_costs::units::{ExpertSize, Units};
use moec_device::{Device, Figure, MatmulTime, UnitKind};
use moec_ir::placement::Overflow;
use moec_profile::decoding::CALLS;
use moec_profile::loads::{LayerLoads, Loads};
use proptest::prelude::*;
use std::fmt::Write as _;
use std::sync::LazyLock;

/// A Mac whose NPU runs one graph at a time.
static DEVICE: LazyLock<Device> = LazyLock::new(|| {
    let mut device = Device::find("m2-ultra").unwrap();
    device.units.iter_mut().for_each(|unit| unit.queues = None);
    device
});

fn units() -> Units<'static> {
    Units::of(&DEVICE).unwrap()
}

/// Numbers of an expert of PhiMoE.
const EXPERT: u64 = 3 * 4096 * 6400;

const CONSTANTS: Constants = Constants {
    copy_gb_per_s: 10.0,
    attention_on_cpu: 0.5,
    load_gb_per_s: 5.0,
    load_on_cpu: 0.25,
    hosting: 0.25,
};

fn task(queue: Queue, us: f64, lag_us: f64, after: Vec<usize>) -> Task {
    let what = TaskKind::Experts;
    let queue = queue.of(&units());
    Task { queue, kind: what, part: what, us, lag_us, after, layer: 0, call: 0, index: None, rows: 1 }
}

/// Checks the invariants of a timeline.
fn check(line: &Timeline) {
    assert_eq!(line.tasks.len(), line.spans.len());
    for (queue, name) in line.queues.iter().enumerate() {
        let mut own: Vec<_> =
            line.tasks.iter().zip(&line.spans).filter(|(t, _)| t.queue == queue).map(|(_, s)| *s).collect();
        own.sort_by(|a, b| a.start.total_cmp(&b.start).then(a.end.total_cmp(&b.end)));
        assert!(own.windows(2).all(|w| w[0].end <= w[1].start), "{name} does two things at once");
    }
    for (task, span) in line.tasks.iter().zip(&line.spans) {
        assert!((span.end - span.start - task.us).abs() < 1e-6 && span.end <= line.wall_us);
        for &before in &task.after {
            assert!(line.spans[before].end + line.tasks[before].lag_us <= span.start);
        }
    }
}

fn tasks() -> impl Strategy<Value = Vec<Task>> {
    let one = (
        any::<bool>(),
        0.0..9.0_f64,
        0.0..2.0_f64,
        prop::collection::vec(any::<prop::sample::Index>(), 0..3),
    );
    prop::collection::vec(one, 0..40).prop_map(|all| {
        let of = |(i, (npu, us, lag, after)): (usize, (bool, f64, f64, Vec<prop::sample::Index>))| {
            let mut after: Vec<usize> =
                if i == 0 { Vec::new() } else { after.iter().map(|a| a.index(i)).collect() };
            after.sort_unstable();
            after.dedup();
            task(if npu { Queue::Npu } else { Queue::Cpu }, us, lag, after)
        };
        all.into_iter().enumerate().map(of).collect()
    })
}

proptest! {
    #[test]
    fn queues_run_one_task_at_a_time_after_its_dependencies(tasks in tasks()) {
        let line = Timeline::of(tasks.clone(), queues(&DEVICE));
        check(&line);
        prop_assert_eq!(&line, &Timeline::of(tasks, queues(&DEVICE)));
        // No unit idles while a task is ready: a task that starts late starts when another task of its queue
        // ends.
        let ready = |t: &Task| t.after.iter().map(|&b| line.spans[b].end + line.tasks[b].lag_us).fold(0.0, f64::max);
        for (t, s) in line.tasks.iter().zip(&line.spans).filter(|(t, s)| s.start > ready(t)) {
            let before = line.tasks.iter().zip(&line.spans).filter(|(o, _)| o.queue == t.queue);
            prop_assert!(before.clone().any(|(_, o)| o.end == s.start), "idle before {s:?}");
        }
    }

    #[test]
    fn timelines_are_consistent_for_any_loads_and_system(
        loads in prop::collection::vec(prop::collection::vec(prop::collection::vec(0_u32..64, 6), 2), 1..3),
        decode in prop::collection::vec(prop::collection::vec(prop::collection::vec(0_u32..2, 6), 2), 0..3),
        spill in any::<bool>(),
    ) {
        let overflow = if spill { Overflow::Spill } else { Overflow::Prune };
        for system in SYSTEMS.iter().chain(&ABLATIONS) {
            let prompt = Prompt { chunk: 64, chunks: loads.clone(), decode: decode.clone() };
            let out = small(6, system, &prompt, overflow);
            check(&out.timeline);
            let e = out.energy;
            prop_assert!((e.total_j() - (e.cpu_j + e.npu_j + e.memory_j)).abs() < 1e-12);
            prop_assert!(out.cpu_us <= out.timeline.wall_us && out.cpu_us >= out.timeline.busy_us(Queue::Cpu.of(&units())));
            let units = Units::of(&DEVICE).unwrap();
            let again = Energy::of(&out.timeline, out.cpu_us, &units);
            prop_assert_eq!(again, e);
            // Every pair is computed, or dropped if that is permitted.
            let pairs: u32 = loads.iter().chain(&decode).flatten().flatten().sum();
            prop_assert_eq!(out.routed, u64::from(pairs));
            prop_assert!(!spill || out.dropped == 0);
            prop_assert!(out.padding <= out.rows);
        }
    }
}

/// A model of two layers with experts as large as PhiMoE's; the first half of them is popular.
fn model(experts: usize) -> Model {
    let size = ExpertSize { weights: EXPERT, bytes: 2 * EXPERT };
    let layer = |layer| ModelLayer {
        layer,
        attention: 1 << 20,
        mixer: 0,
        per_position: 1 << 10,
        router: 1 << 12,
        dense: 0,
        experts: Some(Moe { count: experts, k: 2, size }),
    };
    Model { name: "small".to_owned(), hidden: 256, head: 1 << 16, layers: vec![layer(0), layer(1)] }
}

fn calibration(experts: usize) -> Loads {
    let sample: Vec<u32> = (0..experts).map(|e| if e < experts.div_ceil(2) { 40 } else { 2 }).collect();
    let layer = |layer| LayerLoads {
        layer,
        k: 2,
        tokens: 64 * 8,
        chosen: sample.iter().map(|&n| u64::from(n) * 8).collect(),
        samples: vec![sample.clone(); 8],
    };
    Loads { chunk: 64, origin: "a test".to_owned(), layers: vec![layer(0), layer(1)] }
}

fn small(experts: usize, system: &System, prompt: &Prompt, overflow: Overflow) -> Outcome {
    let (model, calibration, units) = (model(experts), calibration(experts), Units::of(&DEVICE).unwrap());
    let scene = Scenario {
        model: &model,
        units: &units,
        constants: CONSTANTS,
        calibration: &calibration,
        coverage: 0.95,
        overflow,
    };
    scene.run(&system.place(&scene).unwrap(), prompt)
}

/// Text of a timeline, one line per task.
fn lines(line: &Timeline) -> String {
    let mut text = String::new();
    for (task, span) in line.tasks.iter().zip(&line.spans) {
        let index = task.index.map_or_else(String::new, |i| format!(" {i}"));
        let _ = writeln!(
            text,
            "{:>10.3} {:>10.3}  {}  call {} layer {}  {}/{}{index}  {} rows",
            span.start,
            span.end,
            line.queues[task.queue],
            task.call,
            task.layer,
            task.part.name(),
            task.kind.name(),
            task.rows,
        );
    }
    let _ = writeln!(text, "{:>10.3} the end", line.wall_us);
    text
}

#[test]
fn a_small_timeline() {
    let prompt = Prompt {
        chunk: 64,
        chunks: vec![vec![vec![50, 40, 3, 0], vec![60, 44, 0, 2]]],
        decode: vec![vec![vec![1, 1, 0, 0]; 2]],
    };
    let out = small(4, &OURS, &prompt, Overflow::Prune);
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/snapshots"));
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        insta::assert_snapshot!("simulate-small@timeline", lines(&out.timeline));
        let trace = perfetto::trace(&[("small", &out.timeline)]);
        insta::assert_snapshot!("simulate-small@perfetto", format!("{trace:#}"));
    });
    // Cold neurons run while the NPU computes.
    let spans = |queue: Queue| {
        let of = move |t: &Task| t.kind == TaskKind::Experts && t.queue == queue.of(&units());
        out.timeline.tasks.iter().zip(&out.timeline.spans).filter(move |(t, _)| of(t)).map(|(_, s)| *s)
    };
    assert!(spans(Queue::Cpu).any(|c| spans(Queue::Npu).any(|n| c.start < n.end && n.start < c.end)));
    // Capacities of 48 rows: 40 tokens, as in the calibration, fit; here 2 and 12 rows do not.
    assert_eq!((out.routed, out.dropped), (203, 2 + 12));
}

#[test]
fn systems_handle_zero_loads_and_one_expert() {
    for system in SYSTEMS.iter().chain(&ABLATIONS) {
        let none = Prompt { chunk: 64, chunks: vec![vec![vec![0; 4]; 2]], decode: Vec::new() };
        let out = small(4, system, &none, Overflow::Prune);
        check(&out.timeline);
        assert!(
            out.timeline.wall_us.is_finite() && out.timeline.sum_us(TaskKind::Experts) == 0.0,
            "{}",
            system.name
        );
        let nothing = small(4, system, &Prompt::default(), Overflow::Prune);
        assert_eq!((nothing.timeline.wall_us, nothing.energy.total_j()), (0.0, 0.0), "{}", system.name);
        assert_eq!(nothing.joules_per_token(), 0.0);
        let one = Prompt { chunk: 64, chunks: vec![vec![vec![64]; 2]], decode: Vec::new() };
        let out = small(1, system, &one, Overflow::Spill);
        check(&out.timeline);
        assert!(out.timeline.sum_us(TaskKind::Experts) > 0.0 && out.dropped == 0, "{}", system.name);
    }
}

/// Experts of decoding on the NPU: the timeline has their launches, and its time is the one that the placement
/// was priced with.
#[test]
fn simulated_decoding_takes_the_time_that_placed_it() {
    let mut device = Device::find("m2-ultra").unwrap();
    let npu = device.unit_of(UnitKind::Npu).unwrap();
    device.units[npu].queues = None;
    for us in [0.0, 3000.0] {
        // Launches of that cost, and graphs that take the reading of their weights.
        let figure = || Some(Figure { value: us, source: "a test".into() });
        let unit = &mut device.units[npu];
        (unit.dispatch_cost_us, unit.sync_cost_us) = (figure(), figure());
        let row = |rows| MatmulTime { rows, weights: EXPERT, ms: 0.2, source: "a test".into() };
        unit.matmul = vec![row(1), row(256)];
        let units = Units::of(&device).unwrap();
        let (model, calibration) = (model(6), calibration(6));
        let scene = Scenario {
            model: &model,
            units: &units,
            constants: CONSTANTS,
            calibration: &calibration,
            coverage: 0.95,
            overflow: Overflow::Spill,
        };
        let placed = System { name: "decode", ..OURS }.place(&scene).unwrap();
        let prompt = prompt(&calibration, 64, 1, CALLS);
        let line = scene.run(&placed, &prompt).timeline;
        check(&line);
        let (cpu, npu) = (units.cpu_index(), units.npu_index());
        let groups = || placed.tables.iter().flatten().flat_map(|t| &t.groups);
        let priced = |unit: u32| {
            let own = groups().map(|g| &g.decode[0]).filter(|d| d.unit == unit);
            own.map(|d| f64::from(d.cost_us[unit as usize])).sum::<f64>() * f64::from(CALLS)
        };
        let decoded = || line.tasks.iter().filter(|t| t.call > 0 && t.part == TaskKind::Experts);
        let sum = |tasks: &mut dyn Iterator<Item = &Task>| tasks.map(|t| t.us + t.lag_us).sum::<f64>();
        let launches = || decoded().filter(|t| t.kind == TaskKind::Launch);
        let on_npu = sum(&mut decoded().filter(|t| t.queue == npu as usize)) + sum(&mut launches());
        let on_cpu = sum(&mut decoded().filter(|t| t.queue == cpu as usize && t.kind == TaskKind::Experts));
        for (found, priced) in [(on_npu, priced(npu)), (on_cpu, priced(cpu))] {
            assert!((found - priced).abs() <= priced * 1e-5, "{us}: {found} µs, priced {priced}");
        }
        let there = groups().filter(|g| g.decode[0].unit == npu).count();
        assert_eq!((launches().count() > 0, there > 0), (us == 0.0, us == 0.0), "{:?}", placed.tables);
    }
}

/// Launches of a layer are divided among the queues of the NPU, at the rates of the device file.
#[test]
fn launches_of_a_layer_overlap_on_several_queues() {
    let loads = Prompt { chunk: 64, chunks: vec![vec![vec![40; 8]; 2]], decode: Vec::new() };
    let run = |queues: u32| {
        let mut device = Device::find("m2-ultra").unwrap();
        let npu = device.unit_of(UnitKind::Npu).unwrap();
        device.units[npu].queues = Some(Figure { value: queues.into(), source: "a test".into() });
        let units = Units::of(&device).unwrap();
        let (model, calibration) = (model(8), calibration(8));
        let scene = Scenario {
            model: &model,
            units: &units,
            constants: CONSTANTS,
            calibration: &calibration,
            coverage: 0.95,
            overflow: Overflow::Spill,
        };
        // One graph for each expert: eight launches in a layer.
        let outcome = scene.run(&BASE.place(&scene).unwrap(), &loads);
        check(&outcome.timeline);
        let ends = &outcome.timeline.spans;
        let at = |time: f64| {
            let of = |(t, s): (&Task, &Span)| {
                t.kind == TaskKind::Experts && t.queue != 0 && s.start <= time && time < s.end
            };
            outcome.timeline.tasks.iter().zip(ends).filter(|&(t, s)| of((t, s))).count()
        };
        let most = ends.iter().map(|s| at(s.start)).max().unwrap();
        let expected = queues_of(&device, npu).len();
        assert_eq!((expected, outcome.timeline.queues.len()), (queues as usize, 1 + queues as usize));
        (most, outcome.timeline.part_us(TaskKind::Experts), outcome.npu_us, outcome.timeline.wall_us)
    };
    let (one, two, four) = (run(1), run(2), run(4));
    assert_eq!([one.0, two.0, four.0], [1, 2, 4]);
    // The speedups of the paper's table, except that the CPU has more to do than launching.
    for (parallel, speedup) in [(two, 1.64), (four, 1.9)] {
        let found = one.1 / parallel.1;
        assert!((found / speedup - 1.0).abs() < 0.05, "{found}, expected {speedup}");
        assert!(parallel.2 < one.2, "the unit works for a shorter time");
    }
}
