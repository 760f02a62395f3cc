//! Every operator, compared with numbers computed by hand or by another formula.

use crate::common::{close, router, tensor};
use moec_ir::eval::{Arg, Data, EvalError, Tensor, op};
use moec_ir::op::{AttentionDesc, DispatchLayout, GroupScore, Groups, LongSwitch, Renorm, Score, WeightFrom};
use moec_ir::{Activation, Glu, Op, Predictor, RopeStyle, RouterDesc, Type, TypeError};

fn ints(data: &[i32]) -> Tensor {
    Tensor::i32([data.len()], data.to_vec())
}

fn run(node: &Op, inputs: &[&Tensor]) -> Vec<Tensor> {
    op(node, inputs.iter().map(|t| Arg::Tensor(t)).collect()).unwrap()
}

/// Checks that the operator has one f32 result, which is `want`.
fn check(node: &Op, inputs: &[&Tensor], want: &[f32]) {
    let out = run(node, inputs);
    assert_eq!(out.len(), 1);
    close(out[0].as_f32(), want);
}

#[test]
fn embedding_and_gathering_pick_rows() {
    let table = tensor(&[3, 2], &[0., 1., 10., 11., 20., 21.]);
    check(&Op::Embed, &[&ints(&[2, 0]), &table], &[20., 21., 0., 1.]);
    check(&Op::GatherRows, &[&table, &ints(&[1, -1])], &[10., 11., 0., 0.]);
}

#[test]
fn norms() {
    let x = tensor(&[1, 4], &[3., 4., 6., 8.]);
    let w = tensor(&[4], &[1., 2., 3., 4.]);
    let whole = (125_f32 / 4.).sqrt();
    let want = [3., 8., 18., 32.].map(|v: f32| v / whole);
    check(&Op::RmsNorm { eps: 0., groups: 1, weight: true }, &[&x, &w], &want);
    // Two groups of two, without a weight: means of squares 12.5 and 50.
    let (a, b) = (12.5_f32.sqrt(), 50_f32.sqrt());
    check(&Op::RmsNorm { eps: 0., groups: 2, weight: false }, &[&x], &[3. / a, 4. / a, 6. / b, 8. / b]);
    check(
        &Op::RmsNorm { eps: 18.75, groups: 1, weight: false },
        &[&x],
        &[3., 4., 6., 8.].map(|v| v / 50_f32.sqrt()),
    );
    let x = tensor(&[1, 2], &[1., 5.]);
    let (w, b) = (tensor(&[2], &[2., 3.]), tensor(&[2], &[10., 20.]));
    check(&Op::LayerNorm { eps: 0. }, &[&x, &w, &b], &[8., 23.]);
}

#[test]
fn matrices() {
    let x = tensor(&[2, 2], &[1., 2., 3., 4.]);
    let w = tensor(&[4, 2], &[1., 0., 0., 1., 1., 1., 1., -1.]);
    check(&Op::Linear { bias: false }, &[&x, &w], &[1., 2., 3., -1., 3., 4., 7., -1.]);
    let bias = tensor(&[4], &[10., 20., 30., 40.]);
    check(&Op::Linear { bias: true }, &[&x, &w, &bias], &[11., 22., 33., 39., 13., 24., 37., 39.]);
    // Gate rows are 0 and 1, up rows 2 and 3.
    let relu = Op::LinearGlu { glu: Glu::Gated(Activation::Relu), bias: false };
    check(&relu, &[&x, &w], &[3., -2., 21., -4.]);
    let drelu = Op::LinearGlu { glu: Glu::DRelu, bias: true };
    check(&drelu, &[&x, &w, &bias], &[11. * 33., 22. * 39., 13. * 37., 24. * 39.]);
    // Two heads of two channels each, with matrices [1, 2].
    let x = tensor(&[1, 4], &[1., 2., 3., 4.]);
    let w = tensor(&[2, 1, 2], &[1., 10., 100., 1000.]);
    check(&Op::HeadLinear { heads: 2 }, &[&x, &w], &[21., 4300.]);
}

#[test]
fn element_by_element() {
    let a = tensor(&[2, 2], &[1., -2., 3., -4.]);
    let b = tensor(&[2, 2], &[10., 20., 30., 40.]);
    check(&Op::Add, &[&a, &b], &[11., 18., 33., 36.]);
    check(&Op::Mul, &[&a, &b], &[10., -40., 90., -160.]);
    check(&Op::Mul, &[&a, &tensor(&[2, 1], &[2., 3.])], &[2., -4., 9., -12.]);
    check(&Op::Scale { factor: 0.5 }, &[&a], &[0.5, -1., 1.5, -2.]);
    check(&Op::ScaleCols, &[&a, &tensor(&[2], &[2., 3.])], &[2., -6., 6., -12.]);
    check(&Op::Clamp { lo: -3., hi: 2. }, &[&a], &[1., -2., 2., -3.]);
    check(&Op::Glu(Glu::DRelu), &[&a, &b], &[10., 0., 90., 0.]);
    let fatrelu = Op::Glu(Glu::FatRelu { threshold: 1. });
    check(&fatrelu, &[&a, &b], &[10., 0., 90., 0.]);
    check(&fatrelu, &[&tensor(&[1, 3], &[0.5, 1., -2.]), &tensor(&[1, 3], &[-3., -3., 5.])], &[0., -3., 0.]);
    // silu(−1) is −0.27, silu(1) is 0.73.
    let cats = Op::Glu(Glu::Cats { threshold: 0.5 });
    let silu = |x: f32| x / (1. + (-x).exp());
    check(
        &cats,
        &[&tensor(&[1, 4], &[-1., 1., 0.5, -9.]), &tensor(&[1, 4], &[2., -3., 5., 7.])],
        &[0., -3. * silu(1.), 0., 0.],
    );
    let low = Op::Glu(Glu::Cats { threshold: 0.2 });
    check(&low, &[&tensor(&[1, 2], &[-1., 0.1]), &tensor(&[1, 2], &[2., 3.])], &[2. * silu(-1.), 0.]);
    let clamped = Op::Glu(Glu::Clamped { alpha: 1.702, limit: 7. });
    let sigmoid = |x: f32| 1. / (1. + (-x).exp());
    let (g, u) = (tensor(&[1, 2], &[9., -8.]), tensor(&[1, 2], &[-9., 0.5]));
    check(&clamped, &[&g, &u], &[-6. * 7. * sigmoid(1.702 * 7.), 1.5 * -8. * sigmoid(1.702 * -8.)]);
    let (limited, silu) = (Op::Glu(Glu::Limited { limit: 0.5 }), |x: f32| x * sigmoid(x));
    let (g, u) = (tensor(&[1, 4], &[2., 0.25, -3., 0.25]), tensor(&[1, 4], &[0.25, -2., 2., 0.125]));
    let want = [0.5 * 0.25, silu(0.25) * -0.5, silu(-3.) * 0.5, silu(0.25) * 0.125];
    check(&limited, &[&g, &u], &want);
    check(&Op::Softmax, &[&tensor(&[1, 2], &[1000., 1000. + 3_f32.ln()])], &[0.25, 0.75]);
    check(&Op::Softplus, &[&tensor(&[1, 4], &[0., 1., 100., -100.])], &[2_f32.ln(), 1.313_261_7, 100., 0.]);
}

#[test]
fn rows_are_scaled_by_their_positions() {
    let x = tensor(&[5, 2], &[1., -2., 1., -2., 1., -2., 1., -2., 1., -2.]);
    let pos = ints(&[0, 7, 8, 23, -1]);
    let by = |beta, every, offset| Op::ScaleByPosition { beta, every, offset };
    let factor = |steps: f32| 1. + 0.5 * (1. + steps).ln();
    let want = |steps: [f32; 5]| steps.iter().flat_map(|&s| [factor(s), -2. * factor(s)]).collect::<Vec<_>>();
    check(&by(0.5, 8, 0), &[&x, &pos], &want([0., 0., 1., 2., 0.]));
    check(&by(0.5, 8, 1), &[&x, &pos], &want([0., 1., 1., 3., 0.]));
    let refused = op(&by(0.5, 0, 0), vec![Arg::Tensor(&x), Arg::Tensor(&pos)]).unwrap_err();
    assert!(refused.to_string().contains("every 0 positions"), "{refused}");
}

#[test]
fn experts_that_compute_nothing_are_chosen_and_not_served() {
    let ids = Tensor::i32([2, 3], vec![1, 4, 3, 5, 2, -1]);
    let weights = tensor(&[2, 3], &[0.5, 0.25, 2., 4., 8., 16.]);
    let out = run(&Op::ZeroExperts { experts: 3, zero: 2 }, &[&ids, &weights]);
    assert_eq!(out[0].as_i32(), [1, -1, -1, 5, 2, -1]);
    close(out[1].as_f32(), &[2.25, 0.]);
    // The router also chooses zero-computation experts.
    let desc = RouterDesc { zero: Some(2), renorm: Renorm::None, ..router(2, 2) };
    let z = tensor(&[1, 4], &[1_f32, 4., 2., 1.].map(f32::ln));
    let out = run(&Op::Router(desc.clone()), &[&z]);
    assert_eq!(out[0].as_i32(), [1, 2]);
    let refused = op(&Op::Router(RouterDesc { zero: None, ..desc }), vec![Arg::Tensor(&z)]).unwrap_err();
    assert!(refused.to_string().contains("4 logits for 2 experts"), "{refused}");
}

#[test]
fn activations() {
    let x = tensor(&[1, 4], &[-1., 0., 1., 3.]);
    let case = |act, want: [f32; 4]| check(&Op::Act(act), &[&x], &want);
    case(Activation::Relu, [0., 0., 1., 3.]);
    case(Activation::Sigmoid, [0.268_941_43, 0.5, 0.731_058_6, 0.952_574_13]);
    case(Activation::Silu, [-0.268_941_43, 0., 0.731_058_6, 2.857_722_3]);
    case(Activation::Gelu, [-0.158_655_25, 0., 0.841_344_8, 2.995_950_3]);
    case(Activation::GeluTanh, [-0.158_808_01, 0., 0.841_192, 2.996_362_7]);
    // Far from 0, where another formula of the error function is used.
    check(&Op::Act(Activation::Gelu), &[&tensor(&[1, 2], &[-4., 6.])], &[-0.000_126_685, 6.]);
}

#[test]
fn joining_and_cutting_head_by_head() {
    let a = tensor(&[1, 4], &[1., 2., 3., 4.]);
    let b = tensor(&[1, 2], &[10., 20.]);
    check(&Op::Concat { heads: 1 }, &[&a, &b], &[1., 2., 3., 4., 10., 20.]);
    check(&Op::Concat { heads: 2 }, &[&a, &b, &b], &[1., 2., 10., 10., 3., 4., 20., 20.]);
    check(&Op::Slice { heads: 1, start: 1, len: 2 }, &[&a], &[2., 3.]);
    check(&Op::Slice { heads: 2, start: 1, len: 1 }, &[&a], &[2., 4.]);
}

#[test]
fn rotary_embedding() {
    let pos = ints(&[0, 2]);
    let freq = tensor(&[1], &[0.25]);
    let (c, s) = (0.5_f32.cos(), 0.5_f32.sin());
    let plain = Op::RopeAngles { scale: 2., switch: None };
    check(&plain, &[&pos, &freq], &[2., 0., 2. * c, 2. * s]);
    // Position 2 is the third token: past a switch after two tokens, not after three.
    let long = tensor(&[1], &[0.5]);
    let switch = |after| Op::RopeAngles { scale: 1., switch: Some(LongSwitch { after, long_scale: 3. }) };
    // Rows of different sequences switch separately, rows of one prompt together.
    check(&switch(2), &[&pos, &freq, &long], &[1., 0., 3. * 1_f32.cos(), 3. * 1_f32.sin()]);
    let args = [&pos, &freq, &long].map(Arg::Tensor).into();
    let together = moec_ir::eval::op_in(&switch(2), args, 3).unwrap();
    close(together[0].as_f32(), &[3., 0., 3. * 1_f32.cos(), 3. * 1_f32.sin()]);
    check(&switch(3), &[&pos, &freq, &long], &[1., 0., c, s]);
    // Rotations by 90° and 180° of the last four of five channels; cos 0, −1 and sin 1, 0.
    let x = tensor(&[1, 5], &[9., 1., 2., 3., 4.]);
    let angles = tensor(&[1, 4], &[0., -1., 1., 0.]);
    let rope = |style| Op::Rope { heads: 1, offset: 1, style };
    check(&rope(RopeStyle::Half), &[&x, &angles], &[9., -3., -2., 1., -4.]);
    check(&rope(RopeStyle::Interleaved), &[&x, &angles], &[9., -2., 1., -3., -4.]);
    let x = tensor(&[1, 4], &[1., 2., 3., 4.]);
    let quarter = tensor(&[1, 2], &[0., 1.]);
    check(&Op::Rope { heads: 2, offset: 0, style: RopeStyle::Half }, &[&x, &quarter], &[-2., 1., -4., 3.]);
}

#[test]
fn cache_writes_skip_padding() {
    let mut state = tensor(&[2, 2, 2, 1], &[0.; 8]);
    let x = tensor(&[3, 2], &[1., 2., 3., 4., 5., 6.]);
    let (pos, slot) = (ints(&[0, -1, 1]), ints(&[1, 0, 0]));
    let out = op(
        &Op::CacheWrite,
        vec![Arg::State(&mut state), Arg::Tensor(&x), Arg::Tensor(&pos), Arg::Tensor(&slot)],
    );
    assert_eq!(out.unwrap(), []);
    // Indices [slot, head, position].
    assert_eq!(state.as_f32(), [0., 5., 0., 6., 1., 0., 2., 0.]);
}

/// Result of an operator that updates a state.
fn update(node: &Op, state: &mut Tensor, inputs: &[&Tensor]) -> Vec<f32> {
    let inputs = inputs.iter().map(|t| Arg::Tensor(t));
    let out = op(node, [Arg::State(state)].into_iter().chain(inputs).collect()).unwrap();
    assert_eq!(out.len(), 1);
    out[0].as_f32().to_vec()
}

#[test]
fn convolutions_read_the_rows_before() {
    let of = || tensor(&[2, 1, 2, 1], &[1., 2., 3., 4.]);
    let (x, w) = (tensor(&[4, 1], &[5., 6., 7., 8.]), tensor(&[3, 1], &[100., 10., 1.]));
    let (pos, slot) = (ints(&[2, -1, 2, 3]), ints(&[0, 0, 1, 0]));
    let mut state = of();
    let y = update(&Op::CausalConv { act: None, bias: false }, &mut state, &[&x, &w, &pos, &slot]);
    close(&y, &[125., 0., 347., 258.]);
    assert_eq!(state.as_f32(), [5., 8., 4., 7.]);
    let relu = Op::CausalConv { act: Some(Activation::Relu), bias: true };
    let (mut state, bias) = (of(), tensor(&[1], &[-200.]));
    close(&update(&relu, &mut state, &[&x, &w, &bias, &pos, &slot]), &[0., 0., 147., 58.]);
    assert_eq!(state.as_f32(), [5., 8., 4., 7.]);
}

#[test]
fn delta_rule_corrects_the_prediction_of_its_state() {
    // Two heads with one value channel share the query and key of one key head with two channels.
    let delta = Op::DeltaRule { key_heads: 1, heads: 2 };
    let of = || tensor(&[1, 2, 2, 1], &[1., 2., 4., 8.]);
    let (q, k) = (tensor(&[2, 2], &[9., 9., 1., 1.]), tensor(&[2, 2], &[9., 9., 1., 0.]));
    let (v, beta) = (tensor(&[2, 2], &[9., 9., 10., 20.]), tensor(&[2, 2], &[9., 9., 1., 0.5]));
    let (pos, slot) = (ints(&[-1, 6]), ints(&[0, 0]));
    let half = 0.5_f32.ln();
    let mut state = of();
    let decay = tensor(&[2, 2], &[9., 9., half, 0.]);
    let y = update(&delta, &mut state, &[&q, &k, &v, &decay, &beta, &pos, &slot]);
    // After the decay, the heads predict 0.5 and 4. The difference to 10 is added, and half of the difference
    // to 20.
    close(&y, &[0., 0., 11., 20.]);
    close(state.as_f32(), &[10., 1., 12., 8.]);
    // One decay for each channel of a key.
    let mut state = of();
    let decay = tensor(&[2, 4], &[9., 9., 9., 9., half, 0., 0., 2. * half]);
    let y = update(&delta, &mut state, &[&q, &k, &v, &decay, &beta, &pos, &slot]);
    close(&y, &[0., 0., 12., 14.]);
    close(state.as_f32(), &[10., 2., 12., 2.]);
}

#[test]
fn selective_scans_decay_number_by_number() {
    // Two channels with a state of two numbers each.
    let half = 0.5_f32.ln();
    let mut state = tensor(&[1, 1, 2, 2], &[1., 2., 3., 4.]);
    let (c, b) = (tensor(&[2, 2], &[9., 9., 1., 10.]), tensor(&[2, 2], &[9., 9., 1., 2.]));
    let (x, dt) = (tensor(&[2, 2], &[9., 9., 2., 3.]), tensor(&[2, 2], &[9., 9., 1., 0.5]));
    let rate = tensor(&[2, 2], &[0., 2. * half, half, 0.]);
    let (pos, slot) = (ints(&[-1, 6]), ints(&[0, 0]));
    let y = update(&Op::SelectiveScan, &mut state, &[&c, &b, &x, &dt, &rate, &pos, &slot]);
    // One number of each channel is halved. The row adds 2 · b to the first channel, and 1.5 · b to the
    // second.
    close(state.as_f32(), &[3., 2.5, 5.5, 7.]);
    close(&y, &[0., 0., 58., 72.5]);
}

#[test]
fn row_with_an_invalid_slot_is_refused() {
    let (mut state, x, w) =
        (tensor(&[1, 1, 1, 1], &[0.]), tensor(&[1, 1], &[1.]), tensor(&[2, 1], &[1., 1.]));
    let (pos, slot) = (ints(&[0]), ints(&[1]));
    let inputs = [&x, &w, &pos, &slot].map(Arg::Tensor);
    let conv = Op::CausalConv { act: None, bias: false };
    let refused = op(&conv, [Arg::State(&mut state)].into_iter().chain(inputs).collect()).unwrap_err();
    assert!(refused.to_string().contains("slot"), "{refused}");
}

fn attention() -> AttentionDesc {
    AttentionDesc {
        heads: 2,
        kv_heads: 1,
        qk_dim: 1,
        v_dim: 1,
        scale: 1.,
        window: None,
        chunked: false,
        sinks: false,
        v_from_k: false,
    }
}

#[test]
fn attention_averages_past_values() {
    let ln = |x: f32| x.ln();
    let k = tensor(&[1, 1, 4, 1], &[ln(1.), ln(2.), ln(5.), 100.]);
    let v = tensor(&[1, 1, 4, 1], &[1., 10., 100., 1e9]);
    // Both query heads share the key head; the second query ignores the keys.
    let q = tensor(&[2, 2], &[1., 0., 1., 1.]);
    let (pos, slot) = (ints(&[2, -1]), ints(&[0, 0]));
    let d = attention();
    check(&Op::Attention(d.clone()), &[&q, &k, &v, &pos, &slot], &[521. / 8., 111. / 3., 0., 0.]);
    let window = AttentionDesc { window: Some(2), ..d.clone() };
    check(&Op::Attention(window), &[&q, &k, &v, &pos, &slot], &[520. / 7., 55., 0., 0.]);
    // Position 2 is the first of a chunk of two, and the last of a chunk of three.
    let chunk = |n| AttentionDesc { window: Some(n), chunked: true, ..d.clone() };
    check(&Op::Attention(chunk(2)), &[&q, &k, &v, &pos, &slot], &[100., 100., 0., 0.]);
    check(&Op::Attention(chunk(3)), &[&q, &k, &v, &pos, &slot], &[521. / 8., 37., 0., 0.]);
    let endless = Op::Attention(AttentionDesc { chunked: true, ..d.clone() });
    let inputs = [&q, &k, &v, &pos, &slot].map(Arg::Tensor).into();
    assert!(op(&endless, inputs).unwrap_err().to_string().contains("chunks without a window"));
    let sinks = AttentionDesc { sinks: true, ..d.clone() };
    let sink = tensor(&[2], &[ln(2.), ln(97.)]);
    check(&Op::Attention(sinks), &[&q, &k, &v, &pos, &slot, &sink], &[52.1, 1.11, 0., 0.]);
    let shared = AttentionDesc { v_from_k: true, ..d };
    let want = (2. * ln(2.) + 5. * ln(5.)) / 8.;
    check(&Op::Attention(shared), &[&q, &k, &pos, &slot], &[want, (ln(2.) + ln(5.)) / 3., 0., 0.]);
}

/// Experts and weights for one row of logits.
fn route(d: RouterDesc, z: &[f32], bias: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
    let d = RouterDesc { experts: z.len(), select_bias: bias.is_some(), ..d };
    let z = tensor(&[1, z.len()], z);
    let bias = bias.map(|b| tensor(&[b.len()], b));
    let inputs: Vec<_> = [Some(&z), bias.as_ref()].into_iter().flatten().collect();
    let out = run(&Op::Router(d), &inputs);
    (out[0].as_i32().to_vec(), out[1].as_f32().to_vec())
}

#[test]
fn routing_by_softmax() {
    let z = [1_f32, 4., 2., 1.].map(f32::ln);
    let plain = RouterDesc { renorm: Renorm::None, ..router(4, 2) };
    let (ids, w) = route(plain.clone(), &z, None);
    assert_eq!(ids, [1, 2]);
    close(&w, &[0.5, 0.25]);
    let (_, w) = route(RouterDesc { scale: 3., ..router(4, 2) }, &z, None);
    close(&w, &[2., 1.]);
    let (_, w) = route(RouterDesc { renorm: Renorm::Clamp { min: 1.5 }, ..router(4, 2) }, &z, None);
    close(&w, &[1. / 3., 1. / 6.]);
    let (_, w) = route(
        RouterDesc { weight_from: WeightFrom::SoftmaxTopk, score: Score::Identity, ..plain.clone() },
        &z,
        None,
    );
    close(&w, &[2. / 3., 1. / 3.]);
    // Ties: the lowest index wins.
    let (ids, _) = route(RouterDesc { k: 3, ..plain }, &[1., 2., 1., 2.], None);
    assert_eq!(ids, [1, 3, 0]);
}

#[test]
fn routing_by_sigmoid_chooses_with_the_bias_and_weighs_without() {
    let d = RouterDesc { score: Score::Sigmoid, renorm: Renorm::Sum { eps: 1. }, ..router(4, 2) };
    let z = [0., 3_f32.ln(), 0., 9_f32.ln()];
    let (ids, w) = route(d.clone(), &z, Some(&[0.6, 0., 0., 0.]));
    assert_eq!(ids, [0, 3]);
    close(&w, &[0.5 / 2.4, 0.9 / 2.4]);
    let topk = RouterDesc {
        weight_from: WeightFrom::SigmoidTopk,
        score: Score::Identity,
        renorm: Renorm::None,
        ..d
    };
    let (ids, w) = route(topk, &z, None);
    assert_eq!(ids, [3, 1]);
    close(&w, &[0.9, 0.75]);
}

#[test]
fn routing_within_groups() {
    let d = |score, keep, mask_neg_inf, k| RouterDesc {
        score: Score::Identity,
        renorm: Renorm::None,
        groups: Some(Groups { n: 2, keep, score, mask_neg_inf }),
        ..router(4, k)
    };
    // Group 0 has the largest expert score, group 1 the largest sum of two.
    let z = [5., 0., 3., 4.];
    assert_eq!(route(d(GroupScore::Max, 1, true, 2), &z, None).0, [0, 1]);
    assert_eq!(route(d(GroupScore::Top2Sum, 1, true, 2), &z, None).0, [3, 2]);
    assert_eq!(route(d(GroupScore::Max, 2, true, 2), &z, None).0, [0, 3]);
    // Masked with 0, an excluded expert beats one with a negative score.
    let z = [5., -1., 3., 4.];
    assert_eq!(route(d(GroupScore::Max, 1, true, 2), &z, None).0, [0, 1]);
    assert_eq!(route(d(GroupScore::Max, 1, false, 2), &z, None).0, [0, 2]);
}

/// SparseMixer as in Phi-MoE's code, over dense masks.
fn sparse_mixer(z: &[f32], eps: f32) -> ([usize; 2], [f32; 2]) {
    let argmax = |x: &[f32]| (0..x.len()).rev().max_by(|&i, &j| x[i].total_cmp(&x[j])).unwrap();
    let weight = |x: &[f32]| {
        let i = argmax(x);
        let masked: Vec<f32> = x
            .iter()
            .zip(z)
            .map(|(&xj, &zj)| {
                let far = (x[i] - zj) / zj.abs().max(x[i]) > 2. * eps;
                if far { f32::NEG_INFINITY } else { xj }
            })
            .collect();
        let sum: f32 = masked.iter().map(|m| (m - x[i]).exp()).sum();
        (i, 1. / sum)
    };
    let (i, wi) = weight(z);
    let mut rest = z.to_vec();
    rest[i] = f32::NEG_INFINITY;
    let (j, wj) = weight(&rest);
    ([i, j], [wi, wj])
}

#[test]
fn sparse_mixer_is_that_of_phi_moe() {
    let d = |eps| RouterDesc {
        score: Score::Identity,
        weight_from: WeightFrom::SparseMixer { eps },
        renorm: Renorm::None,
        ..router(5, 2)
    };
    for (z, eps) in [
        ([1., 2., 3., 2.99, 0.], 0.01),
        ([1., 2., 3., 2.99, 2.98], 0.01),
        ([-3., -2.99, -1., -1.01, -5.], 0.01),
        ([0.; 5], 0.1),
        ([4., 1., 3.9, 3.8, 3.85], 0.05),
    ] {
        let (ids, w) = route(d(eps), &z, None);
        let (want_ids, want) = sparse_mixer(&z, eps);
        assert_eq!(ids, want_ids.map(|i| i as i32), "{z:?}");
        close(&w, &want);
        // With k = 1, the first expert and its weight are the same as with k = 2.
        let (ids, w) = route(RouterDesc { k: 1, ..d(eps) }, &z, None);
        assert_eq!(ids, [want_ids[0] as i32], "{z:?}");
        close(&w, &want[..1]);
    }
    // Two near ties share the first weight. Once the first is removed, the second expert is alone.
    let (_, w) = route(d(0.01), &[1., 2., 3., 3., 0.], None);
    close(&w, &[0.5, 1.]);
}

#[test]
fn ungated_network_rejects_gated_operators() {
    let (x, both) = (tensor(&[1, 2], &[1., 2.]), tensor(&[4, 2], &[1.; 8]));
    let ungated = Glu::Ungated(Activation::Relu2);
    for (op, inputs) in
        [(Op::Glu(ungated), [&x, &x]), (Op::LinearGlu { glu: ungated, bias: false }, [&x, &both])]
    {
        let error = op.infer(&inputs.map(|t| &t.ty)).unwrap_err().to_string();
        assert!(error.contains("a network without a gate joins nothing"), "{error}");
    }
    check(&Op::Act(Activation::Relu2), &[&tensor(&[1, 3], &[-2., 0., 3.])], &[0., 0., 9.]);
}

#[test]
fn experts_run_busiest_first() {
    // The rows choose (2, 1), (1, 0), (1, 2) of four experts.
    let ids = Tensor::i32([3, 2], vec![2, 1, 1, 0, 1, 2]);
    let table = run(&Op::Dispatch { experts: 4, partial: false }, &[&ids]).remove(0);
    let l = DispatchLayout { rows: 3, k: 2, experts: 4 };
    let t = table.as_i32();
    assert_eq!(t.len(), l.words());
    assert_eq!(t[..2], [3, 6]);
    assert_eq!(t[l.expert()..][..3], [1, 2, 0]);
    assert_eq!(t[l.start()..][..4], [0, 3, 5, 6]);
    assert_eq!(t[l.token()..][..6], [0, 1, 2, 0, 2, 1]);
    assert_eq!(t[l.slot()..][..6], [3, 0, 1, 5, 2, 4]);

    // Expert e has gate factor 1 and up factor e + 1, so the result is relu(x)·(e+1)·x, times 10.
    let x = tensor(&[3, 1], &[1., 2., 3.]);
    let gate_up = tensor(&[4, 2, 1], &[1., 1., 1., 2., 1., 3., 1., 4.]);
    let down = tensor(&[4, 1, 1], &[10.; 4]);
    let ffn = |bias| Op::ExpertFfn { glu: Glu::Gated(Activation::Relu), bias, fixed: false };
    let y = run(&ffn(false), &[&x, &table, &gate_up, &down]).remove(0);
    close(y.as_f32(), &[20., 80., 180., 30., 270., 40.]);
    let weights = tensor(&[3, 2], &[1., 2., 3., 4., 5., 6.]);
    check(&Op::Combine { partial: false }, &[&y, &table, &weights], &[70., 400., 2520.]);

    let gate_up_bias = tensor(&[4, 2], &[0., 1., 0., 1., 0., 1., 0., 1.]);
    let down_bias = tensor(&[4, 1], &[0.5; 4]);
    let y = run(&ffn(true), &[&x, &table, &gate_up, &down, &gate_up_bias, &down_bias]).remove(0);
    close(y.as_f32(), &[30.5, 100.5, 210.5, 40.5, 300.5, 60.5]);

    // Without a gate, expert e gives relu(x · (e + 1))², times 10.
    let up = tensor(&[4, 1, 1], &[1., 2., 3., 4.]);
    let ffn = |bias| Op::ExpertFfn { glu: Glu::Ungated(Activation::Relu2), bias, fixed: false };
    let y = run(&ffn(false), &[&x, &table, &up, &down]).remove(0);
    close(y.as_f32(), &[40., 160., 360., 90., 810., 40.]);
    let up_bias = tensor(&[4, 1], &[-1.; 4]);
    let y = run(&ffn(true), &[&x, &table, &up, &down, &up_bias, &down_bias]).remove(0);
    close(y.as_f32(), &[10.5, 90.5, 250.5, 40.5, 640.5, 10.5]);

    // A table with two rows: the third is padding.
    let mut short = table.clone();
    if let Data::I32(t) = &mut short.data {
        t[1] = 4;
    }
    let y = tensor(&[6, 1], &[20., 80., 180., 30., 270., 40.]);
    check(&Op::Combine { partial: false }, &[&y, &short, &weights], &[70., 400., 0.]);
}

/// Makes bundles `[E, I, 3H]` of `[E, 2I, H]` and `[E, H, I]`.
fn bundles(gate_up: &Tensor, down: &Tensor) -> Tensor {
    let [experts, two_inter, hidden] = gate_up.ty.shape[..] else { unreachable!() };
    let inter = two_inter / 2;
    let (g, d) = (gate_up.as_f32(), down.as_f32());
    let mut all = Vec::new();
    for (e, i) in (0..experts).flat_map(|e| (0..inter).map(move |i| (e, i))) {
        let row = |r: usize| &g[(e * two_inter + r) * hidden..][..hidden];
        all.extend(row(i).iter().chain(row(inter + i)));
        all.extend((0..hidden).map(|c| d[(e * hidden + c) * inter + i]));
    }
    tensor(&[experts, inter, 3 * hidden], &all)
}

/// Splits bundles into gates, and up with down.
fn split_storage(neurons: &Tensor) -> [Tensor; 2] {
    let &[experts, inter, width] = neurons.ty.shape.as_slice() else { unreachable!() };
    let hidden = width / 3;
    let rows = || neurons.as_f32().chunks_exact(width);
    let gates: Vec<f32> = rows().flat_map(|row| row[..hidden].to_vec()).collect();
    let up_down: Vec<f32> = rows().flat_map(|row| row[hidden..].to_vec()).collect();
    [tensor(&[experts, inter, hidden], &gates), tensor(&[experts, inter, 2 * hidden], &up_down)]
}

#[test]
fn experts_by_neurons_equal_whole_experts() {
    let ids = Tensor::i32([3, 2], vec![2, 1, 1, 0, 1, 2]);
    let table = run(&Op::Dispatch { experts: 3, partial: false }, &[&ids]).remove(0);
    let number = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
    let numbers = |n: usize, from: usize| (0..n).map(|i| number(i + from)).collect::<Vec<_>>();
    let x = tensor(&[3, 4], &numbers(12, 0));
    let (gate_up, down) = (tensor(&[3, 10, 4], &numbers(120, 50)), tensor(&[3, 4, 5], &numbers(60, 900)));
    let neurons = bundles(&gate_up, &down);
    let gates = [
        Glu::Gated(Activation::Relu),
        Glu::DRelu,
        Glu::FatRelu { threshold: 0.25 },
        Glu::Cats { threshold: 0.25 },
    ];
    for glu in gates {
        let dense = Op::ExpertFfn { glu, bias: false, fixed: false };
        let y = run(&dense, &[&x, &table, &gate_up, &down]).remove(0);
        check(
            &Op::NeuronFfn { glu, paged: None, gates_on_disk: false, hot: None, predict: None },
            &[&x, &table, &neurons],
            y.as_f32(),
        );
        let [gates, up_down] = split_storage(&neurons);
        check(
            &Op::NeuronFfn { glu, paged: Some(0), gates_on_disk: false, hot: None, predict: None },
            &[&x, &table, &gates, &up_down],
            y.as_f32(),
        );
        // Hot neurons that another unit computes add nothing: as if their columns of down were 0.
        let inter = neurons.ty.shape[1];
        let hidden = x.ty.cols();
        let mut cold = neurons.as_f32().to_vec();
        for expert in cold.chunks_exact_mut(inter * 3 * hidden) {
            expert[..3 * hidden].fill(0.0);
        }
        let whole = Op::NeuronFfn { glu, paged: None, gates_on_disk: false, hot: None, predict: None };
        let cold = run(&whole, &[&x, &table, &tensor(&neurons.ty.shape, &cold)]).remove(0);
        check(
            &Op::NeuronFfn { glu, paged: Some(0), gates_on_disk: false, hot: Some(1), predict: None },
            &[&x, &table, &gates, &up_down],
            cold.as_f32(),
        );
    }
    // A neuron whose gate gives 0 adds nothing, even if its other weights are NaN or infinite.
    let silent = tensor(&[1, 2, 3], &[-1., f32::INFINITY, f32::NAN, 1., 2., 3.]);
    let table = run(&Op::Dispatch { experts: 1, partial: false }, &[&Tensor::i32([1, 1], vec![0])]).remove(0);
    let op = Op::NeuronFfn { glu: Glu::DRelu, paged: None, gates_on_disk: false, hot: None, predict: None };
    check(&op, &[&tensor(&[1, 1], &[2.]), &table, &silent], &[24.]);
}

#[test]
fn a_predictor_skips_neurons_predicted_inactive() {
    let table =
        run(&Op::Dispatch { experts: 2, partial: false }, &[&Tensor::i32([2, 1], vec![1, 0])]).remove(0);
    let number = |i: usize| ((i * 7919 + 13) % 101) as f32 / 50.0 - 1.0;
    let numbers = |n: usize, from: usize| (0..n).map(|i| number(i + from)).collect::<Vec<_>>();
    let (x, neurons) = (tensor(&[2, 4], &numbers(8, 7)), tensor(&[2, 6, 12], &numbers(144, 31)));
    let glu = Glu::Gated(Activation::Relu);
    let exact = Op::NeuronFfn { glu, paged: None, gates_on_disk: false, hot: None, predict: None };
    let (right, left) = (tensor(&[2, 3, 4], &numbers(24, 5)), tensor(&[2, 6, 3], &numbers(36, 77)));
    let codes = tensor(&[2, 6, 4], &numbers(48, 400));
    let margin = tensor(&[2, 1, 6], &numbers(12, 3));
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f32>();
    let rows = |t: &Tensor, e: usize, n: usize| {
        let cols = t.ty.shape[2];
        t.as_f32().chunks_exact(cols).skip(e * n).take(n).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    for predict in Predictor::ALL {
        // Reference: neurons that are predicted inactive are set to 0 by hand, whatever their gates are.
        let mut left_out = neurons.as_f32().to_vec();
        let (mut taken, mut lost) = (0, 0);
        // The table is ordered by expert: expert 0 has row 1.
        for (e, row) in [(0, 1), (1, 0)] {
            let x = &x.as_f32()[row * 4..][..4];
            let predictions: Vec<f32> = match predict {
                Predictor::LowRank => {
                    let t: Vec<f32> = rows(&right, e, 3).iter().map(|r| dot(r, x)).collect();
                    rows(&left, e, 6).iter().map(|l| dot(l, &t)).collect()
                }
                Predictor::Coarse => rows(&codes, e, 6).iter().map(|c| dot(c, x)).collect(),
            };
            for (i, prediction) in predictions.iter().enumerate() {
                let gate = &mut left_out[(e * 6 + i) * 12..][..4];
                if prediction + margin.as_f32()[e * 6 + i] <= 0.0 {
                    lost += usize::from(dot(gate, x) > 0.0);
                    gate.fill(0.0);
                } else {
                    taken += 1;
                }
            }
        }
        assert!(taken > 0 && lost > 0, "{predict:?}: {taken} are taken, {lost} are lost");
        let expected = run(&exact, &[&x, &table, &tensor(&[2, 6, 12], &left_out)]).remove(0);
        let mut inputs = vec![&x, &table, &neurons];
        match predict {
            Predictor::LowRank => inputs.extend([&right, &left, &margin]),
            Predictor::Coarse => inputs.extend([&codes, &margin]),
        }
        for (paged, gates_on_disk) in [(None, false), (Some(0), true)] {
            let op = Op::NeuronFfn { glu, paged, gates_on_disk, hot: None, predict: Some(predict) };
            check(&op, &inputs, expected.as_f32());
        }
    }
}

#[test]
fn weights_of_predictors_fit_their_neurons() {
    let table = Type::i32([DispatchLayout { rows: 2, k: 1, experts: 3 }.words()]);
    let infer = |predict, more: &[[usize; 3]]| {
        let weights: Vec<Type> = [[3, 5, 12]].iter().chain(more).map(|&s| Type::f32(s)).collect();
        let x = Type::f32([2, 4]);
        let types: Vec<&Type> = [&x, &table].into_iter().chain(&weights).collect();
        Op::NeuronFfn {
            glu: Glu::DRelu,
            paged: None,
            gates_on_disk: false,
            hot: None,
            predict: Some(predict),
        }
        .infer(&types)
    };
    assert!(infer(Predictor::LowRank, &[[3, 2, 4], [3, 5, 2], [3, 1, 5]]).is_ok());
    assert!(infer(Predictor::Coarse, &[[3, 5, 4], [3, 1, 5]]).is_ok());
    for wrong in [
        [[3, 2, 5], [3, 5, 2], [3, 1, 5]],
        [[3, 2, 4], [3, 5, 3], [3, 1, 5]],
        [[3, 2, 4], [3, 5, 2], [3, 5, 1]],
    ] {
        assert!(infer(Predictor::LowRank, &wrong).is_err(), "{wrong:?}");
    }
    assert!(infer(Predictor::Coarse, &[[3, 5, 3], [3, 1, 5]]).is_err());
    assert!(infer(Predictor::Coarse, &[[3, 5, 4]]).is_err());
    let [x, gates, up_down] = [Type::f32([2, 4]), Type::f32([3, 5, 4]), Type::f32([3, 5, 8])];
    let paged = Op::NeuronFfn {
        glu: Glu::DRelu,
        paged: Some(0),
        gates_on_disk: false,
        hot: None,
        predict: Some(Predictor::Coarse),
    };
    assert!(paged.infer(&[&x, &table, &gates, &up_down]).is_err());
    // Where gates stay on disk, too, neurons are one weight.
    let [neurons, codes, margin] = [[3, 5, 12], [3, 5, 4], [3, 1, 5]].map(Type::f32);
    let on_disk =
        |paged, predict| Op::NeuronFfn { glu: Glu::DRelu, paged, gates_on_disk: true, hot: None, predict };
    let predicted = [&x, &table, &neurons, &codes, &margin];
    assert!(on_disk(Some(0), Some(Predictor::Coarse)).infer(&predicted).is_ok());
    assert!(on_disk(Some(0), None).infer(&[&x, &table, &neurons]).is_ok());
    assert!(on_disk(Some(0), None).infer(&[&x, &table, &gates, &up_down]).is_err());
    assert!(on_disk(None, None).infer(&[&x, &table, &neurons]).is_err());
}

#[test]
fn only_gates_with_exact_zeros_run_by_neurons() {
    let table = Type::i32([DispatchLayout { rows: 2, k: 1, experts: 3 }.words()]);
    let infer = |glu, neurons: [usize; 3]| {
        Op::NeuronFfn { glu, paged: None, gates_on_disk: false, hot: None, predict: None }.infer(&[
            &Type::f32([2, 4]),
            &table,
            &Type::f32(neurons),
        ])
    };
    assert_eq!(infer(Glu::DRelu, [3, 5, 12]).unwrap(), [Type::f32([2, 4])]);
    let message = |e: Result<Vec<Type>, TypeError>| e.unwrap_err().to_string();
    for glu in [Glu::Gated(Activation::Silu), Glu::Limited { limit: 0.5 }] {
        assert!(message(infer(glu, [3, 5, 12])).contains("no neuron 0"));
    }
    assert!(message(infer(Glu::DRelu, [3, 5, 8])).contains("expected gate, up and down of 4"));
    assert!(message(infer(Glu::DRelu, [4, 5, 12])).contains("fits no k"));
    let infer_split = |gates: [usize; 3], up_down: [usize; 3]| {
        let types = [&Type::f32([2, 4]), &table, &Type::f32(gates), &Type::f32(up_down)];
        Op::NeuronFfn { glu: Glu::DRelu, paged: Some(1), gates_on_disk: false, hot: None, predict: None }
            .infer(&types)
    };
    let infer_hot = |paged, hot, weights: &[Type]| {
        let rows = Type::f32([2, 4]);
        let types: Vec<&Type> = [&rows, &table].into_iter().chain(weights).collect();
        message(
            Op::NeuronFfn { glu: Glu::DRelu, paged, gates_on_disk: false, hot: Some(hot), predict: None }
                .infer(&types),
        )
    };
    let split = [Type::f32([3, 5, 4]), Type::f32([3, 5, 8])];
    for hot in [0, 5] {
        assert!(infer_hot(Some(1), hot, &split).contains(&format!("{hot} hot neurons of 5")));
    }
    assert!(infer_hot(None, 2, &[Type::f32([3, 5, 12])]).contains("hot neurons of experts in memory"));
    assert_eq!(infer_split([3, 5, 4], [3, 5, 8]).unwrap(), [Type::f32([2, 4])]);
    assert!(infer_split([3, 5, 12], [3, 5, 8]).is_err() && infer_split([3, 5, 4], [3, 6, 8]).is_err());
}

#[test]
fn invalid_operator_inputs_are_errors() {
    let x = tensor(&[1, 2], &[1., 2.]);
    let ids = Tensor::i32([1, 1], vec![4]);
    let fault = |node: &Op, inputs: &[&Tensor]| {
        op(node, inputs.iter().map(|t| Arg::Tensor(t)).collect()).unwrap_err()
    };
    assert!(matches!(fault(&Op::Add, &[&x]), EvalError::Type(_)));
    assert!(matches!(fault(&Op::Dispatch { experts: 4, partial: false }, &[&ids]), EvalError::Value { .. }));
    let malformed = Tensor { data: Data::F32(vec![0.]), ..x.clone() };
    assert!(matches!(fault(&Op::Softmax, &[&malformed]), EvalError::Value { .. }));
    // An invalid dispatch table.
    let table = Tensor::i32([4 + 2 + 3 + 2], vec![99; 11]);
    let (gate_up, down) = (tensor(&[2, 2, 2], &[0.; 8]), tensor(&[2, 2, 1], &[0.; 4]));
    let ffn = Op::ExpertFfn { glu: Glu::DRelu, bias: false, fixed: false };
    assert!(matches!(fault(&ffn, &[&x, &table, &gate_up, &down]), EvalError::Value { .. }));
    let (y, w) = (tensor(&[1, 2], &[0.; 2]), tensor(&[1, 1], &[1.]));
    assert!(matches!(fault(&Op::Combine { partial: false }, &[&y, &table, &w]), EvalError::Value { .. }));
}
