//! Tests that decoding does not allocate.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::*;
use moec_runtime::{Engine, LogitRows, Options};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The system's allocator, with a count of allocations.
struct Counted;

static COUNT: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: promised by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) };
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

#[test]
fn decoding_does_not_allocate() {
    let (dir, program) = (bundle(), program(&ENTRIES));
    // Mapped weights: threads that copy weights would allocate whenever a core is idle, and every thread is
    // counted.
    let options = Options { threads: Some(2), lazy: true, ..Options::default() };
    let mut engine = Engine::open(&program, dir.path(), options).unwrap();
    for slot in 0..SLOTS as u32 {
        engine.prefill(slot, 0, &[1, 2, 3], LogitRows::None, &mut |_, _| Ok(())).unwrap();
    }
    let mut rows = 0;
    let mut step = |at: usize| {
        let batch: [_; SLOTS] = std::array::from_fn(|slot| (slot as u32, at, 7));
        engine
            .decode(&batch, &mut |_, _| {
                rows += 1;
                Ok(())
            })
            .unwrap();
    };
    step(3);
    let before = COUNT.load(Ordering::Relaxed);
    for at in 4..20 {
        step(at);
    }
    assert_eq!(COUNT.load(Ordering::Relaxed) - before, 0);
    assert_eq!(rows, 17 * SLOTS);
}
