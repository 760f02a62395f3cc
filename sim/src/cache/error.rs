//! What can be wrong with recorded routing.

use moec_runtime::offload::cache::CacheError;

/// Routing that cannot be recorded, or nothing can be chosen on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum TraceError {
    /// Routing that does not fit the model.
    #[error("token {token} does not fit the model: {what}")]
    Routing {
        /// Index of the token in the trace.
        token: usize,
        /// What does not fit.
        what: String,
    },
    /// A trace too short to decide on.
    #[error("a trace of {found} tokens is too short to choose a cache policy on: {least} are the least")]
    TooShort {
        /// Tokens.
        found: usize,
        /// Tokens that are needed.
        least: usize,
    },
    /// What the cache refuses.
    #[error(transparent)]
    Cache(#[from] CacheError),
}
