//! Results of settings on a trace, and on the folds that it is cut into.

use super::replay::CacheCounters;
use moec_runtime::offload::cache::Setting;

/// Number of folds of a trace. Each is held out once.
pub(super) const FOLDS: usize = 4;

/// Result of one setting on the whole trace.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// The setting.
    pub setting: Setting,
    /// Percent of the cache that is pinned to the hottest experts.
    pub pinned: u8,
    /// Counts.
    pub counters: CacheCounters,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.setting)?;
        if self.pinned > 0 { write!(f, ", {} % pinned", self.pinned) } else { Ok(()) }
    }
}

/// A row, and its results on every fold.
pub(super) struct FoldedRow {
    pub(super) row: Row,
    pub(super) folds: Vec<CacheCounters>,
}

impl FoldedRow {
    /// Bytes that it read.
    pub(super) fn read(&self) -> u64 {
        sum(&self.folds).read
    }
}

pub(super) fn sum(of: &[CacheCounters]) -> CacheCounters {
    of.iter().fold(CacheCounters::default(), |mut sum, t| {
        sum += *t;
        sum
    })
}
