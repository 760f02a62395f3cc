//! Kernels that follow each other on memory of their own, and how long they take.

use crate::{K, Outcome};
use moec_codegen::jit::{KernelFn, Loaded};
use moec_codegen::pack::{Geometry, pack_slice};
use moec_codegen::{KernelSpec, Machine, compile};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// A cache line: operands are aligned as in a plan.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Line {
    _words: [u32; 16],
}

/// Zeroed memory of this many bytes.
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

/// Requests huge pages, as the runtime does for weights; the memory has not been touched yet. Without huge
/// pages the measurement is slower.
#[cfg(target_os = "linux")]
fn in_huge_pages(memory: &[Line]) {
    const HUGE: usize = 2 << 20;
    let first = memory.as_ptr().addr().next_multiple_of(HUGE);
    let end = (memory.as_ptr().addr() + size_of_val(memory)) / HUGE * HUGE;
    if first < end {
        let at = memory.as_ptr().cast::<u8>().wrapping_add(first - memory.as_ptr().addr());
        // SAFETY: the range is inside the memory, and the advice changes none of it.
        unsafe { libc::madvise(at.cast_mut().cast(), end - first, libc::MADV_HUGEPAGE) };
    }
}

#[cfg(not(target_os = "linux"))]
fn in_huge_pages(_memory: &[Line]) {}
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
pub(crate) struct Path {
    steps: Vec<Step>,
    _memory: Vec<Vec<Line>>,
    copies: usize,
    _loaded: Loaded,
}

/// Threads that take work as it is left, and wait for each other after every step.
pub(crate) fn time(path: &Path, threads: usize, calls: usize) -> f64 {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let most = path.steps.iter().map(|s| s.scratch).max().unwrap_or(0);
    let thread = || {
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
                    // SAFETY: the operands have the extents that the kernel documents; items are this
                    // thread's own.
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
    let start = clock(threads);
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(thread);
        }
        thread();
    });
    (clock(threads) - start) / calls as f64
}

/// Seconds of a run. With a single thread it is that thread's CPU time, which other programs do not change.
#[cfg(target_os = "linux")]
fn clock(threads: usize) -> f64 {
    let which = if threads == 1 { libc::CLOCK_THREAD_CPUTIME_ID } else { libc::CLOCK_MONOTONIC };
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: it writes the time to what it is given.
    unsafe { libc::clock_gettime(which, &raw mut now) };
    now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
}

#[cfg(not(target_os = "linux"))]
fn clock(_threads: usize) -> f64 {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed().as_secs_f64()
}

/// Operand of a kernel.
pub(crate) enum Arg<'a> {
    Ints(&'a [i32]),
    /// Room for this many words.
    Words(usize),
    /// The memory of that number.
    Memory(usize),
    /// The table of the addresses of a weight's copies.
    Matrices(&'a [f32], Geometry),
}

pub(crate) struct Builder<'m> {
    machine: &'m Machine,
    specs: Vec<KernelSpec>,
    args: Vec<Vec<usize>>,
    pub(crate) memory: Vec<Vec<Line>>,
    pub(crate) tables: Vec<Option<usize>>,
    copies: usize,
}

impl<'m> Builder<'m> {
    pub(crate) fn new(machine: &'m Machine, copies: usize) -> Self {
        let (specs, args, memory, tables) = Default::default();
        Self { machine, specs, args, memory, tables, copies }
    }

    pub(crate) fn words(&mut self, words: &[u32]) -> usize {
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        self.memory.push(copies(&bytes, 1).0);
        self.memory.len() - 1
    }

    pub(crate) fn step(&mut self, spec: KernelSpec, args: Vec<Arg<'_>>) -> Outcome {
        let mut table = None;
        let mut of = Vec::new();
        for (i, arg) in args.into_iter().enumerate() {
            of.push(match arg {
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

    pub(crate) fn finish(mut self, n: usize, active: usize) -> Outcome<Path> {
        let isa = self.machine.isa();
        let loaded = Loaded::new(&compile(self.machine, &self.specs, &())?)?;
        let at: Vec<usize> = self.memory.iter_mut().map(|m| m.as_mut_ptr().expose_provenance()).collect();
        let mut steps = Vec::new();
        for ((spec, args), table) in self.specs.iter().zip(&self.args).zip(&self.tables) {
            steps.push(Step {
                kernel: loaded.kernel(&spec.symbol(&isa))?,
                args: args.iter().map(|&i| at[i]).collect(),
                n,
                items: spec.grid(&isa).items(n, active),
                scratch: spec.scratch_bytes(&isa),
                table: *table,
            });
        }
        Ok(Path { steps, _memory: self.memory, copies: self.copies, _loaded: loaded })
    }
}

/// Requests permission to use tile registers from the operating system, where it is needed.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
pub(crate) fn allow_tiles() -> bool {
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    // SAFETY: the call reads no memory of ours.
    unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0 }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
pub(crate) fn allow_tiles() -> bool {
    false
}
