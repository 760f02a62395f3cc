//! Tolerance of a step: the error that the formats of its operands and its compute type explain.

use moec_backend::distance;
use moec_base::error::{Error, Result};
use moec_bundle::read::Bundle;
use moec_cpu::{Activations, ComputeType};
use moec_ir::plan::{Builtin, Code, Plan};
use moec_ir::{Format, Op};
use std::collections::HashMap;

/// Factor by which the relative rounding error of a row grows in a product, since products cancel and
/// roundings do not. No step of the golden checkpoints and of the demo model needs more than 2.2.
const CANCELLING: f64 = 3.0;
/// Root mean square of the error of rounding a row to bytes. A step is a 127th of the largest of 32 numbers.
/// That number is two to three times their root mean square, and a rounding error is a step over √12.
const BYTES: f64 = 3.0 / 127.0 * 0.29;
/// Compute types of a bundle.
pub(super) struct Arithmetic {
    /// Format of the weights and compute type, by kernel of the plan.
    kernels: HashMap<u32, (Format, ComputeType)>,
    /// Format of the weights and compute type, by launch of the plan.
    launches: Vec<Option<(Format, ComputeType)>>,
    /// Widest format of the KV cache.
    cache: Format,
    /// Whether attention may round queries and weights.
    rough: bool,
}

impl Arithmetic {
    /// Returns the compute types that were decided for a bundle.
    pub(super) fn of(bundle: &Bundle) -> Result<Self> {
        let decisions = bundle.decisions()?;
        let kernels = decisions
            .kernels
            .iter()
            .map(|d| Some((d.kernel, (Format::parse(&d.format)?, ComputeType::parse(&d.compute)?))));
        // A kernel that computes panels by neurons has no decision; its symbol gives its compute type.
        let panels = bundle.plan.kernels.iter().zip(0..).map(|(k, i)| of_symbol(&k.symbol).map(|of| (i, of)));
        let unknown = || Error::input("`decisions.json` names an arithmetic that this moec does not support");
        Ok(Self {
            kernels: panels.flatten().map(Some).chain(kernels).collect::<Option<_>>().ok_or_else(unknown)?,
            launches: bundle.plan.launches.iter().map(|k| of_symbol(&k.symbol)).collect(),
            cache: cache(&bundle.plan),
            rough: decisions.activations != Activations::F32.name(),
        })
    }

    /// Returns the compute types of a host build: activations in f32.
    pub(super) fn exact(plan: &Plan) -> Self {
        Self { kernels: HashMap::new(), launches: Vec::new(), cache: cache(plan), rough: false }
    }

    /// Local error of a node with these kernels that formats and arithmetic explain; 0 for f32. NDP command
    /// streams compute both parts of an expert in bf16.
    pub(super) fn rounding(&self, op: &Op, codes: &[Code], streams: bool) -> f64 {
        let streamed = if streams { 2.0 * multiplied(Format::Bf16, ComputeType::Bf16) } else { 0.0 };
        match op {
            Op::CacheWrite => self.cache.distance(),
            // Queries, weights and values are pairs of bf16, whose errors add up.
            Op::Attention(_) if self.cache != Format::F32 && self.rough => 4.0 * Format::Bf16.distance(),
            // The two products of an expert are two kernels.
            _ => {
                let of = |code: &Code| match *code {
                    Code::Kernel(k) => self.kernels.get(&k).copied(),
                    Code::Builtin(Builtin::Launch { kernel }) => *self.launches.get(kernel as usize)?,
                    Code::Builtin(_) => None,
                };
                let own: f64 = codes.iter().filter_map(of).map(|(f, c)| multiplied(f, c)).sum();
                let products = own.max(streamed);
                match *op {
                    Op::ExpertFfn { glu, .. } | Op::NeuronFfn { glu, .. } | Op::LinearGlu { glu, .. } => {
                        distance::joined(products, glu)
                    }
                    _ => products,
                }
            }
        }
    }
}

/// The widest format of the KV cache.
fn cache(plan: &Plan) -> Format {
    plan.states.iter().map(|s| s.format).max().unwrap_or(Format::F32)
}

/// Format of the weights and compute type in a symbol, with or without the width of panels:
/// `…_bf16_as_bf16_…`, `…_q8_p1_as_bf16_…`. Rows of f32 have no such part.
fn of_symbol(symbol: &str) -> Option<(Format, ComputeType)> {
    let words: Vec<&str> = symbol.split('_').collect();
    let at = words.iter().position(|w| *w == "as")?;
    let format = words[..at].iter().rev().find_map(|w| Format::parse(w))?;
    Some((format, ComputeType::parse(words.get(at + 1)?)?))
}

/// Relative error of a product that the format of its rows explains. The evaluator uses the stored weights,
/// too.
fn multiplied(weights: Format, rows: ComputeType) -> f64 {
    // Products of codes and scales are rounded once more where they are widened to pairs.
    let operands = if weights.is_quantised() { 2.0_f64.sqrt() } else { 1.0 };
    match rows {
        ComputeType::F32 => 0.0,
        ComputeType::Bf16 => CANCELLING * Format::Bf16.distance() / 3.0_f64.sqrt() * operands,
        ComputeType::I8 => CANCELLING * BYTES,
    }
}
