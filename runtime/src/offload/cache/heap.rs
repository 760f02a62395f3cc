//! The least of many experts whose priorities change: a binary heap that knows each expert's position.

use super::policy::Id;
use std::cmp::Ordering;

/// Sort key: a value, then the time of the last use.
pub(crate) type Rank = (f64, u64);

const NONE: u32 = u32::MAX;

pub(crate) fn compare(a: Rank, b: Rank) -> Ordering {
    a.0.total_cmp(&b.0).then(a.1.cmp(&b.1))
}

/// A heap of numbers below `n`, the least rank on top.
#[derive(Clone, Debug)]
pub(crate) struct Heap {
    order: Vec<Id>,
    /// Position of each number in `order`.
    at: Vec<u32>,
    rank: Vec<Rank>,
    /// Positions that a search still has to visit.
    open: Vec<usize>,
}

impl Heap {
    pub(crate) fn new(n: usize) -> Self {
        Self {
            order: Vec::with_capacity(n),
            at: vec![NONE; n],
            rank: vec![(0.0, 0); n],
            open: Vec::with_capacity(n + 2),
        }
    }

    pub(crate) fn clear(&mut self) {
        self.order.clear();
        self.at.fill(NONE);
    }

    pub(crate) fn contains(&self, id: Id) -> bool {
        self.at[id as usize] != NONE
    }

    pub(crate) fn rank(&self, id: Id) -> Rank {
        self.rank[id as usize]
    }

    /// Sets the rank of a number; inserts the number if it is absent.
    pub(crate) fn set(&mut self, id: Id, rank: Rank) {
        if !self.contains(id) {
            self.at[id as usize] = self.order.len() as u32;
            self.order.push(id);
        }
        self.rank[id as usize] = rank;
        self.settle(self.at[id as usize] as usize);
    }

    /// Removes a number if it is present.
    pub(crate) fn remove(&mut self, id: Id) {
        let at = self.at[id as usize];
        if at == NONE {
            return;
        }
        self.at[id as usize] = NONE;
        if let Some(last) = self.order.pop()
            && last != id
        {
            self.order[at as usize] = last;
            self.at[last as usize] = at;
            self.settle(at as usize);
        }
    }

    /// The number of least rank for which `skip` is false. Visits only the skipped ones and their neighbours.
    pub(crate) fn least(&mut self, skip: impl Fn(Id) -> bool) -> Option<Id> {
        let mut best: Option<Id> = None;
        self.open.clear();
        self.open.push(0);
        while let Some(i) = self.open.pop() {
            let Some(&id) = self.order.get(i) else { continue };
            if best.is_some_and(|b| compare(self.rank(b), self.rank(id)).is_le()) {
                continue;
            }
            if skip(id) {
                self.open.extend([2 * i + 1, 2 * i + 2]);
            } else {
                best = Some(id);
            }
        }
        best
    }

    fn less(&self, i: usize, j: usize) -> bool {
        compare(self.rank(self.order[i]), self.rank(self.order[j])).is_lt()
    }

    fn swap(&mut self, i: usize, j: usize) {
        self.order.swap(i, j);
        self.at[self.order[i] as usize] = i as u32;
        self.at[self.order[j] as usize] = j as u32;
    }

    /// Moves the entry at `i` to where its rank belongs.
    fn settle(&mut self, mut i: usize) {
        while i > 0 && self.less(i, (i - 1) / 2) {
            self.swap(i, (i - 1) / 2);
            i = (i - 1) / 2;
        }
        loop {
            let (left, right) = (2 * i + 1, 2 * i + 2);
            let mut least = i;
            for child in [left, right] {
                if child < self.order.len() && self.less(child, least) {
                    least = child;
                }
            }
            if least == i {
                return;
            }
            self.swap(i, least);
            i = least;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn heap_minimum_matches_a_linear_search(
            ops in proptest::collection::vec((0_u32..12, 0_u8..4, any::<u16>()), 1..200)
        ) {
            let mut heap = Heap::new(12);
            let mut model: Vec<Option<Rank>> = vec![None; 12];
            for (tick, (id, op, mask)) in ops.into_iter().enumerate() {
                if op == 0 {
                    heap.remove(id);
                    model[id as usize] = None;
                } else {
                    let rank = (f64::from(mask % 7), tick as u64);
                    heap.set(id, rank);
                    model[id as usize] = Some(rank);
                }
                let skip = |i: Id| mask >> i & 1 == 1;
                let all = (0..12).filter(|&i| !skip(i)).filter_map(|i| Some((model[i as usize]?, i)));
                let want = all.min_by(|a, b| compare(a.0, b.0)).map(|(_, i)| i);
                prop_assert_eq!(heap.least(skip), want);
            }
        }
    }
}
