//! KV-cache tensors in the layouts that kernels read and write.

use half::bf16;
use moec_codegen::{Isa, key_order, value_order};
use moec_ir::state::{CacheHead, CacheOrder};
use moec_ir::types::{Format, GROUP};

/// Tensor `[slots · heads, ctx, dim]`.
#[derive(Clone, Debug)]
pub(crate) struct Cache {
    pub(crate) format: Format,
    pub(crate) values: bool,
    pub(crate) ctx: usize,
    pub(crate) dim: usize,
    pub(crate) numbers: Vec<f32>,
}

/// Codes and scale of a group, rounded as in the kernels.
fn group(x: &[f32]) -> (Vec<i8>, f32) {
    let top = x.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
    let scale = bf16::from_f32(top * (1.0 / 127.0)).to_f32();
    let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    (x.iter().map(|x| (x * inverse).clamp(-127.0, 127.0).round_ties_even() as i8).collect(), scale)
}

impl Cache {
    /// The numbers after rounding to the cache format.
    pub(crate) fn rounded(&self) -> Vec<f32> {
        match self.format {
            Format::F32 => self.numbers.clone(),
            Format::Q8 => self
                .numbers
                .chunks(self.dim)
                .flat_map(|row| row.chunks(GROUP))
                .flat_map(|x| {
                    let (codes, scale) = group(x);
                    codes.into_iter().map(move |c| f32::from(c) * scale)
                })
                .collect(),
            _ => self.numbers.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
        }
    }

    /// Bytes of the tensor in the layout of a machine.
    pub(crate) fn pack(&self, isa: &Isa) -> Vec<u8> {
        self.pack_in(if self.values { value_order(isa) } else { key_order(isa) })
    }

    /// Like [`Self::pack`], in a given order.
    pub(crate) fn pack_in(&self, order: CacheOrder) -> Vec<u8> {
        let head = CacheHead { format: self.format, order, ctx: self.ctx, dim: self.dim };
        let size = head.bytes().expect("a format of caches");
        let mut memory = Vec::new();
        for numbers in self.numbers.chunks(self.ctx * self.dim) {
            let mut bytes = vec![0; size];
            for (t, row) in numbers.chunks(self.dim).enumerate() {
                for (c, x) in row.iter().enumerate() {
                    let place = head.offsets(t, c);
                    match self.format {
                        Format::F32 => bytes[place.at..][..4].copy_from_slice(&x.to_le_bytes()),
                        Format::Q8 => {
                            let (codes, scale) =
                                group(&row[c / GROUP * GROUP..][..GROUP.min(self.dim - c / GROUP * GROUP)]);
                            bytes[place.at] = codes[c % GROUP].cast_unsigned();
                            let at = place.scale.expect("codes have a scale");
                            bytes[at..][..2].copy_from_slice(&bf16::from_f32(scale).to_le_bytes());
                        }
                        _ => bytes[place.at..][..2].copy_from_slice(&bf16::from_f32(*x).to_le_bytes()),
                    }
                    let back = head.read(&bytes, place).expect("inside");
                    assert!(back.is_nan() || (back - x).abs() <= x.abs().max(1.0) * 0.01 || x.abs() > 1e9);
                }
            }
            memory.extend(bytes);
        }
        memory
    }
}

/// Cache formats.
pub(crate) const FORMATS: [Format; 3] = [Format::F32, Format::Bf16, Format::Q8];
