//! Runtime of bundles: executes a Plan.
//!
//! * [`bundle`]: a bundle's [`Program`], which is its verified Plan with the addresses of its kernels; the
//!   manifest of its files.
//! * [`weights`]: the placement of weights: mapped, or in memory of our own.
//! * [`exec`]: the [`Engine`]. The CPU's threads walk the steps of an entry point together. Every other unit
//!   ([`exec::unit`]) walks its own steps at the same time, and units wait for each other at events
//!   ([`sync`]).
//! * [`kv`]: states of the sequences in slots, which can go back, be copied and be saved.
//! * [`offload`]: experts and neurons on disk: the reader, the caches and their eviction.
//! * [`schedule`]: the choice of the unit that computes each expert of a step, if several can.
//! * [`serving`]: sequences in batches, samplers, drafts, stop strings, the tokenizer.
//! * [`platform`]: CPUs, memory, untrusted files.
//! * [`cli`]: the subcommands of `BUNDLE/run`, and of `moec run BUNDLE`.
//!
//! `unsafe` code is in `exec` (addresses and threads), `sync::pool`, `platform` (memory, mapped files that
//! may be truncated, system calls), `weights` (mapped files, memory that reads fill, queries of the page
//! cache), `offload::disk` (reads into memory: `buffer`, `uring`, `threads`, and their callers),
//! `offload::paging` (experts on disk that steps read), `schedule::dispatch` (copies of experts to other
//! units), `bundle::files` (hints about files), `cli::interrupt`, `cli::limits`, and nowhere else.
//!
//! Architecture invariant: this crate depends on `moec-ir` and no other crate of the workspace, so that it
//! builds beside a generated runner.

pub mod bundle;
pub mod cli;
pub mod error;
pub mod exec;
pub mod kv;
pub mod offload;
pub mod platform;
pub mod schedule;
pub mod serving;
pub mod sync;
pub mod weights;

pub use bundle::program::Program;
pub use error::{Error, Fault, Limit, Result};
pub use exec::engine::{Engine, LogitRows, Memory, Options, Row};
pub use exec::trace::{Moment, StepView};
pub use serving::best_of::{BestOf, best_of, best_of_into};
pub use serving::big_little::{Decoder, Fallbacks};
pub use serving::generate::{Generation, Request, generate};
pub use serving::sampler::{Constraint, LogProbabilities, Sampler, Sampling};
pub use serving::scheduler::{Scheduler, Setting};
pub use serving::text::Text;
pub use weights::store::CheckLevel;
pub use weights::{Demand, WeightPlacement, Weights};
