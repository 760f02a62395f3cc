//! Graphs as data: tensors and nodes, checked where they are added, composed later by a
//! [`Context`](crate::Context), in this process or in another one.

mod builder;
mod dtype;
mod tensor;

pub use builder::{GraphSpec, Node, Options, Param, Scalar};
pub use dtype::{DType, Quant, real, stored};
pub use tensor::{Data, Role, TensorId, TensorSpec};
