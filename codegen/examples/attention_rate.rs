//! Speed of attention on this host, on one thread, compared with the limits of the machine. It measures a
//! chunk of 512 tokens at the end of a prompt, and single tokens, with the heads of OLMoE-1B-7B. There 4, 8
//! or all 16 heads share keys and values.
//!
//! `cargo run --release -p moec-codegen --example attention_rate -- [PART OF A NAME]`
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::print_stdout)]

use moec_codegen::jit::Loaded;
use moec_codegen::spec::Attention;
use moec_codegen::{ComputeType, KernelSpec, Machine, compile, key_order, value_order};
use moec_ir::op::AttentionDesc;
use moec_ir::state::{CacheHead, rotated_channels, stores_rotated};
use moec_ir::types::Format;

type Outcome = Result<(), Box<dyn std::error::Error>>;

const HEADS: usize = 16;
const DIM: usize = 128;
/// Tokens of a chunk.
const CHUNK: usize = 512;

/// CPU time of this thread, in seconds: other processes on a busy host do not count.
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
    for _ in 0..7 {
        let start = now();
        call();
        best = best.min(now() - start);
    }
    best
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

/// Lines of small bf16 numbers, of either sign.
fn lines(bytes: usize) -> Vec<Line> {
    let mut state = 1_u32;
    let mut word = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // Exponents of numbers in 1/8 ..= 1/2.
        let half = |bits: u32| (bits & 0x807f) | 0x3e00;
        half(state >> 16) << 16 | half(state >> 3)
    };
    (0..bytes.div_ceil(64)).map(|_| Line { _words: std::array::from_fn(|_| word()) }).collect()
}

fn ints(values: impl Iterator<Item = usize>) -> Vec<Line> {
    let words: Vec<u32> = values.map(|x| x as u32).collect();
    let line = |c: &[u32]| Line { _words: std::array::from_fn(|i| c.get(i).copied().unwrap_or(0)) };
    words.chunks(16).map(line).collect()
}

struct Probe {
    name: &'static str,
    cache: Format,
    compute: ComputeType,
    rows: usize,
    context: usize,
    /// Heads of keys and values.
    kv_heads: usize,
}

fn measure(machine: &Machine, probe: &Probe) -> Outcome {
    let isa = machine.isa();
    let &Probe { name, cache, compute, rows: n, context: ctx, kv_heads } = probe;
    if compute == ComputeType::Bf16 && !isa.bf16 {
        return Ok(());
    }
    let (rows, splits) = if n == 1 { (1, 4) } else { (96, 1) };
    let (window, sinks, v_from_k) = (None, false, false);
    let scale = 1.0 / (DIM as f32).sqrt();
    let (heads, qk_dim, v_dim) = (HEADS, DIM, DIM);
    let desc =
        AttentionDesc { heads, kv_heads, qk_dim, v_dim, scale, window, chunked: false, sinks, v_from_k };
    let out_ld = if splits > 1 { HEADS * splits * (DIM + 2) } else { HEADS * DIM };
    let spec = KernelSpec::Attention(Attention {
        desc,
        cache,
        rotated: [if stores_rotated(cache) { rotated_channels(&[DIM]) } else { 1 }; 2],
        compute,
        ctx,
        rows,
        splits,
        q_ld: HEADS * DIM,
        out_ld,
    });
    let loaded = Loaded::new(&compile(machine, std::slice::from_ref(&spec), &())?)?;
    let kernel = loaded.kernel(&spec.symbol(&isa))?;
    let size = |order| {
        CacheHead { format: cache, order, ctx, dim: DIM }
            .bytes()
            .map(|n| n * kv_heads)
            .ok_or("a cache without size")
    };
    let mut memory = [
        lines(n * HEADS * DIM * 4),
        lines(size(key_order(&isa))?),
        lines(size(value_order(&isa))?),
        ints((ctx - n)..ctx),
        ints(std::iter::repeat_n(0, n)),
        lines(n * out_ld * 4),
    ];
    let args = memory.each_mut().map(|m| m.as_mut_ptr().cast::<u8>());
    let mut scratch = lines(spec.scratch_bytes(&isa));
    let items = spec.grid(&isa).items(n, 1);
    let seconds = fastest(|| {
        // SAFETY: the operands have the extents that the kernel documents.
        unsafe { kernel(args.as_ptr(), n as i64, 0, items as i64, scratch.as_mut_ptr().cast()) };
    });
    let keys: usize = (ctx - n + 1..=ctx).sum();
    println!(
        "{name:10} {cache:4} {:4} {n:4} rows of {ctx:5}, {kv_heads:2} heads {:8.1} GFLOP/s {:7.1} GB/s {:9.3} ms",
        compute.name(),
        4.0 * (keys * HEADS * DIM) as f64 / seconds / 1e9,
        (size(key_order(&isa))? + size(value_order(&isa))?) as f64 / seconds / 1e9,
        seconds * 1e3,
    );
    Ok(())
}

fn main() -> Outcome {
    let filter = std::env::args().nth(1).unwrap_or_default();
    let memory = vec![1_u64; 32 << 20];
    let seconds = fastest(|| {
        std::hint::black_box(memory.iter().copied().fold(0, u64::wrapping_add));
    });
    println!("reading memory: {:.1} GB/s", 256.0 * f64::from(1 << 20) / seconds / 1e9);
    let arithmetics = [
        (Format::Bf16, ComputeType::Bf16),
        (Format::Bf16, ComputeType::F32),
        (Format::Q8, ComputeType::Bf16),
        (Format::Q8, ComputeType::F32),
        (Format::Q5, ComputeType::Bf16),
        (Format::Q5, ComputeType::F32),
        (Format::Q4, ComputeType::Bf16),
        (Format::Q4, ComputeType::F32),
        (Format::F32, ComputeType::F32),
    ];
    for machine in [Machine::host()?, Machine::x86_64_level(3)] {
        println!("\n{} {:?}", machine.cpu, machine.isa());
        for (cache, compute) in arithmetics {
            let prefill =
                |context| Probe { name: "prefill", cache, compute, rows: CHUNK, context, kv_heads: HEADS };
            let probes = [512, 2048, 8192].map(prefill);
            let decode =
                |kv_heads| Probe { name: "decode", cache, compute, rows: 1, context: 8192, kv_heads };
            let decodes = [HEADS, 4, 2, 1].map(decode);
            for probe in probes.iter().chain(&decodes).filter(|p| p.name.contains(&filter)) {
                measure(&machine, probe)?;
            }
        }
    }
    Ok(())
}
