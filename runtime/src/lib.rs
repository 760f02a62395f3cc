//! What ships: executes a Plan.
//!
//! * [`program`]: a Plan, verified, with the addresses of its kernels.
//! * [`Engine`]: runs it. The processor's threads walk its steps together ([`pool`], [`barrier`]); every other unit walks its own
//!   beside them, and units wait for each other at events.
//! * [`mod@unit`] and [`store`]: the seams for later targets; what executes a step, where weights come from.
//! * [`graphs`]: static graphs that a unit beside the processor executes; [`chunk`]: what those of attention are given.
//! * `coreml`: executes them with Core ML, on macOS.
//! * `offload`: rows that go to static graphs and back; [`beside`]: units with memories of their own.
//! * [`scheduler`]: many sequences over one engine, in rounds of prompts and decoding; what every verb generates with.
//! * `states`: what the slots hold of their sequences; how these begin, go back and are copied.
//! * [`saved`]: what a slot holds of a prompt, in a file; [`speculate`]: several tokens in one call, guessed from the text itself.
//! * [`overflow`]: what becomes of tokens past an expert's capacity, where capacities are static.
//! * [`big_little`]: tokens decoded with fewer experts where that is enough; [`mod@best_of`]: several sequences after one prompt.
//! * [`stops`]: texts that end an answer.
//! * [`flash`]: reads weights that are not held in memory; [`paging`]: experts that stay there, as steps see them.
//! * [`hybrid`]: experts of a layer over a GPU, the processor and the link between them, transferred ahead and cached on three levels; decisions only.
//! * [`assign`]: experts that several units can run, in a plan that runs; [`makespan`]: which unit computes which expert of a step, where several can; decisions only.
//! * [`cache`]: which experts stay where not all fit; decisions only.
//! * [`neurons`]: which neurons of experts stay: a cache in regions; decisions only.
//! * [`weights`]: whether they lie in memory of our own ([`owned`]) or in the page cache, and why.
//! * [`mapped`]: files mapped for reading, and what happens when one is cut under the program.
//! * [`regular`]: files that others wrote, opened without trust.
//! * [`manifest`]: all files of a bundle, held against what the build wrote down of them.
//! * [`timeline`]: what every thread and the disk did, and when.
//! * [`cli`]: the verbs of `BUNDLE/run`, and of `moec run BUNDLE`.
//!
//! `unsafe` code is in `memory`, `pool`, `unit`, `processor`, `admission`, `offload`, `beside`, `engine`, `call` and `trace` (addresses and threads), `mapped` and `store`
//! (mapped files, and what becomes of one that is cut), `paging` (what steps read of experts on flash), `owned` (memory that reads fill, questions to the page cache), `flash` (reads by the kernel into memory: `buffer`, `uring`, `threads`, and those that hand it to them),
//! `coreml` (calls of Core ML), `cpu`, `regular` and `cli::interrupt` (questions to the system), and nowhere else.
//!
//! Architecture invariant: this crate reaches `moec-ir` and nothing else of the workspace, so that it
//! builds beside a generated runner.

pub mod abi;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
mod admission;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod assign;
mod available;
pub mod barrier;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod beside;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod best_of;
pub mod big_little;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod builtin;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod cache;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
mod call;
pub mod chunk;
pub mod cli;
#[cfg(any(target_os = "macos", test))]
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod coreml;
pub mod cpu;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod engine;
pub mod error;
mod events;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod flash;
pub mod generate;
pub mod graphs;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod hybrid;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod makespan;
pub mod manifest;
pub mod mapped;
pub mod memory;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod neurons;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
mod offload;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod overflow;
pub mod owned;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod paging;
pub mod pool;
mod preload;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
mod processor;
pub mod program;
pub mod regular;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod sampler;
pub mod saved;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
pub mod scheduler;
pub mod speculate;
#[allow(clippy::cast_possible_truncation, reason = "indices and sizes of a verified plan")]
mod states;
pub mod stops;
pub mod store;
pub mod text;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod timeline;
#[allow(clippy::cast_possible_truncation, reason = "numerics of policies and counters")]
pub mod trace;
pub mod unit;
pub mod weights;

pub use best_of::{BestOf, best_of, best_of_into};
pub use big_little::{Decoder, Fallbacks};
pub use engine::{Engine, Memory, Options, Row, Want};
pub use error::{Cannot, Error, Fault, Result};
pub use generate::{Generation, Request, generate};
pub use program::Program;
pub use sampler::{Constraint, LogProbabilities, Sampler, Sampling};
pub use scheduler::{Scheduler, Setting};
pub use store::CheckLevel;
pub use text::Text;
pub use trace::{Moment, StepView};
pub use weights::{Demand, Held, Weights};
