//! Big-little decoding and best-of-N of compiled models: every family, every format of the KV cache.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stderr,
    clippy::print_stdout,
    reason = "a test fails by panicking"
)]

use crate::support;

use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_measure::verify::verify;
use moec_runtime::kv::saved::{Saved, save};
use moec_runtime::serving::scheduler::Setting;
use moec_runtime::{BestOf, Decoder, Engine, Fallbacks, Sampler, Sampling, Want, best_of, generate};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Mutex;
use support::{
    FOLDED, MIXTURES, Setup, built, checkpoint, configured, copy_checkpoint, distance, expected, fails,
    ferris, json_of, list, moec, ok, served, with_engine,
};

const BATCHES: [usize; 3] = [1, 2, 4];

/// A checkpoint built for this machine; `more` is added to its `model.toml`.
fn compiled(source: &Path, format: &str, more: &str, folder: &Path) -> Bundle {
    compiled_by(source, format, folder, |text| text + more)
}

/// A checkpoint built for this machine as what becomes of its `model.toml` says.
fn compiled_by(source: &Path, format: &str, folder: &Path, by: impl FnOnce(String) -> String) -> Bundle {
    let toml = Setup { format, chunk: 20, batch: &BATCHES, context: 128 }.write(source, folder);
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, by(text)).unwrap();
    built(&toml, &["--target", "native"], &folder.join("b"));
    Bundle::open(&folder.join("b")).unwrap()
}

const BIG_LITTLE: &str = "[decode]\nbig_little = true\n";

/// Storage of the KV cache that is tried: every one of the two kinds of attention and of the trained model.
fn caches(model: &str) -> &'static [&'static str] {
    if ["olmoe", "deepseek_v2", "ferris"].contains(&model) { &["f32", "bf16", "q8"] } else { &["bf16"] }
}

/// Keys of experts per token.
const CHOSEN: [&str; 2] = ["num_experts_per_tok", "moe_num_active_primary_experts"];

/// Experts per token that a checkpoint's configuration names.
fn experts_per_token(source: &Path) -> u64 {
    let text = std::fs::read_to_string(source.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&text).unwrap();
    CHOSEN.iter().find_map(|key| config[key].as_u64()).unwrap()
}

/// The same checkpoint, configured with other experts per token.
fn with_experts(source: &Path, experts: u64, folder: &Path) {
    configured(source, folder, |config| {
        let key = CHOSEN.into_iter().find(|key| config[key].is_u64()).unwrap();
        config[key] = json!(experts);
    });
}

type Step<'a> = &'a mut dyn FnMut(&mut Engine<'_>, &[(u32, usize, u32)]) -> Vec<f32>;

/// Logits of every token of a sequence in slot 0, decoded one by one.
fn read(engine: &mut Engine<'_>, ids: &[u32], step: Step<'_>) -> Vec<Vec<f32>> {
    engine.reset(0).unwrap();
    ids.iter().enumerate().map(|(pos, &id)| step(engine, &[(0, pos, id)])).collect()
}

fn full(engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]) -> Vec<f32> {
    let mut all = Vec::new();
    engine
        .decode(batch, &mut |_, logits| {
            all.extend_from_slice(logits);
            Ok(())
        })
        .unwrap();
    all
}

fn little(engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]) -> Vec<f32> {
    let mut all = Vec::new();
    engine
        .decode_little(batch, &mut |_, logits| {
            all.extend_from_slice(logits);
            Ok(())
        })
        .unwrap();
    all
}

/// The little entry point is the model that `config.json` would describe with fewer experts per token: renormalised
/// weights, groups, biases, shared experts and all. Every step is what the reference evaluator says.
#[test]
fn the_little_model_is_the_one_with_fewer_experts() {
    for family in MIXTURES {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", BIG_LITTLE, folder.path());
        let report = verify(&bundle, None, None, &Progress::silent()).unwrap();
        assert_eq!(report.failures(), Vec::<String>::new(), "{family}");
        let entries: Vec<&str> = report.entries.iter().map(|e| &*e.entry).collect();
        let names =
            ["prefill[20]", "decode[1]", "decode[2]", "decode[4]", "little[1]", "little[2]", "little[4]"];
        assert_eq!(entries, names, "{family}");

        let experts = experts_per_token(&source).div_ceil(2);
        assert_eq!(bundle.plan.model.big_little.unwrap().experts, experts as u32, "{family}");
        if family == "phimoe" {
            continue; // Its configuration must say 2.
        }
        let (fewer, of_fewer) = (folder.path().join("fewer"), folder.path().join("of_fewer"));
        with_experts(&source, experts, &fewer);
        std::fs::create_dir(&of_fewer).unwrap();
        let reference = compiled(&fewer, "f32", "", &of_fewer);
        let ids = &expected(&source).ids[..24];
        let got = with_engine(&bundle, |engine| read(engine, ids, &mut little));
        let want = with_engine(&reference, |engine| read(engine, ids, &mut full));
        assert!(got == want, "{family}: the little model is another one");
        let all = with_engine(&bundle, |engine| read(engine, ids, &mut full));
        assert!(distance(&all[23], &got[23]) > 1e-4, "{family}: it is the whole model");
    }
}

/// What the little pass has left at a position, the full one replaces to the bit, in every format of the cache.
#[test]
fn decoding_again_leaves_nothing_of_the_little_pass() {
    for (family, caches) in MIXTURES.map(|f| (f, caches(f))) {
        for cache in caches {
            let folder = tempfile::tempdir().unwrap();
            let source = checkpoint(family);
            let more = format!("{BIG_LITTLE}[memory]\nkv_cache = \"{cache}\"\n");
            let bundle = compiled(&source, "f32", &more, folder.path());
            let ids = &expected(&source).ids[..40];
            with_engine(&bundle, |engine| {
                let want = read(engine, ids, &mut full);
                let got = read(engine, ids, &mut |engine, batch| {
                    little(engine, batch);
                    full(engine, batch)
                });
                assert!(got == want, "{family}, {cache}: something of the little pass is left");
                // Another order: the little pass of several positions first.
                engine.reset(0).unwrap();
                for (pos, &id) in ids.iter().enumerate() {
                    little(engine, &[(0, pos, id)]);
                }
                let got: Vec<_> =
                    ids.iter().enumerate().map(|(pos, &id)| full(engine, &[(0, pos, id)])).collect();
                assert!(got == want, "{family}, {cache}: something of the little passes is left");
            });
        }
    }
}

/// Every family, generating: γ = 1 is the full model, γ = 0 the little one, and what lies between falls back sometimes.
#[test]
fn gamma_goes_from_the_little_model_to_the_full_one() {
    // In another order than the test that has the same bundles built, so that neither waits for the other.
    for family in MIXTURES.into_iter().rev() {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", BIG_LITTLE, folder.path());
        let want = expected(&source);
        let (prompt, after) = want.greedy.split_at(want.greedy.len() - 24);
        with_engine(&bundle, |engine| {
            let run = |engine: &mut Engine<'_>, mut decoder: Decoder, how: Sampling| {
                let request = moec_runtime::Request { slot: 0, prompt, n: 24, end: &[] };
                let done = generate(engine, &request, &mut decoder, &mut Sampler::new(how), &mut |_| Ok(()));
                let done = done.unwrap();
                (done.ids, done.fallbacks)
            };
            let hot = Sampling { temperature: 1.0, seed: 3, ..Sampling::GREEDY };
            for how in [Sampling::GREEDY, hot] {
                let at = |engine: &mut Engine<'_>, gamma: f32| {
                    let decoder = Decoder::big_little(engine.program(), gamma).unwrap();
                    run(engine, decoder, how.clone())
                };
                let all = run(engine, Decoder::full(), how.clone());
                assert_eq!(all.1, None);
                let (one, none) = (at(engine, 1.0), at(engine, 0.0));
                assert_eq!(one, (all.0.clone(), Some(Fallbacks { tokens: 23, full: 23 })), "{family}");
                assert_eq!(none.1, Some(Fallbacks { tokens: 23, full: 0 }), "{family}");
                // A probability that is never reached is never kept, which is the full model by the other way.
                let high = at(engine, 1.0 - f32::EPSILON);
                assert_eq!(high, (all.0, Some(Fallbacks { tokens: 23, full: 23 })), "{family}");
            }
            assert_eq!(run(engine, Decoder::full(), Sampling::GREEDY).0, after, "{family}");
        });
    }
}

/// The trained model is sure of some tokens and not of others.
#[test]
fn ferris_falls_back_where_it_is_not_sure() {
    let folder = tempfile::tempdir().unwrap();
    let source = ferris();
    let bundle = compiled(&source, "bf16", "[decode]\nbig_little = true\ngamma = 0.5\n", folder.path());
    let ids = &expected(&source).ids[..48];
    with_engine(&bundle, |engine| {
        let mut decoder = Decoder::of(engine.program()).unwrap();
        let mut step = |engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]| {
            let (kept, logits) = (decoder.fallbacks().unwrap().full, Mutex::new(Vec::new()));
            decoder.decode(engine, batch, &|_, l| logits.lock().unwrap().extend_from_slice(l)).unwrap();
            let logits = logits.into_inner().unwrap();
            // What is kept is sure, by its own numbers.
            let max = logits.iter().copied().fold(f32::MIN, f32::max);
            let p = 1.0 / logits.iter().map(|&z| f64::from(z - max).exp()).sum::<f64>();
            assert!(decoder.fallbacks().unwrap().full > kept || p > 0.5);
            logits
        };
        read(engine, ids, &mut step);
        let found = decoder.fallbacks().unwrap();
        assert!(found.tokens == 48 && found.full > 4 && found.full < 44, "{found:?}");
        // Rows of a batch are decoded as if they were alone.
        for many in [2, 3, 4] {
            let mut alone = Vec::new();
            for slot in 0..many {
                engine.reset(slot).unwrap();
                let n = 8 + 5 * slot as usize;
                engine.prefill(slot, 0, &ids[..n], Want::None, &mut |_, _| Ok(())).unwrap();
                let mut decoder = Decoder::of(engine.program()).unwrap();
                let row = [(slot, n, ids[n])];
                let of_row = Mutex::new(Vec::new());
                decoder.decode(engine, &row, &|_, l| of_row.lock().unwrap().extend_from_slice(l)).unwrap();
                alone.push((row[0], of_row.into_inner().unwrap(), decoder.fallbacks().unwrap().full));
            }
            let rows: Vec<_> = alone.iter().map(|a| a.0).collect();
            let mut decoder = Decoder::of(engine.program()).unwrap();
            let distances = Mutex::new(Vec::new());
            let sink = |i: usize, l: &[f32]| distances.lock().unwrap().push(distance(l, &alone[i].1));
            decoder.decode(engine, &rows, &sink).unwrap();
            let worst = distances.into_inner().unwrap().into_iter().fold(0f32, f32::max);
            assert_eq!(decoder.fallbacks().unwrap().full, alone.iter().map(|a| a.2).sum::<usize>());
            assert!(worst < 1e-4, "{many} rows: {worst}");
        }
    });
}

/// Draws a sequence anew, alone in slot 0, with the given ids before each token: how many draws differ, the mean
/// log-probability of the ids, and the fallbacks.
fn replayed(
    engine: &mut Engine<'_>,
    prompt: &[u32],
    ids: &[u32],
    decoder: &mut Decoder,
    how: Sampling,
) -> (usize, f64, usize) {
    let mut sampler = Sampler::new(how);
    let (mut differ, mut sum) = (0, 0.0);
    let mut held = |i: usize, logits: &[f32]| {
        differ += usize::from(sampler.sample(logits).unwrap() != ids[i]);
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        let total: f64 = logits.iter().map(|&z| f64::from(z - max).exp()).sum();
        sum += f64::from(logits[ids[i] as usize] - max) - total.ln();
    };
    engine.reset(0).unwrap();
    let last = &mut |_: usize, logits: &[f32]| {
        held(0, logits);
        Ok(())
    };
    engine.prefill(0, 0, prompt, Want::Last, last).unwrap();
    let held = Mutex::new(held);
    for (i, &id) in ids[..ids.len() - 1].iter().enumerate() {
        let row = [(0, prompt.len() + i, id)];
        decoder.decode(engine, &row, &|_, logits| (held.lock().unwrap())(i + 1, logits)).unwrap();
    }
    (differ, sum / ids.len() as f64, decoder.fallbacks().map_or(0, |f| f.full))
}

/// Sequences of one batch are those of single runs with the same seeds, whatever the KV cache holds. Kernels for several
/// rows sum in another order than those for one, and a cache in bf16 or q8 rounds what differs in the last bit: so every
/// token is drawn again after the same ids, and a draw in a hundred may fall otherwise.
#[test]
fn best_of_is_so_many_single_runs() {
    // In another order than the test that has the same bundles built, so that neither waits for the other.
    let sources =
        [("ferris", ferris())].into_iter().chain(MIXTURES.into_iter().rev().map(|f| (f, checkpoint(f))));
    for (name, source) in sources {
        for cache in caches(name) {
            let folder = tempfile::tempdir().unwrap();
            let more = format!("{BIG_LITTLE}[memory]\nkv_cache = \"{cache}\"\n");
            let bundle = compiled(&source, "f32", &more, folder.path());
            let prompt = &expected(&source).ids[..37];
            let how = Sampling { temperature: 0.9, top_p: 0.95, seed: 11, ..Sampling::default() };
            with_engine(&bundle, |engine| {
                // What lay in the other slots is no part of it.
                for slot in 1..4 {
                    engine.prefill(slot, 0, &[7; 50], Want::None, &mut |_, _| Ok(())).unwrap();
                }
                let full = |_: &Engine<'_>| Decoder::full();
                let sure = |e: &Engine<'_>| Decoder::big_little(e.program(), 0.4).unwrap();
                for decoder in [&full as &dyn Fn(&Engine<'_>) -> Decoder, &sure] {
                    let request = moec_runtime::Request { slot: 0, prompt, n: 32, end: &[] };
                    let mut with = decoder(engine);
                    let done: BestOf = best_of(engine, &request, 4, &mut with, &how).unwrap();
                    assert_eq!(done.calls, [4; 31]);
                    let (mut differ, mut fallbacks) = (0, 0);
                    for c in &done.candidates {
                        let mut with = decoder(engine);
                        let how = Sampling { seed: c.seed, ..how.clone() };
                        let alone = replayed(engine, prompt, &c.ids, &mut with, how);
                        differ += alone.0;
                        fallbacks += alone.2;
                        let off = (alone.1 - c.score()).abs();
                        assert!(off < 0.01, "{name}, {cache}, seed {}: a score is off by {off}", c.seed);
                    }
                    assert!(differ <= 1, "{name}, {cache}: {differ} of 128 draws differ");
                    let together = done.fallbacks.map_or(0, |f| f.full);
                    assert!(together.abs_diff(fallbacks) <= 1, "{name}, {cache}: {together} and {fallbacks}");
                    let first = &done.candidates[0].ids;
                    assert!(done.candidates.iter().any(|c| c.ids != *first), "{name}: all are the same");
                }
            });
        }
    }
}

/// Makes a row of the first tensor of this name no numbers.
fn spoil(folder: &Path, tensor: &str, row: usize) {
    let path = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let head = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..head]).unwrap();
    let said = &header[tensor];
    assert_eq!(said["dtype"], "BF16");
    let row_bytes = 2 * said["shape"][1].as_u64().unwrap() as usize;
    let at = head + said["data_offsets"][0].as_u64().unwrap() as usize + row * row_bytes;
    bytes[at..at + row_bytes].chunks_exact_mut(2).for_each(|x| x.copy_from_slice(&0x7fc0_u16.to_le_bytes()));
    std::fs::write(&path, bytes).unwrap();
}

/// A sequence whose numbers are none ends with that, and leaves nothing to the next one of its slot.
#[test]
fn no_numbers_are_left_in_a_slot() {
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
        // One that nobody waited for.
        engine.reset(0).unwrap();
        let unread = engine.prefill(0, 0, &bad[..20], Want::None, &mut |_, _| Ok(()));
        assert!(matches!(unread, Err(moec_runtime::Error::RouterNan { layer: Some(0) })), "{unread:?}");
        assert_eq!(generated(engine, &good).unwrap(), want);
    });
}

/// Logits behind a prompt that is read in parts with these ends, each as a part of the whole or as a prompt by itself.
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
        engine.prefill_part(0, start, &prompt[start..end], whole, Want::Last, &mut keep).unwrap();
    }
    bits
}

/// Positions of a prompt that is longer than a LongRoPE model was first trained for are turned by the long frequencies from its first
/// token on, as in the reference, however it is cut into calls; and what is kept of shorter ones is no part of it.
#[test]
fn a_prompt_turns_as_a_whole() {
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
        // A shorter prompt twice, and a longer one that begins so, twice.
        let prompts = [&prompt[..24], &prompt[..24], prompt, prompt].map(<[u32]>::to_vec);
        served(engine, &setting, &prompts, (1, 12))
    };
    with_engine(&bundle, |engine| {
        let prompt = &ids[..40];
        let whole = in_parts(engine, prompt, &[40], true);
        assert_eq!(in_parts(engine, prompt, &[20, 40], true), whole);
        assert_ne!(in_parts(engine, prompt, &[20, 40], false), whole);
        // What was saved of a short prompt is no part of a long one.
        in_parts(engine, &ids[..24], &[24], true);
        let path = folder.path().join("short.kv");
        save(engine, 0, &ids[..24], &path).unwrap();
        let saved = Saved::open(&path, engine.program()).unwrap();
        assert_eq!((saved.turned_from(32), saved.turned_from(33)), (None, Some(32)));
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
                    .prefill(0, 0, prompt, Want::Last, &mut |_, logits| {
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

/// States that fold tokens together: sequences of a call do not meet, a prompt may come in any pieces, a file holds all that was
/// folded, and what cannot be taken back is refused.
#[test]
fn folded_states_go_on_alone_together_and_from_a_file() {
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
                        engine.prefill(slot, start, part, Want::None, &mut |_, _| Ok(())).unwrap();
                    }
                }
                let both = full(engine, &prompts.map(|(slot, n)| (slot, n, ids[n])));
                for ((_, n), got) in prompts.iter().zip(both.chunks(want[0].len())) {
                    near(got, &want[*n], &format!("{n} tokens in pieces of {pieces}"));
                }
            }
            // A token at a time leaves the sequences where they are; the file is that of slot 3.
            let path = folder.path().join("prompt.kv");
            save(engine, 3, &ids[..10], &path).unwrap();
            let go_on = |engine: &mut Engine<'_>, slot| -> Vec<_> {
                (10..20).map(|pos| full(engine, &[(slot, pos, ids[pos])])).collect()
            };
            let of_slot = go_on(engine, 3);
            Saved::open(&path, engine.program()).unwrap().restore(engine, 1).unwrap();
            assert!(go_on(engine, 1) == of_slot, "{family}: the file holds another state");
            near(&of_slot[9], &want[19], "from a file");
            // Only a snapshot knows what a state was, and nobody has made one.
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

/// A server of a model whose states fold tokens together: answers are those of single runs whatever is asked beside and before
/// them, and what a slot holds is gone on with only where a snapshot allows it.
#[test]
fn folded_states_are_served_without_a_wrong_token() {
    for (family, more) in FOLDED.into_iter().zip(["", BIG_LITTLE]) {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let bundle = compiled(&source, "f32", more, folder.path());
        let ids = expected(&source).ids;
        // The same twice, one that goes on from it, and one that was edited inside of it.
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

/// The smaller entry points are taken as sequences end: each of the sizes has its calls.
#[test]
fn sequences_that_end_leave_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = compiled(&ferris(), "f32", "", folder.path());
    let prompt = &expected(&ferris()).ids[..20];
    with_engine(&bundle, |engine| {
        let how = Sampling { temperature: 1.0, seed: 2, ..Sampling::default() };
        let run = |engine: &mut Engine<'_>, end: &[u32]| {
            let request = moec_runtime::Request { slot: 0, prompt, n: 64, end };
            best_of(engine, &request, 4, &mut Decoder::full(), &how).unwrap()
        };
        let free = run(engine, &[]);
        // Ids that end three of the sequences, each at a time of its own.
        let end: Vec<u32> = (0..3).map(|i| free.candidates[i].ids[10 + 12 * i]).collect();
        let done = run(engine, &end);
        let length =
            |i: usize| free.candidates[i].ids.iter().position(|id| end.contains(id)).map_or(64, |p| p + 1);
        let lengths: Vec<usize> = (0..4).map(length).collect();
        for (i, c) in done.candidates.iter().enumerate() {
            assert_eq!(c.ids, free.candidates[i].ids[..lengths[i]], "sequence {i}");
        }
        let calls = (1..64).map(|made| lengths.iter().filter(|&&l| l > made).count()).filter(|&n| n > 0);
        assert_eq!(done.calls, calls.collect::<Vec<_>>());
        assert!(done.calls.first() > done.calls.last(), "{:?}", done.calls);
    });
}

#[test]
fn through_the_command_line() {
    let folder = tempfile::tempdir().unwrap();
    let source = ferris();
    let toml =
        Setup { format: "bf16", chunk: 128, batch: &[1, 2], context: 512 }.write(&source, folder.path());
    let text = std::fs::read_to_string(&toml).unwrap();
    std::fs::write(&toml, format!("{text}{BIG_LITTLE}")).unwrap();
    let bundle = folder.path().join("b");
    ok(moec().arg("build").arg(&toml).args(["--quiet", "-o"]).arg(&bundle));

    // The linked program and `moec run` decode alike.
    let prompt = list(&expected(&source).ids[..24]);
    let args = ["generate", "--ids", &prompt, "-n", "40", "--json", "--gamma", "0.6"];
    let own = json_of(support::clean(std::process::Command::new(bundle.join("run"))).args(args));
    let ours = json_of(moec().arg("run").arg(&bundle).args(args));
    assert_eq!((&own["ids"], &own["fallback_ratio"]), (&ours["ids"], &ours["fallback_ratio"]));
    let ratio = own["fallback_ratio"].as_f64().unwrap();
    assert!(ratio > 0.0 && ratio < 1.0, "{ratio}");

    // Perplexity: γ = 1 is what a prefill measures, fewer experts are worse, and what lies between lies between.
    let text = source.join("eval/text.txt");
    let eval = |more: &[&str]| {
        json_of(
            moec()
                .arg("eval")
                .arg(&bundle)
                .args(["--json", "--windows", "4", "--window", "256", "--text"])
                .arg(&text)
                .args(more),
        )
    };
    let plain = eval(&[])["perplexity"].as_f64().unwrap();
    let measured = eval(&["--big-little", "--gamma", "1,0.5,0"]);
    assert_eq!(measured["experts"], 2);
    let rows = measured["gammas"].as_array().unwrap();
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert_eq!([0, 1, 2].map(|i| number(i, "gamma")), [1.0, 0.5, 0.0]);
    assert!((number(0, "perplexity") / plain - 1.0).abs() < 1e-4, "{plain} {measured}");
    assert!(number(0, "perplexity") < number(1, "perplexity"), "{measured}");
    assert!(number(1, "perplexity") < number(2, "perplexity"), "{measured}");
    assert_eq!((number(0, "fallback_ratio"), number(2, "fallback_ratio")), (1.0, 0.0));
    assert!(number(1, "fallback_ratio") > 0.1 && number(1, "fallback_ratio") < 0.9, "{measured}");

    // Questions, as a table, with the bundle's own γ.
    let questions = folder.path().join("qa.jsonl");
    let lines = std::fs::read_to_string(source.join("eval/needle.jsonl")).unwrap();
    let few: Vec<&str> = lines.lines().take(12).collect();
    std::fs::write(&questions, few.join("\n")).unwrap();
    let shown = ok(moec().arg("eval").arg(&bundle).arg("--big-little").arg("--qa").arg(&questions)).stdout;
    let shown = String::from_utf8(shown).unwrap();
    let rows: Vec<&str> = shown.lines().collect();
    assert!(rows.len() == 2 && rows[0].contains("exact match") && rows[1].starts_with("0.7"), "{shown}");
}

#[test]
fn what_makes_no_sense_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "f32", chunk: 8, batch: &[1], context: 32 }
        .write(&checkpoint("olmoe"), folder.path());
    let text = std::fs::read_to_string(&toml).unwrap();
    let bundle = folder.path().join("b");
    let build = |more: &str| {
        std::fs::write(&toml, format!("{text}{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--quiet", "--no-run", "-o"]).arg(&bundle);
        build
    };
    let (code, said) = fails(&mut build("[decode]\nbig_little = true\nlittle = 2\n"));
    assert_eq!(code, 1);
    assert!(said.contains("`decode.little` is 2, but the model takes 2 experts per token"), "{said}");
    assert!(said.contains("hint: set it to 1 or less; 1 is the default"), "{said}");
    ok(&mut build(""));
    let questions = folder.path().join("qa.jsonl");
    std::fs::write(&questions, "{\"prompt\": \"a\", \"answer\": \"b\"}\n").unwrap();
    let eval = || {
        let mut eval = moec();
        eval.arg("eval").arg(&bundle).arg("--qa").arg(&questions);
        eval
    };
    for (args, words) in [
        (
            &["--big-little"][..],
            ["built without big-little decoding", "hint: set `big_little = true` under `[decode]`"],
        ),
        (&["--gamma", "0.5"], ["--big-little", "required"]),
        (&["--big-little", "--gamma", "0.5,2"], ["--gamma", "must be a number from 0 to 1"]),
    ] {
        let (_, said) = fails(eval().args(args));
        assert!(words.iter().all(|w| said.contains(w)), "{args:?}: {said}");
    }
    let (_, said) = fails(moec().arg("run").arg(&bundle).args(["generate", "--ids", "1", "--gamma", "0.5"]));
    assert!(said.contains("hint: set `big_little = true`"), "{said}");
    let (_, said) = fails(moec().arg("run").arg(&bundle).args([
        "generate",
        "--ids",
        "1",
        "--best-of",
        "2",
        "--temperature",
        "1",
    ]));
    assert!(said.contains("hint: name 2 in `decode_batch` under `[shapes]`"), "{said}");
}
