//! Share of the memory's rate that kernels reach in decoding, by format:
//! `cargo run --release -p moec-cpu --example decode_shares -- [THREADS]`.

#![allow(clippy::print_stdout, reason = "the table")]

use moec_cpu::CpuTarget;
use moec_cpu::roofline::decode_share;
use moec_device::{Device, NATIVE};
use moec_ir::Format;

/// Formats that weights are rounded to, by their bits.
const FORMATS: [Format; 9] = [
    Format::Bf16,
    Format::Q8,
    Format::Q6,
    Format::Q5,
    Format::Q4n,
    Format::Q4,
    Format::Q3,
    Format::Q2,
    Format::Q2s,
];
const TURNS: usize = 41;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let given = std::env::args().nth(1).map(|n| n.parse()).transpose()?;
    let threads = moec_runtime::platform::cpu::threads(given)?;
    let target = CpuTarget::new(&Device::find(NATIVE)?)?;
    println!("| format | bits | kernels, GB/s | reading, GB/s | share |\n|---|---|---|---|---|");
    for format in FORMATS {
        let found = decode_share(&target, threads, format, TURNS)?;
        println!(
            "| {format} | {} | {:.1} | {:.1} | {:.0} % |",
            format.bits(),
            found.kernel_gb_per_s,
            found.read_gb_per_s,
            100.0 * found.share
        );
    }
    Ok(())
}
