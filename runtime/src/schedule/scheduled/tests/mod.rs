//! Tests of the schedules.

mod drawn;
mod equations;
mod migration;
mod optimum;
mod policies;
mod properties;
mod running;
mod systems;
mod workload;

use super::{ExpertScheduler, Setup, Window};
use crate::schedule::{Costs, NearCosts, System, Table};
