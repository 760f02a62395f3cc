//! A small plan, shared by the tests of the verifier and of the text form.

use moec_ir::plan::*;
use moec_ir::scope::AnyLayer;
use moec_ir::text::parse_plan;
use moec_ir::{DType, EntryKind, Format, Part, Scope, verify};

fn buffer(name: &str, offset: u64, dtype: DType, rows: u32, stride: u32) -> Buffer {
    Buffer {
        name: name.into(),
        memory: 0,
        offset,
        bytes: u64::from(rows * stride * 4).next_multiple_of(64),
        dtype,
        rows,
        stride,
    }
}

fn step(code: Code, args: Vec<Arg>, deps: &[u32], node: u32) -> Step {
    let grid = match code {
        Code::Kernel(_) => Grid::Tiles { rows: 4, tiles: 1 },
        Code::Builtin(_) => Grid::One,
    };
    Step { unit: 0, code, args, rows: RowSpace::Tokens, grid, barrier: true, deps: deps.to_vec(), node }
}

/// Rotation angles, a matrix, a dispatch table, and logits in the memory of the angles.
pub(crate) fn plan() -> Plan {
    let (i, f) = (DType::I32, DType::F32);
    let buffers = vec![
        buffer("%0", 0, i, 4, 1),
        buffer("%1", 64, i, 4, 1),
        buffer("%2", 128, i, 4, 1),
        buffer("%3", 192, i, 2, 1),
        buffer("%4", 256, f, 4, 8),
        buffer("%5", 384, f, 4, 8),
        buffer("%6", 512, i, 27, 1),
        buffer("%7", 256, f, 2, 10),
    ];
    let b = |b| Arg::Buffer(b, 0);
    let rope = Code::Builtin(Builtin::RopeAngles { half: 4, scale: 1_f32.to_bits(), long: None });
    let dispatch =
        Code::Builtin(Builtin::Dispatch { rows: 4, k: 1, experts: 7, partial: false, candidates: None });
    let last = Step {
        rows: RowSpace::Outputs,
        grid: Grid::Experts { table: 1, tiles: 2 },
        ..step(Code::Kernel(1), vec![Arg::Buffer(5, 16), b(6), Arg::State(0), b(7)], &[0, 1, 2], 3)
    };
    let entry = Entry {
        kind: EntryKind::Prefill(4),
        out_rows: 2,
        buffers,
        logits: 7,
        locations: vec![
            Some(BufferColumns { buffer: 0, column: 0, cols: 1 }),
            None,
            Some(BufferColumns { buffer: 5, column: 4, cols: 4 }),
        ],
        steps: vec![
            step(rope, vec![b(1), Arg::Segment(0), b(4)], &[], 0),
            step(Code::Kernel(0), vec![b(4), Arg::Segment(1), b(5)], &[0], 1),
            step(dispatch, vec![b(0), b(6)], &[], 2),
            last,
        ],
    };
    let segment = |name: &str, offset, bytes: u64, shape: &[u32], format, layout| {
        let matrices = if let [matrices, _, _] = shape { u64::from(*matrices) } else { 1 };
        Segment {
            name: name.into(),
            file: 0,
            offset,
            bytes,
            pitch: bytes / matrices,
            shape: shape.into(),
            format,
            layout,
        }
    };
    Plan {
        version: PLAN_VERSION,
        model: ModelInfo {
            family: "test".into(),
            vocab: 10,
            hidden: 8,
            layers: 2,
            max_context: 16,
            slots: 2,
            bos: Some(1),
            eos: vec![2, 3],
            parameters: 1 << 40,
            active_parameters: 7,
            big_little: Some(BigLittle { experts: 1, gamma: 0.7 }),
            thresholded: Some(12.5),
        },
        target: TargetInfo {
            name: "native \"x\"\n; no comment".into(),
            triple: "x86_64-unknown-linux-gnu".into(),
            cpu: "znver4".into(),
            features: vec!["avx2".into(), "fma".into()],
        },
        units: vec![
            UnitRef::cpu(),
            UnitRef { name: "npu".into(), backend: "coreml".into(), queues: 4, ..UnitRef::cpu() },
        ],
        memories: vec![Memory { name: "ram".into(), arena_bytes: 640, ..Memory::default() }],
        links: Vec::new(),
        scratch_bytes: 100,
        files: vec![FileRef { path: "weights/a.bin".into(), bytes: 4096, sha256: [0xa5; 32] }],
        segments: vec![
            segment("freqs", 0, 16, &[4], Format::F32, Layout::Rows),
            segment("w", 64, 2 * 16 * 8 * 2, &[2, 10, 8], Format::Bf16, Layout::Panels { nr: 8 }),
            segment("g", 640, 2 * 8 * 4 * 2, &[12, 4], Format::F16, Layout::GluPanels { nr: 8 }),
            // The padding to pairs, groups and panels counts as stored bytes.
            segment("b", 768, 8 * 2 * 4, &[5, 3], Format::Bf16, Layout::Panels { nr: 8 }),
            segment("q", 832, 2 * 8 * 2 * 34, &[2, 5, 40], Format::Q8, Layout::Panels { nr: 8 }),
            segment("p", 1920, 2 * 8 * 18, &[12, 32], Format::Q4, Layout::GluPanels { nr: 8 }),
            segment("t", 2240, 5 * 2 * 18, &[5, 33], Format::Q4, Layout::Rows),
        ],
        states: vec![StateBuf {
            name: "layers.0.k".into(),
            memory: 0,
            shape: [2, 1, 16, 4],
            format: Format::Bf16,
            order: CacheOrder::Values { nr: 8, block: 32 },
            rotated: 1,
            kind: StateKind::Cache,
            snapshots: 0,
        }],
        experts: ExpertPlacement::default(),
        streams: Vec::new(),
        kernels: vec![
            KernelRef { symbol: "linear_8".into(), results: Results::last(1, 3) },
            KernelRef { symbol: "_ffn".into(), results: Results::last(1, 4) },
        ],
        graphs: vec![GraphDecl {
            package: "artifacts/layers.0.group.0.mlpackage".into(),
            function: "cap16".into(),
            inputs: vec![GraphTensor { name: "x".into(), shape: [32, 8, 1, 1] }],
            outputs: vec![GraphTensor { name: "y".into(), shape: [32, 8, 1, 1] }],
            stateful: false,
        }],
        expert_sets: vec![ExpertSet {
            layer: 0,
            overflow: Overflow::Spill,
            capacities: vec![16, 0, 16, 0],
            groups: vec![GraphGroup { graph: 0, capacity: 16, experts: vec![2, 0] }],
            batch: None,
            hot: None,
        }],
        subgraphs: vec![Subgraph { graphs: vec![0], inputs: 8, outputs: 8, attention: None }],
        entries: vec![entry],
        placement: placement(),
        paging: None,
        launches: Vec::new(),
    }
}

/// Four experts of one layer: two on the NPU in two tiers, two on the CPU.
pub(crate) fn placement() -> Placement {
    let row = |capacity, group, unit, tier, load| ExpertRow {
        capacity,
        group,
        unit,
        tier: Some(tier),
        fallback: (capacity > 0).then_some(0),
        load: Some(load),
        few: load < 1.0,
    };
    let group = |tier, unit, experts: &[u32]| ExpertGroup {
        tier,
        unit,
        experts: experts.into(),
        sizes: Vec::new(),
        bytes: 1 << 33,
        cost_us: vec![1.5, 0.1],
        why: "hot; \"so\"".into(),
        decode: vec![DecodeUnit { batch: 1, unit: 0, cost_us: vec![0.5, 2.0], why: "few rows".into() }],
    };
    Placement {
        chunk: 4,
        overflow: Overflow::Spill,
        units: vec!["cpu".into(), "npu".into()],
        ops: vec![OpAssignment {
            entry: EntryKind::Prefill(4),
            scope: Scope { layer: Some(AnyLayer), part: Part::ATTN },
            op: "linear".into(),
            unit: 1,
            nodes: 3,
            why: "dense and static".into(),
        }],
        experts: vec![ExpertTable {
            layer: 1,
            k: 2,
            tiers: vec![48, 16],
            expected: Some(Expected { imbalance: 1.5, overflow: 0.125, padding: 0.3 }),
            groups: vec![group(0, 1, &[2]), group(1, 1, &[0]), group(1, 0, &[3, 1])],
            experts: vec![
                row(16, 1, 1, 1, 9.0),
                row(0, 2, 0, 1, 0.25),
                row(48, 0, 1, 0, 40.0),
                row(0, 2, 0, 1, 2.0),
            ],
        }],
    }
}

/// Parses a plan, and checks that the verifier accepts it and that text and bytes round-trip.
#[track_caller]
pub(crate) fn accepted(text: &str) -> Plan {
    let plan = parse_plan(text).unwrap();
    verify::plan(&plan).unwrap();
    assert_eq!(parse_plan(&plan.to_string()).unwrap(), plan);
    assert_eq!(Plan::decode(&plan.encode().unwrap()).unwrap(), plan);
    plan
}

/// Checks that a plan with this change is refused at `at`, with a message that contains `message`.
#[track_caller]
pub(crate) fn refused(text: &str, at: &str, message: &str, change: impl FnOnce(&mut Plan)) {
    let mut plan = parse_plan(text).unwrap();
    change(&mut plan);
    let error = verify::plan(&plan).unwrap_err();
    assert!(error.at.starts_with(at) && error.message.contains(message), "{error}");
}
