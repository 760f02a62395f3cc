//! Tokens per second and bytes per token of experts from disk on this host: whole, by neurons in two reads,
//! and by neurons in one read with a predictor that makes no error. One layer of bf16 experts of OLMoE's
//! width, half of them in memory.
//!
//! Activity is synthetic (zeros, skew and persistence of `docs/neuron-cache.md`); reads and arithmetic are
//! real. The three variants alternate token by token, so that other load on the host affects all of them.
//!
//! `cargo run -p moec-sim --example neurons -- FOLDER [THREADS]`
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::print_stdout)]

use moec_runtime::offload::disk::{Buffers, Disk, FileEntry, Options, SystemClock, ThreadedDisk};
use moec_runtime::offload::neurons::Shape;
use moec_sim::disk::measure::Scratch;
use moec_sim::neuron_store::{Memory, NeuronCompute, NeuronStore, Row, Work, classes, extents};
use moec_sim::neurons::synthetic::Recipe;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

const HIDDEN: usize = 2048;
/// Bytes of a row in bf16.
const ROW: u64 = 2 * HIDDEN as u64;
const NEURONS: u32 = 1024;
const EXPERTS: u32 = 16;
/// Number of tokens, and number of those that fill the memory.
const TOKENS: u32 = 160;
const WARM: usize = 96;

/// The active neurons of a token, by position of the expert.
struct Token<'a> {
    x: &'a [f32],
    active: Vec<&'a [u32]>,
    /// Whether the active neurons are known before anything is read.
    predicted: bool,
}

/// Sum of the products of bf16 numbers and f32 ones, in lanes of 16.
fn dot(row: &[u8], x: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    for (row, x) in row.as_chunks::<32>().0.iter().zip(x.as_chunks::<16>().0) {
        for (i, sum) in sums.iter_mut().enumerate() {
            let bits = u32::from(u16::from_le_bytes([row[2 * i], row[2 * i + 1]])) << 16;
            *sum += f32::from_bits(bits) * x[i];
        }
    }
    sums.iter().sum()
}

impl NeuronCompute for Token<'_> {
    fn predict(&self, work: Work, neurons: &mut Vec<u32>) {
        if self.predicted {
            neurons.retain(|n| self.active[work.place].binary_search(n).is_ok());
        }
    }

    fn gate(&self, work: Work, rows: &[Row<'_>], active: &mut Vec<u32>) {
        for row in rows {
            std::hint::black_box(dot(&row.gate[..ROW as usize], self.x));
            // A whole expert is one row.
            if row.gate.len() > 3 * ROW as usize || self.active[work.place].binary_search(&row.neuron).is_ok()
            {
                active.push(row.neuron);
            }
        }
    }

    fn up_down(&self, _: Work, rows: &[Row<'_>]) {
        for bytes in rows.iter().flat_map(|r| [r.gate, r.up_down]) {
            // Up and down; for a neuron in two reads, the gate was computed before.
            let skip = if bytes.len() == ROW as usize { ROW as usize } else { 0 };
            for row in bytes[skip..].chunks_exact(ROW as usize) {
                std::hint::black_box(dot(row, self.x));
            }
        }
    }
}

fn store(path: &Path, shape: Shape, memory: Memory) -> Outcome<NeuronStore> {
    let bytes = u64::from(EXPERTS * NEURONS) * 3 * ROW;
    let file = FileEntry { path: path.to_owned(), bytes, cached: false, identity: None };
    let table = Arc::new(extents(file, 0, shape)?);
    let buffers = Buffers::new(&classes(shape, memory))?;
    let disk = ThreadedDisk::open(table, buffers, &Options::default(), Arc::new(SystemClock::default()))?;
    Ok(NeuronStore::new(disk, shape, memory)?)
}

fn step(store: &NeuronStore, token: &Token<'_>, matrices: &[u32], threads: usize) -> Outcome<Duration> {
    let start = Instant::now();
    store.begin(matrices)?;
    std::thread::scope(|scope| {
        let work: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || store.work(thread, token))).collect();
        work.into_iter().try_for_each(|w| w.join().unwrap_or(Ok(())))
    })?;
    Ok(start.elapsed())
}

fn main() -> Outcome<()> {
    let mut args = std::env::args().skip(1);
    let folder = args.next().ok_or("expected a folder on the disk")?;
    let threads: usize = args.next().map_or(Ok(2), |n| n.parse())?;
    let all = u64::from(EXPERTS * NEURONS) * 3 * ROW;
    let scratch = Scratch::create(folder.as_ref(), all)?;
    let x: Vec<f32> = (0..HIDDEN).map(|i| (i % 13) as f32 / 6.0 - 1.0).collect();
    let neurons = Shape { matrices: EXPERTS, neurons: NEURONS, cluster: 64, gate: ROW, up_down: 2 * ROW };
    println!("half of {} MB in memory, 4 of {EXPERTS} experts per token, {threads} threads", all / 1_000_000);
    println!("zeros  how                    MB/token  ms/token  times faster");
    for sparsity in [0.5, 0.7, 0.9] {
        let recipe = Recipe {
            layers: 1,
            experts: EXPERTS,
            k: 4,
            neurons: NEURONS,
            sparsity,
            skew: 0.6,
            persistence: 0.6,
            tokens: TOKENS,
            seed: 5,
        };
        let sampled = recipe.sample()?;
        let expert = Shape { neurons: 1, cluster: 1, gate: all / u64::from(EXPERTS), up_down: 0, ..neurons };
        let bundle = Shape { gate: 3 * ROW, up_down: 0, ..neurons };
        let layouts = [
            ("experts, whole", expert, Memory { gates: all / 2, up_down: 0 }),
            ("gates stay, then active", neurons, Memory { gates: all / 3, up_down: all / 6 }),
            ("active, predicted", bundle, Memory { gates: all / 2, up_down: 0 }),
        ];
        let stores = layouts.map(|(_, shape, memory)| store(scratch.path(), shape, memory));
        let mut times = [Duration::ZERO; 3];
        let mut before = [0; 3];
        for (at, token) in sampled.tokens.iter().enumerate() {
            let matrices: Vec<u32> = token.iter().map(|t| t.0).collect();
            let active: Vec<&[u32]> = token.iter().map(|t| &t.1[..]).collect();
            for (index, store) in stores.iter().enumerate() {
                let store = store.as_ref().map_err(ToString::to_string)?;
                if at == WARM {
                    before[index] = store.disk().stats().bytes;
                }
                let token = Token { x: &x, active: active.clone(), predicted: index == 2 };
                let time = step(store, &token, &matrices, threads)?;
                times[index] += if at >= WARM { time } else { Duration::ZERO };
            }
        }
        let counted = f64::from(TOKENS) - WARM as f64;
        for (index, store) in stores.iter().enumerate() {
            let store = store.as_ref().map_err(ToString::to_string)?;
            let bytes = (store.disk().stats().bytes - before[index]) as f64 / counted / 1e6;
            let ms = times[index].as_secs_f64() * 1e3 / counted;
            let faster = times[0].as_secs_f64() / times[index].as_secs_f64();
            let zeros = 100.0 * sparsity;
            println!("{zeros:>3} %  {:<23} {bytes:>7.2}  {ms:>8.2}  {faster:>6.2}", layouts[index].0);
        }
    }
    Ok(())
}
