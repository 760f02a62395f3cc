//! Weights of a program: their places, and the bytes that a package stores of them.

use super::{Counted, ELEMENT, elements};
use serde::{Deserialize, Serialize};

/// Alignment of data, and size of the header and of every entry's metadata, in a package's weight file.
const BLOB_ALIGN: u64 = 64;
/// Arrays with fewer elements stay in the program instead of the weight file.
const INLINE_BELOW: u64 = 10;

/// Place of a constant's values in a raw file, row-major and little-endian: f16, or codes with scales.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct WeightRef {
    /// Name, for people.
    pub name: String,
    /// File, relative to the folder of weights that the helper is given.
    pub file: String,
    /// First byte.
    pub offset: u64,
    /// Extents.
    pub shape: Vec<usize>,
    /// Set where the values are codes, a byte each in the raw file: the package stores them so, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<Blocks>,
}

/// Codes that share scales: value `[o, i, 0, 0]` is `scale[o, i / size] · code[o, i]`, rounded to f16
/// (`constexpr_blockwise_shift_scale` of iOS 18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Blocks {
    /// Bits of a code in the package, 4 or 8; signed.
    pub bits: u8,
    /// Input channels that share a scale.
    pub size: usize,
    /// First byte of the scales in the raw file, f16 `[outputs, inputs / size]`.
    pub scales: u64,
}

impl WeightRef {
    /// Number of elements; saturates, so that an absurd shape is over every limit.
    pub fn elements(&self) -> u64 {
        elements(&self.shape)
    }

    /// The arrays that a package stores of it, or those of its values in f16.
    pub fn arrays(&self, counted: Counted) -> impl Iterator<Item = Array> + use<> {
        arrays(self.elements(), self.blocks.as_ref(), counted)
    }
}

/// The arrays with this many values.
pub(crate) fn arrays(
    elements: u64,
    blocks: Option<&Blocks>,
    counted: Counted,
) -> impl Iterator<Item = Array> + use<> {
    let (codes, scales) = match blocks.filter(|_| counted == Counted::Stored) {
        None => (Array::halves(elements), None),
        Some(b) => {
            let bytes = elements.saturating_mul(u64::from(b.bits)).div_ceil(8);
            (Array { elements, bytes }, Some(Array::halves(elements / (b.size as u64).max(1))))
        }
    };
    std::iter::once(codes).chain(scales)
}

/// An array of a weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Array {
    /// Numbers.
    pub elements: u64,
    /// Bytes of them.
    pub bytes: u64,
}

impl Array {
    /// Numbers in f16.
    pub const fn halves(elements: u64) -> Self {
        Self { elements, bytes: elements.saturating_mul(ELEMENT) }
    }
}

/// Size of a weight file with these arrays: a header, then metadata and aligned data of each array that is
/// not inline.
pub fn blob_bytes(arrays: impl IntoIterator<Item = Array>) -> u64 {
    let stored = arrays
        .into_iter()
        .filter(|a| a.elements >= INLINE_BELOW)
        .map(|a| a.bytes.checked_next_multiple_of(BLOB_ALIGN).unwrap_or(u64::MAX).saturating_add(BLOB_ALIGN));
    let all = stored.fold(0, u64::saturating_add);
    if all == 0 { 0 } else { all.saturating_add(BLOB_ALIGN) }
}
