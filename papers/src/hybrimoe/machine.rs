//! The machine of §VI-A and the costs of an expert on its units, with the source of every constant.
//!
//! The paper prints no rate. Those of the CPU and the link, and the time of a layer without its experts, are
//! fitted to its times of KTransformers and of the schedule added to it (Table III, Qwen2): four constants
//! from four numbers.

use super::models::Model;
use moec_runtime::schedule::{Costs, ScheduleError, Table, UnitCosts};

/// Bytes of a weight: 4 bits, and a scale of 16 bits for 32 of them.
pub const WEIGHT: f64 = 4.5 / 8.0;
/// Bytes a second of the GPU's memory. NVIDIA RTX A6000 data sheet.
pub const GPU_BYTES: f64 = 768e9;
/// Operations a second of the GPU in f16: the data sheet's 309.7 TFLOPS are with sparsity, half of it is
/// without, of which half is assumed to be reached.
pub const GPU_FLOPS: f64 = 309.7e12 / 2.0 * 0.5;
/// Seconds to launch an expert's kernels. Assumed.
const LAUNCH: f64 = 20e-6;
/// Seconds that the CPU's first expert of a layer takes more, as a share of an expert with one token. Figure
/// 3(e) shows that it does; it prints no number. Assumed.
pub const COLD: f64 = 0.3;
/// Tokens of the prompt of Table III, which does not say: those of Figure 3(d).
pub const PROMPT: usize = 128;

/// Rates that are found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Machine {
    /// Bytes a second over the link.
    pub link: f64,
    /// Bytes of weights a second that the CPU computes with one token.
    pub cpu: f64,
    /// Operations a second of the CPU beyond the first token.
    pub cpu_flops: f64,
    /// Seconds of a layer without its routed experts, for each weight of its dense part.
    pub dense: f64,
}

/// As found; by [`super::report::Report::ablation`] again within a percent.
pub const A6000: Machine = Machine { link: 14.85e9, cpu: 17.3e9, cpu_flops: 77.9e9, dense: 7.46e-12 };

impl Machine {
    /// Costs of an expert.
    ///
    /// # Errors
    /// Our bug: a table that does not ascend.
    pub fn costs(&self, model: &Model) -> Result<Costs, ScheduleError> {
        let (weights, micro) = (model.expert() as f64, |s: f64| s * 1e6);
        let bytes = weights * WEIGHT;
        let gpu = |n: u32| LAUNCH + (bytes / GPU_BYTES).max(2.0 * weights * f64::from(n) / GPU_FLOPS);
        let cpu = |n: u32| bytes / self.cpu + 2.0 * weights * f64::from(n - 1) / self.cpu_flops;
        let table = |of: &dyn Fn(u32) -> f64| {
            Table::new([1, 32, 64, 128, 256, 512, 1024, 2048].map(|n| (n, micro(of(n)))).to_vec())
        };
        let cpu = UnitCosts { table: table(&cpu)?, first_us: micro(cpu(1) * COLD) };
        Ok(Costs::of_two(table(&gpu)?.into(), cpu, micro(bytes / self.link)))
    }

    /// Microseconds of a layer before its experts are known, for so many tokens.
    pub fn before(&self, model: &Model, tokens: usize) -> f64 {
        let weights = model.dense() as f64;
        (weights * self.dense + 2.0 * weights * tokens as f64 / GPU_FLOPS) * 1e6
    }
}
