//! Runtime of bundles: executes a Plan.
//!
//! * [`bundle`]: a bundle's [`Program`], which is its verified Plan with the addresses of its kernels; the manifest of its files.
//! * [`weights`]: where weights lie: mapped, or in memory of our own.
//! * [`exec`]: the [`Engine`]. The CPU's threads walk the steps of an entry point together; every other unit ([`exec::unit`])
//!   walks its own beside them, and units wait for each other at events ([`sync`]).
//! * [`kv`]: what slots hold of their sequences; how these begin, go back, are copied and saved.
//! * [`offload`]: experts and neurons on disk: the reader, what is in memory, which stay.
//! * [`schedule`]: which unit computes which expert of a step, where several can.
//! * [`serving`]: sequences in batches, samplers, drafts, stop strings, the tokenizer.
//! * [`platform`]: CPUs, memory, files of others.
//! * [`cli`]: the subcommands of `BUNDLE/run`, and of `moec run BUNDLE`.
//!
//! `unsafe` code is in `exec` (addresses and threads), `sync::pool`, `platform` (memory, mapped files and what
//! becomes of one that is cut, questions to the operating system), `weights` (mapped files, memory that reads fill, questions to the page
//! cache), `offload::disk` (reads into memory: `buffer`, `uring`, `threads`, and those that hand it to them), `offload::paging`
//! (what steps read of experts on disk), `cli::interrupt`, and nowhere else.
//!
//! Architecture invariant: this crate reaches `moec-ir` and nothing else of the workspace, so that it
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
pub use exec::engine::{Engine, Memory, Options, Row, Want};
pub use exec::trace::{Moment, StepView};
pub use serving::best_of::{BestOf, best_of, best_of_into};
pub use serving::big_little::{Decoder, Fallbacks};
pub use serving::generate::{Generation, Request, generate};
pub use serving::sampler::{Constraint, LogProbabilities, Sampler, Sampling};
pub use serving::scheduler::{Scheduler, Setting};
pub use serving::text::Text;
pub use weights::store::CheckLevel;
pub use weights::{Demand, WeightPlacement, Weights};
