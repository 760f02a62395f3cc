//! Which policy a bundle ships with: the one that reads least on recorded routing, and still does on routing that
//! it was not chosen on.

use super::belady::optimum;
use super::error::CacheError;
use super::replay::{Replay, Tally, replay};
use super::setting::{Setting, grid};
use super::trace::Trace;

/// Stretches that a trace is cut into. Each is held out once.
const FOLDS: usize = 4;
/// Fewest tokens of a stretch.
const FOLD_TOKENS: usize = 16;
/// What a policy must gain on LRU in hit rate on held-out stretches, besides what chance may give it: half a
/// point.
pub const MARGIN: f64 = 0.005;

/// What one setting did on the whole trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The setting.
    pub setting: Setting,
    /// What was counted.
    pub tally: Tally,
}

/// Why a setting was chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It beats LRU by [`Choice::margin`] or more on held-out stretches, and is worse on none.
    BeatsLru,
    /// Nothing does: LRU stays.
    NothingBeatsLru,
}

/// What was chosen, and what that rests on.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The chosen setting.
    pub setting: Setting,
    /// Why.
    pub reason: Reason,
    /// Every setting that was tried, in the order of the table. The first is LRU.
    pub rows: Vec<Row>,
    /// The bound.
    pub optimum: Tally,
    /// On held-out stretches: what was chosen on the others.
    pub held_out: Tally,
    /// On the same stretches: LRU.
    pub held_out_lru: Tally,
}

impl Choice {
    /// What the chosen setting did on the whole trace.
    pub fn chosen(&self) -> Tally {
        self.rows.iter().find(|r| r.setting == self.setting).map_or(Tally::default(), |r| r.tally)
    }

    /// What another policy must gain on LRU: [`MARGIN`], and twice the standard error of a hit rate over as many
    /// uses, so that a short trace does not decide by chance.
    pub fn margin(&self) -> f64 {
        margin(self.held_out_lru)
    }

    /// The best row of every policy, in the order of the table.
    pub fn best_of_each(&self) -> Vec<&Row> {
        let mut best: Vec<&Row> = Vec::new();
        for row in &self.rows {
            match best.last_mut().filter(|b| b.setting.info().name == row.setting.info().name) {
                Some(last) if row.tally.read < last.tally.read => *last = row,
                Some(_) => {}
                None => best.push(row),
            }
        }
        best
    }
}

/// Tries every setting of [`grid`] on a trace, with a cache of `capacity` bytes, and chooses.
///
/// Settings that are worse than LRU on any stretch are out. Of the others the one that reads least wins, the
/// earlier among equals. To see what such a choice is worth, it is made for every stretch on the other ones
/// alone and then looked at on that stretch: where the gain on LRU stays below [`Choice::margin`] in all, LRU is
/// chosen.
///
/// # Errors
/// [`CacheError::TooShort`].
pub fn choose(trace: &Trace, capacity: u64) -> Result<Choice, CacheError> {
    let least = FOLDS * FOLD_TOKENS;
    if trace.tokens() < least {
        return Err(CacheError::TooShort { found: trace.tokens(), least });
    }
    let settings = grid(trace.scored());
    let runs = settings.iter().map(|s| replay(trace, capacity, s, FOLDS)).collect::<Result<Vec<_>, _>>()?;
    let (mut held_out, mut held_out_lru) = (Tally::default(), Tally::default());
    for fold in 0..FOLDS {
        held_out += runs[best(&runs, |f| f != fold)].folds[fold];
        held_out_lru += runs[0].folds[fold];
    }
    let found = best(&runs, |_| true);
    let gains = found > 0 && held_out.hit_rate() >= held_out_lru.hit_rate() + margin(held_out_lru);
    let rows = settings.into_iter().zip(&runs).map(|(setting, run)| Row { setting, tally: run.total() });
    let rows: Vec<Row> = rows.collect();
    Ok(Choice {
        setting: rows[if gains { found } else { 0 }].setting.clone(),
        reason: if gains { Reason::BeatsLru } else { Reason::NothingBeatsLru },
        rows,
        optimum: optimum(trace, capacity, 1).total(),
        held_out,
        held_out_lru,
    })
}

fn margin(lru: Tally) -> f64 {
    let p = lru.hit_rate();
    MARGIN + 2.0 * (p * (1.0 - p) / lru.accesses().max(1) as f64).sqrt()
}

/// The run that reads least on some stretches, of those that read no more than the first on any of these.
fn best(runs: &[Replay], fold: impl Fn(usize) -> bool) -> usize {
    let read = |run: usize| (0..FOLDS).filter(|&f| fold(f)).map(move |f| runs[run].folds[f].read);
    let safe = (0..runs.len()).filter(|&r| read(r).zip(read(0)).all(|(own, lru)| own <= lru));
    safe.min_by_key(|&r| read(r).sum::<u64>()).unwrap_or(0)
}
