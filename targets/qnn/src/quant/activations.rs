//! Codes of 16 bits for activations, from how wide they are.

use crate::net::{Data, Dtype, Network, NetworkError, Op, Quant, Scale, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Codes of an activation, less one.
const LAST: f64 = 65535.0;
/// Steps between the ends of a range: one less than there are codes at either end, since zero moves to the
/// nearest code.
const STEPS: f64 = LAST - 2.0;
/// The code in the middle.
const MIDDLE: f64 = 32768.0;
/// The smallest width of a range: numbers that are always zero still have codes.
const NARROWEST: f32 = 1e-6;

/// Range of an activation. Zero is always in it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Range {
    /// Smallest number, at most 0.
    pub least: f32,
    /// Largest number, at least 0.
    pub most: f32,
}

impl Range {
    /// The range of some numbers, and of zero. NaN is passed over.
    pub fn of(numbers: impl IntoIterator<Item = f32>) -> Self {
        let grown = |r: Self, x: f32| Self { least: r.least.min(x), most: r.most.max(x) };
        numbers.into_iter().fold(Self::default(), grown)
    }

    /// The range that holds both.
    pub fn and(self, other: Self) -> Self {
        Self { least: self.least.min(other.least), most: self.most.max(other.most) }
    }

    /// The same, both ends further from zero by a factor.
    pub fn widened(self, factor: f32) -> Self {
        Self { least: self.least * factor, most: self.most * factor }
    }

    /// Scale and offset whose codes of 16 bits reach over it. Zero has a code of its own.
    pub fn scale(self) -> Scale {
        let width = f64::from(self.most) - f64::from(self.least);
        let scale = (width.max(f64::from(NARROWEST)) / STEPS) as f32;
        let offset = (f64::from(self.least) / f64::from(scale)).round().clamp(-LAST, 0.0);
        Scale { scale, offset: offset as i32 }
    }
}

impl Range {
    /// The same range with zero in the middle of the codes. The HTP requires this for the second factor of a
    /// product and the weight of a norm.
    pub fn middle(self) -> Scale {
        let reach = f64::from(self.most.max(-self.least)).max(f64::from(NARROWEST));
        Scale { scale: (reach / (MIDDLE - 1.0)) as f32, offset: -(MIDDLE as i32) }
    }
}

/// Ranges of activations, by name.
pub type Ranges = BTreeMap<String, Range>;

/// The same network with activations as codes of 16 bits. Static numbers in f32 become codes, too: biases of
/// 32 bits with the product of the scales of rows and weight, others of 16 bits. Where numbers are only
/// moved, operand and result have one scale, the widest. The second factor of a product of activations has
/// zero in the middle of its codes, as has the gain of a norm: the HTP takes no others.
///
/// # Errors
/// An activation without a range, a bias that no code reaches, or a network that is not in f32.
pub fn coded(network: &Network, ranges: &Ranges) -> Result<Network, NetworkError> {
    let mut out = network.clone();
    let scales = scales(network, ranges)?;
    for (tensor, scale) in out.tensors.iter_mut().zip(&scales) {
        if let Some(scale) = scale {
            tensor.ty = Dtype::U16;
            tensor.quant = Quant::Tensor(*scale);
        }
    }
    let mut of_rows: BTreeMap<usize, usize> = BTreeMap::new();
    for node in &network.nodes {
        let (weight, bias) = match (&node.op, &*node.inputs) {
            (Op::FullyConnected, [_, weight, bias]) => (Some(weight), Some(bias)),
            (Op::FullyConnected, [_, weight]) => (Some(weight), None),
            _ => (None, None),
        };
        let plain = |id: &&crate::net::TensorId| Some(*id) != weight && Some(*id) != bias;
        for id in node.inputs.iter().filter(plain) {
            let tensor = &mut out.tensors[id.index()];
            if tensor.is_static() && tensor.ty == Dtype::F32 {
                let middle = matches!(node.op, Op::RmsNorm { .. });
                static_codes(tensor, middle)
                    .map_err(|what| NetworkError::tensor(&network.name, &tensor.name, what))?;
            }
        }
        if let (Some(weight), Some(bias)) = (weight, bias) {
            let x = node.inputs[0].index();
            let name = &network.tensor(*bias).name;
            let failed = |what: String| NetworkError::tensor(&network.name, name, what);
            if *of_rows.entry(bias.index()).or_insert(x) != x {
                return Err(failed("a bias of several projections has no one scale".into()));
            }
            let made = bias_codes(network.tensor(*bias), scales[x], &network.tensor(*weight).quant)
                .map_err(failed)?;
            out.tensors[bias.index()] = made;
        }
    }
    out.verify()?;
    Ok(out)
}

/// The scale of every activation.
fn scales(network: &Network, ranges: &Ranges) -> Result<Vec<Option<Scale>>, NetworkError> {
    let mut joined: Vec<usize> = (0..network.tensors.len()).collect();
    for node in network.nodes.iter().filter(|n| n.op.moves()) {
        for id in node.inputs.iter().filter(|id| !network.tensor(**id).is_static()) {
            let (a, b) = (root(&joined, id.index()), root(&joined, node.output.index()));
            joined[a.max(b)] = a.min(b);
        }
    }
    let mut widest: BTreeMap<usize, Range> = BTreeMap::new();
    for (id, tensor) in network.activations() {
        let failed = |what: &str| NetworkError::tensor(&network.name, &tensor.name, what);
        if tensor.ty != Dtype::F32 {
            return Err(failed("it already has codes"));
        }
        let range = ranges.get(&tensor.name).copied().ok_or_else(|| failed("its range is unknown"))?;
        if !range.least.is_finite() || !range.most.is_finite() {
            return Err(failed("its range is infinite"));
        }
        let all = widest.entry(root(&joined, id.index())).or_default();
        *all = all.and(range);
    }
    let products = network.nodes.iter().filter(|n| n.op == Op::MatMul);
    let factors: BTreeSet<usize> =
        products.filter_map(|n| n.inputs.get(1)).map(|id| root(&joined, id.index())).collect();
    let scale = |(i, t): (usize, &Tensor)| {
        let root = root(&joined, i);
        let range = widest.get(&root).copied().unwrap_or_default();
        let scale = || if factors.contains(&root) { range.middle() } else { range.scale() };
        (!t.is_static()).then(scale)
    };
    Ok(network.tensors.iter().enumerate().map(scale).collect())
}

fn root(joined: &[usize], mut at: usize) -> usize {
    while joined[at] != at {
        at = joined[at];
    }
    at
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>, String> {
    match &tensor.data {
        Some(Data::Here(bytes)) if tensor.ty == Dtype::F32 => {
            Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
        _ => Err("its numbers are not available in f32".into()),
    }
}

/// Encodes static numbers that nodes read, other than weights, in 16 bits.
fn static_codes(tensor: &mut Tensor, middle: bool) -> Result<(), String> {
    let numbers = floats(tensor)?;
    let range = Range::of(numbers.iter().copied());
    let scale = if middle { range.middle() } else { range.scale() };
    let code = |x: &f32| (scale.code(f64::from(*x), Dtype::U16).0 as u16).to_le_bytes();
    let bytes: Vec<u8> = numbers.iter().flat_map(code).collect();
    tensor.ty = Dtype::U16;
    tensor.quant = Quant::Tensor(scale);
    tensor.data = Some(Data::Here(bytes.into()));
    Ok(())
}

/// A bias as codes of 32 bits that are added to sums of products of codes.
fn bias_codes(bias: &Tensor, rows: Option<Scale>, weight: &Quant) -> Result<Tensor, String> {
    let (Some(rows), Quant::Channels(channels)) = (rows, weight) else {
        return Err("rows or weight of its projection are not codes".into());
    };
    let scales: Arc<[f32]> = channels.iter().map(|s| s * rows.scale).collect();
    let mut bytes = Vec::new();
    for (x, scale) in floats(bias)?.iter().zip(scales.iter()) {
        let code = (f64::from(*x) / f64::from(*scale)).round_ties_even();
        if !(f64::from(i32::MIN)..=f64::from(i32::MAX)).contains(&code) {
            return Err(format!("{x:e} is beyond 32 bits of {scale:e}"));
        }
        bytes.extend_from_slice(&(code as i32).to_le_bytes());
    }
    let data = Some(Data::Here(bytes.into()));
    Ok(Tensor { ty: Dtype::I32, quant: Quant::Channels(scales), data, ..bias.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn codes_cover_a_range_and_represent_zero(a in -100.0_f32..100.0, b in -100.0_f32..100.0) {
            let range = Range::of([a, b]);
            let scale = range.scale();
            for end in [range.least, range.most] {
                let (code, saturated) = scale.code(f64::from(end), Dtype::U16);
                prop_assert!(!saturated);
                prop_assert!((scale.real(code) - f64::from(end)).abs() <= f64::from(scale.scale) * 0.51);
            }
            prop_assert_eq!(scale.real(scale.code(0.0, Dtype::U16).0), 0.0);
            let width = f64::from(range.most - range.least).max(1e-6);
            prop_assert!(f64::from(scale.scale) <= width / 65532.0);
        }
    }
}
