//! Gain of skipping neurons while one token is decoded, in OLMoE's shapes. Kernels of whole experts and of
//! neurons run in turn, by the share of neurons that the gate leaves at 0.
//!
//! `cargo run -p moec-codegen --example neuron_rate -- [THREADS] [PART OF A FORMAT'S NAME]`
//!
//! One expert is made for each share and copied many times: calls take the next eight copies, so that nothing
//! stays in a cache. Its gates are normal numbers, moved along the token so that the required share of them
//! is negative.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::print_stdout)]

mod probe;
mod steps;

use moec_codegen::{ComputeType, Machine, WeightOrder};
use moec_ir::op::{Activation, Glu};
use moec_ir::types::Format;
use probe::{Expert, Probe};
use steps::{Path, allow_tiles, time};

const HIDDEN: usize = 2048;
const INTER: usize = 1024;
/// Experts of a token.
const K: usize = 8;
/// Least bytes of weights in memory for each kind of kernel: more than caches hold.
const BYTES: usize = 1 << 30;
/// Turns of which the median counts.
const ROUNDS: usize = 7;
/// Shares of neurons at 0.
const ZEROS: [f64; 8] = [0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];
const GLU: Glu = Glu::Gated(Activation::Relu);

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Times of two paths by turns: medians, and the median of their ratios.
fn compare(a: &Path, b: &Path, threads: usize, calls: usize) -> [f64; 3] {
    let turns: Vec<[f64; 2]> =
        (0..ROUNDS).map(|_| [time(a, threads, calls), time(b, threads, calls)]).collect();
    let of = |f: &dyn Fn(&[f64; 2]) -> f64| median(turns.iter().map(f).collect());
    [of(&|t| t[0]), of(&|t| t[1]), of(&|t| t[0] / t[1])]
}
/// Timed kind of kernels: a format, and whether neurons have gate bounds.
type Kind = (Format, bool);

fn name((format, gate_bound): Kind) -> String {
    format!("{}{}", format.name(), if gate_bound { ", gate bounds" } else { "" })
}

/// Gain in decoding.
fn skipped(machine: &Machine, threads: usize, kind: Kind) -> Outcome {
    let (format, gate_bound) = kind;
    let bytes = 3 * INTER * format.row_bytes(HIDDEN);
    let copies = BYTES.div_ceil(bytes).next_multiple_of(K);
    let probe = Probe { machine, isa: machine.isa(), format, rows: 1, k: K, each: 1, copies };
    let dense = probe.matrices(&Expert::new(0.5), WeightOrder::Panels, probe.dense_compute())?;
    let mut even = None;
    let mut before: Option<(f64, f64)> = None;
    println!(
        "\n| weights | neurons at 0 | whole experts | read | neurons | faster |\n|---|---|---|---|---|---|"
    );
    for zeros in ZEROS {
        let skipping = probe.skipping(&Expert::new(zeros), gate_bound)?;
        let [whole, part, faster] = compare(&dense, &skipping, threads, copies / K);
        println!(
            "| {} | {:.0} % | {:.3} ms | {:.1} GB/s | {:.3} ms | {faster:.2}× |",
            name(kind),
            zeros * 100.0,
            whole * 1e3,
            (K * bytes) as f64 / whole / 1e9,
            part * 1e3,
        );
        if even.is_none() && faster >= 1.0 {
            // Between this share and the one before, as if the ratio were a line.
            even = Some(before.map_or(zeros, |(z, f)| z + (zeros - z) * (1.0 - f) / (faster - f)));
        }
        before = Some((zeros, faster));
    }
    match even {
        Some(zeros) => println!("\n{}: faster from {:.0} % on", name(kind), zeros * 100.0),
        None => println!("\n{}: never faster", name(kind)),
    }
    Ok(())
}

/// Loss in prompts, `each` of whose rows an expert has.
fn prompt(machine: &Machine, threads: usize, kind: Kind, each: usize) -> Outcome {
    let ((format, gate_bound), isa) = (kind, machine.isa());
    let bytes = 3 * INTER * format.row_bytes(HIDDEN);
    let copies = (BYTES / bytes).clamp(K, 64) / K * K;
    let probe = Probe { machine, isa, format, rows: copies * each / K, k: K, each, copies };
    let e = Expert::new(0.5);
    let dense = probe.matrices(&e, WeightOrder::Panels, probe.dense_compute())?;
    let compute = if isa.bf16 { ComputeType::Bf16 } else { ComputeType::F32 };
    let neurons = probe.matrices(&e, WeightOrder::Neurons { gate_bound }, compute)?;
    let [whole, part, ratio] = compare(&dense, &neurons, threads, 1);
    println!(
        "| {} | {each} | {:.1} ms | {:.1} ms | {:.0} % |",
        name(kind),
        whole * 1e3,
        part * 1e3,
        ratio * 100.0
    );
    Ok(())
}

/// Whole experts whose channels have one scale each, beside those of groups.
fn by_channel(machine: &Machine, threads: usize) -> Outcome {
    let copies = BYTES.div_ceil(3 * INTER * Format::Q4.row_bytes(HIDDEN)).next_multiple_of(K);
    let e = Expert::new(0.5);
    let of = |format| {
        let probe = Probe { machine, isa: machine.isa(), format, rows: 1, k: K, each: 1, copies };
        probe.matrices(&e, WeightOrder::Panels, probe.dense_compute())
    };
    let [q4, q4o, faster] = compare(&of(Format::Q4)?, &of(Format::Q4o)?, threads, copies / K);
    println!("\n| whole experts | q4 | q4o | faster |\n|---|---|---|---|");
    println!("| one token | {:.3} ms | {:.3} ms | {faster:.2}× |", q4 * 1e3, q4o * 1e3);
    Ok(())
}

fn main() -> Outcome {
    let machine = Machine::host()?;
    let usual = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(Ok(usual), |n| n.parse())?;
    let filter = std::env::args().nth(2).unwrap_or_default();
    let plural = if threads == 1 { "" } else { "s" };
    let isa = machine.isa();
    println!("{threads} thread{plural}, vectors of {} f32, {:?} for bytes", isa.lanes, isa.bytes);
    let kinds = [(Format::Bf16, false), (Format::Bf16, true), (Format::Q8, false), (Format::Q4, false)];
    let kinds: Vec<Kind> = kinds.into_iter().filter(|&kind| name(kind).contains(&filter)).collect();
    for &kind in &kinds {
        skipped(&machine, threads, kind)?;
    }
    if filter.is_empty() || filter == Format::Q4o.name() {
        by_channel(&machine, threads)?;
    }
    if isa.tiles && !allow_tiles() {
        return Err("the operating system lends no tile registers, which prompts use".into());
    }
    println!(
        "\n| weights | rows of an expert | whole experts | neurons | share of the speed |\n|---|---|---|---|---|"
    );
    for &kind in &kinds {
        for each in [16, 64] {
            prompt(&machine, threads, kind, each)?;
        }
    }
    Ok(())
}
