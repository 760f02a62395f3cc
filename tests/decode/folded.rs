//! Decoding of models with recurrent states.

use super::{BIG_LITTLE, compiled, full, read};
use crate::support::{FOLDED, checkpoint, distance, expected, json_of, list, moec, served, with_engine};
use moec_runtime::kv::saved::{Saved, save};
use moec_runtime::serving::scheduler::Setting;
use moec_runtime::{Decoder, Engine, LogitRows, Sampler, Sampling, generate};

/// Recurrent states: sequences of a call are independent, and a prompt may be split anywhere. A saved prompt
/// has the whole state, and a rewind without a snapshot is refused.
#[test]
fn recurrent_states_continue_alone_batched_and_from_a_file() {
    for family in FOLDED {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", "", folder.path());
        let ids = &expected(&source).ids;
        let near = |a: &[f32], b: &[f32], what: &str| {
            let off = distance(a, b);
            assert!(off < 1e-4, "{family}, {what}: a logit is off by {off}");
        };
        with_engine(&bundle, |engine| {
            let want = read(engine, &ids[..32], &mut full);
            let prompts = [(0, 31), (3, 9)];
            for pieces in [31, 7, 1] {
                for (slot, n) in prompts {
                    engine.reset(slot).unwrap();
                    for start in (0..n).step_by(pieces) {
                        let part = &ids[start..n.min(start + pieces)];
                        engine.prefill(slot, start, part, LogitRows::None, &mut |_, _| Ok(())).unwrap();
                    }
                }
                let both = full(engine, &prompts.map(|(slot, n)| (slot, n, ids[n])));
                for ((_, n), got) in prompts.iter().zip(both.chunks(want[0].len())) {
                    near(got, &want[*n], &format!("{n} tokens in pieces of {pieces}"));
                }
            }
            // The sequences were decoded token by token; the saved prompt is that of slot 3.
            let path = folder.path().join("prompt.kv");
            save(engine, 3, &ids[..10], &path).unwrap();
            let go_on = |engine: &mut Engine<'_>, slot| -> Vec<_> {
                (10..20).map(|pos| full(engine, &[(slot, pos, ids[pos])])).collect()
            };
            let of_slot = go_on(engine, 3);
            Saved::open(&path, engine.program()).unwrap().restore(engine, 1).unwrap();
            assert!(go_on(engine, 1) == of_slot, "{family}: the file holds another state");
            near(&of_slot[9], &want[19], "from a file");
            // Without a snapshot the state cannot be restored.
            let refused = engine.rewind(1, 12).unwrap_err().to_string();
            assert!(refused.contains("layers.0.mixer."), "{refused}");
            engine.rewind(1, 0).unwrap();
            near(&full(engine, &[(1, 0, ids[0])]), &want[0], "from the beginning");
        });
        let prompt = list(&ids[..12]);
        let run = || {
            let mut run = moec();
            run.arg("run")
                .arg(folder.path().join("b"))
                .args(["generate", "--ids", &prompt, "-n", "6", "--json"]);
            run
        };
        let whole = json_of(&mut run());
        let saved = folder.path().join("cli.kv");
        assert_eq!(json_of(run().arg("--save-prompt").arg(&saved))["ids"], whole["ids"]);
        assert_eq!(json_of(run().arg("--load-prompt").arg(&saved))["ids"], whole["ids"]);
        assert_eq!(json_of(run().args(["--speculate", "2"]))["ids"], whole["ids"]);
    }
}

/// A server of a model with recurrent states gives the answers of single runs, whatever other requests run. A
/// slot's state is reused only from a snapshot.
#[test]
fn recurrent_states_are_served_without_a_wrong_token() {
    for (family, more) in FOLDED.into_iter().zip(["", BIG_LITTLE]) {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", more, folder.path());
        let ids = expected(&source).ids;
        // The same prompt twice, a longer one, and one that was edited in the middle.
        let (first, longer) = (ids[..25].to_vec(), ids[..43].to_vec());
        let edited: Vec<u32> = ids[..22].iter().chain(&ids[30..38]).copied().collect();
        let prompts = [first.clone(), first, longer, edited];
        with_engine(&bundle, |engine| {
            let alone = prompts.clone().map(|prompt| {
                let request = moec_runtime::Request { slot: 0, prompt: &prompt, n: 10, end: &[] };
                let mut sampler = Sampler::new(Sampling::default());
                generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).unwrap().ids
            });
            for together in [1, 2, 4] {
                let made = served(engine, &Setting::default(), &prompts, (together, 10));
                for (one, alone) in made.iter().zip(&alone) {
                    assert_eq!(one.ids, *alone, "{family}, {together} at once, {} tokens shared", one.shared);
                }
                let shared: Vec<usize> = made.iter().map(|one| one.shared).collect();
                // A chunk has 20 tokens, and the first prompt ends at 25.
                let expected = [[0, 20, 25, 20], [0, 0, 25, 20], [0; 4]][together / 2];
                assert_eq!(shared, expected, "{family}, {together} at once");
            }
        });
    }
}
