//! Appends operators to a network, inferring shapes. Activations are in f32; [`crate::quant`] makes codes of
//! them.

use super::{Network, NetworkError, Node, Op, Tensor, TensorId};
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, NetworkError>;

/// A network that grows.
#[derive(Debug)]
pub struct NetworkBuilder {
    network: Network,
    names: BTreeMap<String, TensorId>,
}

impl NetworkBuilder {
    /// An empty network.
    pub fn new(name: impl Into<String>) -> Self {
        let (tensors, inputs, nodes, outputs) = Default::default();
        let network = Network { name: name.into(), tensors, inputs, nodes, outputs };
        Self { network, names: BTreeMap::new() }
    }

    /// Extents of a tensor.
    pub fn shape(&self, id: TensorId) -> &[usize] {
        &self.network.tensor(id).shape
    }

    /// An input in f32.
    ///
    /// # Errors
    /// The name is taken.
    pub fn input(&mut self, name: &str, shape: &[usize]) -> Result<TensorId> {
        let id = self.tensor(Tensor::activation(name, shape))?;
        self.network.inputs.push(id);
        Ok(id)
    }

    /// A static tensor. One of the same name that is the same is taken again.
    ///
    /// # Errors
    /// Another tensor has the name.
    pub fn constant(&mut self, tensor: Tensor) -> Result<TensorId> {
        match self.names.get(&tensor.name) {
            Some(&id) if *self.network.tensor(id) == tensor => Ok(id),
            _ => self.tensor(tensor),
        }
    }

    /// One number for every entry.
    ///
    /// # Errors
    /// Another tensor has the name.
    pub fn number(&mut self, name: &str, x: f32) -> Result<TensorId> {
        self.constant(Tensor::floats(name, [1], &[x]))
    }

    /// Appends an operator; `name` is that of its result.
    ///
    /// # Errors
    /// Operands that do not fit, or a name that is taken.
    pub fn op(&mut self, name: &str, op: Op, inputs: &[TensorId]) -> Result<TensorId> {
        let (at, qnn) = (self.network.nodes.len(), op.row().qnn);
        let shapes: Vec<&[usize]> = inputs.iter().map(|id| self.shape(*id)).collect();
        let shape = super::verify::shape(&op, &shapes)
            .map_err(|what| NetworkError::node(&self.network.name, at, qnn, what))?;
        let output = self.tensor(Tensor::activation(name, shape))?;
        self.network.nodes.push(Node { op, inputs: inputs.to_vec(), output });
        Ok(output)
    }

    /// `count` entries of an axis, from `first` on.
    ///
    /// # Errors
    /// As [`Self::op`].
    pub fn part(
        &mut self,
        name: &str,
        x: TensorId,
        axis: usize,
        first: usize,
        count: usize,
    ) -> Result<TensorId> {
        let one = |(i, &n): (usize, &usize)| {
            if i == axis { [first, first.saturating_add(count), 1] } else { [0, n, 1] }
        };
        let ranges = self.shape(x).iter().enumerate().map(one).collect();
        self.op(name, Op::StridedSlice { ranges }, &[x])
    }

    /// Ends the network with these results.
    ///
    /// # Errors
    /// Fails if [`Network::verify`] refuses it.
    pub fn finish(mut self, outputs: &[TensorId]) -> Result<Network> {
        self.network.outputs = outputs.to_vec();
        self.network.verify()?;
        Ok(self.network)
    }

    fn tensor(&mut self, tensor: Tensor) -> Result<TensorId> {
        let wrong = |what| NetworkError::tensor(&self.network.name, &tensor.name, what);
        let id =
            TensorId::at(self.network.tensors.len()).ok_or_else(|| wrong("there are too many tensors"))?;
        if self.names.insert(tensor.name.clone(), id).is_some() {
            return Err(wrong("the name is a duplicate"));
        }
        self.network.tensors.push(tensor);
        Ok(id)
    }
}
