//! Divides the experts of a layer.

use super::allocation::Allocation;
use super::costs::Costs;
use super::cut::Cut;
use super::error::HybridError;
use super::paper::Paper;
use super::policy::Policy;
use super::repair::repair;
use super::schedule::{Free, Schedule, Task};
use super::search::Search;

/// Divides the experts of layers that cost the same. What it needs is kept from call to call.
#[derive(Clone, Debug)]
pub struct Scheduler {
    costs: Costs,
    allocation: Allocation,
    cut: Cut,
    paper: Paper,
    search: Search,
    schedule: Schedule,
    seen: Vec<u16>,
}

impl Scheduler {
    /// With these costs.
    ///
    /// # Errors
    /// [`HybridError::Time`].
    pub fn new(costs: Costs) -> Result<Self, HybridError> {
        costs.check()?;
        Ok(Self {
            costs,
            allocation: Allocation::default(),
            cut: Cut::default(),
            paper: Paper::default(),
            search: Search::default(),
            schedule: Schedule::default(),
            seen: Vec::new(),
        })
    }

    /// What experts cost.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The timelines of a layer. Equal tasks give equal timelines.
    ///
    /// # Errors
    /// [`HybridError::NoTokens`], [`HybridError::Twice`], [`HybridError::Time`] for a time of `held` or `free` that is none.
    pub fn schedule(&mut self, policy: Policy, tasks: &[Task], free: Free) -> Result<&Schedule, HybridError> {
        self.check(tasks, free)?;
        self.divide(policy, tasks, free);
        if policy == Policy::Cut {
            self.search.improve(&mut self.allocation);
        }
        self.allocation.lay_out(&mut self.schedule);
        Ok(&self.schedule)
    }

    /// How long a layer takes at most, in microseconds, in less time: nothing is searched or laid out, tasks are taken as they
    /// are.
    pub(super) fn makespan(&mut self, policy: Policy, tasks: &[Task], free: Free) -> f64 {
        self.divide(policy, tasks, free);
        self.allocation.makespan()
    }

    fn divide(&mut self, policy: Policy, tasks: &[Task], free: Free) {
        let a = &mut self.allocation;
        a.begin(&self.costs, tasks, free);
        let held = a.held();
        match policy {
            Policy::Paper(order) => self.paper.divide(order, a),
            Policy::Cut => {
                self.cut.divide(a);
                repair(a);
            }
            Policy::Fixed => a.on_gpu[..held].fill(true),
            Policy::Gpu => a.on_gpu.fill(true),
            Policy::Cpu => {}
            Policy::Cheapest => {
                let way = self.costs.transfer_us;
                for (on, t) in a.on_gpu.iter_mut().zip(&a.tasks) {
                    *on = t.gpu + t.held.unwrap_or(way) <= t.cpu;
                }
            }
        }
    }

    fn check(&mut self, tasks: &[Task], free: Free) -> Result<(), HybridError> {
        let held = tasks.iter().filter_map(|t| t.held).map(|value| ("an expert on its way", value));
        let free = [("the GPU", free.gpu), ("the processor", free.cpu), ("the link", free.link)];
        if let Some((what, value)) = held.chain(free).find(|t| !t.1.is_finite() || t.1 < 0.0) {
            return Err(HybridError::Time { what, value });
        }
        if let Some(t) = tasks.iter().find(|t| t.load == 0) {
            return Err(HybridError::NoTokens { expert: t.expert });
        }
        self.seen.clear();
        self.seen.extend(tasks.iter().map(|t| t.expert));
        self.seen.sort_unstable();
        match self.seen.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(HybridError::Twice { expert: w[0] }),
            None => Ok(()),
        }
    }
}
