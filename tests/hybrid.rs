//! The CPU and a unit with cache frames divide the experts at run time. Whichever unit computes an expert,
//! and wherever it was read from, the bits are those of the CPU.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
use moec_runtime::CheckLevel;

use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code, Plan};
use moec_mirror::Modelled;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::schedule::ExpertUnit;
use moec_runtime::schedule::cached::dispatcher::{CachedDispatcher, RowScores, Rows};
use moec_runtime::schedule::dispatch::{Assigned, plan as of_plan};
use moec_runtime::{
    Decoder, Engine, LogitRows, Moment, Options, Program, Request, Row, Sampler, Sampling, StepView,
};
use moec_sim::systems::CACHED as SYSTEMS;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use support::{built, checkpoint, distance, expected, fails, ferris, list, logits_file, moec, ok, root};

/// Times with which transferring a tiny expert sometimes pays. The CPU takes 2 µs per row and thousand
/// weights, the unit a tenth of that.
const TIMES: [(&str, &str); 2] = [
    (
        "memory = \"ram\"",
        "matmul = [{ rows = 1, weights = 1000000, ms = 2, source = \"assumed\" }, { rows = 64, weights = 1000000, ms = 40, source = \"assumed\" }]",
    ),
    (
        "memory = \"vram\"",
        "matmul = [{ rows = 1, weights = 1000000, ms = 0.2, source = \"assumed\" }, { rows = 64, weights = 1000000, ms = 1, source = \"assumed\" }]",
    ),
];

/// The device file of the modelled unit, with these times.
pub(crate) fn device(folder: &Path) -> PathBuf {
    let mut text = fs::read_to_string(root().join("targets/mirror/mirror.toml")).unwrap();
    for (line, times) in TIMES {
        assert!(text.contains(line));
        text = text.replacen(line, &format!("{line}\n{times}"), 1);
    }
    // A slow link: a transfer takes longer than the unit's start.
    let text = text.replace("gb_per_s = 25", "gb_per_s = 0.5");
    let path = folder.join("mirror.toml");
    fs::write(&path, text).unwrap();
    path
}

/// Builds a model with these additions to `model.toml`.
fn build(source: &Path, folder: &Path, name: &str, more: &str) -> Bundle {
    let toml = folder.join(format!("{name}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\n{more}",
        source.display()
    );
    fs::write(&toml, text).unwrap();
    built(&toml, &["--target", device(folder).to_str().unwrap()], &folder.join(name));
    Bundle::open(&folder.join(name)).unwrap()
}

/// Results of a bundle, and the units that computed its experts.
struct Computed {
    logits: Vec<u32>,
    ids: Vec<u32>,
    assigned: Option<Assigned>,
}

fn compute(bundle: &Bundle, options: Options, prompt: &[u32]) -> Computed {
    compute_by(bundle, options, prompt, &|_| Decoder::full())
}

/// Like [`compute`], with a decoder.
fn compute_by(
    bundle: &Bundle,
    options: Options,
    prompt: &[u32],
    decoder: &dyn Fn(&Program) -> Decoder,
) -> Computed {
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let mut bring = |_: &_| Some(Executor::Unit(Box::new(Modelled::default())));
    let mut engine = Engine::with_units(
        &program,
        &bundle.folder,
        &mut bring,
        &bundle.files(CheckLevel::Small).unwrap(),
        options,
    )
    .unwrap();
    let mut logits = Vec::new();
    let mut keep = |_: usize, row: &[f32]| {
        logits.extend(row.iter().map(|x| x.to_bits()));
        Ok(())
    };
    engine.prefill(0, 0, prompt, LogitRows::All, &mut keep).unwrap();
    let request = Request { slot: 0, prompt, n: 24, end: &[] };
    let (mut decoder, mut sampler) = (decoder(&program), Sampler::new(Sampling::default()));
    let made = moec_runtime::generate(&mut engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(()));
    let promised: Vec<_> =
        (1..).zip(engine.accelerator_memories()).map(|(m, (_, taken))| (m, taken)).collect();
    for (memory, taken) in promised {
        assert_eq!(bundle.plan.peak(memory, 1), Some(taken), "the promise of memory {memory}");
    }
    Computed { logits, ids: made.unwrap().ids, assigned: engine.assigned() }
}

fn threads(n: usize) -> Options {
    Options { threads: Some(n), ..Options::default() }
}

/// Every policy gives the bits of the CPU, with any number of threads, and obeys its definition.
#[test]
fn every_system_gives_the_same_bits_as_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let source = checkpoint("olmoe");
    let prompt = expected(&source).ids;
    let on_cpu = build(&source, folder.path(), "cpu", "[placement]\nexperts = \"cpu\"\n");
    let want = compute(&on_cpu, threads(2), &prompt);
    for (i, system) in SYSTEMS.iter().enumerate() {
        let key = moec_sim::systems::key(system);
        // Alternately: the rest of the model on the CPU or on the unit.
        let rest = ["", "attention = \"mirror\"\nrest = \"mirror\"\n"][i % 2];
        let more = format!("[placement]\npolicy = \"{key}\"\nexperts = \"mirror:30%\"\n{rest}");
        let bundle = build(&source, folder.path(), &key, &more);
        let [one, two] = [1, 2].map(|n| compute(&bundle, threads(n), &prompt));
        for got in [&one, &two] {
            assert!(got.logits == want.logits && got.ids == want.ids, "{key}");
        }
        assert_eq!(one.assigned, two.assigned, "{key}");
        println!("{key}: {:?}", one.assigned);
    }
}

/// A trained model, whose policies all transfer experts, under both memory budgets.
#[test]
fn disk_and_cache_frames_give_the_same_bits_as_memory() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "[placement]\nexperts = \"cpu\"\n");
    let want = compute(&on_cpu, threads(2), &prompt);
    let more = "[placement]\npolicy = \"moec\"\nexperts = \"mirror:25%\"\n[memory]\nbudget = \"1 GiB\"\nthreads = 2\n";
    let bundle = build(&ferris(), folder.path(), "both", more);
    let paging = bundle.plan.paging.as_ref().unwrap();
    let fixed = paging.resident + paging.process + u64::from(paging.staging) * paging.frame_bytes;
    for frames in [4, 24] {
        let settings = moec_runtime::offload::paging::Paging::from_env().unwrap();
        let budget = Some(fixed + frames * paging.frame_bytes);
        let paging = Some(moec_runtime::offload::paging::Paging { budget, ..settings });
        let got = compute(&bundle, Options { paging, ..threads(2) }, &prompt);
        assert!(got.logits == want.logits && got.ids == want.ids, "{frames} experts in memory");
        println!("{frames}: {:?}", got.assigned);
    }
}

/// Big-little decoding of a trained model gives the CPU's tokens. The first pass names most experts of the
/// second, which are transferred ahead.
#[test]
fn evicted_tokens_name_the_experts_of_the_second_pass() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let decoder = |program: &Program| Decoder::big_little(program, 0.7).unwrap();
    let with = |name, placement| {
        let more = format!("[decode]\nbig_little = true\n[placement]\n{placement}\n");
        compute_by(&build(&ferris(), folder.path(), name, &more), threads(2), &prompt, &decoder)
    };
    let want = with("cpu", "experts = \"cpu\"");
    let got = with("frames", "policy = \"moec\"\nexperts = \"mirror:30%\"");
    assert!(got.logits == want.logits && got.ids == want.ids);
    let counts = got.assigned.and_then(|a| a.frames).unwrap();
    println!("{counts:?}");
    let named = counts.second_pass.named as f64 / counts.second_pass.used as f64;
    assert!(counts.second_pass.used > 100 && named > 0.8, "{counts:?}");
    assert!(counts.ahead > 0 && counts.predicted > counts.ahead / 2, "{counts:?}");
}

/// Words of an argument of a step.
fn words(view: &StepView<'_>, arg: Option<&Arg>) -> Vec<[u8; 4]> {
    let Some(&Arg::Buffer(buffer, skip)) = arg else { panic!("no buffer") };
    let bytes = view.buffer(buffer).unwrap();
    bytes[skip as usize..].as_chunks::<4>().0.to_vec()
}

/// Passes the events of a run to a dispatcher.
fn follow(
    dispatcher: &mut CachedDispatcher,
    plan: &Plan,
    view: &StepView<'_>,
    prompt: bool,
    on_gpu: &mut u64,
) {
    let args = &view.step().args;
    match view.step().code {
        Code::Builtin(Builtin::Dispatch { k, experts, candidates: Some(candidates), .. }) => {
            let mut loads = vec![0; experts as usize];
            for id in words(view, args.first()).iter().take(view.n() * k as usize) {
                loads[i32::from_le_bytes(*id) as usize] += 1;
            }
            let rows = Rows { loads: &loads, prompt, k: k as usize };
            let division = dispatcher.divide(candidates.layer as usize, rows, &|_| true).unwrap();
            *on_gpu += division.units.iter().filter(|unit| **unit == ExpertUnit::Gpu).count() as u64;
        }
        Code::Builtin(Builtin::RequestExperts { strides, .. }) => {
            let experts = plan.experts.layers[0].starts.len();
            let row = |words: &[[u8; 4]]| words.iter().map(|w| f32::from_le_bytes(*w)).collect::<Vec<_>>();
            let scores: Vec<Vec<Vec<f32>>> = args[..args.len() - 1]
                .iter()
                .zip(strides)
                .map(|(arg, stride)| {
                    let words = words(view, Some(arg));
                    (0..view.n()).map(|r| row(&words[r * stride as usize..][..experts])).collect()
                })
                .collect();
            let scores =
                RowScores { rows: view.n(), layers: scores.len(), logits: &|i, row| &scores[i][row] };
            dispatcher.predict(scores, &|_| true).unwrap();
        }
        _ => {}
    }
}

/// A separate dispatcher with a run's routing and scores makes the same decisions.
#[test]
fn simulation_and_run_make_the_same_decisions() {
    let folder = tempfile::tempdir().unwrap();
    for key in ["moec", "hybrimoe", "adapmoe"] {
        let more = format!("[placement]\npolicy = \"{key}\"\nexperts = \"mirror:30%\"\n");
        let bundle = build(&ferris(), folder.path(), key, &more);
        let unit = bundle.unit().unwrap();
        let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
        let mut bring = |_: &_| Some(Executor::Unit(Box::new(Modelled::default())));
        let mut engine = Engine::with_units(
            &program,
            &bundle.folder,
            &mut bring,
            &bundle.files(CheckLevel::Small).unwrap(),
            threads(2),
        )
        .unwrap();
        let placed = &bundle.plan.experts;
        let mut dispatcher = CachedDispatcher::new(
            of_plan::dispatcher_setup(placed, placed.policy.cached().unwrap()).unwrap(),
        )
        .unwrap();
        let row = |pos: usize| Row { slot: 0, pos, id: 3 + pos as u32 * 29 % 400 };
        let (prefill, decode) =
            (engine.entry(EntryKind::Prefill(20)).unwrap(), engine.entry(EntryKind::Decode(1)).unwrap());
        let mut on_gpu = 0;
        let mut run = |engine: &mut Engine<'_>, entry, rows: &[Row], length: usize| {
            let mut observe = |moment: Moment, view: &StepView<'_>| {
                if moment == Moment::After {
                    follow(&mut dispatcher, &bundle.plan, view, length > 0, &mut on_gpu);
                }
                Ok(())
            };
            engine.trace_entry(entry, rows, &[rows.len() - 1], length, &mut observe).unwrap();
        };
        run(&mut engine, prefill, &(0..20).map(row).collect::<Vec<_>>(), 20);
        for pos in 20..60 {
            run(&mut engine, decode, &[row(pos)], 0);
        }
        let did = engine.assigned().unwrap();
        assert_eq!(did.frames, Some(dispatcher.counts()), "{key}");
        assert_eq!(did.experts[0], on_gpu, "{key}");
        assert!(did.experts[0] > 0 && did.experts[1] + did.experts[0] > 500, "{key}: {did:?}");
        assert!(dispatcher.counts().ahead > 0, "{key}: {did:?}");
    }
}

/// Emulated GPU kernels: experts are transferred row by row, and the logits and tokens are the reference's.
#[test]
fn emulated_gpu_matches_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join("targets/cuda/cuda.toml")).unwrap();
    // The CPU is so slow that transferring tiny experts pays.
    let device = folder.path().join("gpu.toml");
    fs::write(&device, text.replace("ms = 0.02,", "ms = 2,").replace("ms = 0.13,", "ms = 40,")).unwrap();
    let source = checkpoint("olmoe");
    let want = expected(&source);
    for (name, more) in [("memory", ""), ("disk", "[memory]\nbudget = \"1 GiB\"\nthreads = 2\n")] {
        let toml = folder.path().join(format!("{name}.toml"));
        let text = format!(
            "[model]\nsource = {source:?}\n[shapes]\nmax_context = 96\nprefill_chunk = 20\n[weights]\nexperts = \"f32\"\nattention = \"f32\"\n\
             embeddings = \"f32\"\nactivations = \"f32\"\n[placement]\npolicy = \"moec\"\nexperts = \"gpu:30%\"\n{more}"
        );
        fs::write(&toml, text).unwrap();
        let out = folder.path().join(name);
        built(&toml, &["--target", device.to_str().unwrap()], &out);
        let run = |more: &[&str]| ok(moec().args(["run", "--emulate"]).arg(&out).args(more));
        let file = folder.path().join("logits.safetensors");
        run(&["logits", "--ids", &list(&want.ids), "--out", file.to_str().unwrap()]);
        assert!(distance(&logits_file(&file).1, &want.logits) <= 2e-3, "{name}");
        let prompt = want.greedy.len() - 24;
        let generated = run(&["generate", "--ids", &list(&want.greedy[..prompt]), "-n", "12", "--json"]);
        let report: Value = serde_json::from_slice(&generated.stdout).unwrap();
        let ids: Vec<u32> = serde_json::from_value(report["ids"].clone()).unwrap();
        assert_eq!(ids, want.greedy[prompt..prompt + 12], "{name}");
        let frames = &report["assigned"]["frames"];
        let brought = ["fetched", "ahead", "kept"].iter().map(|k| frames[k].as_u64().unwrap()).sum::<u64>();
        assert!(brought > 0 && report["assigned"]["experts"]["hot"].as_u64() > Some(0), "{name}: {frames}");
    }
}

/// The budget of GPU memory is respected, and an impossible budget is refused by name.
#[test]
fn gpu_memory_budget_is_respected_or_refused() {
    let folder = tempfile::tempdir().unwrap();
    let source = checkpoint("olmoe");
    let whole = build(&source, folder.path(), "whole", "[placement]\npolicy = \"moec\"\n");
    let frames = |plan: &Plan| plan.experts.policy.cached().unwrap().frames;
    let experts = whole.plan.experts.layers.iter().map(|l| l.starts.len() as u32).sum::<u32>();
    assert_eq!(frames(&whole.plan), experts, "all of them find room");
    let peak = whole.plan.peak(1, 1).unwrap();
    for less in [1, peak / 4] {
        let budget = peak - less;
        let more = format!("[placement]\npolicy = \"moec\"\n[memory]\ndevice_budget = \"{budget} B\"\n");
        let part = build(&source, folder.path(), "part", &more);
        let frames = frames(&part.plan);
        assert!(part.plan.peak(1, 1).unwrap() <= budget && frames < experts, "{frames} frames");
        compute(&part, threads(1), &[1, 2, 3]);
        let decisions = part.decisions().unwrap().decisions;
        let each = decisions
            .iter()
            .find(|d| d.pass == "size_gpu_expert_cache")
            .and_then(|d| d.figure("frame_bytes"))
            .unwrap();
        let each = moec_base::human::bytes(each as u64);
        let explained = ok(moec().arg("explain").arg(&part.folder));
        let stdout = String::from_utf8(explained.stdout).unwrap();
        let figures = format!("experts {experts}, frame {each}, frames {frames}, limit ");
        assert!(stdout.contains("cache frames in `vram`") && stdout.contains(&figures), "{stdout}");
    }
    let refused = |more: &str, target: &str| {
        let toml = folder.path().join("refused.toml");
        fs::write(&toml, format!("[model]\nsource = {source:?}\n{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--target", target, "--quiet", "--no-run", "-o"]);
        fails(build.arg(folder.path().join("b"))).1
    };
    let device = device(folder.path());
    let device = device.to_str().unwrap();
    let assert_contains =
        |text: String, words: &[&str]| assert!(words.iter().all(|w| text.contains(w)), "{text}");
    let policy = "[placement]\npolicy = \"moec\"\n";
    assert_contains(
        refused(policy, "x86-64-v3"),
        &["`policy = \"moec\"`", "has no unit for it", "hint: choose a target"],
    );
    assert_contains(
        refused(policy, root().join("targets/mirror/mirror.toml").to_str().unwrap()),
        &["`mirror`", "has no measured expert costs", "`moec profile-device DIR`"],
    );
    assert_contains(
        refused(&format!("{policy}[memory]\ndevice_budget = \"1 KiB\"\n"), device),
        &["`vram`, which has 1.0 KiB", "raise `device_budget`"],
    );
    assert_contains(
        refused("[memory]\ndevice_budget = \"1 GiB\"\n", "x86-64-v3"),
        &["`device_budget`", "has only the CPU's memory"],
    );
    assert_contains(
        refused("[placement]\npolicy = \"best\"\n", device),
        &["`placement.policy`", "\"hybrimoe\""],
    );
    assert_contains(
        refused(&format!("{policy}experts = \"mirror:1%\"\n"), device),
        &["frames are too few", "hint: set a larger share"],
    );
    assert_contains(refused(policy, "spr-ndp"), &["`policy = \"moec\"` on `spr-ndp`"]);
}
