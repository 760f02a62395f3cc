//! Costs of an expert by the rows that choose it: the table that TriMoE profiles offline for a CPU,
//! `f_calc_cpu(L)` (§4.2).
//!
//! The kernels are those that a build picks: `expert_ffn` with bf16 weights is selected and fused as in a
//! plan, in the schedule that the cost model chooses. Weights come from memory in every call ([`Stopwatch`]),
//! all threads share the work, and the median of several calls counts.

use crate::{CpuTarget, InputView, KernelSpec, NodeView, Stopwatch, TuneError, Unsupported, Work};
use moec_device::MatmulTime;
use moec_ir::op::{Activation, DispatchLayout};
use moec_ir::{Format, Glu, Op, Type};
use std::time::{Duration, Instant};

/// Channels of the residual stream, and of an expert: those of OLMoE-1B-7B. The table is read per number, so
/// the shape only has to be a usual one.
const HIDDEN: usize = 2048;
const INTER: usize = 1024;
/// Experts of a layer, each of which gets the same rows. The result is an expert's share of a batch, so its
/// kernels are those of a batch, even at one row.
pub(super) const EXPERTS: usize = 64;
/// Numbers of an expert's three matrices.
const WEIGHTS: usize = 3 * HIDDEN * INTER;
/// Rows of an expert that are measured.
const ROWS: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
/// Time for all of them, but for three calls of every kernel, which are made in any case.
const BUDGET: Duration = Duration::from_secs(5);

/// Measures the cost of one expert of bf16 weights by its rows, on `threads` threads of this machine: its
/// gate, up and down projections, without dispatch and combination. One entry for each of 1, 2, 4, … 512
/// rows. `tick` is called after every entry.
///
/// Takes a few seconds, and 160 to 576 MiB of memory: more than the last-level cache, if that is below 512
/// MiB.
///
/// # Errors
/// [`TuneError`]: a target whose code this machine does not run or that may not run experts, threads that do
/// not start, a kernel that does not compile (our bug).
pub fn measure_experts(
    target: &CpuTarget,
    threads: usize,
    tick: &mut dyn FnMut(&str),
) -> Result<Vec<MatmulTime>, TuneError> {
    let end = Instant::now() + BUDGET;
    let mut watch = Stopwatch::new(target, threads.max(1))?;
    let mut table = Vec::with_capacity(ROWS.len());
    for (at, rows) in ROWS.into_iter().enumerate() {
        let tokens = EXPERTS * rows as usize;
        let kernels = kernels(target, tokens, Format::Bf16)?;
        let mut seconds = 0.0;
        for (done, spec) in kernels.iter().enumerate() {
            let left = (ROWS.len() - at) * kernels.len() - done;
            let share =
                end.saturating_duration_since(Instant::now()) / u32::try_from(left).unwrap_or(u32::MAX);
            let (Some(load), Some(schedule), Some(probed)) =
                (target.load(spec, 1), target.cheapest(spec, tokens), watch.probed(target, spec, tokens))
            else {
                continue;
            };
            let times = watch.time(target, spec, tokens, &[schedule], share, &|| false)?;
            let whole = 2.0 * f64::from(rows) * (load.k * load.n) as f64;
            seconds += times.iter().sum::<f64>() * whole / probed.operations;
        }
        let source = format!("measured by `moec profile-device`, bf16 weights, {} threads", watch.threads());
        table.push(MatmulTime { rows, weights: WEIGHTS as u64, ms: seconds * 1e3, source });
        tick(&format!("an expert of {rows} {}", if rows == 1 { "row" } else { "rows" }));
    }
    Ok(table)
}

/// The matrix kernels of `expert_ffn` with weights in this format for a batch of `tokens`, each of which chooses one expert: gate and up,
/// then down. They are those that the passes `layout` and `fuse` of a build produce.
pub(super) fn kernels(
    target: &CpuTarget,
    tokens: usize,
    format: Format,
) -> Result<Vec<KernelSpec>, Unsupported> {
    let layout = DispatchLayout { rows: tokens, k: 1, experts: EXPERTS };
    let (x, table) = (Type::f32([tokens, HIDDEN]), Type::i32([layout.words()]));
    let node = NodeView {
        op: &Op::ExpertFfn { glu: Glu::Gated(Activation::Silu), bias: false, fixed: false },
        inputs: vec![
            InputView::Value { ty: &x, ld: HIDDEN },
            InputView::Value { ty: &table, ld: layout.words() },
            InputView::Weight { shape: &[EXPERTS, 2 * INTER, HIDDEN], format },
            InputView::Weight { shape: &[EXPERTS, HIDDEN, INTER], format },
        ],
        outputs: vec![&x],
        residual_ld: None,
        one_row_per_sequence: false,
        tied: false,
    };
    let mut specs: Vec<KernelSpec> = Vec::new();
    for launch in target.select(&node)?.launches {
        let Work::Kernel(spec) = launch.work else { continue };
        // The launches of this node are a chain: each reads, as its first operand, the last one's last
        // argument.
        let fused = specs.last().and_then(|w| target.fused((w, w.args() - 1), (&spec, 0), true));
        if let (Some(fused), Some(last)) = (fused, specs.last_mut()) {
            *last = fused.spec;
        } else {
            specs.push(spec);
        }
    }
    specs.retain(|spec| target.load(spec, tokens).is_some());
    Ok(specs)
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_codegen::ComputeType;
    use moec_codegen::spec::ExpertGateUp;
    use moec_device::Device;

    fn target(name: &str) -> CpuTarget {
        CpuTarget::new(&Device::find(name).expect("a built-in device")).expect("a target")
    }

    #[test]
    fn roofline_uses_the_expert_kernels_of_a_batch() {
        for (name, compute) in [("sapphire-rapids", ComputeType::Bf16), ("x86-64-v3", ComputeType::F32)] {
            let target = target(name);
            let kernels = kernels(&target, EXPERTS, Format::Bf16).expect("experts have kernels");
            let kinds: Vec<_> = kernels.iter().map(KernelSpec::kind).collect();
            assert_eq!(kinds, ["expert_gate_up", "expert_down"], "{name}");
            assert!(kernels.iter().all(|k| k.compute() == Some(compute)), "{name}: {kernels:?}");
            // Every expert has one row, and all matrices are counted.
            let loads: Vec<_> = kernels.iter().filter_map(|k| target.load(k, EXPERTS)).collect();
            assert!(loads.iter().all(|l| (l.matrices, l.rows) == (EXPERTS, 1)), "{name}: {loads:?}");
            assert_eq!(loads.iter().map(|l| l.k * l.n).sum::<usize>(), WEIGHTS, "{name}");
            // Gate and up write the format that down multiplies, so there is no step between them.
            let KernelSpec::ExpertGateUp(ExpertGateUp { out, .. }) = &kernels[0] else {
                unreachable!("by its kind")
            };
            assert_eq!(out.compute, compute, "{name}");
        }
    }

    /// Checks that there is a time for every number of rows; the times themselves are not tested.
    #[test]
    fn every_number_of_rows_takes_time() {
        let mut messages = Vec::new();
        let table = measure_experts(&target("native"), 2, &mut |what| messages.push(what.to_owned()))
            .expect("this machine runs its own code");
        assert_eq!(table.iter().map(|t| t.rows).collect::<Vec<_>>(), ROWS);
        assert!(table.iter().all(|t| t.ms.is_finite() && t.ms > 0.0), "{table:?}");
        assert!(
            table.iter().all(|t| t.weights == WEIGHTS as u64 && t.source.contains("2 threads")),
            "{table:?}"
        );
        // 512 times as much arithmetic takes longer on any machine.
        assert!(table[9].ms > table[0].ms, "{table:?}");
        assert_eq!(messages.len(), ROWS.len());
    }
}
