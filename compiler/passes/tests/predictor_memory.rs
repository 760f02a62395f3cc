//! Tests that training predictors takes as much memory as is computed in advance, which is linear in the
//! sides of an expert's matrices.
#![allow(unsafe_code, clippy::unwrap_used, reason = "counting allocations takes an allocator")]

use moec_passes::predict::low_rank::{bytes, factors};
use moec_passes::predict::training_bytes;
use moec_profile::inputs::SecondMoments;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes that are allocated now, and their peak.
static NOW: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

struct Counted;

// SAFETY: every call is passed to the system's allocator unchanged; only counters change.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        MOST.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the contract of this call is that of `System`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the contract of this call is that of `System`.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counted = Counted;

/// The only test of this program, since another one could allocate at the same time.
#[test]
fn predictor_training_stays_within_its_memory_estimate() {
    for (inter, hidden, rank) in [(2000, 40, 8), (40, 2000, 8), (1500, 100, 32), (64, 48, 16)] {
        let gates: Vec<f32> =
            (0..inter * hidden).map(|i| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5).collect();
        let moments = SecondMoments::diagonal(&vec![1.0; hidden]);
        let before = NOW.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        let found = factors(&gates, hidden, &moments, rank).unwrap();
        let peak = MOST.load(Ordering::Relaxed) - before;
        assert_eq!(found.left.len(), rank * inter);
        let limit = bytes(inter, hidden, rank);
        assert!(peak <= limit, "{inter} × {hidden}, rank {rank}: {peak} bytes, not {limit}");
    }
    // For an expert of Mixtral's size, training once took memory for the square of its 14 336 neurons, 1.6
    // GB. Now a third is enough, gates included, and doubling the neurons doubles it.
    let mixtral = training_bytes(14336, 4096, 256);
    assert!(mixtral < 600_000_000, "{mixtral}");
    let twice = training_bytes(2 * 14336, 4096, 256);
    assert!(twice < 2 * mixtral + mixtral / 10, "{twice} of {mixtral}");
}
