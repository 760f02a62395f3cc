//! A bounded pool of snapshots: their slots, positions and places, and the choice of those to evict.
//!
//! Slots that begin with the same tokens share their snapshots: a fork copies none.
//!
//! **Eviction** takes the snapshot that saves least. A snapshot saves the tokens since the one before it,
//! which would have to be read again, once for each slot that shares it. Snapshots at multiples of
//! [`Pool::distance`] are not evicted: there is room for them even if all slots are full
//! ([`moec_ir::plan::Plan::snapshot_distance`]). So a sequence can go back to within that distance of any of
//! its positions, and to within a chunk while there is room.

/// A copy of the folded states of a slot's first tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Snapshot {
    /// Number of tokens before it.
    pos: usize,
    /// Its place: an index below the pool's size.
    place: u32,
    /// Slots that begin with these tokens; at least one.
    slots: Vec<u32>,
    /// Time of its creation or last use.
    used: u64,
    /// Not evicted before the next [`Pool::release`].
    kept: bool,
    /// Made only to be kept, and dropped by the next release.
    temporary: bool,
}

/// Snapshots of all slots.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    size: u32,
    distance: Option<usize>,
    all: Vec<Snapshot>,
    clock: u64,
}

impl Pool {
    /// A pool of at most `size` snapshots; those at multiples of `distance` are never evicted.
    pub(super) fn new(size: u32, distance: Option<usize>) -> Self {
        Self { size, distance: distance.filter(|&d| d > 0), all: Vec::new(), clock: 0 }
    }

    /// Most snapshots of the pool.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Place of the snapshot of a slot at a position.
    pub(super) fn find(&self, slot: u32, pos: usize) -> Option<u32> {
        self.of(slot).find(|s| s.pos == pos).map(|s| s.place)
    }

    /// Furthest position of a slot up to `most` that has a snapshot.
    pub(super) fn before(&self, slot: u32, most: usize) -> Option<usize> {
        self.of(slot).map(|s| s.pos).filter(|&pos| pos <= most).max()
    }

    /// Positions of a slot's snapshots, ascending.
    pub(super) fn positions(&self, slot: u32) -> Vec<usize> {
        let mut all: Vec<usize> = self.of(slot).map(|s| s.pos).collect();
        all.sort_unstable();
        all
    }

    /// Adds a snapshot of a slot at a position that has none, and returns its place; `None` if the pool is
    /// full and nothing can be evicted.
    pub(super) fn take(&mut self, slot: u32, pos: usize) -> Option<u32> {
        let place = if self.all.len() < self.size as usize {
            (0..self.size).find(|&place| self.all.iter().all(|s| s.place != place))?
        } else {
            self.evict()?
        };
        self.clock += 1;
        let (slots, used) = (vec![slot], self.clock);
        self.all.push(Snapshot { pos, place, slots, used, kept: false, temporary: false });
        Some(place)
    }

    /// Records that a sequence has gone back to a snapshot.
    pub(super) fn touch(&mut self, slot: u32, pos: usize) {
        self.clock += 1;
        let used = self.clock;
        if let Some(snapshot) = self.get_mut(slot, pos) {
            snapshot.used = used;
        }
    }

    /// Drops a slot's snapshots after its first `pos` tokens.
    pub(super) fn truncate(&mut self, slot: u32, pos: usize) {
        for snapshot in self.all.iter_mut().filter(|s| s.pos > pos) {
            snapshot.slots.retain(|&s| s != slot);
        }
        self.all.retain(|s| !s.slots.is_empty());
    }

    /// Shares the snapshots of the first `pos` tokens of `from` with slot `to`, which has none.
    pub(super) fn share(&mut self, from: u32, to: u32, pos: usize) {
        for snapshot in self.all.iter_mut().filter(|s| s.pos <= pos && s.slots.contains(&from)) {
            snapshot.slots.push(to);
        }
    }

    /// Keeps a snapshot until the next release, which drops it if it was made only for that (`temporary`).
    pub(super) fn keep(&mut self, slot: u32, pos: usize, temporary: bool) {
        let temporary = temporary && !self.is_permanent(pos);
        if let Some(snapshot) = self.get_mut(slot, pos) {
            (snapshot.kept, snapshot.temporary) = (true, temporary);
        }
    }

    /// Lets kept snapshots be evicted.
    pub(super) fn release(&mut self) {
        self.all.retain(|s| !s.temporary);
        self.all.iter_mut().for_each(|s| s.kept = false);
    }

    fn of(&self, slot: u32) -> impl Iterator<Item = &Snapshot> {
        self.all.iter().filter(move |s| s.slots.contains(&slot))
    }

    fn get_mut(&mut self, slot: u32, pos: usize) -> Option<&mut Snapshot> {
        self.all.iter_mut().find(|s| s.pos == pos && s.slots.contains(&slot))
    }

    /// Whether snapshots at a position are not evicted.
    fn is_permanent(&self, pos: usize) -> bool {
        self.distance.is_some_and(|d| pos.is_multiple_of(d))
    }

    /// Tokens that would be read again without a snapshot.
    fn saves(&self, of: &Snapshot) -> usize {
        let saved = |&slot: &u32| of.pos - self.before(slot, of.pos.saturating_sub(1)).unwrap_or(0);
        of.slots.iter().map(saved).sum()
    }

    /// Evicts a snapshot, and returns its place.
    fn evict(&mut self) -> Option<u32> {
        let evictable = self.all.iter().enumerate().filter(|(_, s)| !s.kept && !self.is_permanent(s.pos));
        let (least, _) = evictable.min_by_key(|(_, s)| (self.saves(s), s.used))?;
        Some(self.all.swap_remove(least).place)
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::{BTreeMap, BTreeSet};

    const SLOTS: usize = 3;
    const CONTEXT: usize = 24;
    const DISTANCE: usize = 6;
    /// Room for all multiples of the distance in full slots, and two more snapshots for each slot.
    const SIZE: u32 = (SLOTS * (CONTEXT / DISTANCE + 2)) as u32;

    /// Operation on a slot; the numbers choose another slot, and a position.
    #[derive(Clone, Debug)]
    enum Act {
        Extend(usize),
        Fork(usize, usize),
        Edit(usize),
        Snapshot,
        Keep,
    }

    fn act() -> impl Strategy<Value = (usize, Act)> {
        let acts = prop_oneof![
            4 => (1..9_usize).prop_map(Act::Extend),
            2 => (0..SLOTS, 0..=CONTEXT).prop_map(|(from, pos)| Act::Fork(from, pos)),
            2 => (0..=CONTEXT).prop_map(Act::Edit),
            4 => Just(Act::Snapshot),
            1 => Just(Act::Keep),
        ];
        (0..SLOTS, acts)
    }

    /// Model of the pool. Every token has a unique number, so equal prefixes are forks.
    #[derive(Default)]
    struct Naive {
        slots: Vec<Vec<u32>>,
        /// Tokens before the snapshot in each place.
        places: BTreeMap<u32, Vec<u32>>,
        next: u32,
    }

    impl Naive {
        fn snapshot(&mut self, pool: &mut Pool, slot: usize) {
            let pos = self.slots[slot].len();
            if pos == 0 || pool.find(slot as u32, pos).is_some() {
                return;
            }
            let before = pool.clone();
            let place = pool.take(slot as u32, pos).expect("there is always something to evict");
            Self::check_evicted(&before, pool, place);
            self.places.insert(place, self.slots[slot].clone());
        }

        /// Checks by the definition that the evicted snapshot saved least of all that could be evicted.
        fn check_evicted(before: &Pool, after: &Pool, place: u32) {
            let Some(gone) = before.all.iter().find(|s| s.place == place) else { return };
            assert_eq!(before.all.len(), SIZE as usize);
            assert!(!gone.kept && !gone.pos.is_multiple_of(DISTANCE));
            let saves = |s: &Snapshot| -> usize {
                let of = |&slot: &u32| {
                    let earlier = before.all.iter().filter(|o| o.slots.contains(&slot) && o.pos < s.pos);
                    s.pos - earlier.map(|o| o.pos).max().unwrap_or(0)
                };
                s.slots.iter().map(of).sum()
            };
            let evictable = before.all.iter().filter(|s| !s.kept && !s.pos.is_multiple_of(DISTANCE));
            assert_eq!(evictable.map(saves).min(), Some(saves(gone)));
            assert_eq!(after.all.len(), before.all.len());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        /// After any operations, each snapshot of a slot has the slot's prefix, and snapshots at multiples of
        /// the distance remain.
        #[test]
        fn snapshots_hold_the_prefix_of_their_slot(acts in prop::collection::vec(act(), 1..120)) {
            let mut pool = Pool::new(SIZE, Some(DISTANCE));
            let mut naive = Naive { slots: vec![Vec::new(); SLOTS], ..Naive::default() };
            for (slot, act) in acts {
                let s = slot as u32;
                match act {
                    Act::Extend(n) => {
                        // As for a prompt: a snapshot at the end of each call; these include all multiples of
                        // the distance.
                        for _ in 0..n.min(CONTEXT - naive.slots[slot].len()) {
                            naive.next += 1;
                            naive.slots[slot].push(naive.next);
                            if naive.slots[slot].len().is_multiple_of(DISTANCE) {
                                naive.snapshot(&mut pool, slot);
                            }
                        }
                    }
                    Act::Fork(from, most) if from != slot => {
                        let pos = pool.before(from as u32, most).unwrap_or(0);
                        pool.truncate(s, 0);
                        pool.share(from as u32, s, pos);
                        naive.slots[slot] = naive.slots[from][..pos].to_vec();
                    }
                    Act::Fork(..) => {}
                    Act::Edit(most) => {
                        let pos = pool.before(s, most.min(naive.slots[slot].len())).unwrap_or(0);
                        pool.touch(s, pos);
                        pool.truncate(s, pos);
                        naive.slots[slot].truncate(pos);
                    }
                    Act::Snapshot => naive.snapshot(&mut pool, slot),
                    Act::Keep => {
                        let pos = naive.slots[slot].len();
                        pool.release();
                        let temporary = pool.find(s, pos).is_none();
                        naive.snapshot(&mut pool, slot);
                        pool.keep(s, pos, temporary);
                    }
                }
                prop_assert!(pool.all.len() <= SIZE as usize);
                let places: BTreeSet<u32> = pool.all.iter().map(|s| s.place).collect();
                prop_assert!(places.len() == pool.all.len() && places.iter().all(|&p| p < SIZE));
                for (i, seq) in naive.slots.iter().enumerate() {
                    let positions = pool.positions(i as u32);
                    for &pos in &positions {
                        let place = pool.find(i as u32, pos).unwrap();
                        prop_assert_eq!(&naive.places[&place][..], &seq[..pos]);
                    }
                    for most in 0..=CONTEXT {
                        let found = positions.iter().rev().find(|&&pos| pos <= most).copied();
                        prop_assert_eq!(pool.before(i as u32, most), found);
                        if most <= seq.len() {
                            prop_assert!(most - found.unwrap_or(0) < DISTANCE, "{positions:?} of {}", seq.len());
                        }
                    }
                }
            }
        }
    }

    /// A prompt with more snapshots than the pool has room for keeps some over its whole length. The snapshot
    /// of a text that several slots share is kept longest.
    #[test]
    fn snapshot_that_saves_least_is_evicted() {
        let mut pool = Pool::new(4, None);
        let after = |pool: &mut Pool, n: usize| {
            (1..=n).for_each(|pos| assert!(pool.take(0, 10 * pos).is_some()));
            pool.positions(0)
        };
        assert_eq!(after(&mut pool, 4), [10, 20, 30, 40]);
        assert_eq!(after(&mut Pool::new(4, None), 8), [20, 40, 60, 80]);
        pool.share(0, 1, 10);
        pool.share(0, 2, 10);
        assert!(pool.take(0, 50).is_some());
        assert_eq!((pool.positions(0), pool.positions(1)), (vec![10, 30, 40, 50], vec![10]));
        pool.truncate(0, 0);
        assert_eq!((pool.all.len(), pool.positions(2)), (1, vec![10]));
        // No snapshot may be evicted.
        let mut pool = Pool::new(2, Some(10));
        assert!(pool.take(0, 10).is_some() && pool.take(1, 5).is_some());
        pool.keep(1, 5, true);
        assert_eq!(pool.take(1, 7), None);
        pool.release();
        assert!(pool.take(1, 7).is_some() && pool.positions(1) == [7]);
        assert_eq!(Pool::new(0, None).take(0, 1), None);
    }
}
