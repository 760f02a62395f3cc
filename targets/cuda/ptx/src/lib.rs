//! PTX, read back and executed on the host: what moec emits for NVIDIA GPUs is tested where there is none.
//!
//! A [`Module`] is what a text says ([`parse`], [`print()`]). What is covered, and what an interpreter cannot see, stands in
//! `docs/ptx.md`; the language is that of the PTX ISA, as LLVM's NVPTX emits it for kernels.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod code;
mod exec;
mod fault;
mod lanes;
mod memory;
pub mod module;
mod number;
mod opcode;
mod resolve;
mod text;
mod types;
mod verify;

pub use code::Class as InstructionClass;
pub use exec::{Argument, ClassCount, ExecutionError, Kind, Launch, LaunchError, Program, Report, Traffic};
pub use fault::Fault;
pub use memory::{Buffer, Memory};
pub use module::Module;
pub use opcode::Opcode;
pub use text::{SyntaxError, parse, print};
pub use types::{Class, Space, Type};
pub use verify::verify;
