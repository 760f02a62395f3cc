//! Matrix kernels on tile registers beside what the machine can do in the same minute: `cargo xtask amx-bench`.
//!
//! Shapes are those of OLMoE-1B-7B (2048 channels, experts of 1024). Weights come from memory in every call. Each
//! kernel's time is the median of calls that take turns with its other schedules; its limit is the longer of two:
//! its operations at the rate of the tiles, its bytes (weights, rows and results, each once) at the rate of reading.

use moec_codegen::packed_words;
use moec_cpu::{Compute, CpuTarget, KernelSpec, Schedule, Stopwatch, roofline};
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
    let x_ld = packed_words(HIDDEN, Compute::Bf16) + 16;
    KernelSpec::Linear {
        k: HIDDEN,
        n,
        format,
        compute: Compute::Bf16,
        groups: 1,
        x_ld,
        out_ld: n,
        bias: false,
        residual_ld: None,
        glu: None,
        schedule: Schedule::default(),
    }
}

/// Both halves of experts that get `rows` rows each.
fn experts(rows: usize, format: Format) -> [KernelSpec; 2] {
    let layout = DispatchLayout { rows: rows * EXPERTS, k: 1, experts: EXPERTS };
    let (compute, bias, schedule) = (Compute::Bf16, false, Schedule::default());
    let ld = |channels: usize| packed_words(channels, compute) + 16;
    let glu = Glu::Gated(Activation::Silu);
    let x_ld = ld(HIDDEN);
    let gate_up = KernelSpec::ExpertGateUp {
        layout,
        hidden: HIDDEN,
        inter: INTER,
        format,
        compute,
        x_ld,
        glu,
        bias,
        schedule,
    };
    let h_ld = ld(INTER);
    let down = KernelSpec::ExpertDown {
        layout,
        inter: INTER,
        hidden: HIDDEN,
        format,
        compute,
        h_ld,
        bias,
        schedule,
    };
    [gate_up, down]
}

fn main() -> Result<(), Box<dyn Error>> {
    let target = CpuTarget::new(&Device::find("native")?)?;
    let threads =
        std::env::var("T").ok().and_then(|t| t.parse().ok()).unwrap_or(moec_runtime::cpu::threads(None)?);
    let limits = if std::env::var_os("FAST").is_some() {
        roofline::Roofline {
            threads,
            peaks: vec![roofline::PeakRate {
                format: "bf16",
                instruction: "tdpbf16ps",
                gops: roofline::Rates { one: 3000., all: 6000. },
            }],
            read_gb_per_s: roofline::Rates { one: 16., all: 30. },
            meeting_us: 1.,
        }
    } else {
        roofline::measure(threads, &mut |_| ())?
    };
    let Some(tiles) = limits.peaks.iter().find(|p| p.instruction.starts_with("tdpbf16ps")) else {
        println!("skipped: this machine has no tile registers (AMX-BF16)");
        return Ok(());
    };
    let (peak, read) = (tiles.gops.all * 1e9, limits.read_gb_per_s.all * 1e9);
    println!(
        "{threads} threads, {:.2} TFLOP/s in bf16 tiles, {:.1} GB/s of reads\n",
        peak / 1e12,
        read / 1e9
    );
    println!("| kernel | rows | weights | µs | GOP/s | GB/s | limit | of it | schedule |");
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut watch = Stopwatch::new(&target, threads)?;
    let wanted = std::env::args().nth(1);
    for format in [Format::Bf16, Format::Q8, Format::Q4]
        .into_iter()
        .filter(|f| wanted.as_ref().is_none_or(|w| *w == f.to_string()))
    {
        let mut all = vec![("linear", 512, linear(HIDDEN, format)), ("linear", 64, linear(HIDDEN, format))];
        for rows in [16, 64, 128, 256, 512] {
            let [gate_up, down] = experts(rows, format);
            all.extend([("gate and up", rows * EXPERTS, gate_up), ("down", rows * EXPERTS, down)]);
        }
        for (name, n, spec) in all {
            let schedules = target.candidates(&spec, n);
            if let Some(w) = std::env::args().nth(2)
                && target.load(&spec, n).map_or(n, |l| l.rows).to_string() != w
            {
                continue;
            }
            if let Some(w) = std::env::args().nth(3)
                && !name.starts_with(&w)
            {
                continue;
            }
            if let Some(d) = std::env::var_os("DUMP") {
                std::fs::write(d, target.compile(std::slice::from_ref(&spec))?)?;
                return Ok(());
            }
            let Some(of) = watch.probed(&target, &spec, n) else { continue };
            let times = watch.time(&target, &spec, n, &schedules, TIME, &|| false)?;
            let rows = target.load(&spec, n).map_or(n, |l| l.rows);
            for (schedule, seconds) in schedules.iter().zip(times) {
                let limit = (of.operations / peak).max(of.bytes / read);
                println!(
                    "| {name} | {rows} | {format} | {:.1} | {:.0} | {:.1} | {} | {:.2} | {} |",
                    seconds * 1e6,
                    of.operations / seconds / 1e9,
                    of.bytes / seconds / 1e9,
                    if of.operations / peak >= of.bytes / read { "tiles" } else { "memory" },
                    limit / seconds,
                    target
                        .pieces(&spec, *schedule)
                        .iter()
                        .map(|(k, v)| format!("{k} {v}"))
                        .collect::<Vec<_>>()
                        .join(", "),
                );
            }
        }
    }
    Ok(())
}
