//! Choices of compiled routers, and two sequences in one call, against transformers.

use super::SIX;
use crate::support::{Expected, Setup, built, checkpoint, distance, expected, families, routes, with_engine};
use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code};
use moec_runtime::{Engine, LogitRows, Moment, Row};

/// Tokens per chunk, which do not divide the prompt.
const CHUNK: usize = 20;

/// An expert without weights, which is no expert of the step that groups tokens.
const NONE: u32 = u32::MAX;

/// Experts that are chosen for each token, for each layer with experts, and the number of experts of a layer. One
/// that computes nothing is [`NONE`].
fn chosen(engine: &mut Engine<'_>, ids: &[u32]) -> (Vec<Vec<Vec<u32>>>, u32) {
    let entry = engine.entry(EntryKind::Prefill(CHUNK as u32)).unwrap();
    let mut layers: Vec<Vec<Vec<u32>>> = Vec::new();
    let mut count = 0;
    engine.reset(0).unwrap();
    for (from, chunk) in (0..).step_by(CHUNK).zip(ids.chunks(CHUNK)) {
        let row = |(i, &id): (usize, &u32)| Row { slot: 0, pos: from + i, id };
        let rows: Vec<Row> = chunk.iter().enumerate().map(row).collect();
        let mut layer = 0;
        let mut observe = |moment: Moment, view: &moec_runtime::StepView<'_>| {
            let step = view.step();
            if let (Moment::After, &Code::Builtin(Builtin::Dispatch { k, experts, .. })) =
                (moment, &step.code)
            {
                count = experts;
                let Some(&Arg::Buffer(buffer, skip)) = step.args.first() else { panic!("no choices") };
                let bytes = view.buffer(buffer).unwrap();
                let words = bytes[skip as usize..].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b));
                let words: Vec<u32> = words.take(view.n() * k as usize).collect();
                if layers.len() == layer {
                    layers.push(Vec::new());
                }
                layers[layer].extend(words.chunks(k as usize).map(<[u32]>::to_vec));
                layer += 1;
            }
            Ok(())
        };
        engine.trace_entry(entry, &rows, &[rows.len() - 1], ids.len(), &mut observe).unwrap();
    }
    (layers, count)
}

/// Decodes two places of the prompt in one call, again and again: each row has the logits of its own
/// sequence.
fn check_pairs(engine: &mut Engine<'_>, want: &Expected, family: &str) {
    let sequences = [(0, 31), (1, 9)];
    for (slot, n) in sequences {
        engine.reset(slot).unwrap();
        engine.prefill(slot, 0, &want.ids[..n], LogitRows::None, &mut |_, _| Ok(())).unwrap();
    }
    for t in 0..12 {
        let batch = sequences.map(|(slot, n)| (slot, n + t, want.ids[n + t]));
        let mut check = |row: usize, logits: &[f32]| {
            let off = distance(logits, want.row(batch[row].1));
            assert!(off <= want.tolerance(), "{family}, row {row} of call {t}: a logit is off by {off}");
            Ok(())
        };
        engine.decode(&batch, &mut check).unwrap();
    }
}

/// In a plain run, of six families of 2026.
#[test]
fn routers_choose_and_sequences_compute_what_transformers_does() {
    let families: Vec<&str> = if moec_testing::all() { families().collect() } else { SIX.to_vec() };
    let mut compared = 0;
    for family in families {
        let (folder, source) = (tempfile::tempdir().unwrap(), checkpoint(family));
        let setup = Setup { format: "f32", chunk: CHUNK, batch: &[1, 2], context: 96 };
        let path = folder.path().join("b");
        built(&setup.write(&source, folder.path()), &["--target", "native"], &path);
        let want = expected(&source);
        with_engine(&Bundle::open(&path).unwrap(), |engine| {
            check_pairs(engine, &want, family);
            let Some(mut reference) = routes(&source) else { return };
            let (choices, experts) = chosen(engine, &want.ids);
            // transformers counts experts without weights after the others.
            reference.iter_mut().flatten().flatten().filter(|id| **id >= experts).for_each(|id| *id = NONE);
            // An order among the chosen experts has no meaning.
            let sorted = |mut layers: Vec<Vec<Vec<u32>>>| {
                layers.iter_mut().flatten().for_each(|choice| choice.sort_unstable());
                layers
            };
            let got = sorted(choices);
            assert_eq!(got.len(), reference.len(), "{family}: layers with experts");
            assert_eq!(got, sorted(reference), "{family}");
            compared += 1;
        });
    }
    assert!(compared >= SIX.len(), "{compared}");
}
