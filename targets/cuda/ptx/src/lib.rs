//! PTX, read back and executed on the host, so that moec's code for NVIDIA GPUs is tested without a GPU.
//!
//! A [`Module`] is the contents of a text ([`parse`], [`print()`]). `docs/ptx.md` lists the supported part of
//! the language, and the limits of an interpreter. The language is that of the PTX ISA, as LLVM's NVPTX emits
//! it for kernels.
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
