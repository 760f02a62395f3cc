//! The text form of a network.

use super::{Data, Network, Op, Quant, Scale, Tensor};
use std::fmt::{self, Display, Formatter};

impl Display for Network {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let typed = |ids: &[super::TensorId]| {
            let one = |id: &super::TensorId| self.tensor(*id).to_string();
            ids.iter().map(one).collect::<Vec<_>>().join(", ")
        };
        writeln!(f, "network {}({}) {{", self.name, typed(&self.inputs))?;
        for tensor in self.tensors.iter().filter(|t| t.is_static()) {
            writeln!(f, "  static {tensor}")?;
        }
        for node in &self.nodes {
            let names: Vec<_> = node.inputs.iter().map(|id| &*self.tensor(*id).name).collect();
            let attributes = attributes(&node.op).map_or_else(String::new, |a| format!(" {a}"));
            let (out, op, inputs) = (self.tensor(node.output), node.op.row().qnn, names.join(", "));
            writeln!(f, "  {out} = {op}({inputs}){attributes}")?;
        }
        let outputs: Vec<_> = self.outputs.iter().map(|id| &*self.tensor(*id).name).collect();
        writeln!(f, "}} -> {}", outputs.join(", "))
    }
}

impl Display for Tensor {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}{:?}", self.name, self.ty.name(), self.shape)?;
        match &self.quant {
            Quant::None => {}
            Quant::Tensor(Scale { scale, offset }) => write!(f, " {scale:e}·(q{offset:+})")?,
            Quant::Channels(scales) => {
                let [least, most] =
                    [f32::min, f32::max].map(|f| scales.iter().copied().reduce(f).unwrap_or(0.0));
                write!(f, " {least:e}…{most:e}·q")?;
            }
        }
        match &self.data {
            Some(Data::File { file, offset }) => write!(f, " {file:?}+{offset}"),
            Some(Data::Here(_)) | None => Ok(()),
        }
    }
}

fn attributes(op: &Op) -> Option<String> {
    match op {
        Op::RmsNorm { eps } => Some(format!("eps={eps:e}")),
        Op::Concat { axis } | Op::Gather { axis } => Some(format!("axis={axis}")),
        Op::StridedSlice { ranges } => Some(format!("ranges={ranges:?}")),
        Op::Reshape { shape } => Some(format!("shape={shape:?}")),
        Op::Transpose { perm } => Some(format!("perm={perm:?}")),
        _ => None,
    }
}
