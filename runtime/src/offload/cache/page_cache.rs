//! Model of Linux's page cache for files that are read with `read`.
//!
//! A page that is read for the first time comes to the front of the *inactive* list; a second use there makes
//! it *active*. Room is made at the back of the inactive list. Where the active list is longer than `ratio`
//! times the inactive one, pages from its back become inactive; `ratio` is √(10 · GiB), at least 1
//! (`inactive_is_low`). A page that is read again before as many pages were evicted as the active list holds
//! becomes active at once (`workingset_refault`).
//!
//! Simplifications: an expert is resident as a whole or not at all, since all of its 4 KiB pages are read
//! together; the kernel may drop some of them. There is one zone and one reader, no pages of others, no early
//! reclaim and no read-ahead. Mapped files age by the bits in page tables, which this does not model.

use super::experts::ExpertIndex;
use super::list::List;
use super::policy::{Id, Pins, Policy};

const PAGE: u64 = 4096;

/// Two lists of pages.
#[derive(Clone, Debug)]
pub(super) struct PageCache {
    active: Pages,
    inactive: Pages,
    /// Pages of every expert.
    pages: Vec<u64>,
    /// Whether each expert was used since it became inactive.
    referenced: Vec<bool>,
    /// Age at which an expert was evicted; `None` if it never was.
    gone: Vec<Option<u64>>,
    /// Pages that were evicted or became active so far.
    age: u64,
    ratio: u64,
}

/// A list that knows its length in pages.
#[derive(Clone, Debug)]
struct Pages {
    list: List,
    pages: u64,
}

impl Pages {
    fn push(&mut self, id: Id, pages: u64) {
        self.list.push_front(id);
        self.pages += pages;
    }

    fn remove(&mut self, id: Id, pages: u64) {
        if self.list.contains(id) {
            self.list.remove(id);
            self.pages -= pages;
        }
    }

    fn clear(&mut self) {
        self.list.clear();
        self.pages = 0;
    }
}

impl PageCache {
    /// Creates the policy for these experts, in a cache of `capacity` bytes.
    pub(super) fn new(experts: &ExpertIndex, capacity: u64) -> Self {
        let n = experts.count();
        let list = || Pages { list: List::new(n), pages: 0 };
        let layers = experts.layers().iter();
        Self {
            active: list(),
            inactive: list(),
            pages: layers.flat_map(|l| std::iter::repeat_n(l.bytes.div_ceil(PAGE), l.experts)).collect(),
            referenced: vec![false; n],
            gone: vec![None; n],
            age: 0,
            ratio: (10 * (capacity >> 30)).isqrt().max(1),
        }
    }

    fn activate(&mut self, id: Id) {
        let pages = self.pages[id as usize];
        self.inactive.remove(id, pages);
        self.active.push(id, pages);
        self.referenced[id as usize] = false;
        self.age += pages;
    }
}

impl Policy for PageCache {
    fn on_hit(&mut self, id: Id) {
        if self.inactive.list.contains(id) && self.referenced[id as usize] {
            self.activate(id);
        } else {
            self.referenced[id as usize] = true;
        }
    }

    fn victim(&mut self, _: Id, _: bool, pins: Pins<'_>) -> Option<Id> {
        while self.active.pages > self.inactive.pages * self.ratio {
            let Some(last) = self.active.list.back_to_front().next() else { break };
            self.active.remove(last, self.pages[last as usize]);
            self.inactive.push(last, self.pages[last as usize]);
        }
        let mut order = self.inactive.list.back_to_front().chain(self.active.list.back_to_front());
        order.find(|&id| !pins.holds(id))
    }

    fn on_insert(&mut self, id: Id) {
        let pages = self.pages[id as usize];
        let back = self.gone[id as usize].is_some_and(|then| self.age - then <= self.active.pages);
        self.inactive.push(id, pages);
        if back {
            self.activate(id);
        } else {
            self.referenced[id as usize] = true;
        }
    }

    fn on_evict(&mut self, id: Id) {
        let pages = self.pages[id as usize];
        self.active.remove(id, pages);
        self.inactive.remove(id, pages);
        self.age += pages;
        self.gone[id as usize] = Some(self.age);
    }

    fn reset(&mut self) {
        self.active.clear();
        self.inactive.clear();
        self.referenced.fill(false);
        self.gone.fill(None);
        self.age = 0;
    }
}
