//! Tests of the schedules.

mod equations;
mod migration;
mod optimum;
mod policies;
mod properties;
mod timing;
mod workload;
