//! The head, split into parts.

use crate::interpret::{Rounding, States, call, difference};
use crate::store::{Store, ane, padded};
use moec_coreml::emit::{EmitError, Limits};
use moec_ir::Op;
use moec_ir::eval::{self, Arg, Tensor};

#[test]
fn head_is_split_by_vocabulary_with_an_optional_norm() {
    for (norm, center, entries, limits) in
        [(false, false, 0..100, ane()), (true, false, 0..100, padded()), (true, true, 16..90, ane())]
    {
        let mut store = Store::default();
        let mut head = store.head();
        head.entries = entries.clone();
        head.bias = Some(store.raw(&[100], 0.0, 0.5));
        if norm {
            let mut n = store.norm(32);
            n.center = center;
            n.bias = center.then(|| store.raw(&[32], 0.0, 0.3));
            head.norm = Some(n);
        }
        let program = head.emit(&limits).unwrap();
        let x = store.rows(16 * 32);
        let got = call(&program, "rows16", &store, &[("x", &x)], &mut States::new(), Rounding::None);
        let op = |op: &Op, args: &[&Tensor]| {
            eval::op(op, args.iter().map(|t| Arg::Tensor(t)).collect()).unwrap().remove(0)
        };
        let mut rows = Tensor::f32([16, 32], x);
        if let Some(n) = &head.norm {
            let weight = store.tensor(n.weight.as_ref().unwrap());
            rows = match &n.bias {
                Some(bias) => op(&Op::LayerNorm { eps: n.eps }, &[&rows, &weight, &store.tensor(bias)]),
                None => op(&Op::RmsNorm { eps: n.eps, groups: 1, weight: true }, &[&rows, &weight]),
            };
        }
        let bias = store.tensor(head.bias.as_ref().unwrap());
        let logits = op(&Op::Linear { bias: true }, &[&rows, &store.tensor(&head.weight), &bias]);
        let splits = head.splits(&ane());
        assert_eq!(splits.iter().map(ExactSizeIterator::len).sum::<usize>(), entries.len());
        assert!(splits.len() == got.len() && splits.iter().all(|s| s.len() <= 48), "{splits:?}");
        for (i, split) in splits.iter().enumerate() {
            let want: Vec<f32> =
                logits.as_f32().chunks(100).flat_map(|row| row[split.clone()].to_vec()).collect();
            let error = difference(&got[&format!("logits{i}")], &want);
            assert!(error < 1e-6, "{split:?}: {error}");
        }
    }
}

#[test]
fn a_norm_in_f16_survives_large_and_small_rows() {
    let mut store = Store::default();
    let mut head = store.head();
    head.norm = Some(store.norm(32));
    let program = head.emit(&ane()).unwrap();
    let x = store.rows(16 * 32);
    let unscaled = call(&program, "rows16", &store, &[("x", &x)], &mut States::new(), Rounding::None);
    // In f16, squares of the largest numbers would overflow, and squares of the smallest would underflow.
    for scale in [1000.0_f32, 30_000.0, 0.01] {
        let x: Vec<f32> = x.iter().map(|x| half::f16::from_f32(x * scale).to_f32()).collect();
        let got = call(&program, "rows16", &store, &[("x", &x)], &mut States::new(), Rounding::F16);
        for (name, logits) in &unscaled {
            let want: Vec<f32> = logits.iter().map(|&x| x as f32).collect();
            let error = difference(&got[name], &want);
            // ε is a hundredth of the mean square of the smallest rows.
            let bound = if scale < 1.0 { 2e-2 } else { 3e-3 };
            assert!(error < bound, "rows of {scale}: {error}");
        }
    }
}

#[test]
fn entries_past_the_vocabulary_or_over_the_limit_are_refused() {
    let mut head = Store::default().head();
    let limits = Limits { graph_bytes: 48 * 64 + 128, ..ane() };
    let error = head.emit(&limits).unwrap_err();
    assert!(matches!(error, EmitError::TooLarge { parts: 100, fits: 48, .. }), "{error}");
    head.entries = 90..101;
    let error = head.emit(&ane()).unwrap_err();
    assert_eq!(error.to_string(), "graph `head`: entries 90..101 of a vocabulary of 100");
}
