//! How much migration fits behind the other work.

use super::costs::Costs;
use super::layout::Layout;
use super::setup::Window;

/// Time that is left of PCIe and of each DIMM-Link, in microseconds.
///
/// A window is what one layer's attention and dense layers leave. A transfer that is longer goes on in the windows
/// after it: what a resource does not use is kept, up to the time of its longest transfer, and a move is made in the
/// window in which it ends. So no resource is ever given more than the windows so far had. A link carries one
/// transfer at a time, in one direction.
#[derive(Clone, Debug)]
pub(super) struct Budget {
    pcie: f64,
    links: Vec<f64>,
}

/// Time that a move takes of each resource.
#[derive(Clone, Copy, Debug)]
pub(super) struct Needs {
    /// Of PCIe.
    pub(super) pcie: f64,
    /// Of the links of two DIMMs.
    ends: [Option<u16>; 2],
    end: f64,
    /// Of every other link.
    others: f64,
}

impl Needs {
    /// A prefetch of an expert of this layout.
    pub(super) fn prefetch(costs: &Costs, layout: Layout) -> Self {
        Self { pcie: costs.t_pcie().max(costs.t_dram(layout)), ends: [None; 2], end: 0.0, others: 0.0 }
    }

    /// From striped to one DIMM, or from it to striped: its link carries all that is not on it, each other its share.
    pub(super) fn relayout(costs: &Costs, dimm: u16, dimms: usize) -> Self {
        let share = link(costs) / dimms.max(1) as f64;
        let end = if dimms <= 1 { 0.0 } else { share * (dimms - 1) as f64 };
        Self { pcie: 0.0, ends: [Some(dimm), None], end, others: share }
    }

    /// From one DIMM to another.
    pub(super) fn rebalance(costs: &Costs, from: u16, to: u16) -> Self {
        Self { pcie: 0.0, ends: [Some(from), Some(to)], end: link(costs), others: 0.0 }
    }

    /// Of the resource that is used most.
    pub(super) fn time(&self) -> f64 {
        self.pcie.max(self.end).max(self.others)
    }

    fn of(&self, dimm: usize) -> f64 {
        if self.ends.iter().flatten().any(|&e| usize::from(e) == dimm) { self.end } else { self.others }
    }
}

/// A whole expert over one link.
fn link(costs: &Costs) -> f64 {
    costs.ndp.as_ref().map_or(f64::INFINITY, |n| costs.expert_bytes as f64 * n.link_us_per_byte)
}

impl Budget {
    pub(super) fn new(dimms: usize) -> Self {
        Self { pcie: 0.0, links: vec![0.0; dimms] }
    }

    /// A window opens.
    pub(super) fn open(&mut self, window: Window, costs: &Costs) {
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

    /// Takes what a move needs, if all of it is left.
    pub(super) fn take(&mut self, needs: &Needs) -> bool {
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
