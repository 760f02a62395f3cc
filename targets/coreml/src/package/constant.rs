//! Constants: in the model itself, or in a weight file.
#![expect(clippy::cast_possible_truncation, reason = "bits are cut to the type that they are of")]

use super::error::Flaw;
use super::proto::{Elements, Kind, StoredValue, Value};
use super::types::{Dtype, TensorType};
use super::weights::{Blob, Weights};
use half::f16;
use half::slice::HalfFloatSliceExt;

/// Place of a constant's elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Stored {
    /// Bytes in the model: little-endian, booleans as bytes, packed as in a weight file.
    Inline(Vec<u8>),
    /// Strings in the model.
    Text(Vec<String>),
    /// Bytes in a weight file.
    Blob(Blob),
}

/// A constant.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Type.
    pub ty: TensorType,
    /// Place of the elements.
    pub stored: Stored,
}

/// Bytes of numbers, if there are as many as the type says.
fn pack<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|&v| bytes(v)).collect()
}

/// Bytes of numbers that must fit into fewer bits.
fn narrow<T: TryFrom<i32>, const N: usize>(
    values: &[i32],
    bytes: impl Fn(T) -> [u8; N],
) -> Result<Vec<u8>, Flaw> {
    let one = |&v: &i32| {
        T::try_from(v).map(&bytes).map_err(|_| Flaw::Invalid(format!("{v} does not fit into its type")))
    };
    Ok(values.iter().map(one).collect::<Result<Vec<_>, _>>()?.concat())
}

impl Constant {
    /// Reads a constant; checks that it has as many elements as its type says.
    pub(super) fn read(value: &Value, weights: &mut Weights) -> Result<Self, Flaw> {
        let kind = value.r#type.as_ref().and_then(|t| t.kind.as_ref());
        let Some(Kind::Tensor(ty)) = kind else {
            return Err(Flaw::Unsupported("a constant that is not a tensor".into()));
        };
        let ty = TensorType::read(ty)?;
        let stored = match &value.held {
            Some(StoredValue::Blob(blob)) => Stored::Blob(weights.find(&blob.file_name, blob.offset, &ty)?),
            Some(StoredValue::Immediate(value)) => {
                let elements = value.tensor.as_ref().and_then(|t| t.elements.as_ref());
                inline(&ty, elements.ok_or_else(|| Flaw::Invalid("a constant without elements".into()))?)?
            }
            None => return Err(Flaw::Invalid("a constant without a value".into())),
        };
        Ok(Self { ty, stored })
    }

    /// The elements as they are stored, little-endian and packed; empty for strings.
    pub fn bytes<'a>(&'a self, weights: &'a Weights) -> &'a [u8] {
        match &self.stored {
            Stored::Inline(bytes) => bytes,
            Stored::Text(_) => &[],
            Stored::Blob(blob) => weights.bytes(*blob),
        }
    }

    /// The string, if the constant is a single one.
    pub fn text(&self) -> Option<&str> {
        match &self.stored {
            Stored::Text(strings) if strings.len() == 1 => strings.first().map(String::as_str),
            _ => None,
        }
    }

    /// The elements as integers; `None` for other types.
    pub fn integers(&self, weights: &Weights) -> Option<Vec<i64>> {
        let bytes = self.bytes(weights);
        let signed = matches!(self.ty.dtype, Dtype::I4 | Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
        if self.ty.dtype.is_float() || self.ty.dtype == Dtype::String {
            return None;
        }
        let bits = self.ty.dtype.bits();
        Some((0..self.ty.elements()).map(|i| number(bytes, i, bits, signed)).collect())
    }

    /// Writes elements from `start` on as f32, as many as `out` has. 64-bit integers are rounded.
    ///
    /// False if the constant has no such elements or they are strings; `out` is then unspecified.
    pub fn floats(&self, weights: &Weights, start: usize, out: &mut [f32]) -> bool {
        let inside = start.checked_add(out.len()).is_some_and(|end| end <= self.ty.elements());
        if !inside || self.ty.dtype == Dtype::String {
            return false;
        }
        let bytes = self.bytes(weights);
        match self.ty.dtype {
            Dtype::F16 => halves(bytes.get(2 * start..).unwrap_or_default(), out),
            Dtype::F32 => {
                let words = bytes.get(4 * start..).unwrap_or_default().as_chunks::<4>().0;
                out.iter_mut().zip(words).for_each(|(x, &w)| *x = f32::from_le_bytes(w));
            }
            dtype => {
                let signed = matches!(dtype, Dtype::I4 | Dtype::I8 | Dtype::I16 | Dtype::I32 | Dtype::I64);
                let bits = dtype.bits();
                (out.iter_mut().enumerate())
                    .for_each(|(i, x)| *x = number(bytes, start + i, bits, signed) as f32);
            }
        }
        true
    }
}

/// Widens little-endian f16 numbers.
fn halves(bytes: &[u8], out: &mut [f32]) {
    let mut block = [f16::ZERO; 256];
    let words = bytes.as_chunks::<2>().0;
    for (out, words) in out.chunks_mut(block.len()).zip(words.chunks(block.len())) {
        let block = &mut block[..out.len().min(words.len())];
        block.iter_mut().zip(words).for_each(|(x, &w)| *x = f16::from_le_bytes(w));
        let len = block.len();
        block.convert_to_f32_slice(&mut out[..len]);
    }
}

/// Integer `i` of a stream of integers of `bits` bits, the lowest bit first. 0 past the end.
fn number(bytes: &[u8], i: usize, bits: usize, signed: bool) -> i64 {
    let first = i * bits;
    let at = |byte: usize| u128::from(bytes.get(byte).copied().unwrap_or(0));
    let last = (first + bits - 1) / 8;
    let word = (first / 8..=last).rev().fold(0_u128, |word, byte| word << 8 | at(byte));
    let value = (word >> (first % 8)) as u64 & (u64::MAX >> (64 - bits));
    let unused = 64 - bits as u32;
    if signed { (value << unused) as i64 >> unused } else { value as i64 }
}

/// Elements that the model itself holds.
fn inline(ty: &TensorType, elements: &Elements) -> Result<Stored, Flaw> {
    use Dtype::*;
    let (count, bytes) = match (ty.dtype, elements) {
        (String, Elements::Strings(s)) => {
            if s.values.len() != ty.elements() {
                return Err(Flaw::Invalid(format!("{} strings for {ty}", s.values.len())));
            }
            return Ok(Stored::Text(s.values.clone()));
        }
        (F32, Elements::Floats(x)) => (x.values.len(), pack(&x.values, f32::to_le_bytes)),
        (Bool, Elements::Bools(x)) => (x.values.len(), pack(&x.values, |b| [u8::from(b)])),
        (I32, Elements::Ints(x)) => (x.values.len(), pack(&x.values, i32::to_le_bytes)),
        (U32, Elements::Ints(x)) => (x.values.len(), pack(&x.values, |v| (v as u32).to_le_bytes())),
        (I16, Elements::Ints(x)) => (x.values.len(), narrow(&x.values, i16::to_le_bytes)?),
        (U16, Elements::Ints(x)) => (x.values.len(), narrow(&x.values, u16::to_le_bytes)?),
        (I8, Elements::Ints(x)) => (x.values.len(), narrow(&x.values, i8::to_le_bytes)?),
        (U8, Elements::Ints(x)) => (x.values.len(), narrow(&x.values, u8::to_le_bytes)?),
        (I64 | U64, Elements::LongInts(x)) => (x.values.len(), pack(&x.values, i64::to_le_bytes)),
        (F16 | F32 | I4 | I8 | I16 | U1 | U2 | U3 | U4 | U6 | U8 | U16 | U32, Elements::Bytes(x)) => {
            if x.values.len() != ty.bytes() {
                return Err(Flaw::Invalid(format!("{} bytes for {ty}", x.values.len())));
            }
            return Ok(Stored::Inline(x.values.clone()));
        }
        _ => return Err(Flaw::Invalid(format!("elements of another type than {ty}"))),
    };
    if count != ty.elements() {
        return Err(Flaw::Invalid(format!("{count} elements for {ty}")));
    }
    Ok(Stored::Inline(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_of_few_bits_are_read_lowest_bit_first() {
        // The 3-bit numbers 1, 2, 3, 4, 5: 001 010 011 100 101, each shifted further left.
        let word = 0b101_100_011_010_001_u32.to_le_bytes();
        assert_eq!((0..5).map(|i| number(&word, i, 3, false)).collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
        assert_eq!(number(&[0xF8], 0, 4, true), -8);
        assert_eq!(number(&[0xF8], 1, 4, true), -1);
        assert_eq!(number(&[0xF8], 1, 4, false), 15);
        assert_eq!(number(&(-3_i64).to_le_bytes(), 0, 64, true), -3);
    }

    #[test]
    fn long_runs_of_halves_are_widened_across_blocks() {
        let bytes: Vec<u8> = (0..600).flat_map(|i| f16::from_f32(i as f32).to_le_bytes()).collect();
        let mut out = vec![0.0; 600];
        halves(&bytes, &mut out);
        assert!(out.iter().enumerate().all(|(i, &x)| x == i as f32));
    }
}
