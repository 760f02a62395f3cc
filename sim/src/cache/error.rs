//! Errors of recorded routing.

use moec_runtime::offload::cache::CacheError;

/// Routing that cannot be recorded, or that is not enough for a choice.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// Routing that does not fit the model.
    #[error("token {token} does not fit the model: {what}")]
    Routing {
        /// Index of the token in the trace.
        token: usize,
        /// Reason.
        what: String,
    },
    /// A trace too short for a choice.
    #[error("a trace of {found} tokens is too short to choose a cache policy on: {least} are the least")]
    TooShort {
        /// Number of tokens.
        found: usize,
        /// Required number of tokens.
        least: usize,
    },
    /// Error of the cache.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
