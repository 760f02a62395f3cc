//! Tests that a step of the cache does not allocate.

use super::*;
use moec_ir::op::Score;
use moec_runtime::offload::cache::prefetch::{Candidate, LookaheadLayer, plan};
use moec_runtime::offload::cache::{Cache, Key, Ranking};
use moec_sim::cache::grid;
use moec_sim::cache::synthetic::trace as synthetic;
use std::alloc::{GlobalAlloc, Layout as Block, System};
use std::cell::Cell;

/// The system's allocator, with a count of allocations for each thread.
struct Counted;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator as it is; the count has no destructor.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, block: Block) -> *mut u8 {
        COUNT.with(|c| c.set(c.get() + 1));
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(block) }
    }
    unsafe fn dealloc(&self, at: *mut u8, block: Block) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(at, block) };
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

#[test]
fn cache_steps_do_not_allocate() {
    let even = vec![(0, vec![1.0; 16])];
    let trace = synthetic(&experts(3, 16, 4), &even, 0.5, 600, 4).unwrap();
    for setting in grid(true) {
        let mut cache = Cache::new(trace.experts(), 20, &setting);
        let before = COUNT.with(Cell::get);
        let mut events = 0;
        for (token, layer, step) in trace.steps() {
            cache.step(layer, step.chosen, step.ranked, |_| events += 1).unwrap();
            let key = Key { layer: layer as u16, expert: (token % 16) as u16 };
            cache.ahead(key, |_| events += 1).unwrap();
        }
        cache.reset();
        assert_eq!(COUNT.with(Cell::get) - before, 0, "{setting}");
        assert!(events > 0);
    }
}

#[test]
fn ranking_and_prefetch_planning_do_not_allocate() {
    let mut ranking = Ranking::new(64, 16);
    let logits: Vec<f32> = (0..64).map(|i| ((i * 37 % 64) as f32).sin()).collect();
    let candidates: Vec<Candidate> =
        (0..16).map(|expert| Candidate { expert, probability: 0.5, resident: false }).collect();
    let look = LookaheadLayer { start: 100.0, load: 1.0, compute: 0.1, k: 8, candidates: &candidates };
    let mut out = Vec::with_capacity(48);
    let before = COUNT.with(Cell::get);
    let first = ranking.of_logits(&logits, Score::Softmax)[0];
    plan(&[look, look, look], 0.0, 0.0, &mut out);
    assert_eq!(COUNT.with(Cell::get) - before, 0);
    assert!(first.1 > 0.0 && !out.is_empty());
}
