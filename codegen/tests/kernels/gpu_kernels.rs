//! GPU kernels, run by an interpreter of PTX that reports accesses out of bounds, races and reads of
//! unwritten memory. With `MOEC_CUDA=gpu` (`cargo xtask gpu-check`), they run on this machine's GPU instead.

#[path = "gpu.rs"]
mod gpu;

use crate::experts;
use crate::harness::{Case, Expect, Operand, Rng, compare_numbers, matrices, packed};
use crate::matrix;
use moec_codegen::gpu::{CACHE_ORDER, Kernel, Sm, compile};
use moec_codegen::pack::Geometry;
use moec_codegen::spec::{ExpertDown, ExpertGateUp, Linear};
use moec_codegen::{ComputeType, Error, KernelSpec};
use moec_ir::op::{Activation, DispatchLayout, Glu};
use moec_ir::types::Format;
use moec_ptx::{Argument, Buffer, Launch, Memory, Program};

/// Rows in the schedules of matrix kernels, in turn: one, several, tiles.
const ROWS: [usize; 4] = [1, 96, 3, 64];

/// Whether the tests use this machine's GPU. Then CPU kernels are not checked, to save CPU time.
pub(crate) fn on_gpu() -> bool {
    gpu::generation().is_some()
}

/// Checks the cases for which there are GPU kernels. Each matrix kernel is checked with one schedule; the
/// schedules alternate.
pub(crate) fn check(cases: &[Case]) {
    for (i, case) in cases.iter().enumerate().filter(|(_, case)| case.n > 0) {
        let mut case = case.clone();
        if let Some(mut schedule) = case.spec.schedule() {
            schedule.rows = ROWS[i % ROWS.len()];
            case.spec = case.spec.with_schedule(schedule);
        }
        let kernel = Kernel::from(case.spec.clone());
        match kernel.launch() {
            Ok(launch) => check_case(&case, &kernel, launch, Sm::ALL[i % Sm::ALL.len()]),
            // The compute type has no GPU kernel; the CPU executes it.
            Err(Error::Target { .. }) => {}
            Err(e) => panic!("{e}"),
        }
    }
}

/// A case whose bf16 rows are aligned for copies of 16 bytes.
fn aligned(case: &Case) -> Case {
    let mut case = case.clone();
    let (KernelSpec::Linear(Linear { x_ld: ld, .. })
    | KernelSpec::ExpertGateUp(ExpertGateUp { x_ld: ld, .. })
    | KernelSpec::ExpertDown(ExpertDown { h_ld: ld, .. })) = &mut case.spec
    else {
        panic!("no matrix: {case:?}");
    };
    let before = std::mem::replace(ld, ld.next_multiple_of(4));
    let after = *ld;
    let Operand::Ints(words) = &mut case.operands[0] else { panic!("rows that are not packed") };
    *words = words
        .chunks(before)
        .flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(-1, after - before)))
        .collect();
    case
}

#[test]
fn tensor_cores_match_plain_loops() {
    let mut rng = Rng::new(71);
    let mut cases = Vec::new();
    let has_kernels = |f: &Format| *f != Format::F32 && !f.is_by_channel() && !f.has_fine_scales();
    for format in Format::ALL.into_iter().filter(has_kernels) {
        let compute = ComputeType::Bf16;
        // Rows of words.
        let wide = if format.row_bytes(64).is_multiple_of(2) { 1 } else { 4 };
        for (n_rows, k, n, groups, glu) in [
            (70, 128, 150, 1, None),
            (64, 64, 128, 1, None),
            (3, 192, 7, 1, None),
            (65, 64, 262, 1, Some(Glu::Gated(Activation::Silu))),
        ] {
            let (k, residual) = (k * wide, glu.is_none());
            let shape = matrix::Shape { n_rows, k, n, groups, format, compute, bias: true, residual, glu };
            cases.push(matrix::case(&mut rng, &shape));
        }
        let layout = DispatchLayout { rows: 150, k: 2, experts: 3 };
        let (product, silu) = ((format, compute), Glu::Gated(Activation::Silu));
        cases.push(experts::gate_up_case(&mut rng, (layout, 140), product, (64 * wide, 70), silu, true));
        if format == Format::Bf16 {
            let relu2 = Glu::Ungated(Activation::Relu2);
            cases.push(experts::gate_up_case(&mut rng, (layout, 140), product, (64 * wide, 70), relu2, true));
        }
        cases.push(experts::down_case(&mut rng, (layout, 140), product, (140, 64 * wide), true));
    }
    for case in cases {
        let case = aligned(&case);
        let kernel = Kernel::from(case.spec.clone());
        let text = compile(Sm::Sm90, std::slice::from_ref(&kernel)).unwrap_or_else(|e| panic!("{e}"));
        assert!(text.contains("mma.sync"), "{case:?}");
        let launch = kernel.launch().unwrap_or_else(|e| panic!("{e}"));
        check_case(&case, &kernel, launch, Sm::Sm90);
    }
}

fn check_case(case: &Case, kernel: &Kernel, launch: moec_codegen::gpu::Launch, sm: Sm) {
    let results = results(case, kernel, launch, sm);
    for (i, expect) in &case.expect {
        let bytes = &results[*i];
        let what = || format!("operand {i} of {:?} n={}", case.spec, case.n);
        match expect {
            Expect::Cache(want) => assert_eq!(*bytes, want.pack_in(CACHE_ORDER), "{}", what()),
            // In the order of their rows.
            Expect::States(_, want, tolerance) => {
                compare_numbers(&words(bytes), &Expect::Floats(want.clone(), *tolerance), what);
            }
            _ => compare_numbers(&words(bytes), expect, what),
        }
    }
}

/// Contents of a case's operands after its kernel, as words.
pub(crate) fn run_case(case: &Case) -> Vec<Vec<u32>> {
    let kernel = Kernel::from(case.spec.clone());
    let launch = kernel.launch().unwrap_or_else(|e| panic!("{e}"));
    results(case, &kernel, launch, Sm::Sm80).iter().map(|bytes| words(bytes)).collect()
}

fn words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

/// Contents of a case's operands after its kernel.
fn results(case: &Case, kernel: &Kernel, launch: moec_codegen::gpu::Launch, sm: Sm) -> Vec<Vec<u8>> {
    let sm = gpu::generation().unwrap_or(sm);
    let what = || format!("{:?} n={} on {}", case.spec, case.n, sm.name());
    let text = compile(sm, std::slice::from_ref(kernel)).unwrap_or_else(|e| panic!("{e}"));
    let module = moec_ptx::parse(&text).unwrap_or_else(|e| panic!("{e}: {}\n{text}", what()));
    let program =
        Program::new(&module, &kernel.symbol()).unwrap_or_else(|e| panic!("{e}: {}\n{text}", what()));
    assert_eq!(program.local_bytes(), 0, "{}", what());
    assert!(program.shared_bytes() <= launch.shared.max(1), "{}", what());
    let mut memory = Memory::new(&module).unwrap_or_else(|e| panic!("{e}: {}", what()));
    let OperandMemory { buffers, tables, matrices } = operands(case, kernel, &mut memory);
    let mut arguments: Vec<Argument> = buffers.iter().map(|&b| Argument::Buffer(b)).collect();
    assert_eq!(arguments.len(), kernel.operands(), "{}", what());
    arguments.push(Argument::U32(case.n as u32));
    let grid = launch.blocks(case.n as u32).unwrap_or_else(|| panic!("{}", what()));
    if on_gpu() {
        let run = gpu::Run {
            text: &text,
            symbol: &kernel.symbol(),
            grid,
            block: launch.block,
            rows: case.n as u32,
        };
        run.on_gpu(&memory, &buffers, &tables, &matrices);
    } else {
        let start = Launch { unwritten: true, ..Launch::new(grid, [launch.block, 1, 1]) };
        let done = program.launch(&memory, &arguments, &start);
        done.unwrap_or_else(|e| panic!("{e}: {}\n{text}", what()));
    }
    buffers.iter().map(|&buffer| memory.bytes(buffer)).collect()
}

/// Buffers of the operands.
#[derive(Default)]
struct OperandMemory {
    /// One buffer for each operand.
    buffers: Vec<Buffer>,
    /// Buffers that hold tables of addresses.
    tables: Vec<Buffer>,
    /// Matrices at these addresses.
    matrices: Vec<Buffer>,
}

/// Puts each operand into a buffer of its own.
fn operands(case: &Case, kernel: &Kernel, memory: &mut Memory) -> OperandMemory {
    let mut held = OperandMemory::default();
    for (i, operand) in case.operands.iter().enumerate() {
        let name = format!("operand {i}");
        let buffer = match operand {
            Operand::Floats(x) | Operand::States(_, x) => {
                memory.add(&name, &bytes(x.iter().map(|v| v.to_bits())))
            }
            Operand::Ints(x) => memory.add(&name, &bytes(x.iter().map(|v| v.cast_unsigned()))),
            Operand::Cache(cache) => memory.add(&name, &cache.pack_in(CACHE_ORDER)),
            Operand::Same(again) => held.buffers[*again],
            Operand::OnDisk(..) => panic!("neurons of split storage stay with the CPU: {case:?}"),
            Operand::Weight(format, [matrices, rows, cols], values) => {
                let layout = kernel.layout().expect("a weight");
                let geometry =
                    Geometry { layout, format: *format, matrices: *matrices, rows: *rows, cols: *cols };
                let packed = packed(&geometry, values);
                weights(&case.spec, operand, &packed, memory, &name, &mut held)
            }
        };
        held.buffers.push(buffer);
    }
    held
}

/// A buffer with the weight, or with the table of the addresses of its matrices.
fn weights(
    spec: &KernelSpec,
    operand: &Operand,
    packed: &[u8],
    memory: &mut Memory,
    name: &str,
    held: &mut OperandMemory,
) -> Buffer {
    let Some(count) = matrices(operand, spec) else { return memory.add_read_only(name, packed) };
    let parts = packed.chunks_exact(packed.len() / count).enumerate();
    let addresses: Vec<u8> = parts
        .flat_map(|(i, part)| {
            let buffer = memory.add_read_only(&format!("{name}, matrix {i}"), part);
            held.matrices.push(buffer);
            memory.address(buffer).to_le_bytes()
        })
        .collect();
    let table = memory.add_read_only(name, &addresses);
    held.tables.push(table);
    table
}

fn bytes(words: impl Iterator<Item = u32>) -> Vec<u8> {
    words.flat_map(u32::to_le_bytes).collect()
}

/// Runs a kernel, and returns its last operand, which has `words` words.
fn run(kernel: &Kernel, n: usize, inputs: &[&[u8]], words: usize) -> Vec<i32> {
    let sm = gpu::generation().unwrap_or(Sm::Sm80);
    let text = compile(sm, std::slice::from_ref(kernel)).unwrap_or_else(|e| panic!("{e}"));
    let module = moec_ptx::parse(&text).unwrap_or_else(|e| panic!("{e}"));
    let program = Program::new(&module, &kernel.symbol()).unwrap_or_else(|e| panic!("{e}"));
    let mut memory = Memory::new(&module).unwrap_or_else(|e| panic!("{e}"));
    let mut operands: Vec<Buffer> = inputs.iter().map(|bytes| memory.add_read_only("input", bytes)).collect();
    let output = memory.add("output", &vec![7; 4 * words]);
    let launch = kernel.launch().unwrap_or_else(|e| panic!("{e}"));
    let grid = launch.blocks(n as u32).expect("few rows");
    let start = Launch::new(grid, [launch.block, 1, 1]);
    operands.push(output);
    let mut arguments: Vec<Argument> = operands.iter().map(|&b| Argument::Buffer(b)).collect();
    arguments.push(Argument::U32(n as u32));
    if on_gpu() {
        let run =
            gpu::Run { text: &text, symbol: &kernel.symbol(), grid, block: launch.block, rows: n as u32 };
        run.on_gpu(&memory, &operands, &[], &[]);
    } else {
        program.launch(&memory, &arguments, &start).unwrap_or_else(|e| panic!("{e}"));
    }
    let bytes = memory.bytes(output);
    bytes.chunks_exact(4).map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

#[test]
fn tokens_are_grouped_by_expert() {
    let mut rng = Rng::new(3);
    for (rows, n, k, experts) in
        [(1, 1, 1, 1), (4, 3, 2, 5), (40, 40, 4, 16), (9, 7, 3, 300), (3, 3, 2, 2000)]
    {
        let layout = DispatchLayout { rows, k, experts };
        // Some choices have no expert here (−1).
        let mut id = || if rng.below(7) == 0 { -1 } else { rng.below(experts) as i32 };
        let ids: Vec<i32> = (0..rows * k).map(|_| id()).collect();
        let input = bytes(ids.iter().map(|v| v.cast_unsigned()));
        let found = run(&Kernel::Dispatch(layout), n, &[&input], layout.words());
        assert_eq!(found, table(layout, &ids[..n * k]), "{layout:?} n={n} {ids:?}");
    }
}

/// Reference dispatch table, by plain loops.
fn table(layout: DispatchLayout, ids: &[i32]) -> Vec<i32> {
    let mut table = vec![-1; layout.words()];
    table[..layout.expert()].fill(0);
    let slots_of = |e: usize| (0..ids.len()).filter(move |&i| ids[i] == e as i32);
    let mut active: Vec<usize> = (0..layout.experts).filter(|&e| slots_of(e).count() > 0).collect();
    active.sort_by_key(|&e| (std::cmp::Reverse(slots_of(e).count()), e));
    (table[0], table[1]) = (active.len() as i32, ids.len() as i32);
    let mut slot = 0;
    for (rank, &e) in active.iter().enumerate() {
        table[layout.expert() + rank] = e as i32;
        table[layout.start() + rank] = slot as i32;
        for i in slots_of(e) {
            table[layout.token() + slot] = (i / layout.k) as i32;
            table[layout.slot() + i] = slot as i32;
            slot += 1;
        }
    }
    table[layout.start() + active.len()] = slot as i32;
    table
}

#[test]
fn argmax_returns_the_lowest_index_of_a_tie() {
    let (cols, x_ld) = (1500, 1501);
    let mut x = vec![f32::NAN; 4 * x_ld];
    for (row, numbers) in x.chunks_mut(x_ld).enumerate() {
        numbers.iter_mut().enumerate().for_each(|(c, v)| *v = (c * 7 % 1000) as f32 - 990.0 * row as f32);
    }
    // Elements past the columns and NaN are ignored.
    (x[cols], x[3], x[x_ld + 1]) = (1e9, f32::NAN, 2000.0);
    x[2 * x_ld..3 * x_ld].fill(f32::NAN);
    x[3 * x_ld + 9] = f32::INFINITY;
    let found = run(&Kernel::Argmax { cols, x_ld }, 4, &[&bytes(x.iter().map(|v| v.to_bits()))], 4);
    // 999 = 857 · 7 mod 1000.
    assert_eq!(found, [857, 1, -1, -1]);
}

/// Angles are accurate to f32's precision, up to the longest context that a model may have.
#[test]
fn gpu_rotation_angles_are_cosines_and_sines() {
    let (half, scale) = (33, 1.5_f32);
    let pos = [0, 1, 2, 77, 4095, 131_071, (1 << 20) - 1];
    let freqs: Vec<f32> = (0..half).map(|i| 10_000_f32.powf(-(i as f32) / half as f32)).collect();
    let [input, table] =
        [bytes(pos.iter().map(|p: &i32| p.cast_unsigned())), bytes(freqs.iter().map(|f| f.to_bits()))];
    let kernel = Kernel::Angles { half, scale };
    let found = run(&kernel, pos.len(), &[&input, &table], pos.len() * 2 * half);
    for (row, &pos) in found.chunks(2 * half).zip(&pos) {
        for (i, &freq) in freqs.iter().enumerate() {
            let angle = f64::from(pos as f32 * freq);
            for (at, want) in [(i, angle.cos()), (half + i, angle.sin())] {
                let found = f64::from(f32::from_bits(row[at].cast_unsigned()));
                let off = (found - want * f64::from(scale)).abs();
                assert!(off <= 4e-7, "position {pos}, frequency {freq}: off by {off}");
            }
        }
    }
}
