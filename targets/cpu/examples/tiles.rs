//! Matrix kernels on tile registers compared with the machine's peak in the same minute: `cargo xtask
//! amx-bench`.
//!
//! Shapes are those of OLMoE-1B-7B (2048 channels, experts of 1024). Weights come from memory in every call.
//! Each kernel's time is the median of calls that alternate with its other schedules. Its limit is the longer
//! of two times: its operations at the rate of the tiles, and its bytes (weights, rows and results, each
//! once) at the rate of reading.

#![allow(clippy::print_stdout, reason = "a program that prints a table")]

use moec_codegen::spec::{ExpertDown, ExpertGateUp, Linear};
use moec_codegen::{WeightOrder, packed_words};
use moec_cpu::{ComputeType, CpuTarget, KernelSpec, RowFormat, Schedule, Stopwatch, roofline};
use moec_device::Device;
use moec_ir::Format;
use moec_ir::op::{Activation, DispatchLayout, Glu};
use std::error::Error;
use std::time::Duration;

/// Channels of the residual stream, and of an expert.
const HIDDEN: usize = 2048;
const INTER: usize = 1024;
/// Experts.
const EXPERTS: usize = 64;
/// Seconds for a kernel and all of its schedules.
const TIME: Duration = Duration::from_millis(600);

fn linear(n: usize, format: Format) -> KernelSpec {
    let x_ld = packed_words(HIDDEN, ComputeType::Bf16) + 16;
    KernelSpec::Linear(Linear {
        k: HIDDEN,
        n,
        format,
        compute: ComputeType::Bf16,
        groups: 1,
        x_ld,
        out_ld: n,
        bias: false,
        residual_ld: None,
        glu: None,
        schedule: Schedule::default(),
    })
}

/// Both halves of experts that get `rows` rows each.
fn experts(rows: usize, format: Format) -> [KernelSpec; 2] {
    let layout = DispatchLayout { rows: rows * EXPERTS, k: 1, experts: EXPERTS };
    let (compute, bias, schedule) = (ComputeType::Bf16, false, Schedule::default());
    let ld = |channels: usize| packed_words(channels, compute) + 16;
    let glu = Glu::Gated(Activation::Silu);
    let x_ld = ld(HIDDEN);
    let gate_up = KernelSpec::ExpertGateUp(ExpertGateUp {
        layout,
        hidden: HIDDEN,
        inter: INTER,
        format,
        compute,
        x_ld,
        glu,
        bias,
        out: RowFormat::f32(INTER),
        order: WeightOrder::Panels,
        schedule,
    });
    let h_ld = ld(INTER);
    let down = KernelSpec::ExpertDown(ExpertDown {
        layout,
        inter: INTER,
        hidden: HIDDEN,
        format,
        compute,
        h_ld,
        bias,
        order: WeightOrder::Panels,
        schedule,
    });
    [gate_up, down]
}

/// Kernels to time: a name, the rows of the call, and the kernel.
fn kernels(format: Format) -> Vec<(&'static str, usize, KernelSpec)> {
    let mut all = vec![("linear", 512, linear(HIDDEN, format)), ("linear", 64, linear(HIDDEN, format))];
    for rows in [16, 64, 128, 256, 512] {
        let [gate_up, down] = experts(rows, format);
        all.extend([("gate and up", rows * EXPERTS, gate_up), ("down", rows * EXPERTS, down)]);
    }
    all
}

fn main() -> Result<(), Box<dyn Error>> {
    let target = CpuTarget::new(&Device::find("native")?)?;
    let threads = moec_runtime::platform::cpu::threads(None)?;
    let limits = roofline::measure(threads, &mut |_| ())?;
    let Some(tiles) = limits.peaks.iter().find(|p| p.instruction.starts_with("tdpbf16ps")) else {
        println!("skipped: this machine has no tile registers (AMX-BF16); send nothing back");
        return Ok(());
    };
    let (peak, read) = (tiles.gops.all * 1e9, limits.read_gb_per_s.all * 1e9);
    println!("{threads} threads, {:.2} TFLOP/s in bf16 tiles, {:.1} GB/s of reads", peak / 1e12, read / 1e9);
    println!("\n| kernel | rows | weights | µs | GOP/s | GB/s | limit | of it | schedule |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut watch = Stopwatch::new(&target, threads)?;
    for format in [Format::Bf16, Format::Q8, Format::Q4] {
        for (name, n, spec) in kernels(format) {
            let Some(load) = target.load(&spec, n) else { continue };
            let Some(work) = watch.probed(&target, &spec, n) else { continue };
            let chosen = target.cheapest(&spec, n);
            let mut schedules = target.candidates(&spec, n);
            // The schedule that a build chooses, and the one that `--tune` finds.
            schedules.sort_by_key(|s| Some(*s) != chosen);
            let times = watch.time(&target, &spec, n, &schedules, TIME, &|| false)?;
            let best = (0..times.len()).min_by(|&a, &b| times[a].total_cmp(&times[b])).unwrap_or(0);
            for (i, what) in
                [(0, "chosen"), (best, "fastest")].into_iter().take(if best == 0 { 1 } else { 2 })
            {
                let (seconds, pieces) = (times[i], target.pieces(&spec, schedules[i]));
                let pieces: Vec<String> =
                    pieces.iter().map(|(knob, value)| format!("{knob} {value}")).collect();
                let (tiles, memory) = (work.operations / peak, work.bytes / read);
                println!(
                    "| {name} | {} | {format} | {:.0} | {:.0} | {:.1} | {} | {:.2} | {what}: {} |",
                    load.rows,
                    seconds * 1e6,
                    work.operations / seconds / 1e9,
                    work.bytes / seconds / 1e9,
                    if tiles >= memory { "tiles" } else { "memory" },
                    tiles.max(memory) / seconds,
                    pieces.join(", "),
                );
            }
        }
    }
    println!("\nSend back this table with the CPU's name (`lscpu`).");
    Ok(())
}
