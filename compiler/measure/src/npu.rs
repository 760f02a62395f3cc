//! Launches, products and bandwidth of an NPU, measured by static graphs (NPUMoE, §2 and Figure 7; Table 5).
//!
//! The backend of the unit writes graphs of experts as it does in a build: one of a single expert and one of
//! several, each for several numbers of rows. The unit, or its emulator, executes them. What a further expert
//! adds to a launch is the product; what remains of the launch of one expert is the launch. Weights are read
//! at the rate of the smallest product, alone and while the CPU reads its memory.
#![expect(clippy::cast_possible_truncation, reason = "sizes of graphs, which device files bound")]

use moec_backend::{Emit, GroupGraph, StaticGraphs};
use moec_base::error::{Error, Result};
use moec_base::tools;
use moec_bundle::artifacts;
use moec_device::{DeviceUnit, MatmulTime};
use moec_ir::op::DispatchLayout;
use moec_ir::placement::{ExpertGroup, ExpertRow, ExpertTable};
use moec_ir::plan::GraphDecl;
use moec_ir::text::parse_module;
use moec_ir::{Leaf, Module, Source};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::graphs::{Graphs, f16};
use std::ops::Range;
use std::path::Path;
use std::time::Duration;

/// Time of the runs of a graph that are measured; at least [`RUNS`] of them are.
const SPAN: Duration = Duration::from_millis(200);
/// Fewest runs of a graph that are measured.
const RUNS: usize = 5;

/// Experts that are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Channels of the residual stream.
    pub hidden: usize,
    /// Channels of an expert.
    pub inner: usize,
    /// Experts of the larger graph.
    pub experts: u32,
    /// Rows of an expert, ascending: multiples of the unit's alignment.
    pub rows: Vec<u32>,
}

impl Shape {
    /// The shape that `moec profile-device` measures on a unit: experts of OLMoE-1B-7B, four of them in a graph
    /// as in Table 5, and rows from the unit's smallest number on.
    pub fn of(unit: &DeviceUnit) -> Self {
        let align = unit.capacity_alignment.as_ref().map_or(16, |f| f.value as u32).max(16);
        let rows = [1, 2, 3, 4, 6, 8, 12, 16].map(|n| n * align.max(32)).into();
        Self { hidden: 2048, inner: 1024, experts: 4, rows }
    }

    /// Numbers of an expert's three matrices.
    fn weights(&self) -> u64 {
        3 * (self.hidden * self.inner) as u64
    }

    /// A layer of such experts.
    fn module(&self) -> Result<Module> {
        let Self { hidden, inner, experts, .. } = self;
        let layout = DispatchLayout { rows: 256, k: 1, experts: *experts as usize };
        let (table, both) = (layout.words(), 2 * inner);
        let text = format!(
            "weight @embed: f32[16, {hidden}] embeddings = t\"embed\"[16, {hidden}]\n\
             weight @router: f32[{experts}, {hidden}] exact = t\"router\"[{experts}, {hidden}]\n\
             weight @gate_up: f16[{experts}, {both}, {hidden}] experts = t\"gate_up\"[{experts}, {both}, {hidden}]\n\
             weight @down: f16[{experts}, {hidden}, {inner}] experts = t\"down\"[{experts}, {hidden}, {inner}]\n\
             weight @head: f32[16, {hidden}] embeddings = t\"head\"[16, {hidden}]\n\
             entry prefill[256] -> %13 {{\n\
             inputs %0: i32[256], %1: i32[256], %2: i32[256], %3: i32[256]\n\
             scope embed\n\
             %4: f32[256, {hidden}] = embed %0, @embed\n\
             scope layers.0.ffn\n\
             %5: f32[256, {hidden}] = rms_norm %4 {{eps = 1e-5, groups = 1}}\n\
             %6: f32[256, {experts}] = linear %5, @router\n\
             %7: i32[256, 1], %8: f32[256, 1] = router %6 {{experts = {experts}, k = 1, score = softmax, weight_from = score, renorm = sum(eps = 0.0), scale = 1.0}}\n\
             %9: i32[{table}] = dispatch %7 {{experts = {experts}}}\n\
             %10: f32[256, {hidden}] = expert_ffn %5, %9, @gate_up, @down {{glu = silu}}\n\
             %11: f32[256, {hidden}] = combine %10, %9, %8\n\
             scope head\n\
             %12: f32[256, {hidden}] = gather_rows %11, %3\n\
             %13: f32[256, 16] = linear %12, @head\n\
             }}\n"
        );
        parse_module(&text).map_err(|e| Error::bug("the measured experts are not a Graph").because(e))
    }

    /// The two groups of the experts: the first alone, and all of them.
    fn table(&self) -> ExpertTable {
        let most = self.rows.last().copied().unwrap_or(0);
        let group = |experts: u32| ExpertGroup {
            tier: 0,
            unit: 1,
            experts: (0..experts).collect(),
            sizes: self.rows.clone(),
            bytes: u64::from(experts) * 2 * self.weights(),
            cost_us: Vec::new(),
            why: String::new(),
            decode: Vec::new(),
        };
        let row = ExpertRow {
            capacity: most,
            group: 0,
            unit: 1,
            tier: Some(0),
            fallback: None,
            load: None,
            few: false,
        };
        ExpertTable {
            layer: 0,
            k: 1,
            tiers: vec![most],
            expected: None,
            groups: vec![group(1), group(self.experts)],
            experts: vec![row; self.experts as usize],
        }
    }
}

/// Clock of a measurement, and work of the CPU beside it.
pub trait Observer {
    /// Time since any fixed instant.
    fn now(&mut self) -> Duration;

    /// Runs `body` while the CPU reads its memory. Returns the 10⁹ bytes per second that it read.
    ///
    /// # Errors
    /// Those of `body`, or the CPU cannot read.
    fn beside(&mut self, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<f64>
    where
        Self: Sized;
}

/// Measured rates of a unit.
#[derive(Clone, Debug, PartialEq)]
pub struct NpuRates {
    /// Microseconds to launch a graph and to wait for it.
    pub launch_us: f64,
    /// Milliseconds of an expert by its rows, without the launch.
    pub experts: Vec<MatmulTime>,
    /// 10⁹ bytes a second of weights that the unit reads alone.
    pub gb_per_s: f64,
    /// The same while the CPU reads, and what the CPU reads then.
    pub shared_gb_per_s: [f64; 2],
}

/// Graphs of a measurement, written to a folder.
#[derive(Clone, Debug)]
pub struct Written {
    /// Declarations: of one expert by rows, then of all experts by rows.
    graphs: Vec<GraphDecl>,
}

/// Writes the graphs of a shape below `root`, as the unit's backend writes those of a build.
///
/// # Errors
/// A missing tool of the backend, with its remedy; a graph over the unit's limit; a full disk.
pub fn write(shape: &Shape, unit: &DeviceUnit, graphs: &dyn StaticGraphs, root: &Path) -> Result<Written> {
    let (module, table, cache) = (shape.module()?, shape.table(), tools::cache());
    let numbers = artifacts::numbers(&Small);
    graphs.emit(&Emit {
        module: &module,
        unit,
        groups: &[(&table, 0), (&table, 1)],
        parts: &[],
        hot: &[],
        numbers: &numbers,
        root,
        tools: tools::beside(&cache),
        next: &|_| moec_base::interrupt::check(),
    })?;
    let of =
        |group: usize| graphs.group(&module, &table, group).into_iter().map(|GroupGraph { graph, .. }| graph);
    Ok(Written { graphs: of(0).chain(of(1)).collect() })
}

/// Measures the graphs of `root` on an executor of the unit. `name` is the device in sources.
///
/// # Errors
/// A graph that does not load or run; times from which no product follows, since a larger graph was faster.
pub fn measure<O: Observer>(
    shape: &Shape,
    written: &Written,
    root: &Path,
    unit: &mut dyn Graphs,
    observer: &mut O,
    name: &str,
) -> Result<NpuRates> {
    unit.load(&BundleReader::unchecked(root), &written.graphs, 1).map_err(Error::from)?;
    let mut calls: Vec<Call> = written.graphs.iter().map(Call::new).collect();
    let seconds: Vec<f64> = calls
        .iter_mut()
        .enumerate()
        .map(|(graph, call)| call.seconds(graph, unit, observer))
        .collect::<Result<_>>()?;
    let (one, all) = seconds.split_at(shape.rows.len());
    let more = f64::from(shape.experts) - 1.0;
    let each: Vec<f64> = one.iter().zip(all).map(|(one, all)| (all - one) / more).collect();
    if let Some(at) = each.iter().position(|s| s.is_nan() || *s <= 0.0) {
        return Err(Error::environment(format!(
            "the times of `{name}` are unusable: {} experts of {} rows were not slower than one",
            shape.experts, shape.rows[at]
        ))
        .hint("end other programs, and measure again"));
    }
    let mut launches: Vec<f64> = one.iter().zip(&each).map(|(one, each)| (one - each).max(0.0)).collect();
    launches.sort_by(f64::total_cmp);
    let launch = launches.get(launches.len() / 2).copied().unwrap_or(0.0);
    let source = format!(
        "measured by `moec profile-device`, {name}, {}: what {} experts of {} by {} take more than one",
        unit.name(),
        shape.experts,
        shape.hidden,
        shape.inner
    );
    let experts = shape.rows.iter().zip(&each).map(|(&rows, seconds)| MatmulTime {
        rows,
        weights: shape.weights(),
        ms: seconds * 1e3,
        source: source.clone(),
    });
    // The fewest rows of all experts: most of it is the reading of weights.
    let bytes = 2.0 * shape.weights() as f64 * f64::from(shape.experts);
    let graph = shape.rows.len();
    let rate = |seconds: f64| bytes / (seconds - launch).max(1e-9) / 1e9;
    let call = calls.get_mut(graph).ok_or_else(|| Error::bug("no graph of all experts"))?;
    let mut beside = 0.0;
    let read = observer.beside(&mut |observer| {
        beside = call.seconds(graph, unit, observer)?;
        Ok(())
    })?;
    Ok(NpuRates {
        launch_us: launch * 1e6,
        experts: experts.collect(),
        gb_per_s: rate(all.first().copied().unwrap_or(0.0)),
        shared_gb_per_s: [rate(beside), read],
    })
}

/// Memory of a graph's call.
struct Call {
    inputs: Vec<Vec<f16>>,
    outputs: Vec<Vec<f16>>,
}

impl Call {
    fn new(graph: &GraphDecl) -> Self {
        let row = |n: usize| (0..n).map(|i| f16::from_f32(((i * 37 % 61) as f32 - 30.0) / 64.0)).collect();
        Self {
            inputs: graph.inputs.iter().map(|t| row(t.elements())).collect(),
            outputs: graph.outputs.iter().map(|t| vec![f16::ZERO; t.elements()]).collect(),
        }
    }

    fn run(&mut self, graph: usize, unit: &dyn Graphs) -> Result<()> {
        let inputs: Vec<&[f16]> = self.inputs.iter().map(Vec::as_slice).collect();
        let mut outputs: Vec<&mut [f16]> = self.outputs.iter_mut().map(Vec::as_mut_slice).collect();
        unit.run(graph, 0, &inputs, &mut outputs).map_err(Error::from)
    }

    /// Median of the seconds of a run, after one that does not count.
    fn seconds<O: Observer>(&mut self, graph: usize, unit: &dyn Graphs, observer: &mut O) -> Result<f64> {
        self.run(graph, unit)?;
        let begin = observer.now();
        let (mut runs, mut last) = (Vec::new(), begin);
        while runs.len() < RUNS || last.saturating_sub(begin) < SPAN {
            moec_base::interrupt::check()?;
            self.run(graph, unit)?;
            let now = observer.now();
            runs.push(now.saturating_sub(last).as_secs_f64());
            last = now;
        }
        runs.sort_by(f64::total_cmp);
        Ok(runs.get(runs.len() / 2).copied().unwrap_or(0.0))
    }
}

/// Small numbers of either sign that differ from their neighbours: zeros would take less power, and equal
/// experts less memory.
struct Small;

impl Source for Small {
    fn read(
        &self,
        _: &Leaf,
        matrix: usize,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut [f32],
    ) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let width = cols.len().max(1);
        for (at, x) in out.iter_mut().enumerate() {
            let place = (matrix << 40) + ((rows.start + at / width) << 20) + cols.start + at % width;
            let bits = (place as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
            *x = (bits as f32 / (1 << 24) as f32 - 0.5) / 16.0;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test fails by panicking")]

    use super::*;
    use moec_ir::plan::GraphTensor;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    const LAUNCH_NS: u64 = 1_830_000;
    const WEIGHTS_NS: u64 = 400_000;
    const ROW_NS: u64 = 31_000;
    const CPU_GB_PER_S: f64 = 50.0;

    /// Nanoseconds, and what a run takes longer while the CPU reads.
    #[derive(Clone, Default)]
    struct Clock {
        ns: Arc<AtomicU64>,
        slower: Arc<AtomicU64>,
    }

    impl Observer for Clock {
        fn now(&mut self) -> Duration {
            Duration::from_nanos(self.ns.load(Ordering::Relaxed))
        }

        fn beside(&mut self, body: &mut dyn FnMut(&mut Self) -> Result<()>) -> Result<f64> {
            self.slower.store(2 * WEIGHTS_NS, Ordering::Relaxed);
            body(self)?;
            Ok(CPU_GB_PER_S)
        }
    }

    /// A unit of a known launch and known products: each expert takes its weights and its rows.
    #[derive(Default)]
    struct Known {
        clock: Clock,
        /// Experts and rows of each graph.
        graphs: Vec<[u64; 2]>,
        /// Whether one expert takes as long as several.
        flat: bool,
    }

    impl Graphs for Known {
        fn name(&self) -> &'static str {
            "known times"
        }

        fn load(&mut self, _: &BundleReader, graphs: &[GraphDecl], _: usize) -> moec_runtime::Result<()> {
            let of = |g: &GraphDecl| {
                let rows: u64 = g.function.trim_start_matches("cap").parse().unwrap();
                [u64::from(g.inputs[0].shape[0]) / rows, rows]
            };
            self.graphs = graphs.iter().map(of).collect();
            Ok(())
        }

        fn run(
            &self,
            graph: usize,
            _: usize,
            _: &[&[f16]],
            _: &mut [&mut [f16]],
        ) -> moec_runtime::Result<()> {
            let [experts, rows] = self.graphs[graph];
            let experts = if self.flat { 1 } else { experts };
            let expert = WEIGHTS_NS + rows * ROW_NS + self.clock.slower.load(Ordering::Relaxed);
            self.clock.ns.fetch_add(LAUNCH_NS + experts * expert, Ordering::Relaxed);
            Ok(())
        }
    }

    fn shape() -> Shape {
        Shape { hidden: 64, inner: 32, experts: 4, rows: vec![32, 64, 256] }
    }

    fn declared(shape: &Shape) -> Written {
        let graph = |experts: u32, rows: u32| {
            let tensor = |name: &str| GraphTensor {
                name: name.to_owned(),
                shape: [experts * rows, shape.hidden as u32, 1, 1],
            };
            GraphDecl {
                package: format!("group{experts}"),
                function: format!("cap{rows}"),
                inputs: vec![tensor("x")],
                outputs: vec![tensor("y")],
                stateful: false,
            }
        };
        let of = |experts| shape.rows.iter().map(move |&rows| graph(experts, rows));
        Written { graphs: of(1).chain(of(shape.experts)).collect() }
    }

    #[test]
    fn known_launch_and_rates_are_recovered() {
        let (shape, mut clock) = (shape(), Clock::default());
        let mut unit = Known { clock: clock.clone(), ..Known::default() };
        let found =
            measure(&shape, &declared(&shape), Path::new("none"), &mut unit, &mut clock, "a device").unwrap();
        let near = |found: f64, known: f64| (found / known - 1.0).abs() < 1e-6;
        assert!(near(found.launch_us, LAUNCH_NS as f64 / 1e3), "{found:?}");
        for (entry, rows) in found.experts.iter().zip(&shape.rows) {
            let ns = WEIGHTS_NS + u64::from(*rows) * ROW_NS;
            assert_eq!((entry.rows, entry.weights), (*rows, 3 * 64 * 32));
            assert!(near(entry.ms, ns as f64 / 1e6), "{entry:?}");
            assert!(entry.source.starts_with("measured by `moec profile-device`, a device, known times"));
        }
        // Four experts of 32 rows, alone and while the CPU reads.
        let expert = WEIGHTS_NS + 32 * ROW_NS;
        let bytes = (2 * 3 * 64 * 32) as f64;
        assert!(near(found.gb_per_s, bytes / expert as f64), "{found:?}");
        assert!(near(found.shared_gb_per_s[0], bytes / (expert + 2 * WEIGHTS_NS) as f64), "{found:?}");
        assert_eq!(found.shared_gb_per_s[1], CPU_GB_PER_S, "{found:?}");
    }

    #[test]
    fn times_without_a_product_are_refused() {
        let (shape, mut clock) = (shape(), Clock::default());
        let mut unit = Known { clock: clock.clone(), flat: true, ..Known::default() };
        let e = measure(&shape, &declared(&shape), Path::new("none"), &mut unit, &mut clock, "a device")
            .unwrap_err();
        assert!(e.to_string().contains("4 experts of 32 rows were not slower than one"), "{e}");
    }

    #[test]
    fn measured_layer_is_a_graph() {
        let module = shape().module().unwrap();
        moec_ir::verify::module(&module).unwrap();
        assert_eq!(shape().table().groups.iter().map(|g| g.experts.len()).collect::<Vec<_>>(), [1, 4]);
    }
}
