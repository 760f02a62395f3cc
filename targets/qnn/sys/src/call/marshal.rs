//! Tensors and nodes in the library's form. The structures hold addresses; what they point to is held beside
//! them.

use crate::abi::{self, Encoding, OpConfig, Param as AbiParam, Quantize, Tensor, TensorV1};
use crate::error::{Error, Result};
use crate::graph::{DType, Node, Param, Quant, Role, Scalar, TensorSpec};
use std::ffi::{CString, c_void};
use std::ptr;

/// The package of operators that every backend has.
const PACKAGE: &std::ffi::CStr = c"qti.aisw";

/// A C string of a name that was checked to have no zero byte.
pub(crate) fn name(of: &str) -> Result<CString> {
    CString::new(of).map_err(|e| Error::Graph { graph: of.into(), what: e.to_string() })
}

/// A number of the library's, of 32 bits: how many `what` something named `of` has.
pub(crate) fn count(n: usize, what: &'static str, of: &str) -> Result<u32> {
    u32::try_from(n).map_err(|_| Error::Count { of: of.into(), found: n as u64, what: what.into() })
}

/// A tensor with everything that its structure points to. It does not move while that structure is in use:
/// all parts are on the heap.
pub(crate) struct OwnedTensor {
    pub(crate) tensor: Tensor,
    _parts: Parts,
}

/// Name, sizes, scales, offsets, pairs of both, data.
type Parts = (CString, Vec<u32>, Vec<f32>, Vec<i32>, Vec<abi::ScaleOffset>, Vec<u8>);

/// Quantisation of a tensor without one.
fn unquantised() -> Quantize {
    Quantize {
        definition: abi::UNDEFINED,
        encoding: abi::UNDEFINED,
        params: Encoding { tensor: abi::ScaleOffset { scale: 0.0, offset: 0 } },
    }
}

impl OwnedTensor {
    /// A tensor of a graph; data of constants are read here.
    pub(crate) fn of(spec: &TensorSpec) -> Result<Self> {
        let kind = match spec.role {
            Role::Input => abi::APP_WRITE,
            Role::Output => abi::APP_READ,
            Role::Native => abi::NATIVE,
            Role::Static => abi::STATIC,
        };
        let data = spec.data.as_ref().map(crate::graph::Data::read).transpose()?;
        Self::new(&spec.name, kind, spec.dtype, &spec.dims, &spec.quant, data.unwrap_or_default())
    }

    /// A tensor of which everything is given.
    pub(crate) fn new(
        of: &str,
        kind: u32,
        dtype: DType,
        dims: &[u32],
        quant: &Quant,
        mut data: Vec<u8>,
    ) -> Result<Self> {
        let (mut scales, mut offsets, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        let name = name(of)?;
        let count = |n, what| count(n, what, of);
        let dims = dims.to_vec();
        let quantize = match quant {
            Quant::None => unquantised(),
            Quant::Tensor { scale, offset } => Quantize {
                definition: abi::DEFINED,
                encoding: abi::SCALE_OFFSET,
                params: Encoding { tensor: abi::ScaleOffset { scale: *scale, offset: *offset } },
            },
            Quant::Channels { axis, bits, scales: given } if *bits < 8 => {
                scales.clone_from(given);
                offsets = vec![0; given.len()];
                let axis = abi::BitsAxisScaleOffset {
                    bits: *bits,
                    axis: *axis as i32,
                    count: count(given.len(), "scales")?,
                    scales: scales.as_ptr(),
                    offsets: offsets.as_ptr(),
                };
                Quantize {
                    definition: abi::DEFINED,
                    encoding: abi::BITS_AXIS_SCALE_OFFSET,
                    params: Encoding { bits_axis: axis },
                }
            }
            Quant::Channels { axis, scales: given, .. } => {
                pairs = given.iter().map(|&scale| abi::ScaleOffset { scale, offset: 0 }).collect();
                let axis = abi::AxisScaleOffset {
                    axis: *axis as i32,
                    count: count(given.len(), "scales")?,
                    pairs: pairs.as_ptr(),
                };
                Quantize {
                    definition: abi::DEFINED,
                    encoding: abi::AXIS_SCALE_OFFSET,
                    params: Encoding { axis },
                }
            }
        };
        let pointer = if data.is_empty() { ptr::null_mut() } else { data.as_mut_ptr().cast::<c_void>() };
        let tensor = Tensor {
            version: abi::TENSOR_V1,
            v1: TensorV1 {
                id: 0,
                name: name.as_ptr(),
                kind,
                format: 0,
                dtype: dtype.code(),
                quantize,
                rank: count(dims.len(), "dimensions")?,
                dims: dims.as_ptr(),
                memory: abi::MEMORY_RAW,
                buffer: abi::ClientBuffer { data: pointer, len: count(data.len(), "bytes")? },
            },
            dynamic: ptr::null(),
            sparse: abi::Sparse { layout: abi::UNDEFINED, counts: [0; 2] },
            produced: 0,
        };
        Ok(Self { tensor, _parts: (name, dims, scales, offsets, pairs, data) })
    }
}

/// A node with everything that its structure points to.
pub(crate) struct OwnedNode {
    pub(crate) config: OpConfig,
    _parts: (Vec<CString>, Vec<AbiParam>, [Vec<Tensor>; 2]),
}

impl OwnedNode {
    /// A node with tensors that were passed to the graph before, in the order of their ids. Parameters that
    /// are tensors keep their data.
    pub(crate) fn of(node: &Node, tensors: &[OwnedTensor]) -> Result<Self> {
        let find = |id: &crate::graph::TensorId| {
            tensors.get(id.index()).map(|held| held.tensor).ok_or_else(|| Error::Graph {
                graph: node.name.clone(),
                what: "it names a tensor of another graph".into(),
            })
        };
        let mut names = vec![name(&node.name)?, name(&node.op)?];
        let mut params = Vec::new();
        for (of, param) in &node.params {
            let of = name(of)?;
            params.push(match param {
                Param::Scalar(scalar) => AbiParam {
                    kind: abi::PARAM_SCALAR,
                    name: of.as_ptr(),
                    value: abi::ParamValue { scalar: value(*scalar) },
                },
                Param::Tensor(id) => AbiParam {
                    kind: abi::PARAM_TENSOR,
                    name: of.as_ptr(),
                    value: abi::ParamValue { tensor: find(id)? },
                },
            });
            names.push(of);
        }
        let inputs: Vec<Tensor> = node.inputs.iter().map(find).collect::<Result<_>>()?;
        let outputs: Vec<Tensor> = node.outputs.iter().map(find).collect::<Result<_>>()?;
        let config = OpConfig {
            version: abi::OP_V1,
            name: names[0].as_ptr(),
            package: PACKAGE.as_ptr(),
            kind: names[1].as_ptr(),
            param_count: count(params.len(), "parameters", &node.name)?,
            params: params.as_ptr(),
            input_count: count(inputs.len(), "inputs", &node.name)?,
            inputs: inputs.as_ptr(),
            output_count: count(outputs.len(), "outputs", &node.name)?,
            outputs: outputs.as_ptr(),
        };
        Ok(Self { config, _parts: (names, params, [inputs, outputs]) })
    }
}

/// A number in the library's form.
fn value(scalar: Scalar) -> abi::Scalar {
    let (dtype, bits) = match scalar {
        Scalar::Bool(b) => (DType::Bool, u32::from(b)),
        Scalar::U32(n) => (DType::U32, n),
        Scalar::I32(n) => (DType::I32, n as u32),
        Scalar::F32(x) => (DType::F32, x.to_bits()),
    };
    abi::Scalar { dtype: dtype.code(), value: u64::from(bits).to_le() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_above_32_bits_is_an_error_that_names_it() {
        assert_eq!(count(u32::MAX as usize, "bytes", "w").unwrap(), u32::MAX);
        let error = count(1 << 32, "bytes", "w").unwrap_err();
        assert_eq!(error.to_string(), "`w` has 4294967296 bytes, but QNN accepts at most 4294967295");
        assert!(error.hint().is_some_and(|hint| hint.contains("split it")), "{error:?}");
    }
}
