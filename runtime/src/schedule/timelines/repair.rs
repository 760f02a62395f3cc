//! Moves and swaps that shorten a layer.

use super::allocation::Allocation;

/// Number of tasks up to which pairs are tried: beyond, one expert is a small part of a layer.
const PAIRS: usize = 16;
/// Maximum number of changes of one layer.
const MOST: usize = 32;

/// Repeats the move or swap that shortens the layer most, until none does.
pub(crate) fn repair(a: &mut Allocation) {
    let n = a.tasks.len();
    let later = |[gpu, cpu]: [f64; 2]| gpu.max(cpu);
    for _ in 0..MOST {
        let [gpu, cpu] = a.ends();
        let now = gpu.max(cpu);
        let mut best = (now - now * 1e-9, usize::MAX, usize::MAX);
        for one in 0..n {
            // The unit that ends later must give up a task.
            if a.on_gpu[one] != (gpu > cpu) {
                continue;
            }
            let end = later(a.ends_with(one, usize::MAX));
            if end < best.0 {
                best = (end, one, usize::MAX);
            }
            if n > PAIRS {
                continue;
            }
            for other in (0..n).filter(|&other| a.on_gpu[other] != a.on_gpu[one]) {
                let end = later(a.ends_with(one, other));
                if end < best.0 {
                    best = (end, one, other);
                }
            }
        }
        let (_, one, other) = best;
        if one == usize::MAX {
            return;
        }
        a.on_gpu[one] = !a.on_gpu[one];
        if let Some(other) = a.on_gpu.get_mut(other) {
            *other = !*other;
        }
    }
}
