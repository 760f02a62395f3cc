//! Prompts: the state that a slot keeps, and LongRoPE, which rotates all positions of a prompt alike.

use super::{compiled, compiled_by, full};
use crate::support::{checkpoint, configured, copy_checkpoint, expected, served, with_engine};
use moec_runtime::kv::saved::{Saved, save};
use moec_runtime::serving::scheduler::Setting;
use moec_runtime::{Decoder, Engine, LogitRows, Sampler, Sampling, generate};
use serde_json::{Value, json};
use std::path::Path;

/// Sets a row of the first tensor with this name to NaN.
fn spoil(folder: &Path, tensor: &str, row: usize) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..head]).unwrap();
    let entry = &header[tensor];
    assert_eq!(entry["dtype"], "BF16");
    let row_bytes = 2 * entry["shape"][1].as_u64().unwrap() as usize;
    let at = head + entry["data_offsets"][0].as_u64().unwrap() as usize + row * row_bytes;
    bytes[at..at + row_bytes].chunks_exact_mut(2).for_each(|x| x.copy_from_slice(&0x7fc0_u16.to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
}

/// A sequence with NaN ends with an error, and does not affect the next sequence in its slot.
#[test]
fn nan_of_a_sequence_does_not_remain_in_its_slot() {
    const BAD: u32 = 317;
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("bad");
    copy_checkpoint(&checkpoint("mixtral"), &source);
    spoil(&source, "model.embed_tokens.weight", BAD as usize);
    let allowed = |text: String| text.replace("[model]\n", "[model]\nallow_nonfinite = true\n");
    let bundle = compiled_by(&source, "bf16", folder.path(), allowed);
    let good: Vec<u32> = (0..11).map(|i| 3 + i * 29 % 300).collect();
    let generated = |engine: &mut Engine<'_>, prompt: &[u32]| {
        let request = moec_runtime::Request { slot: 0, prompt, n: 12, end: &[] };
        let mut sampler = Sampler::new(Sampling::default());
        generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).map(|made| made.ids)
    };
    with_engine(&bundle, |engine| {
        let want = generated(engine, &good).unwrap();
        let bad: Vec<u32> = good.iter().copied().chain([BAD; 25]).collect();
        assert!(generated(engine, &bad).is_err());
        assert_eq!(generated(engine, &good).unwrap(), want);
        // A prefill whose logits are not requested fails, too.
        engine.reset(0).unwrap();
        let unread = engine.prefill(0, 0, &bad[..20], LogitRows::None, &mut |_, _| Ok(()));
        assert!(
            matches!(&unread, Err(moec_runtime::Error::Model { what, .. }) if what.contains("the router of layer 0")),
            "{unread:?}"
        );
        assert_eq!(generated(engine, &good).unwrap(), want);
    });
}

/// Logits of a prompt in parts with these ends; each part is marked as part of the whole, or as a prompt of
/// its own.
fn in_parts(engine: &mut Engine<'_>, prompt: &[u32], ends: &[usize], of_whole: bool) -> Vec<u32> {
    engine.reset(0).unwrap();
    let mut bits = Vec::new();
    for (i, &end) in ends.iter().enumerate() {
        let start = if i == 0 { 0 } else { ends[i - 1] };
        let whole = if of_whole { prompt.len() } else { end };
        bits.clear();
        let mut keep = |_: usize, logits: &[f32]| {
            bits.extend(logits.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.prefill_part(0, start, &prompt[start..end], whole, LogitRows::Last, &mut keep).unwrap();
    }
    bits
}

/// If a LongRoPE prompt exceeds the original context, all its positions are rotated by the long frequencies.
/// This is as in the reference, and does not depend on the split into calls. The state of shorter prompts is
/// not reused.
#[test]
fn long_prompt_uses_long_rope_from_its_first_token() {
    let factors = |from: f64| (0..8).map(|i| from + 0.3 * f64::from(i)).collect::<Vec<_>>();
    let folder = tempfile::tempdir().unwrap();
    let (source, golden) = (folder.path().join("long"), checkpoint("phimoe"));
    configured(&golden, &source, |config| {
        config["rope_parameters"] = json!({
            "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32,
            "short_factor": factors(1.0), "long_factor": factors(2.0),
        });
    });
    let bundle = compiled(&source, "f32", "", folder.path());
    let ids = expected(&golden).ids;
    let greedy = |engine: &mut Engine<'_>, prompt: &[u32], slots: std::ops::Range<u32>| {
        let setting = Setting { slots, ..Setting::default() };
        // A short prompt twice, then twice a longer one that begins with it.
        let prompts = [&prompt[..24], &prompt[..24], prompt, prompt].map(<[u32]>::to_vec);
        served(engine, &setting, &prompts, (1, 12))
    };
    with_engine(&bundle, |engine| {
        let prompt = &ids[..40];
        let whole = in_parts(engine, prompt, &[40], true);
        assert_eq!(in_parts(engine, prompt, &[20, 40], true), whole);
        assert_ne!(in_parts(engine, prompt, &[20, 40], false), whole);
        // The saved state of a short prompt is not reused for a long one.
        in_parts(engine, &ids[..24], &[24], true);
        let path = folder.path().join("short.kv");
        save(engine, 0, &ids[..24], &path).unwrap();
        let saved = Saved::open(&path, engine.program()).unwrap();
        assert_eq!(
            (saved.crossed_long_rope_threshold(32), saved.crossed_long_rope_threshold(33)),
            (None, Some(32))
        );
        assert_eq!((saved.shared_with(&ids[..32]), saved.shared_with(&ids[..33])), (24, 0));
        for slots in [0..1, 0..4] {
            let made = greedy(engine, prompt, slots);
            let shared: Vec<usize> = made.iter().map(|one| one.shared).collect();
            assert_eq!(shared, [0, 23, 0, 39]);
            for (prompt, one) in [&prompt[..24], &prompt[..24], prompt, prompt].into_iter().zip(&made) {
                engine.reset(0).unwrap();
                let mut next = Vec::new();
                let best =
                    |logits: &[f32]| (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
                engine
                    .prefill(0, 0, prompt, LogitRows::Last, &mut |_, logits| {
                        next.extend(best(logits));
                        Ok(())
                    })
                    .unwrap();
                while next.len() < 12 {
                    let row = (0, prompt.len() + next.len() - 1, next[next.len() - 1] as u32);
                    next.extend(best(&full(engine, &[row])));
                }
                assert_eq!(next.iter().map(|&id| id as u32).collect::<Vec<_>>(), one.ids);
            }
        }
    });
}
