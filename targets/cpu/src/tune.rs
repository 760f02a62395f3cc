//! Auto-tuned schedules: a matrix kernel in several of them, on made-up operands, in this process.
//!
//! A probe is the kernel on a part of its matrix: panels and experts are alike, so a few milliseconds of them
//! are as good as all. In a run every matrix comes from memory, because others were used in between. So a
//! probe's weights are at another place of a buffer larger than the caches in every call, while rows and
//! results stay in place. Schedules alternate, in another order every round, and the median of each counts.
#![expect(clippy::cast_possible_truncation, reason = "measurements: counts of calls and of rows")]

use crate::{CpuTarget, Estimate, KernelSpec, Load, Unsupported};
use moec_codegen::jit::{KernelFn, Loaded};
use moec_codegen::spec::{ExpertDown, ExpertGateUp, Linear};
use moec_codegen::{Error as CodegenError, Schedule};
use moec_ir::op::DispatchLayout;
use moec_runtime::Error as RuntimeError;
use moec_runtime::platform::cpu;
use moec_runtime::sync::pool::{Binding, Pool};
use std::fmt;
use std::time::{Duration, Instant};

/// Seconds that the calls of a probe should take by the cost model, at most.
const CALL: f64 = 8e-3;
/// Bytes of weights that a probe reads, at most.
const WEIGHTS: usize = 64 << 20;
/// Bytes of the buffer that weights move through: at least, and at most where the last-level cache is large.
const BUFFER: [usize; 2] = [96 << 20, 512 << 20];
/// Rounds: at least, whatever time is left, and at most.
const ROUNDS: [usize; 2] = [3, 15];
/// Small numbers in every format: bf16, f16, f32, codes and scales.
const PATTERN: u32 = 0x3c00_3c00;

/// Reason that kernels cannot be timed.
#[derive(Debug, thiserror::Error)]
pub enum TuneError {
    /// This machine does not run the target's code.
    #[error("kernels of `{target}` do not run here: {}", .missing.join(", "))]
    Machine {
        /// Target.
        target: String,
        /// Features that this machine lacks.
        missing: Vec<String>,
    },
    /// The target has no kernel for it.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// No threads.
    #[error(transparent)]
    Threads(#[from] RuntimeError),
    /// A kernel does not compile or load: our bug.
    #[error(transparent)]
    Kernel(#[from] CodegenError),
    /// The caller cancelled it.
    #[error("interrupted")]
    Stopped,
}

/// A line of a cache: operands are aligned as in a plan.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line(#[expect(dead_code, reason = "kernels read it")] [u32; 16]);

/// Address of an operand.
#[derive(Clone, Copy)]
#[repr(transparent)]
struct Address(*mut u8);

// SAFETY: an address is only handed to kernels, whose threads write words of their own.
unsafe impl Sync for Address {}

/// Times schedules with the threads that a run would have.
pub struct Stopwatch {
    pool: Pool,
    weights: Operand,
    /// Place of the next call's weights.
    next: usize,
}

/// Memory of an operand. Kernels write some; no two threads write the same words.
struct Operand(Vec<Line>);

impl Operand {
    /// In huge pages if the operating system has them, as weights in a run's own memory are.
    fn words(n: usize) -> Self {
        let mut lines = Vec::with_capacity(n.div_ceil(16).max(1));
        in_huge_pages(&mut lines);
        lines.resize(lines.capacity(), Line([PATTERN; 16]));
        Self(lines)
    }

    fn of(ints: &[i32]) -> Self {
        let line = |c: &[i32]| Line(std::array::from_fn(|i| c.get(i).map_or(0, |x| x.cast_unsigned())));
        Self(ints.chunks(16).map(line).collect())
    }

    fn address(&mut self) -> Address {
        Address(self.0.as_mut_ptr().cast())
    }

    fn bytes(&self) -> usize {
        self.0.len() * 64
    }
}

/// Requests huge pages for memory that is allocated and not yet written. A hint.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
pub(crate) fn in_huge_pages<T>(memory: &mut Vec<T>) {
    const HUGE: usize = 2 << 20;
    let (first, bytes) = (memory.as_mut_ptr().addr(), memory.capacity() * size_of::<T>());
    let from = first.next_multiple_of(HUGE);
    if from + HUGE <= first + bytes {
        let at = memory.as_mut_ptr().wrapping_byte_add(from - first);
        // SAFETY: a hint about pages inside the allocation; their content is not touched.
        unsafe { libc::madvise(at.cast(), first + bytes - from, libc::MADV_HUGEPAGE) };
    }
}

/// Does nothing on this system.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
pub(crate) fn in_huge_pages<T>(_memory: &mut Vec<T>) {}

impl fmt::Debug for Stopwatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (threads, bytes) = (self.pool.threads(), self.weights.bytes());
        f.debug_struct("Stopwatch").field("threads", &threads).field("bytes", &bytes).finish_non_exhaustive()
    }
}

/// A kernel on a part of its matrix, with operands.
struct Probe {
    spec: KernelSpec,
    rows: usize,
    operands: Vec<Operand>,
    /// Index of the weights' operand, and their bytes.
    weights: (usize, usize),
    /// Their matrices, which the kernel finds by a table of addresses; 0: it gets the first byte.
    matrices: usize,
    active: usize,
}

impl Stopwatch {
    /// For a target whose code this machine runs; `threads` as a run has them.
    ///
    /// # Errors
    /// [`TuneError::Machine`], [`TuneError::Threads`].
    pub fn new(target: &CpuTarget, threads: usize) -> Result<Self, TuneError> {
        target.runs_here()?;
        let last = target.figures.last_cache.and_then(|b| usize::try_from(b).ok()).unwrap_or(0);
        let bytes = (2 * last).clamp(BUFFER[0], BUFFER[1]);
        // No thread is bound to a core: the first is the caller's, which then links with all of them.
        let pool = Pool::new(threads, 0, Binding::None)?;
        Ok(Self { pool, weights: Operand::words((bytes + WEIGHTS) / 4), next: 0 })
    }

    /// Threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Median seconds of a probe of the kernel in each schedule, called with `n` valid rows. Takes about
    /// `time`, or as long as three rounds take; `stop` is called before each.
    ///
    /// # Errors
    /// [`TuneError::Kernel`], [`TuneError::Stopped`].
    pub fn time(
        &mut self,
        target: &CpuTarget,
        spec: &KernelSpec,
        n: usize,
        schedules: &[Schedule],
        time: Duration,
        stop: &dyn Fn() -> bool,
    ) -> Result<Vec<f64>, TuneError> {
        let start = Instant::now();
        let Some(mut probe) = target.probe(spec, n, self.pool.threads()) else { return Ok(Vec::new()) };
        if probe.weights.1 > self.weights.bytes() {
            (self.weights, self.next) = (Operand::words(probe.weights.1 / 4 + 16), 0);
        }
        let specs: Vec<KernelSpec> = schedules.iter().map(|s| probe.spec.with_schedule(*s)).collect();
        let loaded = Loaded::new(&target.compile(&specs, &())?)?;
        let kernels = specs
            .iter()
            .map(|s| Ok((s, loaded.kernel(&target.symbol(s))?)))
            .collect::<Result<Vec<_>, CodegenError>>()?;
        let mut times: Vec<Vec<f64>> = vec![Vec::new(); kernels.len()];
        for round in 0..=ROUNDS[1] {
            if stop() {
                return Err(TuneError::Stopped);
            }
            if round > ROUNDS[0] && start.elapsed() > time {
                break;
            }
            for turn in 0..kernels.len() {
                let i = (turn + round) % kernels.len();
                let seconds = self.call(target, &mut probe, kernels[i].0, kernels[i].1);
                // The first round warms up.
                if round > 0 {
                    times[i].push(seconds);
                }
            }
        }
        Ok(times.iter_mut().map(|t| median(t)).collect())
    }

    /// Work of a probe of the kernel: the part of the matrix that [`Stopwatch::time`] multiplies by. `None`:
    /// no matrix.
    pub fn probed(&self, target: &CpuTarget, spec: &KernelSpec, n: usize) -> Option<Estimate> {
        let probe = target.probe(spec, n, self.pool.threads())?;
        target.estimate(&probe.spec, probe.rows)
    }

    /// Share of a kernel's operations that [`Stopwatch::time`] measures; 1 without a matrix.
    pub fn share(&self, target: &CpuTarget, spec: &KernelSpec, n: usize) -> f64 {
        let part = self.probed(target, spec, n).zip(target.estimate(spec, n));
        part.map_or(1.0, |(part, whole)| part.operations / whole.operations)
    }

    /// Seconds of one call.
    fn call(&mut self, target: &CpuTarget, probe: &mut Probe, spec: &KernelSpec, kernel: KernelFn) -> f64 {
        let (at, bytes) = probe.weights;
        if self.next + bytes > self.weights.bytes() {
            self.next = 0;
        }
        let mut args: Vec<Address> = probe.operands.iter_mut().map(Operand::address).collect();
        // SAFETY: `next` and the weights after it are inside the buffer.
        let first = unsafe { self.weights.address().0.add(self.next) };
        let matrix = bytes.checked_div(probe.matrices).unwrap_or(0);
        // SAFETY: as above, for each of the matrices.
        let mut addresses: Vec<Address> =
            (0..probe.matrices).map(|i| Address(unsafe { first.add(i * matrix) })).collect();
        args[at] = if probe.matrices > 0 { Address(addresses.as_mut_ptr().cast()) } else { Address(first) };
        self.next += bytes.next_multiple_of(64);
        let items = target.grid(spec).items(probe.rows, probe.active);
        let threads = self.pool.threads();
        let words = target.scratch_bytes(spec).div_ceil(4);
        let scratch: Vec<Address> = probe.scratch(threads, words);
        let (rows, args, scratch) = (probe.rows as i64, &args, &scratch);
        let start = Instant::now();
        self.pool.run(&|thread, _| {
            let (begin, end) = (items * thread / threads, items * (thread + 1) / threads);
            // SAFETY: the machine has the target's features (`new`); the operands have the extents that the
            // kernel documents for this many rows and stay where they are until `run` returns; every thread
            // has its own work items, which write words of their own, and its own scratch.
            unsafe {
                let args = args.as_ptr().cast::<*mut u8>();
                kernel(args, rows, begin as i64, end as i64, scratch[thread].0);
            }
        });
        start.elapsed().as_secs_f64()
    }
}

impl Probe {
    /// Addresses of scratch for every thread. It follows the operands of the kernel and only grows.
    fn scratch(&mut self, threads: usize, words: usize) -> Vec<Address> {
        let first = self.spec.args();
        self.operands.resize_with(first + threads, || Operand::words(0));
        let scratch = &mut self.operands[first..];
        for s in scratch.iter_mut().filter(|s| s.bytes() < 4 * words) {
            *s = Operand::words(words);
        }
        scratch.iter_mut().map(Operand::address).collect()
    }
}

impl CpuTarget {
    /// Whether this machine runs the target's code.
    ///
    /// # Errors
    /// [`TuneError::Machine`] with what is missing.
    pub fn runs_here(&self) -> Result<(), TuneError> {
        let info = self.info();
        let features: Vec<&str> = info.features.iter().map(String::as_str).collect();
        let missing: Vec<String> = if moec_device::is_host(&info.triple) {
            cpu::missing(&features).into_iter().map(|f| format!("`{f}` is missing")).collect()
        } else {
            vec![format!("they are for `{}`", info.triple)]
        };
        let target = info.name;
        if missing.is_empty() { Ok(()) } else { Err(TuneError::Machine { target, missing }) }
    }

    /// The kernel on as many panels or experts as take a few milliseconds; `None`: no matrix.
    fn probe(&self, spec: &KernelSpec, n: usize, threads: usize) -> Option<Probe> {
        let Load { matrices, rows, .. } = self.load(spec, n)?;
        let seconds = self.estimate(spec, n)?.seconds() / matrices as f64;
        let format = spec.weight_format()?;
        let layout = spec.layout(&self.isa)?;
        let bytes_of = |n: usize, k: usize| {
            crate::packed_bytes(layout, format, &[1, n, k]).and_then(|b| usize::try_from(b).ok())
        };
        let share = |whole: f64, bytes: usize| {
            (CALL * threads as f64 / whole.max(1e-9)).min(WEIGHTS as f64 / bytes.max(1) as f64)
        };
        // Output channels of one expert, fewer where it alone is more than a probe reads.
        let columns = |outputs: usize, bytes: usize| match bytes / WEIGHTS {
            0 => outputs,
            times => (outputs / (times + 1)).next_multiple_of(2 * self.isa.nr),
        };
        let mut part = spec.clone();
        match &mut part {
            KernelSpec::Linear(Linear {
                k,
                n: outputs,
                groups,
                glu,
                bias,
                residual_ld,
                x_ld,
                out_ld,
                ..
            }) => {
                let bytes = bytes_of(*outputs, *k)?;
                let panels = self.panels(spec).max(1);
                let affordable = (share(seconds, bytes) * panels as f64) as usize;
                let kept = affordable.clamp((4 * threads).min(panels), panels);
                let gated = glu.is_some();
                *groups = 1;
                *outputs = if kept < panels { kept * self.isa.nr } else { *outputs };
                let mut operands = vec![Operand::words(rows * *x_ld), Operand::words(0)];
                operands.extend(bias.then(|| Operand::words(*outputs)));
                operands.extend(residual_ld.map(|ld| Operand::words(rows * ld)));
                operands
                    .push(Operand::words(rows * (*out_ld).max(if gated { *outputs / 2 } else { *outputs })));
                let weights = (1, bytes_of(*outputs, *k)?);
                Some(Probe { spec: part, rows, operands, weights, matrices: 0, active: 0 })
            }
            KernelSpec::ExpertGateUp(ExpertGateUp {
                layout, hidden: k, inter, glu, bias, x_ld, out, ..
            }) => {
                let (k, x_ld, bias, out) = (*k, *x_ld, *bias, *out);
                let both = glu.projections() * *inter;
                let outputs = columns(both, bytes_of(both, k)?);
                let bytes = bytes_of(outputs, k)?;
                *inter = outputs / glu.projections();
                let experts = (share(seconds, bytes) as usize).clamp(1, matrices);
                let slots = experts * rows;
                *layout = DispatchLayout { rows: slots, k: 1, experts };
                let mut operands = vec![
                    Operand::words(slots * x_ld),
                    Operand::of(&dispatch(*layout, rows)),
                    Operand::words(0),
                ];
                operands.extend(bias.then(|| Operand::words(experts * outputs)));
                operands.push(Operand::words(slots * out.ld));
                let weights = (2, experts * bytes);
                Some(Probe { spec: part, rows: slots, operands, weights, matrices: experts, active: experts })
            }
            KernelSpec::ExpertDown(ExpertDown { layout, inter: k, hidden: outputs, bias, h_ld, .. }) => {
                let (k, bias, h_ld) = (*k, *bias, *h_ld);
                *outputs = columns(*outputs, bytes_of(*outputs, k)?);
                let outputs = *outputs;
                let bytes = bytes_of(outputs, k)?;
                let experts = (share(seconds, bytes) as usize).clamp(1, matrices);
                let slots = experts * rows;
                *layout = DispatchLayout { rows: slots, k: 1, experts };
                let mut operands = vec![
                    Operand::words(slots * h_ld),
                    Operand::of(&dispatch(*layout, rows)),
                    Operand::words(0),
                ];
                operands.extend(bias.then(|| Operand::words(experts * outputs)));
                operands.push(Operand::words(slots * outputs));
                let weights = (2, experts * bytes);
                Some(Probe { spec: part, rows: slots, operands, weights, matrices: experts, active: experts })
            }
            _ => None,
        }
    }
}

/// A dispatch table that gives every expert `rows` slots, whose tokens are anywhere.
fn dispatch(layout: DispatchLayout, rows: usize) -> Vec<i32> {
    let slots = layout.rows;
    let mut table = vec![0; layout.words()];
    (table[0], table[1]) = (layout.experts as i32, slots as i32);
    for e in 0..layout.experts {
        table[layout.expert() + e] = e as i32;
        table[layout.start() + e + 1] = ((e + 1) * rows) as i32;
    }
    // A step that shares no factor with the slots visits every token once.
    let step = [7, 11, 13, 17, 1].into_iter().find(|s| *s == 1 || !slots.is_multiple_of(*s)).unwrap_or(1);
    for slot in 0..slots {
        let token = slot * step % slots;
        table[layout.token() + slot] = token as i32;
        table[layout.slot() + token] = slot as i32;
    }
    table
}

pub(crate) fn median(times: &mut [f64]) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    let n = times.len();
    match n {
        0 => f64::INFINITY,
        _ if n.is_multiple_of(2) => f64::midpoint(times[n / 2 - 1], times[n / 2]),
        _ => times[n / 2],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_codegen::spec::Softmax;
    use moec_codegen::{ComputeType, RowFormat, WeightOrder, packed_words};
    use moec_device::Device;
    use moec_ir::Format;
    use moec_ir::op::{Activation, Glu};

    #[test]
    fn median_is_the_middle_value() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median(&mut []), f64::INFINITY);
    }

    #[test]
    fn dispatch_table_assigns_rows_and_slots() {
        let layout = DispatchLayout { rows: 21, k: 1, experts: 7 };
        let table = dispatch(layout, 3);
        let mut tokens: Vec<i32> = table[layout.token()..][..21].to_vec();
        tokens.sort_unstable();
        assert_eq!(tokens, (0..21).collect::<Vec<_>>());
        assert_eq!(table[layout.start()..][..8], [0, 3, 6, 9, 12, 15, 18, 21]);
    }

    #[test]
    fn only_code_for_this_cpu_is_timed() {
        let elsewhere = if cfg!(target_arch = "x86_64") { "neoverse-v2" } else { "x86-64-v3" };
        let target = CpuTarget::new(&Device::find(elsewhere).unwrap()).unwrap();
        let error = Stopwatch::new(&target, 1).unwrap_err();
        assert!(matches!(error, TuneError::Machine { .. }) && error.to_string().contains("they are for"));
    }

    /// Every kind of kernel, with odd sizes, on more threads than there are work items. Times are not tested.
    #[test]
    fn every_candidate_is_timed() {
        let target = CpuTarget::new(&Device::find("native").unwrap()).unwrap();
        let mut watch = Stopwatch::new(&target, 3).unwrap();
        let glu = Glu::Gated(Activation::Silu);
        let mut forms = vec![(Format::Bf16, ComputeType::F32), (Format::Q8, ComputeType::F32)];
        forms.extend(target.isa.bf16.then_some((Format::Bf16, ComputeType::Bf16)));
        forms.extend(
            (target.isa.bytes != moec_codegen::ByteDot::None).then_some((Format::Q4, ComputeType::I8)),
        );
        for (format, compute) in forms {
            let (layout, schedule) = (DispatchLayout { rows: 9, k: 3, experts: 5 }, Schedule::default());
            let x_ld = packed_words(56, compute);
            let linear = |groups: usize, glu: Option<Glu>, residual: bool| {
                KernelSpec::Linear(Linear {
                    k: 56,
                    n: 70,
                    format,
                    compute,
                    groups,
                    x_ld: groups * x_ld,
                    out_ld: groups * 70,
                    bias: true,
                    residual_ld: residual.then_some(groups * 70),
                    glu,
                    schedule,
                })
            };
            let gate_up = KernelSpec::ExpertGateUp(ExpertGateUp {
                layout,
                hidden: 56,
                inter: 17,
                format,
                compute,
                x_ld,
                glu,
                bias: true,
                out: RowFormat::f32(17),
                order: WeightOrder::Panels,
                schedule,
            });
            let down = KernelSpec::ExpertDown(ExpertDown {
                layout,
                inter: 17,
                hidden: 56,
                format,
                compute,
                h_ld: packed_words(17, compute),
                bias: false,
                order: WeightOrder::Panels,
                schedule,
            });
            let specs =
                [linear(1, None, true), linear(2, None, false), linear(1, Some(glu), false), gate_up, down];
            for spec in specs {
                let schedules = target.candidates(&spec, 9);
                let times = watch.time(&target, &spec, 9, &schedules, Duration::ZERO, &|| false).unwrap();
                assert_eq!(times.len(), schedules.len());
                assert!(times.iter().all(|t| t.is_finite() && *t > 0.0), "{times:?}");
            }
        }
        let spec = KernelSpec::Softmax(Softmax { cols: 8, x_ld: 8, out_ld: 8 });
        assert_eq!(watch.time(&target, &spec, 9, &[], Duration::ZERO, &|| false).unwrap(), Vec::<f64>::new());
    }

    #[test]
    fn interrupt_ends_tuning() {
        let target = CpuTarget::new(&Device::find("native").unwrap()).unwrap();
        let mut watch = Stopwatch::new(&target, 1).unwrap();
        let spec = KernelSpec::Linear(Linear {
            k: 8,
            n: 8,
            format: Format::F32,
            compute: ComputeType::F32,
            groups: 1,
            x_ld: 8,
            out_ld: 8,
            bias: false,
            residual_ld: None,
            glu: None,
            schedule: Schedule::default(),
        });
        let stopped = watch.time(&target, &spec, 1, &[Schedule::default()], Duration::MAX, &|| true);
        assert!(matches!(stopped, Err(TuneError::Stopped)));
    }
}
