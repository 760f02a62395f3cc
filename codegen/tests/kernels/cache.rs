//! KV-cache tensors in the layouts that kernels read and write.

use half::bf16;
use moec_codegen::{Isa, key_order, value_order};
use moec_ir::state::{CACHED, CacheHead, CacheOffsets, CacheOrder, rotate};
use moec_ir::types::{Format, GROUP};

/// Tensor `[slots · heads, ctx, dim]`.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub(crate) format: Format,
    /// Channels that are rotated together.
    pub(crate) rotated: usize,
    pub(crate) values: bool,
    pub(crate) ctx: usize,
    pub(crate) dim: usize,
    pub(crate) numbers: Vec<f32>,
}

/// Codes and scale of a group, rounded as in the kernels.
fn group(format: Format, x: &[f32]) -> (Vec<i8>, f32) {
    let codes = format.spec().codes.expect("a format of codes");
    let (lowest, highest) = (f32::from(codes.lowest), f32::from(codes.highest));
    let above = x.iter().fold(0.0_f32, |top, x| top.max(*x));
    let below = x.iter().fold(0.0_f32, |top, x| top.max(-x));
    let scale = if format == Format::Q8 {
        above.max(below) * (1.0 / highest)
    } else {
        (if below > above { -below } else { above }) * (1.0 / lowest)
    };
    let scale = bf16::from_f32(scale).to_f32();
    let inverse = if scale == 0.0 { 0.0 } else { 1.0 / scale };
    (x.iter().map(|x| (x * inverse).clamp(lowest, highest).round_ties_even() as i8).collect(), scale)
}

impl Cache {
    /// The rows as they are stored: rotated, if so.
    fn stored(&self) -> Vec<f32> {
        let mut rows = self.numbers.clone();
        rows.chunks_mut(self.dim).for_each(|row| rotate(row, self.rotated));
        rows
    }

    /// The numbers after rounding to the cache format.
    pub(crate) fn rounded(&self) -> Vec<f32> {
        let mut rows: Vec<f32> = match self.format {
            Format::F32 => self.stored(),
            format if format.is_quantised() => self
                .stored()
                .chunks(self.dim)
                .flat_map(|row| row.chunks(GROUP))
                .flat_map(|x| {
                    let (codes, scale) = group(format, x);
                    codes.into_iter().map(move |c| f32::from(c) * scale)
                })
                .collect(),
            _ => self.stored().iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        };
        rows.chunks_mut(self.dim).for_each(|row| rotate(row, self.rotated));
        rows
    }

    /// Bytes of the tensor in the layout of a machine.
    pub(crate) fn pack(&self, isa: &Isa) -> Vec<u8> {
        self.pack_in(if self.values { value_order(isa) } else { key_order(isa) })
    }

    /// Like [`Self::pack`], in a given order.
    pub(crate) fn pack_in(&self, order: CacheOrder) -> Vec<u8> {
        let head = CacheHead { format: self.format, order, ctx: self.ctx, dim: self.dim };
        let size = head.bytes().expect("a format of caches");
        // Channels that a token has codes of: those past its last are zero.
        let filled = match order {
            CacheOrder::Keys { .. } => self.dim.next_multiple_of(GROUP),
            CacheOrder::Values { nr, .. } => self.dim.next_multiple_of(nr as usize),
            CacheOrder::Rows => self.dim,
        };
        let mut memory = Vec::new();
        for numbers in self.stored().chunks(self.ctx * self.dim) {
            let mut bytes = vec![0; size];
            for (t, row) in numbers.chunks(self.dim).enumerate() {
                for (c, x) in row.iter().enumerate() {
                    let place = head.offsets(t, c);
                    match self.format {
                        Format::F32 => bytes[place.at..][..4].copy_from_slice(&x.to_le_bytes()),
                        format if format.is_quantised() => {
                            let first = c / GROUP * GROUP;
                            let (codes, scale) = group(format, &row[first..][..GROUP.min(self.dim - first)]);
                            let code = codes[c % GROUP];
                            if format == Format::Q8 {
                                bytes[place.at] = code.cast_unsigned();
                            } else {
                                put_code(&mut bytes, format, place, code);
                            }
                            let at = place.scale.expect("codes have a scale");
                            bytes[at..][..2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
                        }
                        _ => bytes[place.at..][..2].copy_from_slice(&bf16::from_f32(*x).to_le_bytes()),
                    }
                    let back = head.read(&bytes, place).expect("inside");
                    let largest = row.iter().fold(1.0_f32, |top, x| top.max(x.abs()));
                    let step = if self.format.is_quantised() { 1.0 / 7.0 } else { 0.01 };
                    assert!(back.is_nan() || (back - x).abs() <= largest * step || x.abs() > 1e9);
                }
                if self.format.is_quantised() && self.format != Format::Q8 {
                    (self.dim..filled).for_each(|c| put_code(&mut bytes, self.format, head.offsets(t, c), 0));
                }
            }
            memory.extend(bytes);
        }
        memory
    }
}

/// Writes a code of q5 or q4.
fn put_code(bytes: &mut [u8], format: Format, place: CacheOffsets, code: i8) {
    let index = code.wrapping_sub(format.spec().codes.expect("codes").lowest).cast_unsigned();
    let mut put = |at: usize, shift: usize, mask: u8, bits: u8| {
        bytes[at] = bytes[at] & !(mask << shift) | bits << shift;
    };
    put(place.at, place.shift, 15, index & 15);
    if let Some((at, bit)) = place.fifth {
        put(at, bit, 1, index >> 4);
    }
}

/// Cache formats.
pub(crate) const FORMATS: [Format; 5] = CACHED;
