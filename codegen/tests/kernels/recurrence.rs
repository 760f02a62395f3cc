//! Kernels whose rows are in order: each changes the state that the next row of its sequence reads.

use crate::harness::{Case, Expect, Operand, Rng, check, random, run, strided};
use crate::machines::machines;
use crate::simple::activation;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{CausalConv, DeltaRule, SelectiveScan};
use moec_codegen::{KernelSpec, compile};
use moec_ir::op::Activation;

/// Sequences of the states.
const SLOTS: usize = 3;
/// Rows of a call: of two sequences in turn, one after the other, and padding before, between and after them.
const POS: [i32; 12] = [-1, 4, 5, 0, 6, -1, -7, 1, 2, 7, 8, -1];
const SLOT: [i32; 12] = [0, 2, 2, 0, 2, 2, 0, 0, 0, 2, 2, 1];

/// The rows of `POS` with a position, and their sequences.
fn rows(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).filter(|&r| POS[r] >= 0).map(|r| (r, SLOT[r] as usize))
}

fn places(n: usize) -> [Operand; 2] {
    [POS, SLOT].map(|of| Operand::Ints(of[..n].to_vec()))
}

/// A result: the rows with a position hold `want`, the rest is anything.
fn expected(n: usize, cols: usize, ld: usize, want: &[f64]) -> Vec<f32> {
    strided(n, cols, ld, |r, c| if POS[r] < 0 { f32::NAN } else { want[r * cols + c] as f32 })
}

fn conv_case(
    rng: &mut Rng,
    n: usize,
    channels: usize,
    taps: usize,
    bias: bool,
    act: Option<Activation>,
) -> Case {
    let before = taps - 1;
    let (x_ld, out_ld) = (channels + rng.below(4), channels + rng.below(4));
    let state = rng.floats(SLOTS * before * channels);
    let x = random(rng, n, channels, x_ld);
    let w = rng.floats(taps * channels);
    let b = rng.floats(if bias { channels } else { 0 });
    let (mut after, mut want) = (state.clone(), vec![0.0; n * channels]);
    for (r, slot) in rows(n) {
        for c in 0..channels {
            let mut column: Vec<f32> =
                (0..before).map(|j| after[(slot * before + j) * channels + c]).collect();
            column.push(x[r * x_ld + c]);
            let products =
                column.iter().enumerate().map(|(j, &x)| f64::from(x) * f64::from(w[j * channels + c]));
            let sum = products.sum::<f64>() + b.get(c).map_or(0.0, |&b| f64::from(b));
            want[r * channels + c] = act.map_or(sum, |act| f64::from(activation(act, sum as f32)));
            for j in 0..before {
                after[(slot * before + j) * channels + c] = column[j + 1];
            }
        }
    }
    let out = Operand::Floats(strided(n, channels, out_ld, |_, _| 5.0));
    let with_bias = bias.then_some(Operand::Floats(b));
    let head = [Operand::Floats(state), Operand::Floats(x), Operand::Floats(w)];
    let operands: Vec<_> = head.into_iter().chain(with_bias).chain(places(n)).chain([out]).collect();
    let at = operands.len() - 1;
    Case {
        spec: CausalConv { rows: POS.len(), channels, taps, act, bias, x_ld, out_ld }.into(),
        n,
        operands,
        // What is kept of rows are their numbers.
        expect: vec![
            (0, Expect::Floats(after, 0.0)),
            (at, Expect::Floats(expected(n, channels, out_ld, &want), 2e-6)),
        ],
    }
}

fn conv_cases() -> Vec<Case> {
    let mut rng = Rng::new(81);
    let mut cases = Vec::new();
    for (i, channels) in [1, 5, 16, 24, 63, 64, 65, 129, 200].into_iter().enumerate() {
        for (j, taps) in [1, 2, 4].into_iter().enumerate() {
            let act = [None, Some(Activation::Silu)][(i + j) % 2];
            let n = [12, 1, 5, 0][(i + 2 * j) % 4];
            cases.push(conv_case(&mut rng, n, channels, taps, i % 2 == 0, act));
        }
    }
    cases.push(conv_case(&mut rng, 12, 96, 4, true, Some(Activation::Silu)));
    cases
}

#[test]
fn convolutions() {
    check(&conv_cases());
}

/// Heads of keys and of values, channels of a key and of a value.
type Heads = [usize; 4];

fn delta_case(
    rng: &mut Rng,
    n: usize,
    [key_heads, heads, key, value]: Heads,
    by_channel: bool,
    corrects: bool,
) -> Case {
    let decays = if by_channel { key } else { 1 };
    let widths = [key_heads * key, key_heads * key, heads * value, heads * decays, heads];
    let ld = widths.map(|width| width + rng.below(4));
    let out_ld = heads * value + rng.below(4);
    let state = rng.floats(SLOTS * heads * key * value);
    // Keys and queries are about as long as 1, as those that are normalised.
    let long = (3.0 / key as f32).sqrt();
    let mut operand =
        |at: usize, of: &dyn Fn(f32) -> f32| strided(n, widths[at], ld[at], |_, _| of(rng.float()));
    let (q, k) = (operand(0, &|x| x * long), operand(1, &|x| x * long));
    let (v, decay) = (operand(2, &|x| 2.0 * x), operand(3, &|x| -3.0 * x * x));
    let beta = operand(4, &|x| x.abs());
    let mut after: Vec<f64> = state.iter().map(|&x| f64::from(x)).collect();
    let mut want = vec![0.0; n * heads * value];
    for (r, slot) in rows(n) {
        for h in 0..heads {
            let of_key = h / (heads / key_heads) * key;
            let at = |x: &[f32], i: usize, c: usize| f64::from(x[r * ld[i] + c]);
            let s = &mut after[(slot * heads + h) * key * value..][..key * value];
            for (i, x) in s.iter_mut().enumerate() {
                *x *= at(&decay, 3, h * decays + i / value % decays).exp();
            }
            for j in 0..value {
                let said: f64 = if corrects {
                    (0..key).map(|i| at(&k, 1, of_key + i) * s[i * value + j]).sum()
                } else {
                    0.0
                };
                let change = at(&beta, 4, h) * (at(&v, 2, h * value + j) - said);
                for i in 0..key {
                    s[i * value + j] += at(&k, 1, of_key + i) * change;
                }
                want[(r * heads + h) * value + j] =
                    (0..key).map(|i| at(&q, 0, of_key + i) * s[i * value + j]).sum();
            }
        }
    }
    let spec = DeltaRule { rows: POS.len(), key_heads, heads, key, value, corrects, by_channel, ld, out_ld };
    let floats = [q, k, v, decay, beta].map(Operand::Floats);
    let out = Operand::Floats(strided(n, heads * value, out_ld, |_, _| 5.0));
    let first = [Operand::States([key, value], state)];
    Case {
        spec: spec.into(),
        n,
        operands: first.into_iter().chain(floats).chain(places(n)).chain([out]).collect(),
        expect: vec![
            (0, Expect::States([key, value], after.iter().map(|&x| x as f32).collect(), 1e-5)),
            (8, Expect::Floats(expected(n, heads * value, out_ld, &want), 1e-5)),
        ],
    }
}

const HEADS: [Heads; 8] = [
    [1, 1, 2, 8],
    [2, 4, 16, 24],
    [2, 6, 10, 40],
    [1, 3, 64, 16],
    [3, 3, 6, 5],
    [1, 2, 22, 1],
    [2, 2, 30, 33],
    [1, 2, 128, 128],
];

fn delta_cases() -> Vec<Case> {
    let mut rng = Rng::new(82);
    let mut cases = Vec::new();
    for (i, heads) in HEADS.into_iter().enumerate() {
        for by_channel in [false, true] {
            cases.push(delta_case(&mut rng, 12, heads, by_channel, true));
        }
        // The plain sums of state spaces.
        cases.push(delta_case(&mut rng, 12, heads, false, false));
        if i < 3 {
            cases.push(delta_case(&mut rng, [1, 5, 8][i], heads, i % 2 == 0, true));
        }
    }
    cases
}

#[test]
fn delta_rules() {
    check(&delta_cases());
}

fn scan_case(rng: &mut Rng, n: usize, channels: usize, kept: usize) -> Case {
    let widths = [kept, kept, channels, channels];
    let ld = widths.map(|width| width + rng.below(4));
    let out_ld = channels + rng.below(4);
    let state = rng.floats(SLOTS * kept * channels);
    let mut operand =
        |at: usize, of: &dyn Fn(f32) -> f32| strided(n, widths[at], ld[at], |_, _| of(rng.float()));
    let (c, b, x) = (operand(0, &|x| x), operand(1, &|x| x), operand(2, &|x| 2.0 * x));
    let dt = operand(3, &|x| x.abs());
    let rate: Vec<f32> = rng.floats(kept * channels).iter().map(|x| -8.0 * x.abs()).collect();
    let mut after: Vec<f64> = state.iter().map(|&x| f64::from(x)).collect();
    let mut want = vec![0.0; n * channels];
    for (r, slot) in rows(n) {
        let at = |of: &[f32], i: usize, c: usize| f64::from(of[r * ld[i] + c]);
        for j in 0..channels {
            for i in 0..kept {
                let s = &mut after[(slot * kept + i) * channels + j];
                let step = at(&dt, 3, j);
                *s = (f64::from(rate[i * channels + j]) * step).exp() * *s
                    + at(&b, 1, i) * step * at(&x, 2, j);
                want[r * channels + j] += at(&c, 0, i) * *s;
            }
        }
    }
    let spec = SelectiveScan { rows: POS.len(), channels, state: kept, ld, out_ld };
    let floats = [c, b, x, dt, rate].map(Operand::Floats);
    let out = Operand::Floats(strided(n, channels, out_ld, |_, _| 5.0));
    let first = [Operand::States([kept, channels], state)];
    Case {
        spec: spec.into(),
        n,
        operands: first.into_iter().chain(floats).chain(places(n)).chain([out]).collect(),
        expect: vec![
            (0, Expect::States([kept, channels], after.iter().map(|&x| x as f32).collect(), 1e-5)),
            (8, Expect::Floats(expected(n, channels, out_ld, &want), 1e-5)),
        ],
    }
}

fn scan_cases() -> Vec<Case> {
    let mut rng = Rng::new(83);
    let shapes = [(1, 2), (8, 16), (24, 16), (33, 6), (63, 10), (64, 16), (130, 2), (200, 64)];
    let whole: Vec<Case> =
        shapes.into_iter().map(|(channels, kept)| scan_case(&mut rng, 12, channels, kept)).collect();
    let few = [1, 5, 0].map(|n| scan_case(&mut rng, n, 40, 16));
    whole.into_iter().chain(few).collect()
}

#[test]
fn selective_scans() {
    check(&scan_cases());
}

/// Rows `at .. at + n` of an operand whose rows are the call's; weights and states are left as they are.
fn part(case: &Case, at: usize, n: usize) -> Case {
    let cut = |operand: &mut Operand, ld: usize| match operand {
        Operand::Floats(x) => *x = x[at * ld..x.len().min((at + n) * ld)].to_vec(),
        Operand::Ints(x) => *x = x[at..at + n].to_vec(),
        other => panic!("{other:?}"),
    };
    let mut case = Case { n, ..case.clone() };
    let last = case.operands.len() - 1;
    let by_row: Vec<(usize, usize)> = match &case.spec {
        KernelSpec::CausalConv(of) => vec![(1, of.x_ld), (last, of.out_ld)],
        KernelSpec::DeltaRule(of) => (1..).zip(of.ld).chain([(last, of.out_ld)]).collect(),
        KernelSpec::SelectiveScan(of) => (1..).zip(of.ld).chain([(last, of.out_ld)]).collect(),
        other => panic!("{other:?}"),
    };
    for (i, ld) in by_row.into_iter().chain([(last - 2, 1), (last - 1, 1)]) {
        cut(&mut case.operands[i], ld);
    }
    case
}

/// What a prompt leaves and gives does not depend on how it is cut into chunks.
#[test]
fn chunks_give_the_same_bits() {
    let cases: Vec<Case> = conv_cases()
        .into_iter()
        .chain(delta_cases())
        .chain(scan_cases())
        .filter(|case| case.n == 12)
        .collect();
    for machine in machines() {
        let isa = machine.isa();
        let specs: Vec<_> = cases.iter().map(|case| case.spec.clone()).collect();
        let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap_or_else(|e| panic!("{e}")));
        let loaded = loaded.unwrap_or_else(|e| panic!("{e}"));
        for case in &cases {
            let kernel = loaded.kernel(&case.spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
            let whole = run(kernel, &isa, case, usize::MAX);
            for chunk in [7, 1] {
                let (mut state, mut out) = (None, Vec::new());
                for at in (0..case.n).step_by(chunk) {
                    let mut part = part(case, at, chunk.min(case.n - at));
                    if let Some(state) = state.take() {
                        part.operands[0] = Operand::Ints(state);
                    }
                    let mut words = run(kernel, &isa, &part, 3);
                    out.extend(words.pop().expect("a result"));
                    state = Some(words.swap_remove(0).into_iter().map(u32::cast_signed).collect());
                }
                let state: Vec<u32> = state.iter().flatten().map(|x| x.cast_unsigned()).collect();
                let what = format!("calls of {chunk}: {:?} on {isa:?}", case.spec);
                assert!(whole[0] == state, "other states in {what}");
                assert!(whole.last() == Some(&out), "other rows in {what}");
            }
        }
    }
}
