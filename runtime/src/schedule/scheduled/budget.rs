//! Budget of time for migration.

use super::placement::Layout;
use super::setup::Window;
use crate::schedule::costs::Costs;

/// Time that is left of PCIe and of each link between memories, in microseconds.
///
/// A window is the time that one layer's attention and dense layers leave. A longer transfer continues in the
/// next windows: unused time of a resource is kept, up to the time of its longest transfer. A move is made in
/// the window in which it ends. So no resource gets more time than the windows so far had. A link carries one
/// transfer at a time, in one direction.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    pcie: f64,
    links: Vec<f64>,
}

/// Time of each resource that a move takes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needs {
    /// Time of PCIe.
    pub(crate) pcie: f64,
    /// Of the links of two memories.
    ends: [Option<u16>; 2],
    end: f64,
    /// Time of every other link.
    others: f64,
}

impl Needs {
    /// Times of a prefetch of an expert with this layout.
    pub(crate) fn prefetch(costs: &Costs, layout: Layout) -> Self {
        Self { pcie: costs.bring_us.max(costs.t_dram(layout)), ends: [None; 2], end: 0.0, others: 0.0 }
    }

    /// Times of a relayout from striped to one memory, or back: that memory's link carries everything that is
    /// not on it, each other link its share.
    pub(crate) fn relayout(costs: &Costs, memory: u16, memories: usize) -> Self {
        let share = link(costs) / memories.max(1) as f64;
        let end = if memories <= 1 { 0.0 } else { share * (memories - 1) as f64 };
        Self { pcie: 0.0, ends: [Some(memory), None], end, others: share }
    }

    /// Times of a move from one memory to another.
    pub(crate) fn rebalance(costs: &Costs, from: u16, to: u16) -> Self {
        Self { pcie: 0.0, ends: [Some(from), Some(to)], end: link(costs), others: 0.0 }
    }

    /// Time of the resource that is used most.
    pub(crate) fn time(&self) -> f64 {
        self.pcie.max(self.end).max(self.others)
    }

    fn of(&self, memory: usize) -> f64 {
        if self.ends.iter().flatten().any(|&e| usize::from(e) == memory) { self.end } else { self.others }
    }
}

/// Time of a whole expert over one link.
fn link(costs: &Costs) -> f64 {
    costs.near.as_ref().map_or(f64::INFINITY, |n| n.link_us)
}

impl Budget {
    pub(crate) fn new(memories: usize) -> Self {
        Self { pcie: 0.0, links: vec![0.0; memories] }
    }

    /// Adds the time of a window.
    pub(crate) fn open(&mut self, window: Window, costs: &Costs) {
        let longest = Needs::prefetch(costs, Layout::Local(0)).time();
        let more = |left: f64, window: f64, longest: f64| {
            let window = window.max(0.0);
            (left + window).min(window.max(longest))
        };
        self.pcie = more(self.pcie, window.pcie_us, longest);
        for left in &mut self.links {
            *left = more(*left, window.link_us, link(costs));
        }
    }

    /// Takes the time of a move from the budget, if all of it is left.
    pub(crate) fn take(&mut self, needs: &Needs) -> bool {
        let fits = needs.pcie <= self.pcie
            && self.links.iter().enumerate().all(|(d, &left)| needs.of(d) <= left)
            && needs.time().is_finite();
        if fits {
            self.pcie -= needs.pcie;
            for (d, left) in self.links.iter_mut().enumerate() {
                *left -= needs.of(d);
            }
        }
        fits
    }
}
