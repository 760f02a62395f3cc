//! Experts in the order of their use: a doubly linked list over numbers, without allocation.

use super::policy::Id;

const NONE: Id = Id::MAX;

/// A list of numbers below `n`, each at most once.
#[derive(Clone, Debug)]
pub(crate) struct List {
    /// The last position is the list itself: its successor is the front, its predecessor the back.
    next: Vec<Id>,
    prev: Vec<Id>,
}

impl List {
    pub(crate) fn new(n: usize) -> Self {
        let mut list = Self { next: vec![NONE; n + 1], prev: vec![NONE; n + 1] };
        list.clear();
        list
    }

    pub(crate) fn clear(&mut self) {
        self.next.fill(NONE);
        self.prev.fill(NONE);
        let own = self.own();
        (self.next[own], self.prev[own]) = (own as Id, own as Id);
    }

    fn own(&self) -> usize {
        self.next.len() - 1
    }

    pub(crate) fn contains(&self, id: Id) -> bool {
        self.next[id as usize] != NONE
    }

    /// Moves a number to the front; inserts it if it is absent.
    pub(crate) fn push_front(&mut self, id: Id) {
        self.remove(id);
        let own = self.own();
        let first = self.next[own];
        (self.next[id as usize], self.prev[id as usize]) = (first, own as Id);
        (self.next[own], self.prev[first as usize]) = (id, id);
    }

    /// Removes a number if it is present.
    pub(crate) fn remove(&mut self, id: Id) {
        if self.contains(id) {
            let (next, prev) = (self.next[id as usize], self.prev[id as usize]);
            (self.next[prev as usize], self.prev[next as usize]) = (next, prev);
            (self.next[id as usize], self.prev[id as usize]) = (NONE, NONE);
        }
    }

    /// The last one.
    pub(crate) fn back(&self) -> Option<Id> {
        let own = self.own();
        let last = self.prev[own];
        (last as usize != own).then_some(last)
    }

    /// Numbers from the back to the front.
    pub(crate) fn back_to_front(&self) -> impl Iterator<Item = Id> {
        let own = self.own() as Id;
        std::iter::successors(Some(self.prev[own as usize]), |&i| Some(self.prev[i as usize]))
            .take_while(move |&i| i != own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_order_of_use() {
        let mut list = List::new(4);
        let order = |l: &List| l.back_to_front().collect::<Vec<_>>();
        assert!(order(&list).is_empty());
        for i in [2, 0, 3, 2] {
            list.push_front(i);
        }
        assert_eq!(order(&list), [0, 3, 2]);
        list.remove(3);
        list.remove(3);
        assert_eq!(order(&list), [0, 2]);
        assert!(list.contains(2) && !list.contains(3));
        list.clear();
        assert!(order(&list).is_empty());
    }
}
