//! Reads an ONNX model that moec wrote back into a network. Trusts nothing in it.

use super::proto::{self, Graph, Model, Node, attribute_type, data_type};
use super::{DEQUANTIZE, OnnxError, QUANTIZE, TYPES};
use crate::net::{Data, Dtype, MOST_AXES, Network, Op, Quant, Scale, Tensor, TensorId, shape_of};
use prost::Message as _;
use std::collections::BTreeMap;

type Result<T> = std::result::Result<T, OnnxError>;

/// Parses a model in the form of [`super::write`], and verifies its network. Tensors are ordered as in
/// [`Network::ordered`].
///
/// # Errors
/// Fails if the bytes are not a model, or one in another form.
pub fn read(bytes: &[u8]) -> Result<Network> {
    let model = Model::decode(bytes).map_err(|e| OnnxError::Message(e.to_string()))?;
    let graph = model.graph.ok_or_else(|| OnnxError::Message("it has no graph".into()))?;
    let mut reader = Reader {
        constants: graph.initializer.iter().map(|t| (&*t.name, t)).collect(),
        values: BTreeMap::new(),
        network: Network {
            name: graph.name.clone(),
            tensors: Vec::new(),
            inputs: Vec::new(),
            nodes: Vec::new(),
            outputs: Vec::new(),
        },
    };
    reader.graph(&graph)?;
    reader.network.verify()?;
    Ok(reader.network.ordered())
}

struct Reader<'a> {
    constants: BTreeMap<&'a str, &'a proto::Tensor>,
    /// Names that nodes read, and the tensor of each.
    values: BTreeMap<String, TensorId>,
    network: Network,
}

impl Reader<'_> {
    fn graph(&mut self, graph: &Graph) -> Result<()> {
        for input in &graph.input {
            let ty = input.r#type.as_ref().and_then(|t| t.tensor_type.as_ref());
            let dims =
                ty.and_then(|t| t.shape.as_ref()).map(|s| s.dim.iter().map(|d| d.dim_value.unwrap_or(0)));
            let dims: Vec<i64> = dims.into_iter().flatten().collect();
            let id = self.add(Tensor::activation(&*input.name, shape(&input.name, &dims)?), &input.name)?;
            self.network.inputs.push(id);
        }
        for node in &graph.node {
            match &*node.op_type {
                QUANTIZE => self.quantize(node)?,
                DEQUANTIZE => self.dequantize(node)?,
                _ => self.node(node)?,
            }
        }
        for output in &graph.output {
            let id = self.values.get(&output.name).copied();
            let id = id.ok_or_else(|| OnnxError::form(&output.name, "no node computes it"))?;
            self.network.outputs.push(id);
        }
        Ok(())
    }

    fn add(&mut self, tensor: Tensor, value: &str) -> Result<TensorId> {
        let id = TensorId::at(self.network.tensors.len());
        let id = id.ok_or_else(|| OnnxError::form(value, "there are too many tensors"))?;
        if self.values.insert(value.to_owned(), id).is_some() {
            return Err(OnnxError::form(value, "it is defined twice"));
        }
        self.network.tensors.push(tensor);
        Ok(id)
    }

    fn quantize(&mut self, node: &Node) -> Result<()> {
        let ([from, scale, zero], [out]) = (&*node.input, &*node.output) else {
            return Err(OnnxError::form(&node.name, "it does not have one scale and one zero point"));
        };
        let (scale, ty) = self.scale(scale, zero)?;
        let id = *self.values.get(from).ok_or_else(|| OnnxError::form(from, "no node computes it"))?;
        let tensor = &mut self.network.tensors[id.index()];
        if tensor.quant != Quant::None || tensor.is_static() {
            return Err(OnnxError::form(from, "it already has codes"));
        }
        tensor.ty = ty;
        tensor.quant = Quant::Tensor(scale);
        if self.values.insert(out.clone(), id).is_some() {
            return Err(OnnxError::form(out, "it is defined twice"));
        }
        Ok(())
    }

    fn dequantize(&mut self, node: &Node) -> Result<()> {
        let (inputs, [out]) = (&*node.input, &*node.output) else {
            return Err(OnnxError::form(&node.name, "it does not have one result"));
        };
        match *inputs {
            [ref codes, ref scale, ref zero] => {
                let (scale, ty) = self.scale(scale, zero)?;
                if let Some(&id) = self.values.get(codes) {
                    let tensor = &self.network.tensors[id.index()];
                    if tensor.quant != Quant::Tensor(scale) || tensor.ty != ty {
                        return Err(OnnxError::form(codes, "its codes have two meanings"));
                    }
                    if self.values.insert(out.clone(), id).is_some() {
                        return Err(OnnxError::form(out, "it is defined twice"));
                    }
                    return Ok(());
                }
                let tensor = self.constant(codes)?;
                self.add(Tensor { quant: Quant::Tensor(scale), ..tensor }, out).map(|_| ())
            }
            [ref codes, ref scale] if attribute_int(node, "axis") == Some(0) => {
                let tensor = self.constant(codes)?;
                let scales = floats(self.initializer(scale)?)?;
                self.add(Tensor { quant: Quant::Channels(scales.into()), ..tensor }, out).map(|_| ())
            }
            _ => Err(OnnxError::form(&node.name, "its scales are neither of a tensor nor of rows")),
        }
    }

    fn node(&mut self, node: &Node) -> Result<()> {
        let form = |what: &str| OnnxError::form(&node.name, what);
        let [out] = &*node.output else { return Err(form("it does not have one result")) };
        let (op, operands) = self.op(node)?;
        let mut inputs = Vec::new();
        for name in operands {
            let known = self.values.get(name).copied();
            inputs.push(match known {
                Some(id) => id,
                None => self.constant(name).and_then(|tensor| self.add(tensor, name))?,
            });
        }
        let shapes: Vec<&[usize]> = inputs.iter().map(|id| &*self.network.tensor(*id).shape).collect();
        let shape = shape_of(&op, &shapes).map_err(|what| OnnxError::form(&node.name, what))?;
        let name = out.strip_suffix("/f").unwrap_or(out);
        let output = self.add(Tensor::activation(name, shape), out)?;
        self.network.nodes.push(crate::net::Node { op, inputs, output });
        Ok(())
    }

    /// The operator of a node, and those of its operands that are tensors.
    fn op<'n>(&self, node: &'n Node) -> Result<(Op, &'n [String])> {
        let form = |what: &str| OnnxError::form(&node.name, what);
        let axis = || {
            let found = attribute_int(node, "axis").and_then(|i| usize::try_from(i).ok());
            found.ok_or_else(|| form("it has no axis"))
        };
        let first = || node.input.get(..1).ok_or_else(|| form("it has no operand"));
        let whole = |i: usize| -> Result<Vec<usize>> {
            let name = node.input.get(i).ok_or_else(|| form("an operand is missing"))?;
            let numbers = words(self.initializer(name)?)?;
            if numbers.len() > MOST_AXES {
                return Err(form("it has too many axes"));
            }
            numbers.iter().map(|&n| usize::try_from(n).map_err(|_| form("a negative extent"))).collect()
        };
        let rows_last = attribute_int(node, "axis") == Some(-1);
        let all = &*node.input;
        Ok(match &*node.op_type {
            "Gemm" if attribute_int(node, "transB") != Some(1) => {
                return Err(form("its weight is not transposed"));
            }
            "Softmax" if !rows_last => return Err(form("it is not along the last axis")),
            "RMSNormalization" => {
                let eps =
                    node.attribute.iter().find(|a| a.name == "epsilon" && a.r#type == attribute_type::FLOAT);
                match eps.and_then(|a| a.f).filter(|_| rows_last) {
                    Some(eps) => (Op::RmsNorm { eps }, all),
                    None => return Err(form("it is not along the last axis, or has no epsilon")),
                }
            }
            "Concat" => (Op::Concat { axis: axis()? }, all),
            "Gather" => (Op::Gather { axis: axis()? }, all),
            "Transpose" => {
                let perm =
                    node.attribute.iter().find(|a| a.name == "perm").map(|a| &*a.ints).unwrap_or_default();
                let perm = perm.iter().map(|&i| usize::try_from(i).map_err(|_| form("an invalid axis")));
                (Op::Transpose { perm: perm.collect::<Result<_>>()? }, all)
            }
            "Reshape" => (Op::Reshape { shape: whole(1)? }, first()?),
            "Slice" => {
                let (from, to, axes, steps) = (whole(1)?, whole(2)?, whole(3)?, whole(4)?);
                let each = from.len() == to.len() && from.len() == steps.len();
                if !each || axes != (0..from.len()).collect::<Vec<_>>() {
                    return Err(form("it does not name a range for every axis"));
                }
                let ranges = from.iter().zip(&to).zip(&steps).map(|((a, b), s)| [*a, *b, *s]).collect();
                (Op::StridedSlice { ranges }, first()?)
            }
            name => (Op::plain(name).ok_or_else(|| form("moec does not write this operator"))?, all),
        })
    }

    fn initializer(&self, name: &str) -> Result<&proto::Tensor> {
        self.constants
            .get(name)
            .copied()
            .ok_or_else(|| OnnxError::form(name, "it is neither computed nor an input"))
    }

    /// A static tensor without a scale.
    fn constant(&self, name: &str) -> Result<Tensor> {
        let found = self.initializer(name)?;
        let ty = TYPES.iter().find(|row| row.1 == found.data_type).map(|row| row.0);
        let ty = ty.ok_or_else(|| OnnxError::form(name, "a type that moec does not write"))?;
        let data = match (&found.raw_data, found.data_location) {
            (Some(bytes), 0) => Data::Here(bytes.as_slice().into()),
            (None, proto::EXTERNAL) => {
                let entry = |key: &str| found.external_data.iter().find(|e| e.key == key).map(|e| &*e.value);
                let offset = entry("offset").and_then(|o| o.parse().ok());
                let (Some(file), Some(offset)) = (entry("location"), offset) else {
                    return Err(OnnxError::form(name, "its offset is missing"));
                };
                Data::File { file: file.into(), offset }
            }
            _ => return Err(OnnxError::form(name, "its numbers are neither raw nor in a file")),
        };
        let shape = shape(name, &found.dims)?;
        Ok(Tensor { ty, data: Some(data), ..Tensor::activation(name, shape) })
    }

    fn scale(&self, scale: &str, zero: &str) -> Result<(Scale, Dtype)> {
        let (numbers, zero_point) = (floats(self.initializer(scale)?)?, self.initializer(zero)?);
        let (ty, code) = match (zero_point.data_type, zero_point.raw_data.as_deref()) {
            (data_type::UINT16, Some(&[a, b])) => (Dtype::U16, i32::from(u16::from_le_bytes([a, b]))),
            (data_type::UINT8, Some(&[a])) => (Dtype::U8, i32::from(a)),
            _ => return Err(OnnxError::form(zero, "it is not a code of 8 or 16 bits")),
        };
        match *numbers {
            [scale] => Ok((Scale { scale, offset: -code }, ty)),
            _ => Err(OnnxError::form(scale, "it is not one number")),
        }
    }
}

fn attribute_int(node: &Node, name: &str) -> Option<i64> {
    node.attribute.iter().find(|a| a.name == name && a.r#type == attribute_type::INT)?.i
}

fn shape(name: &str, dims: &[i64]) -> Result<Vec<usize>> {
    if dims.len() > MOST_AXES {
        return Err(OnnxError::form(name, "it has too many axes"));
    }
    let all: Option<_> = dims.iter().map(|&n| usize::try_from(n).ok().filter(|n| *n > 0)).collect();
    all.ok_or_else(|| OnnxError::form(name, "an unknown extent"))
}

fn raw(tensor: &proto::Tensor, ty: i32) -> Result<&[u8]> {
    let bytes = tensor.raw_data.as_deref().filter(|_| tensor.data_type == ty);
    bytes.ok_or_else(|| OnnxError::form(&tensor.name, "it has another type or location"))
}

fn floats(tensor: &proto::Tensor) -> Result<Vec<f32>> {
    let chunks = raw(tensor, data_type::FLOAT)?.as_chunks::<4>().0;
    Ok(chunks.iter().map(|b| f32::from_le_bytes(*b)).collect())
}

fn words(tensor: &proto::Tensor) -> Result<Vec<i64>> {
    let chunks = raw(tensor, data_type::INT64)?.as_chunks::<8>().0;
    Ok(chunks.iter().map(|b| i64::from_le_bytes(*b)).collect())
}
