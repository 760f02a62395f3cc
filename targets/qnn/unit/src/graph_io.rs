//! Numbers as the inputs and outputs of a graph hold them: stored numbers, little-endian, row-major.
#![expect(clippy::cast_possible_truncation, reason = "reals are rounded, codes are those of their type")]

use half::f16;
use moec_ir::plan;
use moec_qnn_sys::graph::{real, stored};
use moec_qnn_sys::{DType, Quant, TensorInfo};

/// An input or an output of a graph.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct GraphTensor {
    name: String,
    form: Encoding,
    /// Bytes of its stored numbers.
    pub(crate) bytes: usize,
}

/// Storage of its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Encoding {
    U16 { scale: f32, offset: i32 },
    U8 { scale: f32, offset: i32 },
    F16,
    F32,
}

/// Least and largest stored number of 16 bits, and of 8.
const U16: (i64, i64) = (0, 0xFFFF);
const U8: (i64, i64) = (0, 0xFF);

impl GraphTensor {
    /// A tensor that a context describes, if it is the one that the plan names: `[rows, channels]`.
    ///
    /// # Errors
    /// Another shape, or a type that no caller writes or reads, for people.
    pub(crate) fn of(info: &TensorInfo, planned: &plan::GraphTensor) -> Result<Self, String> {
        let name = &info.name;
        if info.dims != planned.shape[..2] || planned.shape[2..] != [1, 1] {
            return Err(format!("`{name}` is {:?}, but the plan has {:?}", info.dims, planned.shape));
        }
        Self::stored(info)
    }

    /// A tensor that a context describes.
    ///
    /// # Errors
    /// A type that no caller writes or reads, for people.
    pub(crate) fn stored(info: &TensorInfo) -> Result<Self, String> {
        let name = &info.name;
        let dtype = info.dtype().map_err(|e| e.to_string())?;
        let form = match (dtype, &info.quant) {
            (DType::U16, &Quant::Tensor { scale, offset }) => Encoding::U16 { scale, offset },
            (DType::U8, &Quant::Tensor { scale, offset }) => Encoding::U8 { scale, offset },
            (DType::F16, _) => Encoding::F16,
            (DType::F32, _) => Encoding::F32,
            _ => return Err(format!("`{name}` is {dtype}, which no caller writes or reads")),
        };
        Ok(Self { name: name.clone(), form, bytes: info.bytes().map_err(|e| e.to_string())? })
    }

    /// Bytes of a number.
    pub(crate) const fn width(&self) -> usize {
        match self.form {
            Encoding::U8 { .. } => 1,
            Encoding::U16 { .. } | Encoding::F16 => 2,
            Encoding::F32 => 4,
        }
    }

    /// Whether another tensor stores numbers in the same way.
    pub(crate) fn alike(&self, other: &Self) -> bool {
        self.form == other.form
    }

    fn expect(&self, numbers: usize) -> Result<(), String> {
        let has = self.bytes / self.width();
        if has == numbers { Ok(()) } else { Err(format!("`{}` has {has} numbers, not {numbers}", self.name)) }
    }

    /// Stores numbers in memory of [`GraphTensor::bytes`].
    ///
    /// # Errors
    /// Another number of them.
    pub(crate) fn encode(&self, from: &[f16], to: &mut [u8]) -> Result<(), String> {
        self.expect(from.len())?;
        match self.form {
            Encoding::U16 { scale, offset } => {
                to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, x)| {
                    *to = (stored(x.to_f64(), scale, offset, U16).0 as u16).to_le_bytes();
                });
            }
            Encoding::F16 => {
                to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, x)| *to = x.to_le_bytes());
            }
            Encoding::U8 { scale, offset } => to.iter_mut().zip(from).for_each(|(to, x)| {
                *to = stored(x.to_f64(), scale, offset, U8).0 as u8;
            }),
            Encoding::F32 => to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, x)| {
                *to = x.to_f32().to_le_bytes();
            }),
        }
        Ok(())
    }

    /// Numbers that memory of [`GraphTensor::bytes`] stores.
    ///
    /// # Errors
    /// Another number of them, or one that f16 does not hold.
    pub(crate) fn decode(&self, from: &[u8], to: &mut [f16]) -> Result<(), String> {
        self.expect(to.len())?;
        let (twos, fours) = (from.as_chunks::<2>().0, from.as_chunks::<4>().0);
        match self.form {
            Encoding::U16 { scale, offset } => to.iter_mut().zip(twos).for_each(|(to, b)| {
                *to = half(real(u16::from_le_bytes(*b).into(), scale, offset));
            }),
            Encoding::U8 { scale, offset } => to.iter_mut().zip(from).for_each(|(to, b)| {
                *to = half(real((*b).into(), scale, offset));
            }),
            Encoding::F16 => to.iter_mut().zip(twos).for_each(|(to, b)| *to = f16::from_le_bytes(*b)),
            Encoding::F32 => to.iter_mut().zip(fours).for_each(|(to, b)| {
                *to = f16::from_f32(f32::from_le_bytes(*b));
            }),
        }
        match to.iter().position(|x| !x.is_finite()) {
            Some(at) => Err(format!("number {at} of `{}` is {}, which f16 does not hold", self.name, to[at])),
            None => Ok(()),
        }
    }
}

/// Rounds like every host of these graphs: to f32, then to f16.
fn half(x: f64) -> f16 {
    f16::from_f32(x as f32)
}
