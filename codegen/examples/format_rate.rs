//! Cost of formats beside each other: those that hold a checkpoint's codes beside those that are rounded to
//! (q8h beside q8, q4h, mxfp4 and q4k beside q4), and codes of other widths beside q4. A call of each by turns;
//! the median of the ratios of times, and the ratio of bytes, which is that of times where memory is the limit.
//!
//! `cargo run --release -p moec-codegen --example format_rate`
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::print_stdout)]

use moec_codegen::jit::{KernelFn, Loaded};
use moec_codegen::pack::packed_bytes;
use moec_codegen::spec::Linear;
use moec_codegen::{
    ByteDot, ComputeType, KernelSpec, Machine, Schedule, compile, packed_words, pad_row_stride,
};
use moec_ir::plan::Layout;
use moec_ir::types::Format;
use std::time::Instant;

/// Turns.
const ROUNDS: usize = 41;

/// A format and the one that it is compared with.
const PAIRS: [[Format; 2]; 15] = [
    [Format::Q8, Format::Q8h],
    [Format::Q4, Format::Q4h],
    [Format::Q4, Format::Mxfp4],
    [Format::Q4, Format::Q4n],
    [Format::Q4, Format::Q8],
    [Format::Q4, Format::Q6],
    [Format::Q4, Format::Q5],
    [Format::Q4, Format::Q3],
    [Format::Q4, Format::Q2],
    [Format::Q4, Format::Q4k],
    [Format::Q5, Format::Q5k],
    [Format::Q6, Format::Q6k],
    [Format::Q3, Format::Q3k],
    [Format::Q4n, Format::Iq4xs],
    [Format::Q2, Format::Q2k],
];

/// Rows, input channels, output channels: a token whose weights come from memory, one whose weights are in
/// the cache, a prompt.
const SHAPES: [(&str, usize, usize, usize); 3] =
    [("1 row, from memory", 1, 2048, 65_536), ("1 row, in cache", 1, 2048, 128), ("64 rows", 64, 2048, 2048)];

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// A cache line: operands are aligned as in a plan.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

/// Small numbers in this many bytes, whatever their format.
fn small(bytes: usize) -> Vec<Line> {
    vec![Line { _words: [0x3c00_3c00; 16] }; bytes.div_ceil(64)]
}

/// A linear layer with its operands.
struct Layer {
    loaded: Loaded,
    spec: KernelSpec,
    rows: usize,
    items: usize,
    memory: [Vec<Line>; 3],
    scratch: Vec<Line>,
}

impl Layer {
    fn new(
        machine: &Machine,
        format: Format,
        compute: ComputeType,
        [rows, k, n]: [usize; 3],
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let isa = machine.isa();
        let x_ld = pad_row_stride(packed_words(k, compute));
        let (groups, bias, residual_ld, glu, schedule) = (1, false, None, None, Schedule::default());
        let spec = KernelSpec::Linear(Linear {
            k,
            n,
            format,
            compute,
            groups,
            x_ld,
            out_ld: n,
            bias,
            residual_ld,
            glu,
            schedule,
        });
        let items = spec.grid(&isa).items(rows, 1);
        let weight = packed_bytes(Layout::Panels { nr: isa.nr as u32 }, format, 1, n, k);
        let memory = [small(rows * x_ld * 4), small(weight as usize), small(rows * n * 4)];
        let scratch = small(spec.scratch_bytes(&isa));
        let loaded = Loaded::new(&compile(machine, std::slice::from_ref(&spec), &())?)?;
        Ok(Self { loaded, spec, rows, items, memory, scratch })
    }

    /// Seconds of a call, averaged over enough calls to be measurable.
    fn seconds(&mut self, kernel: KernelFn, calls: usize) -> f64 {
        let args: Vec<*mut u8> = self.memory.iter_mut().map(|m| m.as_mut_ptr().cast()).collect();
        let start = Instant::now();
        for _ in 0..calls {
            let scratch = self.scratch.as_mut_ptr().cast();
            // SAFETY: the operands have the extents that the kernel documents.
            unsafe { kernel(args.as_ptr(), self.rows as i64, 0, self.items as i64, scratch) };
        }
        start.elapsed().as_secs_f64() / calls as f64
    }
}

fn median(mut x: Vec<f64>) -> f64 {
    x.sort_by(f64::total_cmp);
    x[x.len() / 2]
}

fn main() -> Outcome {
    for machine in [Machine::host()?, Machine::x86_64_level(3)] {
        let isa = machine.isa();
        println!("{} {isa:?}", machine.cpu);
        println!("| | | milliseconds | | ratio | bytes |\n|---|---|---|---|---|---|");
        for (name, rows, k, n) in SHAPES {
            for compute in [ComputeType::I8, ComputeType::Bf16, ComputeType::F32] {
                let able = match compute {
                    ComputeType::I8 => isa.bytes != ByteDot::None,
                    // Few rows are not rounded to it.
                    ComputeType::Bf16 => isa.bf16 && rows > 1,
                    ComputeType::F32 => true,
                };
                for pair in PAIRS.into_iter().filter(|_| able) {
                    let layer = |format| Layer::new(&machine, format, compute, [rows, k, n]);
                    let mut layers = [layer(pair[0])?, layer(pair[1])?];
                    let calls = (40_000_000 / (rows * k * n)).max(1);
                    let mut times = [Vec::new(), Vec::new()];
                    for turn in 0..=ROUNDS {
                        for (layer, times) in layers.iter_mut().zip(&mut times) {
                            let kernel = layer.loaded.kernel(&layer.spec.symbol(&isa))?;
                            let seconds = layer.seconds(kernel, calls);
                            // The first warms up.
                            if turn > 0 {
                                times.push(seconds);
                            }
                        }
                    }
                    let ratios = times[0].iter().zip(&times[1]).map(|(a, b)| b / a).collect();
                    let [a, b] = times.map(|t| median(t) * 1e3);
                    let bytes = pair[1].bits() / pair[0].bits();
                    println!(
                        "| {name}, {} | {} → {} | {a:.4} | {b:.4} | {:.3} | {bytes:.3} |",
                        compute.name(),
                        pair[0],
                        pair[1],
                        median(ratios)
                    );
                }
            }
        }
    }
    Ok(())
}
