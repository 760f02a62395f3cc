//! Every dependency and barrier of a plan is needed: without it, the verifier refuses the plan, unless others
//! imply the same order.

use super::{CHUNK, compile_with};
use crate::support::{FAMILIES, MIXTURES, Setup, checkpoint, root};
use moec_ir::access::{Access, Accesses};
use moec_ir::plan::{Entry, Plan};
use moec_ir::verify;
use moec_pipeline::PIPELINE;

/// Device, formats and placement; and a step: every how many of the families with experts are tested.
const CASES: [(&str, &str, &str, usize); 15] = [
    ("x86-64-v3", "q8", "[memory]\nbudget = \"17 MiB\"\nthreads = 2\nprefetch = 2\n", 1),
    ("m2-ultra", "f16", "", 3),
    ("m2-ultra", "f16", "[placement]\nattention = \"npu\"\nexperts = \"npu\"\n", 4),
    ("snapdragon-8-gen-3", "f16", "", 3),
    ("snapdragon-8-gen-3", "f16", "[placement]\nexperts = \"npu\"\n", 4),
    ("spr-ndp", "bf16", "", 3),
    ("h100-spr-ndp", "bf16", "", 3),
    ("targets/mirror/mirror.toml", "bf16", "[placement]\nexperts = \"mirror:50%\"\n", 3),
    ("targets/mirror/mirror.toml", "bf16", "[placement]\nattention = \"gpu\"\nexperts = \"mirror:30%\"\n", 4),
    (
        "targets/mirror/mirror.toml",
        "bf16",
        "[placement]\nattention = \"mirror\"\nexperts = \"mirror:30%\"\nrest = \"mirror\"\n",
        4,
    ),
    (TIMED_MIRROR, "bf16", "[placement]\npolicy = \"moec\"\nexperts = \"mirror:30%\"\n", 4),
    ("targets/cuda/cuda.toml", "bf16", "[placement]\nattention = \"gpu\"\nexperts = \"gpu\"\n", 4),
    ("targets/cuda/cuda.toml", "bf16", "[placement]\nexperts = \"gpu:50%\"\n", 3),
    (
        "targets/cuda/cuda.toml",
        "bf16",
        "[placement]\nattention = \"gpu\"\nexperts = \"gpu:50%\"\nrest = \"gpu\"\n",
        4,
    ),
    ("targets/cuda/cuda.toml", "bf16", "[placement]\npolicy = \"moec\"\nexperts = \"gpu:30%\"\n", 4),
];

/// The mirror's device file with times of experts, which policies require.
const TIMED_MIRROR: &str = "mirror with times";

#[derive(Debug, Default)]
struct Count {
    tried: usize,
    refused: usize,
}

#[test]
fn every_dependency_and_barrier_is_necessary_or_implied() {
    let folder = tempfile::tempdir().unwrap();
    let timed = crate::hybrid::device(folder.path());
    let (mut barriers, mut own, mut between) = (Count::default(), Count::default(), Count::default());
    let native = FAMILIES.map(|family| (family, "x86-64-v3", "f32", ""));
    let others = CASES.iter().enumerate().flat_map(|(i, &(device, format, more, every))| {
        MIXTURES.into_iter().skip(i % every).step_by(every).map(move |f| (f, device, format, more))
    });
    for (family, device, format, more) in native.into_iter().chain(others) {
        let path = if device == TIMED_MIRROR { timed.clone() } else { root().join(device) };
        let name = if path.exists() { &*path.to_string_lossy() } else { device };
        let device = moec_targets::device(name).unwrap();
        let setup = Setup { format, chunk: CHUNK as usize, batch: &[1, 2], context: 128 };
        let last = PIPELINE.last().unwrap().name;
        compile_with(setup, &checkpoint(family), &device, more, last, None, &mut |c| {
            let mut plan = c.plan().unwrap().clone();
            for e in 0..plan.entries.len() {
                let here = format!("{family} on {name} {more:?} {}", plan.entries[e].kind);
                without_dependencies(&mut plan, e, &here, [&mut own, &mut between]);
                without_barriers(&mut plan, e, &here, &mut barriers);
            }
        })
        .unwrap_or_else(|e| panic!("{family} on {name} {more:?}: {e} {:?}", e.causes));
    }
    eprintln!("barriers {barriers:?}; dependencies on the own unit {own:?}; between units {between:?}");
    // A barrier exists only if nothing else orders two steps. If a step waits for several steps of another
    // unit, the last one is often enough.
    assert!(barriers.tried > 1000 && barriers.refused > barriers.tried / 2, "{barriers:?}");
    assert!(own.tried > 1000, "{own:?}");
    assert!(between.tried > 100 && between.refused > between.tried / 10, "{between:?}");
}

/// Removes each dependency in turn.
fn without_dependencies(plan: &mut Plan, e: usize, here: &str, [own, between]: [&mut Count; 2]) {
    let conflicts = conflicts(plan, &plan.entries[e]);
    for i in 0..plan.entries[e].steps.len() {
        for at in 0..plan.entries[e].steps[i].deps.len() {
            let gone = plan.entries[e].steps[i].deps.remove(at);
            let steps = &plan.entries[e].steps;
            let count = if steps[gone as usize].unit == steps[i].unit { &mut *own } else { &mut *between };
            judge(plan, e, &conflicts, count, &format!("{here}: step {i} without dependency {gone}"));
            plan.entries[e].steps[i].deps.insert(at, gone);
        }
    }
}

/// Removes each barrier in turn, from a plan in which only barriers order the steps of the CPU.
fn without_barriers(plan: &mut Plan, e: usize, here: &str, count: &mut Count) {
    let conflicts = conflicts(plan, &plan.entries[e]);
    let stated = plan.entries[e].clone();
    let units: Vec<u32> = stated.steps.iter().map(|s| s.unit).collect();
    for step in plan.entries[e].steps.iter_mut().filter(|s| s.unit == 0) {
        step.deps.retain(|&d| units[d as usize] != 0);
    }
    verify::plan(plan).unwrap();
    for i in (0..units.len()).filter(|&i| stated.steps[i].barrier) {
        plan.entries[e].steps[i].barrier = false;
        judge(plan, e, &conflicts, count, &format!("{here}: step {i} without barrier"));
        plan.entries[e].steps[i].barrier = true;
    }
    plan.entries[e] = stated;
}

/// Checks that the verifier refuses a plan exactly if two conflicting steps have no order.
fn judge(plan: &Plan, e: usize, conflicts: &[(usize, usize)], count: &mut Count, what: &str) {
    let ended = ended_before(&plan.entries[e]);
    let missing = conflicts.iter().find(|&&(a, b)| !ended[b][a]);
    let verdict = verify::plan(plan);
    assert_eq!(
        verdict.is_err(),
        missing.is_some(),
        "{what}: {verdict:?}, and the pair {missing:?} has no order"
    );
    count.tried += 1;
    count.refused += usize::from(verdict.is_err());
}

/// Pairs of steps one of which writes bytes that the other accesses.
fn conflicts(plan: &Plan, entry: &Entry) -> Vec<(usize, usize)> {
    let accesses = Accesses::new(plan);
    let touched: Vec<Vec<Access>> = entry.steps.iter().map(|s| accesses.of(entry, s)).collect();
    let conflict = |a: usize, b: usize| touched[a].iter().any(|x| touched[b].iter().any(|y| x.conflicts(y)));
    (0..touched.len()).flat_map(|b| (0..b).map(move |a| (a, b))).filter(|&(a, b)| conflict(a, b)).collect()
}

/// For each step, the steps that have ended before it begins. Computed step by step from the runtime's rules,
/// with sets in place of the verifier's clocks.
fn ended_before(entry: &Entry) -> Vec<Vec<bool>> {
    let n = entry.steps.len();
    let (mut before, mut done): (Vec<Vec<bool>>, Vec<Vec<bool>>) = (Vec::new(), Vec::new());
    let join = |to: &mut Vec<bool>, of: &[bool]| to.iter_mut().zip(of).for_each(|(a, b)| *a |= b);
    for (i, step) in entry.steps.iter().enumerate() {
        let previous = (0..i).rev().find(|&j| entry.steps[j].unit == step.unit);
        let mut own = vec![false; n];
        if let Some(j) = previous {
            // The CPU's threads execute their steps in order, and wait for each other at barriers. Another
            // unit ends each step before the next.
            join(&mut own, if step.unit != 0 || step.barrier { &done[j] } else { &before[j] });
        }
        // At the step itself, only steps of other units are waited for.
        for &d in step.deps.iter().filter(|&&d| entry.steps[d as usize].unit != step.unit) {
            join(&mut own, &done[d as usize]);
        }
        let mut all = own.clone();
        all[i] = true;
        if let Some(j) = previous {
            join(&mut all, &done[j]);
        }
        before.push(own);
        done.push(all);
    }
    before
}
