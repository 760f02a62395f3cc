//! A small model whose kernels are Rust functions and whose numbers are exact. Every split into chunks, slots
//! and threads must give bit-identical logits.
#![allow(dead_code, reason = "each test crate uses its part")]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "all for one reason: a kernel trusts its arguments")]

use moec_ir::EntryKind;
use moec_ir::Format;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::*;
use moec_runtime::bundle::abi::KernelFn;
use moec_runtime::{Engine, Options, Program};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};

/// Vocabulary: the bytes, and a few special tokens.
pub(crate) const V: usize = 260;
/// Token that ends a text.
pub(crate) const EOS: u32 = 257;
/// Token that begins a text.
pub(crate) const BOS: u32 = 256;
pub(crate) const CTX: usize = 64;
pub(crate) const SLOTS: usize = 3;
pub(crate) const E: usize = 6;
pub(crate) const K: usize = 2;
/// Experts per token of little entry points.
pub(crate) const LITTLE: usize = 1;
/// Elements from one row of the logits to the next: not the vocabulary size.
pub(crate) const STRIDE: usize = 272;
/// Rows that the attention kernel takes at a time.
const BLOCK: usize = 3;

/// Number that a router adds to its choices; tests set it so that an expert does not exist.
pub(crate) static BAD_CHOICE: AtomicI32 = AtomicI32::new(0);

/// Weight of token `v` in the head.
pub(crate) fn head(v: usize) -> f32 {
    ((v * 37 + 11) % 263) as f32
}

/// Weight of an expert.
pub(crate) fn expert(e: usize) -> f32 {
    (e * e + 3) as f32
}

/// Logits after `seq`, computed as by the plan's steps.
pub(crate) fn reference(seq: &[u32]) -> Vec<f32> {
    reference_with(seq, K)
}

/// Logits with only the first `experts` of a token's experts.
pub(crate) fn reference_with(seq: &[u32], experts: usize) -> Vec<f32> {
    let mix = mix(seq);
    let y: f32 = choices(mix)[..experts].iter().map(|&e| expert(e) * (mix % 97) as f32).sum();
    (0..V).map(|v| (y + head(v) * (mix % 89) as f32) % 251.0).collect()
}

/// Greedy continuation.
pub(crate) fn continuation(prompt: &[u32], n: usize) -> Vec<u32> {
    let mut seq = prompt.to_vec();
    for _ in 0..n {
        let logits = reference(&seq);
        let best = (0..V).fold(0, |b, v| if logits[v] > logits[b] { v } else { b });
        seq.push(best as u32);
    }
    seq.split_off(prompt.len())
}

/// Effect of all layers but the last on a sequence.
pub(crate) fn mix(seq: &[u32]) -> usize {
    seq.iter().enumerate().map(|(j, &id)| (j + 1) * id as usize).sum()
}

/// The experts of a token, the first choice first.
pub(crate) fn choices(mix: usize) -> [usize; K] {
    [mix % E, (mix / 5 + 1) % E]
}

/// The arguments of a kernel, with a reader and a writer of words.
pub(crate) struct Args(pub(crate) *const *mut u8);

impl Args {
    pub(crate) unsafe fn get<T: Copy>(&self, arg: usize, i: usize) -> T {
        unsafe { (*self.0.add(arg)).cast::<T>().add(i).read() }
    }
    pub(crate) unsafe fn set<T>(&self, arg: usize, i: usize, value: T) {
        unsafe { (*self.0.add(arg)).cast::<T>().add(i).write(value) }
    }
}

/// `[state, ids, pos, slot]`, item = row.
unsafe extern "C" fn store_ids(a: *const *mut u8, n: i64, begin: i64, end: i64, scratch: *mut u8) {
    let a = Args(a);
    assert!(begin < end && end <= n);
    unsafe { scratch.write_bytes(0xaa, 100) };
    for t in begin as usize..end as usize {
        unsafe {
            let (id, pos, slot) = (a.get::<i32>(1, t), a.get::<i32>(2, t), a.get::<i32>(3, t));
            assert!(pos >= 0);
            a.set(0, slot as usize * CTX + pos as usize, id as f32);
        }
    }
}

/// `[state, pos, slot, mix]`, item = block of rows.
unsafe extern "C" fn attend(a: *const *mut u8, n: i64, begin: i64, end: i64, _scratch: *mut u8) {
    let a = Args(a);
    for t in begin as usize * BLOCK..(end as usize * BLOCK).min(n as usize) {
        unsafe {
            let (pos, slot) = (a.get::<i32>(1, t) as usize, a.get::<i32>(2, t) as usize);
            let sum: f32 = (0..=pos).map(|j| (j + 1) as f32 * a.get::<f32>(0, slot * CTX + j)).sum();
            a.set(3, t, sum);
        }
    }
}

/// `[mix, choice]`, item = row.
unsafe extern "C" fn route<const N: usize>(
    a: *const *mut u8,
    _n: i64,
    begin: i64,
    end: i64,
    _scratch: *mut u8,
) {
    let a = Args(a);
    for t in begin as usize..end as usize {
        unsafe {
            for (c, e) in choices(a.get::<f32>(0, t) as usize).into_iter().take(N).enumerate() {
                a.set(1, t * N + c, (e as i32).saturating_add(BAD_CHOICE.load(Ordering::Relaxed)));
            }
        }
    }
}

/// `[table, mix, experts, y]`, item = (active expert, half): even slots, then odd ones.
unsafe extern "C" fn ffn<const N: usize>(
    a: *const *mut u8,
    _n: i64,
    begin: i64,
    end: i64,
    _scratch: *mut u8,
) {
    let a = Args(a);
    let l = DispatchLayout { rows: 0, k: N, experts: E };
    for i in begin as usize..end as usize {
        let (rank, half) = (i / 2, i % 2);
        unsafe {
            let e = a.get::<i32>(0, l.expert() + rank) as usize;
            let from = a.get::<i32>(0, l.start() + rank) as usize;
            let to = a.get::<i32>(0, l.start() + rank + 1) as usize;
            for s in (from..to).filter(|s| s % 2 == half) {
                let mix = a.get::<f32>(1, a.get::<i32>(0, l.token() + s) as usize);
                a.set(3, s, a.get::<f32>(2, e) * (mix as usize % 97) as f32);
            }
        }
    }
}

/// `[table, y, mix, rows, head, logits]`, item = output row.
unsafe extern "C" fn logits<const N: usize>(
    a: *const *mut u8,
    n: i64,
    begin: i64,
    end: i64,
    _scratch: *mut u8,
) {
    let a = Args(a);
    let l = DispatchLayout { rows: 0, k: N, experts: E };
    assert!(end <= n);
    for r in begin as usize..end as usize {
        unsafe {
            let row = a.get::<i32>(3, r);
            let slots = a.get::<i32>(0, 1) as usize;
            let mine = (0..slots).filter(|s| a.get::<i32>(0, l.token() + s) == row);
            let y: f32 = mine.map(|s| a.get::<f32>(1, s)).sum();
            let mix = a.get::<f32>(2, row as usize) as usize;
            for v in 0..V {
                a.set(5, r * STRIDE + v, (y + a.get::<f32>(4, v) * (mix % 89) as f32) % 251.0);
            }
        }
    }
}

/// Kernels by symbol.
pub(crate) fn resolve(symbol: &str) -> Option<KernelFn> {
    Some(match symbol {
        "store_ids" => store_ids,
        "attend" => attend,
        "route" => route::<K>,
        "ffn" => ffn::<K>,
        "logits" => logits::<K>,
        "little_route" => route::<LITTLE>,
        "little_ffn" => ffn::<LITTLE>,
        "little_logits" => logits::<LITTLE>,
        _ => return None,
    })
}

/// Symbols, and the argument that each writes.
const KERNELS: [(&str, usize); 8] = [
    ("store_ids", 0),
    ("attend", 3),
    ("route", 1),
    ("ffn", 3),
    ("logits", 5),
    ("little_route", 1),
    ("little_ffn", 3),
    ("little_logits", 5),
];

/// Content of the weight file: head, experts, frequencies, each at a multiple of 64 bytes.
pub(crate) fn weights() -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in [(0..V).map(head).collect::<Vec<_>>(), (0..E).map(expert).collect(), vec![1.0, 0.5]] {
        bytes.resize(bytes.len().next_multiple_of(64), 0);
        bytes.extend(part.iter().flat_map(|x: &f32| x.to_le_bytes()));
    }
    bytes
}

fn entry(kind: EntryKind, out_rows: u32) -> Entry {
    let t = kind.rows() as u32;
    let little = matches!(kind, EntryKind::Little(_));
    let each = if little { LITTLE } else { K };
    let words = DispatchLayout { rows: t as usize, k: each, experts: E }.words() as u32;
    let (i, f) = (moec_ir::DType::I32, moec_ir::DType::F32);
    let shapes = [
        ("ids", i, t, 1),
        ("pos", i, t, 1),
        ("slot", i, t, 1),
        ("rows", i, out_rows, 1),
        ("mix", f, t, 1),
        ("choice", i, t, each as u32),
        ("table", i, 1, words),
        ("y", f, t * each as u32, 1),
        ("logits", f, out_rows, STRIDE as u32),
        ("angles", f, t, 4),
    ];
    let mut offset = 0u64;
    let buffers = shapes.map(|(name, dtype, rows, stride)| {
        let bytes = u64::from(rows) * u64::from(stride) * 4;
        let buffer = Buffer { name: name.to_owned(), memory: 0, offset, bytes, dtype, rows, stride };
        offset = (offset + bytes).next_multiple_of(ALIGN);
        buffer
    });
    let b = |i| Arg::Buffer(i, 0);
    let tiles = |rows, tiles| Grid::Tiles { rows, tiles };
    let dispatch =
        Builtin::Dispatch { rows: t, k: each as u32, experts: E as u32, partial: false, candidates: None };
    let angles = Builtin::RopeAngles { half: 2, scale: 1f32.to_bits(), long: None };
    use RowSpace::{Outputs, Tokens};
    let step = |code, args: Vec<Arg>, rows, grid, barrier, deps: Vec<u32>| Step {
        unit: 0,
        code,
        args,
        rows,
        grid,
        barrier,
        deps,
        node: 0,
    };
    let k = |i: u32| Code::Kernel(if little && i >= 2 { i + 3 } else { i });
    let steps = vec![
        step(k(0), vec![Arg::State(0), b(0), b(1), b(2)], Tokens, tiles(1, 1), false, vec![]),
        step(Code::Builtin(angles), vec![b(1), Arg::Segment(2), b(9)], Tokens, Grid::One, false, vec![]),
        step(k(1), vec![Arg::State(0), b(1), b(2), b(4)], Tokens, tiles(BLOCK as u32, 1), true, vec![0]),
        step(k(2), vec![b(4), b(5)], Tokens, tiles(1, 1), true, vec![2]),
        step(Code::Builtin(dispatch), vec![b(5), b(6)], Tokens, Grid::One, true, vec![3]),
        step(
            k(3),
            vec![b(6), b(4), Arg::Segment(1), b(7)],
            Tokens,
            Grid::Experts { table: 0, tiles: 2 },
            true,
            vec![4],
        ),
        step(k(4), vec![b(6), b(7), b(4), b(3), Arg::Segment(0), b(8)], Outputs, tiles(1, 1), true, vec![5]),
    ];
    Entry { kind, out_rows, buffers: buffers.to_vec(), logits: 8, locations: vec![], steps }
}

/// Plan of the model with these entry points: (kind, output rows).
pub(crate) fn plan(entries: &[(EntryKind, u32)]) -> Plan {
    let weights = weights();
    let segment = |name: &str, offset: usize, n: usize| Segment {
        name: name.to_owned(),
        file: 0,
        offset: offset as u64,
        bytes: n as u64 * 4,
        pitch: n as u64 * 4,
        shape: vec![n as u32],
        format: Format::F32,
        layout: Layout::Rows,
    };
    let experts_at = (V * 4).next_multiple_of(64);
    let freqs_at = (experts_at + E * 4).next_multiple_of(64);
    let little = entries.iter().any(|(kind, _)| matches!(kind, EntryKind::Little(_)));
    let entries: Vec<Entry> = entries.iter().map(|&(kind, out)| entry(kind, out)).collect();
    let end = |e: &Entry| e.buffers.iter().map(|b| b.offset + b.bytes).max().unwrap();
    let kernel = |(symbol, result): (&str, usize)| KernelRef {
        symbol: symbol.to_owned(),
        results: Results::new([result]).unwrap(),
    };
    Plan {
        version: PLAN_VERSION,
        model: ModelInfo {
            family: "toy".to_owned(),
            vocab: V as u32,
            hidden: 1,
            layers: 1,
            max_context: CTX as u32,
            slots: SLOTS as u32,
            bos: Some(BOS),
            eos: vec![EOS],
            parameters: 1000,
            active_parameters: 500,
            big_little: little.then_some(BigLittle { experts: LITTLE as u32, gamma: GAMMA }),
            thresholded: None,
        },
        target: TargetInfo {
            name: "native".to_owned(),
            triple: format!("{}-unknown-{}", std::env::consts::ARCH, std::env::consts::OS),
            cpu: "generic".to_owned(),
            features: vec![],
        },
        units: vec![UnitRef::cpu()],
        memories: vec![Memory {
            name: "ram".to_owned(),
            arena_bytes: entries.iter().map(end).max().unwrap_or(0).next_multiple_of(ALIGN),
            ..Memory::default()
        }],
        links: Vec::new(),
        scratch_bytes: 100,
        files: vec![FileRef {
            path: "weights/model.bin".to_owned(),
            bytes: weights.len() as u64,
            sha256: Sha256::digest(&weights).into(),
        }],
        segments: vec![
            segment("head", 0, V),
            segment("experts", experts_at, E),
            segment("freqs", freqs_at, 2),
        ],
        states: vec![StateBuf {
            name: "kv".to_owned(),
            memory: 0,
            shape: [SLOTS as u32, 1, CTX as u32, 1],
            format: Format::F32,
            order: CacheOrder::Rows,
            rotated: 1,
            kind: StateKind::Cache,
            snapshots: 0,
        }],
        kernels: KERNELS.map(kernel).to_vec(),
        entries,
        graphs: Vec::new(),
        experts: ExpertPlacement::default(),
        streams: Vec::new(),
        expert_sets: Vec::new(),
        subgraphs: Vec::new(),
        placement: Placement::default(),
        paging: None,
        launches: Vec::new(),
    }
}

/// γ of the plan, if it has little entry points.
pub(crate) const GAMMA: f32 = 0.625;

/// [`ENTRIES`] with little entry points.
pub(crate) const BIG_LITTLE: [(EntryKind, u32); 6] =
    [ENTRIES[0], ENTRIES[1], ENTRIES[2], ENTRIES[3], (EntryKind::Little(1), 1), (EntryKind::Little(2), 2)];

/// The entry points that most tests use.
pub(crate) const ENTRIES: [(EntryKind, u32); 4] = [
    (EntryKind::Prefill(4), 4),
    (EntryKind::Prefill(16), 5),
    (EntryKind::Decode(1), 1),
    (EntryKind::Decode(2), 2),
];

pub(crate) fn program(entries: &[(EntryKind, u32)]) -> Program {
    Program::new(plan(entries), &resolve).unwrap()
}

/// A folder with a bundle's files.
pub(crate) fn bundle() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(dir.path().join("weights")).unwrap();
    std::fs::write(dir.path().join("weights/model.bin"), weights()).unwrap();
    dir
}

/// Runs a test on an engine with `threads` threads.
pub(crate) fn with_engine(entries: &[(EntryKind, u32)], threads: usize, test: impl FnOnce(&mut Engine<'_>)) {
    let dir = bundle();
    test(&mut open(&program(entries), dir.path(), threads));
}

pub(crate) fn open<'p>(p: &'p Program, bundle: &Path, threads: usize) -> Engine<'p> {
    Engine::open(p, bundle, Options { threads: Some(threads), ..Options::default() }).unwrap()
}

/// A byte-level tokenizer whose ids are the bytes.
pub(crate) fn tokenizer() -> String {
    // GPT-2's printable characters for bytes.
    let printable = |b: u32| (33..=126).contains(&b) || (161..=172).contains(&b) || (174..=255).contains(&b);
    let mut next = 256;
    let mut vocab = serde_json::Map::new();
    for b in 0..256u32 {
        let c = if printable(b) {
            b
        } else {
            next += 1;
            next - 1
        };
        vocab.insert(char::from_u32(c).unwrap().to_string(), b.into());
    }
    let special = |id: u32, content: &str| {
        serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true})
    };
    let level = serde_json::json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    serde_json::json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(BOS, "<s>"), special(EOS, "</s>")],
        "normalizer": null, "pre_tokenizer": level, "post_processor": null, "decoder": level,
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
    })
    .to_string()
}

/// Puts the tokenizer into a bundle.
pub(crate) fn add_tokenizer(bundle: &Path) {
    std::fs::create_dir_all(bundle.join("artifacts")).unwrap();
    std::fs::write(bundle.join("artifacts/tokenizer.json"), tokenizer()).unwrap();
}
