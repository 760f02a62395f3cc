//! What can be wrong with costs and tasks.

use crate::schedule::makespan::MakespanError;
use thiserror::Error;

/// Why there is no schedule.
#[derive(Debug, Error, PartialEq)]
pub enum HybridError {
    /// A table of times that is none.
    #[error(transparent)]
    Table(#[from] MakespanError),
    /// A time that is negative, infinite or not a number.
    #[error("{what} cannot be {value} µs\nhint: times are finite and not negative")]
    Time {
        /// Of what.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// An expert without tokens.
    #[error("expert {expert} has no tokens\nhint: leave out experts that nobody chose")]
    NoTokens {
        /// Expert.
        expert: u16,
    },
    /// An expert that is there twice.
    #[error("expert {expert} is there twice\nhint: one task for each expert, with all of its tokens")]
    Twice {
        /// Expert.
        expert: u16,
    },
}
