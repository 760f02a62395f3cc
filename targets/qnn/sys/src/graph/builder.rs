//! A graph that grows tensor by tensor and node by node.

use super::{DType, Data, Quant, Role, TensorId, TensorSpec};
use crate::error::{Error, Result};
use bincode::{Decode, Encode};
use std::collections::HashSet;

/// The value of a parameter that is one number.
#[derive(Clone, Copy, Debug, PartialEq, Encode, Decode)]
pub enum Scalar {
    /// A truth value.
    Bool(bool),
    /// 32 bits without a sign: axes, modes.
    U32(u32),
    /// 32 bits with a sign.
    I32(i32),
    /// A float.
    F32(f32),
}

/// A parameter of a node.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub enum Param {
    /// A number.
    Scalar(Scalar),
    /// A constant tensor.
    Tensor(TensorId),
}

/// A node: an operator of the package `qti.aisw`.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct Node {
    /// Name, of its own in the graph; empty for one of the operator and a number.
    pub name: String,
    /// Name of the operator: `FullyConnected`, `Concat`.
    pub op: String,
    /// Tensors that it reads.
    pub inputs: Vec<TensorId>,
    /// Tensors that it writes.
    pub outputs: Vec<TensorId>,
    /// Its parameters.
    pub params: Vec<(String, Param)>,
}

impl Node {
    /// An operator with its operands and results, in the order of QNN's definition.
    pub fn new(op: impl Into<String>, inputs: &[TensorId], outputs: &[TensorId]) -> Self {
        Self {
            name: String::new(),
            op: op.into(),
            inputs: inputs.to_vec(),
            outputs: outputs.to_vec(),
            params: Vec::new(),
        }
    }

    /// Names it.
    pub fn named(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// Adds a parameter that is one number.
    pub fn scalar(mut self, name: impl Into<String>, value: Scalar) -> Self {
        self.params.push((name.into(), Param::Scalar(value)));
        self
    }

    /// Adds a parameter that is a constant tensor of the graph.
    pub fn tensor(mut self, name: impl Into<String>, value: TensorId) -> Self {
        self.params.push((name.into(), Param::Tensor(value)));
        self
    }
}

/// Options of a graph's compilation. Floats are computed in 16 bits, whatever is requested: the chips have
/// nothing wider.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Options {
    /// Limit in MiB of the tensor unit's memory, at most that of the chip; 0 for all of it.
    pub vtcm: u32,
    /// Effort of the compiler: 1 to 3.
    pub level: u8,
}

impl Default for Options {
    fn default() -> Self {
        Self { vtcm: 0, level: 3 }
    }
}

/// A graph as data. Every tensor and node is checked when it is added: names, sizes, types and bytes, and
/// that a node reads only what is there before it.
#[derive(Clone, Debug, PartialEq, Encode, Decode)]
pub struct GraphSpec {
    /// Name, of its own in the context.
    pub name: String,
    /// Options of its compilation.
    pub options: Options,
    tensors: Vec<TensorSpec>,
    nodes: Vec<Node>,
}

impl GraphSpec {
    /// An empty graph.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), options: Options::default(), tensors: Vec::new(), nodes: Vec::new() }
    }

    /// Its tensors.
    pub fn tensors(&self) -> &[TensorSpec] {
        &self.tensors
    }

    /// Its nodes, in an order in which they can be executed.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Its inputs, in the order in which they were added: the order of
    /// [`Graph::execute`](crate::Graph::execute).
    pub fn inputs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.tensors.iter().filter(|t| t.role == Role::Input)
    }

    /// Its outputs, in the order in which they were added.
    pub fn outputs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.tensors.iter().filter(|t| t.role == Role::Output)
    }

    /// Adds an input.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be.
    pub fn input(&mut self, name: &str, dtype: DType, dims: &[u32], quant: Quant) -> Result<TensorId> {
        self.add(name, Role::Input, dtype, dims, quant, None)
    }

    /// Adds an output.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be.
    pub fn output(&mut self, name: &str, dtype: DType, dims: &[u32], quant: Quant) -> Result<TensorId> {
        self.add(name, Role::Output, dtype, dims, quant, None)
    }

    /// Adds a tensor between nodes.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be.
    pub fn native(&mut self, name: &str, dtype: DType, dims: &[u32], quant: Quant) -> Result<TensorId> {
        self.add(name, Role::Native, dtype, dims, quant, None)
    }

    /// Adds a constant.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be, or its data have another length.
    pub fn constant(
        &mut self,
        name: &str,
        dtype: DType,
        dims: &[u32],
        quant: Quant,
        data: Data,
    ) -> Result<TensorId> {
        self.add(name, Role::Static, dtype, dims, quant, Some(data))
    }

    /// Adds a constant of whole numbers, for parameters such as axes.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be.
    pub fn numbers(&mut self, name: &str, dims: &[u32], values: &[u32]) -> Result<TensorId> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constant(name, DType::U32, dims, Quant::None, Data::Bytes(bytes))
    }

    /// The same with signs, for parameters such as the ranges of a slice.
    ///
    /// # Errors
    /// [`Error::Graph`] if it cannot be.
    pub fn integers(&mut self, name: &str, dims: &[u32], values: &[i32]) -> Result<TensorId> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.constant(name, DType::I32, dims, Quant::None, Data::Bytes(bytes))
    }

    fn add(
        &mut self,
        name: &str,
        role: Role,
        dtype: DType,
        dims: &[u32],
        quant: Quant,
        data: Option<Data>,
    ) -> Result<TensorId> {
        let spec = TensorSpec { name: name.to_owned(), role, dtype, dims: dims.to_vec(), quant, data };
        if let Some(fault) = spec.fault() {
            return Err(self.wrong(format!("tensor `{name}`: {fault}")));
        }
        if self.tensors.iter().any(|t| t.name == name) {
            return Err(self.wrong(format!("there are two tensors `{name}`")));
        }
        let id = u32::try_from(self.tensors.len()).map_err(|_| self.wrong("too many tensors".into()))?;
        self.tensors.push(spec);
        Ok(TensorId(id))
    }

    /// Adds a node.
    ///
    /// # Errors
    /// [`Error::Graph`] if its name is taken, if it reads an unwritten value, or if a parameter is not
    /// constant. Also if it writes a value that is already written, or that the graph lacks.
    pub fn node(&mut self, mut node: Node) -> Result<()> {
        if node.name.is_empty() {
            node.name = format!("{}_{}", node.op, self.nodes.len());
        }
        if self.nodes.iter().any(|n| n.name == node.name) {
            return Err(self.wrong(format!("there are two nodes `{}`", node.name)));
        }
        self.check(&node, &self.written())?;
        self.nodes.push(node);
        Ok(())
    }

    fn written(&self) -> HashSet<TensorId> {
        self.nodes.iter().flat_map(|n| n.outputs.iter().copied()).collect()
    }

    fn check(&self, node: &Node, written: &HashSet<TensorId>) -> Result<()> {
        let wrong = |what: String| Err(self.wrong(format!("node `{}` ({}): {what}", node.name, node.op)));
        let names = [&node.name, &node.op].into_iter().chain(node.params.iter().map(|(name, _)| name));
        if names.into_iter().any(|name| name.is_empty() || name.contains('\0')) {
            return wrong("a name is empty or has a zero byte".into());
        }
        let Some(known) = self.known(node) else {
            return wrong("it names a tensor of another graph".into());
        };
        let (inputs, outputs, params) = known;
        for (id, spec) in node.inputs.iter().zip(inputs) {
            if matches!(spec.role, Role::Native | Role::Output) && !written.contains(id) {
                return wrong(format!("it reads `{}`, which no earlier node writes", spec.name));
            }
        }
        for (id, spec) in node.outputs.iter().zip(outputs) {
            if matches!(spec.role, Role::Input | Role::Static) {
                return wrong(format!("it writes `{}`, which is not computed", spec.name));
            }
            if written.contains(id) || node.outputs.iter().filter(|other| *other == id).count() > 1 {
                return wrong(format!("it writes `{}`, which another node writes", spec.name));
            }
        }
        if let Some(spec) = params.into_iter().find(|spec| spec.role != Role::Static) {
            return wrong(format!("its parameter `{}` is not constant", spec.name));
        }
        Ok(())
    }

    /// The tensors of a node: inputs, outputs, parameters. None if one is not of this graph.
    fn known(&self, node: &Node) -> Option<(Vec<&TensorSpec>, Vec<&TensorSpec>, Vec<&TensorSpec>)> {
        let all =
            |ids: &[TensorId]| ids.iter().map(|id| self.tensors.get(id.index())).collect::<Option<Vec<_>>>();
        let params: Vec<TensorId> = node
            .params
            .iter()
            .filter_map(|(_, param)| match param {
                Param::Tensor(id) => Some(*id),
                Param::Scalar(_) => None,
            })
            .collect();
        Some((all(&node.inputs)?, all(&node.outputs)?, all(&params)?))
    }

    /// Checks that the graph is complete: it has a name and nodes, and every output is written. Called when
    /// the graph is composed; a graph from elsewhere is checked again as a whole.
    ///
    /// # Errors
    /// [`Error::Graph`] with the fault.
    pub fn verify(&self) -> Result<()> {
        if self.name.is_empty() || self.name.contains('\0') {
            return Err(self.wrong("its name is empty or has a zero byte".into()));
        }
        let mut names = HashSet::new();
        for tensor in &self.tensors {
            let name = &tensor.name;
            if let Some(fault) = tensor.fault() {
                return Err(self.wrong(format!("tensor `{name}`: {fault}")));
            }
            if !names.insert(name) {
                return Err(self.wrong(format!("there are two tensors `{name}`")));
            }
        }
        let (mut names, mut written) = (HashSet::new(), HashSet::new());
        for node in &self.nodes {
            self.check(node, &written)?;
            if !names.insert(&node.name) {
                return Err(self.wrong(format!("there are two nodes `{}`", node.name)));
            }
            written.extend(&node.outputs);
        }
        let missing = (0u32..)
            .zip(&self.tensors)
            .find(|(id, t)| t.role == Role::Output && !written.contains(&TensorId(*id)));
        if let Some((_, missing)) = missing {
            return Err(self.wrong(format!("no node writes its output `{}`", missing.name)));
        }
        if self.nodes.is_empty() {
            return Err(self.wrong("it has no nodes".into()));
        }
        Ok(())
    }

    fn wrong(&self, what: String) -> Error {
        Error::Graph { graph: self.name.clone(), what }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A graph from elsewhere is checked again, since it may not come from the builder.
    #[test]
    fn foreign_graphs_are_fully_verified() {
        let mut good = GraphSpec::new("graph");
        let x = good.input("x", DType::F16, &[2, 8], Quant::None).unwrap();
        let y = good.output("y", DType::F16, &[2, 8], Quant::None).unwrap();
        good.node(Node::new("Relu", &[x], &[y])).unwrap();
        good.verify().unwrap();
        type Damage = fn(&mut GraphSpec);
        let damages: [(Damage, &str); 7] = [
            (|g| g.name.clear(), "name is empty"),
            (|g| g.tensors[1].name = "x".into(), "two tensors `x`"),
            (|g| g.tensors[0].dims.clear(), "sizes"),
            (|g| g.nodes[0].inputs[0] = TensorId(2), "another graph"),
            (|g| g.nodes[0].outputs[0] = TensorId(0), "not computed"),
            (|g| g.nodes.push(Node::new("Relu", &[TensorId(0)], &[]).named("Relu_0")), "two nodes"),
            (|g| g.nodes.clear(), "no node writes"),
        ];
        for (damage, expected) in damages {
            let mut bad = good.clone();
            damage(&mut bad);
            let why = bad.verify().unwrap_err().to_string();
            assert!(why.contains(expected), "{why}");
        }
    }
}
