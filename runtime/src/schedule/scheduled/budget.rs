//! Budget of time for migration.

use super::placement::Layout;
use super::setup::Window;
use crate::schedule::costs::Costs;

/// Time of PCIe and of each link between memories, in microseconds.
///
/// A window is the time that one layer's attention and dense layers leave. Moves begin in it as long as they
/// also end in it. A transfer that is longer than a window begins on an idle link, and continues in the next
/// windows. So the windows so far had time for all that has ended. A link carries one transfer at a time, in
/// one direction, and a move ends when all its links are done with it.
#[derive(Clone, Debug)]
pub(crate) struct Budget {
    /// Times at which each is idle again, in the time of all windows.
    pcie: f64,
    links: Vec<f64>,
    /// Time of the windows before this one, and of this one: of PCIe and of the links between memories.
    passed: [f64; 2],
    window: [f64; 2],
}

/// End of a move, in the time of all windows: on PCIe and on the links between memories. 0: not used.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Ends([f64; 2]);

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
        Self { pcie: 0.0, links: vec![0.0; memories], passed: [0.0; 2], window: [0.0; 2] }
    }

    /// Begins a window.
    pub(crate) fn open(&mut self, window: Window) {
        for (passed, last) in self.passed.iter_mut().zip(self.window) {
            *passed += last;
        }
        self.window = [window.pcie_us.max(0.0), window.link_us.max(0.0)];
    }

    /// Takes the time of a move, if it can begin in this window; returns when it ends.
    pub(crate) fn take(&mut self, needs: &Needs) -> Option<Ends> {
        let ([passed_pcie, passed_link], [pcie, link]) = (self.passed, self.window);
        let fits = |idle: f64, need: f64, passed: f64, window: f64| {
            need <= 0.0 || window > 0.0 && (idle <= passed || idle + need <= passed + window)
        };
        let links = self.links.iter().enumerate();
        let all = fits(self.pcie, needs.pcie, passed_pcie, pcie)
            && links.into_iter().all(|(d, &idle)| fits(idle, needs.of(d), passed_link, link));
        if !all || !needs.time().is_finite() {
            return None;
        }
        let take = |idle: &mut f64, need: f64, passed: f64| {
            if need <= 0.0 {
                return 0.0;
            }
            *idle = idle.max(passed) + need;
            *idle
        };
        let links = self.links.iter_mut().enumerate().map(|(d, idle)| take(idle, needs.of(d), passed_link));
        let link = links.fold(0.0, f64::max);
        Some(Ends([take(&mut self.pcie, needs.pcie, passed_pcie), link]))
    }

    /// Whether a move has ended by the end of the current window.
    pub(crate) fn has_ended(&self, Ends(ends): Ends) -> bool {
        let now = self.passed.iter().zip(self.window).map(|(passed, window)| passed + window);
        ends.into_iter().zip(now).all(|(end, now)| end <= now)
    }
}
