//! What can be wrong with what is to be simulated.

use moec_runtime::schedule::ScheduleError;

/// Why a step cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepsError {
    /// What the scheduler says.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A rate or a time that is none.
    #[error("{what} must be a finite number {from}, not {value}")]
    Number {
        /// Which.
        what: &'static str,
        /// From where on it is one.
        from: &'static str,
        /// What was given.
        value: f64,
    },
    /// A machine without channels or without DIMMs.
    #[error("{what}: a machine has at least 1 and at most {limit}, not {found}")]
    Count {
        /// Of what.
        what: &'static str,
        /// How many were given.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// Other layers than the scheduler's.
    #[error("loads of {found} layers for {layers}: give those of each layer")]
    Layers {
        /// How many were given.
        found: usize,
        /// How many the scheduler has.
        layers: usize,
    },
}
