//! The quantities that `claims/trimoe.toml` names.

use super::bench::Shares;
use super::experiments::{ABLATION, Bench, SYSTEMS};
use super::machine::{CHANNELS, LINK, Machine, PCIE};
use super::models::{DEEPSEEK, MODELS, QWEN};
use super::paper::{FLAT_CPU, STABLE_DIMMS};
use super::report::{Report, robust};
use crate::claim::{Claims, Quantities};
use moec_base::Result;

/// Bytes of the memory of one of the GPUs of §1.
const GPU_BYTES: f64 = 80e9;

/// Every figure that the paper prints, and ours.
///
/// # Errors
/// Our bug: claims with an unknown quantity.
pub fn claims(bench: &Bench, report: &Report) -> Result<Claims> {
    let mut all = Quantities::default();
    let by_model = MODELS.iter().zip(report.speedup()).zip(&report.throughput);
    for ((m, decode), [.., longest]) in by_model {
        all.put(format!("experts/{}", m.name), m.bytes() as f64 / f64::from(1 << 30));
        all.put(format!("parameters/{}", m.name), m.weights() as f64 * 1e-9);
        all.both(format!("decode/{}", m.name), decode);
        all.both(format!("end to end/{}", m.name), longest.plain);
    }
    all.put("GPUs/DeepSeek-V2", (2.0 * DEEPSEEK.weights() as f64 / GPU_BYTES).ceil());
    let machine = bench.machine();
    all.put("bandwidth/DIMMs", machine.dimms as f64 * bench.rates.private_gbs / host_gbs(&machine));
    all.put("migration/CPU", links_gbs(&machine) / copies_gbs(&machine));
    let decoding = report.throughput.iter().map(|[.., longest]| longest.decoding);
    all.put("decode/share", decoding.fold(1.0, f64::min));
    all.put("warm/NDP", report.warm_on_ndp);
    // moec's schedule is compared with TriMoE's column of Table 3.
    let moec = report.used[4];
    for (system, s) in SYSTEMS.iter().zip(&report.used) {
        let units = [("GPU", s.gpu, moec.gpu), ("CPU", s.cpu_calc, moec.cpu_calc), ("NDP", s.ndp, moec.ndp)];
        for (unit, ours, moec) in units {
            let name = format!("used/{unit}/{}", system.name);
            if system.name == "TriMoE" { all.both(name, [ours, moec]) } else { all.put(name, ours) }
        }
    }
    let mean = |s: Shares| (s.gpu + s.cpu_calc + s.ndp) / 3.0;
    all.both("used/mean", [3, 4].map(|system| mean(report.used[system])));
    for (step, times) in ABLATION[1..].iter().zip(steps(report)) {
        all.put(format!("adds/{}", step.name), times);
    }
    let over = |curve: &[(f64, [f64; 2])], x: f64, most: f64| {
        let at = |x: f64| curve.iter().find(|p| p.0 == x).map_or([f64::NAN; 2], |p| p.1);
        [0, 1].map(|system| at(x)[system] / at(most)[system])
    };
    all.both("time/DIMMs", over(&report.dimms, STABLE_DIMMS, 32.0));
    all.both("time/cpu", over(&report.cpu, FLAT_CPU, 1.0));
    for (batch, speedup) in robust(report) {
        all.both(format!("batch/{batch}"), speedup);
    }
    all.put("predictor/right", report.accuracy);
    // Four bytes for each routed expert.
    all.put("predictor/memory", (4 * DEEPSEEK.experts * DEEPSEEK.layers) as f64 * 1e-3);
    all.put("migration/four", relayouts_ms(&machine, 4));
    all.put("migration/window", report.window_ms);
    all.put("migration/overhead", report.migration.iter().map(|m| m.overhead).fold(0.0, f64::max));
    Claims::new(include_str!("../../claims/trimoe.toml"), &all)
}

/// Geometric means over the models of a step's gain.
pub fn steps(report: &Report) -> Vec<f64> {
    let n = report.ablation[0].len();
    let ratio = |i: usize, from: usize| {
        let product: f64 = report.ablation.iter().map(|a| a[from] / a[i]).product();
        product.powf(1.0 / report.ablation.len() as f64)
    };
    // The last three begin where the paper's steps end.
    (1..n).map(|i| ratio(i, if i < 4 { i - 1 } else { 3 })).collect()
}

/// Milliseconds for so many striped experts of Qwen3 to be localized on different DIMMs, all at once: each
/// link carries one expert in, and its share of the others out.
pub fn relayouts_ms(machine: &Machine, experts: usize) -> f64 {
    let bytes = QWEN.expert_bytes() as f64;
    let share = bytes / machine.dimms as f64;
    (bytes - share + share * (experts as f64 - 1.0)) / (LINK * machine.link) * 1e3
}

/// GB/s that the host reads of all channels.
fn host_gbs(machine: &Machine) -> f64 {
    CHANNELS * machine.rates.striped_gbs
}

/// GB/s that all DIMM-Links carry at once.
pub fn links_gbs(machine: &Machine) -> f64 {
    machine.dimms as f64 * LINK * machine.link * 1e-9
}

/// GB/s that a CPU moves between DIMMs: every byte is read and written, at the rate of reads.
pub fn copies_gbs(machine: &Machine) -> f64 {
    host_gbs(machine) / 2.0
}

/// Milliseconds of one prefetch of Qwen3.
pub fn prefetch_ms() -> f64 {
    QWEN.expert_bytes() as f64 / PCIE * 1e3
}
