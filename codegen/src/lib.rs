//! Code generation: LLVM kernels, packed weights, the Rust source of `run`.
//!
//! * [`spec`]: the kernels that can be requested; [`compile`] writes them to one ELF object.
//! * [`schedule`]: how matrix kernels cut their work.
//! * [`machine`]: what they are compiled for.
//! * [`pack`]: weights in the order that kernels read.
//! * [`jit`]: an object loaded into this process.
//! * [`source`]: the Rust source of a bundle's `run`.
//! * [`mod@table`]: the object by which a precompiled `run` finds plan and kernels.
//!
//! Architecture invariant: this crate knows kernels, not models; it decides nothing.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod error;
pub mod jit;
pub mod machine;
mod merge;
pub mod pack;
pub mod source;
pub mod spec;
pub mod table;
mod version;

mod dsl;
mod emit;
pub mod gpu;
mod kernels;

pub use emit::{Objects, assembly, compile, llvm_ir};
pub use error::{Error, Result};
pub use kernels::cache::{BLOCK as CACHE_BLOCK, key_order, value_order};
pub use kernels::neuron::{has_gate_bounds, neurons_multiply};
pub use kernels::recurrence::delta_order;
pub use machine::{ByteDot, Isa, Machine};
pub use spec::schedule::{self, Knob, Schedule, evenly_from, least};
pub use spec::{
    ComputeType, KernelSpec, MapOp, NormKind, Rotation, RowFormat, RowNorm, WeightOrder, active_list_words,
    packed_words, pad_row_stride,
};
pub use table::table;
pub use version::llvm_version;
