//! Runs kernels on guarded memory for several machines, with the work items split in several ways.

use crate::cache::Cache;
use crate::machines::{is_selected, machines};
use half::bf16;
use moec_codegen::jit::{KernelFn, Loaded};
use moec_codegen::pack::{Geometry, Weighting, pack, pack_slice, round_rows, unpack_rows};
use moec_codegen::spec::{Attention, ExpertDown, ExpertGateUp, Linear, NeuronClusters, NeuronUp, Quantise};
use moec_codegen::{
    ByteDot, ComputeType, Isa, KernelSpec, Machine, Schedule, compile, delta_order, neurons_multiply,
    packed_words,
};
use moec_ir::plan::Layout;
use moec_ir::state::CacheHead;
use moec_ir::types::{Format, GROUP};
use std::ops::Range;
use std::ptr;

/// Operand of a kernel.
#[derive(Clone, Debug)]
pub(crate) enum Operand {
    Floats(Vec<f32>),
    Ints(Vec<i32>),
    /// `[matrices, rows, cols]`, packed for the kernel.
    Weight(Format, [usize; 3], Vec<f32>),
    /// Neurons in a layout that is read from disk, `[matrices, rows, cols]`: what each address names is at a
    /// place of its own.
    OnDisk(Layout, Format, [usize; 3], Vec<f32>),
    /// A KV-cache tensor.
    Cache(Cache),
    /// States `[key, value]` of the delta rule, one after another.
    States([usize; 2], Vec<f32>),
    /// The same buffer as the operand with that index.
    Same(usize),
}

/// Expected contents of an operand after a run.
#[derive(Clone, Debug)]
pub(crate) enum Expect {
    /// Numbers within `tolerance · (1 + |expected|)`; where NaN is expected, any number passes.
    Floats(Vec<f32>, f32),
    /// Numbers within `tolerance · |expected|`.
    Relative(Vec<f32>, f32),
    Ints(Vec<i32>),
    /// A KV-cache tensor that is bit-identical.
    Cache(Cache),
    /// States `[key, value]`, compared like [`Self::Floats`].
    States([usize; 2], Vec<f32>, f32),
}

/// A kernel with its operands and the expected results.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) spec: KernelSpec,
    pub(crate) n: usize,
    pub(crate) operands: Vec<Operand>,
    pub(crate) expect: Vec<(usize, Expect)>,
}

/// Small deterministic random generator.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.next() >> 16) as usize % n
    }
    /// Uniform in −1 .. 1.
    pub(crate) fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    pub(crate) fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
    pub(crate) fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }
}

/// Memory that ends at an unreadable page.
struct Guarded {
    base: *mut libc::c_void,
    mapped: usize,
    start: *mut u8,
    len: usize,
}

impl Guarded {
    fn new(bytes: &[u8]) -> Self {
        const PAGE: usize = 4096;
        let body = bytes.len().next_multiple_of(PAGE);
        // SAFETY: a fresh anonymous mapping of one page more than the data; the last page is closed, and
        // the data is copied to right before it.
        unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let base = libc::mmap(ptr::null_mut(), body + PAGE, prot, flags, -1, 0);
            assert_ne!(base, libc::MAP_FAILED);
            let end = base.cast::<u8>().add(body);
            assert_eq!(libc::mprotect(end.cast(), PAGE, libc::PROT_NONE), 0);
            let start = end.sub(bytes.len());
            ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len());
            Self { base, mapped: body + PAGE, start, len: bytes.len() }
        }
    }

    fn words(&self) -> Vec<u32> {
        // SAFETY: `len` bytes from `start` are mapped and initialised.
        let bytes = unsafe { std::slice::from_raw_parts(self.start, self.len) };
        bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `new`.
        unsafe { libc::munmap(self.base, self.mapped) };
    }
}

/// Whether a machine has the kernel's compute type.
pub(crate) fn can_multiply(isa: &Isa, spec: &KernelSpec) -> bool {
    match spec {
        KernelSpec::Linear(Linear { compute, .. })
        | KernelSpec::Attention(Attention { compute, .. })
        | KernelSpec::ExpertGateUp(ExpertGateUp { compute, .. })
        | KernelSpec::ExpertDown(ExpertDown { compute, .. })
        | KernelSpec::Quantise(Quantise { to: compute, .. }) => match compute {
            ComputeType::F32 => true,
            ComputeType::Bf16 => isa.bf16,
            ComputeType::I8 => isa.bytes != ByteDot::None,
        },
        KernelSpec::NeuronUp(NeuronUp { hidden, format, compute, .. })
        | KernelSpec::NeuronClusters(NeuronClusters { hidden, format, compute, .. }) => {
            neurons_multiply(isa, *format, *hidden, *compute)
        }
        _ => true,
    }
}

/// Whether the case with this number is checked on this machine. Cases alternate between the machines for
/// which `able` is true.
pub(crate) fn is_assigned(
    spec: &KernelSpec,
    case: usize,
    machine: &Machine,
    machines: &[Machine],
    able: impl Fn(&Isa, &KernelSpec) -> bool,
) -> bool {
    let able: Vec<&Machine> = machines.iter().filter(|m| able(&m.isa(), spec)).collect();
    let place = able.iter().position(|m| ptr::eq(*m, machine));
    place.is_some_and(|place| is_selected(spec, case, (place, able.len())))
}

/// Checks the cases on every machine that this host runs and that has their compute types. If the tests use a
/// GPU, only it is checked.
pub(crate) fn check(cases: &[Case]) {
    crate::gpu_kernels::check(cases);
    if crate::gpu_kernels::on_gpu() {
        return;
    }
    let machines = machines();
    for machine in &machines {
        let dealt = cases
            .iter()
            .enumerate()
            .filter(|(i, c)| is_assigned(&c.spec, *i, machine, &machines, can_multiply));
        let cases: Vec<Case> = dealt.map(|(_, case)| case.clone()).collect();
        check_on(machine, &cases);
    }
    #[cfg(not(target_arch = "aarch64"))]
    crate::emulated::check(cases);
}

/// Checks that every schedule gives bit-identical results to the default one, on every machine that this host
/// runs. Schedules that a machine has no kernels for are skipped, but not all of them may be.
pub(crate) fn same_bits(cases: &[(Case, Vec<Schedule>)]) {
    if crate::gpu_kernels::on_gpu() {
        return;
    }
    let machines = machines();
    for machine in &machines {
        let isa = machine.isa();
        let mut specs = Vec::new();
        let mut pairs = Vec::new();
        let dealt =
            (0..).zip(cases).filter(|(i, (c, _))| is_assigned(&c.spec, *i, machine, &machines, can_multiply));
        let cases: Vec<_> = dealt.map(|(_, case)| case).collect();
        for (case, schedules) in &cases {
            specs.push(case.spec.clone());
            for schedule in schedules.iter().filter(|s| s.fits(&isa)) {
                let other = Case { spec: case.spec.with_schedule(*schedule), ..case.clone() };
                specs.push(other.spec.clone());
                pairs.push((case, other));
            }
        }
        assert!(pairs.len() >= cases.len() / 5, "{} schedules for {} cases", pairs.len(), cases.len());
        let loaded = Loaded::new(&compile(machine, &specs, &()).unwrap_or_else(|e| panic!("{e}")));
        let loaded = loaded.unwrap_or_else(|e| panic!("{e}"));
        let kernel = |spec: &KernelSpec| loaded.kernel(&spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
        for (usual, other) in pairs {
            let expected = run(kernel(&usual.spec), &isa, usual, usize::MAX);
            let found = run(kernel(&other.spec), &isa, &other, 2);
            assert_eq!(found, expected, "{:?} n={} on {isa:?}", other.spec, other.n);
        }
    }
}

/// Formats with their compute types.
pub(crate) const PRODUCTS: [(Format, ComputeType); 46] = [
    (Format::F32, ComputeType::F32),
    (Format::Bf16, ComputeType::F32),
    (Format::F16, ComputeType::F32),
    (Format::Q8, ComputeType::F32),
    (Format::Q4, ComputeType::F32),
    (Format::Bf16, ComputeType::Bf16),
    (Format::Q8, ComputeType::Bf16),
    (Format::Q4, ComputeType::Bf16),
    (Format::Q8, ComputeType::I8),
    (Format::Q4, ComputeType::I8),
    (Format::Q4o, ComputeType::F32),
    (Format::Q4o, ComputeType::Bf16),
    (Format::Q4o, ComputeType::I8),
    (Format::Q4c, ComputeType::I8),
    (Format::Q8h, ComputeType::F32),
    (Format::Q8h, ComputeType::I8),
    (Format::Q4h, ComputeType::I8),
    (Format::Mxfp4, ComputeType::F32),
    (Format::Mxfp4, ComputeType::Bf16),
    (Format::Mxfp4, ComputeType::I8),
    (Format::Q4n, ComputeType::F32),
    (Format::Q4n, ComputeType::Bf16),
    (Format::Q4n, ComputeType::I8),
    (Format::Q6, ComputeType::I8),
    (Format::Q5, ComputeType::F32),
    (Format::Q3, ComputeType::Bf16),
    (Format::Q3, ComputeType::I8),
    (Format::Q2, ComputeType::I8),
    (Format::Q2, ComputeType::Bf16),
    (Format::Q2s, ComputeType::F32),
    (Format::Q2s, ComputeType::Bf16),
    (Format::Q2s, ComputeType::I8),
    (Format::Q4k, ComputeType::F32),
    (Format::Q4k, ComputeType::Bf16),
    (Format::Q4k, ComputeType::I8),
    (Format::Q5k, ComputeType::Bf16),
    (Format::Q5k, ComputeType::I8),
    (Format::Q6k, ComputeType::F32),
    (Format::Q6k, ComputeType::Bf16),
    (Format::Q6k, ComputeType::I8),
    (Format::Q3k, ComputeType::F32),
    (Format::Q3k, ComputeType::I8),
    (Format::Q2k, ComputeType::Bf16),
    (Format::Q2k, ComputeType::I8),
    (Format::Iq4xs, ComputeType::F32),
    (Format::Iq4xs, ComputeType::I8),
];

/// Every second case of a list that runs through all products for each shape, as on a checkerboard: each
/// shape has half of the products, and each product half of the shapes.
pub(crate) fn every_second(cases: Vec<Case>) -> Vec<Case> {
    let is_of_colour = |i: usize| (i / PRODUCTS.len() + i % PRODUCTS.len()).is_multiple_of(2);
    cases.into_iter().enumerate().filter(|(i, _)| is_of_colour(*i)).map(|(_, case)| case).collect()
}

/// The numbers that packed matrices of `rows` × `cols` represent, rounded as unpacking to `compute` rounds.
pub(crate) fn stored(format: Format, compute: ComputeType, [rows, cols]: [usize; 2], w: &[f32]) -> Vec<f32> {
    let mut w = w.to_vec();
    w.chunks_mut(rows * cols).for_each(|matrix| round_rows(format, cols, matrix));
    // The GPU multiplies f16 unrounded, as a sum of two bf16 numbers.
    if compute == ComputeType::Bf16 && format != Format::F16 {
        for x in &mut w {
            *x = bf16::from_f32(*x).to_f32();
        }
    }
    w
}

/// Rows of `groups · cols` numbers with a row stride of `ld`, in the format that a matrix kernel reads. Also
/// returns the stride of that format, and the numbers after rounding, at the positions of `x`.
pub(crate) fn rows_as(
    compute: ComputeType,
    x: &[f32],
    [groups, cols, ld]: [usize; 3],
) -> (Operand, usize, Vec<f32>) {
    if compute == ComputeType::F32 {
        return (Operand::Floats(x.to_vec()), ld, x.to_vec());
    }
    // The rows have a gap of one word between them.
    let packed_ld = groups * packed_words(cols, compute) + 1;
    let (mut words, mut rounded) = (Vec::new(), x.to_vec());
    for row in rounded.chunks_mut(ld) {
        for group in row[..groups * cols].chunks_mut(cols) {
            let before = words.len();
            match compute {
                ComputeType::Bf16 => pairs(group, &mut words),
                _ => group.chunks_mut(GROUP).for_each(|g| codes(g, &mut words)),
            }
            assert_eq!(words.len() - before, packed_words(cols, compute));
        }
        words.push(-1);
    }
    (Operand::Ints(words), packed_ld, rounded)
}

fn pairs(row: &mut [f32], words: &mut Vec<i32>) {
    for pair in row.chunks_mut(2) {
        for x in pair.iter_mut() {
            *x = bf16::from_f32(*x).to_f32();
        }
        let bits = |i: usize| pair.get(i).map_or(0, |&x| bf16::from_f32(x).to_bits());
        words.push((u32::from(bits(0)) | u32::from(bits(1)) << 16).cast_signed());
    }
}

fn codes(group: &mut [f32], words: &mut Vec<i32>) {
    let most = group.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    let scale = most * (1.0 / 127.0);
    let mut codes = [0_i8; GROUP];
    for (code, x) in codes.iter_mut().zip(group.iter_mut()) {
        *code = if most > 0.0 { (*x * (127.0 / most)).round_ties_even() as i8 } else { 0 };
        *x = f32::from(*code) * scale;
    }
    words.extend(codes.as_chunks::<4>().0.iter().map(|c| i32::from_le_bytes(c.map(i8::cast_unsigned))));
    words.push(scale.to_bits().cast_signed());
    words.push(-128 * codes.iter().map(|&c| i32::from(c)).sum::<i32>());
}

pub(crate) fn check_on(machine: &Machine, cases: &[Case]) {
    if crate::gpu_kernels::on_gpu() {
        return;
    }
    let isa = machine.isa();
    let specs: Vec<KernelSpec> = cases.iter().map(|c| c.spec.clone()).collect();
    let object = compile(machine, &specs, &()).unwrap_or_else(|e| panic!("{e}"));
    let loaded = Loaded::new(&object).unwrap_or_else(|e| panic!("{e}"));
    for case in cases {
        let kernel = loaded.kernel(&case.spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
        check_case(case, &isa, &[usize::MAX, 1, 3].map(|chunk| run(kernel, &isa, case, chunk)));
    }
}

/// Checks the results, and that they do not depend on how the work is split.
pub(crate) fn check_case(case: &Case, isa: &Isa, results: &[Vec<Vec<u32>>]) {
    let whole = &results[0];
    for split in &results[1..] {
        assert_eq!(whole, split, "work is split: {:?} n={} on {isa:?}", case.spec, case.n);
    }
    for (i, expect) in &case.expect {
        compare(isa, &whole[*i], expect, || {
            format!("operand {i} of {:?} n={} on {isa:?}", case.spec, case.n)
        });
    }
}

fn compare(isa: &Isa, got: &[u32], expect: &Expect, what: impl Fn() -> String) {
    match expect {
        Expect::Cache(want) => {
            let bytes: Vec<u8> = got.iter().flat_map(|w| w.to_le_bytes()).collect();
            assert_eq!(bytes, want.pack(isa), "{}", what());
        }
        Expect::States(shape, want, tolerance) => {
            let bytes: Vec<u8> = got.iter().flat_map(|w| w.to_le_bytes()).collect();
            let head = state(*shape, isa);
            let read = |memory: &[u8]| -> Vec<u32> {
                let places = (0..shape[0] * shape[1]).map(|i| head.offsets(i / shape[1], i % shape[1]));
                places.map(|place| head.read(memory, place).expect("inside").to_bits()).collect()
            };
            let got: Vec<u32> = bytes.chunks(head.bytes().expect("f32")).flat_map(read).collect();
            compare_numbers(&got, &Expect::Floats(want.clone(), *tolerance), what);
        }
        _ => compare_numbers(got, expect, what),
    }
}

/// Like [`check_case`], for an operand of numbers.
pub(crate) fn compare_numbers(got: &[u32], expect: &Expect, what: impl Fn() -> String) {
    match expect {
        Expect::Cache(_) | Expect::States(..) => panic!("no numbers: {}", what()),
        Expect::Ints(want) => {
            let got: Vec<i32> = got.iter().map(|&b| b.cast_signed()).collect();
            assert_eq!(&got, want, "{}", what());
        }
        Expect::Floats(want, tolerance) | Expect::Relative(want, tolerance) => {
            let absolute = if matches!(expect, Expect::Floats(..)) { 1.0 } else { 0.0 };
            assert_eq!(got.len(), want.len(), "{}", what());
            for (at, (&bits, &want)) in got.iter().zip(want).enumerate() {
                let got = f32::from_bits(bits);
                let fits = want.is_nan() || (got - want).abs() <= tolerance * (absolute + want.abs());
                assert!(fits, "{got} at {at}, not {want}: {}", what());
            }
        }
    }
}

/// Layout of a state `[key, value]` of the delta rule.
fn state([key, value]: [usize; 2], isa: &Isa) -> CacheHead {
    CacheHead { format: Format::F32, order: delta_order(isa, key), ctx: key, dim: value }
}

/// Packs a weight. Numbers that were read from codes and scales are packed unchanged; others are rounded.
pub(crate) fn packed(geometry: &Geometry, values: &[f32]) -> Vec<u8> {
    let stored = Weighting { stored: geometry.format.is_published(), ..Weighting::default() };
    let mut bytes = Vec::new();
    let read = |matrix: usize, rows: Range<usize>, out: &mut [f32]| {
        out.copy_from_slice(&values[(matrix * geometry.rows + rows.start) * geometry.cols..][..out.len()]);
        Ok::<(), std::io::Error>(())
    };
    pack(geometry, &|_| stored, read, &mut bytes).expect("packs");
    let is_again = |(matrix, values): (usize, &[f32])| {
        let mut back = vec![0.0; values.len()];
        unpack_rows(geometry, &bytes, matrix, 0..geometry.rows, &mut back).expect("unpacks");
        back == values
    };
    let mut matrices = values.chunks(geometry.rows * geometry.cols).enumerate();
    if stored.stored && !matrices.all(is_again) {
        pack_slice(geometry, values).expect("packs")
    } else {
        bytes
    }
}

/// Bytes of an operand; the index of the other operand if both are the same buffer.
pub(crate) fn bytes(operand: &Operand, case: &Case, isa: &Isa) -> Result<Vec<u8>, usize> {
    match operand {
        Operand::Floats(x) => Ok(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Operand::Ints(x) => Ok(x.iter().flat_map(|v| v.to_le_bytes()).collect()),
        Operand::Weight(format, [matrices, rows, cols], values) => {
            let layout = case.spec.layout(isa).expect("a weight");
            let geometry =
                Geometry { layout, format: *format, matrices: *matrices, rows: *rows, cols: *cols };
            Ok(packed(&geometry, values))
        }
        Operand::OnDisk(layout, format, shape, values) => Ok(pieces(*layout, *format, *shape, values)),
        Operand::Cache(cache) => Ok(cache.pack(isa)),
        Operand::States([key, value], numbers) => {
            let head = state([*key, *value], isa);
            let pack = |of: &[f32]| {
                let mut memory = vec![0; head.bytes().expect("f32")];
                for (i, x) in of.iter().enumerate() {
                    memory[head.offsets(i / value, i % value).at..][..4].copy_from_slice(&x.to_le_bytes());
                }
                memory
            };
            Ok(numbers.chunks(key * value).flat_map(pack).collect())
        }
        Operand::Same(i) => Err(*i),
    }
}

/// Targets of the addresses of neurons on disk, one after another, padded with ones to equal sizes.
fn pieces(layout: Layout, format: Format, [matrices, rows, cols]: [usize; 3], values: &[f32]) -> Vec<u8> {
    let geometry = Geometry { layout, format, matrices, rows, cols };
    let packed = pack_slice(&geometry, values).expect("packs");
    let n = layout.on_disk(format, cols).expect("neurons on disk");
    let second = n.gate().map_or(n.resident_scales(), |gate| gate.bytes);
    let sizes = [n.up_down().bytes, second];
    let size = sizes[0].max(sizes[1]);
    let of = |matrix: &[u8], i: usize| {
        let places = n.at(i, rows).into_iter().zip(sizes).take(n.addresses());
        let piece = |(at, bytes)| {
            let mut piece: Vec<u8> = matrix[at..at + bytes].to_vec();
            piece.resize(size, 0xff);
            piece
        };
        places.flat_map(piece).collect::<Vec<u8>>()
    };
    packed
        .chunks_exact(packed.len() / matrices)
        .flat_map(|m| (0..rows).flat_map(|i| of(m, i)).collect::<Vec<u8>>())
        .collect()
}

/// Number of an operand's matrices, if the kernel finds them by a table of addresses.
pub(crate) fn matrices(operand: &Operand, spec: &KernelSpec) -> Option<usize> {
    match (operand, spec) {
        (Operand::OnDisk(layout, format, [matrices, rows, cols], _), _) => {
            layout.on_disk(*format, *cols).map(|n| matrices * rows * n.addresses())
        }
        (
            Operand::Weight(_, [matrices, ..], _),
            KernelSpec::ExpertGateUp(_)
            | KernelSpec::ExpertDown(_)
            | KernelSpec::NeuronUp(_)
            | KernelSpec::NeuronClusters(_)
            | KernelSpec::NeuronPredict(_)
            | KernelSpec::NeuronDown(_),
        ) => Some(*matrices),
        _ => None,
    }
}

/// Number of active experts: the first entry of the last integer operand.
pub(crate) fn active(case: &Case) -> usize {
    let ints = case.operands.iter().rev().find_map(|o| match o {
        Operand::Ints(x) => x.first().copied(),
        _ => None,
    });
    ints.map_or(0, |a| a.max(0) as usize)
}

/// Number of work items of a case.
pub(crate) fn items(isa: &Isa, case: &Case, active: usize) -> usize {
    case.spec.grid(isa).items(case.n, active)
}

/// Runs a kernel with work items in chunks, the last chunk first unless items depend on earlier ones; returns
/// the operands' contents.
pub(crate) fn run(kernel: KernelFn, isa: &Isa, case: &Case, chunk: usize) -> Vec<Vec<u32>> {
    let mut memory: Vec<Option<Guarded>> = Vec::new();
    let mut args: Vec<*mut u8> = Vec::new();
    let mut tables: Vec<(Vec<Guarded>, Guarded)> = Vec::new();
    for operand in &case.operands {
        let bytes = match bytes(operand, case, isa) {
            Ok(bytes) => bytes,
            Err(i) => {
                args.push(args[i]);
                memory.push(None);
                continue;
            }
        };
        if let Some(n) = matrices(operand, &case.spec) {
            // Each part has a guard page of its own.
            let parts: Vec<_> = bytes.chunks_exact(bytes.len() / n).map(Guarded::new).collect();
            let addresses: Vec<u8> =
                parts.iter().flat_map(|p| (p.start as usize as u64).to_le_bytes()).collect();
            let table = Guarded::new(&addresses);
            args.push(table.start);
            tables.push((parts, table));
            memory.push(None);
            continue;
        }
        let guarded = Guarded::new(&bytes);
        args.push(guarded.start);
        memory.push(Some(guarded));
    }
    assert_eq!(args.len(), case.spec.args(), "{:?}", case.spec);
    let items = items(isa, case, active(case));
    // The contract requires scratch to be 64-byte aligned.
    let scratch = Guarded::new(&vec![0xff; case.spec.scratch_bytes(isa).next_multiple_of(64)]);
    let mut chunks = Vec::new();
    let mut end = items;
    while end > 0 {
        let begin = end.saturating_sub(chunk);
        chunks.push((begin, end));
        end = begin;
    }
    if case.spec.grid(isa).has_clusters() {
        chunks.reverse();
    }
    for (begin, end) in chunks {
        // SAFETY: operands have the extents that the kernel documents, and guard pages after them.
        unsafe { kernel(args.as_ptr(), case.n as i64, begin as i64, end as i64, scratch.start) };
    }
    memory.iter().map(|m| m.as_ref().map(Guarded::words).unwrap_or_default()).collect()
}

/// Marker in the gaps between the rows of a matrix.
pub(crate) const GAP: f32 = 777.0;

/// `rows × cols` numbers with row stride `ld` and [`GAP`] in the gaps. The last row has no gap.
pub(crate) fn strided(
    rows: usize,
    cols: usize,
    ld: usize,
    mut f: impl FnMut(usize, usize) -> f32,
) -> Vec<f32> {
    let len = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
    (0..len).map(|i| if i % ld < cols { f(i / ld, i % ld) } else { GAP }).collect()
}

/// Like [`strided`], with random numbers.
pub(crate) fn random(rng: &mut Rng, rows: usize, cols: usize, ld: usize) -> Vec<f32> {
    strided(rows, cols, ld, |_, _| rng.float())
}
