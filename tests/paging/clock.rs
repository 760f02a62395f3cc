//! Simulations execute the runtime's own code. A run and a simulation with the same routing and modelled
//! units make the same decisions, in the same order and at the same times. A run's decisions on a real disk
//! follow from its recorded events.

use super::*;
use moec_ir::paging::Paging as Planned;
use moec_runtime::offload::disk::Priority;
use moec_runtime::offload::paging::decider::{DeciderOptions, Decision};
use moec_sim::disk::Link;
use moec_sim::paging::{Journal, Observed, Scene, Units, simulate};

/// Sequences of a run, tokens of each prompt, tokens decoded after it.
const SEQUENCES: usize = 4;
const PROMPT: usize = 23;
const DECODE: usize = 64;

/// Units on which reading an expert of the demo model takes about as long as a layer.
#[derive(Debug)]
struct Slow;

impl Units for Slow {
    fn link(&self) -> Link {
        Link { latency: Duration::from_micros(80), bytes_per_second: 0.9e9, depth: 8 }
    }

    fn between(&self, layer: usize, rows: usize) -> Duration {
        Duration::from_micros(150 + 7 * layer as u64 + 11 * rows as u64)
    }

    fn expert(&self, _: usize, part: usize, rows: f64) -> Duration {
        Duration::from_micros(30 - 10 * part as u64).mul_f64(rows.max(1.0))
    }
}

/// Maximum number of lines of a journal.
const LINES: usize = 1 << 22;

/// Prompts, then arbitrary tokens one by one, so that routing changes.
fn read(engine: &mut Engine<'_>) {
    let id = |i: usize| (i * i * 37 + i * 11) as u32 % 2048;
    for sequence in 0..SEQUENCES {
        engine.reset(0).unwrap();
        let prompt: Vec<u32> = (0..PROMPT).map(|i| id(i + 1000 * sequence)).collect();
        engine.prefill(0, 0, &prompt, LogitRows::Last, &mut |_, _| Ok(())).unwrap();
        for i in 0..DECODE {
            engine.decode(&[(0, PROMPT + i, id(i + 50 * sequence))], &mut |_, _| Ok(())).unwrap();
        }
    }
}

/// Runs a case; returns its journal, and the plan that it followed.
fn live(
    bundle: &Bundle,
    case: Case,
    units: Option<&'static dyn Units>,
) -> (&'static Journal, Planned, Report) {
    let mut plan: Plan = bundle.plan.clone();
    let own = plan.paging.as_mut().unwrap();
    (own.frames, own.staging, own.block_bytes) = (case.frames, case.staging, BLOCK);
    case.policy.clone_into(&mut own.policy);
    let planned = own.clone();
    let unit = bundle.unit().unwrap();
    let program = Program::new(plan, &|s| unit.resolve(s)).unwrap();
    let observed: &'static Observed = Box::leak(Box::new(Observed::new(LINES, units)));
    let decider_options = Paging { hooks: Some(observed), ..paging(case, None) };
    let options =
        Options { threads: Some(case.threads), paging: Some(decider_options), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    read(&mut engine);
    let report = engine.paging().unwrap();
    (&observed.journal, planned, report)
}

fn matrices(bundle: &Bundle) -> Vec<[u64; 2]> {
    let bytes = |s: u32| bundle.plan.segments[s as usize].matrix_bytes().unwrap();
    bundle.plan.paging.as_ref().unwrap().layers.iter().map(|l| [bytes(l.gate_up), bytes(l.down)]).collect()
}

fn recorded(folder: &Path) -> Bundle {
    let text = ferris().join("eval/calibration.txt");
    let memory = format!(
        "budget = \"1 GiB\"\nprefetch = 3\n[calibrate]\ntokens = 1024\ntext = [\"{}\"]",
        text.display()
    );
    Bundle::open(&build(&ferris(), folder, &memory, "bf16")).unwrap()
}

const CASES: [Case; 7] = [
    Case { frames: 40, staging: 7, policy: "lru", ahead: 3, threads: 1, reader: Choice::Threads },
    Case { frames: 40, staging: 7, policy: "lru", ahead: 0, threads: 2, reader: Choice::Threads },
    Case {
        frames: 40,
        staging: 7,
        policy: "lfu half_life=64 bypass=1",
        ahead: 3,
        threads: 3,
        reader: Choice::Auto,
    },
    Case {
        frames: 30,
        staging: 4,
        policy: "lfu half_life=64 bypass=1",
        ahead: 0,
        threads: 1,
        reader: Choice::Threads,
    },
    Case {
        frames: 30,
        staging: 6,
        policy: "mrs alpha=0.2 depth=2 bypass=1",
        ahead: 2,
        threads: 2,
        reader: Choice::Threads,
    },
    // In a prompt, more experts bypass the cache than there are staging frames, so each is read in two parts.
    Case {
        frames: 3,
        staging: 2,
        policy: "lfu half_life=0 bypass=1",
        ahead: 1,
        threads: 2,
        reader: Choice::Threads,
    },
    Case { frames: 12, staging: 5, policy: "lru per-layer", ahead: 3, threads: 3, reader: Choice::Threads },
];

#[test]
fn run_and_simulation_make_the_same_cache_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = recorded(folder.path());
    let matrices = matrices(&bundle);
    let mut seen = [0_usize; 6];
    for case in CASES {
        // In virtual time all threads together are one unit.
        let case = Case { threads: 1, ..case };
        let (ran, planned, report) = live(&bundle, case, Some(&Slow));
        let simulated = Journal::new(LINES);
        let scene = Scene {
            paging: &planned,
            elsewhere: &[],
            matrices: &matrices,
            ahead: case.ahead,
            preload: true,
            journal: Some(&simulated),
        };
        let requests = ran.requests();
        assert_eq!(requests.len(), matrices.len() * SEQUENCES * (PROMPT.div_ceil(20) + DECODE), "{case:?}");
        let out = simulate(scene, &Slow, &requests, &mut |_, _, _| {}).unwrap();
        let (live, model) = (ran.lines(), simulated.lines());
        let same = live.iter().zip(&model).take_while(|(a, b)| a == b).count();
        assert!(
            live == model,
            "{case:?}: {} and {} lines, apart from line {same} on: {:?} and {:?}",
            live.len(),
            model.len(),
            live.get(same),
            model.get(same)
        );
        assert_eq!((out.counts.hits, out.counts.misses), (report.hits, report.misses));
        assert_eq!((out.stalled, out.disk.bytes), (report.stalled, report.disk.bytes));
        for decision in simulated.decisions() {
            seen[match decision {
                Decision::Load { priority: Priority::Demand, .. } => 0,
                Decision::Load { .. } => 1,
                Decision::Evict { reading: false, .. } => 2,
                Decision::Evict { reading: true, .. } => 3,
                Decision::Enqueue { bypasses: true, .. } => 4,
                Decision::RaisePriority { .. } => 5,
                _ => continue,
            }] += 1;
        }
    }
    assert!(
        seen.iter().all(|&n| n > 50),
        "loads, reads ahead, evictions, reads given up, passing, hurried: {seen:?}"
    );
}

#[test]
fn replayed_journal_gives_the_same_decisions() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = recorded(folder.path());
    let bytes: Vec<u64> = matrices(&bundle).iter().map(|[a, b]| a.next_multiple_of(4096) + b).collect();
    for case in CASES {
        let (journal, planned, _) = live(&bundle, case, None);
        let decisions = journal.decisions();
        assert!(decisions.iter().any(|d| matches!(d, Decision::Load { .. })));
        let decider_options =
            DeciderOptions { bytes: &bytes, elsewhere: &[], ahead: case.ahead, preload: true };
        assert!(journal.again(&planned, decider_options).unwrap() == decisions, "{case:?}");
    }
}
