//! How fast the kernels are on this host, on one thread, next to what the machine can do.
//!
//! `cargo run --release -p moec-codegen --example kernel_rate -- [PART OF A NAME]`
#![allow(clippy::print_stdout)]

use moec_codegen::jit::Loaded;
use moec_codegen::{ByteDot, Compute, KernelSpec, Machine, Schedule, compile, packed_words};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::plan::Grid;
use moec_ir::types::Format;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Processor time of this thread, in seconds: other processes on a busy host do not count.
fn now() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` receives the time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

/// Fastest of several runs, in seconds per call.
fn fastest(mut call: impl FnMut()) -> f64 {
    call();
    let mut best = f64::INFINITY;
    for _ in 0..15 {
        let start = now();
        call();
        best = best.min(now() - start);
    }
    best
}

/// A cache line: operands are aligned as in a plan.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

impl Line {
    fn new(words: [u32; 16]) -> Self {
        Self { _words: words }
    }
}

/// A kernel, its rows, floating-point operations and bytes of weights or cache per call.
struct Probe {
    name: &'static str,
    spec: KernelSpec,
    n: usize,
    operations: f64,
    bytes: f64,
    /// Operands in f32 words; the integer ones are given whole.
    operands: Vec<Operand>,
}

enum Operand {
    Words(usize),
    Ints(Vec<i32>),
}

/// Bytes of a weight, its scales included.
fn weight_bytes(format: Format, elements: usize) -> usize {
    match format {
        Format::Q8 => elements / 32 * 34,
        Format::Q4 => elements / 32 * 18,
        plain => plain.bytes(elements),
    }
}

fn linear(name: &'static str, n: usize, k: usize, cols: usize, format: Format, compute: Compute) -> Probe {
    let (glu, x_ld) = (None, packed_words(k, compute));
    Probe {
        name,
        spec: KernelSpec::Linear {
            k,
            n: cols,
            format,
            compute,
            groups: 1,
            x_ld,
            out_ld: cols,
            bias: false,
            residual_ld: None,
            glu,
            schedule: Schedule::default(),
        },
        n,
        operations: 2.0 * (n * k * cols) as f64,
        bytes: weight_bytes(format, k * cols) as f64,
        operands: vec![
            Operand::Words(n * x_ld),
            Operand::Words(weight_bytes(format, k * cols) / 4),
            Operand::Words(n * cols),
        ],
    }
}

fn experts(name: &'static str, tokens: usize, format: Format, compute: Compute) -> Probe {
    let (experts, hidden, inter) = (16, 2048, 1024);
    let layout = DispatchLayout { rows: tokens, k: 1, experts };
    let mut table = vec![0; layout.words()];
    table[0] = experts as i32;
    for e in 0..experts {
        table[layout.expert() + e] = e as i32;
        table[layout.start() + e + 1] = ((e + 1) * tokens / experts) as i32;
    }
    for t in 0..tokens {
        // Rows of a token are anywhere.
        table[layout.token() + t] = (t * 7 % tokens) as i32;
    }
    let x_ld = packed_words(hidden, compute);
    let weights = experts * 2 * inter * hidden;
    Probe {
        name,
        spec: KernelSpec::ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld,
            glu: Glu::Gated(Activation::Silu),
            bias: false,
            schedule: Schedule::default(),
        },
        n: tokens,
        operations: 2.0 * (tokens * 2 * inter * hidden) as f64,
        bytes: weight_bytes(format, weights) as f64,
        operands: vec![
            Operand::Words(tokens * x_ld),
            Operand::Ints(table),
            Operand::Words(weight_bytes(format, weights) / 4),
            Operand::Words(tokens * inter),
        ],
    }
}

fn measure(machine: &Machine, probe: &Probe) -> Outcome {
    let isa = machine.isa();
    let loaded = Loaded::new(&compile(machine, std::slice::from_ref(&probe.spec))?)?;
    let kernel = loaded.kernel(&probe.spec.symbol(&isa))?;
    let mut memory: Vec<Vec<Line>> = Vec::new();
    let mut active = 0;
    for operand in &probe.operands {
        memory.push(match operand {
            // Small numbers in every format.
            Operand::Words(n) => vec![Line::new([0x3c00_3c00; 16]); n.div_ceil(16)],
            Operand::Ints(ints) => {
                active = ints[0].max(0) as usize;
                let words: Vec<u32> = ints.iter().map(|x| x.cast_unsigned()).collect();
                let line =
                    |chunk: &[u32]| Line::new(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0)));
                words.chunks(16).map(line).collect()
            }
        });
    }
    let args: Vec<*mut u8> = memory.iter_mut().map(|m| m.as_mut_ptr().cast()).collect();
    let mut scratch = vec![Line::new([0; 16]); probe.spec.scratch_bytes(&isa).div_ceil(64)];
    let items = match probe.spec.grid(&isa) {
        Grid::One => 1,
        Grid::Tiles { rows, tiles } => probe.n.div_ceil(rows as usize) * tiles as usize,
        Grid::Experts { tiles, .. } => active * tiles as usize,
    };
    let seconds = fastest(|| {
        // SAFETY: the operands have the extents that the kernel documents.
        unsafe {
            kernel(args.as_ptr(), probe.n as i64, 0, items as i64, scratch.as_mut_ptr().cast());
        }
    });
    println!(
        "{:34} {:9.1} GFLOP/s {:8.1} GB/s {:10.3} ms",
        probe.name,
        probe.operations / seconds / 1e9,
        probe.bytes / seconds / 1e9,
        seconds * 1e3,
    );
    Ok(())
}

/// Fused multiply-adds per second that this core can issue on f32 vectors, times two, in GFLOP/s.
#[cfg(target_arch = "x86_64")]
fn peak() -> f64 {
    use std::arch::x86_64::*;
    const STEPS: usize = 1_000_000;
    #[target_feature(enable = "avx512f")]
    fn wide() -> f32 {
        let mut sums = [_mm512_set1_ps(1.0); 16];
        let x = _mm512_set1_ps(std::hint::black_box(0.5));
        for _ in 0..STEPS {
            for s in &mut sums {
                *s = _mm512_fmadd_ps(*s, x, x);
            }
        }
        sums.into_iter().map(|s| _mm512_reduce_add_ps(s)).sum()
    }
    #[target_feature(enable = "avx2,fma")]
    fn narrow() -> f32 {
        let mut sums = [_mm256_set1_ps(1.0); 12];
        let x = _mm256_set1_ps(std::hint::black_box(0.5));
        for _ in 0..STEPS {
            for s in &mut sums {
                *s = _mm256_fmadd_ps(*s, x, x);
            }
        }
        sums.into_iter().map(|s| _mm256_cvtss_f32(s)).sum()
    }
    if is_x86_feature_detected!("avx512f") {
        let seconds = fastest(|| {
            // SAFETY: the feature was detected.
            std::hint::black_box(unsafe { wide() });
        });
        (STEPS * 16 * 16 * 2) as f64 / seconds / 1e9
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        let seconds = fastest(|| {
            // SAFETY: the features were detected.
            std::hint::black_box(unsafe { narrow() });
        });
        (STEPS * 12 * 8 * 2) as f64 / seconds / 1e9
    } else {
        f64::NAN
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn peak() -> f64 {
    f64::NAN
}

fn main() -> Outcome {
    let host = Machine::host()?;
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!("{} {:?}", host.cpu, host.isa());
    println!("{:34} {:9.1} GFLOP/s", "fused multiply-adds in registers", peak());
    let memory = vec![1_u64; 32 << 20];
    let seconds = fastest(|| {
        std::hint::black_box(memory.iter().copied().fold(0, u64::wrapping_add));
    });
    println!("{:34} {:9} {:15.1} GB/s", "reading memory", "", 256.0 * (1 << 20) as f64 / seconds / 1e9);
    use Compute::{Bf16 as Pairs, F32, I8};
    use Format::{Bf16, F16, Q4, Q8};
    let probes = [
        linear("linear bf16, 1 row, from memory", 1, 2048, 65536, Bf16, F32),
        linear("linear f32, 1 row, from memory", 1, 2048, 32768, Format::F32, F32),
        linear("linear q8 i8, 1 row, from memory", 1, 2048, 65536, Q8, I8),
        linear("linear q4 i8, 1 row, from memory", 1, 2048, 65536, Q4, I8),
        linear("linear q8 f32, 1 row, from memory", 1, 2048, 65536, Q8, F32),
        linear("linear q4 i8, 4 rows, from memory", 4, 2048, 65536, Q4, I8),
        linear("linear bf16, 1 row, in cache", 1, 2048, 128, Bf16, F32),
        linear("linear q8 i8, 1 row, in cache", 1, 2048, 128, Q8, I8),
        linear("linear q4 i8, 1 row, in cache", 1, 2048, 128, Q4, I8),
        linear("linear bf16, 4 rows, in cache", 4, 2048, 128, Bf16, F32),
        linear("linear bf16, 12 rows", 12, 2048, 2048, Bf16, F32),
        linear("linear bf16, 96 rows", 96, 2048, 2048, Bf16, F32),
        linear("linear bf16 pairs, 96 rows", 96, 2048, 2048, Bf16, Pairs),
        linear("linear q8 i8, 96 rows", 96, 2048, 2048, Q8, I8),
        linear("linear q4 i8, 96 rows", 96, 2048, 2048, Q4, I8),
        linear("linear q8 pairs, 96 rows", 96, 2048, 2048, Q8, Pairs),
        linear("linear q4 f32, 96 rows", 96, 2048, 2048, Q4, F32),
        linear("linear f16, 96 rows", 96, 2048, 2048, F16, F32),
        linear("linear f32, 96 rows", 96, 2048, 2048, Format::F32, F32),
        linear("linear bf16 pairs, 96 rows, k 8192", 96, 8192, 1024, Bf16, Pairs),
        experts("experts bf16, 1 token each", 16, Bf16, F32),
        experts("experts bf16, 64 tokens each", 1024, Bf16, F32),
        experts("experts bf16 pairs, 64 tokens each", 1024, Bf16, Pairs),
        experts("experts q8 i8, 1 token each", 16, Q8, I8),
        experts("experts q8 i8, 64 tokens each", 1024, Q8, I8),
        experts("experts q4 i8, 1 token each", 16, Q4, I8),
        experts("experts q4 i8, 64 tokens each", 1024, Q4, I8),
    ];
    for machine in [host, Machine::x86_64_level(3)] {
        println!("\n{} {:?}", machine.cpu, machine.isa());
        let isa = machine.isa();
        let able = |p: &&Probe| match &p.spec {
            KernelSpec::Linear { compute, .. } | KernelSpec::ExpertGateUp { compute, .. } => match compute {
                F32 => true,
                Pairs => isa.bf16,
                I8 => isa.bytes != ByteDot::None,
            },
            _ => true,
        };
        for probe in probes.iter().filter(|p| p.name.contains(&wanted)).filter(able) {
            measure(&machine, probe)?;
        }
    }
    Ok(())
}
