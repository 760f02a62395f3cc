//! Quantisations: weights as codes of few bits, with scales and what else makes numbers of them in tensors of their own. One row
//! for each layout of such tensors.

mod config;
mod decode;
mod take;

pub use config::{Way, ways};
pub(crate) use decode::Decoder;

use crate::encodings::Encoding;
use crate::encodings::fp8::{E4M3, e4m3};
use crate::encodings::mxfp4::{E2M1, E8M0, E8M0_BYTES};
use crate::encodings::plain::{BF16, F16, F32};
use moec_ir::types::Coding;
use moec_ir::{Axis, Coded, Format};

/// A layout: a weight is `(code − zero point) · scale`, the scale times a factor, each of them from a tensor of its own.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name in the Graph.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Whether the tensors are of the transposed matrix, `[in, out]`. Axes below are those of the tensors.
    pub transposed: bool,
    /// The codes.
    pub codes: Packing,
    /// The number that a code of so many bits stands for.
    pub number: fn(u8, u32) -> f32,
    /// Numbers that codes stand for, where formats of weights may hold codes and scales as they are.
    pub grid: Option<Grid>,
    /// Bytes of the last axis, where it is split into blocks of them.
    pub split: Option<usize>,
    /// Suffixes of the scales' tensor, the first that is there counts, and how they may be stored.
    pub scales: (&'static [&'static str], &'static [&'static Encoding]),
    /// Zero points, codes themselves; where there is no such tensor they are 0.
    pub zeros: Option<Packing>,
    /// Factor on all scales of a matrix.
    pub factor: Option<Factor>,
    /// Suffix of the tensor with the group of each input channel. Where it is missing, groups lie one after another.
    pub groups: Option<&'static str>,
    /// Suffix of a tensor that says no more than the config does.
    pub idle: Option<&'static str>,
}

/// Numbers that codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Whole ones, with a sign, of as many bits as a code has.
    Whole,
    /// Those of E2M1, times a power of two.
    E2m1,
}

/// Packing of codes in the words of a tensor: code `i` of a word is at bit `bits · order[i]` of it.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// Suffix of the tensor: appended to the weight's name, or in place of `.weight`, if it begins with a dot.
    pub suffix: &'static str,
    /// Stored type of a word.
    pub dtype: &'static str,
    /// Axis along which a word holds consecutive codes.
    pub axis: Axis,
    /// Places of a word's codes; in order, if it is empty.
    pub order: &'static [u8],
    /// Whether every code is stored less 1.
    pub less_one: bool,
}

/// A factor on scales.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// Suffix of its tensor.
    pub suffix: &'static str,
    /// Whether scales are divided by it.
    pub divides: bool,
}

impl Packing {
    /// Codes that lie in order along the columns.
    const fn of(suffix: &'static str, dtype: &'static str) -> Self {
        Self { suffix, dtype, axis: Axis::Cols, order: &[], less_one: false }
    }

    /// Bytes of a word.
    pub fn word(&self) -> usize {
        if self.dtype == "I32" { 4 } else { 1 }
    }

    /// Codes of a word.
    pub fn codes(&self, bits: u32) -> usize {
        (8 * self.word() / bits.max(1) as usize).max(1)
    }

    /// Whether a word holds codes of several rows.
    pub fn by_rows(&self) -> bool {
        self.axis == Axis::Rows
    }

    /// Words that hold a matrix of codes, as rows and columns.
    pub fn words(&self, bits: u32, [rows, cols]: [usize; 2]) -> [usize; 2] {
        let codes = self.codes(bits);
        if self.by_rows() { [rows.div_ceil(codes), cols] } else { [rows, cols.div_ceil(codes)] }
    }
}

/// Name of a tensor that belongs to a weight.
pub fn named(weight: &str, suffix: &str) -> String {
    let stem = if suffix.starts_with('.') { weight.strip_suffix(".weight") } else { None };
    format!("{}{suffix}", stem.unwrap_or(weight))
}

/// Scales as most have them.
const SCALES: &[&Encoding] = &[&F32, &BF16, &F16];

/// Common fields of most layouts.
const PLAIN: Layout = Layout {
    name: "",
    title: "",
    transposed: false,
    codes: Packing::of("", ""),
    number: |code, _| f32::from(code),
    grid: None,
    split: None,
    scales: (&["_scale"], SCALES),
    zeros: None,
    factor: None,
    groups: None,
    idle: None,
};

/// FP8 E4M3: with a scale for each block (DeepSeek-V3, Qwen3), output channel (compressed-tensors) or tensor (ModelOpt, AutoFP8).
pub static FP8: Layout = Layout {
    name: "fp8",
    title: "FP8 E4M3",
    codes: Packing::of("", "F8_E4M3"),
    number: |code, _| e4m3(code),
    scales: (&["_scale_inv", "_scale"], &[&F32, &BF16, &F16, &E8M0]),
    ..PLAIN
};

/// A byte for each code, as compressed-tensors' `int-quantized`.
static INT8: Layout = Layout {
    name: "int8",
    title: "INT8",
    codes: Packing::of("", "I8"),
    number: signed,
    grid: Some(Grid::Whole),
    zeros: Some(Packing::of("_zero_point", "I8")),
    ..PLAIN
};

/// Codes of 32-bit words, as compressed-tensors' `pack-quantized`. The sign bit of a code is stored the other way round.
static PACKED: Layout = Layout {
    name: "packed",
    title: "packed INT",
    codes: Packing::of("_packed", "I32"),
    number: |code, bits| f32::from(code) - f32::from(1_u8 << (bits - 1)),
    grid: Some(Grid::Whole),
    zeros: Some(Packing { axis: Axis::Rows, ..Packing::of("_zero_point", "I32") }),
    groups: Some("_g_idx"),
    idle: Some("_shape"),
    ..PLAIN
};

/// NVFP4, as compressed-tensors stores it.
static NVFP4: Layout = Layout {
    name: "nvfp4",
    title: "NVFP4",
    codes: Packing::of("_packed", "U8"),
    number: e2m1,
    scales: (&["_scale"], &[&E4M3]),
    factor: Some(Factor { suffix: "_global_scale", divides: true }),
    ..PLAIN
};

/// NVFP4, as NVIDIA's ModelOpt stores it.
static NVFP4_MODELOPT: Layout = Layout {
    name: "nvfp4_modelopt",
    title: "NVFP4",
    codes: Packing::of("", "U8"),
    // Its zeros have no sign.
    number: |code, bits| e2m1(code, bits) + 0.0,
    scales: (&["_scale"], &[&E4M3]),
    factor: Some(Factor { suffix: "_scale_2", divides: false }),
    ..PLAIN
};

/// MXFP4, as compressed-tensors stores it.
static MXFP4_PACKED: Layout = Layout {
    name: "mxfp4_packed",
    title: "MXFP4",
    codes: Packing::of("_packed", "U8"),
    number: e2m1,
    grid: Some(Grid::E2m1),
    scales: (&["_scale"], &[&E8M0_BYTES]),
    ..PLAIN
};

/// MXFP4, as gpt-oss stores it.
pub static MXFP4: Layout = Layout {
    name: "mxfp4",
    title: "MXFP4",
    codes: Packing::of("_blocks", "U8"),
    number: e2m1,
    grid: Some(Grid::E2m1),
    split: Some(16),
    scales: (&["_scales"], &[&E8M0_BYTES]),
    ..PLAIN
};

/// AWQ, version `gemm`: words along the output channels, with the places of `AWQ_REVERSE_ORDER`.
static AWQ: Layout = Layout {
    name: "awq",
    title: "AWQ INT",
    transposed: true,
    codes: Packing { order: &AWQ_ORDER, ..Packing::of(".qweight", "I32") },
    scales: (&[".scales"], SCALES),
    zeros: Some(Packing { order: &AWQ_ORDER, ..Packing::of(".qzeros", "I32") }),
    ..PLAIN
};

const AWQ_ORDER: [u8; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// GPTQ, `checkpoint_format` `gptq`: words along the input channels; of zero points along the output channels.
static GPTQ: Layout = Layout {
    name: "gptq",
    title: "GPTQ INT",
    transposed: true,
    codes: Packing { axis: Axis::Rows, ..Packing::of(".qweight", "I32") },
    scales: (&[".scales"], SCALES),
    zeros: Some(Packing { less_one: true, ..Packing::of(".qzeros", "I32") }),
    groups: Some(".g_idx"),
    ..PLAIN
};

/// GPTQ, `checkpoint_format` `gptq_v2`, whose zero points are what they are.
static GPTQ_V2: Layout = Layout { name: "gptq_v2", zeros: Some(Packing::of(".qzeros", "I32")), ..GPTQ };

/// Every layout that is read.
pub static LAYOUTS: [&Layout; 10] =
    [&FP8, &INT8, &PACKED, &NVFP4, &NVFP4_MODELOPT, &MXFP4_PACKED, &MXFP4, &AWQ, &GPTQ, &GPTQ_V2];

/// The layout of that name.
pub fn of(name: &str) -> Option<&'static Layout> {
    LAYOUTS.into_iter().find(|layout| layout.name == name)
}

/// Name of a layout for people, with the bits of its codes where its name leaves them open.
fn title(layout: &Layout, bits: u32) -> String {
    if layout.title.ends_with("INT") { format!("{}{bits}", layout.title) } else { layout.title.to_owned() }
}

/// Storage of a leaf's numbers, for people.
pub fn describe(coded: &Coded) -> String {
    let Some(layout) = of(&coded.layout) else { return coded.layout.clone() };
    let block = if layout.transposed { [coded.block[1], coded.block[0]] } else { coded.block };
    let order = if coded.groups.is_some() { ", groups in any order" } else { "" };
    let zeros = if coded.zeros.is_some() { ", zero points" } else { "" };
    format!("{} by {}×{}{zeros}{order}", title(layout, coded.bits), block[0], block[1])
}

impl Layout {
    /// The format of weights that holds what is stored as it is, whatever the codes are.
    pub fn format(&self, coded: &Coded, shape: &[usize]) -> Option<Format> {
        // What has zero points may have them so that no format holds it.
        let (cols, group) = (shape.last().copied().unwrap_or(1), coded.block[1]);
        let plain = coded.zeros.is_none() && coded.groups.is_none();
        let coding = match (self.grid?, coded.bits) {
            (Grid::Whole, 8) => Coding::Bytes,
            (Grid::Whole, 4) => Coding::Nibbles,
            (Grid::Whole, _) => return None,
            (Grid::E2m1, _) => Coding::E2m1,
        };
        let format = Format::published(coding, coded.bits as usize)?;
        (plain && (group >= cols || group.is_multiple_of(format.block()))).then_some(format)
    }
}

/// Two's complement of a byte.
fn signed(code: u8, _: u32) -> f32 {
    f32::from(code.cast_signed())
}

fn e2m1(code: u8, _: u32) -> f32 {
    E2M1[usize::from(code & 15)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_and_suffixes_replace_or_append() {
        for (i, layout) in LAYOUTS.into_iter().enumerate() {
            assert!(std::ptr::eq(of(layout.name).unwrap(), layout), "{i}: {}", layout.name);
            assert!(layout.scales.1.iter().all(|scale| scale.block == 1));
        }
        assert_eq!(named("a.weight", "_scale"), "a.weight_scale");
        assert_eq!(named("a.weight", ".qweight"), "a.qweight");
        assert_eq!(named("experts.down_proj", ".qweight"), "experts.down_proj.qweight");
        assert_eq!(named("experts.down_proj", "_scale_inv"), "experts.down_proj_scale_inv");
    }

    #[test]
    fn words_of_a_matrix() {
        assert_eq!(PACKED.codes.words(4, [3, 17]), [3, 3]);
        assert_eq!(GPTQ.codes.words(2, [64, 5]), [4, 5]);
        assert_eq!(FP8.codes.words(8, [3, 5]), [3, 5]);
        assert_eq!(NVFP4.codes.words(4, [3, 32]), [3, 16]);
    }
}
