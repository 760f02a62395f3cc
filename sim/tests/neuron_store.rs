//! Tests of neurons on disk: results equal those of whole matrices for any memory and threads, and no
//! unneeded byte is read.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

use moec_runtime::offload::disk::{
    Buffers, Choice, Disk, FileEntry, Options, Read, SystemClock, ThreadedDisk,
};
use moec_runtime::offload::neurons::Shape;
use moec_runtime::{Error, Result};
use moec_sim::disk::fault::{Faulty, Gate, Injected};
use moec_sim::neuron_store::{Memory, NeuronCompute, NeuronStore, Row, Work, classes, extents};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use tempfile::TempDir;

/// Numbers of a row: 4096 bytes in f32.
const HIDDEN: usize = 1024;
const NEURONS: u32 = 24;
const TWO_READS: Shape = Shape { matrices: 4, neurons: NEURONS, cluster: 5, gate: 4096, up_down: 8192 };
const ONE_READ: Shape = Shape { gate: 3 * 4096, up_down: 0, ..TWO_READS };

/// A file of bundles in f32, in which no row is zero.
struct Model {
    dir: TempDir,
    numbers: Vec<f32>,
}

impl Model {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut state = 7_u32;
        let count = (TWO_READS.matrices * NEURONS) as usize * 3 * HIDDEN;
        let draw = |_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        let numbers: Vec<f32> = (0..count).map(draw).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        std::fs::write(dir.path().join("neurons"), bytes).unwrap();
        Self { dir, numbers }
    }

    fn store(&self, shape: Shape, memory: Memory, reader: Choice) -> NeuronStore {
        self.with(shape, memory, reader, |_| Injected::Nothing)
    }

    fn with(
        &self,
        shape: Shape,
        memory: Memory,
        reader: Choice,
        plan: impl FnMut(&Read) -> Injected + Send + 'static,
    ) -> NeuronStore {
        let path: PathBuf = self.dir.path().join("neurons");
        let file = FileEntry { path, bytes: 4 * self.numbers.len() as u64, cached: false, identity: None };
        let table = Arc::new(extents(file, 0, shape).unwrap());
        let buffers = Buffers::new(&classes(shape, memory)).unwrap();
        let options = Options { reader, retries: 0, ..Options::default() };
        let clock = Arc::new(SystemClock::default());
        let wrap = |inner| Box::new(Faulty::new(inner, Gate::default(), plan)) as _;
        let disk = ThreadedDisk::with_reader(table, buffers, &options, clock, wrap).unwrap();
        NeuronStore::new(disk, shape, memory).unwrap()
    }

    fn row(&self, matrix: u32, neuron: u32, part: usize) -> &[f32] {
        let at = ((matrix * NEURONS + neuron) as usize * 3 + part) * HIDDEN;
        &self.numbers[at..at + HIDDEN]
    }

    /// Results of whole matrices, summed in the order of clusters; and the number of active neurons.
    fn dense(&self, matrices: &[u32], x: &[f32]) -> (Vec<f32>, u64) {
        let (mut y, mut active) = (vec![0.0; HIDDEN], 0);
        for &matrix in matrices {
            for cluster in (0..NEURONS).collect::<Vec<_>>().chunks(TWO_READS.cluster as usize) {
                let mut sum = vec![0.0; HIDDEN];
                for &n in cluster {
                    let [gate, up, down] = [0, 1, 2].map(|part| self.row(matrix, n, part));
                    let gate = dot(gate, x);
                    active += u64::from(gate > 0.0);
                    add(&mut sum, gate.max(0.0) * dot(up, x), down);
                }
                add(&mut y, 1.0, &sum);
            }
        }
        (y, active)
    }
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(y: &mut [f32], by: f32, x: &[f32]) {
    y.iter_mut().zip(x).for_each(|(y, x)| *y += by * x);
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Computes ReLU networks; the sums of clusters are added only at the end.
struct Relu<'a> {
    x: &'a [f32],
    /// Sums by position and cluster.
    sums: Vec<Mutex<Vec<f32>>>,
    clusters: usize,
    /// For neurons in one read: the model that selects the active ones, as a perfect predictor would.
    oracle: Option<&'a Model>,
}

impl<'a> Relu<'a> {
    fn new(x: &'a [f32], shape: Shape, matrices: usize, oracle: Option<&'a Model>) -> Self {
        let clusters = shape.clusters() as usize;
        let sums = (0..matrices * clusters).map(|_| Mutex::new(vec![0.0; HIDDEN])).collect();
        Self { x, sums, clusters, oracle }
    }

    fn result(&self) -> Vec<f32> {
        let mut y = vec![0.0; HIDDEN];
        self.sums.iter().for_each(|sum| add(&mut y, 1.0, &sum.lock().unwrap()));
        y
    }
}

impl NeuronCompute for Relu<'_> {
    fn predict(&self, work: Work, neurons: &mut Vec<u32>) {
        if let Some(model) = self.oracle {
            neurons.retain(|&n| dot(model.row(work.matrix, n, 0), self.x) > 0.0);
        }
    }

    fn gate(&self, _: Work, rows: &[Row<'_>], active: &mut Vec<u32>) {
        let is = |r: &&Row<'_>| dot(&numbers(r.gate)[..HIDDEN], self.x) > 0.0;
        active.extend(rows.iter().filter(is).map(|r| r.neuron));
    }

    fn up_down(&self, work: Work, rows: &[Row<'_>]) {
        let mut sum = self.sums[work.place * self.clusters + work.cluster as usize].lock().unwrap();
        for row in rows {
            let (gate, up_down) = (numbers(row.gate), numbers(row.up_down));
            let (gate, up_down) =
                if up_down.is_empty() { gate.split_at(HIDDEN) } else { (&gate[..], &up_down[..]) };
            let (up, down) = up_down.split_at(HIDDEN);
            add(&mut sum, dot(gate, self.x) * dot(up, self.x), down);
        }
    }
}

/// Executes a step with this many threads.
fn step(store: &NeuronStore, compute: &dyn NeuronCompute, matrices: &[u32], threads: usize) -> Result<()> {
    store.begin(matrices)?;
    std::thread::scope(|scope| {
        let work: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || store.work(thread, compute))).collect();
        work.into_iter().try_for_each(|w| w.join().unwrap())
    })
}

fn inputs() -> Vec<Vec<f32>> {
    let x = |t: usize| (0..HIDDEN).map(|i| ((i * (t + 3) + t) % 17) as f32 / 8.0 - 1.0).collect();
    (0..6).map(x).collect()
}

const ROUTED: [&[u32]; 6] = [&[0, 2], &[3], &[2, 0, 1], &[0, 3], &[1, 2], &[3, 2, 1, 0]];

#[test]
fn neuron_store_matches_whole_matrices_at_any_memory() {
    let model = Model::new();
    let inputs = inputs();
    for (gates, up_down) in [(1 << 20, 1 << 20), (30 * 4096, 9 * 8192), (4096, 0), (0, 0)] {
        for (threads, reader) in [(1, Choice::Threads), (3, Choice::Auto)] {
            let store = model.store(TWO_READS, Memory { gates, up_down }, reader);
            for (x, matrices) in inputs.iter().zip(ROUTED) {
                let compute = Relu::new(x, TWO_READS, matrices.len(), None);
                step(&store, &compute, matrices, threads).unwrap();
                let want = model.dense(matrices, x).0;
                assert_eq!(compute.result(), want, "{gates} {up_down} {threads}");
            }
            let [gate, up_down] = store.counts();
            assert_eq!(store.disk().stats().bytes, gate.read + up_down.read);
        }
    }
}

#[test]
fn gates_and_active_neurons_are_read_once_if_memory_allows() {
    let model = Model::new();
    let store = model.store(TWO_READS, Memory { gates: 1 << 20, up_down: 1 << 20 }, Choice::Auto);
    let inputs = inputs();
    let x = &inputs[0];
    let active = model.dense(&[0, 1], x).1;
    assert!(active > 5 && active < 43);
    for _ in 0..2 {
        let compute = Relu::new(x, TWO_READS, 2, None);
        step(&store, &compute, &[0, 1], 2).unwrap();
        let [gate, up_down] = store.counts();
        assert_eq!((gate.read, up_down.read), (2 * u64::from(NEURONS) * 4096, active * 8192));
    }
}

#[test]
fn predicted_inactive_single_read_neurons_are_skipped() {
    let model = Model::new();
    let inputs = inputs();
    for gates in [1 << 20, 0] {
        let store = model.store(ONE_READ, Memory { gates, up_down: 0 }, Choice::Auto);
        let compute = Relu::new(&inputs[1], ONE_READ, 2, Some(&model));
        step(&store, &compute, &[3, 1], 2).unwrap();
        let (want, active) = model.dense(&[3, 1], &inputs[1]);
        assert_eq!((compute.result(), store.counts()[0].read), (want, active * 3 * 4096));
        assert_eq!(store.counts()[1].requests, 0);
    }
}

#[test]
fn failed_read_ends_the_step_and_the_next_starts_afresh() {
    let model = Model::new();
    let reads = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&reads);
    let fail = move |_: &_| match counted.fetch_add(1, Ordering::Relaxed) {
        20 => Injected::Error(libc::EIO),
        _ => Injected::Nothing,
    };
    let store = model.with(TWO_READS, Memory { gates: 1 << 20, up_down: 1 << 20 }, Choice::Threads, fail);
    let inputs = inputs();
    let compute = Relu::new(&inputs[2], TWO_READS, 2, None);
    let error = step(&store, &compute, &[0, 1], 3).unwrap_err();
    assert!(matches!(&error, Error::Read(e) if e.path.ends_with("neurons")), "{error}");
    let compute = Relu::new(&inputs[2], TWO_READS, 2, None);
    step(&store, &compute, &[0, 1], 3).unwrap();
    assert_eq!(compute.result(), model.dense(&[0, 1], &inputs[2]).0);
}

#[test]
fn mismatched_neuron_store_inputs_are_rejected() {
    let model = Model::new();
    let file =
        |bytes| FileEntry { path: model.dir.path().join("neurons"), bytes, cached: false, identity: None };
    assert!(extents(file(1 << 20), 0, TWO_READS).is_err());
    assert!(extents(file(u64::MAX), 0, Shape { gate: 100, ..TWO_READS }).is_err());
    assert!(extents(file(u64::MAX), u64::MAX, TWO_READS).is_err());
    let store = model.store(TWO_READS, Memory { gates: 0, up_down: 0 }, Choice::Threads);
    assert!(store.begin(&[4]).is_err() && store.begin(&[1, 1]).is_err());
    store.begin(&[1]).unwrap();
    assert!(store.begin(&[1]).is_err());
}
