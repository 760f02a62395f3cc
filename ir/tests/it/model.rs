//! A whole model through the reference evaluator: results do not depend on chunks, decoding and padding.

use crate::common::{GeneratedSource, close, model};
use moec_ir::eval::Evaluator;
use moec_ir::verify;

const IDS: [u32; 9] = [3, 1, 4, 1, 5, 9, 2, 6, 5];

#[test]
fn all_entry_points_give_the_same_logits() {
    let (module, source) = (model(), GeneratedSource::default());
    verify::module(&module).unwrap();
    let mut eval = Evaluator::new(&module, &source);
    let whole = eval.logits(&IDS).unwrap();
    assert_eq!(whole.ty.shape, [9, 11]);
    for entry in 0..3 {
        eval.reset();
        let other = eval.logits_from(entry, 1, 0, &IDS).unwrap();
        close(other.as_f32(), whole.as_f32());
    }
    // Prefill, then decode on top of the same cache, without keeping weights.
    eval.reset();
    eval.keep_weights(false);
    eval.logits_from(0, 1, 0, &IDS[..6]).unwrap();
    let rest = eval.logits_from(2, 1, 6, &IDS[6..]).unwrap();
    close(rest.as_f32(), &whole.as_f32()[6 * 11..]);
}

#[test]
fn decoding_keeps_slots_independent() {
    let (module, source) = (model(), GeneratedSource::default());
    let mut eval = Evaluator::new(&module, &source);
    let a = eval.logits(&[1, 2, 3]).unwrap();
    let b = eval.logits(&[7, 8, 9]).unwrap();
    eval.reset();
    let mut last = None;
    for t in 0..3 {
        let (ids, pos) = ([1 + t, 7 + t, 0], [t, t, -1]);
        last = Some(eval.run(2, &ids, &pos, &[0, 1, 0], &[1, 0, -1]).unwrap());
    }
    let last = last.unwrap();
    close(&last.as_f32()[..11], &b.as_f32()[22..]);
    close(&last.as_f32()[11..22], &a.as_f32()[22..]);
}

#[test]
fn the_observer_sees_every_node_and_calls_out_of_range_are_errors() {
    let (module, source) = (model(), GeneratedSource::default());
    let mut eval = Evaluator::new(&module, &source);
    let mut seen = Vec::new();
    eval.run_with(2, &[1, 0, 0], &[0, -1, -1], &[0; 3], &[0, -1, -1], &mut |node, outputs| {
        let types: Vec<_> = outputs.iter().map(|t| t.ty.clone()).collect();
        let graph = &module.entries[2];
        let want: Vec<_> =
            graph.nodes[node.0 as usize].outputs.iter().map(|&v| graph.ty(v).clone()).collect();
        assert_eq!(types, want);
        seen.push(node);
    })
    .unwrap();
    assert_eq!(seen.len(), module.entries[2].nodes.len());
    let message = |ids: &[i32], pos: &[i32], slot: &[i32], rows: &[i32]| {
        Evaluator::new(&module, &source).run(2, ids, pos, slot, rows).unwrap_err().to_string()
    };
    assert!(message(&[11, 0, 0], &[0; 3], &[0; 3], &[0; 3]).contains("id 11"));
    assert!(message(&[0; 3], &[16, 0, 0], &[0; 3], &[0; 3]).contains("position 16"));
    assert!(message(&[0; 3], &[0; 3], &[2, 0, 0], &[0; 3]).contains("slot 2"));
    assert!(message(&[0; 3], &[0; 3], &[0; 3], &[3, 0, 0]).contains("row 3"));
    assert!(message(&[0; 2], &[0; 3], &[0; 3], &[0; 3]).contains("2 numbers"));
}
