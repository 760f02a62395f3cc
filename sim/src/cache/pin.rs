//! Experts to pin: those that recorded routing used most often take a share of the cache, and a policy
//! manages the rest.

use super::replay::{fold, replay_pinned};
use super::runs::{FOLDS, FoldedRow, Row};
use super::trace::Trace;
use moec_runtime::offload::cache::{CacheError, Key, Setting};

/// Percentages of the cache that a choice tries to pin.
pub const SHARES: &[u8] = &[25, 50, 75, 90];

/// The experts that some tokens of a trace used most often, the hottest first, as many as fit into `bytes`;
/// the earlier layer and expert first among equals, without unused ones.
pub fn hottest(trace: &Trace, bytes: u64, tokens: impl Fn(usize) -> bool) -> Vec<Key> {
    let experts = trace.experts();
    let uses = counted(trace, tokens);
    let layers = experts.layers().iter().enumerate();
    let keys = layers.flat_map(|(l, of)| (0..of.experts).map(move |e| (l, e, of.bytes)));
    let mut order: Vec<_> = keys.zip(uses).filter(|(_, uses)| *uses > 0).collect();
    order.sort_by_key(|(_, uses)| std::cmp::Reverse(*uses));
    let mut left = bytes;
    let fits = |((layer, expert, bytes), _): ((usize, usize, u64), u32)| {
        left = left.checked_sub(bytes)?;
        Some(Key { layer: layer as u16, expert: expert as u16 })
    };
    order.into_iter().map_while(fits).collect()
}

/// Number of times that the tokens of a trace used each expert, `[layer][expert]`.
pub fn uses(trace: &Trace) -> Vec<u32> {
    counted(trace, |_| true)
}

fn counted(trace: &Trace, tokens: impl Fn(usize) -> bool) -> Vec<u32> {
    let experts = trace.experts();
    let mut uses = vec![0_u32; experts.count()];
    for (_, layer, step) in trace.steps().filter(|(token, ..)| tokens(*token)) {
        for &expert in step.chosen {
            uses[(experts.ids(layer).start + u32::from(expert)) as usize] += 1;
        }
    }
    uses
}

/// The hottest experts of a whole trace, in a share of the cache.
pub fn hottest_share(trace: &Trace, capacity: u64, percent: u8) -> Vec<Key> {
    hottest(trace, part(capacity, percent), |_| true)
}

/// Bytes of a share of the cache.
fn part(capacity: u64, percent: u8) -> u64 {
    (u128::from(capacity) * u128::from(percent.min(100)) / 100) as u64
}

/// Replays settings with shares of the cache pinned. A run's row is for the whole trace with its hottest
/// experts; each fold is measured with the hottest of the *other* folds.
pub(super) fn runs(
    trace: &Trace,
    capacity: u64,
    settings: &[Setting],
    shares: &[u8],
) -> Result<Vec<FoldedRow>, CacheError> {
    let mut runs = Vec::new();
    for &pinned in shares {
        let bytes = part(capacity, pinned);
        let whole = hottest(trace, bytes, |_| true);
        if whole.is_empty() {
            continue;
        }
        let without = |f: usize| hottest(trace, bytes, |token| fold(trace, FOLDS, token) != f);
        let others: Vec<_> = (0..FOLDS).map(without).collect();
        for setting in settings {
            let run = |keys: &[Key]| replay_pinned(trace, capacity, setting, keys, FOLDS);
            let row = Row { setting: setting.clone(), pinned, counters: run(&whole)?.total() };
            let folds = others.iter().enumerate().map(|(f, keys)| Ok(run(keys)?.folds[f]));
            runs.push(FoldedRow { row, folds: folds.collect::<Result<_, CacheError>>()? });
        }
    }
    Ok(runs)
}
