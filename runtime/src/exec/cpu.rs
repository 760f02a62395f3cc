//! The CPU that runs the program: kernels and builtins, on threads that walk together.

use crate::bundle::program::{Code, Program};
use crate::exec::builtin::{self, ExpertOrder};
use crate::exec::capacity_limit::{CapacityLimit, SetCounters};
use crate::exec::clusters::ClusterQueue;
use crate::exec::unit::{
    BadExpert, ComputeUnit, Launch, PoolThread, StepFault, UnknownStep, kernel, kernel_items,
};
use crate::offload::paging::AnyPager;
use crate::platform::memory::Addr;
use crate::schedule::cached::dispatcher::RowScores;
use crate::schedule::dispatch::Assigner;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{Builtin, ExpertLayer};
use std::sync::Arc;

/// The CPU. Its steps also call the pager, for experts on disk, and the capacity limit, for static
/// capacities.
#[derive(Default)]
pub(crate) struct CpuUnit<'p> {
    layers: &'p [ExpertLayer],
    capacity_limit: CapacityLimit<'p>,
    /// Pager of experts on disk; `None` if all weights are in memory.
    pager: Option<AnyPager>,
    /// Clusters of neurons, if all weights are in memory.
    clusters: ClusterQueue,
    /// Dispatcher of experts, if several units can run them.
    assigner: Option<Arc<Assigner>>,
}

impl<'p> CpuUnit<'p> {
    /// Executor of steps that compute, on experts on disk if there is a pager.
    pub(crate) fn paged(pager: Option<AnyPager>) -> Self {
        Self { pager, ..Self::default() }
    }

    /// Executor of the steps of a program.
    pub(crate) fn new(
        program: &'p Program,
        pager: Option<AnyPager>,
        counters: Arc<SetCounters>,
        assigner: Option<Arc<Assigner>>,
    ) -> Self {
        let capacity_limit = CapacityLimit::new(&program.expert_sets, counters);
        Self {
            layers: &program.experts.layers,
            capacity_limit,
            pager,
            clusters: ClusterQueue::default(),
            assigner,
        }
    }
}

impl ComputeUnit for CpuUnit<'_> {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn executes(&self, builtin: Builtin) -> bool {
        match builtin {
            Builtin::RopeAngles { .. }
            | Builtin::Dispatch { .. }
            | Builtin::RequestExperts { .. }
            | Builtin::RequestNeurons { .. }
            | Builtin::LimitCapacity { .. } => true,
            Builtin::Experts { .. }
            | Builtin::Streams { .. }
            | Builtin::Launch { .. }
            | Builtin::Subgraph { .. }
            | Builtin::Copy { .. } => false,
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        match (launch.code, launch.layer_part, &self.pager) {
            (Code::Kernel(f), Some(layer_part), Some(pager)) => {
                pager.run(layer_part, launch, thread, &|begin, end| {
                    // SAFETY: the caller's promise, for the kernel's items.
                    unsafe { kernel_items(f, launch, thread, begin, end) };
                });
            }
            (Code::Kernel(f), _, None) if launch.grid.has_clusters() => {
                // SAFETY: the caller's promise; the verifier has found the dispatch table there.
                unsafe {
                    self.clusters.run(launch, thread, &|begin, end| {
                        kernel_items(f, launch, thread, begin, end);
                    });
                }
            }
            // SAFETY: the caller's promise is what these require.
            (Code::Kernel(f), ..) => unsafe { kernel(f, launch, thread) },
            (Code::Builtin(b), ..) => {
                if thread.index == 0 {
                    // SAFETY: as above; this is the only thread that runs it.
                    unsafe { self.builtin(b, launch, thread) };
                }
            }
        }
    }
}

impl CpuUnit<'_> {
    /// Runs a builtin on the calling thread.
    ///
    /// # Safety
    /// As [`ComputeUnit::submit`], and no other thread runs it.
    unsafe fn builtin(&self, b: Builtin, launch: &Launch<'_>, thread: PoolThread) {
        let (args, n) = (launch.args, launch.n);
        match (b, args) {
            (Builtin::RopeAngles { half, scale, long }, [pos, freqs @ .., out]) => {
                let half = half as usize;
                // SAFETY: the verifier has found `n` positions, `half` frequencies in each table and
                // `n · 2 · half` results there. They are aligned, and the results apart from the others.
                let (pos, out) = unsafe {
                    (
                        std::slice::from_raw_parts(pos.of::<i32>(), n),
                        std::slice::from_raw_parts_mut(out.of::<f32>(), n * 2 * half),
                    )
                };
                // SAFETY: as above.
                let table = |at: &Addr| unsafe { std::slice::from_raw_parts(at.of::<f32>(), half) };
                for (&pos, row) in pos.iter().zip(out.chunks_exact_mut((2 * half).max(1))) {
                    let length = launch.seq_len.max(usize::try_from(pos).map_or(0, |p| p + 1));
                    let (freq, scale) = match (long, freqs) {
                        (Some((after, long_scale)), [_, long]) if length > after as usize => {
                            (long, long_scale)
                        }
                        (_, [short, ..]) => (short, scale),
                        (_, []) => return,
                    };
                    builtin::rope_angles(pos, table(freq), f32::from_bits(scale), row);
                }
            }
            (Builtin::Dispatch { rows, k, experts, partial, candidates }, [ids, out, units @ ..]) => {
                let layout = DispatchLayout { rows: rows as usize, k: k as usize, experts: experts as usize };
                // SAFETY: the verifier has found the ids of all rows and the whole table there, aligned and
                // apart.
                let (ids, out) = unsafe {
                    (
                        std::slice::from_raw_parts(ids.of::<i32>(), layout.rows * layout.k),
                        std::slice::from_raw_parts_mut(out.of::<i32>(), layout.words()),
                    )
                };
                let mut divide = |of: ExpertOrder<'_>| {
                    if let Err(expert) = builtin::dispatch(layout, n, partial, of, ids, out) {
                        launch.fail(StepFault::Expert(BadExpert { step: launch.step, expert, experts }));
                    }
                    for (unit, own) in units.iter().enumerate() {
                        // SAFETY: as above.
                        let own = unsafe { std::slice::from_raw_parts_mut(own.of::<i32>(), layout.words()) };
                        builtin::of_unit(layout, of.units, unit as u32, out, own);
                    }
                };
                let layer = candidates.map(|c| c.layer as usize);
                if let (Some(assigner), Some(layer)) = (self.assigner.as_deref(), layer) {
                    let chosen = &ids[..n.min(layout.rows) * layout.k];
                    let fail = |fault| launch.fail(fault);
                    // SAFETY: only this thread is here. Steps that read experts of this layer wait for this
                    // step, and those of the next layer wait for them.
                    unsafe {
                        // A decoding call has no length.
                        let prompt = launch.seq_len > 0;
                        let units = launch.units;
                        assigner.dispatch(layer, (chosen, layout.k), prompt, units, &fail, &mut divide);
                    }
                } else {
                    let layer = layer.and_then(|l| self.layers.get(l));
                    let units = layer.map_or(&[][..], |l| l.starts.as_slice());
                    divide(ExpertOrder { units, ranks: &[] });
                }
                // A decoding call has no length. The number of active experts is the table's first word.
                if let (0, Some(&active)) = (launch.seq_len, out.first()) {
                    self.capacity_limit.counters.decode(u64::try_from(active).unwrap_or(0));
                }
            }
            (Builtin::RequestExperts { layer, rows, k, strides }, _) => {
                let [layer, rows, k] = [layer, rows, k].map(|n| n as usize);
                let assigner = self.assigner.as_deref();
                // If all weights are in memory there is nothing to fetch.
                if let Some(AnyPager::Experts(pager)) = &self.pager {
                    // SAFETY: the caller's promise; this is the only thread that runs it.
                    let request = |accelerator_experts: &[i32]| unsafe {
                        pager.request(launch, thread, layer, [rows, k], &strides, accelerator_experts);
                    };
                    assigner.map_or_else(|| request(&[]), |a| a.accelerator_experts(request));
                }
                if let Some((assigner, experts)) = assigner.and_then(|a| Some((a, a.experts(layer)?))) {
                    // SAFETY: the verifier has found `n` rows of `experts` scores for every layer that is
                    // scored.
                    let logits =
                        |i: usize, row: usize| unsafe { builtin::scores(launch, &strides, i, row, experts) };
                    let scores = RowScores { rows: n, layers: args.len() - 1, logits: &logits };
                    let fail = |fault| launch.fail(fault);
                    // SAFETY: the caller's promise; only this thread comes here.
                    unsafe { assigner.predict(scores, launch.units, &fail) };
                }
            }
            (Builtin::RequestNeurons { layer, rows, k }, _) => {
                if let Some(AnyPager::Neurons(pager)) = &self.pager {
                    let [layer, rows, k] = [layer, rows, k].map(|n| n as usize);
                    // SAFETY: as above.
                    unsafe { pager.request_neurons(launch, thread, layer, [rows, k]) };
                }
            }
            (Builtin::LimitCapacity { set, k, channels }, &[ids, added, stay, rest]) => {
                let shape = [set, k, channels].map(|n| n as usize);
                // SAFETY: as above.
                unsafe { self.capacity_limit.run(launch, shape, [ids, added, stay, rest]) };
            }
            (builtin, _) => {
                launch.fail(StepFault::Unknown(UnknownStep {
                    unit: self.name(),
                    step: launch.step,
                    builtin,
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exec::unit::Units;
    use crate::platform::memory::Region;
    use moec_ir::plan::{self, Grid};
    use std::sync::OnceLock;
    use std::sync::atomic::AtomicUsize;

    fn launch<'a>(
        b: Builtin,
        args: &'a [Addr],
        n: usize,
        seq_len: usize,
        taken: &'a AtomicUsize,
    ) -> Launch<'a> {
        static FAULT: OnceLock<StepFault> = OnceLock::new();
        Launch {
            code: Code::Builtin(b),
            args,
            grid: Grid::One,
            n,
            seq_len,
            taken,
            step: 0,
            layer_part: None,
            fault: &FAULT,
            units: Units::default(),
        }
    }

    /// A unit executes the builtins that it claims; for the rest it reports a fault.
    #[test]
    fn builtin_unsupported_by_the_cpu_is_a_fault() {
        let region = Region::new("test", 512).unwrap();
        let strides = [0; plan::MAX_REQUEST_SCORES];
        for (builtin, known) in [
            (Builtin::RopeAngles { half: 1, scale: 0, long: None }, true),
            (Builtin::Dispatch { rows: 1, k: 1, experts: 1, partial: false, candidates: None }, true),
            (Builtin::RequestExperts { layer: 0, rows: 1, k: 1, strides }, true),
            (Builtin::RequestNeurons { layer: 0, rows: 1, k: 1 }, true),
            (Builtin::Copy { words: 1, span: plan::Span::Whole }, false),
            (Builtin::Experts { set: 0, rows: 1, k: 1, hidden: 1 }, false),
            (Builtin::Streams { set: 0, rows: 1, k: 1 }, false),
            (Builtin::Launch { kernel: 0 }, false),
            (Builtin::Subgraph { subgraph: 0 }, false),
        ] {
            let (taken, fault) = (AtomicUsize::new(0), OnceLock::new());
            let args = [0, 1, 2, 3].map(|i| region.base().plus(128 * i));
            let args = match builtin {
                Builtin::RopeAngles { .. } => &args[..3],
                Builtin::Dispatch { .. } => &args[..2],
                _ => &args[..],
            };
            let launch = Launch { step: 7, fault: &fault, ..launch(builtin, args, 1, 1, &taken) };
            // SAFETY: each argument has more room than one row needs; this is the only thread.
            unsafe {
                CpuUnit::default().submit(&launch, PoolThread { index: 0, of: 1, scratch: region.base() });
            };
            let unknown =
                matches!(fault.get(), Some(StepFault::Unknown(f)) if f.step == 7 && f.builtin == builtin);
            assert_eq!((CpuUnit::default().executes(builtin), unknown), (known, !known), "{builtin}");
        }
    }

    #[test]
    fn long_sequences_use_the_long_frequencies() {
        let region = Region::new("test", 512).unwrap();
        let at = |i: usize| region.base().plus(64 * i);
        // SAFETY: the region has room for all of them, and nothing else uses it.
        unsafe {
            at(0).of::<i32>().write(2);
            at(1).of::<f32>().write(1.0);
            at(2).of::<f32>().write(0.25);
        }
        let angles = |scale: f32, long: Option<(u32, u32)>, args: &[Addr], seq_len| {
            let b = Builtin::RopeAngles { half: 1, scale: scale.to_bits(), long };
            let taken = AtomicUsize::new(0);
            // SAFETY: one position, one frequency each and two results are there; this is the only thread.
            unsafe {
                let thread = PoolThread { index: 0, of: 1, scratch: at(7) };
                CpuUnit::default().submit(&launch(b, args, 1, seq_len, &taken), thread);
                [at(3).of::<f32>().read(), at(3).of::<f32>().add(1).read()]
            }
        };
        let switch = Some((10, 3f32.to_bits()));
        let all = [at(0), at(1), at(2), at(3)];
        assert_eq!(angles(2.0, None, &[at(0), at(1), at(3)], 99), [2f32.cos() * 2.0, 2f32.sin() * 2.0]);
        assert_eq!(angles(2.0, switch, &all, 10), [2f32.cos() * 2.0, 2f32.sin() * 2.0]);
        assert_eq!(angles(2.0, switch, &all, 11), [0.5f32.cos() * 3.0, 0.5f32.sin() * 3.0]);
    }

    /// Counts the calls of each item in the buffer.
    unsafe extern "C" fn count(args: *const *mut u8, n: i64, begin: i64, end: i64, _scratch: *mut u8) {
        assert!(n == 5 && begin < end);
        for i in begin..end {
            // SAFETY: the test's table has a word per item after its first.
            unsafe { *Addr::read_only(*args).of::<i32>().add(1 + i as usize) += 1 };
        }
    }

    #[test]
    fn threads_share_all_items_and_each_runs_once() {
        let grids = [
            (Grid::One, 1),
            (Grid::Tiles { rows: 2, tiles: 7 }, 21),
            (Grid::Tiles { rows: 16, tiles: 1 }, 1),
            (Grid::Tiles { rows: 1, tiles: 0 }, 0),
            (Grid::Experts { table: 0, tiles: 9 }, 27),
        ];
        for (grid, items) in grids {
            for of in [1, 2, 3, 40] {
                let region = Region::new("test", 400).unwrap();
                let (taken, fault) = (AtomicUsize::new(0), OnceLock::new());
                let args = [region.base()];
                // SAFETY: only the test uses the region.
                unsafe { args[0].of::<i32>().write(3) };
                let code = Code::Kernel(count);
                let launch = Launch {
                    code,
                    args: &args,
                    grid,
                    n: 5,
                    seq_len: 5,
                    taken: &taken,
                    step: 0,
                    layer_part: None,
                    fault: &fault,
                    units: Units::default(),
                };
                for index in 0..of {
                    // SAFETY: the threads come one after the other.
                    unsafe {
                        CpuUnit::default().submit(&launch, PoolThread { index, of, scratch: region.base() });
                    };
                }
                // SAFETY: as above.
                let seen = unsafe { std::slice::from_raw_parts(args[0].of::<i32>().add(1), 99) };
                let expected: Vec<i32> = (0..99).map(|i| i32::from(i < items)).collect();
                assert_eq!(seen, expected, "{grid:?} on {of}");
            }
        }
    }
}
