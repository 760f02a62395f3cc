//! Errors of simulations.

use moec_runtime::schedule::ScheduleError;

/// Reason that a step cannot be simulated.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StepsError {
    /// Error of the scheduler.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// An invalid rate or time.
    #[error("{what} must be a finite number {from}, not {value}")]
    Number {
        /// Name of the quantity.
        what: &'static str,
        /// Smallest valid value.
        from: &'static str,
        /// Its value.
        value: f64,
    },
    /// A machine without channels or without DIMMs.
    #[error("{what}: a machine has at least 1 and at most {limit}, not {found}")]
    Count {
        /// Name of the counted things.
        what: &'static str,
        /// Given number.
        found: usize,
        /// The most.
        limit: usize,
    },
    /// Other layers than the scheduler's.
    #[error("loads of {found} layers for {layers}: give those of each layer")]
    Layers {
        /// Given number.
        found: usize,
        /// Number that the scheduler has.
        layers: usize,
    },
}
