//! Networks as graphs of QNN's library, which compiles and executes them where it is installed.
//!
//! The library requires more of some operators than ONNX does. The second factor of a product, and the gain
//! of a norm, must have zero in the middle of their codes, as [`crate::quant::coded`] ensures; a norm has a
//! third operand, of zeros.

use crate::exec::{ExecError, static_bytes};
use crate::net::{Dtype, Network, Node, Op, Quant, Scale, Tensor, TensorId, unpack_nibbles};
use moec_qnn_sys::{self as sys, DType, Data, GraphSpec, Scalar};
use moec_runtime::bundle::BundleReader;
use thiserror::Error;

/// Reason that a network is not a graph of the library.
#[derive(Debug, Error)]
pub enum ComposeError {
    /// The library's crate refuses it.
    #[error("network `{network}`: {source}")]
    Refused {
        /// The network.
        network: String,
        /// Error of the library.
        source: Box<sys::Error>,
    },
    /// Static numbers that cannot be read.
    #[error(transparent)]
    Static(#[from] ExecError),
    /// Something that the library has in another form.
    #[error("network `{network}`: `{tensor}`: {what}")]
    Form {
        /// The network.
        network: String,
        /// The tensor.
        tensor: String,
        /// The fault.
        what: &'static str,
    },
}

type Result<T> = std::result::Result<T, ComposeError>;

/// A verified network as a graph; static numbers in files are read from `files`.
///
/// # Errors
/// A type or an extent that the library has not; numbers that cannot be read.
pub fn compose(network: &Network, files: Option<&BundleReader>) -> Result<GraphSpec> {
    let mut composer =
        Composer { network, spec: GraphSpec::new(&network.name), ids: vec![None; network.tensors.len()] };
    // In the order of the network's: the library has that in which they come.
    for id in &network.inputs {
        composer.add_boundary(*id, GraphSpec::input)?;
    }
    for id in &network.outputs {
        composer.add_boundary(*id, GraphSpec::output)?;
    }
    for (i, tensor) in network.tensors.iter().enumerate().filter(|(_, t)| t.is_static()) {
        composer.ids[i] = Some(composer.constant(tensor, files)?);
    }
    for node in &network.nodes {
        composer.node(node)?;
    }
    Ok(composer.spec)
}

/// Adds a tensor that is not static.
type Add = fn(&mut GraphSpec, &str, DType, &[u32], sys::Quant) -> sys::Result<sys::TensorId>;

struct Composer<'a> {
    network: &'a Network,
    spec: GraphSpec,
    ids: Vec<Option<sys::TensorId>>,
}

impl Composer<'_> {
    fn refused(&self, source: sys::Error) -> ComposeError {
        ComposeError::Refused { network: self.network.name.clone(), source: Box::new(source) }
    }

    fn form(&self, tensor: &Tensor, what: &'static str) -> ComposeError {
        ComposeError::Form { network: self.network.name.clone(), tensor: tensor.name.clone(), what }
    }

    /// A number of a tensor's in the library's form.
    fn narrow<N, T: TryFrom<N>>(&self, tensor: &Tensor, n: N) -> Result<T> {
        T::try_from(n).map_err(|_| self.form(tensor, "a number that does not fit the library's type"))
    }

    fn dims(&self, tensor: &Tensor) -> Result<Vec<u32>> {
        tensor.shape.iter().map(|&n| self.narrow(tensor, n)).collect()
    }

    fn described(&self, tensor: &Tensor) -> Result<(DType, Vec<u32>, sys::Quant)> {
        let channels = |scales: &[f32], bits| sys::Quant::Channels { axis: 0, bits, scales: scales.to_vec() };
        let (dtype, quant) = match (tensor.ty, &tensor.quant) {
            (Dtype::F32, _) => (DType::F32, sys::Quant::None),
            (Dtype::F16, _) => (DType::F16, sys::Quant::None),
            (Dtype::U16, Quant::Tensor(s)) => (DType::U16, scale(*s)),
            (Dtype::U8, Quant::Tensor(s)) => (DType::U8, scale(*s)),
            (Dtype::I8, Quant::Channels(s)) => (DType::S8, channels(s, 8)),
            (Dtype::I4, Quant::Channels(s)) => (DType::S8, channels(s, 4)),
            (Dtype::I32, Quant::Channels(s)) => (DType::S32, channels(s, 32)),
            (Dtype::I32, Quant::None) => (DType::I32, sys::Quant::None),
            _ => return Err(self.form(tensor, "a type without its scale")),
        };
        Ok((dtype, self.dims(tensor)?, quant))
    }

    fn add_boundary(&mut self, id: TensorId, add: Add) -> Result<()> {
        let tensor = self.network.tensor(id);
        let (dtype, dims, quant) = self.described(tensor)?;
        let made = add(&mut self.spec, &tensor.name, dtype, &dims, quant).map_err(|e| self.refused(e))?;
        self.ids[id.index()] = Some(made);
        Ok(())
    }

    fn constant(&mut self, tensor: &Tensor, files: Option<&BundleReader>) -> Result<sys::TensorId> {
        let (dtype, dims, quant) = self.described(tensor)?;
        let mut bytes = static_bytes(tensor, files)?;
        if tensor.ty == Dtype::I4 {
            // A byte each.
            let codes = unpack_nibbles(&bytes, self.narrow(tensor, tensor.elements())?);
            bytes = codes.map(|q| q.cast_unsigned() & 15).collect();
        }
        self.spec.constant(&tensor.name, dtype, &dims, quant, Data::Bytes(bytes)).map_err(|e| self.refused(e))
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let out = self.network.tensor(node.output);
        if self.ids[node.output.index()].is_none() {
            self.add_boundary(node.output, GraphSpec::native)?;
        }
        let Some(made) = self.ids[node.output.index()] else { return Ok(()) };
        let mut inputs: Vec<sys::TensorId> =
            node.inputs.iter().filter_map(|id| *self.ids.get(id.index())?).collect();
        if let Op::RmsNorm { .. } = node.op {
            inputs.push(self.zeros(node)?);
        }
        let made_node =
            sys::Node::new(node.op.row().qnn, &inputs, &[made]).named(format!("{}.node", out.name));
        let made_node = self.parameters(node, made_node)?;
        self.spec.node(made_node).map_err(|e| self.refused(e))
    }

    fn parameters(&mut self, node: &Node, made: sys::Node) -> Result<sys::Node> {
        let out = self.network.tensor(node.output);
        let name = |what: &str| format!("{}.{what}", out.name);
        let last = self.narrow(out, out.shape.len().saturating_sub(1))?;
        Ok(match &node.op {
            Op::Softmax => made.scalar("axis", Scalar::U32(last)),
            Op::RmsNorm { eps } => {
                let axes = self.spec.numbers(&name("axes"), &[1], &[last]).map_err(|e| self.refused(e))?;
                made.scalar("epsilon", Scalar::F32(*eps)).tensor("axes", axes)
            }
            Op::Concat { axis } => made.scalar("axis", Scalar::U32(self.narrow(out, *axis)?)),
            Op::Gather { axis } => made.scalar("axis", Scalar::I32(self.narrow(out, *axis)?)),
            Op::Transpose { perm } => {
                let dims = [self.narrow(out, perm.len())?];
                let perm = perm.iter().map(|&i| self.narrow(out, i)).collect::<Result<Vec<u32>>>()?;
                let perm = self.spec.numbers(&name("perm"), &dims, &perm).map_err(|e| self.refused(e))?;
                made.tensor("perm", perm)
            }
            Op::StridedSlice { ranges } => {
                let dims = [self.narrow(out, ranges.len())?, 3];
                let all =
                    ranges.iter().flatten().map(|&n| self.narrow(out, n)).collect::<Result<Vec<i32>>>()?;
                let ranges = self.spec.integers(&name("ranges"), &dims, &all).map_err(|e| self.refused(e))?;
                made.tensor("ranges", ranges)
            }
            _ => made,
        })
    }

    /// The third operand of a norm, like its gain but zero everywhere.
    fn zeros(&mut self, node: &Node) -> Result<sys::TensorId> {
        let gain = node.inputs.get(1).map(|id| self.network.tensor(*id));
        let gain =
            gain.ok_or_else(|| self.form(self.network.tensor(node.output), "a norm without a gain"))?;
        let (dtype, dims, quant) = self.described(gain)?;
        let count: usize = self.narrow(gain, gain.elements())?;
        let bytes = match &gain.quant {
            Quant::Tensor(s) => self.narrow::<_, u16>(gain, -s.offset)?.to_le_bytes().repeat(count),
            _ => vec![0; self.narrow(gain, gain.bytes())?],
        };
        let name = format!("{}.zeros", self.network.tensor(node.output).name);
        self.spec.constant(&name, dtype, &dims, quant, Data::Bytes(bytes)).map_err(|e| self.refused(e))
    }
}

fn scale(s: Scale) -> sys::Quant {
    sys::Quant::Tensor { scale: s.scale, offset: s.offset }
}
