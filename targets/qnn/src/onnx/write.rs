//! Writes a network as an ONNX model.
#![expect(clippy::cast_possible_truncation, reason = "zero points are codes of their type")]

use super::proto::{
    self, Attribute, Entry, Graph, Model, Node, OperatorSet, ValueInfo, attribute_type, data_type,
};
use super::{DEQUANTIZE, OnnxError, QUANTIZE, TYPES};
use crate::net::{Data, Dtype, Network, Op, Quant, Scale, Tensor, TensorId};
use prost::Message as _;

type Result<T> = std::result::Result<T, OnnxError>;

/// The first set of operators in which codes of 16 and 4 bits are quantised.
const OPSET: i64 = 21;
/// The set of operators that came with a later version of the format, and that version.
const LATER: (i64, i64) = (23, 11);

/// Writes a model with the nodes, types and scales of a verified network. Data in a file stays there: the
/// file must be in the folder of the model.
///
/// # Errors
/// Fails for an invalid network, or a type that ONNX lacks in this form.
pub fn write(network: &Network) -> Result<Vec<u8>> {
    network.verify()?;
    let mut writer = Writer { network, graph: Graph { name: network.name.clone(), ..Graph::default() } };
    for id in &network.inputs {
        let tensor = network.tensor(*id);
        writer.graph.input.push(info(tensor));
        writer.codes(*id, &tensor.name)?;
    }
    for tensor in network.tensors.iter().filter(|t| t.is_static()) {
        writer.constant(tensor)?;
    }
    for node in &network.nodes {
        writer.node(node)?;
    }
    writer.graph.output = network.outputs.iter().map(|id| info(network.tensor(*id))).collect();
    let version = network.nodes.iter().map(|n| n.op.row().since).fold(OPSET, i64::max);
    let model = Model {
        ir_version: if version >= LATER.0 { LATER.1 } else { proto::IR_VERSION },
        producer_name: "moec".to_owned(),
        graph: Some(writer.graph),
        opset_import: vec![OperatorSet { domain: String::new(), version }],
    };
    Ok(model.encode_to_vec())
}

struct Writer<'a> {
    network: &'a Network,
    graph: Graph,
}

fn dims(shape: &[usize]) -> Vec<i64> {
    shape.iter().map(|&n| n as i64).collect()
}

fn info(tensor: &Tensor) -> ValueInfo {
    let dim = dims(&tensor.shape).into_iter().map(|n| proto::Dimension { dim_value: Some(n) }).collect();
    let tensor_type = proto::TensorType { elem_type: data_type::FLOAT, shape: Some(proto::Shape { dim }) };
    ValueInfo { name: tensor.name.clone(), r#type: Some(proto::Type { tensor_type: Some(tensor_type) }) }
}

fn ty(tensor: &Tensor) -> Result<i32> {
    let found = TYPES.iter().find(|row| row.0 == tensor.ty).map(|row| row.1);
    found.ok_or_else(|| OnnxError::Type { tensor: tensor.name.clone(), ty: tensor.ty.name() })
}

impl Writer<'_> {
    fn push(&mut self, op: &str, inputs: Vec<String>, output: String, attribute: Vec<Attribute>) {
        let (input, output, op_type) = (inputs, vec![output], op.to_owned());
        self.graph.node.push(Node { name: output[0].clone(), input, output, op_type, attribute });
    }

    fn raw(&mut self, name: String, data_type: i32, dims: Vec<i64>, bytes: Vec<u8>) {
        let tensor =
            proto::Tensor { name, data_type, dims, raw_data: Some(bytes), ..proto::Tensor::default() };
        self.graph.initializer.push(tensor);
    }

    /// Whole numbers that a node takes as an operand.
    fn whole(&mut self, name: String, numbers: &[i64]) -> String {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        self.raw(name.clone(), data_type::INT64, vec![numbers.len() as i64], bytes);
        name
    }

    /// Scale and zero point of codes; gives their names.
    fn scale(&mut self, tensor: &Tensor, scale: Scale) -> Result<[String; 2]> {
        let names = ["scale", "zero"].map(|what| format!("{}/{what}", tensor.name));
        let zero = -scale.offset;
        let zero =
            if tensor.ty == Dtype::U8 { vec![zero as u8] } else { (zero as u16).to_le_bytes().to_vec() };
        self.raw(names[0].clone(), data_type::FLOAT, Vec::new(), scale.scale.to_le_bytes().to_vec());
        self.raw(names[1].clone(), ty(tensor)?, Vec::new(), zero);
        Ok(names)
    }

    /// Codes of an activation, from a value in f32, and what they mean.
    fn codes(&mut self, id: TensorId, from: &str) -> Result<()> {
        let tensor = self.network.tensor(id);
        let Quant::Tensor(scale) = tensor.quant else {
            return ty(tensor).map(|_| ());
        };
        let [scale, zero] = self.scale(tensor, scale)?;
        let q = format!("{}/q", tensor.name);
        self.push(QUANTIZE, vec![from.to_owned(), scale.clone(), zero.clone()], q.clone(), Vec::new());
        self.push(DEQUANTIZE, vec![q, scale, zero], self.name(id), Vec::new());
        Ok(())
    }

    /// The value that nodes read of a tensor.
    fn name(&self, id: TensorId) -> String {
        let tensor = self.network.tensor(id);
        if tensor.quant == Quant::None || self.network.outputs.contains(&id) {
            tensor.name.clone()
        } else {
            format!("{}/dq", tensor.name)
        }
    }

    fn constant(&mut self, tensor: &Tensor) -> Result<()> {
        let (name, data_type, dims) = (tensor.name.clone(), ty(tensor)?, dims(&tensor.shape));
        match &tensor.data {
            Some(Data::Here(bytes)) => self.raw(name.clone(), data_type, dims, bytes.to_vec()),
            Some(Data::File { file, offset }) => {
                let entry = |key: &str, value: String| Entry { key: key.to_owned(), value };
                let external_data = vec![
                    entry("location", file.to_string()),
                    entry("offset", offset.to_string()),
                    entry("length", tensor.bytes().to_string()),
                ];
                let (name, data_location, raw_data) = (name.clone(), proto::EXTERNAL, None);
                let made = proto::Tensor { dims, data_type, name, raw_data, external_data, data_location };
                self.graph.initializer.push(made);
            }
            None => {}
        }
        match &tensor.quant {
            Quant::None => {}
            Quant::Tensor(scale) => {
                let [scale, zero] = self.scale(tensor, *scale)?;
                let output = format!("{name}/dq");
                self.push(DEQUANTIZE, vec![name, scale, zero], output, Vec::new());
            }
            Quant::Channels(scales) => {
                let bytes = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
                let (scale, output) = (format!("{name}/scale"), format!("{name}/dq"));
                self.raw(scale.clone(), data_type::FLOAT, vec![scales.len() as i64], bytes);
                self.push(DEQUANTIZE, vec![name, scale], output, vec![int("axis", 0)]);
            }
        }
        Ok(())
    }

    fn node(&mut self, node: &crate::net::Node) -> Result<()> {
        let out = self.network.tensor(node.output);
        let mut inputs: Vec<String> = node.inputs.iter().map(|id| self.name(*id)).collect();
        let mut given = |this: &mut Self, what: &str, numbers: &[i64]| {
            inputs.push(this.whole(format!("{}/{what}", out.name), numbers));
        };
        let attributes = match &node.op {
            Op::FullyConnected => vec![int("transB", 1)],
            Op::Softmax => vec![int("axis", -1)],
            Op::RmsNorm { eps } => vec![int("axis", -1), float("epsilon", *eps)],
            Op::Concat { axis } | Op::Gather { axis } => vec![int("axis", *axis as i64)],
            Op::Transpose { perm } => vec![ints("perm", perm)],
            Op::Reshape { shape } => {
                given(self, "shape", &dims(shape));
                Vec::new()
            }
            Op::StridedSlice { ranges } => {
                let column = |i: usize| ranges.iter().map(|r| r[i] as i64).collect::<Vec<_>>();
                given(self, "starts", &column(0));
                given(self, "ends", &column(1));
                given(self, "axes", &(0..ranges.len() as i64).collect::<Vec<_>>());
                given(self, "steps", &column(2));
                Vec::new()
            }
            _ => Vec::new(),
        };
        let coded = out.quant != Quant::None;
        let output = if coded { format!("{}/f", out.name) } else { out.name.clone() };
        self.push(node.op.row().onnx, inputs, output.clone(), attributes);
        self.codes(node.output, &output)
    }
}

fn int(name: &str, i: i64) -> Attribute {
    Attribute { name: name.to_owned(), i: Some(i), r#type: attribute_type::INT, ..Attribute::default() }
}

fn float(name: &str, f: f32) -> Attribute {
    Attribute { name: name.to_owned(), f: Some(f), r#type: attribute_type::FLOAT, ..Attribute::default() }
}

fn ints(name: &str, numbers: &[usize]) -> Attribute {
    let ints = dims(numbers);
    Attribute { name: name.to_owned(), ints, r#type: attribute_type::INTS, ..Attribute::default() }
}
