//! The two languages of moec.
//!
//! * [`graph`]: **what** to compute. Static-shape SSA over rows of tokens, one graph per entry point,
//!   sharing weights and KV-cache state. Its meaning is executable: [`eval`] is the naive f32
//!   reference that every other executor is held against.
//! * [`plan`]: **how, where and when**. Buffers with arena offsets, weight segments, steps.
//!
//! * [`placement`]: the part of a plan that says where operators and experts run. It exists before the plan
//!   does, from the passes that decide it.
//!
//! All have a text form ([`text`]) that prints, parses back and compares equal, and a verifier
//! ([`verify`]).
//!
//! Architecture invariant: this crate knows no device, no model family, no file system and no LLVM.
#![expect(
    clippy::cast_possible_truncation,
    reason = "ids count what memory holds, far below 2³²; the evaluator rounds to f32"
)]

pub mod access;
pub mod builder;
pub mod bundle;
pub mod cpus;
pub mod eval;
pub mod experts;
pub mod expr;
mod format;
pub mod graph;
pub mod heads;
pub mod infer;
pub mod launch;
pub mod memory;
#[path = "ops/mod.rs"]
pub mod op;
pub mod paging;
pub mod patch;
mod peak;
pub mod placement;
pub mod plan;
pub mod read;
pub mod regions;
pub mod results;
pub mod scope;
pub mod segment;
pub mod state;
pub mod static_graph;
pub mod step;
pub mod text;
pub mod types;
pub mod verify;
pub mod weights;

pub use builder::GraphBuilder;
pub use bundle::Bundle;
pub use cpus::{CpuList, MOST_CPUS};
pub use graph::{
    EntryKind, FEW_ROWS, Graph, Module, Node, NodeId, Operand, StateDecl, StateId, ValueId, WeightId,
};
pub use infer::TypeError;
pub use op::{Activation, Glu, Op, Predictor, RopeStyle, RouterDesc};
pub use patch::Patch;
pub use scope::{Part, Role, Scope};
pub use state::StateKind;
pub use types::{DType, Format, Type};
pub use weights::{Axis, Coded, Elementwise, Encoding, Leaf, Source, Weight, WeightClass, WeightExpr};
