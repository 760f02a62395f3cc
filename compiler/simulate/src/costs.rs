//! Model of the costs of a plan's steps on the CPU of a device file, and of its experts on the way from disk.
//!
//! A step reads its weights and multiplies rows with them: it takes the longer of the two times, at the
//! bandwidth of the memory and at the peak of the unit, or what the device's table of matrix products says,
//! where it has one. After a barrier a step costs a dispatch. Attention's reading of the KV cache is not in
//! it, nor what only moves rows.

use moec_base::error::{Error, Result};
use moec_cpu::DISK;
use moec_device::{Device, DeviceUnit, UnitKind};
use moec_ir::plan::{Arg, Builtin, Code, Entry, PagedLayer, Plan, RowSpace, Step};
use moec_ir::{EntryKind, Module, Op};
use moec_runtime::offload::disk::Options;
use moec_sim::disk::Link;
use moec_sim::paging::Units;
use std::collections::BTreeSet;
use std::time::Duration;

/// Number of the model, and its source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Constant {
    /// Description.
    pub what: &'static str,
    /// Its value, with the unit.
    pub value: String,
    /// Its source, as the device file gives it.
    pub source: String,
}

/// Weights that some rows are multiplied by.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Product {
    bytes: f64,
    numbers: f64,
    /// Whether only rows whose logits are requested are multiplied by them: one.
    outputs: bool,
}

/// Everything between the experts of two layers.
#[derive(Clone, Debug, Default, PartialEq)]
struct Between {
    products: Vec<Product>,
    barriers: u32,
}

/// Costs of a plan on a device.
#[derive(Debug)]
pub struct Costs<'a> {
    cpu: &'a DeviceUnit,
    /// Bytes per microsecond that the memory gives, and operations per microsecond.
    bandwidth: f64,
    peak: f64,
    dispatch_us: f64,
    link: Link,
    /// Of a prompt and of a token that is decoded, by layer; the last is what follows the last experts.
    calls: [Vec<Between>; 2],
    /// Both matrices of an expert, by layer.
    experts: Vec<[Product; 2]>,
    /// Numbers that were used, and their sources.
    pub constants: Vec<Constant>,
    /// Index of the CPU, and the name of the link from disk.
    pub unit: usize,
}

/// A product whose time is up to so many times that of one row is bound by reading its weights.
const BOUND_BY_READING: f64 = 1.25;

impl<'a> Costs<'a> {
    /// Of a plan whose experts are on disk.
    ///
    /// # Errors
    /// A device file without the figures that are needed: the bandwidth of the disk, and of what computes.
    pub fn of(device: &'a Device, plan: &Plan, module: &Module, layers: &[PagedLayer]) -> Result<Self> {
        let missing = |what: &str| {
            Error::input(format!("the device file of `{}` does not say {what}", device.name))
                .hint("`moec profile-device --disk FOLDER` measures this machine; `--target` takes its file")
        };
        let unit = device.unit_of(UnitKind::Cpu).ok_or_else(|| missing("what computes"))?;
        let cpu = &device.units[unit];
        let mut constants = Vec::new();
        let block = plan.paging.as_ref().map_or(0, |p| p.block_bytes);
        let disk = device.memories.iter().find(|m| m.name == DISK);
        // Reads are spread over the experts of a layer.
        let bytes = |s: u32| plan.segments.get(s as usize).map_or(0, |s| s.bytes);
        let range = layers.iter().map(|l| bytes(l.gate_up).max(bytes(l.down))).max().unwrap_or(0);
        let (row, gain) = disk
            .and_then(|m| m.random_reads(block.into(), range))
            .ok_or_else(|| missing("how fast the disk is read"))?;
        let rate = row.rate() * gain;
        constants.push(Constant {
            what: "disk",
            value: format!("{rate} GB/s in blocks of {} bytes", row.block_bytes),
            source: row.source.clone(),
        });
        let depth = Options::default().depth;
        constants.push(Constant {
            what: "reads in flight",
            value: depth.to_string(),
            source: "the runtime's own; no latency beside the rate".to_owned(),
        });
        let link = Link { latency: Duration::ZERO, bytes_per_second: rate * 1e9, depth };
        let (mut bandwidth, mut peak) = (f64::INFINITY, f64::INFINITY);
        if let Some(row) = cpu.matmul.first() {
            let rows = cpu.matmul.len();
            let value = format!("a table of {rows} rows");
            constants.push(Constant { what: "matrix products", value, source: row.source.clone() });
        } else {
            let memory = device.memories.iter().filter(|m| m.name != DISK).find_map(|m| m.bandwidth.last());
            let memory = memory.ok_or_else(|| missing("how fast memory is read"))?;
            let (format, top) = cpu
                .peak
                .iter()
                .max_by(|a, b| a.1.rate().total_cmp(&b.1.rate()))
                .ok_or_else(|| missing("how fast it computes"))?;
            (bandwidth, peak) = (memory.rate() * 1e3, top.rate() * 1e3);
            let value = format!("{} GB/s", memory.rate());
            constants.push(Constant { what: "memory", value, source: memory.source.clone() });
            let value = format!("{} GOP/s of {format}", top.rate());
            constants.push(Constant { what: "peak", value, source: top.source.clone() });
        }
        if let Some(figure) = &cpu.dispatch_cost_us {
            let value = format!("{} µs", figure.value);
            constants.push(Constant { what: "a barrier", value, source: figure.source.clone() });
        }
        let product = |s: u32| {
            let segment = plan.segments.get(s as usize);
            let bytes = segment.and_then(moec_ir::plan::Segment::matrix_bytes).unwrap_or(0);
            let (_, rows, cols) = segment.map_or((0, 0, 0), moec_ir::plan::Segment::extents);
            Product { bytes: bytes as f64, numbers: f64::from(rows) * f64::from(cols), outputs: false }
        };
        let calls = [true, false].map(|prompt| {
            let is = |e: &&Entry| {
                matches!((e.kind, prompt), (EntryKind::Prefill(_), true) | (EntryKind::Decode(1), false))
            };
            plan.entries.iter().find(is).map_or_else(Vec::new, |entry| walk(entry, plan, module, layers))
        });
        Ok(Self {
            cpu,
            bandwidth,
            peak,
            dispatch_us: cpu.dispatch_cost_us.as_ref().map_or(0.0, |f| f.value),
            link,
            calls,
            experts: layers.iter().map(|l| [product(l.gate_up), product(l.down)]).collect(),
            constants,
            unit,
        })
    }

    /// Microseconds in which rows are multiplied by weights.
    fn us(&self, product: Product, rows: f64) -> f64 {
        let rows = if product.outputs { rows.min(1.0) } else { rows };
        let table = |rows| self.cpu.matmul_us(rows, product.numbers);
        if let (Some(one), Some(many)) = (table(1.0), table(rows)) {
            // A table is of weights of two bytes: fewer are read in less time, and computed in the same.
            let read = one * (product.bytes / (2.0 * product.numbers.max(1.0)));
            return if many > one * BOUND_BY_READING { many.max(read) } else { read };
        }
        (product.bytes / self.bandwidth).max(2.0 * rows * product.numbers / self.peak)
    }

    fn between_us(&self, rows: usize, at: usize) -> f64 {
        let Some(between) = self.calls[usize::from(rows == 1)].get(at) else { return 0.0 };
        let products: f64 = between.products.iter().map(|&p| self.us(p, rows as f64)).sum();
        products + f64::from(between.barriers) * self.dispatch_us
    }
}

impl Units for Costs<'_> {
    fn link(&self) -> Link {
        self.link
    }

    /// Time between layers; what follows the last experts of a call is counted with the beginning of the next
    /// one.
    fn between(&self, layer: usize, rows: usize) -> Duration {
        let tail = if layer == 0 { self.between_us(rows, self.experts.len()) } else { 0.0 };
        micros(self.between_us(rows, layer) + tail)
    }

    fn expert(&self, layer: usize, part: usize, rows: f64) -> Duration {
        let product = self.experts.get(layer).and_then(|e| e.get(part)).copied().unwrap_or_default();
        // The two steps over experts are launched once for all of them.
        micros(self.us(product, rows.max(1.0)))
    }
}

fn micros(us: f64) -> Duration {
    Duration::try_from_secs_f64(us * 1e-6).unwrap_or_default()
}

/// Work of an entry point before each of its layers requests experts, and after the last.
fn walk(entry: &Entry, plan: &Plan, module: &Module, layers: &[PagedLayer]) -> Vec<Between> {
    let graph = module.entries.iter().find(|g| g.kind == entry.kind);
    let is_expert = |s: u32| layers.iter().any(|l| l.gate_up == s || l.down == s);
    let (mut all, mut own, mut seen) = (Vec::new(), Between::default(), BTreeSet::new());
    for step in &entry.steps {
        own.barriers += u32::from(step.barrier);
        if matches!(step.code, Code::Builtin(Builtin::RequestExperts { .. })) {
            all.push(std::mem::take(&mut own));
            continue;
        }
        let op = graph.and_then(|g| g.nodes.get(step.node as usize)).map(|n| &n.op);
        // A row of the table of embeddings is all that is read of it.
        if op.is_some_and(Op::is_embedding) {
            continue;
        }
        for s in weights(step).filter(|&s| !is_expert(s)) {
            // Several steps may share a matrix of one operator.
            if let Some(segment) = plan.segments.get(s as usize).filter(|_| seen.insert((step.node, s))) {
                let numbers = segment.shape.iter().map(|&d| f64::from(d)).product();
                let outputs = step.rows == RowSpace::Outputs;
                own.products.push(Product { bytes: segment.bytes as f64, numbers, outputs });
            }
        }
    }
    all.push(own);
    all
}

/// Segments that a step reads.
fn weights(step: &Step) -> impl Iterator<Item = u32> {
    step.args.iter().filter_map(|arg| match *arg {
        Arg::Segment(s) | Arg::Matrices(s) => Some(s),
        Arg::Buffer(..) | Arg::State(_) => None,
    })
}
