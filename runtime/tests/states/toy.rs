//! Toys with a recurrence, a convolution, a cache or a ring, whose logits follow from their definitions.

use crate::common::{self, Args, CTX, SLOTS, STRIDE, V};
use moec_ir::EntryKind::{self, Decode, Little, Prefill};
use moec_ir::plan::*;
use moec_ir::{DType, Format};
use moec_runtime::bundle::abi::KernelFn;
use moec_runtime::{Engine, Error, LogitRows, Program};

/// Channels.
pub(crate) const C: usize = 3;
/// Rows of the recurrence.
pub(crate) const R: usize = 2;
/// Width of the convolution.
pub(crate) const WIDTH: usize = 3;
/// Positions that attention over the ring sees, and that the ring holds.
pub(crate) const WINDOW: usize = 5;
pub(crate) const RING: usize = 22;
/// Tokens that the head with `FEW` chooses from. 0 is not among them: it leaves the sum of ids unchanged, and
/// so would repeat forever.
const OFTEN: std::ops::RangeInclusive<usize> = 1..=3;
/// γ of big-little decoding, at which some tokens are kept and some are not.
pub(crate) const GAMMA: f32 = 0.5;

pub(crate) const ENTRIES: [(EntryKind, u32); 6] =
    [(Prefill(4), 4), (Prefill(16), 5), (Decode(1), 1), (Decode(2), 2), (Little(1), 1), (Little(2), 2)];

pub(crate) fn embed(id: u32, c: usize) -> f32 {
    ((id as usize * (7 + 2 * c) + 3 * c) % 31) as f32 / 4.0
}

/// Input of the recurrence for a token; the little model has another one.
pub(crate) fn input(id: u32, little: bool, c: usize) -> f32 {
    embed(if little { id + 1 } else { id }, c)
}

/// A token, and whether the little model has read it.
pub(crate) type ToyToken = (u32, bool);

/// Logits after a sequence, from the definitions: a recurrence `S = S / 2 + (r + 1) · x`, a causal
/// convolution of `x`, and a sum of all ids.
pub(crate) fn reference(seq: &[ToyToken]) -> Vec<f32> {
    let mut s = [[0f32; C]; R];
    for &(id, little) in seq {
        for (r, row) in s.iter_mut().enumerate() {
            for (c, x) in row.iter_mut().enumerate() {
                *x = 0.5 * *x + (r + 1) as f32 * input(id, little, c);
            }
        }
    }
    let ids: usize = seq.iter().enumerate().map(|(j, &(id, _))| (j + 1) * id as usize).sum();
    let h: [f32; C] = std::array::from_fn(|c| {
        let back = |k: usize| seq.len().checked_sub(k + 1).map_or(0.0, |t| embed(seq[t].0, c));
        s[0][c] - 0.75 * s[1][c] + (back(0) + 0.25 * back(1) + 0.125 * back(2))
    });
    logits(h, ids)
}

pub(crate) fn logits(h: [f32; C], ids: usize) -> Vec<f32> {
    let of = |v: usize| {
        let own: f32 = h.iter().enumerate().map(|(c, &h)| h * embed(v as u32, c)).sum();
        (own / 4.0 + (ids % 89 * (v * 37 + 11)) as f32).rem_euclid(251.0)
    };
    (0..V).map(of).collect()
}

/// `[recurrence, convolution, cache, ids, pos, slot, h]`: one item, the rows in order.
pub(crate) unsafe extern "C" fn advance<const LITTLE: bool>(
    a: *const *mut u8,
    n: i64,
    begin: i64,
    end: i64,
    _: *mut u8,
) {
    let a = Args(a);
    assert_eq!((begin, end), (0, 1));
    for t in 0..n as usize {
        // SAFETY: the arguments of the step, within the extents of the plan.
        unsafe {
            let (id, pos, slot) =
                (a.get::<i32>(3, t) as u32, a.get::<i32>(4, t), a.get::<i32>(5, t) as usize);
            let s = |r: usize, c: usize| (slot * R + r) * C + c;
            let w = |k: usize, c: usize| (slot * (WIDTH - 1) + k) * C + c;
            for c in 0..C {
                for r in 0..R {
                    let folded = 0.5 * a.get::<f32>(0, s(r, c)) + (r + 1) as f32 * input(id, LITTLE, c);
                    a.set(0, s(r, c), folded);
                }
                let (x, x1, x2) = (embed(id, c), a.get::<f32>(1, w(1, c)), a.get::<f32>(1, w(0, c)));
                a.set(1, w(0, c), x1);
                a.set(1, w(1, c), x);
                let h = a.get::<f32>(0, s(0, c)) - 0.75 * a.get::<f32>(0, s(1, c));
                a.set(6, t * (C + 1) + c, h + (x + 0.25 * x1 + 0.125 * x2));
            }
            a.set(2, slot * CTX + pos as usize, id as f32);
            let past = (0..=pos as usize).map(|j| (j + 1) as f32 * a.get::<f32>(2, slot * CTX + j));
            a.set(6, t * (C + 1) + C, past.sum::<f32>());
        }
    }
}

/// Logits of the toy with a ring: `Σ x / (k + 1)` over the last tokens, `k` positions back.
pub(crate) fn windowed(seq: &[ToyToken]) -> Vec<f32> {
    let seen = seq.iter().rev().take(WINDOW).enumerate();
    let h = seen.fold([0f32; C], |h, (k, &(id, little))| {
        std::array::from_fn(|c| h[c] + input(id, little, c) / (k + 1) as f32)
    });
    logits(h, seq.len())
}

/// `[ring, ids, pos, slot, h]`: one item. All rows are written before the first looks back.
pub(crate) unsafe extern "C" fn slide<const LITTLE: bool>(
    a: *const *mut u8,
    n: i64,
    begin: i64,
    end: i64,
    _: *mut u8,
) {
    let a = Args(a);
    assert_eq!((begin, end), (0, 1));
    // SAFETY: as above.
    unsafe {
        let row = |t: usize| (a.get::<i32>(3, t) as usize * RING, a.get::<i32>(2, t) as usize);
        for t in 0..n as usize {
            let (ring, pos) = row(t);
            a.set(0, ring + pos % RING, a.get::<i32>(1, t) as u32 + u32::from(LITTLE));
        }
        for t in 0..n as usize {
            let (ring, pos) = row(t);
            for c in 0..C {
                let x = |k: usize| embed(a.get::<u32>(0, ring + (pos - k) % RING), c) / (k + 1) as f32;
                a.set(4, t * (C + 1) + c, (0..WINDOW.min(pos + 1)).map(x).fold(0f32, |h, x| h + x));
            }
            a.set(4, t * (C + 1) + C, (pos + 1) as f32);
        }
    }
}

/// `[h, rows, logits]`, item = output row. `FEW`: only tokens of [`OFTEN`] are chosen, so that text repeats
/// itself.
pub(crate) unsafe extern "C" fn head<const FEW: bool>(
    a: *const *mut u8,
    _n: i64,
    begin: i64,
    end: i64,
    _: *mut u8,
) {
    let a = Args(a);
    for r in begin as usize..end as usize {
        // SAFETY: as above.
        unsafe {
            let row = a.get::<i32>(1, r) as usize * (C + 1);
            let h = std::array::from_fn(|c| a.get::<f32>(0, row + c));
            for (v, z) in logits(h, a.get::<f32>(0, row + C) as usize).into_iter().enumerate() {
                a.set(2, r * STRIDE + v, if FEW && !OFTEN.contains(&v) { -1.0 } else { z });
            }
        }
    }
}

pub(crate) fn resolve(symbol: &str) -> Option<KernelFn> {
    Some(match symbol {
        "advance" => advance::<false>,
        "little_advance" => advance::<true>,
        "slide" => slide::<false>,
        "little_slide" => slide::<true>,
        "head" => head::<false>,
        "head_of_few" => head::<true>,
        _ => return None,
    })
}

pub(crate) fn entry(kind: EntryKind, out_rows: u32, states: u32) -> Entry {
    let t = kind.rows() as u32;
    let shapes = [
        ("ids", DType::I32, t, 1),
        ("pos", DType::I32, t, 1),
        ("slot", DType::I32, t, 1),
        ("rows", DType::I32, out_rows, 1),
        ("h", DType::F32, t, C as u32 + 1),
        ("logits", DType::F32, out_rows, STRIDE as u32),
    ];
    let mut end = 0;
    let buffers = shapes.map(|(name, dtype, rows, stride)| {
        let (offset, bytes) = (end, u64::from(rows) * u64::from(stride) * 4);
        end = (offset + bytes).next_multiple_of(ALIGN);
        Buffer { name: name.to_owned(), memory: 0, offset, bytes, dtype, rows, stride }
    });
    let b = |i| Arg::Buffer(i, 0);
    let advance = Step {
        unit: 0,
        code: Code::Kernel(u32::from(matches!(kind, Little(_)))),
        args: (0..states).map(Arg::State).chain([0, 1, 2, 4].map(b)).collect(),
        rows: RowSpace::Tokens,
        grid: Grid::One,
        barrier: false,
        deps: vec![],
        node: 0,
    };
    let head = Step {
        code: Code::Kernel(2),
        args: vec![b(4), b(3), b(5)],
        rows: RowSpace::Outputs,
        grid: Grid::Tiles { rows: 1, tiles: 1 },
        barrier: true,
        deps: vec![0],
        ..advance.clone()
    };
    Entry {
        kind,
        out_rows,
        buffers: buffers.to_vec(),
        logits: 5,
        locations: vec![],
        steps: vec![advance, head],
    }
}

/// The toy, with room for `snapshots` snapshots for each slot.
pub(crate) fn toy(snapshots: u32) -> Program {
    toy_with("head", snapshots)
}

/// The toy with this head.
pub(crate) fn toy_with(head: &str, snapshots: u32) -> Program {
    let states = vec![
        state("layers.0.s", [SLOTS, 1, R, C], StateKind::Recurrent, snapshots),
        state("layers.0.conv", [SLOTS, 1, WIDTH - 1, C], StateKind::Convolution, snapshots),
        state("layers.1.k", [SLOTS, 1, CTX, 1], StateKind::Cache, 0),
    ];
    program(states, ["advance", "little_advance", head])
}

/// The toy with only a ring.
pub(crate) fn ring() -> Program {
    let kind = StateKind::Ring { window: WINDOW as u32 };
    program(vec![state("layers.0.k", [SLOTS, 1, RING, 1], kind, 0)], ["slide", "little_slide", "head"])
}

pub(crate) fn state(name: &str, shape: [usize; 4], kind: StateKind, snapshots: u32) -> StateBuf {
    StateBuf {
        memory: 0,
        name: name.to_owned(),
        shape: shape.map(|n| n as u32),
        format: Format::F32,
        order: CacheOrder::Rows,
        rotated: 1,
        kind,
        snapshots,
    }
}

/// A plan whose first step takes all states.
pub(crate) fn program(states: Vec<StateBuf>, kernels: [&str; 3]) -> Program {
    let mut plan = common::plan(&ENTRIES);
    // All states and the rows, or the logits.
    let advanced = || (0..states.len()).chain([states.len() + 3]).collect();
    let results = [advanced(), advanced(), vec![2]];
    let kernel = |(symbol, results): (&str, Vec<usize>)| KernelRef {
        symbol: symbol.to_owned(),
        results: Results::new(results).unwrap(),
    };
    plan.kernels = kernels.into_iter().zip(results).map(kernel).collect();
    plan.entries = ENTRIES.iter().map(|&(kind, out)| entry(kind, out, states.len() as u32)).collect();
    plan.states = states;
    let ends = plan.entries.iter().flat_map(|e| &e.buffers).map(|b| b.offset + b.bytes);
    plan.memories[0].arena_bytes = ends.max().unwrap_or(0).next_multiple_of(ALIGN);
    Program::new(plan, &resolve).unwrap()
}

pub(crate) fn with_toy(snapshots: u32, test: impl FnOnce(&mut Engine<'_>)) {
    let dir = common::bundle();
    test(&mut common::open(&toy(snapshots), dir.path(), 2));
}

pub(crate) fn sequence(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 31 + seed * 53) % 256) as u32).collect()
}

pub(crate) fn full(ids: &[u32]) -> Vec<ToyToken> {
    ids.iter().map(|&id| (id, false)).collect()
}

/// Decodes one token, and compares its logits with the reference for `ids`, which end with it.
#[track_caller]
pub(crate) fn check_decode(engine: &mut Engine<'_>, slot: u32, ids: &[u32]) {
    let (&last, before) = ids.split_last().unwrap();
    let mut seen = Vec::new();
    let keep = &mut |_: usize, l: &[f32]| -> moec_runtime::Result<()> {
        seen = l.to_vec();
        Ok(())
    };
    engine.decode(&[(slot, before.len(), last)], keep).unwrap();
    assert_eq!(seen, reference(&full(ids)));
    assert_eq!(engine.len(slot), ids.len());
}

pub(crate) fn fill(
    engine: &mut Engine<'_>,
    slot: u32,
    start: usize,
    ids: &[u32],
) -> moec_runtime::Result<()> {
    engine.prefill(slot, start, ids, LogitRows::None, &mut |_, _| Ok(()))
}

pub(crate) fn message_of(e: &Error) -> String {
    format!("{e} | {}", e.hint().unwrap_or_default())
}

pub(crate) const GO_BACK: &str = "give the sequence again from its beginning, or go back to a snapshot";
pub(crate) const BUILD: &str = "give the sequence again from its beginning, or build again: this version of moec gives states room for snapshots";
