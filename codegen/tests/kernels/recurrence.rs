//! Kernels that process rows in order: each row changes the state that the next row of its sequence reads.

use crate::gpu_kernels::run_case;
use crate::harness::{Case, Expect, Operand, Rng, check, random, run, strided};
use crate::machines::machines;
use crate::simple::activation;
use moec_codegen::jit::Loaded;
use moec_codegen::spec::{CausalConv, DeltaRule, SelectiveScan};
use moec_codegen::{KernelSpec, compile};
use moec_ir::op::Activation;

/// Number of states, one per sequence.
const SLOTS: usize = 3;
/// Maximum number of rows of a call.
const ROWS: usize = 56;
/// Number of rows in which two sequences alternate.
const IN_TURN: usize = 12;
/// Positions of a call's rows. First two sequences alternate, with padding before, between and after them;
/// then come many rows of one sequence, and many of the other.
const POS: [i32; ROWS] = [
    -1, 4, 5, 0, 6, -1, -7, 1, 2, 7, 8, -1, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24,
    25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, -1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15,
];
const SLOT: [i32; ROWS] = [
    0, 2, 2, 0, 2, 2, 0, 0, 0, 2, 2, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2,
    2, 2, 2, 2, 2, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

/// Slots (sequences) of the rows of `POS`.
fn rows(n: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..n).filter(|&r| POS[r] >= 0).map(|r| (r, SLOT[r] as usize))
}

fn positions(n: usize) -> [Operand; 2] {
    [POS, SLOT].map(|of| Operand::Ints(of[..n].to_vec()))
}

/// Expected result: `want` for rows with a position; other rows are not compared.
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
    let operands: Vec<_> = head.into_iter().chain(with_bias).chain(positions(n)).chain([out]).collect();
    let at = operands.len() - 1;
    Case {
        spec: CausalConv { rows: ROWS, channels, taps, act, bias, x_ld, out_ld }.into(),
        n,
        operands,
        // Padding rows are not compared.
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
            let n = [IN_TURN, 1, 5, 0][(i + 2 * j) % 4];
            cases.push(conv_case(&mut rng, n, channels, taps, i % 2 == 0, act));
        }
    }
    cases.push(conv_case(&mut rng, IN_TURN, 96, 4, true, Some(Activation::Silu)));
    cases
}

#[test]
fn convolutions() {
    check(&conv_cases());
}

/// Numbers of key and value heads, channels of a key and of a value.
type Heads = [usize; 4];

/// Variant of the recurrence.
#[derive(Clone, Copy, Debug)]
struct RecurrenceKind {
    by_channel: bool,
    corrects: bool,
    chunked: bool,
}

fn delta_case(rng: &mut Rng, n: usize, heads: Heads, does: RecurrenceKind) -> Case {
    // Functions for decay and beta of a random number in −1 .. 1.
    delta_case_of(rng, n, heads, does, [&|x| -3.0 * x * x, &f32::abs])
}

fn delta_case_of(
    rng: &mut Rng,
    n: usize,
    [key_heads, heads, key, value]: Heads,
    RecurrenceKind { by_channel, corrects, chunked }: RecurrenceKind,
    [decay, beta]: [&dyn Fn(f32) -> f32; 2],
) -> Case {
    let decays = if by_channel { key } else { 1 };
    let widths = [key_heads * key, key_heads * key, heads * value, heads * decays, heads];
    let ld = widths.map(|width| width + rng.below(4));
    let out_ld = heads * value + rng.below(4);
    let state = rng.floats(SLOTS * heads * key * value);
    // Keys and queries have a length of about 1, like normalised ones.
    let long = (3.0 / key as f32).sqrt();
    let mut operand =
        |at: usize, of: &dyn Fn(f32) -> f32| strided(n, widths[at], ld[at], |_, _| of(rng.float()));
    let (q, k) = (operand(0, &|x| x * long), operand(1, &|x| x * long));
    let (v, decay, beta) = (operand(2, &|x| 2.0 * x), operand(3, decay), operand(4, beta));
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
                let retrieved: f64 = if corrects {
                    (0..key).map(|i| at(&k, 1, of_key + i) * s[i * value + j]).sum()
                } else {
                    0.0
                };
                let change = at(&beta, 4, h) * (at(&v, 2, h * value + j) - retrieved);
                for i in 0..key {
                    s[i * value + j] += at(&k, 1, of_key + i) * change;
                }
                want[(r * heads + h) * value + j] =
                    (0..key).map(|i| at(&q, 0, of_key + i) * s[i * value + j]).sum();
            }
        }
    }
    let spec =
        DeltaRule { rows: ROWS, key_heads, heads, key, value, corrects, by_channel, chunked, ld, out_ld };
    let floats = [q, k, v, decay, beta].map(Operand::Floats);
    let out = Operand::Floats(strided(n, heads * value, out_ld, |_, _| 5.0));
    let first = [Operand::States([key, value], state)];
    Case {
        spec: spec.into(),
        n,
        operands: first.into_iter().chain(floats).chain(positions(n)).chain([out]).collect(),
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
        // One decay per head, one per channel, and the plain sums of state-space models.
        for (j, (by_channel, corrects)) in
            [(false, true), (true, true), (false, false)].into_iter().enumerate()
        {
            let does = RecurrenceKind { by_channel, corrects, chunked: false };
            cases.push(delta_case(&mut rng, IN_TURN, heads, does));
            let n = if i % 3 == j { ROWS } else { [1, 13, 24, 25, 30, 36, 41, 55][(i + j) % 8] };
            cases.push(delta_case(&mut rng, n, heads, RecurrenceKind { chunked: true, ..does }));
        }
        if i < 3 {
            let does = RecurrenceKind { by_channel: i % 2 == 0, corrects: true, chunked: false };
            cases.push(delta_case(&mut rng, [1, 5, 8][i], heads, does));
        }
    }
    cases
}

#[test]
fn delta_rules() {
    check(&delta_cases());
}

/// Extreme values: decays that forget everything or nothing, betas that replace everything or nothing.
#[test]
fn delta_rules_at_their_limits() {
    let mut rng = Rng::new(84);
    let decays: [&dyn Fn(f32) -> f32; 4] = [
        &|_| 0.0,
        &|_| f32::NEG_INFINITY,
        &|x| if x > 0.7 { f32::NEG_INFINITY } else { -0.1 * x * x },
        // The product over a chunk is far below the smallest f32.
        &|x| -80.0 * x * x,
    ];
    let betas: [&dyn Fn(f32) -> f32; 3] = [&|_| 0.0, &|_| 1.0, &|x| if x > 0.0 { 1.0 } else { 0.0 }];
    let mut cases = Vec::new();
    for decay in decays {
        for beta in betas {
            for by_channel in [false, true] {
                let does = RecurrenceKind { by_channel, corrects: true, chunked: true };
                cases.push(delta_case_of(&mut rng, ROWS, [1, 2, 22, 20], does, [decay, beta]));
            }
        }
    }
    check(&cases);
}

/// Numbers of a float operand.
fn floats(operand: &mut Operand) -> &mut Vec<f32> {
    match operand {
        Operand::Floats(x) => x,
        other => panic!("{other:?}"),
    }
}

/// A NaN or an infinity in a row affects the later rows of its sequence, as in row-by-row computation.
/// Earlier rows and other sequences are unaffected.
#[test]
fn chunked_delta_rule_propagates_nan_like_rows() {
    const BAD: usize = 17;
    let mut rng = Rng::new(85);
    for machine in machines() {
        let isa = machine.isa();
        for by_channel in [false, true] {
            let does = RecurrenceKind { by_channel, corrects: true, chunked: true };
            let case = delta_case(&mut rng, ROWS, [1, 1, 22, 20], does);
            let KernelSpec::DeltaRule(rule) = case.spec.clone() else { panic!("{:?}", case.spec) };
            let by_row: KernelSpec = DeltaRule { chunked: false, ..rule.clone() }.into();
            let specs = [case.spec.clone(), by_row.clone()];
            let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap_or_else(|e| panic!("{e}")));
            let loaded = loaded.unwrap_or_else(|e| panic!("{e}"));
            // Arguments: query, key, value, decay and beta.
            for (arg, bad) in (1..6).flat_map(|arg| [f32::NAN, f32::INFINITY].map(|bad| (arg, bad))) {
                let mut case = case.clone();
                floats(&mut case.operands[arg])[BAD * rule.ld[arg - 1]] = bad;
                let mut all = specs.iter().map(|spec| {
                    let kernel = loaded.kernel(&spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
                    let case = Case { spec: spec.clone(), ..case.clone() };
                    let mut words = run(kernel, &isa, &case, usize::MAX);
                    [words.pop().expect("a result"), words.swap_remove(0)]
                });
                let (chunked, by_row) = (all.next().expect("two"), all.next().expect("two"));
                let mut finite = 0;
                for (got, want) in chunked.iter().flatten().zip(by_row.iter().flatten()) {
                    let [got, want] = [got, want].map(|&bits| f32::from_bits(bits));
                    let same = if want.is_finite() {
                        (got - want).abs() <= 1e-5 * (1.0 + want.abs())
                    } else {
                        !got.is_finite()
                    };
                    assert!(same, "{got}, {want} row by row: {bad} in operand {arg}, {rule:?} on {isa:?}");
                    finite += usize::from(want.is_finite());
                }
                assert!(
                    finite > (BAD - 1) * rule.out_ld,
                    "{finite} numbers are finite: {bad} in operand {arg}"
                );
            }
        }
    }
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
    let spec = SelectiveScan { rows: ROWS, channels, state: kept, ld, out_ld };
    let floats = [c, b, x, dt, rate].map(Operand::Floats);
    let out = Operand::Floats(strided(n, channels, out_ld, |_, _| 5.0));
    let first = [Operand::States([kept, channels], state)];
    Case {
        spec: spec.into(),
        n,
        operands: first.into_iter().chain(floats).chain(positions(n)).chain([out]).collect(),
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
        shapes.into_iter().map(|(channels, kept)| scan_case(&mut rng, IN_TURN, channels, kept)).collect();
    let few = [1, 5, 0].map(|n| scan_case(&mut rng, n, 40, 16));
    whole.into_iter().chain(few).collect()
}

#[test]
fn selective_scans() {
    check(&scan_cases());
}

/// Rows `at .. at + n` of an operand with one row for each row of the call; weights and states are not
/// sliced.
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

/// Final state and result rows, if `run` computes the case in calls of `chunk` rows.
fn in_calls(run: &dyn Fn(&Case) -> Vec<Vec<u32>>, case: &Case, chunk: usize) -> [Vec<u32>; 2] {
    let (mut state, mut out) = (None, Vec::new());
    for at in (0..case.n).step_by(chunk) {
        let mut part = part(case, at, chunk.min(case.n - at));
        if let Some(state) = state.take() {
            part.operands[0] = Operand::Ints(state);
        }
        let mut words = run(&part);
        out.extend(words.pop().expect("a result"));
        state = Some(words.swap_remove(0).into_iter().map(u32::cast_signed).collect::<Vec<_>>());
    }
    [state.unwrap_or_default().iter().map(|x| x.cast_unsigned()).collect(), out]
}

/// Splitting a prompt into calls changes neither the result nor the final state. Row by row they are
/// bit-identical; where rows are computed together, the order of sums may differ.
#[test]
fn splitting_a_sequence_into_calls_changes_no_result() {
    let cases: Vec<Case> = conv_cases()
        .into_iter()
        .chain(delta_cases())
        .chain(scan_cases())
        .filter(|case| case.n == IN_TURN || case.n == ROWS)
        .collect();
    for machine in machines() {
        let isa = machine.isa();
        let specs: Vec<_> = cases.iter().map(|case| case.spec.clone()).collect();
        let loaded = Loaded::new(&compile(&machine, &specs, &()).unwrap_or_else(|e| panic!("{e}")));
        let loaded = loaded.unwrap_or_else(|e| panic!("{e}"));
        for case in &cases {
            let kernel = loaded.kernel(&case.spec.symbol(&isa)).unwrap_or_else(|e| panic!("{e}"));
            let mut whole = run(kernel, &isa, case, usize::MAX);
            let out = whole.pop().expect("a result");
            let whole = [whole.swap_remove(0), out];
            let together = matches!(&case.spec, KernelSpec::DeltaRule(rule) if rule.chunked);
            for chunk in if together { &[7, 16, 48][..] } else { &[7, 1] } {
                let parts = in_calls(&|part| run(kernel, &isa, part, 3), case, *chunk);
                let same = |(a, b): (&u32, &u32)| {
                    let [x, y] = [a, b].map(|&bits| f32::from_bits(bits));
                    a == b || together && (x - y).abs() <= 1e-5 * (1.0 + y.abs())
                };
                for (part, whole) in parts.iter().zip(&whole) {
                    let same = part.len() == whole.len() && part.iter().zip(whole).all(same);
                    assert!(same, "other numbers in calls of {chunk}: {:?} on {isa:?}", case.spec);
                }
            }
        }
    }
}

/// The same on GPUs, whose kernels go row by row: the last bit of states and results is that of one call.
#[test]
fn splitting_a_sequence_into_calls_changes_no_result_on_gpus() {
    let rows = |case: &Case| case.n == IN_TURN;
    let chosen = |cases: Vec<Case>| cases.into_iter().filter(rows).step_by(3).collect::<Vec<_>>();
    for case in [conv_cases(), delta_cases(), scan_cases()].into_iter().flat_map(chosen) {
        let mut whole = run_case(&case);
        let out = whole.pop().expect("a result");
        let whole = [whole.swap_remove(0), out];
        for chunk in [7, 1] {
            assert_eq!(in_calls(&run_case, &case, chunk), whole, "in calls of {chunk}: {:?}", case.spec);
        }
    }
}
