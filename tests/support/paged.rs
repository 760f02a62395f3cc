//! Runs of bundles whose weights stay on disk: logits to compare bit by bit, and disks that fail.

use moec_runtime::Engine;
use moec_runtime::exec::engine::LogitRows;
use moec_runtime::offload::disk;
use moec_runtime::offload::paging::Wrap;
use moec_sim::disk::fault::{Faulty, Gate, Injected};
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of tokens that are generated after the prompt.
const DECODED: usize = 24;

/// Bits of the logits of a prompt in chunks, then of greedy tokens, then of two sequences in one batch.
///
/// # Errors
/// Those of the calls.
pub fn logits(engine: &mut Engine<'_>, prompt: &[u32]) -> moec_runtime::Result<Vec<u32>> {
    let mut all = Vec::new();
    let mut best = 0;
    let keep = |all: &mut Vec<u32>, logits: &[f32]| {
        all.extend(logits.iter().map(|x| x.to_bits()));
        logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0 as u32
    };
    for slot in 0..2 {
        engine.reset(slot)?;
        engine.prefill(slot, 0, prompt, LogitRows::Last, &mut |_, l| {
            best = keep(&mut all, l);
            Ok(())
        })?;
    }
    for i in 0..DECODED {
        engine.decode(&[(0, prompt.len() + i, best)], &mut |_, l| {
            best = keep(&mut all, l);
            Ok(())
        })?;
    }
    let pair = [(0, prompt.len() + DECODED, best), (1, prompt.len(), best)];
    engine.decode(&pair, &mut |_, l| {
        keep(&mut all, l);
        Ok(())
    })?;
    Ok(all)
}

/// A wrapper of readers that lives as long as the tests, as hooks must. `plan`: the fault of each read, by its
/// number.
pub fn faulty(plan: impl Fn(u32) -> Injected + Send + Sync + Clone + 'static, gate: Gate) -> Wrap {
    let wrap = move |reader| {
        let (plan, count) = (plan.clone(), AtomicU32::new(0));
        let next = move |_: &disk::Read| plan(count.fetch_add(1, Ordering::Relaxed));
        Box::new(Faulty::new(reader, gate.clone(), next)) as Box<dyn disk::Reader>
    };
    Wrap(Box::leak(Box::new(wrap)))
}

/// A disk that fails after 40 reads, and works again after 60 more.
pub fn failing() -> Wrap {
    let plan = |n: u32| if (40..100).contains(&n) { Injected::Error(libc::EIO) } else { Injected::Nothing };
    faulty(plan, Gate::default())
}

/// Repeats the calls of [`logits`] on a [`failing`] disk until they succeed. Fails unless errors name file and
/// extent, there was one, and the logits are `want`.
pub fn recovers(engine: &mut Engine<'_>, prompt: &[u32], want: &[u32]) {
    let mut failures = 0;
    let found = loop {
        match logits(engine, prompt) {
            Ok(found) => break found,
            Err(e) => {
                let message = e.to_string();
                assert!(message.contains("experts.bin") && message.contains("extent"), "{message}");
                failures += 1;
                assert!(failures < 100, "it never recovers: {message}");
            }
        }
    };
    assert!(failures > 0 && found == want, "{failures} failures");
}
