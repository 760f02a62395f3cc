//! What skipping neurons gains while one token is decoded: kernels of whole experts and of neurons by turns, in OLMoE's
//! shapes, by the share of neurons that the gate leaves at 0.
//!
//! `cargo run -p moec-codegen --example neuron_rate -- [THREADS] [PART OF A FORMAT'S NAME]`
//!
//! One expert is made for each share, and lies in memory many times: calls take the next eight, so that nothing stays in a
//! cache. Its gates are normal numbers, moved along the token so that the wanted share of them is negative.
#![allow(clippy::print_stdout)]

use moec_codegen::jit::{KernelFn, Loaded};
use moec_codegen::pack::{Geometry, pack_slice};
use moec_codegen::{
    ByteDot, Compute, Isa, KernelSpec, Machine, RowForm, Schedule, WeightOrder, apart, awake_words, compile,
    packed_words,
};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::plan::{Grid, Layout};
use moec_ir::types::Format;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Instant;

const HIDDEN: usize = 2048;
const INTER: usize = 1024;
/// Experts of a token.
const K: usize = 8;
/// Bytes of weights that lie in memory for each kind of kernel, at least: more than caches hold.
const BYTES: usize = 1 << 30;
/// Turns of which the median counts.
const TURNS: usize = 7;
/// Shares of neurons at 0.
const ZEROS: [f64; 8] = [0.0, 0.25, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95];
const GLU: Glu = Glu::Gated(Activation::Relu);

type Outcome<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// A cache line: operands are aligned as in a plan.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _words: [u32; 16],
}

/// Zeroed memory of so many bytes.
fn lines(bytes: usize) -> Vec<Line> {
    vec![Line { _words: [0; 16] }; bytes.div_ceil(64)]
}

/// Memory that holds `bytes` over and over, `pitch` apart.
fn copies(bytes: &[u8], count: usize) -> (Vec<Line>, usize) {
    let pitch = bytes.len().next_multiple_of(64);
    let mut all = lines(pitch * count);
    in_huge_pages(&all);
    for i in 0..count {
        // SAFETY: the memory is `count` pitches long, and a pitch holds the bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                all.as_mut_ptr().cast::<u8>().add(i * pitch),
                bytes.len(),
            );
        }
    }
    (all, pitch)
}

/// Asks for huge pages, as the runtime does for weights; they have not been touched yet. Where there are none it is slower.
#[cfg(target_os = "linux")]
fn in_huge_pages(memory: &[Line]) {
    const HUGE: usize = 2 << 20;
    let first = memory.as_ptr().addr().next_multiple_of(HUGE);
    let end = (memory.as_ptr().addr() + size_of_val(memory)) / HUGE * HUGE;
    if first < end {
        let at = memory.as_ptr().cast::<u8>().wrapping_add(first - memory.as_ptr().addr());
        // SAFETY: the range lies in the memory, and the advice changes none of it.
        unsafe { libc::madvise(at.cast_mut().cast(), end - first, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn in_huge_pages(_memory: &[Line]) {}

/// Normal numbers, near enough.
struct Normal(u64);

impl Normal {
    fn next(&mut self) -> f32 {
        let mut sum = -6.0;
        for _ in 0..12 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            sum += (self.0 >> 40) as f32 / (1 << 24) as f32;
        }
        sum
    }

    fn many(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.next() * scale).collect()
    }
}

/// An expert and a token.
struct Expert {
    x: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// By output channel, `[H, I]`.
    down: Vec<f32>,
}

impl Expert {
    fn new(zeros: f64) -> Self {
        let mut normal = Normal(11);
        let scale = 1.0 / (HIDDEN as f32).sqrt();
        let x = normal.many(HIDDEN, 1.0);
        let mut gate = normal.many(INTER * HIDDEN, scale);
        let (up, down) = (normal.many(INTER * HIDDEN, scale), normal.many(INTER * HIDDEN, scale));
        let dot = |row: &[f32]| row.iter().zip(&x).map(|(a, b)| a * b).sum::<f32>();
        let mut sums: Vec<f32> = gate.chunks_exact(HIDDEN).map(dot).collect();
        sums.sort_by(f32::total_cmp);
        // So that the wanted number of gates is below 0.
        let at = ((zeros * INTER as f64) as usize).min(INTER - 1);
        let below = if zeros > 0.0 { f32::midpoint(sums[at - 1], sums[at]) } else { sums[0] - 0.1 };
        let norm = x.iter().map(|x| x * x).sum::<f32>();
        for row in gate.chunks_exact_mut(HIDDEN) {
            row.iter_mut().zip(&x).for_each(|(w, x)| *w -= below * x / norm);
        }
        Self { x, gate, up, down }
    }

    fn bundles(&self) -> Vec<f32> {
        let mut all = Vec::with_capacity(3 * INTER * HIDDEN);
        for i in 0..INTER {
            let row = i * HIDDEN..(i + 1) * HIDDEN;
            all.extend_from_slice(&self.gate[row.clone()]);
            all.extend_from_slice(&self.up[row]);
            all.extend((0..HIDDEN).map(|c| self.down[c * INTER + i]));
        }
        all
    }
}

/// A kernel with its operands.
struct Step {
    kernel: KernelFn,
    args: Vec<usize>,
    n: usize,
    items: usize,
    scratch: usize,
    /// Operand of weights, whose table of addresses every call moves on.
    table: Option<usize>,
}

/// Kernels that follow each other, and what they work on.
struct Path {
    steps: Vec<Step>,
    _memory: Vec<Vec<Line>>,
    copies: usize,
    _loaded: Loaded,
}

/// Lanes that take work as it is left, and wait for each other behind every step.
fn time(path: &Path, threads: usize, calls: usize) -> f64 {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let most = path.steps.iter().map(|s| s.scratch).max().unwrap_or(0);
    let lane = || {
        let mut scratch = lines(most.max(64));
        let mut step_at = 0;
        for call in 0..calls {
            for step in &path.steps {
                let mut args: Vec<*mut u8> =
                    step.args.iter().map(|&a| std::ptr::with_exposed_provenance_mut(a)).collect();
                if let Some(at) = step.table {
                    // Tables of all copies follow each other: a call begins `K` further.
                    args[at] = args[at].wrapping_add(call * K % path.copies * 8);
                }
                let base = step_at << 32;
                loop {
                    let taken = next.load(SeqCst);
                    let begin = taken.saturating_sub(base);
                    if begin >= step.items {
                        break;
                    }
                    let share = ((step.items - begin) / (4 * threads)).max(1);
                    if next.compare_exchange(taken, taken + share, SeqCst, SeqCst).is_err() {
                        continue;
                    }
                    // SAFETY: the operands have the extents that the kernel documents; items are this lane's own.
                    unsafe {
                        (step.kernel)(
                            args.as_ptr(),
                            step.n as i64,
                            begin as i64,
                            (begin + share).min(step.items) as i64,
                            scratch.as_mut_ptr().cast(),
                        );
                    }
                }
                step_at += 1;
                if done.fetch_add(1, SeqCst) + 1 == threads * step_at {
                    next.store(step_at << 32, SeqCst);
                }
                while next.load(SeqCst) < step_at << 32 {
                    std::hint::spin_loop();
                }
            }
        }
    };
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(lane);
        }
        lane();
    });
    start.elapsed().as_secs_f64() / calls as f64
}

/// What the operands of a kernel are.
enum Arg<'a> {
    Floats(&'a [f32]),
    Ints(&'a [i32]),
    /// Room for so many words.
    Words(usize),
    /// The memory of that number.
    Memory(usize),
    /// The table of the addresses of a weight's copies.
    Matrices(&'a [f32], Geometry),
}

struct Builder<'m> {
    machine: &'m Machine,
    specs: Vec<KernelSpec>,
    args: Vec<Vec<usize>>,
    memory: Vec<Vec<Line>>,
    tables: Vec<Option<usize>>,
    copies: usize,
}

impl<'m> Builder<'m> {
    fn new(machine: &'m Machine, copies: usize) -> Self {
        let (specs, args, memory, tables) = Default::default();
        Self { machine, specs, args, memory, tables, copies }
    }

    fn words(&mut self, words: &[u32]) -> usize {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.memory.push(copies(&bytes, 1).0);
        self.memory.len() - 1
    }

    fn step(&mut self, spec: KernelSpec, args: Vec<Arg<'_>>) -> Outcome {
        let mut table = None;
        let mut of = Vec::new();
        for (i, arg) in args.into_iter().enumerate() {
            of.push(match arg {
                Arg::Floats(x) => self.words(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()),
                Arg::Ints(x) => self.words(&x.iter().map(|x| x.cast_unsigned()).collect::<Vec<_>>()),
                Arg::Words(n) => self.words(&vec![0; n]),
                Arg::Memory(i) => i,
                Arg::Matrices(values, geometry) => {
                    table = Some(i);
                    let bytes = pack_slice(&geometry, values)?;
                    let (all, pitch) = copies(&bytes, self.copies);
                    let first = all.as_ptr().expose_provenance();
                    self.memory.push(all);
                    // As often again as a call takes: the last one goes on with the first.
                    let addresses: Vec<u32> = (0..self.copies + K)
                        .flat_map(|i| {
                            let at = (first + i % self.copies * pitch) as u64;
                            [at as u32, (at >> 32) as u32]
                        })
                        .collect();
                    self.words(&addresses)
                }
            });
        }
        self.specs.push(spec);
        self.args.push(of);
        self.tables.push(table);
        Ok(())
    }

    fn finish(mut self, n: usize, active: usize) -> Outcome<Path> {
        let isa = self.machine.isa();
        let loaded = Loaded::new(&compile(self.machine, &self.specs)?)?;
        let at: Vec<usize> = self.memory.iter_mut().map(|m| m.as_mut_ptr().expose_provenance()).collect();
        let mut steps = Vec::new();
        for ((spec, args), table) in self.specs.iter().zip(&self.args).zip(&self.tables) {
            steps.push(Step {
                kernel: loaded.kernel(&spec.symbol(&isa))?,
                args: args.iter().map(|&i| at[i]).collect(),
                n,
                items: match spec.grid(&isa) {
                    Grid::One => 1,
                    Grid::Tiles { rows, tiles } => n.div_ceil(rows as usize) * tiles as usize,
                    Grid::Experts { tiles, .. } => active * tiles as usize,
                },
                scratch: spec.scratch_bytes(&isa),
                table: *table,
            });
        }
        Ok(Path { steps, _memory: self.memory, copies: self.copies, _loaded: loaded })
    }
}

/// Rows that go to the first experts, so many each.
fn dispatch(layout: DispatchLayout, each: usize) -> Vec<i32> {
    let mut table = vec![0; layout.words()];
    let slots = layout.rows * layout.k;
    let active = slots / each;
    table[0] = active as i32;
    table[1] = slots as i32;
    for a in 0..active {
        table[layout.expert() + a] = a as i32;
        table[layout.start() + a + 1] = ((a + 1) * each) as i32;
    }
    for slot in 0..slots {
        table[layout.token() + slot] = (slot % layout.rows) as i32;
        table[layout.slot() + slot] = slot as i32;
    }
    table
}

/// Experts of `rows` tokens, `each` of whose slots an expert has: whole ones, and neurons.
struct Probe<'m> {
    machine: &'m Machine,
    isa: Isa,
    format: Format,
    rows: usize,
    k: usize,
    each: usize,
    copies: usize,
}

impl Probe<'_> {
    fn layout(&self) -> DispatchLayout {
        DispatchLayout { rows: self.rows, k: self.k, experts: self.copies }
    }

    fn active(&self) -> usize {
        self.rows * self.k / self.each
    }

    fn x(&self, e: &Expert) -> Vec<f32> {
        e.x.iter().copied().cycle().take(self.rows * HIDDEN).collect()
    }

    /// As `select` chooses for a format and number of rows.
    fn dense_compute(&self) -> Compute {
        match self.format.is_grouped() {
            true if self.isa.tiles && self.rows > 8 => Compute::Bf16,
            true if self.isa.bytes != ByteDot::None => Compute::I8,
            false if self.format == Format::Bf16 && self.isa.bf16 && self.rows > 8 => Compute::Bf16,
            _ => Compute::F32,
        }
    }

    /// Gate and up, and down, either behind its rows in their form.
    fn matrices(&self, e: &Expert, order: WeightOrder, compute: Compute) -> Outcome<Path> {
        let (format, layout, schedule) = (self.format, self.layout(), Schedule::default());
        let mut b = Builder::new(self.machine, self.copies);
        let slots = self.rows * self.k;
        let table = dispatch(layout, self.each);
        let plain = compute == Compute::F32;
        let ld = |cols| if plain { cols } else { apart(packed_words(cols, compute)) };
        let quantise = |cols, per_row| {
            let (x_ld, out_ld) = (cols, ld(cols));
            KernelSpec::Quantise { cols, groups: 1, per_row, x_ld, out_ld, to: compute }
        };
        let x = self.x(e);
        let x = b.words(&x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        let rows = if plain { x } else { b.words(&vec![0; self.rows * ld(HIDDEN)]) };
        if !plain {
            b.step(quantise(HIDDEN, 1), vec![Arg::Memory(x), Arg::Memory(rows)])?;
        }
        let h = b.words(&vec![0; slots * INTER]);
        let spec = KernelSpec::ExpertGateUp {
            layout,
            hidden: HIDDEN,
            inter: INTER,
            format,
            compute,
            x_ld: ld(HIDDEN),
            glu: GLU,
            bias: false,
            out: RowForm::f32(INTER),
            order,
            schedule,
        };
        let one = |spec: &KernelSpec, rows, cols| {
            let layout = spec.layout(&self.isa).unwrap_or(Layout::Rows);
            Geometry { layout, format, lead: 1, rows, cols }
        };
        let neurons = order != WeightOrder::Panels;
        let (values, g) = if neurons {
            (e.bundles(), one(&spec, INTER, 3 * HIDDEN))
        } else {
            ([e.gate.as_slice(), &e.up].concat(), one(&spec, 2 * INTER, HIDDEN))
        };
        let args = vec![Arg::Memory(rows), Arg::Ints(&table), Arg::Matrices(&values, g), Arg::Memory(h)];
        // Bundles serve both halves.
        let weights = b.memory.len() + 2;
        b.step(spec, args)?;
        let h_rows = if plain { h } else { b.words(&vec![0; slots * ld(INTER)]) };
        if !plain {
            b.step(quantise(INTER, self.k), vec![Arg::Memory(h), Arg::Memory(h_rows)])?;
        }
        let spec = KernelSpec::ExpertDown {
            layout,
            inter: INTER,
            hidden: HIDDEN,
            format,
            compute,
            h_ld: ld(INTER),
            bias: false,
            order,
            schedule,
        };
        let matrices =
            if neurons { Arg::Memory(weights) } else { Arg::Matrices(&e.down, one(&spec, HIDDEN, INTER)) };
        let args = vec![Arg::Memory(h_rows), Arg::Ints(&table), matrices, Arg::Words(slots * HIDDEN)];
        b.step(spec, args)?;
        if neurons {
            *b.tables.last_mut().ok_or("no step")? = Some(2);
        }
        b.finish(self.rows, self.active())
    }

    fn skipping(&self, e: &Expert, sketch: bool) -> Outcome<Path> {
        let (format, layout) = (self.format, self.layout());
        let (hidden, inter) = (HIDDEN, INTER);
        let mut b = Builder::new(self.machine, self.copies);
        let slots = self.rows * self.k;
        let table = dispatch(layout, self.each);
        let g =
            Geometry { layout: Layout::Neurons { sketch }, format, lead: 1, rows: INTER, cols: 3 * HIDDEN };
        let h = b.words(&vec![0; slots * INTER]);
        let awake = b.words(&vec![0; awake_words(layout, INTER)]);
        let weights = b.memory.len() + 3;
        let up = KernelSpec::NeuronUp { layout, hidden, inter, format, sketch, x_ld: HIDDEN, glu: GLU };
        let (x, values) = (self.x(e), e.bundles());
        let args = vec![
            Arg::Floats(&x),
            Arg::Ints(&table),
            Arg::Matrices(&values, g),
            Arg::Memory(h),
            Arg::Memory(awake),
        ];
        b.step(up, args)?;
        let down = KernelSpec::NeuronDown { layout, hidden, inter, format, sketch };
        let args = vec![
            Arg::Memory(h),
            Arg::Ints(&table),
            Arg::Memory(weights),
            Arg::Memory(awake),
            Arg::Words(slots * HIDDEN),
        ];
        b.step(down, args)?;
        *b.tables.last_mut().ok_or("no step")? = Some(2);
        b.finish(self.rows, self.active())
    }
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

/// Times of two paths by turns: medians, and the median of their ratios.
fn compare(a: &Path, b: &Path, threads: usize, calls: usize) -> [f64; 3] {
    let turns: Vec<[f64; 2]> =
        (0..TURNS).map(|_| [time(a, threads, calls), time(b, threads, calls)]).collect();
    let of = |f: &dyn Fn(&[f64; 2]) -> f64| median(turns.iter().map(f).collect());
    [of(&|t| t[0]), of(&|t| t[1]), of(&|t| t[0] / t[1])]
}

fn main() -> Outcome {
    let machine = Machine::host()?;
    let isa = machine.isa();
    let usual = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = std::env::args().nth(1).map_or(Ok(usual), |n| n.parse())?;
    let wanted = std::env::args().nth(2).unwrap_or_default();
    println!("{threads} threads of {} {isa:?}\n", machine.cpu);
    println!(
        "| weights | neurons at 0 | whole experts | read | neurons | faster |\n|---|---|---|---|---|---|"
    );
    let kinds = [(Format::Bf16, false), (Format::Bf16, true), (Format::Q8, false), (Format::Q4, false)];
    let name =
        |format: Format, sketch| format!("{}{}", format.name(), if sketch { ", sketched" } else { "" });
    for (format, sketch) in kinds.into_iter().filter(|&(f, s)| name(f, s).contains(&wanted)) {
        let bytes = 3 * INTER * format.row_bytes(HIDDEN);
        let copies = BYTES.div_ceil(bytes).next_multiple_of(K);
        let probe = Probe { machine: &machine, isa, format, rows: 1, k: K, each: 1, copies };
        let dense = probe.matrices(&Expert::new(0.5), WeightOrder::Panels, probe.dense_compute())?;
        let mut even = None;
        let mut before: Option<(f64, f64)> = None;
        for zeros in ZEROS {
            let skipping = probe.skipping(&Expert::new(zeros), sketch)?;
            let [whole, part, faster] = compare(&dense, &skipping, threads, copies / K);
            println!(
                "| {} | {:.0} % | {:.3} ms | {:.1} GB/s | {:.3} ms | {faster:.2}× |",
                name(format, sketch),
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
            Some(zeros) => println!("\n{}: faster from {:.0} % on\n", name(format, sketch), zeros * 100.0),
            None => println!("\n{}: never faster\n", name(format, sketch)),
        }
    }
    println!(
        "| weights | rows of an expert | whole experts | neurons | share of the speed |\n|---|---|---|---|---|"
    );
    for (format, sketch) in kinds.into_iter().filter(|&(f, s)| name(f, s).contains(&wanted)) {
        for each in [16, 64] {
            let bytes = 3 * INTER * format.row_bytes(HIDDEN);
            let copies = (BYTES / bytes).clamp(K, 64) / K * K;
            let probe = Probe { machine: &machine, isa, format, rows: copies * each / K, k: K, each, copies };
            let e = Expert::new(0.5);
            let dense = probe.matrices(&e, WeightOrder::Panels, probe.dense_compute())?;
            let compute = if isa.bf16 { Compute::Bf16 } else { Compute::F32 };
            let neurons = probe.matrices(&e, WeightOrder::Neurons { sketch }, compute)?;
            let [whole, part, ratio] = compare(&dense, &neurons, threads, 1);
            println!(
                "| {} | {each} | {:.1} ms | {:.1} ms | {:.0} % |",
                name(format, sketch),
                whole * 1e3,
                part * 1e3,
                ratio * 100.0
            );
        }
    }
    Ok(())
}
