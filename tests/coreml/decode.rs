//! Experts of decoding on the Neural Engine, and graphs that run at a time.

use super::*;
use moec_ir::EntryKind;
use moec_ir::plan::{Builtin, Code};

/// Tokens of a prompt, and of a sequence that continues it.
const PROMPT: usize = 6;
const DECODED: usize = 6;

/// Logits of twelve decoded rows, alone and in a batch of two, tokens that are generated after a prompt, and
/// the counts of rows past capacities before and after.
type Decoded = (Vec<Vec<f32>>, Vec<u32>, [Vec<(u32, OverflowCounters)>; 2]);

fn decoded(case: &Case, ids: &[u32]) -> Decoded {
    engine(case, |engine| {
        for slot in 0..2 {
            engine.prefill(slot, 0, &ids[..PROMPT], LogitRows::None, &mut |_, _| Ok(())).unwrap();
        }
        let before = engine.overflow_counters();
        let mut rows = Vec::new();
        let mut keep = |_: usize, logits: &[f32]| {
            rows.push(logits.to_vec());
            Ok(())
        };
        for (i, &id) in ids[PROMPT..][..DECODED].iter().enumerate() {
            let both = [(0, PROMPT + i, id), (1, PROMPT + i, ids[i])];
            let calls: &[&[(u32, usize, u32)]] = if i < 3 { &[&both[..1], &both[1..]] } else { &[&both] };
            for rows in calls {
                engine.decode(rows, &mut keep).unwrap();
            }
        }
        let after = engine.overflow_counters();
        engine.reset(0).unwrap();
        let request = Request { slot: 0, prompt: &ids[..PROMPT], n: 16, end: &[] };
        let mut sampler = Sampler::new(Sampling::default());
        let made = generate(engine, &request, &mut Decoder::full(), &mut sampler, &mut |_| Ok(())).unwrap();
        (rows, made.ids, [before, after])
    })
}

/// Steps of entry points that decode and that launch graphs of experts, by batch.
fn launched(plan: &Plan) -> Vec<(u32, usize)> {
    let decoding = plan.entries.iter().filter_map(|entry| match entry.kind {
        EntryKind::Decode(batch) => Some((batch, entry)),
        _ => None,
    });
    let count = |(batch, entry): (u32, &moec_ir::plan::Entry)| {
        let sets = entry.steps.iter().filter_map(|step| match step.code {
            Code::Builtin(Builtin::Experts { set, .. }) => Some(&plan.expert_sets[set as usize]),
            _ => None,
        });
        (batch, sets.inspect(|set| assert_eq!((set.batch, set.hot), (Some(batch), None))).count())
    };
    decoding.map(count).collect()
}

#[test]
fn decoded_experts_on_the_neural_engine_agree_with_those_on_the_cpu() {
    let Some(found) = coreml() else { return };
    for family in ["olmoe", "mixtral"] {
        let ids = expected(&checkpoint(family)).ids;
        let run = |decode: &str| {
            let more = format!("[placement]\nexperts = \"npu\"\n{decode}[experts]\noverflow = \"prune\"\n");
            let case = Case::new(family, &more);
            ok(case.build("m2-ultra", "out.moec").envs(found.clone()));
            let verified =
                ok(moec().args(["verify", "--static", "--quiet", "--json"]).arg(case.path("out.moec")));
            let verified: Value = serde_json::from_slice(&verified.stdout).unwrap();
            let plan = case.plan("out.moec");
            assert_eq!(verified["functions"], plan.graphs.len(), "{family}");
            (decoded(&case, &ids), plan, case)
        };
        // By cost, the CPU decodes.
        let ((cpu, cpu_ids, _), on_cpu, _) = run("");
        let ((npu, npu_ids, [before, after]), on_npu, case) = run("decode = \"npu\"\n");
        let layers = on_npu.model.layers as usize;
        assert_eq!(launched(&on_cpu), [(1, 0), (2, 0)], "{family}");
        assert_eq!(launched(&on_npu), [(1, layers), (2, layers)], "{family}");
        // Decoding shares the packages of prompts.
        let packages = |plan: &Plan| plan.graphs.iter().map(|g| g.package.clone()).collect::<BTreeSet<_>>();
        assert_eq!(packages(&on_npu), packages(&on_cpu), "{family}");
        let square = |rows: &[f32]| rows.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>();
        for (a, b) in npu.iter().zip(&cpu) {
            let off: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
            let relative = (square(&off) / square(b)).sqrt();
            assert!(relative > 0.0 && relative < 5e-3, "{family}: {relative}");
        }
        assert_eq!((npu.len(), npu_ids), (cpu.len(), cpu_ids), "{family}");
        // No row is past a capacity, whatever `overflow` says.
        assert_eq!(before, after, "{family}");
        let explained = ok(moec().arg("explain").arg(case.path("out.moec"))).stdout;
        let explained = String::from_utf8(explained).unwrap();
        assert!(explained.contains("decoded rows") && explained.contains("requested: "), "{explained}");
    }
}

/// Graphs of a layer run at a time; that changes no bit.
#[test]
fn results_do_not_depend_on_the_queues_of_the_neural_engine() {
    let Some(found) = coreml() else { return };
    let ids = expected(&checkpoint("olmoe")).ids;
    let text = fs::read_to_string(support::root().join("targets/devices/m2-ultra.toml")).unwrap();
    assert!(text.contains("queues = { value = 16"));
    let run = |queues: u32| {
        let more = "[placement]\nexperts = \"npu\"\ndecode = \"npu\"\n[experts]\ngroup = 1\n";
        let case = Case::new("olmoe", more);
        let device = case.path("device.toml");
        let own = text.replace("queues = { value = 16", &format!("queues = {{ value = {queues}"));
        fs::write(&device, own).unwrap();
        ok(case.build(device.to_str().unwrap(), "out.moec").envs(found.clone()));
        let plan = case.plan("out.moec");
        assert_eq!(plan.units[1].queues, queues);
        let most = plan.expert_sets.iter().map(|s| s.groups.len()).max().unwrap();
        assert!(most >= 4, "a layer has {most} graphs");
        decoded(&case, &ids)
    };
    let one = run(1);
    assert!(one == run(4), "queues change results");
}

#[test]
fn graphs_for_decoding_alone_are_refused() {
    let case = Case::new("olmoe", "[placement]\nexperts = \"cpu\"\ndecode = \"npu\"\n");
    let stderr = fails(&mut case.build("m2-ultra", "out.moec")).1;
    assert!(
        stderr.contains("`decode` under `[placement]`") && stderr.contains("hint: set `experts"),
        "{stderr}"
    );
}
