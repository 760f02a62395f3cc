//! Choice of a bundle's cache policy and pinned experts: those that read least on recorded routing, and also
//! on held-out routing.

use super::belady::optimum;
use super::pin::{self, SHARES};
use super::replay::{CacheCounters, Replay, replay};
use super::runs::{FOLDS, FoldedRow, Row, sum};
use super::{Trace, TraceError, grid};
use moec_runtime::offload::cache::{CacheError, Key, Setting};

/// Minimum number of tokens of a fold.
const FOLD_TOKENS: usize = 16;
/// Gain in hit rate over LRU that a policy needs on held-out folds, in addition to random variation: half a
/// point. Pins must gain as much over the choice without them.
pub const MARGIN: f64 = 0.005;

/// Reason for the choice of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It beats LRU by [`Choice::margin`] or more on held-out folds, and is worse on none.
    BeatsLru,
    /// No setting beats LRU, which is chosen.
    NothingBeatsLru,
}

/// Source of the pinned share of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Chosen by replays: one of [`SHARES`], or nothing.
    Auto,
    /// This percentage, below 100.
    Percent(u8),
}

/// The choice, and the results that it is based on.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The chosen row: a setting, and how much of the cache is pinned.
    pub chosen: Row,
    /// Reason for that setting.
    pub reason: Reason,
    /// Experts that are pinned, the hottest first.
    pub pinned: Vec<Key>,
    /// Every setting that was tried without pins, in the order of the table. The first is LRU.
    pub rows: Vec<Row>,
    /// The best of them, with shares of the cache pinned.
    pub pinned_rows: Vec<Row>,
    /// The bound.
    pub optimum: CacheCounters,
    /// Result of the choice on held-out folds, each with the choice made on the others.
    pub held_out: CacheCounters,
    /// Result on the same folds of the choice without pins.
    pub held_out_unpinned: CacheCounters,
    /// Result on the same folds of LRU.
    pub held_out_lru: CacheCounters,
}

impl Choice {
    /// Gain over LRU that another policy needs: [`MARGIN`] plus twice the standard error of a hit rate over
    /// as many uses, so that a short trace does not decide by chance.
    pub fn margin(&self) -> f64 {
        margin(self.held_out_lru)
    }

    /// The best row without pins of every policy, in the order of the table.
    pub fn best_of_each(&self) -> Vec<&Row> {
        let mut best: Vec<&Row> = Vec::new();
        for row in &self.rows {
            match best.last_mut().filter(|b| b.setting.info().name == row.setting.info().name) {
                Some(last) if row.counters.read < last.counters.read => *last = row,
                Some(_) => {}
                None => best.push(row),
            }
        }
        best
    }

    /// The row with pins that reads least.
    pub fn best_pinned(&self) -> Option<&Row> {
        self.pinned_rows.iter().min_by_key(|r| r.counters.read)
    }
}

/// Tries every setting of [`grid`] on a trace, with a cache of `capacity` bytes, and chooses.
///
/// Settings that are worse than LRU on any fold are excluded. Of the others, the one that reads least is
/// chosen, the earlier among equals. To evaluate the choice, it is made for every fold on the other folds
/// alone and measured on that fold. If its total gain over LRU is below [`Choice::margin`], LRU is chosen.
///
/// Then the chosen setting, LRU and the one that reads least are tried again with shares of the cache pinned
/// to the hottest experts. They are measured on every fold with the hottest experts of the *other* folds
/// pinned. Again those that are worse than LRU on any fold are excluded. Pins are chosen if their gain over
/// the choice without them is at least the margin. If the caller sets the pinned share, the best setting with
/// that share is taken.
///
/// # Errors
/// [`TraceError::TooShort`].
pub fn choose(trace: &Trace, capacity: u64, pin: Pin) -> Result<Choice, TraceError> {
    let least = FOLDS * FOLD_TOKENS;
    if trace.tokens() < least {
        return Err(TraceError::TooShort { found: trace.tokens(), least });
    }
    let run = |setting: Setting| {
        let Replay { folds, .. } = replay(trace, capacity, &setting, FOLDS)?;
        Ok(FoldedRow { row: Row { setting, pinned: 0, counters: sum(&folds) }, folds })
    };
    let runs = grid(trace.scored()).into_iter().map(run).collect::<Result<Vec<_>, CacheError>>()?;
    let lru = &runs[0].folds;
    let (found, folds) = evaluate(&runs, lru, lru);
    let found = found.unwrap_or(0);
    let beats = found > 0 && gains(&folds, lru);
    let usual = &runs[if beats { found } else { 0 }];
    let usual_folds = if beats { &folds } else { lru };

    let shares = match &pin {
        Pin::Auto => SHARES,
        Pin::Percent(0) => &[],
        Pin::Percent(own) => std::slice::from_ref(own),
    };
    let least_read = runs.iter().map(|r| &r.row).min_by_key(|r| r.counters.read);
    let mut settings = vec![usual.row.setting.clone()];
    for row in least_read.into_iter().chain([&runs[0].row]) {
        if !settings.contains(&row.setting) {
            settings.push(row.setting.clone());
        }
    }
    let pinned = pin::runs(trace, capacity, &settings, shares)?;
    let (best, pinned_folds) = evaluate(&pinned, lru, usual_folds);
    let chosen = match pin {
        Pin::Auto => best.filter(|&r| pinned[r].read() < usual.read() && gains(&pinned_folds, usual_folds)),
        Pin::Percent(_) => best.or_else(|| (0..pinned.len()).min_by_key(|&r| pinned[r].read())),
    };
    let row = chosen.map_or(&usual.row, |r| &pinned[r].row);
    let (held_out_unpinned, held_out_lru) = (sum(&folds), sum(lru));
    Ok(Choice {
        chosen: row.clone(),
        reason: if beats || chosen.is_some() && pin == Pin::Auto {
            Reason::BeatsLru
        } else {
            Reason::NothingBeatsLru
        },
        pinned: pin::hottest_share(trace, capacity, row.pinned),
        held_out: match (chosen, pin) {
            (None, _) => held_out_unpinned,
            (Some(_), Pin::Auto) => sum(&pinned_folds),
            // The share is set by the caller.
            (Some(r), Pin::Percent(_)) => sum(&pinned[r].folds),
        },
        held_out_unpinned,
        held_out_lru,
        optimum: optimum(trace, capacity, 1).total(),
        pinned_rows: pinned.iter().map(|r| r.row.clone()).collect(),
        rows: runs.into_iter().map(|r| r.row).collect(),
    })
}

/// The best run, and the evaluation of the choice: on every fold, the result of the run that is best on the
/// others. `otherwise` replaces a missing run.
fn evaluate(
    runs: &[FoldedRow],
    lru: &[CacheCounters],
    otherwise: &[CacheCounters],
) -> (Option<usize>, Vec<CacheCounters>) {
    let held_out =
        |fold: usize| best(runs, lru, |f| f != fold).map_or(otherwise[fold], |r| runs[r].folds[fold]);
    (best(runs, lru, |_| true), (0..FOLDS).map(held_out).collect())
}

/// The run that reads least on some folds, of those that read no more than LRU on any of these.
fn best(runs: &[FoldedRow], lru: &[CacheCounters], fold: impl Fn(usize) -> bool) -> Option<usize> {
    let read = |of: &[CacheCounters]| (0..FOLDS).filter(|&f| fold(f)).map(|f| of[f].read).collect::<Vec<_>>();
    let lru = read(lru);
    let own = runs.iter().enumerate().map(|(i, run)| (i, read(&run.folds)));
    let safe = own.filter(|(_, own)| own.iter().zip(&lru).all(|(own, lru)| own <= lru));
    safe.min_by_key(|(_, own)| own.iter().sum::<u64>()).map(|(i, _)| i)
}

/// Whether the choice gains more on held-out folds than random variation explains.
fn gains(own: &[CacheCounters], other: &[CacheCounters]) -> bool {
    sum(own).hit_rate() >= sum(other).hit_rate() + margin(sum(other))
}

fn margin(of: CacheCounters) -> f64 {
    let p = of.hit_rate();
    MARGIN + 2.0 * (p * (1.0 - p) / of.accesses().max(1) as f64).sqrt()
}
