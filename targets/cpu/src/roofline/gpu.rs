//! Peaks of a unit that runs GPU kernels, by the kernels that a build writes for it: launches, its memory,
//! the link, and the costs of an expert by its rows.
//!
//! The expert's table is that of the CPU (`experts`) on the GPU: as many experts at once as a layer has,
//! `expert_ffn` of bf16 weights as it is selected for GPUs. Time is the CPU's clock around enough calls that
//! a single wait counts little.

use crate::gpu::{GpuTarget, Kernel};
use crate::{Activations, CpuTarget, InputView, KernelSpec, NodeView, Role, Work};
use moec_backend::error::{Error, Result};
use moec_backend::{Bench, Call, Peaks};
use moec_codegen::spec::{Linear, Map};
use moec_codegen::{ComputeType, MapOp, Schedule};
use moec_device::MatmulTime;
use moec_ir::op::{Activation, DispatchLayout};
use moec_ir::{Format, Glu, Op, Type};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Channels of the residual stream and of an expert, at most: those of OLMoE-1B-7B. A GPU with little free
/// memory gets narrower ones.
const SHAPE: [usize; 2] = [2048, 1024];
/// The narrowest.
const LEAST: usize = 64;
/// Experts of a layer, all of which get the same rows.
const EXPERTS: usize = 64;
/// Rows of an expert that are measured, as far as memory permits.
const ROWS: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
/// Columns of the matrix whose reading measures the memory.
const DEPTH: usize = 2048;
/// Bytes of it, at most.
const READ: u64 = 512 << 20;
/// Places are multiples of this.
const ALIGN: u64 = 256;
/// Approximate time of measuring a figure.
const SPAN: Duration = Duration::from_millis(100);
/// Launches of a kernel that does nearly nothing.
const LAUNCHES: u32 = 1000;
/// Single waits, and single copies.
const WAITS: u32 = 50;
/// Copies of a pinned buffer.
const COPIES: u32 = 64;

/// Measured rates.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuRates {
    /// Name of the GPU, as its vendor reports it.
    pub name: String,
    /// The generation that kernels were written for.
    pub generation: &'static str,
    /// Bytes of its memory.
    pub capacity: u64,
    /// Peaks that its maker states.
    pub peaks: Peaks,
    /// Microseconds from one launch to the next, where no thread waits.
    pub launch_us: f64,
    /// Microseconds that a wait adds to a launch.
    pub wait_us: f64,
    /// 10⁹ bytes a second of a matrix of bf16 that multiplies one row.
    pub read_gb_per_s: f64,
    /// 10⁹ bytes a second to the unit's memory and back, from pinned memory.
    pub link_gb_per_s: [f64; 2],
    /// Microseconds of a copy of four bytes to the unit's memory, with the wait for it.
    pub copy_us: f64,
    /// Channels of the residual stream and of an expert.
    pub shape: [usize; 2],
    /// Costs of one expert by its rows, where they were requested.
    pub experts: Vec<MatmulTime>,
}

impl GpuRates {
    /// 10⁹ operations a second of an entry of the table.
    pub fn gops(entry: &MatmulTime) -> f64 {
        2.0 * f64::from(entry.rows) * entry.weights as f64 / (entry.ms * 1e6)
    }

    /// 10⁹ bytes of bf16 weights a second of an entry of the table.
    pub fn gb_per_s(entry: &MatmulTime) -> f64 {
        2.0 * entry.weights as f64 / (entry.ms * 1e6)
    }
}

/// Measures a unit together with `cpu`. `experts`: its table, too. `tick` is called after every figure.
///
/// # Errors
/// Fails if the unit does, or a kernel does not compile (our bug).
pub fn measure_gpu(
    bench: &mut dyn Bench,
    cpu: &CpuTarget,
    experts: bool,
    tick: &mut dyn FnMut(&str),
) -> Result<GpuRates> {
    let generation = bench.generation()?;
    let cpu = cpu.clone().with_activations(Activations::Auto);
    let target = GpuTarget::new(generation, &cpu)
        .ok_or_else(|| Error::bug(format!("no kernels are written for {generation}")))?;
    let [free, capacity] = bench.memory()?;
    // The rest is for other allocations there.
    let room = free / 2;
    let mut own = Own { base: bench.take(room)?, end: 0, room };
    own.fill(bench)?;
    let [launch_us, wait_us] = launches(bench, &target, &own)?;
    tick("launches of kernels");
    let read_gb_per_s = reading(bench, &target, &own)?;
    tick("reading the unit's memory");
    let link_gb_per_s = [link(bench, true)?, link(bench, false)?];
    let copy_us = copy(bench, &own)?;
    tick("the link, both ways");
    let shape = shape(room);
    let mut table = Vec::new();
    for rows in ROWS.into_iter().filter(|_| experts) {
        own.end = 0;
        let Some(seconds) = expert(bench, &target, &mut own, shape, rows as usize)? else { break };
        let weights = (3 * shape[0] * shape[1]) as u64;
        let source = format!(
            "measured by `moec profile-device`, {}, {EXPERTS} experts of bf16 weights at once, {} by {}",
            bench.name(),
            shape[0],
            shape[1]
        );
        table.push(MatmulTime { rows, weights, ms: seconds * 1e3, source });
        tick(&format!("an expert of {rows} {}", if rows == 1 { "row" } else { "rows" }));
    }
    Ok(GpuRates {
        name: bench.name(),
        generation,
        capacity,
        peaks: bench.peaks(),
        launch_us,
        wait_us,
        read_gb_per_s,
        link_gb_per_s,
        copy_us,
        shape,
        experts: table,
    })
}

/// The widest experts that take no more than half of the room.
fn shape(room: u64) -> [usize; 2] {
    let mut shape = SHAPE;
    let bytes = |[h, i]: [usize; 2]| (EXPERTS * 3 * h * i * 2) as u64;
    while bytes(shape) > room / 2 && shape[1] > LEAST {
        shape = shape.map(|x| (x / 2).max(LEAST));
    }
    shape
}

/// The allocated memory, and the part of it that is in use.
struct Own {
    base: u64,
    end: u64,
    room: u64,
}

impl Own {
    /// A place with this many bytes; `None` if there is no room.
    fn place(&mut self, bytes: usize) -> Option<u64> {
        let at = self.end;
        let end = at.checked_add((bytes as u64).next_multiple_of(ALIGN))?;
        (end <= self.room).then(|| {
            self.end = end;
            self.base + at
        })
    }

    /// Small numbers of bf16 and of f32 everywhere: zeros would be multiplied with less power, and so faster.
    fn fill(&self, bench: &mut dyn Bench) -> Result<()> {
        const PIECE: u64 = 4 << 20;
        let mut state = 1_u32;
        let words: Vec<u8> = (0..PIECE.min(self.room) / 4)
            .flat_map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Signs and digits of two numbers below 1/64 in size.
                let half = |bits: u32| (bits & 0x807f) | 0x3c00;
                (half(state >> 16) | half(state) << 16).to_le_bytes()
            })
            .collect();
        for at in (0..self.room).step_by(PIECE as usize) {
            let bytes = (self.room - at).min(words.len() as u64);
            bench.put(self.base + at, &words[..bytes as usize])?;
        }
        Ok(())
    }
}

/// Loads kernels; gives how each is launched.
fn load(bench: &mut dyn Bench, target: &GpuTarget, kernels: &[Kernel]) -> Result<Vec<moec_ir::plan::Launch>> {
    let failed = |e: crate::CodegenError| Error::bug("a GPU kernel does not compile").because(e);
    let text = target.compile(kernels).map_err(failed)?;
    let symbols: Vec<String> = kernels.iter().map(Kernel::symbol).collect();
    bench.load(&text, &symbols)?;
    kernels.iter().map(|kernel| target.launch(kernel).map_err(failed)).collect()
}

/// Seconds of one round of calls, after one that counts for nothing: rounds are made for about [`SPAN`].
fn seconds(bench: &mut dyn Bench, calls: &[Call]) -> Result<f64> {
    bench.time(calls, 1)?;
    let once = bench.time(calls, 1)?;
    let rounds = (SPAN.as_secs_f64() / once.as_secs_f64().max(1e-6)).clamp(1.0, 10_000.0) as u32;
    Ok(bench.time(calls, rounds)?.as_secs_f64() / f64::from(rounds))
}

/// Microseconds of a launch among others, and the additional time of a wait.
fn launches(bench: &mut dyn Bench, target: &GpuTarget, own: &Own) -> Result<[f64; 2]> {
    let cols = 32;
    let spec = KernelSpec::Map(Map { op: MapOp::Scale { factor: 0.5 }, cols, a_ld: cols, out_ld: cols });
    let launch = load(bench, target, &[Kernel::from(spec)])?[0];
    let call = Call { kernel: 0, launch, addresses: vec![own.base, own.base + ALIGN], rows: 1 };
    bench.time(std::slice::from_ref(&call), LAUNCHES)?;
    let among = bench.time(std::slice::from_ref(&call), LAUNCHES)?.as_secs_f64() / f64::from(LAUNCHES);
    let mut alone = Duration::ZERO;
    for _ in 0..WAITS {
        alone += bench.time(std::slice::from_ref(&call), 1)?;
    }
    let alone = alone.as_secs_f64() / f64::from(WAITS);
    Ok([among * 1e6, (alone - among).max(0.0) * 1e6])
}

/// 10⁹ bytes a second that one row reads of a matrix.
fn reading(bench: &mut dyn Bench, target: &GpuTarget, own: &Own) -> Result<f64> {
    let rows = (READ.min(own.room / 2) / (2 * DEPTH as u64)).max(1) as usize;
    let bytes = 2 * (DEPTH * rows) as u64;
    let spec = KernelSpec::Linear(Linear {
        k: DEPTH,
        n: rows,
        format: Format::Bf16,
        compute: ComputeType::F32,
        groups: 1,
        x_ld: DEPTH,
        out_ld: rows,
        bias: false,
        residual_ld: None,
        glu: None,
        schedule: Schedule { rows: 1, ..Schedule::default() },
    });
    let launch = load(bench, target, &[Kernel::from(spec)])?[0];
    // The row and the result follow the matrix.
    let row = own.base + bytes.next_multiple_of(ALIGN);
    let out = row + (4 * DEPTH as u64).next_multiple_of(ALIGN);
    if out + 4 * rows as u64 > own.base + own.room {
        return Err(too_little(own));
    }
    let call = Call { kernel: 0, launch, addresses: vec![row, own.base, out], rows: 1 };
    Ok(bytes as f64 / seconds(bench, &[call])? / 1e9)
}

fn too_little(own: &Own) -> Error {
    Error::environment(format!("{} bytes of the GPU's memory are too few to measure it", own.room))
        .hint("end other programs that use the GPU")
}

/// 10⁹ bytes a second of copies in one direction.
fn link(bench: &mut dyn Bench, to: bool) -> Result<f64> {
    bench.link(to, 1)?;
    let (bytes, took) = bench.link(to, COPIES)?;
    Ok(bytes as f64 / took.as_secs_f64().max(1e-9) / 1e9)
}

/// Microseconds of a small copy there, with its wait.
fn copy(bench: &mut dyn Bench, own: &Own) -> Result<f64> {
    let start = Instant::now();
    for _ in 0..WAITS {
        bench.put(own.base, &[0; 4])?;
    }
    Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(WAITS))
}

/// Seconds of one of [`EXPERTS`] experts with `rows` rows each; `None` if there is no room for them.
fn expert(
    bench: &mut dyn Bench,
    target: &GpuTarget,
    own: &mut Own,
    [hidden, inter]: [usize; 2],
    rows: usize,
) -> Result<Option<f64>> {
    let layout = DispatchLayout { rows: rows * EXPERTS, k: 1, experts: EXPERTS };
    let (x, table) = (Type::f32([layout.rows, hidden]), Type::i32([layout.words()]));
    let format = Format::Bf16;
    let shapes = [[EXPERTS, 2 * inter, hidden], [EXPERTS, hidden, inter]];
    let node = NodeView {
        op: &Op::ExpertFfn { glu: Glu::Gated(Activation::Silu), bias: false, fixed: false },
        inputs: vec![
            InputView::Value { ty: &x, ld: hidden },
            InputView::Value { ty: &table, ld: layout.words() },
            InputView::Weight { shape: &shapes[0], format },
            InputView::Weight { shape: &shapes[1], format },
        ],
        outputs: vec![&x],
        residual_ld: None,
        one_row_per_sequence: false,
        tied: false,
    };
    let selection =
        target.select(&node).map_err(|e| Error::bug("experts of bf16 have no GPU kernels").because(e))?;
    // Matrices one after the other, and a table of their addresses.
    let matrices = [2 * inter * hidden * 2, hidden * inter * 2];
    let mut places = BTreeMap::new();
    let mut place = |role: Role, bytes: usize| Some(places.insert(role, own.place(bytes)?)).map(|_| ());
    let all = [
        (Role::In(0), x.elements() * 4),
        (Role::In(1), layout.words() * 4),
        (Role::Out(0), x.elements() * 4),
    ];
    let temps = selection.temps.iter().enumerate().map(|(i, ty)| (Role::Temp(i), ty.elements() * 4));
    let tables = (0..2).map(|i| (Role::In(2 + i), 8 * EXPERTS));
    if all.into_iter().chain(temps).chain(tables).any(|(role, bytes)| place(role, bytes).is_none()) {
        return Ok(None);
    }
    for (i, bytes) in matrices.into_iter().enumerate() {
        let Some(first) = own.place(EXPERTS * bytes) else { return Ok(None) };
        let addresses = (0..EXPERTS).flat_map(|e| (first + (e * bytes) as u64).to_le_bytes());
        bench.put(places[&Role::In(2 + i)], &addresses.collect::<Vec<u8>>())?;
    }
    bench.put(places[&Role::In(1)], &dispatch(layout))?;
    let mut kernels = Vec::new();
    for launch in &selection.launches {
        let Work::Kernel(spec) = &launch.work else { continue };
        kernels.push((target.kernel(spec, rows), launch));
    }
    let (written, of): (Vec<Kernel>, Vec<_>) = kernels.into_iter().unzip();
    let launches = load(bench, target, &written)?;
    let calls: Vec<Call> = launches
        .into_iter()
        .zip(of)
        .enumerate()
        .map(|(kernel, (launch, of))| {
            let addresses =
                of.args.iter().map(|role| places.get(role).copied().unwrap_or(own.base)).collect();
            Call { kernel, launch, addresses, rows: layout.rows as u32 }
        })
        .collect();
    Ok(Some(seconds(bench, &calls)? / EXPERTS as f64))
}

/// A dispatch table in which every expert has the same rows, one after the other.
fn dispatch(layout: DispatchLayout) -> Vec<u8> {
    let mut words = vec![0_i32; layout.words()];
    let each = layout.rows / layout.experts;
    (words[0], words[1]) = (layout.experts as i32, layout.rows as i32);
    for e in 0..layout.experts {
        words[layout.expert() + e] = e as i32;
        words[layout.start() + e] = (e * each) as i32;
    }
    words[layout.start() + layout.experts] = layout.rows as i32;
    for row in 0..layout.rows {
        words[layout.token() + row] = row as i32;
        words[layout.slot() + row] = row as i32;
    }
    words.into_iter().flat_map(i32::to_le_bytes).collect()
}
