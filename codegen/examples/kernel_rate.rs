//! Speed of the kernels on this host, next to what the machine can do.
//!
//! `cargo run --release -p moec-codegen --example kernel_rate -- [PART OF A NAME] [THREADS]`
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::print_stdout)]

use moec_codegen::jit::Loaded;
use moec_codegen::pack::packed_bytes;
use moec_codegen::spec::{DeltaRule, ExpertGateUp, Linear};
use moec_codegen::{
    ByteDot, ComputeType, KernelSpec, Machine, RowFormat, Schedule, WeightOrder, compile, packed_words,
    pad_row_stride,
};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::plan::Layout;
use moec_ir::types::Format;
use std::sync::Barrier;
use std::time::Instant;

/// Runs of which the fastest counts: a busy host slows most of them.
const RUNS: usize = 25;

type Outcome = Result<(), Box<dyn std::error::Error>>;

/// Fastest of several runs, in seconds per call.
fn fastest(mut call: impl FnMut()) -> f64 {
    call();
    let mut best = f64::INFINITY;
    for _ in 0..RUNS {
        let start = Instant::now();
        call();
        best = best.min(start.elapsed().as_secs_f64());
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
    /// A matrix with this many rows and columns.
    Weight(Format, [usize; 2]),
    /// As many matrices, found by a table of addresses.
    Matrices(usize, Format, [usize; 2]),
}

/// A matrix with this many rows and columns, which fill whole panels.
fn weight(format: Format, [rows, cols]: [usize; 2], nr: usize) -> (Layout, u64) {
    let layout = Layout::Panels { nr: nr as u32 };
    (layout, packed_bytes(layout, format, 1, rows, cols))
}

/// Its words: small numbers in every format, and outliers all over a matrix.
fn words(format: Format, [rows, cols]: [usize; 2], nr: usize) -> Vec<u32> {
    let (layout, bytes) = weight(format, [rows, cols], nr);
    let mut all = vec![0x3c00_3c00; bytes as usize / 4];
    let (table, count) = (layout.row_bytes(format, cols) * rows / 4, format.outliers(cols));
    (0..count).for_each(|i| all[table + i] = (i * cols / count) as u32);
    all
}

fn linear(
    name: &'static str,
    n: usize,
    k: usize,
    cols: usize,
    format: Format,
    compute: ComputeType,
) -> Probe {
    let (glu, x_ld) = (None, pad_row_stride(packed_words(k, compute)));
    Probe {
        name,
        spec: Linear {
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
        }
        .into(),
        n,
        operations: 2.0 * (n * k * cols) as f64,
        bytes: weight(format, [cols, k], 32).1 as f64,
        operands: vec![
            Operand::Words(n * x_ld),
            Operand::Weight(format, [cols, k]),
            Operand::Words(n * cols),
        ],
    }
}

fn experts(name: &'static str, experts: usize, tokens: usize, format: Format, compute: ComputeType) -> Probe {
    let (hidden, inter) = (2048, 1024);
    let tokens = tokens * experts;
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
    let x_ld = pad_row_stride(packed_words(hidden, compute));
    Probe {
        name,
        spec: ExpertGateUp {
            layout,
            hidden,
            inter,
            format,
            compute,
            x_ld,
            glu: Glu::Gated(Activation::Silu),
            bias: false,
            out: RowFormat::f32(inter),
            order: WeightOrder::Panels,
            schedule: Schedule::default(),
        }
        .into(),
        n: tokens,
        operations: 2.0 * (tokens * 2 * inter * hidden) as f64,
        bytes: experts as f64 * weight(format, [2 * inter, hidden], 32).1 as f64,
        operands: vec![
            Operand::Words(tokens * x_ld),
            Operand::Ints(table),
            Operand::Matrices(experts, format, [2 * inter, hidden]),
            Operand::Words(tokens * inter),
        ],
    }
}

fn measure(machine: &Machine, probe: &Probe, threads: usize) -> Outcome {
    let isa = machine.isa();
    let loaded = Loaded::new(&compile(machine, std::slice::from_ref(&probe.spec), &())?)?;
    let kernel = loaded.kernel(&probe.spec.symbol(&isa))?;
    // Small numbers in every format.
    let small = |words: usize| vec![Line::new([0x3c00_3c00; 16]); words.div_ceil(16)];
    let mut memory: Vec<Vec<Line>> = Vec::new();
    let mut matrices: Vec<Vec<Line>> = Vec::new();
    let mut active = 0;
    for operand in &probe.operands {
        memory.push(match operand {
            Operand::Words(n) => small(*n),
            Operand::Weight(format, extents) => lines(&words(*format, *extents, isa.nr)),
            Operand::Matrices(count, format, extents) => {
                let one = words(*format, *extents, isa.nr);
                let (all, words) = (lines(&one.repeat(*count)), one.len());
                let first = all.as_ptr().addr();
                matrices.push(all);
                let table: Vec<u32> = (0..*count)
                    .flat_map(|i| {
                        let at = (first + i * words * 4) as u64;
                        [at as u32, (at >> 32) as u32]
                    })
                    .collect();
                lines(&table)
            }
            Operand::Ints(ints) => {
                active = ints[0].max(0) as usize;
                lines(&ints.iter().map(|x| x.cast_unsigned()).collect::<Vec<_>>())
            }
        });
    }
    let args: Vec<usize> = memory.iter_mut().map(|m| m.as_mut_ptr().expose_provenance()).collect();
    let items = probe.spec.grid(&isa).items(probe.n, active);
    let (start, end) = (Barrier::new(threads), Barrier::new(threads));
    let share = |thread: usize| -> f64 {
        let args: Vec<*mut u8> = args.iter().map(|&a| std::ptr::with_exposed_provenance_mut(a)).collect();
        let mut scratch = vec![Line::new([0; 16]); probe.spec.scratch_bytes(&isa).div_ceil(64)];
        fastest(|| {
            start.wait();
            let (first, last) = (items * thread / threads, items * (thread + 1) / threads);
            // SAFETY: the operands have the extents that the kernel documents; items are this thread's own.
            unsafe {
                kernel(args.as_ptr(), probe.n as i64, first as i64, last as i64, scratch.as_mut_ptr().cast());
            }
            end.wait();
        })
    };
    let seconds = std::thread::scope(|scope| {
        for thread in 1..threads {
            scope.spawn(move || share(thread));
        }
        share(0)
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

/// The gated delta rule in the shapes of Qwen3.6-35B-A3B. Its arithmetic is what the rule needs row by row:
/// what the state says of a key, its change, and the query.
fn delta(name: &'static str, n: usize, [by_channel, chunked]: [bool; 2]) -> Probe {
    let [key_heads, heads, key, value] = [16, 32, 128, 128];
    let decays = if by_channel { heads * key } else { heads };
    // Queries, keys and values are columns of the same rows, as the convolution leaves them.
    let mixed = 2 * key_heads * key + heads * value;
    let ld = [mixed, mixed, mixed, decays, heads];
    let out_ld = heads * value;
    let rule =
        DeltaRule { rows: n, key_heads, heads, key, value, corrects: true, by_channel, chunked, ld, out_ld };
    let state = heads * key * value;
    let floats = |count: usize, x: f32| Operand::Ints(vec![x.to_bits().cast_signed(); count]);
    Probe {
        name,
        spec: rule.into(),
        n,
        operations: 6.0 * (n * state) as f64,
        bytes: 8.0 * state as f64,
        operands: vec![
            floats(state, 0.0),
            floats(n * mixed, 0.05),
            floats(n * mixed, 0.05),
            floats(n * mixed, 0.5),
            floats(n * decays, -0.1),
            floats(n * heads, 0.5),
            Operand::Ints((0..n as i32).collect()),
            Operand::Ints(vec![0; n]),
            Operand::Words(n * out_ld),
        ],
    }
}

/// Words in cache lines.
fn lines(words: &[u32]) -> Vec<Line> {
    let line = |chunk: &[u32]| Line::new(std::array::from_fn(|i| chunk.get(i).copied().unwrap_or(0)));
    words.chunks(16).map(line).collect()
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
    let filter = std::env::args().nth(1).unwrap_or_default();
    let threads = std::env::args().nth(2).map_or(Ok(1), |n| n.parse())?;
    println!("{} {:?}", host.cpu, host.isa());
    println!("{:34} {:9.1} GFLOP/s", "fused multiply-adds in registers", peak());
    let memory = vec![1_u64; 32 << 20];
    let seconds = fastest(|| {
        std::hint::black_box(memory.iter().copied().fold(0, u64::wrapping_add));
    });
    println!("{:34} {:9} {:15.1} GB/s", "reading memory", "", 256.0 * (1 << 20) as f64 / seconds / 1e9);
    use ComputeType::{Bf16 as Pairs, F32, I8};
    use Format::{Bf16, F16, Q4, Q4o, Q8};
    let probes = [
        linear("linear bf16, 1 row, from memory", 1, 2048, 262_144, Bf16, F32),
        linear("linear f32, 1 row, from memory", 1, 2048, 131_072, Format::F32, F32),
        linear("linear q8 i8, 1 row, from memory", 1, 2048, 262_144, Q8, I8),
        linear("linear q4 i8, 1 row, from memory", 1, 2048, 262_144, Q4, I8),
        linear("linear q4o i8, 1 row, from memory", 1, 2048, 262_144, Q4o, I8),
        linear("linear q8 f32, 1 row, from memory", 1, 2048, 262_144, Q8, F32),
        linear("linear q4 i8, 4 rows, from memory", 4, 2048, 262_144, Q4, I8),
        linear("linear q8 i8, 1 row, 64k columns", 1, 2048, 65_536, Q8, I8),
        linear("linear q8 i8, 2 rows, 64k columns", 2, 2048, 65_536, Q8, I8),
        linear("linear q8 i8, 4 rows, 64k columns", 4, 2048, 65_536, Q8, I8),
        linear("linear q8 i8, 8 rows, 64k columns", 8, 2048, 65_536, Q8, I8),
        linear("linear q8 i8, 16 rows, 64k columns", 16, 2048, 65_536, Q8, I8),
        linear("linear q8 i8, 8 rows, in cache", 8, 2048, 128, Q8, I8),
        linear("linear q4 i8, 8 rows, 64k columns", 8, 2048, 65_536, Q4, I8),
        linear("linear q4 i8, 8 rows, in cache", 8, 2048, 128, Q4, I8),
        linear("linear bf16, 1 row, 64k columns", 1, 2048, 65_536, Bf16, F32),
        linear("linear bf16, 2 rows, 64k columns", 2, 2048, 65_536, Bf16, F32),
        linear("linear bf16, 4 rows, 64k columns", 4, 2048, 65_536, Bf16, F32),
        linear("linear bf16, 8 rows, 64k columns", 8, 2048, 65_536, Bf16, F32),
        linear("linear bf16, 8 rows, in cache", 8, 2048, 128, Bf16, F32),
        linear("linear bf16, 1 row, in cache", 1, 2048, 128, Bf16, F32),
        linear("linear q8 i8, 1 row, in cache", 1, 2048, 128, Q8, I8),
        linear("linear q4 i8, 1 row, in cache", 1, 2048, 128, Q4, I8),
        linear("linear q4o i8, 1 row, in cache", 1, 2048, 128, Q4o, I8),
        linear("linear bf16, 4 rows, in cache", 4, 2048, 128, Bf16, F32),
        linear("linear bf16, 12 rows", 12, 2048, 2048, Bf16, F32),
        linear("linear bf16, 96 rows", 96, 2048, 2048, Bf16, F32),
        linear("linear bf16 pairs, 96 rows", 96, 2048, 2048, Bf16, Pairs),
        linear("linear q8 i8, 96 rows", 96, 2048, 2048, Q8, I8),
        linear("linear q4 i8, 96 rows", 96, 2048, 2048, Q4, I8),
        linear("linear q4o i8, 96 rows", 96, 2048, 2048, Q4o, I8),
        linear("linear q4 pairs, 96 rows", 96, 2048, 2048, Q4, Pairs),
        linear("linear q4o pairs, 96 rows", 96, 2048, 2048, Q4o, Pairs),
        linear("linear q8 pairs, 96 rows", 96, 2048, 2048, Q8, Pairs),
        linear("linear q4 f32, 96 rows", 96, 2048, 2048, Q4, F32),
        linear("linear f16, 96 rows", 96, 2048, 2048, F16, F32),
        linear("linear f32, 96 rows", 96, 2048, 2048, Format::F32, F32),
        linear("linear bf16 pairs, 96 rows, k 8192", 96, 8192, 1024, Bf16, Pairs),
        linear("linear bf16 pairs, 512 rows", 512, 2048, 2048, Bf16, Pairs),
        linear("linear q8 i8, 512 rows", 512, 2048, 2048, Q8, I8),
        linear("linear q4 i8, 512 rows", 512, 2048, 2048, Q4, I8),
        delta("delta rule, row by row", 512, [false, false]),
        delta("delta rule, in chunks", 512, [false, true]),
        delta("delta rule by channel, row by row", 512, [true, false]),
        delta("delta rule by channel, in chunks", 512, [true, true]),
        experts("experts bf16, 1 token each", 16, 1, Bf16, F32),
        experts("experts bf16, 64 tokens each", 64, 64, Bf16, F32),
        experts("experts bf16 pairs, 64 tokens each", 64, 64, Bf16, Pairs),
        experts("experts q8 i8, 1 token each", 16, 1, Q8, I8),
        experts("experts q8 i8, 64 tokens each", 64, 64, Q8, I8),
        experts("experts q4 i8, 1 token each", 16, 1, Q4, I8),
        experts("experts q4 i8, 64 tokens each", 64, 64, Q4, I8),
    ];
    for machine in [host, Machine::x86_64_level(3)] {
        println!("\n{} {:?}", machine.cpu, machine.isa());
        let isa = machine.isa();
        let able = |p: &&Probe| match &p.spec {
            KernelSpec::Linear(Linear { compute, .. })
            | KernelSpec::ExpertGateUp(ExpertGateUp { compute, .. }) => match compute {
                F32 => true,
                Pairs => isa.bf16,
                I8 => isa.bytes != ByteDot::None,
            },
            _ => true,
        };
        for probe in probes.iter().filter(|p| p.name.contains(&filter)).filter(able) {
            measure(&machine, probe, threads)?;
        }
    }
    Ok(())
}
