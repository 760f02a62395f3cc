//! Numbers of one tensor in a run.

use crate::net::{Dtype, Quant, Scale, Tensor, unpack_nibbles};
use half::f16;

/// Numbers of a tensor: what they are, or codes.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Numbers that are what they are.
    Reals(Vec<f32>),
    /// Codes of an activation.
    Codes(Vec<u16>, Scale),
    /// Codes of a weight, with a scale for each entry of the first axis.
    Weights(Vec<i8>, Box<[f32]>),
    /// Whole numbers: codes of a bias, indices.
    Whole(Vec<i32>),
}

impl Values {
    /// The numbers of a static tensor from its bytes, of which there are as many as it has.
    pub(super) fn decode(tensor: &Tensor, bytes: &[u8]) -> Self {
        let count = tensor.elements() as usize;
        let halves = || bytes.as_chunks::<2>().0.iter();
        let words = || bytes.as_chunks::<4>().0.iter();
        let signed = || -> Vec<i8> {
            match tensor.ty {
                Dtype::I4 => unpack_nibbles(bytes, count).collect(),
                _ => bytes.iter().map(|b| b.cast_signed()).collect(),
            }
        };
        match (tensor.ty, &tensor.quant) {
            (Dtype::F16, _) => Self::Reals(halves().map(|b| f16::from_le_bytes(*b).to_f32()).collect()),
            (Dtype::I32, _) => Self::Whole(words().map(|b| i32::from_le_bytes(*b)).collect()),
            (Dtype::U16, Quant::Tensor(scale)) => {
                Self::Codes(halves().map(|b| u16::from_le_bytes(*b)).collect(), *scale)
            }
            (Dtype::U8, Quant::Tensor(scale)) => {
                Self::Codes(bytes.iter().map(|b| u16::from(*b)).collect(), *scale)
            }
            (Dtype::I8 | Dtype::I4, Quant::Channels(scales)) => Self::Weights(signed(), (**scales).into()),
            _ => Self::Reals(words().map(|b| f32::from_le_bytes(*b)).collect()),
        }
    }

    /// Reals as a tensor stores them. Gives how many codes saturated, too.
    pub(super) fn encode(tensor: &Tensor, reals: impl ExactSizeIterator<Item = f64>) -> (Self, u64) {
        match (tensor.ty, &tensor.quant) {
            (ty, Quant::Tensor(scale)) => {
                let mut saturated = 0;
                let code = |x| {
                    let (code, out) = scale.code(x, ty);
                    saturated += u64::from(out);
                    code as u16
                };
                let codes = reals.map(code).collect();
                (Self::Codes(codes, *scale), saturated)
            }
            (Dtype::F16, _) => (Self::Reals(reals.map(|x| f16::from_f64(x).to_f32()).collect()), 0),
            _ => (Self::Reals(reals.map(|x| x as f32).collect()), 0),
        }
    }

    /// Values of the numbers. Of weights and whole numbers: the codes themselves.
    pub fn reals(&self) -> Vec<f64> {
        match self {
            Self::Reals(x) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::Codes(x, scale) => x.iter().map(|q| scale.real(i64::from(*q))).collect(),
            Self::Weights(x, _) => x.iter().map(|x| f64::from(*x)).collect(),
            Self::Whole(x) => x.iter().map(|x| f64::from(*x)).collect(),
        }
    }

    /// Number of them.
    pub fn len(&self) -> usize {
        match self {
            Self::Reals(x) => x.len(),
            Self::Codes(x, _) => x.len(),
            Self::Weights(x, _) => x.len(),
            Self::Whole(x) => x.len(),
        }
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The values at some places of some operands, in that order.
    pub(super) fn picked(of: &[&Self], places: &[(usize, usize)]) -> Self {
        let code = |&(from, at): &(usize, usize)| match of[from] {
            Self::Codes(x, _) => x[at],
            _ => 0,
        };
        let real = |&(from, at): &(usize, usize)| match of[from] {
            Self::Reals(x) => x[at],
            _ => 0.0,
        };
        if let Some(Self::Codes(_, scale)) = of.first() {
            Self::Codes(places.iter().map(code).collect(), *scale)
        } else {
            Self::Reals(places.iter().map(real).collect())
        }
    }
}
