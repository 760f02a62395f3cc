//! Choice of resident experts under two budgets, the host's memory and the GPU's, by replays of recorded
//! routing.

use crate::cache::{Level, Levels, Moved, SHARES, Trace, TraceError, grid, hottest};
use moec_runtime::offload::cache::{CacheError, Key, Setting};

/// Time of a use of an expert, by its level, and of a transfer in the background, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prices {
    /// On the GPU.
    pub gpu: f64,
    /// By the CPU, from the host's memory.
    pub host: f64,
    /// Additional time of a read from disk.
    pub disk: f64,
    /// The link's time that a transfer takes from others.
    pub transfer: f64,
}

/// Uses by level, and transfers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Uses {
    /// On the GPU.
    pub gpu: u64,
    /// From the host's memory.
    pub host: u64,
    /// From the disk.
    pub disk: u64,
    /// Copies to the GPU.
    pub transfers: u64,
}

impl Uses {
    /// Microseconds of all of them.
    pub fn us(&self, prices: &Prices) -> f64 {
        let part = |n: u64, price: f64| n as f64 * price;
        part(self.gpu, prices.gpu)
            + part(self.host, prices.host)
            + part(self.disk, prices.disk + prices.host)
            + part(self.transfers, prices.transfer)
    }
}

/// The choice, with its results.
#[derive(Clone, Debug, PartialEq)]
pub struct Resident {
    /// Experts pinned on the GPU, the hottest first.
    pub pinned: Vec<Key>,
    /// Percent of the GPU's budget that they take.
    pub share: u8,
    /// Policy for the rest of the GPU's memory, and for the host's.
    pub setting: Setting,
    /// Result on the half of the trace that it was not chosen on.
    pub held_out: Uses,
    /// The same for the hottest experts alone, without any change.
    pub held_out_fixed: Uses,
}

/// Chooses the resident experts for `host` and `gpu` bytes. It tries shares of the GPU's budget pinned to the
/// hottest experts, up to all of it. For the rest, and for the host, it tries every setting of the cache's
/// grid that shares bytes over layers. Each is replayed on the first half of the trace, where every miss of
/// the GPU is transferred. The one with the least time is taken; of equals the first, with the larger share.
///
/// # Errors
/// [`TraceError::TooShort`] for a trace of fewer than two tokens.
pub fn resident(trace: &Trace, [host, gpu]: [u64; 2], prices: &Prices) -> Result<Resident, TraceError> {
    if trace.tokens() < 2 {
        return Err(TraceError::TooShort { found: trace.tokens(), least: 2 });
    }
    let half = trace.tokens() / 2;
    let (seen, rest) = (trace.part(0..half), trace.part(half..trace.tokens()));
    let gpu = gpu.min(host);
    let part = |share: u8| (u128::from(gpu) * u128::from(share) / 100) as u64;
    let lru = Setting::lru();
    let fixed = hottest(&seen, gpu, |_| true);
    let mut best =
        (replay(&seen, [host, gpu], [&lru, &lru], &fixed)?.us(prices), 100, lru.clone(), fixed.clone());
    for &share in SHARES.iter().rev().chain([0].iter()) {
        let pinned = hottest(&seen, part(share), |_| true);
        for setting in grid(trace.scored()) {
            let us = replay(&seen, [host, gpu], [&setting, &setting], &pinned)?.us(prices);
            if us < best.0 {
                best = (us, share, setting, pinned.clone());
            }
        }
    }
    let (_, share, setting, pinned) = best;
    Ok(Resident {
        held_out: replay(&rest, [host, gpu], [&setting, &setting], &pinned)?,
        held_out_fixed: replay(&rest, [host, gpu], [&lru, &lru], &fixed)?,
        pinned,
        share,
        setting,
    })
}

/// Runs a trace through both memories, which begin with the pinned experts. Every miss of the GPU is
/// transferred, unless it has room for the pinned ones only.
///
/// # Errors
/// As [`Levels::new`].
pub fn replay(
    trace: &Trace,
    bytes: [u64; 2],
    settings: [&Setting; 2],
    pinned: &[Key],
) -> Result<Uses, CacheError> {
    let mut levels = Levels::new(trace.experts(), bytes, settings, pinned)?;
    for &key in pinned {
        levels.ahead(key, |_| ())?;
    }
    let layers = trace.experts().layers();
    let least = layers.iter().map(|l| l.bytes).min().unwrap_or(0);
    let moves = levels.used()[1] + least <= bytes[1];
    let mut uses = Uses::default();
    for (_, layer, step) in trace.steps() {
        for &expert in step.chosen {
            match levels.level(Key { layer: layer as u16, expert }) {
                Level::Gpu => uses.gpu += 1,
                Level::Host => uses.host += 1,
                Level::Disk => uses.disk += 1,
            }
        }
        let transferred = if moves { step.chosen } else { &[] };
        levels.step(layer, step.chosen, transferred, step.ranked, |moved| {
            uses.transfers += u64::from(matches!(moved, Moved::Transferred(_)));
        })?;
    }
    Ok(uses)
}
