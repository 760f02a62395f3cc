//! `quantization_config`: the layouts that weights may have.
#![expect(clippy::cast_possible_truncation, reason = "whole numbers of a config")]

use super::{
    AWQ, FP8, GPTQ, GPTQ_V2, INT8, Layout, MXFP4, MXFP4_PACKED, NVFP4, NVFP4_MODELOPT, PACKED, title,
};
use crate::config::Config;
use moec_base::error::{Error, Result};

/// A layout with its sizes.
#[derive(Clone, Copy, Debug)]
pub struct LayoutSpec {
    /// The layout.
    pub layout: &'static Layout,
    /// Bits of a code.
    pub bits: u32,
    /// Output and input channels that share a scale; `None`: all channels.
    pub block: [Option<usize>; 2],
    /// Whether zero points are required.
    pub zeros: bool,
    /// Whether groups of input channels are required.
    pub groups: bool,
}

impl LayoutSpec {
    const fn of(layout: &'static Layout, bits: u32, block: [Option<usize>; 2]) -> Self {
        Self { layout, bits, block, zeros: false, groups: false }
    }

    /// Name for people.
    pub fn title(&self) -> String {
        title(self.layout, self.bits)
    }
}

/// Key of the section.
const SECTION: &str = "quantization_config";
/// Parser for the rest of the section.
type Read = fn(&Config) -> Result<Vec<LayoutSpec>>;

/// Supported values of `quant_method`, with their parsers.
const METHODS: [(&str, Read); 7] = [
    ("fp8", fp8),
    ("fbgemm_fp8", |_| Ok(vec![LayoutSpec::of(&FP8, 8, [Some(1), None])])),
    ("mxfp4", |_| Ok(vec![LayoutSpec::of(&MXFP4, 4, [Some(1), Some(32)])])),
    ("compressed-tensors", compressed_tensors),
    ("modelopt", modelopt),
    ("awq", awq),
    ("gptq", gptq),
];

/// Returns the layouts that the weights of a checkpoint may have besides plain numbers. The tensors of a
/// weight show which one it has. So lists of modules (`modules_to_not_convert`, `ignore`, `targets`) need not
/// be read.
///
/// # Errors
/// Fails if a quantisation is not supported, and names it.
pub fn layouts(config: &Config) -> Result<Vec<LayoutSpec>> {
    let Some(q) = config.opt_section(SECTION)? else { return Ok(Vec::new()) };
    let method = q.opt_text("quant_method")?.unwrap_or("none");
    match METHODS.iter().find(|(name, _)| *name == method) {
        Some((_, read)) => read(&q),
        None => Err(q.unsupported("quant_method", method, &METHODS.map(|(name, _)| name))),
    }
}

/// Refuses a value that is not among `known`; the first of these is the default.
fn one_of<'a>(q: &'a Config, key: &str, known: &[&'a str]) -> Result<&'a str> {
    let value = q.opt_text(key)?.or(known.first().copied()).unwrap_or_default();
    if known.contains(&value) { Ok(value) } else { Err(q.unsupported(key, value, known)) }
}

/// Refuses a section that changes the meaning of weights.
fn refuse_section(q: &Config, key: &str) -> Result<()> {
    match q.opt_section(key)? {
        Some(section) if !section.is_empty() => {
            Err(Error::limit(format!("{} is not supported", q.name(key))))
        }
        _ => Ok(()),
    }
}

/// Output and input channels of a block.
fn block(q: &Config, key: &'static str) -> Result<[Option<usize>; 2]> {
    let whole = |&x: &f64| (x.fract() == 0.0 && (1.0..=65536.0).contains(&x)).then_some(x as usize);
    match q.opt_numbers(key)?.as_deref() {
        None => Ok([None; 2]),
        Some([rows, cols]) if whole(rows).is_some() && whole(cols).is_some() => {
            Ok([whole(rows), whole(cols)])
        }
        Some(_) => Err(q.unfit(key, "two whole numbers, of output and input channels")),
    }
}

/// Input channels that share a scale; −1 and `null` mean all.
fn group(q: &Config) -> Result<Option<usize>> {
    match q.opt_number("group_size")? {
        None | Some(-1.0) => Ok(None),
        _ => Ok(q.opt_size(&["group_size"])?.map(|size| size.n)),
    }
}

/// Bits of a code.
fn bits(q: &Config, key: &'static str, known: &[u32]) -> Result<u32> {
    let n = q.size(&[key])?.n;
    let names: Vec<String> = known.iter().map(ToString::to_string).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let found = known.iter().find(|&&bits| bits as usize == n);
    found.copied().ok_or_else(|| q.unsupported(key, n, &names))
}

fn fp8(q: &Config) -> Result<Vec<LayoutSpec>> {
    one_of(q, "fmt", &["e4m3", "float8_e4m3fn"])?;
    Ok(vec![LayoutSpec::of(&FP8, 8, block(q, "weight_block_size")?)])
}

fn awq(q: &Config) -> Result<Vec<LayoutSpec>> {
    one_of(q, "version", &["gemm", "GEMM"])?;
    let bits = bits(q, if q.has("w_bit") { "w_bit" } else { "bits" }, &[4])?;
    Ok(vec![LayoutSpec { zeros: true, ..LayoutSpec::of(&AWQ, bits, [Some(1), group(q)?]) }])
}

fn gptq(q: &Config) -> Result<Vec<LayoutSpec>> {
    refuse_section(q, "dynamic")?;
    one_of(q, "pack_dtype", &["int32"])?;
    let key = if q.has("checkpoint_format") { "checkpoint_format" } else { "format" };
    let layout = if one_of(q, key, &["gptq", "gptq_v2"])? == "gptq" { &GPTQ } else { &GPTQ_V2 };
    let layout_spec = LayoutSpec::of(layout, bits(q, "bits", &[2, 4, 8])?, [Some(1), group(q)?]);
    Ok(vec![LayoutSpec { zeros: true, groups: q.flag_or("desc_act", false)?, ..layout_spec }])
}

fn modelopt(q: &Config) -> Result<Vec<LayoutSpec>> {
    const ALGORITHMS: [&str; 4] = ["FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4"];
    let groups = q.opt_section("config_groups")?;
    let of_group = groups.and_then(|groups| groups.opt_section("group_0").ok()?);
    let weights = of_group.and_then(|group| group.opt_section("weights").ok()?);
    let size = weights.as_ref().map_or_else(|| group(q), group)?;
    let layout_spec = match q.opt_text("quant_algo")?.unwrap_or("none") {
        "FP8" => LayoutSpec::of(&FP8, 8, [None; 2]),
        "FP8_PER_CHANNEL_PER_TOKEN" => LayoutSpec::of(&FP8, 8, [Some(1), None]),
        "FP8_PB_WO" => LayoutSpec::of(&FP8, 8, [Some(128); 2]),
        "NVFP4" => LayoutSpec::of(&NVFP4_MODELOPT, 4, [Some(1), size.or(Some(16))]),
        other => return Err(q.unsupported("quant_algo", other, &ALGORITHMS)),
    };
    Ok(vec![layout_spec])
}

/// Returns the groups in a configuration of compressed-tensors, each with its own format or the common one.
fn compressed_tensors(q: &Config) -> Result<Vec<LayoutSpec>> {
    refuse_section(q, "transform_config")?;
    if let Some(sparsity) = q.opt_section("sparsity_config")? {
        one_of(&sparsity, "format", &["dense"])?;
    }
    let Some(groups) = q.opt_section("config_groups")? else { return Ok(Vec::new()) };
    let mut specs = Vec::new();
    for name in groups.keys() {
        let Some(group) = groups.opt_section(name)? else { continue };
        let Some(weights) = group.opt_section("weights")? else { continue };
        let own = if group.has("format") { &group } else { q };
        specs.push(of_group(own, &weights)?);
    }
    Ok(specs)
}

fn of_group(q: &Config, weights: &Config) -> Result<LayoutSpec> {
    const FORMATS: [&str; 6] = [
        "pack-quantized",
        "int-quantized",
        "float-quantized",
        "naive-quantized",
        "nvfp4-pack-quantized",
        "mxfp4-pack-quantized",
    ];
    let kind = one_of(weights, "type", &["int", "float"])?;
    let (layout, known, bits_of): (_, &[u32], _) = match (q.opt_text("format")?.unwrap_or("none"), kind) {
        ("pack-quantized", "int") => (&PACKED, &[2, 4, 8], None),
        ("int-quantized" | "naive-quantized", "int") => (&INT8, &[2, 3, 4, 5, 6, 7, 8], Some(8)),
        ("float-quantized" | "naive-quantized", "float") => (&FP8, &[8], None),
        ("nvfp4-pack-quantized", "float") => (&NVFP4, &[4], None),
        ("mxfp4-pack-quantized", "float") => (&MXFP4_PACKED, &[4], None),
        (format, _) if FORMATS.contains(&format) => {
            return Err(weights.unsupported("type", kind, &[&format!("the other type with `{format}`")]));
        }
        (other, _) => return Err(q.unsupported("format", other, &FORMATS)),
    };
    let bits = bits(weights, "num_bits", known)?;
    let channels = |group| [Some(1), group];
    let block = match one_of(weights, "strategy", &["tensor", "channel", "group", "tensor_group", "block"])? {
        "tensor" => [None; 2],
        "channel" => channels(None),
        "block" => block(weights, "block_structure")?,
        _ => channels(Some(weights.size(&["group_size"])?.n)),
    };
    let zeros = !weights.flag_or("symmetric", true)?;
    let groups = matches!(weights.opt_text("actorder"), Ok(Some("group" | "dynamic")));
    Ok(LayoutSpec { zeros, groups, ..LayoutSpec::of(layout, bits_of.unwrap_or(bits), block) })
}
