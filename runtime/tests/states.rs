//! States of every kind: toys with a recurrence, a convolution, a cache, a ring go back exactly, or say who cannot.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "what fails here fails the test")]

mod common;

use common::{Args, CTX, SLOTS, STRIDE, V};
use moec_ir::EntryKind::{self, Decode, Little, Prefill};
use moec_ir::plan::*;
use moec_ir::{DType, Format};
use moec_runtime::bundle::abi::KernelFn;
use moec_runtime::kv::saved::{Saved, save};
use moec_runtime::serving::generate::{Way, generate_by};
use moec_runtime::{
    Decoder, Engine, Error, Fallbacks, Program, Request, Row, Sampler, Sampling, Want, best_of, generate,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use std::cell::Cell;
use std::sync::Mutex;

/// Channels.
const C: usize = 3;
/// Rows of the recurrence.
const R: usize = 2;
/// Width of the convolution.
const WIDTH: usize = 3;
/// Positions that attention over the ring sees, and that the ring holds.
const WINDOW: usize = 5;
const RING: usize = 22;
/// Tokens that the head of few chooses among: not 0, which leaves the sum of ids as it is, and so would follow itself for good.
const OFTEN: std::ops::RangeInclusive<usize> = 1..=3;
/// γ of big-little decoding, at which some tokens are kept and some are not.
const GAMMA: f32 = 0.5;

const ENTRIES: [(EntryKind, u32); 6] =
    [(Prefill(4), 4), (Prefill(16), 5), (Decode(1), 1), (Decode(2), 2), (Little(1), 1), (Little(2), 2)];

fn embed(id: u32, c: usize) -> f32 {
    ((id as usize * (7 + 2 * c) + 3 * c) % 31) as f32 / 4.0
}

/// What a token adds to the recurrence; the little model takes it for another one.
fn input(id: u32, little: bool, c: usize) -> f32 {
    embed(if little { id + 1 } else { id }, c)
}

/// A token, and whether the little model has taken it in.
type Taken = (u32, bool);

/// Logits after a sequence, from the definitions: a recurrence `S = S / 2 + (r + 1) · x`, a causal convolution of `x`, and
/// a sum over all ids.
fn reference(seq: &[Taken]) -> Vec<f32> {
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

fn logits(h: [f32; C], ids: usize) -> Vec<f32> {
    let of = |v: usize| {
        let own: f32 = h.iter().enumerate().map(|(c, &h)| h * embed(v as u32, c)).sum();
        (own / 4.0 + (ids % 89 * (v * 37 + 11)) as f32).rem_euclid(251.0)
    };
    (0..V).map(of).collect()
}

/// `[recurrence, convolution, cache, ids, pos, slot, h]`: one item, the rows in order.
unsafe extern "C" fn advance<const LITTLE: bool>(
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
fn windowed(seq: &[Taken]) -> Vec<f32> {
    let seen = seq.iter().rev().take(WINDOW).enumerate();
    let h = seen.fold([0f32; C], |h, (k, &(id, little))| {
        std::array::from_fn(|c| h[c] + input(id, little, c) / (k + 1) as f32)
    });
    logits(h, seq.len())
}

/// `[ring, ids, pos, slot, h]`: one item. All rows are written before the first looks back.
unsafe extern "C" fn slide<const LITTLE: bool>(a: *const *mut u8, n: i64, begin: i64, end: i64, _: *mut u8) {
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

/// `[h, rows, logits]`, item = output row. `FEW`: tokens of [`OFTEN`] alone are chosen, so that text repeats itself.
unsafe extern "C" fn head<const FEW: bool>(a: *const *mut u8, _n: i64, begin: i64, end: i64, _: *mut u8) {
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

fn resolve(symbol: &str) -> Option<KernelFn> {
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

fn entry(kind: EntryKind, out_rows: u32, states: u32) -> Entry {
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
    Entry { kind, out_rows, buffers: buffers.to_vec(), logits: 5, places: vec![], steps: vec![advance, head] }
}

/// The toy, with room for so many snapshots for each slot.
fn toy(snapshots: u32) -> Program {
    toy_with("head", snapshots)
}

fn toy_with(head: &str, snapshots: u32) -> Program {
    let states = vec![
        state("layers.0.s", [SLOTS, 1, R, C], StateKind::Recurrent, snapshots),
        state("layers.0.conv", [SLOTS, 1, WIDTH - 1, C], StateKind::Convolution, snapshots),
        state("layers.1.k", [SLOTS, 1, CTX, 1], StateKind::Cache, 0),
    ];
    program(states, ["advance", "little_advance", head])
}

/// The toy with a ring alone.
fn ring() -> Program {
    let kind = StateKind::Ring { window: WINDOW as u32 };
    program(vec![state("layers.0.k", [SLOTS, 1, RING, 1], kind, 0)], ["slide", "little_slide", "head"])
}

fn state(name: &str, shape: [usize; 4], kind: StateKind, snapshots: u32) -> StateBuf {
    StateBuf {
        memory: 0,
        name: name.to_owned(),
        shape: shape.map(|n| n as u32),
        format: Format::F32,
        order: CacheOrder::Rows,
        kind,
        snapshots,
    }
}

/// A plan whose first step takes all states.
fn program(states: Vec<StateBuf>, kernels: [&str; 3]) -> Program {
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

fn with_toy(snapshots: u32, test: impl FnOnce(&mut Engine<'_>)) {
    let dir = common::bundle();
    test(&mut common::open(&toy(snapshots), dir.path(), 2));
}

fn sequence(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 7 + i * 31 + seed * 53) % 256) as u32).collect()
}

fn full(ids: &[u32]) -> Vec<Taken> {
    ids.iter().map(|&id| (id, false)).collect()
}

/// Decodes one token, and holds its logits against the reference for `ids`, which end with it.
#[track_caller]
fn check_decode(engine: &mut Engine<'_>, slot: u32, ids: &[u32]) {
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

fn fill(engine: &mut Engine<'_>, slot: u32, start: usize, ids: &[u32]) -> moec_runtime::Result<()> {
    engine.prefill(slot, start, ids, Want::None, &mut |_, _| Ok(()))
}

fn said(e: &Error) -> String {
    format!("{e} | {}", e.hint().unwrap_or_default())
}

const GO_BACK: &str = "give the sequence again from its beginning, or go back to a snapshot";
const BUILD: &str = "give the sequence again from its beginning, or build again: this version of moec gives states room for snapshots";

#[test]
fn prompts_in_any_chunks_and_tokens_are_the_recurrence() {
    with_toy(0, |engine| {
        let seqs: Vec<Vec<u32>> = (0..SLOTS).map(|s| sequence(40, s)).collect();
        for (slot, seq) in seqs.iter().enumerate() {
            // In chunks of 16 and 4, then on from where it ended.
            for (from, to) in [(0, 21), (21, 24)] {
                engine
                    .prefill(slot as u32, from, &seq[from..to], Want::All, &mut |pos, l| {
                        assert_eq!(l, reference(&full(&seq[..=pos])), "slot {slot} position {pos}");
                        Ok(())
                    })
                    .unwrap();
            }
        }
        for at in 24..40 {
            let batch: Vec<_> = (0..SLOTS).map(|s| (s as u32, at, seqs[s][at])).collect();
            let sink = &mut |i: usize, l: &[f32]| {
                assert_eq!(l, reference(&full(&seqs[i][..=at])), "slot {i} position {at}");
                Ok(())
            };
            engine.decode(&batch, sink).unwrap();
        }
    });
}

#[test]
fn a_sequence_begins_as_zeros() {
    with_toy(0, |engine| {
        let [first, second] = [sequence(9, 1), sequence(7, 2)];
        fill(engine, 1, 0, &first).unwrap();
        engine.reset(1).unwrap();
        assert!(engine.is_empty(1));
        fill(engine, 1, 0, &second[..6]).unwrap();
        check_decode(engine, 1, &second);
        // Without a reset, by a prompt that begins at 0, by a token, and by going back to nothing.
        fill(engine, 1, 0, &first[..8]).unwrap();
        check_decode(engine, 1, &first);
        check_decode(engine, 1, &second[..1]);
        engine.rewind(1, 0).unwrap();
        check_decode(engine, 1, &first[..1]);
    });
}

#[test]
fn snapshots_bring_a_sequence_back_exactly() {
    with_toy(2, |engine| {
        let seq = sequence(20, 3);
        fill(engine, 0, 0, &seq[..3]).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 3);
        fill(engine, 0, 3, &seq[3..6]).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 6);
        // Other slots have snapshots of their own.
        fill(engine, 2, 0, &sequence(6, 9)).unwrap();
        assert_eq!(engine.snapshot(2).unwrap(), 6);
        check_decode(engine, 0, &seq[..7]);
        fill(engine, 0, 7, &seq[7..9]).unwrap();
        engine.rewind(0, 6).unwrap();
        let other = [&seq[..6], &[200, 100]].concat();
        check_decode(engine, 0, &other[..7]);
        check_decode(engine, 0, &other);
        // A snapshot stays for a second time, and a prompt goes back to it as `rewind` does.
        fill(engine, 0, 6, &seq[6..9]).unwrap();
        check_decode(engine, 0, &seq[..10]);
        engine.rewind(0, 3).unwrap();
        // What was kept of later positions is of another sequence now.
        let third = [&seq[..3], &sequence(8, 5)].concat();
        fill(engine, 0, 3, &third[3..10]).unwrap();
        let e = engine.rewind(0, 6).unwrap_err();
        assert_eq!(
            said(&e),
            format!(
                "state `layers.0.s` (recurrent) cannot rewind slot 0 from 10 tokens to 6: the snapshot is at 3 | {GO_BACK}"
            )
        );
        check_decode(engine, 0, &third);
        engine.rewind(2, 6).unwrap();
        check_decode(engine, 2, &[&sequence(6, 9)[..], &[4]].concat());
    });
}

/// Every kind of state comes back from a file as it was; where one cannot go back, the file's end is where it goes on.
#[test]
fn saved_states_of_every_kind_go_on() {
    let dir = common::bundle();
    let path = dir.path().join("saved");
    for (program, snapshots) in [(toy(0), false), (toy(2), true), (ring(), false)] {
        let seq = sequence(33, 6);
        let mut engine = common::open(&program, dir.path(), 2);
        for end in [10, 20, 30] {
            fill(&mut engine, 1, end - 10, &seq[end - 10..end]).unwrap();
            if snapshots {
                engine.snapshot(1).unwrap();
            }
        }
        save(&engine, 1, &seq[..30], &path).unwrap();
        let mut want = Vec::new();
        for (at, &id) in seq.iter().enumerate().skip(30) {
            engine
                .decode(&[(1, at, id)], &mut |_, l| {
                    want.push(l.to_vec());
                    Ok(())
                })
                .unwrap();
        }
        let mut engine = common::open(&program, dir.path(), 1);
        fill(&mut engine, 2, 0, &sequence(9, 1)).unwrap();
        Saved::open(&path, &program).unwrap().restore(&mut engine, 2).unwrap();
        let mut got = Vec::new();
        for (at, &id) in seq.iter().enumerate().skip(30) {
            engine
                .decode(&[(2, at, id)], &mut |_, l| {
                    got.push(l.to_vec());
                    Ok(())
                })
                .unwrap();
        }
        assert!(got == want && got.len() == 3);
        // What a ring has overwritten is not there in the file either; a recurrence goes back to its snapshots.
        assert!(matches!(engine.rewind(2, 3), Err(Error::State { .. })));
        if snapshots {
            assert_eq!([9, 15, 25].map(|most| engine.resumes(2, most)), [0, 10, 20]);
            for to in [20, 10] {
                engine.rewind(2, to).unwrap();
                check_decode(&mut engine, 2, &seq[..=to]);
            }
        }
    }
}

/// A file that says of its snapshots what cannot be.
#[test]
fn saved_snapshots_are_checked() {
    let (dir, program) = (common::bundle(), toy(2));
    let path = dir.path().join("saved");
    let mut engine = common::open(&program, dir.path(), 1);
    fill(&mut engine, 0, 0, &sequence(4, 1)).unwrap();
    engine.snapshot(0).unwrap();
    fill(&mut engine, 0, 4, &sequence(4, 2)).unwrap();
    save(&engine, 0, &sequence(8, 1), &path).unwrap();
    let whole = std::fs::read(&path).unwrap();
    for (at, to, why) in [
        (60, 8, "number of snapshots"),
        (60, 2, "ascending positions"),
        (60, 0, "bytes in place of"),
        (100, 0, "ascending positions"),
        (100, 8, "ascending positions"),
        (100, 5, "not what was saved"),
    ] {
        let mut changed = whole.clone();
        changed[at] = to;
        std::fs::write(&path, changed).unwrap();
        let e = Saved::open(&path, &program).and_then(|s| s.restore(&mut engine, 1)).unwrap_err();
        assert!(matches!(e, Error::Saved { .. }) && e.to_string().contains(why), "{e}, not {why}");
        assert!(engine.is_empty(1) && engine.resumes(1, 9) == 0);
    }
}

/// Guesses that do not count are taken back: the state goes to where they begin, and takes in again what counts.
#[test]
fn guesses_of_folded_states_leave_the_tokens_of_a_plain_run() {
    let (dir, program) = (common::bundle(), toy_with("head_of_few", 2));
    let mut engine = common::open(&program, dir.path(), 2);
    let (mut kept, mut guessed) = (0, 0);
    for seed in 0..20 {
        let prompt = sequence(12, seed);
        let request = Request { slot: seed as u32 % 3, prompt: &prompt, n: 40, end: &[] };
        let [plain, by_guesses] = [0, 1].map(|guesses| {
            let mut sampler = Sampler::new(Sampling::default());
            let by = (&mut Decoder::full(), &mut sampler);
            let way = Way { guesses, ..Way::default() };
            generate_by(&mut engine, &request, way, by, &mut |_| Ok(())).unwrap()
        });
        assert_eq!(by_guesses.0.ids, plain.0.ids);
        (kept, guessed) = (kept + by_guesses.1.kept, guessed + by_guesses.1.guessed);
    }
    // Enough of either that chance does not decide.
    assert!(kept >= 20 && guessed - kept >= 20, "{kept} of {guessed}");
}

#[test]
fn what_cannot_be_taken_back_is_not_guessed() {
    let dir = common::bundle();
    let program = toy(0);
    let mut engine = common::open(&program, dir.path(), 1);
    let request = Request { slot: 0, prompt: &[1, 2, 1, 2], n: 3, end: &[] };
    let mut sampler = Sampler::new(Sampling::default());
    let by = (&mut Decoder::full(), &mut sampler);
    let way = Way { guesses: 4, ..Way::default() };
    let e = generate_by(&mut engine, &request, way, by, &mut |_| Ok(())).unwrap_err();
    assert_eq!(
        said(&e),
        "state `layers.0.s` (recurrent) cannot take back tokens that were only guessed | leave out `--speculate`"
    );
}

#[test]
fn the_earliest_of_equal_snapshots_goes_where_there_is_no_room() {
    // Room for three, whichever slots they are of.
    with_toy(1, |engine| {
        let seq = sequence(12, 4);
        for to in [2, 4, 6, 8] {
            fill(engine, 0, to - 2, &seq[to - 2..to]).unwrap();
            // The same position twice takes no room.
            assert_eq!((engine.snapshot(0).unwrap(), engine.snapshot(0).unwrap()), (to, to));
        }
        check_decode(engine, 0, &seq[..9]);
        let e = engine.rewind(0, 2).unwrap_err();
        let expected = "state `layers.0.s` (recurrent) cannot rewind slot 0 from 9 tokens to 2: snapshots are at [4, 6, 8]";
        assert_eq!(e.to_string(), expected);
        for to in [6, 4] {
            assert_eq!((engine.resumes(0, to + 1), engine.resumes(0, 3)), (to, 0));
            engine.rewind(0, to).unwrap();
            check_decode(engine, 0, &seq[..=to]);
        }
        assert!(matches!(engine.rewind(0, 9), Err(Error::Gap { slot: 0, pos: 9, len: 5 })));
        for e in [engine.rewind(3, 0), engine.snapshot(3).map(|_| ())] {
            assert!(matches!(e, Err(Error::BadSlot { slot: 3, slots: 3 })));
        }
    });
}

/// What decoding a sequence by the rule gives: the tokens as they were taken in, and how often the full model was asked.
fn continuation(prompt: &[u32], n: usize, gamma: f32) -> (Vec<Taken>, usize) {
    let (mut seq, mut fallbacks) = (full(prompt), 0);
    let mut after = reference(&seq);
    for i in 0..n {
        let id = (0..V).fold(0, |b, v| if after[v] > after[b] { v } else { b }) as u32;
        if i + 1 == n {
            seq.push((id, false));
            break;
        }
        let little = [&seq[..], &[(id, true)]].concat();
        after = reference(&little);
        let max = after.iter().copied().fold(f32::MIN, f32::max);
        let p = 1.0 / after.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>();
        if p > f64::from(gamma) {
            seq = little;
        } else {
            fallbacks += 1;
            seq.push((id, false));
            after = reference(&seq);
        }
    }
    (seq.split_off(prompt.len()), fallbacks)
}

#[test]
fn a_token_that_is_decoded_again_finds_the_state_of_before() {
    with_toy(1, |engine| {
        for (seed, prompt) in [[7, 77, 3], [1, 2, 30], [90, 91, 5]].into_iter().enumerate() {
            for gamma in [0.0, 0.2, GAMMA, 0.9, 1.0] {
                let mut decoder = Decoder::big_little(engine.program(), gamma).unwrap();
                let request = Request { slot: (seed % SLOTS) as u32, prompt: &prompt, n: 30, end: &[] };
                let mut sampler = Sampler::new(Sampling::default());
                let done = generate(engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(())).unwrap();
                let (taken, full) = continuation(&prompt, 30, gamma);
                let ids: Vec<u32> = taken.iter().map(|t| t.0).collect();
                assert_eq!(
                    (done.ids, done.fallbacks),
                    (ids, Some(Fallbacks { tokens: 29, full })),
                    "{gamma}"
                );
                if gamma == GAMMA {
                    assert!((1..29).contains(&full), "both happen: {prompt:?} {full}");
                }
            }
        }
    });
}

#[test]
fn sequences_of_best_of_n_are_those_of_single_runs() {
    let hot = Sampling { temperature: 2.0, top_p: 0.9, top_k: 60, seed: 5, ..Sampling::GREEDY };
    let prompt = [9, 8, 70, 6, 5];
    with_toy(1, |engine| {
        for gamma in [GAMMA, 1.0] {
            let decoder = |e: &Engine<'_>| Decoder::big_little(e.program(), gamma).unwrap();
            // What slots held before is of no matter.
            for slot in 0..SLOTS as u32 {
                fill(engine, slot, 0, &sequence(11, slot as usize)).unwrap();
                engine.snapshot(slot).unwrap();
            }
            let request = Request { slot: 0, prompt: &prompt, n: 30, end: &[] };
            let mut own = decoder(engine);
            let done = best_of(engine, &request, SLOTS, &mut own, &hot).unwrap();
            let of_all = done.fallbacks.unwrap();
            let mut single = Fallbacks::default();
            for c in &done.candidates {
                let mut sampler = Sampler::new(Sampling { seed: c.seed, ..hot.clone() });
                let (mut own, request) = (decoder(engine), Request { slot: 1, ..request });
                let alone = generate(engine, &request, &mut own, &mut sampler, &mut |_| Ok(())).unwrap();
                assert_eq!(c.ids, alone.ids);
                let Fallbacks { tokens, full } = alone.fallbacks.unwrap();
                single = Fallbacks { tokens: single.tokens + tokens, full: single.full + full };
            }
            assert_eq!(of_all, single);
            let some = (1..of_all.tokens).contains(&of_all.full);
            assert!(if gamma < 1.0 { some } else { of_all.full == of_all.tokens }, "{of_all:?}");
            assert!(done.candidates.windows(2).all(|c| c[0].ids != c[1].ids));
        }
    });
}

#[test]
fn a_fork_goes_its_own_way() {
    with_toy(1, |engine| {
        let seq = sequence(8, 6);
        fill(engine, 0, 0, &seq).unwrap();
        fill(engine, 1, 0, &sequence(8, 7)).unwrap();
        engine.snapshot(1).unwrap();
        engine.fork(0, 1, 8).unwrap();
        engine.fork(0, 0, 8).unwrap();
        let [a, b] = [5, 250].map(|id| [&seq[..], &[id]].concat());
        check_decode(engine, 0, &a);
        check_decode(engine, 1, &b);
        // The snapshot was of what the slot held before.
        let e = engine.rewind(1, 8).unwrap_err();
        assert!(e.to_string().ends_with("from 9 tokens to 8: there is no snapshot"), "{e}");
        // A copy of a beginning, while the other goes on; they share the snapshot, until the last of them has left it.
        engine.snapshot(0).unwrap();
        let long = [&a[..], &[77, 78]].concat();
        fill(engine, 0, 9, &[77, 78]).unwrap();
        engine.fork(0, 1, 9).unwrap();
        engine.fork(1, 2, 9).unwrap();
        for (slot, id) in [(0, 3), (1, 4), (2, 5)] {
            let own = if slot == 0 { &long } else { &a };
            check_decode(engine, slot, &[&own[..], &[id]].concat());
        }
        engine.reset(0).unwrap();
        for slot in [1, 2] {
            engine.rewind(slot, 9).unwrap();
            check_decode(engine, slot, &[&a[..], &[6]].concat());
        }
        assert!(matches!(engine.fork(1, 0, 5), Err(Error::State { .. })));
        assert!(matches!(engine.fork(1, 0, 11), Err(Error::Gap { .. })));
    });
}

#[test]
fn what_has_no_room_does_not_go_back() {
    with_toy(0, |engine| {
        let seq = sequence(9, 8);
        fill(engine, 0, 0, &seq[..7]).unwrap();
        let back = "state `layers.0.s` (recurrent) cannot rewind slot 0 from 7 tokens to 5: the plan has no room for a \
                    snapshot";
        for e in [
            engine.rewind(0, 5).unwrap_err(),
            fill(engine, 0, 5, &[1, 2, 3]).unwrap_err(),
            engine.decode(&[(0, 5, 1)], &mut |_, _| Ok(())).unwrap_err(),
        ] {
            assert_eq!(said(&e), format!("{back} | {BUILD}"));
            assert_eq!(e.fault(), moec_runtime::Fault::Request);
        }
        let keep = "state `layers.0.s` (recurrent) cannot keep a snapshot: the plan has no room for one";
        for e in [
            engine.snapshot(0).unwrap_err(),
            engine.decode_little(&[(0, 7, 1)], &mut |_, _| Ok(())).unwrap_err(),
            Decoder::of(engine.program()).unwrap_err(),
        ] {
            assert_eq!(said(&e), format!("{keep} | {BUILD}"));
        }
        // Where the little model does not run nothing goes back.
        Decoder::big_little(engine.program(), 1.0).unwrap();
        // A batch is refused as a whole, and what was refused has changed nothing.
        fill(engine, 1, 0, &seq[..3]).unwrap();
        let batch = [(1, 3, seq[3]), (0, 5, 1)];
        assert!(matches!(engine.decode(&batch, &mut |_, _| Ok(())), Err(Error::State { .. })));
        check_decode(engine, 0, &seq[..8]);
        check_decode(engine, 1, &seq[..4]);
    });
}

/// A call that ends half way leaves a state that nobody knows: it does not count as that of any position.
#[test]
fn a_state_that_a_failed_call_has_changed_is_not_gone_on_with() {
    with_toy(1, |engine| {
        let seq = sequence(9, 2);
        let fail = |engine: &mut Engine<'_>, pos: usize| {
            let row = Row { slot: 0, pos, id: seq[pos] };
            let entry = engine.entry(Decode(1)).unwrap();
            let stop = &mut |moment, view: &moec_runtime::StepView<'_>| {
                if (moment, view.index()) == (moec_runtime::Moment::After, 0) {
                    return Err(Error::Stopped("enough".to_owned()));
                }
                Ok(())
            };
            let e = engine.trace_entry(entry, &[row], &[0], 0, stop).unwrap_err();
            assert!(matches!(e, Error::Stopped(_)));
        };
        fill(engine, 0, 0, &seq[..5]).unwrap();
        fail(engine, 5);
        let torn = "state `layers.0.s` (recurrent) cannot go on in slot 0: a call ended in an error while it changed the state";
        for e in [
            engine.decode(&[(0, 5, seq[5])], &mut |_, _| Ok(())).unwrap_err(),
            engine.snapshot(0).unwrap_err(),
            engine.fork(0, 1, 5).unwrap_err(),
            engine.rewind(0, 5).unwrap_err(),
        ] {
            assert_eq!(said(&e), format!("{torn} | {GO_BACK}"));
        }
        // From the beginning, or from a snapshot of where the call began.
        fill(engine, 0, 0, &seq[..5]).unwrap();
        engine.snapshot(0).unwrap();
        fail(engine, 5);
        check_decode(engine, 0, &seq[..6]);
        fail(engine, 6);
        engine.reset(0).unwrap();
        fill(engine, 0, 0, &seq[..8]).unwrap();
        check_decode(engine, 0, &seq);
    });
}

#[test]
fn a_hole_is_refused_where_a_state_is_no_cache() {
    with_toy(1, |engine| {
        let entry = engine.entry(Decode(1)).unwrap();
        let row = Row { slot: 0, pos: 4, id: 1 };
        let e = engine.trace_entry(entry, &[row], &[0], 0, &mut |_, _| Ok(())).unwrap_err();
        assert!(matches!(e, Error::Gap { slot: 0, pos: 4, len: 0 }));
        let entry = engine.entry(Prefill(4)).unwrap();
        let rows = [0, 1, 0].map(|pos| Row { slot: 0, pos, id: 1 });
        let e = engine.trace_entry(entry, &rows, &[0], 0, &mut |_, _| Ok(())).unwrap_err();
        assert!(matches!(e, Error::SlotTwice(0)));
        check_decode(engine, 0, &[9]);
    });
}

/// A snapshot of caches alone is a number.
#[test]
fn caches_go_back_by_their_length() {
    common::with_engine(&common::BIG_LITTLE, 2, |engine| {
        let seq = sequence(12, 1);
        fill(engine, 0, 0, &seq).unwrap();
        assert_eq!(engine.snapshot(0).unwrap(), 12);
        for to in [7, 3, 0] {
            engine.rewind(0, to).unwrap();
            assert_eq!(engine.len(0), to);
            let sink = &mut |_: usize, l: &[f32]| {
                assert_eq!(l, common::reference(&seq[..=to]));
                Ok(())
            };
            engine.decode(&[(0, to, seq[to])], sink).unwrap();
        }
        assert!(matches!(engine.rewind(0, 2), Err(Error::Gap { slot: 0, pos: 2, len: 1 })));
    });
}

/// States of different room go back as far as the one with the least, which the refusal names.
#[test]
fn the_state_with_the_least_room_is_named() {
    let dir = common::bundle();
    let mut plan = (*toy(2)).clone();
    plan.states[1].snapshots = 0;
    assert_eq!((plan.snapshots_of_slot(), plan.snapshot_distance()), (0, None));
    let program = Program::new(plan, &resolve).unwrap();
    let e = Decoder::of(&program).unwrap_err();
    assert_eq!(
        e.to_string(),
        "state `layers.0.conv` (convolution) cannot keep a snapshot: the plan has no room for one"
    );
    let mut plan = (*toy(2)).clone();
    plan.states[1].snapshots = 1;
    let program = Program::new(plan, &resolve).unwrap();
    let mut engine = common::open(&program, dir.path(), 1);
    let seq = sequence(6, 3);
    for to in [2, 4] {
        fill(&mut engine, 0, to - 2, &seq[to - 2..to]).unwrap();
        engine.snapshot(0).unwrap();
    }
    check_decode(&mut engine, 0, &seq[..5]);
    let e = engine.rewind(0, 3).unwrap_err();
    assert!(
        e.to_string().starts_with("state `layers.0.conv` (convolution) cannot rewind slot 0 from 5"),
        "{e}"
    );
    engine.rewind(0, 4).unwrap();
    check_decode(&mut engine, 0, &seq[..5]);
}

#[test]
fn a_ring_goes_back_as_far_as_it_holds_what_is_seen() {
    let (dir, program) = (common::bundle(), ring());
    let engine = &mut common::open(&program, dir.path(), 2);
    let seq = full(&sequence(60, 5));
    let ids: Vec<u32> = seq.iter().map(|t| t.0).collect();
    let check = |engine: &mut Engine<'_>, slot: u32, from: usize, to: usize| {
        let sink = &mut |pos: usize, l: &[f32]| {
            assert_eq!(l, windowed(&seq[..=pos]), "position {pos}");
            Ok(())
        };
        engine.prefill(slot, from, &ids[from..to], Want::All, sink)
    };
    check(engine, 0, 0, 18).unwrap();
    // Nothing is overwritten yet.
    check(engine, 0, 2, 18).unwrap();
    for at in 18..40 {
        let sink = &mut |_: usize, l: &[f32]| {
            assert_eq!(l, windowed(&seq[..=at]), "position {at}");
            Ok(())
        };
        engine.decode(&[(0, at, ids[at])], sink).unwrap();
    }
    // Positions up to 17 are gone, and from 22 on nobody sees them.
    let refused = "state `layers.0.k` (ring) cannot rewind slot 0 from 40 tokens to 21: it has overwritten what is seen from \
                   there, 22 is the least | give the sequence again from its beginning";
    assert_eq!(said(&engine.rewind(0, 21).unwrap_err()), refused);
    assert_eq!(said(&check(engine, 0, 21, 30).unwrap_err()), refused);
    engine.fork(0, 1, 40).unwrap();
    engine.rewind(0, 30).unwrap();
    // What was overwritten does not come back with a shorter sequence, nor in a copy.
    for slot in [0, 1] {
        assert!(matches!(engine.rewind(slot, 21), Err(Error::State { .. })));
        engine.rewind(slot, 22).unwrap();
        check(engine, slot, 22, 60).unwrap();
    }
    engine.rewind(0, 0).unwrap();
    check(engine, 0, 0, 3).unwrap();
    check(engine, 0, 1, 21).unwrap();
}

/// A token that is decoded again is one step back, which every ring can.
#[test]
fn a_ring_takes_a_token_twice() {
    let (dir, program) = (common::bundle(), ring());
    let engine = &mut common::open(&program, dir.path(), 2);
    let mut decoder = Decoder::of(&program).unwrap();
    let mut seq = full(&[4]);
    fill(engine, 2, 0, &[4]).unwrap();
    for (pos, id) in sequence(50, 2).into_iter().enumerate() {
        let before = decoder.fallbacks().unwrap().full;
        let seen = Mutex::new(Vec::new());
        decoder.decode(engine, &[(2, pos + 1, id)], &|_, l| *seen.lock().unwrap() = l.to_vec()).unwrap();
        seq.push((id, decoder.fallbacks().unwrap().full == before));
        assert_eq!(seen.into_inner().unwrap(), windowed(&seq), "position {pos}");
    }
    let Fallbacks { tokens, full } = decoder.fallbacks().unwrap();
    assert!((1..tokens).contains(&full), "both happen: {full}");
}

/// What is done with a slot: which act, the slot, a position and a number.
type Act = (u8, usize, usize, usize);

/// Does acts on an engine and on plain sequences. Whatever is not refused gives the logits of the plain sequence; whatever is
/// refused has changed nothing. Gives how often a sequence went back, and how often that was refused.
fn follow(program: &Program, logits: fn(&[Taken]) -> Vec<f32>, acts: &[Act]) -> [usize; 2] {
    let dir = common::bundle();
    let engine = &mut common::open(program, dir.path(), 1);
    let mut seqs = vec![Vec::<Taken>::new(); SLOTS];
    let mut back = [0; 2];
    for &(act, slot, at, n) in acts {
        let (slot, to) = (slot % SLOTS, at % SLOTS);
        let (len, s) = (seqs[slot].len(), slot as u32);
        // Often on from the end, where most of the acts are of interest.
        let pos = if act.is_multiple_of(2) { len } else { at % (len + 1) };
        let ids = sequence((1 + n % 19).min(CTX - pos), n);
        let (mut seen, first) = (Vec::new(), *ids.first().unwrap_or(&0));
        let sink = &mut |_: usize, l: &[f32]| -> moec_runtime::Result<()> {
            seen = l.to_vec();
            Ok(())
        };
        let mut next = seqs[slot][..pos].to_vec();
        let done = match act / 2 {
            0 | 1 if !ids.is_empty() => {
                next.extend(full(&ids));
                engine.prefill(s, pos, &ids, Want::Last, sink)
            }
            2 | 3 if !ids.is_empty() => {
                next.push((first, false));
                engine.decode(&[(s, pos, first)], sink)
            }
            4 if !ids.is_empty() => {
                next.push((first, true));
                engine.decode_little(&[(s, pos, first)], sink)
            }
            5 if at.is_multiple_of(2) => engine.rewind(s, pos),
            5 => {
                // An edit: to the furthest snapshot before it, which is always there.
                let keep = engine.resumes(s, pos);
                assert!(keep <= pos && (keep == pos || engine.rewind(s, pos).is_err()));
                next.truncate(keep);
                engine.rewind(s, keep).unwrap();
                Ok(())
            }
            6 => {
                next.clone_from(&seqs[slot]);
                engine.snapshot(s).map(|at| assert_eq!(at, len))
            }
            7 => {
                let tokens = if n.is_multiple_of(2) { seqs[to].len() } else { n % (seqs[to].len() + 1) };
                next = seqs[to][..tokens].to_vec();
                engine.fork(to as u32, s, tokens)
            }
            _ => {
                next.clear();
                engine.reset(s)
            }
        };
        let refused = done.is_err();
        match done {
            Ok(()) => seqs[slot] = next,
            // To nothing everybody goes back; snapshots are of all that is there, and the little model asks for their room.
            Err(e) => {
                let by_name = matches!(e, Error::State { .. }) && (pos > 0 || matches!(act / 2, 4 | 6 | 7));
                assert!(by_name, "{act} {slot} {pos}: {e}");
            }
        }
        if pos < len {
            back[usize::from(refused)] += 1;
        }
        if !seen.is_empty() {
            assert_eq!(seen, logits(&seqs[slot]));
        }
        for (slot, seq) in seqs.iter().enumerate() {
            assert_eq!(engine.len(slot as u32), seq.len());
        }
    }
    back
}

/// Nothing is silently wrong, in whatever order.
#[test]
fn any_acts_are_exact_or_refused() {
    let acts = prop::collection::vec((0..18_u8, 0..SLOTS, 0..CTX, 0..1000_usize), 1..120);
    let mut runner =
        TestRunner::new(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() });
    let sums = Cell::new([[0; 2]; 2]);
    let done = runner.run(&(0..6_u32, acts), |(room, acts)| {
        let [mut folded, mut windows] = sums.get();
        for (sum, n) in folded.iter_mut().zip(follow(&toy(room), reference, &acts)) {
            *sum += n;
        }
        for (sum, n) in windows.iter_mut().zip(follow(&ring(), windowed, &acts)) {
            *sum += n;
        }
        sums.set([folded, windows]);
        Ok(())
    });
    done.unwrap();
    assert!(sums.get().as_flattened().iter().all(|&n| n > 50), "both happen: {:?}", sums.get());
}
