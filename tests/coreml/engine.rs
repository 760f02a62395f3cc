//! The engine with the Neural Engine emulated: states, and rows past a capacity.

use super::*;

#[test]
fn sequences_of_one_batch_keep_their_own_states() {
    let Some(found) = coreml() else { return };
    let case = Case::new("olmoe", ON_NPU);
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let prompts = [vec![3_u32, 5, 8, 13], vec![21, 34, 55, 89, 144, 233]];
    engine(&case, |engine| {
        let prefill = |engine: &mut Engine<'_>, slot: usize, prompt: &[u32]| {
            engine.prefill(slot as u32, 0, prompt, LogitRows::None, &mut |_, _| Ok(())).unwrap();
        };
        let decode = |engine: &mut Engine<'_>, batch: &[(u32, usize, u32)]| {
            let mut rows = Vec::new();
            let mut keep = |_, logits: &[f32]| {
                rows.push(logits.to_vec());
                Ok(())
            };
            engine.decode(batch, &mut keep).unwrap();
            rows
        };
        for (slot, prompt) in prompts.iter().enumerate() {
            prefill(engine, slot, prompt);
        }
        let both = decode(engine, &[(0, 4, 100), (1, 6, 200)]);
        // Each sequence by itself, in the slot of the other.
        prefill(engine, 0, &prompts[1]);
        prefill(engine, 1, &prompts[0]);
        assert_eq!(decode(engine, &[(1, 4, 100)])[0], both[0]);
        assert_eq!(decode(engine, &[(0, 6, 200)])[0], both[1]);
        assert_ne!(both[0], both[1]);
    });
}

/// Decoding positions again replaces them in the unit's own states. A prompt whose state cannot be copied is
/// computed in every slot.
#[test]
fn npu_states_follow_big_little_and_best_of() {
    let Some(found) = coreml() else { return };
    let case = Case::new("olmoe", &format!("{ON_NPU}[decode]\nbig_little = true\n"));
    ok(case.build("m2-ultra", "out.moec").envs(found));
    let prompt = [3_u32, 5, 8, 13, 21];
    engine(&case, |engine| {
        assert!(engine.program().graphs.iter().any(|g| g.stateful));
        let mut read = |again: bool| {
            engine.reset(0).unwrap();
            let mut rows = Vec::new();
            for (pos, &id) in prompt.iter().enumerate() {
                let mut last = Vec::new();
                let mut sink = |_: usize, logits: &[f32]| {
                    last = logits.to_vec();
                    Ok(())
                };
                if again {
                    engine.decode_little(&[(0, pos, id)], &mut sink).unwrap();
                }
                engine.decode(&[(0, pos, id)], &mut sink).unwrap();
                rows.push(last);
            }
            rows
        };
        assert!(read(false) == read(true), "something of the little pass is left");
        let sampling = Sampling { temperature: 1.0, seed: 4, ..Sampling::default() };
        let request = Request { slot: 0, prompt: &prompt, n: 8, end: &[] };
        for gamma in [0.05, 1.0] {
            let decoder = |e: &Engine<'_>| Decoder::big_little(e.program(), gamma).unwrap();
            let mut with = decoder(engine);
            let done = best_of(engine, &request, 2, &mut with, &sampling).unwrap();
            for c in &done.candidates {
                let mut with = decoder(engine);
                let mut sampler = Sampler::new(Sampling { seed: c.seed, ..sampling.clone() });
                let alone = generate(engine, &request, &mut with, &mut sampler, &mut |_| Ok(())).unwrap();
                assert_eq!(c.ids, alone.ids, "gamma {gamma}");
            }
        }
    });
}

#[test]
fn rows_past_a_capacity_are_lost_or_spill() {
    let Some(found) = coreml() else { return };
    let want = expected(&checkpoint("mixtral"));
    let mut off = Vec::new();
    for overflow in ["spill", "prune"] {
        // Capacities for half of the chunks, by a profile with nearly equal loads: too small for the real
        // router.
        let more =
            format!("[placement]\nexperts = \"npu\"\n[experts]\ncoverage = 0.5\noverflow = \"{overflow}\"\n");
        let case = Case::with_chunk("mixtral", &more, 48);
        ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
        let (logits, counters) = engine(&case, |engine| {
            let mut all = Vec::new();
            let mut keep = |_, logits: &[f32]| {
                all.extend_from_slice(logits);
                Ok(())
            };
            engine.prefill(0, 0, &want.ids, LogitRows::All, &mut keep).unwrap();
            (all, engine.overflow_counters())
        });
        let layers = case.plan("out.moec").model.layers as usize;
        assert_eq!(counters.len(), layers);
        let mut sum = OverflowCounters::default();
        for (_, t) in &counters {
            sum.add(t);
        }
        let k = 2;
        assert_eq!(sum.routed as usize, want.ids.len() * k * layers);
        let lost = sum.pruned + sum.spilled;
        assert!(lost > 0, "nothing overflows: {sum:?}");
        assert_eq!(if overflow == "spill" { sum.pruned } else { sum.spilled }, 0);
        // The rows that graphs compute are the remaining pairs and the padding.
        assert_eq!(sum.rows - sum.padding, sum.routed - lost);
        let square =
            |of: &dyn Fn(usize) -> f32| (0..logits.len()).map(|i| f64::from(of(i)).powi(2)).sum::<f64>();
        off.push((square(&|i| logits[i] - want.logits[i]) / square(&|i| want.logits[i])).sqrt());
    }
    assert!(off[0] < 5e-3 && off[1] > 4.0 * off[0], "{off:?}");
}

/// Experts of prompts in static graphs, experts of decoding on disk with few in memory: the output is the
/// same as with all in memory.
#[test]
fn static_graphs_work_with_a_memory_budget() {
    let Some(found) = coreml() else { return };
    let want = expected(&checkpoint("olmoe"));
    let run = |more: &str| {
        let more = format!(
            "[placement]\nexperts = \"npu\"\n[experts]\noverflow = \"spill\"\ncoverage = 0.5\n{more}"
        );
        let case = Case::with_chunk("olmoe", &more, 48);
        ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
        let results = engine(&case, |engine| {
            let mut logits = Vec::new();
            let mut keep = |_, row: &[f32]| {
                logits.extend(row.iter().map(|x| x.to_bits()));
                Ok(())
            };
            engine.prefill(0, 0, &want.ids, LogitRows::All, &mut keep).unwrap();
            let request = Request { slot: 0, prompt: &want.ids[..20], n: 24, end: &[] };
            let mut sampler = Sampler::new(Sampling::default());
            let made = generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(()));
            let spilled: u64 = engine.overflow_counters().iter().map(|(_, t)| t.spilled).sum();
            (logits, made.unwrap().ids, spilled, engine.paging().map(|p| p.misses))
        });
        (results, case.plan("out.moec"))
    };
    let ((logits, ids, spilled, none), plan) = run("");
    assert!(!plan.graphs.is_empty() && spilled > 0 && none.is_none());
    let (_, roomy) = run("[memory]\nbudget = \"1 GiB\"\nthreads = 1\n");
    let p = roomy.paging.as_ref().unwrap();
    let least = p.resident + p.process + u64::from(p.staging + 3) * p.frame_bytes;
    let (results, tight) =
        run(&format!("[memory]\nbudget = \"{} KiB\"\nthreads = 1\n", least.div_ceil(1024)));
    let p = tight.paging.as_ref().unwrap();
    assert!(!tight.graphs.is_empty() && p.frames < p.layers.iter().map(|l| l.experts).sum(), "{}", p.frames);
    assert!(results.0 == logits && results.1 == ids && results.2 == spilled, "a budget changes what is said");
    assert!(results.3 > Some(0), "nothing was read from disk");
}
