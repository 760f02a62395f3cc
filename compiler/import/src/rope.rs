//! Rotary position embeddings: from the config to inverse frequencies.
//!
//! The arithmetic is that of transformers' `modeling_rope_utils.py`: tables in f32, the bounds of YaRN's ramp
//! in f64. Powers are computed in f64 and rounded once, so that every host computes the same table.
#![expect(clippy::cast_possible_truncation, reason = "models compute with their factors in f32")]

use super::config::Config;
use super::spec::{LongRope, Rope};
use moec_base::error::{Error, Result};
use serde_json::{Map, Value};
use std::f64::consts::PI;

/// Default rotation of a family.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// Base of the frequencies.
    pub theta: f64,
    /// Share of a head's channels that is rotated.
    pub partial: f64,
    /// The kind of layer, if the rotation depends on it.
    pub layer: Option<&'static str>,
    /// Key of the base.
    pub key: &'static str,
}

impl Defaults {
    /// Defaults for a layer with a sliding window, or for one with full attention.
    pub fn of_window(window: Option<usize>) -> Self {
        let layer = if window.is_some() { "sliding_attention" } else { "full_attention" };
        Self { layer: Some(layer), ..Self::default() }
    }
}

impl Default for Defaults {
    fn default() -> Self {
        Self { theta: 10_000.0, partial: 1.0, layer: None, key: "rope_theta" }
    }
}

const SUPPORTED: [&str; 7] = ["default", "linear", "yarn", "longrope", "llama3", "dynamic", "proportional"];

/// The part of the config for the rotation, in either spelling.
struct Params {
    section: Config,
    kind: String,
    theta: f64,
    partial: f64,
    /// Context length before any extension.
    original: f64,
    /// Context length after it.
    max: f64,
}

impl Params {
    fn read(config: &Config, defaults: Defaults) -> Result<Self> {
        let scaling = config.opt_section("rope_scaling")?.filter(|s| !s.is_empty());
        let section = match scaling {
            Some(s) => Some(s),
            None => config.opt_section("rope_parameters")?,
        };
        let section = match section {
            Some(s) => s,
            None => Config::parse("config.json", b"{}")?,
        };
        let section = match defaults.layer.map(|layer| section.opt_section(layer)).transpose()?.flatten() {
            Some(of_layer) => of_layer,
            None => section,
        };
        if let Some(key) = section.nested() {
            return Err(Error::limit(format!(
                "{} differs by kind of layer, which is not supported",
                section.name(key)
            )));
        }
        let (key, kind) = section.opt_keyed_text(&["rope_type", "type"])?.unwrap_or(("rope_type", "default"));
        if !SUPPORTED.contains(&kind) {
            return Err(section.unsupported(key, kind, &SUPPORTED));
        }
        let kind = kind.to_owned();
        let theta = section.positive_or("rope_theta", config.positive_or(defaults.key, defaults.theta)?)?;
        if theta <= 1.0 {
            return Err(Error::input(format!(
                "`rope_theta` in `config.json` is {theta}, expected more than 1"
            )));
        }
        let partial = config.positive_or("partial_rotary_factor", defaults.partial)?;
        let partial = section.positive_or("partial_rotary_factor", partial)?;
        let max = config.opt_size(&["max_position_embeddings"])?.map_or(2048, |s| s.n) as f64;
        let key = "original_max_position_embeddings";
        let original = config.positive_or(key, section.positive_or(key, max)?)?;
        Ok(Self { section, kind, theta, partial, original, max })
    }

    /// `theta^(2i / dim)`.
    fn powers(&self, dim: usize) -> Vec<f32> {
        (0..dim).step_by(2).map(|i| self.theta.powf(f64::from(i as f32 / dim as f32)) as f32).collect()
    }

    fn factor(&self) -> Result<f64> {
        self.section.positive_or("factor", self.max / self.original)
    }

    fn yarn(&self, dim: usize) -> Result<Rope> {
        let factor = self.factor()?;
        let (m, all) =
            (self.section.number_or("mscale", 0.0)?, self.section.number_or("mscale_all_dim", 0.0)?);
        let inferred = if m != 0.0 && all != 0.0 {
            mscale(factor, m) / mscale(factor, all)
        } else {
            mscale(factor, 1.0)
        };
        let scale = self.section.number_or("attention_factor", inferred)?;
        let fast = self.section.positive_or("beta_fast", 32.0)?;
        let slow = self.section.positive_or("beta_slow", 1.0)?;
        let width = dim as f64;
        let channel =
            |turns: f64| width * (self.original / (turns * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut low, mut high) = (channel(fast), channel(slow));
        if self.section.flag_or("truncate", true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(width - 1.0));
        if low == high {
            high += 0.001;
        }
        let ramp = |i: usize| ((i as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
        let inv_freq = self.powers(dim).into_iter().enumerate().map(|(i, power)| {
            let kept = 1.0 - ramp(i);
            1.0 / (factor as f32 * power) * (1.0 - kept) + 1.0 / power * kept
        });
        Ok(Rope { inv_freq: inv_freq.collect(), scale: scale as f32, long: None })
    }

    fn longrope(&self, dim: usize) -> Result<Rope> {
        let factor = self.factor()?;
        let inferred = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / self.original.ln()).sqrt() };
        let scale = self.section.number_or("attention_factor", inferred)?;
        let table = |key: &'static str| -> Result<Vec<f32>> {
            let factors = self.section.opt_numbers(key)?.unwrap_or_default();
            if factors.len() != dim / 2 || factors.iter().any(|f| *f <= 0.0) {
                let what = format!(
                    "{} has {} numbers, expected {} above 0",
                    self.section.name(key),
                    factors.len(),
                    dim / 2
                );
                return Err(Error::input(what));
            }
            Ok(self.powers(dim).into_iter().zip(factors).map(|(p, f)| 1.0 / (f as f32 * p)).collect())
        };
        Ok(Rope {
            inv_freq: table("short_factor")?,
            // Phi-3.5-MoE has separate keys for the attention factors.
            scale: self.section.number_or("short_mscale", scale)? as f32,
            long: Some(LongRope {
                after: self.original as usize,
                inv_freq: table("long_factor")?,
                scale: self.section.number_or("long_mscale", scale)? as f32,
            }),
        })
    }

    /// Frequencies of a base that `alpha` increases by a constant factor (Hunyuan). A base that grows with
    /// the sequence is not supported.
    fn dynamic(&self, dim: usize) -> Result<Rope> {
        let Some(alpha) = self.section.opt_number("alpha")?.filter(|alpha| *alpha > 0.0) else {
            let key = if self.section.has("rope_type") { "rope_type" } else { "type" };
            let supported =
                SUPPORTED.map(|kind| if kind == "dynamic" { "dynamic with `alpha`" } else { kind });
            return Err(self.section.unsupported(key, "dynamic", &supported));
        };
        let theta = self.theta * alpha.powf(dim as f64 / (dim as f64 - 2.0));
        let inv_freq = (0..dim).step_by(2).map(|i| 1.0 / theta.powf(i as f64 / dim as f64) as f32);
        Ok(Rope { inv_freq: inv_freq.collect(), scale: 1.0, long: None })
    }

    /// Pairs of the whole head. The first ones rotate by `theta^(−2i / head)`, the others do not rotate.
    fn proportional(&self, dim: usize, head: usize) -> Rope {
        let angle = |i: usize| (self.theta.powf(2.0 * i as f64 / head as f64) as f32).recip();
        let inv_freq = (0..head / 2).map(|i| if i < dim / 2 { angle(i) } else { 0.0 });
        Rope { inv_freq: inv_freq.collect(), scale: 1.0, long: None }
    }

    fn llama3(&self, dim: usize) -> Result<Rope> {
        let s = &self.section;
        let factor = s.number("factor")? as f32;
        let (low, high) = (s.number("low_freq_factor")?, s.number("high_freq_factor")?);
        if low <= 0.0 || high < low || factor <= 0.0 {
            return Err(Error::input(format!(
                "{} .. {high} is not a range of factors above 0",
                s.name("low_freq_factor")
            )));
        }
        let (longest, shortest) = ((self.original / low) as f32, (self.original / high) as f32);
        let inv_freq = self.powers(dim).into_iter().map(|power| {
            let f = 1.0 / power;
            let wavelength = (2.0 * PI) as f32 / f;
            if wavelength > longest {
                f / factor
            } else if wavelength < shortest || low == high {
                // Llama 4 has no smooth transition between the two.
                f
            } else {
                let smooth = (self.original as f32 / wavelength - low as f32) / (high - low) as f32;
                (1.0 - smooth) * f / factor + smooth * f
            }
        });
        Ok(Rope { inv_freq: inv_freq.collect(), scale: 1.0, long: None })
    }
}

/// YaRN's attention factor for an extension of the context by `factor`.
fn mscale(factor: f64, m: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 }
}

/// The rotation of heads of `head_dim` channels.
///
/// # Errors
/// Fails if keys are missing or out of range, or if the kind of scaling is not supported, which the message
/// names.
pub fn read(config: &Config, head_dim: usize, defaults: Defaults) -> Result<Rope> {
    let p = Params::read(config, defaults)?;
    let dim = (head_dim as f64 * p.partial) as usize;
    if dim == 0 || dim % 2 == 1 || dim > head_dim {
        return Err(Error::limit(format!(
            "{} of {head_dim} channels would be rotated in each head, expected an even number",
            head_dim as f64 * p.partial
        ))
        .because("`config.json` sets it with `head_dim` and `partial_rotary_factor`"));
    }
    let plain = |divisor: f32| Rope {
        inv_freq: p.powers(dim).into_iter().map(|power| 1.0 / power / divisor).collect(),
        scale: 1.0,
        long: None,
    };
    let rope = match p.kind.as_str() {
        "linear" => plain(p.section.positive_or("factor", 1.0)? as f32),
        "yarn" => p.yarn(dim)?,
        "longrope" => p.longrope(dim)?,
        "llama3" => p.llama3(dim)?,
        "dynamic" => p.dynamic(dim)?,
        "proportional" => p.proportional(dim, head_dim),
        _ => plain(1.0),
    };
    let long = rope.long.iter().flat_map(|l| l.inv_freq.iter().chain([&l.scale]));
    if rope.inv_freq.iter().chain([&rope.scale]).chain(long).all(|x| x.is_finite()) {
        Ok(rope)
    } else {
        Err(Error::input(format!("the rotary frequencies of `config.json` are not finite ({:?})", p.kind)))
    }
}

/// Converts rotations per layer to those of the two kinds of layers. The scaling is that of layers with full
/// attention.
///
/// # Errors
/// Fails if values have the wrong type, or if layers of one kind have different rotations.
pub fn by_kind(config: Config) -> Result<Config> {
    const LISTS: [&str; 2] = ["rope_theta", "partial_rotary_factors"];
    if !LISTS.iter().any(|key| config.value(key).is_some_and(Value::is_array)) {
        return Ok(config);
    }
    let types = config.opt_texts("layer_types")?.unwrap_or_default();
    let mut kinds = Map::new();
    for kind in ["full_attention", "sliding_attention"] {
        let mut section = match config.value("rope_scaling").and_then(Value::as_object) {
            Some(scaling) if kind == "full_attention" => scaling.clone(),
            _ => Map::new(),
        };
        for (key, to) in LISTS.into_iter().zip(["rope_theta", "partial_rotary_factor"]) {
            let list = config.opt_numbers(key)?.unwrap_or_default();
            let mut numbers = types.iter().zip(list).filter(|(of, _)| *of == kind).map(|(_, number)| number);
            let Some(first) = numbers.next() else { continue };
            if numbers.any(|other| other != first) {
                return Err(Error::limit(format!(
                    "{} differs among layers of `{kind}`, which is not supported",
                    config.name(key)
                )));
            }
            section.insert(to.to_owned(), Value::from(first));
        }
        kinds.insert(kind.to_owned(), Value::Object(section));
    }
    let plain = config.with("rope_theta", Value::Null).with("rope_scaling", Value::Null);
    Ok(plain.with("rope_parameters", Value::Object(kinds)))
}

/// The factor on the softmax scale for a scaled rotation in DeepSeek's models: `mscale²`.
///
/// # Errors
/// Those of [`read`].
pub fn softmax_factor(config: &Config, defaults: Defaults) -> Result<f64> {
    let p = Params::read(config, defaults)?;
    let all = p.section.number_or("mscale_all_dim", 0.0)?;
    if p.kind == "default" || all == 0.0 {
        return Ok(1.0);
    }
    let m = mscale(p.factor()?, all);
    Ok(m * m)
}

#[cfg(test)]
#[path = "rope_tests.rs"]
mod tests;
