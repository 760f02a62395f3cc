//! Networks: graphs of fixed shapes in the operators that the HTP runs, as data.
//!
//! | | |
//! |---|---|
//! | `op` | the operators, one row of a table each |
//! | `tensor` | types, scales, static numbers by reference |
//! | [`builder`] | appends operators, inferring shapes |
//! | [`verify`](Network::verify) | names, shapes, types, scales and order are right |
//! | text | `Display` of a network, for people and snapshots |

pub mod builder;
mod error;
mod infer;
mod op;
mod tensor;
mod text;
mod verify;

pub use builder::NetworkBuilder;
pub use error::NetworkError;
pub(crate) use infer::MOST_AXES;
pub(crate) use op::strides;
pub use op::{Meaning, Op, Row};
pub use tensor::{Data, Dtype, Quant, Scale, Tensor, elements, pack_nibbles, unpack_nibbles};
pub(crate) use verify::shape as shape_of;

/// Index of a tensor in [`Network::tensors`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub u32);

impl TensorId {
    /// The id of the tensor with this index; none if an id does not hold it.
    pub(crate) fn at(index: usize) -> Option<Self> {
        u32::try_from(index).ok().map(Self)
    }

    /// The id as an index.
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

/// An operator with its operands and results.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Operator.
    pub op: Op,
    /// Tensors that it reads.
    pub inputs: Vec<TensorId>,
    /// Tensor that it gives.
    pub output: TensorId,
}

/// A network: one graph.
#[derive(Clone, Debug, PartialEq)]
pub struct Network {
    /// Name, unique in an artifact.
    pub name: String,
    /// Every tensor.
    pub tensors: Vec<Tensor>,
    /// Tensors that callers give, in order.
    pub inputs: Vec<TensorId>,
    /// Nodes, each after those whose results it reads.
    pub nodes: Vec<Node>,
    /// Tensors that callers get, in order.
    pub outputs: Vec<TensorId>,
}

impl Network {
    /// A tensor. Of a verified network, and of one from a builder, every id has one.
    pub fn tensor(&self, id: TensorId) -> &Tensor {
        &self.tensors[id.index()]
    }

    /// Bytes of its static tensors; what several nodes read counts once.
    pub fn static_bytes(&self) -> u64 {
        self.tensors.iter().filter(|t| t.is_static()).map(Tensor::bytes).sum()
    }

    /// Activations: tensors that a run computes or is given.
    pub fn activations(&self) -> impl Iterator<Item = (TensorId, &Tensor)> {
        let all = self.tensors.iter().enumerate().filter(|(_, t)| !t.is_static());
        all.filter_map(|(i, t)| Some((TensorId::at(i)?, t)))
    }

    /// The same network with its tensors in order of first use: inputs, then the operands and results of each
    /// node.
    #[must_use]
    pub fn ordered(&self) -> Self {
        let read = self.nodes.iter().flat_map(|n| n.inputs.iter().chain([&n.output]));
        let mut order: Vec<TensorId> = Vec::new();
        let mut place: Vec<Option<TensorId>> = vec![None; self.tensors.len()];
        let rest = (0..self.tensors.len()).filter_map(TensorId::at).collect::<Vec<_>>();
        for id in self.inputs.iter().chain(read).chain(&rest) {
            if place[id.index()].is_none() {
                place[id.index()] = TensorId::at(order.len());
                order.push(*id);
            }
        }
        let to = |ids: &[TensorId]| ids.iter().filter_map(|id| place[id.index()]).collect::<Vec<_>>();
        let node = |n: &Node| {
            Some(Node { op: n.op.clone(), inputs: to(&n.inputs), output: place[n.output.index()]? })
        };
        Self {
            name: self.name.clone(),
            tensors: order.iter().map(|id| self.tensor(*id).clone()).collect(),
            inputs: to(&self.inputs),
            nodes: self.nodes.iter().filter_map(node).collect(),
            outputs: to(&self.outputs),
        }
    }
}
