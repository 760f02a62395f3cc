//! Quantisations: weights as codes of few bits, with scales and other factors in separate tensors. Each
//! layout of such tensors is one row.

mod config;
mod decode;
mod take;

pub use config::{LayoutSpec, layouts};
pub(crate) use decode::Decoder;

use crate::encodings::Encoding;
use crate::encodings::fp8::{E4M3, e4m3};
use crate::encodings::mxfp4::{E2M1, E8M0, E8M0_BYTES};
use crate::encodings::plain::{BF16, F16, F32};
use moec_ir::{Axis, Coded, Format};

/// A layout. A weight is `(code − zero point) · scale`, the scale times a factor, each of them from a
/// separate tensor.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    /// Name in the Graph.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// Whether the tensors have the transposed matrix, `[in, out]`. The axes below are those of the tensors.
    pub transposed: bool,
    /// The codes.
    pub codes: Packing,
    /// The number for a code of so many bits.
    pub number: fn(u8, u32) -> f32,
    /// Kind of the numbers, if formats of weights can hold codes and scales exactly.
    pub grid: Option<Grid>,
    /// Size in bytes of the blocks that the last axis is split into, if it is.
    pub split: Option<usize>,
    /// Possible suffixes of the scales' tensor, of which the first that exists is used, and possible types.
    pub scales: (&'static [&'static str], &'static [&'static Encoding]),
    /// Zero points, which are codes themselves; 0 if there is no such tensor.
    pub zeros: Option<Packing>,
    /// Factor on all scales of a matrix.
    pub factor: Option<Factor>,
    /// Suffix of the tensor with the group of each input channel. Without it, groups are consecutive.
    pub groups: Option<&'static str>,
    /// Suffix of a tensor that only repeats data of the config.
    pub idle: Option<&'static str>,
}

/// Kind of numbers that codes represent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid {
    /// Signed integers with the bits of a code.
    Whole,
    /// Numbers of E2M1, times a power of two.
    E2m1,
}

/// Packing of codes in the words of a tensor: code `i` of a word begins at bit `bits · order[i]`.
#[derive(Clone, Copy, Debug)]
pub struct Packing {
    /// Suffix of the tensor. It is appended to the weight's name; if it begins with a dot, it replaces
    /// `.weight`.
    pub suffix: &'static str,
    /// Stored type of a word.
    pub dtype: &'static str,
    /// Axis along which a word holds consecutive codes.
    pub axis: Axis,
    /// Order of a word's codes; ascending if it is empty.
    pub order: &'static [u8],
    /// Whether every code is stored minus 1.
    pub less_one: bool,
}

/// A factor on scales.
#[derive(Clone, Copy, Debug)]
pub struct Factor {
    /// Suffix of its tensor.
    pub suffix: &'static str,
    /// Whether scales are divided by the factor.
    pub divides: bool,
}

impl Packing {
    /// Packing of codes that are in order along the columns.
    const fn of(suffix: &'static str, dtype: &'static str) -> Self {
        Self { suffix, dtype, axis: Axis::Cols, order: &[], less_one: false }
    }

    /// Bytes per word.
    pub fn word(&self) -> usize {
        if self.dtype == "I32" { 4 } else { 1 }
    }

    /// Codes per word.
    pub fn codes(&self, bits: u32) -> usize {
        (8 * self.word() / bits.max(1) as usize).max(1)
    }

    /// Whether a word has codes of several rows.
    pub fn by_rows(&self) -> bool {
        self.axis == Axis::Rows
    }

    /// Rows and columns of the words for a matrix of codes.
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

/// The most common scales.
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

/// FP8 E4M3, with a scale for each block (DeepSeek-V3, Qwen3), output channel (compressed-tensors) or tensor
/// (ModelOpt, AutoFP8).
pub static FP8: Layout = Layout {
    name: "fp8",
    title: "FP8 E4M3",
    codes: Packing::of("", "F8_E4M3"),
    number: |code, _| e4m3(code),
    scales: (&["_scale_inv", "_scale"], &[&F32, &BF16, &F16, &E8M0]),
    ..PLAIN
};

/// One byte per code: `int-quantized` of compressed-tensors.
static INT8: Layout = Layout {
    name: "int8",
    title: "INT8",
    codes: Packing::of("", "I8"),
    number: signed,
    grid: Some(Grid::Whole),
    zeros: Some(Packing::of("_zero_point", "I8")),
    ..PLAIN
};

/// Codes in 32-bit words: `pack-quantized` of compressed-tensors. The sign bit of a code is stored inverted.
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

/// NVFP4 of compressed-tensors.
static NVFP4: Layout = Layout {
    name: "nvfp4",
    title: "NVFP4",
    codes: Packing::of("_packed", "U8"),
    number: e2m1,
    scales: (&["_scale"], &[&E4M3]),
    factor: Some(Factor { suffix: "_global_scale", divides: true }),
    ..PLAIN
};

/// NVFP4 of NVIDIA's ModelOpt.
static NVFP4_MODELOPT: Layout = Layout {
    name: "nvfp4_modelopt",
    title: "NVFP4",
    codes: Packing::of("", "U8"),
    // Zeros in this layout have no sign.
    number: |code, bits| e2m1(code, bits) + 0.0,
    scales: (&["_scale"], &[&E4M3]),
    factor: Some(Factor { suffix: "_scale_2", divides: false }),
    ..PLAIN
};

/// MXFP4 of compressed-tensors.
static MXFP4_PACKED: Layout = Layout {
    name: "mxfp4_packed",
    title: "MXFP4",
    codes: Packing::of("_packed", "U8"),
    number: e2m1,
    grid: Some(Grid::E2m1),
    scales: (&["_scale"], &[&E8M0_BYTES]),
    ..PLAIN
};

/// MXFP4 of gpt-oss.
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

/// AWQ, version `gemm`: words along the output channels, in the order of `AWQ_REVERSE_ORDER`.
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

/// GPTQ, `checkpoint_format` `gptq`: words along the input channels; for zero points along the output
/// channels.
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

/// GPTQ, `checkpoint_format` `gptq_v2`, where zero points are not stored minus 1.
static GPTQ_V2: Layout = Layout { name: "gptq_v2", zeros: Some(Packing::of(".qzeros", "I32")), ..GPTQ };

/// Every supported layout.
pub static LAYOUTS: [&Layout; 10] =
    [&FP8, &INT8, &PACKED, &NVFP4, &NVFP4_MODELOPT, &MXFP4_PACKED, &MXFP4, &AWQ, &GPTQ, &GPTQ_V2];

/// Returns the layout of that name.
pub fn of(name: &str) -> Option<&'static Layout> {
    LAYOUTS.into_iter().find(|layout| layout.name == name)
}

/// Name of a layout for people, with the bits of its codes if the name does not give them.
fn title(layout: &Layout, bits: u32) -> String {
    if layout.title.ends_with("INT") { format!("{}{bits}", layout.title) } else { layout.title.to_owned() }
}

/// Storage type of a leaf's numbers, for people.
pub fn describe(coded: &Coded) -> String {
    let Some(layout) = of(&coded.layout) else { return coded.layout.clone() };
    let block = if layout.transposed { [coded.block[1], coded.block[0]] } else { coded.block };
    let order = if coded.groups.is_some() { ", groups in any order" } else { "" };
    let zeros = if coded.zeros.is_some() { ", zero points" } else { "" };
    format!("{} by {}×{}{zeros}{order}", title(layout, coded.bits), block[0], block[1])
}

impl Layout {
    /// The format of weights that holds the stored numbers exactly, for all possible codes.
    pub fn format(&self, coded: &Coded, shape: &[usize]) -> Option<Format> {
        // With zero points, some codes may be out of the range of every format.
        let (cols, group) = (shape.last().copied().unwrap_or(1), coded.block[1]);
        let plain = coded.zeros.is_none() && coded.groups.is_none();
        let grid: &[i8] = match self.grid? {
            Grid::Whole => &[],
            Grid::E2m1 => &moec_ir::types::E2M1,
        };
        let format = Format::published(coded.bits as usize, grid)?;
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
    fn layout_names_are_unique_and_suffixes_replace_or_append() {
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
    fn packed_matrix_shapes_are_in_storage_words() {
        assert_eq!(PACKED.codes.words(4, [3, 17]), [3, 3]);
        assert_eq!(GPTQ.codes.words(2, [64, 5]), [4, 5]);
        assert_eq!(FP8.codes.words(8, [3, 5]), [3, 5]);
        assert_eq!(NVFP4.codes.words(4, [3, 32]), [3, 16]);
    }
}
