//! Scheduler that divides the experts of a layer.

use super::allocation::Allocation;
use super::cut::Cut;
use super::paper::Paper;
use super::repair::repair;
use super::search::Search;
use super::task::{Free, Task, Timelines};
use crate::schedule::costs::Costs;
use crate::schedule::error::ScheduleError;
use crate::schedule::policy::Solver;

/// Divides the experts of layers with equal costs. Its buffers are kept from call to call.
#[derive(Clone, Debug)]
pub struct TimelineScheduler {
    costs: Costs,
    allocation: Allocation,
    cut: Cut,
    paper: Paper,
    search: Search,
    schedule: Timelines,
    seen: Vec<u16>,
}

impl TimelineScheduler {
    /// Creates a scheduler with these costs.
    ///
    /// # Errors
    /// [`ScheduleError::Time`].
    pub fn new(costs: Costs) -> Result<Self, ScheduleError> {
        check_costs(&costs)?;
        Ok(Self {
            costs,
            allocation: Allocation::default(),
            cut: Cut::default(),
            paper: Paper::default(),
            search: Search::default(),
            schedule: Timelines::default(),
            seen: Vec::new(),
        })
    }

    /// Replaces the costs.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub(crate) fn set_costs(&mut self, costs: Costs) -> Result<(), ScheduleError> {
        check_costs(&costs)?;
        self.costs = costs;
        Ok(())
    }

    /// Costs of experts.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// The timelines of a layer. Equal tasks give equal timelines.
    ///
    /// # Errors
    /// [`ScheduleError::NoTokens`], [`ScheduleError::Twice`], [`ScheduleError::Time`] for a negative or NaN
    /// time of `held` or `free`.
    pub fn schedule(
        &mut self,
        policy: Solver,
        tasks: &[Task],
        free: Free,
    ) -> Result<&Timelines, ScheduleError> {
        self.check(tasks, free)?;
        if !policy.has_timelines() {
            return Err(ScheduleError::Solver(policy.name()));
        }
        self.divide(policy, tasks, free);
        if policy == Solver::Best {
            self.search.improve(&mut self.allocation);
        }
        self.allocation.lay_out(&mut self.schedule);
        Ok(&self.schedule)
    }

    /// Upper bound of a layer's time, in microseconds. It is cheaper: nothing is searched or laid out, and
    /// tasks are not checked.
    pub(crate) fn makespan(&mut self, policy: Solver, tasks: &[Task], free: Free) -> f64 {
        self.divide(policy, tasks, free);
        self.allocation.makespan()
    }

    fn divide(&mut self, policy: Solver, tasks: &[Task], free: Free) {
        let a = &mut self.allocation;
        a.begin(&self.costs, tasks, free);
        let held = a.held();
        match policy {
            Solver::Paper(order) => self.paper.divide(order, a),
            Solver::Best => {
                self.cut.divide(a);
                repair(a);
            }
            Solver::Fixed => a.on_gpu[..held].fill(true),
            Solver::Gpu => a.on_gpu.fill(true),
            // The last two are solvers for sums, and were refused before.
            Solver::Cpu | Solver::Refined | Solver::Hottest(_) => {}
            Solver::Cheapest => {
                let transfer_us = self.costs.bring_us;
                for (on, t) in a.on_gpu.iter_mut().zip(&a.tasks) {
                    *on = t.gpu + t.held.unwrap_or(transfer_us) <= t.cpu;
                }
            }
        }
    }

    fn check(&mut self, tasks: &[Task], free: Free) -> Result<(), ScheduleError> {
        let held = tasks.iter().filter_map(|t| t.held).map(|value| ("an expert on its way", value));
        let free = [("the GPU", free.gpu), ("the CPU", free.cpu), ("the link", free.link)];
        if let Some((what, value)) = held.chain(free).find(|t| !t.1.is_finite() || t.1 < 0.0) {
            return Err(ScheduleError::Time { what, value });
        }
        if let Some(t) = tasks.iter().find(|t| t.load == 0) {
            return Err(ScheduleError::NoTokens { expert: t.expert });
        }
        self.seen.clear();
        self.seen.extend(tasks.iter().map(|t| t.expert));
        self.seen.sort_unstable();
        match self.seen.windows(2).find(|w| w[0] == w[1]) {
            Some(w) => Err(ScheduleError::Twice { expert: w[0] }),
            None => Ok(()),
        }
    }
}

/// Fails if a time is negative or infinite, or if there is no GPU.
fn check_costs(costs: &Costs) -> Result<(), ScheduleError> {
    costs.check(true)?;
    match costs.gpu {
        Some(_) => Ok(()),
        None => Err(ScheduleError::NoUnit { policy: "of frames".into(), unit: "GPU" }),
    }
}
