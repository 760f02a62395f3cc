//! Tensors, parameters and nodes.

use super::layout;
use std::ffi::{c_char, c_void};

/// Values of `Qnn_TensorType_t`.
pub(crate) const APP_WRITE: u32 = 0;
pub(crate) const APP_READ: u32 = 1;
pub(crate) const NATIVE: u32 = 3;
pub(crate) const STATIC: u32 = 4;

/// Values of `Qnn_Definition_t`: the quantisation is given, or it is not.
pub(crate) const DEFINED: u32 = 1;
pub(crate) const UNDEFINED: u32 = 0x7FFF_FFFF;

/// Values of `Qnn_QuantizationEncoding_t`.
pub(crate) const SCALE_OFFSET: u32 = 0;
pub(crate) const AXIS_SCALE_OFFSET: u32 = 1;
pub(crate) const BITS_SCALE_OFFSET: u32 = 2;
pub(crate) const BITS_AXIS_SCALE_OFFSET: u32 = 3;

/// `Qnn_TensorVersion_t` of [`TensorV1`].
pub(crate) const TENSOR_V1: u32 = 1;
/// `Qnn_TensorVersion_t` of the longer structure, which begins like [`TensorV1`].
pub(crate) const TENSOR_V2: u32 = 2;
/// `Qnn_TensorMemType_t` of memory of the caller's.
pub(crate) const MEMORY_RAW: u32 = 0;
/// `Qnn_OpConfigVersion_t` of [`OpConfig`].
pub(crate) const OP_V1: u32 = 1;
/// Values of `Qnn_ParamType_t`.
pub(crate) const PARAM_SCALAR: u32 = 0;
pub(crate) const PARAM_TENSOR: u32 = 1;

/// `Qnn_ScaleOffset_t`: `real = (stored + offset) · scale`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ScaleOffset {
    pub scale: f32,
    pub offset: i32,
}

/// `Qnn_AxisScaleOffset_t`: one pair for each index of an axis.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AxisScaleOffset {
    pub axis: i32,
    pub count: u32,
    pub pairs: *const ScaleOffset,
}

/// `Qnn_BwScaleOffset_t`: as [`ScaleOffset`], of fewer bits than the type has.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BitsScaleOffset {
    pub bits: u32,
    pub scale: f32,
    pub offset: i32,
}

/// `Qnn_BwAxisScaleOffset_t`: as [`AxisScaleOffset`], of fewer bits than the type has.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct BitsAxisScaleOffset {
    pub bits: u32,
    pub axis: i32,
    pub count: u32,
    pub scales: *const f32,
    /// Null: all are zero.
    pub offsets: *const i32,
}

/// The union of `Qnn_QuantizeParams_t`; the largest member decides its size.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union Encoding {
    pub tensor: ScaleOffset,
    pub axis: AxisScaleOffset,
    pub bits: BitsScaleOffset,
    pub bits_axis: BitsAxisScaleOffset,
}

/// `Qnn_QuantizeParams_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Quantize {
    pub definition: u32,
    pub encoding: u32,
    pub params: Encoding,
}

/// `Qnn_ClientBuffer_t`: memory of the caller's, with its length in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ClientBuffer {
    pub data: *mut c_void,
    pub len: u32,
}

/// `Qnn_TensorV1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct TensorV1 {
    /// Given by `tensorCreateGraphTensor`.
    pub id: u32,
    pub name: *const c_char,
    pub kind: u32,
    pub format: u32,
    pub dtype: u32,
    pub quantize: Quantize,
    pub rank: u32,
    pub dims: *const u32,
    pub memory: u32,
    pub buffer: ClientBuffer,
}

/// `Qnn_SparseParams_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Sparse {
    pub layout: u32,
    pub counts: [u32; 2],
}

/// `Qnn_Tensor_t`, a tagged union of [`TensorV1`] and a second, longer version, which begins like it. The
/// fields after the common part are declared here so that the size is right; tensors written here are of the
/// first version.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub version: u32,
    pub v1: TensorV1,
    pub dynamic: *const u8,
    pub sparse: Sparse,
    pub produced: u8,
}

/// `Qnn_Scalar_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Scalar {
    pub dtype: u32,
    /// A union: narrower values are in its first bytes.
    pub value: u64,
}

/// The union of `Qnn_Param_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) union ParamValue {
    pub scalar: Scalar,
    pub tensor: Tensor,
}

/// `Qnn_Param_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Param {
    pub kind: u32,
    pub name: *const c_char,
    pub value: ParamValue,
}

/// `Qnn_OpConfig_t` with its only version inside.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OpConfig {
    pub version: u32,
    pub name: *const c_char,
    pub package: *const c_char,
    pub kind: *const c_char,
    pub param_count: u32,
    pub params: *const Param,
    pub input_count: u32,
    pub inputs: *const Tensor,
    pub output_count: u32,
    pub outputs: *const Tensor,
}

#[cfg(target_pointer_width = "64")]
layout! {
    ScaleOffset: 8, 4;
    AxisScaleOffset: 16, 8;
    BitsScaleOffset: 12, 4;
    BitsAxisScaleOffset: 32, 8;
    Quantize: 40, 8;
    ClientBuffer: 16, 8;
    TensorV1: 112, 8;
    Tensor: 144, 8;
    Scalar: 16, 8;
    Param: 160, 8;
    OpConfig: 80, 8;
}
