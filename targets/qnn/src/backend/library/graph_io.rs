//! Numbers as the inputs and outputs of a graph hold them: codes, little-endian, row-major.
#![expect(clippy::cast_possible_truncation, reason = "reals are rounded, codes are those of their type")]

use crate::net::{Dtype, Network, Quant, Scale, Tensor};
use half::f16;

/// The scale of a port in codes; of another, codes are the numbers.
fn scale(tensor: &Tensor) -> Scale {
    match tensor.quant {
        Quant::Tensor(scale) => scale,
        Quant::None | Quant::Channels(_) => Scale { scale: 1.0, offset: 0 },
    }
}

/// A network's inputs from reals.
///
/// # Errors
/// A port of a type that no caller writes, or another number of numbers.
pub(super) fn encode(network: &Network, inputs: &[&[f32]]) -> Result<Vec<Vec<u8>>, String> {
    if inputs.len() != network.inputs.len() {
        return Err(format!("`{}` takes {} inputs", network.name, network.inputs.len()));
    }
    let one = |(id, x): (&crate::net::TensorId, &&[f32])| {
        let tensor = network.tensor(*id);
        if tensor.elements() != x.len() as u64 {
            return Err(format!("`{}` takes {} numbers, not {}", tensor.name, tensor.elements(), x.len()));
        }
        let scale = scale(tensor);
        let code = |x: &f32| scale.code(f64::from(*x), tensor.ty).0;
        match tensor.ty {
            Dtype::U16 => Ok(x.iter().flat_map(|x| (code(x) as u16).to_le_bytes()).collect()),
            Dtype::U8 => Ok(x.iter().map(|x| code(x) as u8).collect()),
            Dtype::F32 => Ok(x.iter().flat_map(|x| x.to_le_bytes()).collect()),
            Dtype::F16 => Ok(x.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes()).collect()),
            Dtype::I8 | Dtype::I4 | Dtype::I32 => {
                Err(format!("`{}` is {}, which no caller writes", tensor.name, tensor.ty.name()))
            }
        }
    };
    network.inputs.iter().zip(inputs).map(one).collect()
}

/// A network's results as reals.
///
/// # Errors
/// Bytes that are not the network's results.
pub(super) fn decode(network: &Network, outputs: &[Vec<u8>]) -> Result<Vec<Vec<f32>>, String> {
    if outputs.len() != network.outputs.len() {
        return Err(format!("{} results came from `{}`", outputs.len(), network.name));
    }
    let one = |(id, bytes): (&crate::net::TensorId, &Vec<u8>)| {
        let tensor = network.tensor(*id);
        let scale = scale(tensor);
        let real = |code: i64| scale.real(code) as f32;
        if tensor.bytes() != bytes.len() as u64 {
            return Err(format!("{} bytes came as `{}`, not {}", bytes.len(), tensor.name, tensor.bytes()));
        }
        let (twos, fours) = (bytes.as_chunks::<2>().0, bytes.as_chunks::<4>().0);
        match tensor.ty {
            Dtype::U16 => Ok(twos.iter().map(|b| real(u16::from_le_bytes(*b).into())).collect()),
            Dtype::U8 => Ok(bytes.iter().map(|b| real((*b).into())).collect()),
            Dtype::F32 => Ok(fours.iter().map(|b| f32::from_le_bytes(*b)).collect()),
            Dtype::F16 => Ok(twos.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect()),
            Dtype::I8 | Dtype::I4 | Dtype::I32 => {
                Err(format!("`{}` is {}, which no caller reads", tensor.name, tensor.ty.name()))
            }
        }
    };
    network.outputs.iter().zip(outputs).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::TensorId;

    /// A network whose only tensor is both input and output.
    fn port(ty: Dtype, quant: Quant) -> Network {
        let tensor = Tensor { ty, quant, ..Tensor::activation("x", [2, 2]) };
        let ids = vec![TensorId(0)];
        Network {
            name: "n".into(),
            tensors: vec![tensor],
            inputs: ids.clone(),
            nodes: Vec::new(),
            outputs: ids,
        }
    }

    #[test]
    fn values_round_trip_through_every_port_type() {
        let codes = |offset| Quant::Tensor(Scale { scale: 0.25, offset });
        let x = [0.0, 0.5, -1.25, 3.0];
        let types = [
            (Dtype::U16, codes(-32768)),
            (Dtype::U8, codes(-100)),
            (Dtype::F32, Quant::None),
            (Dtype::F16, Quant::None),
        ];
        for (ty, quant) in types {
            let network = port(ty, quant);
            let bytes = encode(&network, &[&x]).unwrap();
            assert_eq!(bytes[0].len() as u64, ty.bytes(4), "{}", ty.name());
            assert_eq!(decode(&network, &bytes).unwrap(), [x.to_vec()], "{}", ty.name());
        }
    }

    #[test]
    fn unsupported_ports_are_rejected() {
        let network = port(Dtype::I32, Quant::None);
        assert!(encode(&network, &[&[0.0; 4]]).unwrap_err().contains("`x` is i32"));
        let network = port(Dtype::F32, Quant::None);
        assert!(encode(&network, &[&[0.0; 3]]).unwrap_err().contains("takes 4 numbers, not 3"));
        assert!(encode(&network, &[]).unwrap_err().contains("takes 1 inputs"));
        assert!(decode(&network, &[vec![0; 15]]).unwrap_err().contains("15 bytes came as `x`, not 16"));
        assert!(decode(&network, &[]).unwrap_err().contains("0 results"));
    }
}
