//! A program has as many convolutions and transpositions as its legalised term.

use crate::latent::latent;
use crate::store::{Store, ane, padded};
use moec_coreml::emit::{Dense, Rope};
use moec_coreml::legalise::Counts;
use moec_coreml::program::{OpKind, Program};
use moec_ir::{Activation, Glu, RopeStyle};

#[track_caller]
fn check(program: &Program, counts: Counts, [convolutions, transpositions]: [usize; 2]) {
    assert_eq!([counts.convolutions, counts.layout_changes], [convolutions, transpositions]);
    for function in &program.functions {
        let count = |op| function.ops.iter().filter(|o| o.op == op).count();
        assert_eq!(count(OpKind::Transpose), transpositions, "{program}");
        assert!(count(OpKind::Conv) >= convolutions, "{program}");
    }
}

#[test]
fn attention_program_has_as_many_transposes_as_its_term() {
    let mut store = Store::default();
    let mut a = store.attention();
    (a.q_norm, a.clip_qkv) = (Some(store.norm(32)), Some(0.5));
    // Rows, angles, queries, keys, values, result of attention, result of the part.
    check(&a.emit(&ane()).unwrap(), a.legal().unwrap().counts(), [4, 7]);
    a.rope = None;
    check(&a.emit(&ane()).unwrap(), a.legal().unwrap().counts(), [4, 6]);
    a.rope = Some(Rope { offset: 8, channels: 16, style: RopeStyle::Interleaved });
    a.norm = Some(store.norm(32));
    check(&a.emit(&padded()).unwrap(), a.legal().unwrap().counts(), [4, 7]);
    // Latent attention has one key head, whose channels include the values, and two matrices per head.
    for (rank, convolutions) in [(None, 5), (Some(20), 6)] {
        let a = latent(&mut store, rank, RopeStyle::Half);
        check(&a.emit(&ane()).unwrap(), a.legal().unwrap().counts(), [convolutions, 6]);
    }
}

#[test]
fn networks_and_heads_are_transposed_only_at_the_border() {
    let mut store = Store::default();
    let glu = Glu::Gated(Activation::Silu);
    let group = store.group(1, glu, true);
    let dense = Dense {
        name: "layer0.ffn".into(),
        hidden: group.hidden,
        intermediate: group.intermediate,
        glu,
        weights: group.weights,
        gate: None,
        rows: vec![16],
    };
    let head = store.head();
    let limits = padded();
    check(&dense.emit(&limits).unwrap(), dense.legal(&limits).unwrap().counts(), [3, 2]);
    // A vocabulary of 100 in parts of 48.
    check(&head.emit(&limits).unwrap(), head.legal(&limits).unwrap().counts(), [3, 4]);
    // Without a padded axis, a convolution reads rows at the boundary without transposition.
    for program in [dense.emit(&ane()), head.emit(&ane())] {
        let transposed = |op: &moec_coreml::program::Op| op.op == OpKind::Transpose;
        assert!(!program.unwrap().functions[0].ops.iter().any(transposed));
    }
}
