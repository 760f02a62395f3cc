//! Constants that no device file has, each fitted to named figures of NPUMoE; the other figures check it.
//!
//! | constant | found from |
//! |---|---|
//! | rate at which the CPU moves rows | Table 4, Gather of Core ML (CPU) |
//! | attention on the CPU, in addition to the device table's time of its matrices | Table 6, attention |
//! | rate at which graphs that are not resident reach the NPU | Table 4, Expert FFN of Core ML (naive) |
//! | share of that during which the CPU works | §5.5, Core ML (naive) at prompt 1024, chunk 256 |
//! | share of the time of graphs of experts during which the CPU works | §5.5, Core ML (CPU) at 1024, 256 |
//!
//! Each is the solution of one linear equation: the simulator runs at two values, and the third follows.

use super::paper::{CLAIMS, Metric, QWEN, RUNS, SHORT};
use super::reproduce::{Bench, Total};
use crate::claim::printed;
use moec_base::{Error, Result};
use moec_costs::Constants;
use moec_costs::timeline::TaskKind;
use moec_simulate::System;
use moec_simulate::systems::{ANEMLL, COREML_CPU, COREML_NAIVE, OURS};

/// Bytes of a gathered number: read in f16 and written in f16.
const GATHERED: f64 = 4.0;

/// A constant and its source.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fitted {
    /// Description.
    pub what: &'static str,
    /// Its value.
    pub value: f64,
    /// Unit.
    pub unit: &'static str,
    /// The figure that it was found from.
    pub from: &'static str,
}

/// Finds the constants.
///
/// # Errors
/// Figures or devices that admit no solution.
pub fn fit(bench: &Bench) -> Result<Constants> {
    let missing = |what: &str| Error::bug(format!("the paper's figures lack {what}"));
    let printed = printed(CLAIMS)?;
    let figure = |of: &str| printed.get(of).map(|p| p.value()).ok_or_else(|| missing(of));
    let run = |system: &str| RUNS.iter().find(|r| r.system == system);
    let mut found = Constants::NONE;

    let gather = figure("Gather, coreml-cpu")?;
    let pairs = f64::from(SHORT.prompt * SHORT.shape.k) * SHORT.shape.hidden as f64;
    found.copy_gb_per_s = pairs * GATHERED * 1e-6 / gather;

    let attention = |system: &str| run(system).map(|r| r.attention).ok_or_else(|| missing("Table 6"));
    let on_npu = f64::midpoint(attention(OURS.name)?, attention(ANEMLL.name)?);
    let target_ratio = attention(COREML_CPU.name)? / on_npu;
    let part = |total: &Total| total.parts.get(&TaskKind::Attention).copied().unwrap_or(0.0);
    let (cpu, npu) = (bench.total(&QWEN, &COREML_CPU, found)?, bench.total(&QWEN, &ANEMLL, found)?);
    found.attention_on_cpu = target_ratio * part(&npu) / part(&cpu).max(f64::MIN_POSITIVE);

    let experts = figure("Expert FFN, coreml-naive")?;
    let part = |total: &Total| total.block_ms(TaskKind::Experts, &SHORT);
    let none = bench.total(&SHORT, &COREML_NAIVE, found)?;
    let slow = bench.total(&SHORT, &COREML_NAIVE, Constants { load_gb_per_s: 1.0, ..found })?;
    let left = experts - part(&none);
    if left <= 0.0 {
        return Err(Error::limit(
            "Core ML (naive) is slower here than in Table 4 even when graphs stay resident",
        ));
    }
    found.load_gb_per_s = (part(&slow) - part(&none)) / left;

    let ratio = |of: &str| figure(&SHORT.ratio(Metric::Cpu, of, OURS.name));
    let cpu = |system: &System, constants: Constants| {
        Ok::<_, Error>(bench.total(&SHORT, system, constants)?.cpu_us)
    };
    let share = |target: f64, none: f64, whole: f64| {
        ((target - none) / (whole - none).max(f64::MIN_POSITIVE)).clamp(0.0, 1.0)
    };
    let ours = cpu(&COREML_CPU, found)? / ratio(COREML_CPU.name)?;
    found.hosting = share(ours, cpu(&OURS, found)?, cpu(&OURS, Constants { hosting: 1.0, ..found })?);
    let naive = ours * ratio(COREML_NAIVE.name)?;
    let whole = cpu(&COREML_NAIVE, Constants { load_on_cpu: 1.0, ..found })?;
    found.load_on_cpu = share(naive, cpu(&COREML_NAIVE, found)?, whole);
    Ok(found)
}

/// Fitted constants, and their sources.
pub fn found(constants: &Constants) -> [Fitted; 5] {
    let fitted = |what, value, unit, from| Fitted { what, value, unit, from };
    [
        fitted("rows that the CPU moves", constants.copy_gb_per_s, "GB/s", "Table 4, Gather, Core ML (CPU)"),
        fitted("attention on the CPU", constants.attention_on_cpu, "× the device's table", "Table 6, Attn"),
        fitted(
            "graphs that are not resident",
            constants.load_gb_per_s,
            "GB/s",
            "Table 4, Expert FFN, Core ML (naive)",
        ),
        fitted(
            "CPU for graphs that run",
            constants.hosting,
            "of the time",
            "§5.5, Core ML (CPU) at 1024/256",
        ),
        fitted(
            "CPU for graphs that are brought",
            constants.load_on_cpu,
            "of the time",
            "§5.5, Core ML (naive) at 1024/256",
        ),
    ]
}

/// Watts of the units, from the joules of Table 7 over the seconds of Table 6: CPU, NPU, memory.
///
/// The CPU's and the memory's are those of Core ML (CPU). The NPU works in `ours` during attention and
/// experts, in `anemll` during attention: the least squares of both.
pub fn watts() -> Option<[f64; 3]> {
    let run = |system: &str| RUNS.iter().find(|r| r.system == system);
    let (cpu, ours, anemll) = (run(COREML_CPU.name)?, run(OURS.name)?, run(ANEMLL.name)?);
    let busy = [(ours.npu_j, ours.experts + ours.attention), (anemll.npu_j, anemll.attention)];
    let (xy, xx) = busy.iter().fold((0.0, 0.0), |(xy, xx), (j, s)| (xy + j * s, xx + s * s));
    Some([cpu.cpu_j / cpu.wall, xy / xx, cpu.memory_j / cpu.wall])
}
