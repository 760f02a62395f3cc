//! Tests of the invariants of timelines.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::perfetto;
use super::systems::{ABLATIONS, OURS, SYSTEMS, System};
use moec_costs::constants::Constants;
use moec_costs::energy::Energy;
use moec_costs::model::{Model, ModelLayer, Moe};
use moec_costs::run::{Outcome, Prompt, Scenario};
use moec_costs::timeline::{Queue, Task, TaskKind, Timeline, queues};
use moec_costs::units::{ExpertSize, Units};
use moec_device::Device;
use moec_ir::placement::Overflow;
use moec_profile::loads::{LayerLoads, Loads};
use proptest::prelude::*;
use std::fmt::Write as _;
use std::sync::LazyLock;

static DEVICE: LazyLock<Device> = LazyLock::new(|| Device::find("m2-ultra").unwrap());

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
