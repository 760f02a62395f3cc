//! Networks as ONNX models, in QDQ form: every operator in f32, between `QuantizeLinear` and
//! `DequantizeLinear` where its operands and result are codes. Any runtime of ONNX runs it, and one with an
//! HTP computes in codes.
//!
//! For a tensor `t` with codes the model has these values: `t` at the graph's boundary, in f32; `t/q`, its
//! codes; `t/dq`, the dequantised codes; `t/f`, the result of an operator; `t/scale` and `t/zero`. No tensor
//! of a network has a `/` in its name. Weights in a file stay there, as external data.

mod error;
mod proto;
mod read;
mod write;

pub use error::OnnxError;
pub use read::read;
pub use write::write;

use crate::net::Dtype;

/// The types that both have.
const TYPES: [(Dtype, i32); 6] = [
    (Dtype::F32, proto::data_type::FLOAT),
    (Dtype::U16, proto::data_type::UINT16),
    (Dtype::U8, proto::data_type::UINT8),
    (Dtype::I8, proto::data_type::INT8),
    (Dtype::I4, proto::data_type::INT4),
    (Dtype::I32, proto::data_type::INT32),
];

const QUANTIZE: &str = "QuantizeLinear";
const DEQUANTIZE: &str = "DequantizeLinear";

#[cfg(test)]
mod tests;
