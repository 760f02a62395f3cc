//! Converts the activations of a quantised network back to f32: the weights stay the same, and activations
//! are no longer rounded.

use crate::exec::{ExecError, static_bytes};
use crate::net::{Data, Dtype, Network, Quant, Tensor};
use moec_runtime::bundle::BundleReader;

/// The network. Weights stay codes with their scales; biases and other static numbers become the reals that
/// their codes mean. Static numbers in files are read from `files`.
///
/// # Errors
/// A file that cannot be read.
pub fn reals(network: &Network, files: Option<&BundleReader>) -> Result<Network, ExecError> {
    let mut out = network.clone();
    for tensor in &mut out.tensors {
        match (tensor.ty, &tensor.quant) {
            // Weights, indices and f32 tensors are kept.
            (Dtype::I8 | Dtype::I4 | Dtype::F32, _) | (Dtype::I32, Quant::None) => continue,
            _ => {}
        }
        if tensor.is_static() {
            let numbers = meant(tensor, &static_bytes(tensor, files)?);
            tensor.data = Some(Data::Here(numbers.iter().flat_map(|x| x.to_le_bytes()).collect()));
        }
        (tensor.ty, tensor.quant) = (Dtype::F32, Quant::None);
    }
    Ok(out)
}

/// Values of a static tensor's codes.
fn meant(tensor: &Tensor, bytes: &[u8]) -> Vec<f32> {
    let codes: Vec<i64> = match tensor.ty {
        Dtype::U16 => bytes.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b).into()).collect(),
        Dtype::I32 => bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        Dtype::F16 => {
            let reals = bytes.as_chunks::<2>().0.iter().map(|b| half::f16::from_le_bytes(*b).to_f32());
            return reals.collect();
        }
        _ => bytes.iter().map(|b| (*b).into()).collect(),
    };
    let each = tensor.shape.iter().skip(1).product::<usize>().max(1);
    let real = |(i, code): (usize, &i64)| match &tensor.quant {
        Quant::Tensor(scale) => scale.real(*code) as f32,
        Quant::Channels(scales) => {
            (*code as f64 * f64::from(scales.get(i / each).copied().unwrap_or_default())) as f32
        }
        Quant::None => *code as f32,
    };
    codes.iter().enumerate().map(real).collect()
}
