//! Checks of a network: names, shapes, types, scales, order. Later code does not check again.

use super::{
    Data, Dtype, MOST_AXES, Meaning, Network, NetworkError, Node, Op, Quant, Scale, Tensor, TensorId,
};
use std::collections::BTreeSet;

/// Most elements of a tensor.
const MOST_ELEMENTS: u64 = 1 << 33;
/// Most tensors of a network.
const MOST_TENSORS: usize = 1 << 20;
/// Largest relative distance between the scale of a bias and the product of those of rows and weight.
const BIAS_SCALE: f32 = 1e-4;

type Checked<T = ()> = Result<T, String>;

impl Network {
    /// Checks everything that can be checked without running it.
    ///
    /// # Errors
    /// The first thing that is wrong, with its tensor or node.
    pub fn verify(&self) -> Result<(), NetworkError> {
        let whole = |what: String| NetworkError::whole(&self.name, what);
        if self.tensors.len() > MOST_TENSORS {
            return Err(whole(format!("{} tensors; at most {MOST_TENSORS} are allowed", self.tensors.len())));
        }
        let mut names = BTreeSet::new();
        for t in &self.tensors {
            tensor(t)
                .and_then(
                    |()| if names.insert(&*t.name) { Ok(()) } else { Err("the name is a duplicate".into()) },
                )
                .map_err(|what| NetworkError::tensor(&self.name, &t.name, what))?;
        }
        let mut known: Vec<bool> = self.tensors.iter().map(Tensor::is_static).collect();
        for id in &self.inputs {
            define(&mut known, *id).map_err(whole)?;
        }
        for (i, node) in self.nodes.iter().enumerate() {
            self.node(node, &mut known)
                .map_err(|what| NetworkError::node(&self.name, i, node.op.row().qnn, what))?;
        }
        let given = |id: &TensorId| self.nodes.iter().any(|n| n.output == *id);
        if self.outputs.is_empty() || !self.outputs.iter().all(given) {
            return Err(whole("it has no result, or one that no node computes".into()));
        }
        if (1..self.outputs.len()).any(|i| self.outputs[..i].contains(&self.outputs[i])) {
            return Err(whole("it has a duplicate result".into()));
        }
        if let Some(at) = known.iter().position(|k| !k) {
            return Err(whole(format!("no node computes `{}`", self.tensors[at].name)));
        }
        Ok(())
    }

    fn node(&self, node: &Node, known: &mut [bool]) -> Checked {
        if let Some(id) = node.inputs.iter().find(|id| known.get(id.index()) != Some(&true)) {
            return Err(format!("operand {} is not defined here", id.0));
        }
        let operands: Vec<&Tensor> = node.inputs.iter().map(|id| self.tensor(*id)).collect();
        let shapes: Vec<&[usize]> = operands.iter().map(|t| &*t.shape).collect();
        let shape = shape(&node.op, &shapes)?;
        define(known, node.output)?;
        let out = self.tensor(node.output);
        if out.shape != shape {
            return Err(format!("`{}` is {shape:?}, not {:?}", out.name, out.shape));
        }
        types(&node.op, &operands, out)
    }
}

/// Extents of the result of an operator.
///
/// # Errors
/// Too many or too few operands, or such as do not fit.
pub(crate) fn shape(op: &Op, operands: &[&[usize]]) -> Checked<Vec<usize>> {
    let row = op.row();
    let (least, most) = row.operands;
    if !(least..=most).contains(&operands.len()) {
        return Err(format!("{} operands, of {least} to {most}", operands.len()));
    }
    (row.shape)(op, operands)
}

fn define(known: &mut [bool], id: TensorId) -> Checked {
    match known.get_mut(id.index()) {
        Some(known) if !*known => {
            *known = true;
            Ok(())
        }
        Some(_) => Err(format!("tensor {} is defined twice, or static", id.0)),
        None => Err(format!("there is no tensor {}", id.0)),
    }
}

fn tensor(t: &Tensor) -> Checked {
    let letters = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    if t.name.is_empty() || t.name.len() > 255 || !t.name.chars().all(letters) {
        return Err("a name is letters, digits, `_`, `-` and `.`, at least one and at most 255".into());
    }
    if t.shape.len() > MOST_AXES || t.shape.contains(&0) || t.elements() > MOST_ELEMENTS {
        return Err(format!("{:?} is empty, too large, or has more than {MOST_AXES} axes", t.shape));
    }
    let scale = |s: f32| s.is_finite() && s > 0.0;
    match (&t.quant, t.ty) {
        (Quant::None, Dtype::F32 | Dtype::F16) => {}
        (Quant::None, Dtype::I32) if t.is_static() => {}
        (Quant::Tensor(Scale { scale: s, offset }), Dtype::U16 | Dtype::U8) => {
            let (_, most) = t.ty.codes();
            if !scale(*s) || !(-most..=0).contains(&i64::from(*offset)) {
                return Err(format!(
                    "a scale of {s:e} and an offset of {offset} are invalid for {}",
                    t.ty.name()
                ));
            }
        }
        (Quant::Channels(scales), Dtype::I8 | Dtype::I4 | Dtype::I32) if t.is_static() => {
            if Some(scales.len()) != t.shape.first().copied() || !scales.iter().copied().all(scale) {
                return Err("it needs one positive scale for each entry of its first axis".into());
            }
        }
        _ => return Err(format!("{} cannot have {}", t.ty.name(), kind(&t.quant))),
    }
    match &t.data {
        Some(Data::Here(bytes)) if bytes.len() as u64 != t.bytes() => {
            Err(format!("{} bytes, expected {}", bytes.len(), t.bytes()))
        }
        Some(Data::File { file, offset }) => {
            let plain = !file.is_empty() && !file.starts_with('.') && file.chars().all(letters);
            let ends = offset.checked_add(t.bytes()).is_some();
            if plain && ends {
                Ok(())
            } else {
                Err(format!("byte {offset} of `{file}` is not a valid offset for it"))
            }
        }
        _ => Ok(()),
    }
}

fn kind(quant: &Quant) -> &'static str {
    match quant {
        Quant::None => "no scale here",
        Quant::Tensor(_) => "one scale and offset",
        Quant::Channels(_) => "a scale for each channel here",
    }
}

/// Checks that types go together.
fn types(op: &Op, operands: &[&Tensor], out: &Tensor) -> Checked {
    if out.ty == Dtype::I32 {
        return Err("an activation is not an i32".into());
    }
    let activation = |t: &Tensor| match (t.ty, out.ty.is_float()) {
        (Dtype::F32 | Dtype::F16, true) => t.ty == out.ty,
        (Dtype::U16 | Dtype::U8, false) => true,
        _ => false,
    };
    let refused = |t: &Tensor| Err(format!("`{}` is {}, the result {}", t.name, t.ty.name(), out.ty.name()));
    let values = match op {
        Op::FullyConnected => {
            weight(operands, out)?;
            &operands[..1]
        }
        Op::Gather { axis } => {
            indices(operands[1], operands[0].shape[*axis])?;
            &operands[..1]
        }
        _ => operands,
    };
    if let Some(t) = values.iter().find(|t| !activation(t)) {
        return refused(t);
    }
    let moves = matches!(op.row().meaning, Meaning::Move(_));
    match values.iter().find(|t| moves && (t.quant != out.quant || t.ty != out.ty)) {
        Some(t) => {
            Err(format!("`{}` is only moved, but its codes have another meaning in `{}`", t.name, out.name))
        }
        None => Ok(()),
    }
}

fn weight(operands: &[&Tensor], out: &Tensor) -> Checked {
    let (x, w, bias) = (operands[0], operands[1], operands.get(2));
    let fits = match w.ty {
        Dtype::F32 | Dtype::F16 => out.ty.is_float(),
        Dtype::I8 | Dtype::I4 => true,
        _ => false,
    };
    if !w.is_static() || !fits {
        return Err(format!("`{}` is not a static weight for a result of {}", w.name, out.ty.name()));
    }
    let Some(bias) = bias else { return Ok(()) };
    if !bias.is_static() {
        return Err(format!("the bias `{}` is not static", bias.name));
    }
    match (&bias.quant, &x.quant, &w.quant) {
        (Quant::None, Quant::None, _) if bias.ty == Dtype::F32 => Ok(()),
        (Quant::Channels(b), Quant::Tensor(x), Quant::Channels(w)) if bias.ty == Dtype::I32 => {
            let near = |(b, w): (&f32, &f32)| (b - x.scale * w).abs() <= BIAS_SCALE * b.abs();
            let all = b.iter().zip(w.iter()).all(near);
            if all { Ok(()) } else { Err(format!("scales of the bias `{}` are not products", bias.name)) }
        }
        _ => Err(format!("the bias `{}` does not fit rows and weight", bias.name)),
    }
}

fn indices(t: &Tensor, entries: usize) -> Checked {
    let wrong = || format!("`{}` are not static indices of {entries} entries", t.name);
    match (&t.data, t.ty, &t.quant) {
        (Some(Data::Here(bytes)), Dtype::I32, Quant::None) => {
            let numbers = bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b));
            let all = numbers.into_iter().all(|i| usize::try_from(i).is_ok_and(|i| i < entries));
            if all { Ok(()) } else { Err(wrong()) }
        }
        _ => Err(wrong()),
    }
}
