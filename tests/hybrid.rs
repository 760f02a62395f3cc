//! The CPU and a unit with cache frames divide the experts at run time. Whichever unit computes an expert,
//! and wherever it was read from, the bits are those of the CPU.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
use moec_runtime::CheckLevel;

use moec_bundle::read::Bundle;
use moec_ir::EntryKind;
use moec_ir::plan::{Arg, Builtin, Code, Grid, Plan, Span};
use moec_mirror::Modelled;
use moec_runtime::bundle::program;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::{ComputeUnit, Launch, PoolThread};
use moec_runtime::platform::memory::Addr;
use moec_runtime::schedule::ExpertUnit;
use moec_runtime::schedule::cached::dispatcher::{CachedDispatcher, RowScores, Rows};
use moec_runtime::schedule::dispatch::{Assigned, plan as of_plan};
use moec_runtime::schedule::warm_up::{CostCheck, MeasuredUnit};
use moec_runtime::{
    Decoder, Engine, LogitRows, Moment, Options, Program, Request, Row, Sampler, Sampling, StepView,
};
use moec_sim::systems::CACHED as SYSTEMS;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
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
    compute_on(bundle, options, prompt, decoder, Box::new(Modelled::default()))
}

/// Like [`compute_by`], on another unit than the modelled one.
fn compute_on(
    bundle: &Bundle,
    options: Options,
    prompt: &[u32],
    decoder: &dyn Fn(&Program) -> Decoder,
    unit_of_experts: Box<dyn ComputeUnit>,
) -> Computed {
    let mut unit_of_experts = Some(unit_of_experts);
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let mut bring = |_: &_| unit_of_experts.take().map(Executor::Unit);
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
            // The table of the CPU, unit 0 of the layer, has the order of the decision.
            let table: Vec<i32> = words(view, args.get(2)).into_iter().map(i32::from_le_bytes).collect();
            let ordered: Vec<u16> = table[4..][..table[0] as usize].iter().map(|&e| e as u16).collect();
            assert_eq!(ordered, division.cpu_order);
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

/// An event of the unit in [`experts_are_computed_as_they_arrive`].
#[derive(Clone, Debug)]
enum Event {
    /// The rows of a layer were copied to the unit.
    Layer,
    /// An expert's entry in a table of addresses was set, which ends its transfer.
    Arrived(usize),
    /// A launch on experts, each with its tokens, by a table of addresses.
    Launched { addresses: usize, experts: Vec<(usize, i32)> },
}

/// Events in their order.
#[derive(Default)]
struct Log {
    events: Mutex<Vec<Event>>,
    changed: Condvar,
}

impl Log {
    fn add(&self, event: Event) {
        self.events.lock().unwrap().push(event);
        self.changed.notify_all();
    }

    /// Waits until a launch is the last event. It gives up after a while: the unit may have nothing to launch
    /// before this transfer.
    fn wait_for_launch(&self) {
        let others = |events: &mut Vec<Event>| !matches!(events.last(), Some(Event::Launched { .. }));
        let events = self.events.lock().unwrap();
        drop(self.changed.wait_timeout_while(events, Duration::from_millis(5), others).unwrap());
    }
}

/// A modelled unit that records events, and whose transfers wait for launches.
struct Recorded {
    unit: Modelled,
    log: Arc<Log>,
    /// Bytes of the matrix of an expert that is transferred first.
    matrix: usize,
    /// Experts of a layer.
    experts: usize,
}

impl ComputeUnit for Recorded {
    fn name(&self) -> &'static str {
        self.unit.name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        self.unit.executes(builtin)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>, moec_runtime::Error> {
        self.unit.take(bytes)
    }

    fn is_mapped(&self) -> bool {
        self.unit.is_mapped()
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        if bytes == self.matrix {
            self.log.wait_for_launch();
        }
        // SAFETY: the caller's promise.
        unsafe { self.unit.copy(from, to, bytes) };
        if bytes == size_of::<Addr>() {
            self.log.add(Event::Arrived(to.ptr().addr()));
        }
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        // SAFETY: the caller's promise.
        unsafe { self.unit.submit(launch, thread) };
        match (launch.code, launch.grid) {
            (program::Code::Builtin(Builtin::Copy { span: Span::Rows, .. }), _) => self.log.add(Event::Layer),
            (_, Grid::Experts { table, .. }) => {
                let table = launch.args[table as usize].of::<i32>();
                // SAFETY: the table is in the modelled memory, which the test can read.
                let word = |i: usize| unsafe { table.add(i).read() };
                let (first, start) = (4, 4 + self.experts);
                let expert = |i| (word(first + i) as usize, word(start + i + 1) - word(start + i));
                let experts = (0..word(0) as usize).map(expert).collect();
                self.log.add(Event::Launched { addresses: launch.args[2].ptr().addr(), experts });
            }
            _ => {}
        }
    }
}

/// The unit launches the experts that it holds before the transfers of the others end, the largest load
/// first. Then it launches each of the others after its own transfer, in the order of the transfers. The bits
/// are the CPU's.
#[test]
fn experts_are_computed_as_they_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "[placement]\nexperts = \"cpu\"\n");
    let want = compute(&on_cpu, threads(2), &prompt);
    let more = "[placement]\npolicy = \"moec\"\nexperts = \"mirror:30%\"\n";
    let bundle = build(&ferris(), folder.path(), "waves", more);
    let layer = &bundle.plan.experts.layers[0];
    let matrix = bundle.plan.segments[layer.to_bring()[0] as usize].matrix_bytes().unwrap() as usize;
    let (log, experts) = (Arc::new(Log::default()), layer.starts.len());
    let recorded = Recorded { unit: Modelled::default(), log: Arc::clone(&log), matrix, experts };
    let got = compute_on(&bundle, threads(2), &prompt, &|_| Decoder::full(), Box::new(recorded));
    assert!(got.logits == want.logits && got.ids == want.ids);
    let events = std::mem::take(&mut *log.events.lock().unwrap());
    // A transfer may end before the rows of its layer are copied: a step begins after the last launch before it.
    let launched = |i: &usize| matches!(events[*i], Event::Launched { .. });
    let layers = (0..events.len()).filter(|&i| matches!(events[i], Event::Layer));
    let begins: Vec<usize> =
        layers.map(|at| (0..at).rfind(launched).map_or(0, |i| i + 1)).chain([events.len()]).collect();
    let (mut early, mut waves) = (0, 0);
    for step in begins.windows(2) {
        let launches = (step[0]..step[1]).filter_map(|at| match &events[at] {
            Event::Launched { addresses, experts } => Some((at, *addresses, experts)),
            _ => None,
        });
        let launches: Vec<_> = launches.collect();
        // Gate and up, then down: each pair is a wave. A transfer ends with the address of down.
        let (mut arrivals, mut held) = (Vec::new(), Vec::new());
        for (wave, pair) in launches.chunks(2).enumerate() {
            let [(at, _, experts), (_, addresses, again)] = pair else { panic!("{pair:?}") };
            assert_eq!(experts, again);
            waves += 1;
            for &(expert, tokens) in *experts {
                let entry = addresses + expert * size_of::<Addr>();
                let arrived = |i: &usize| matches!(events[*i], Event::Arrived(of) if of == entry);
                match (step[0]..step[1]).find(arrived) {
                    Some(there) => {
                        assert!(there < *at, "expert {expert} is computed before its transfer has ended");
                        early += usize::from(wave > 0 && launches[0].0 < there);
                        arrivals.extend((wave > 0).then_some(there));
                    }
                    None => held.push((wave, tokens)),
                }
            }
        }
        assert!(held.iter().all(|&(wave, _)| wave == 0), "{held:?}");
        assert!(held.is_sorted_by_key(|&(_, tokens)| std::cmp::Reverse(tokens)), "{held:?}");
        assert!(arrivals.is_sorted(), "{arrivals:?}");
    }
    println!("{} steps, {waves} waves, {early} experts arrived after the first", begins.len() - 1);
    assert!(early > 20, "{early} of {waves}");
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

/// The verifier refuses a plan whose down product overwrites the rows that gate and up of the next wave read.
#[test]
fn rows_of_experts_stay_until_the_last_wave() {
    let folder = tempfile::tempdir().unwrap();
    let more = "[placement]\npolicy = \"moec\"\nexperts = \"mirror:30%\"\n";
    let mut plan = build(&checkpoint("olmoe"), folder.path(), "waves", more).plan;
    moec_ir::verify::plan(&plan).unwrap();
    let steps = plan.entries[0].steps.iter().filter(|step| plan.transferred_layer(step) == Some(0));
    let ends = steps.map(|step| [step.args.first(), step.args.last()]).collect::<Vec<_>>();
    let &[[Some(&Arg::Buffer(rows, _)), _], [_, Some(&Arg::Buffer(results, _))]] = ends.as_slice() else {
        panic!("{ends:?}")
    };
    // Both at the end of the arena, where nothing else is.
    let (buffers, arena) = (&mut plan.entries[0].buffers, &mut plan.memories[1].arena_bytes);
    for b in [rows, results] {
        buffers[b as usize].offset = *arena;
    }
    *arena += buffers[results as usize].bytes;
    let error = moec_ir::verify::plan(&plan).unwrap_err();
    assert!(error.message.contains("next wave"), "{error}");
}

/// Attention and dense layers are on the GPU by default where a token costs less there, and where half of
/// its memory holds them. Emulated, the logits are the reference's.
#[test]
fn dense_layers_are_on_the_gpu_where_that_costs_less() {
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(root().join("targets/cuda/cuda.toml")).unwrap();
    let slow = text.replace("ms = 0.02,", "ms = 20,").replace("ms = 0.13,", "ms = 400,");
    let source = checkpoint("olmoe");
    let want = expected(&source);
    let budget = "[memory]\ndevice_budget = \"600 KiB\"\n";
    for (name, device, more, there, why) in [
        ("slow", &slow, "", true, "costs less there than on the CPU"),
        ("fast", &text, "", false, "they cost less on the CPU"),
        ("small", &slow, budget, false, "do not fit in the unit's memory"),
    ] {
        let [target, toml] = ["gpu", "model"].map(|of| folder.path().join(format!("{name}-{of}.toml")));
        fs::write(&target, device).unwrap();
        let config = format!(
            "[model]\nsource = {source:?}\n[shapes]\nmax_context = 96\nprefill_chunk = 20\n[weights]\nexperts = \"f32\"\n\
             attention = \"f32\"\nembeddings = \"f32\"\nactivations = \"f32\"\n[placement]\npolicy = \"moec\"\n\
             experts = \"gpu:30%\"\n{more}"
        );
        fs::write(&toml, config).unwrap();
        let out = folder.path().join(name);
        built(&toml, &["--target", target.to_str().unwrap()], &out);
        let bundle = Bundle::open(&out).unwrap();
        let steps = || bundle.plan.entries.iter().flat_map(|e| &e.steps);
        let attends = |args: &[Arg]| args.iter().any(|arg| matches!(arg, Arg::State(_)));
        assert!(steps().filter(|s| attends(&s.args)).all(|s| (s.unit == 1) == there), "{name}");
        let decisions = bundle.decisions().unwrap().decisions;
        let of = decisions.iter().find(|d| d.subject == "attention and dense layers").unwrap();
        assert!(of.reason.contains(why), "{name}: {of:?}");
        let file = folder.path().join("logits.safetensors");
        let ids = list(&want.ids);
        ok(moec().args(["run", "--emulate"]).arg(&out).args(["logits", "--ids", &ids, "--out"]).arg(&file));
        assert!(distance(&logits_file(&file).1, &want.logits) <= 2e-3, "{name}");
    }
}

/// A unit whose time counts as that of the plan's device.
struct Timed(Modelled);

impl ComputeUnit for Timed {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        self.0.executes(builtin)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>, moec_runtime::Error> {
        self.0.take(bytes)
    }

    fn is_mapped(&self) -> bool {
        self.0.is_mapped()
    }

    fn is_timed(&self) -> bool {
        true
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.copy(from, to, bytes) };
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        // SAFETY: the caller's promise.
        unsafe { self.0.submit(launch, thread) };
    }
}

/// The first calls measure transfers, and experts on both units. The bits stay those of the CPU. Fixed costs
/// are not measured, and no cost of a modelled unit is.
#[test]
fn first_calls_measure_costs() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "[placement]\nexperts = \"cpu\"\n");
    let want = compute(&on_cpu, threads(2), &prompt);
    let more = "[placement]\npolicy = \"moec\"\nexperts = \"mirror:30%\"\n";
    let bundle = build(&ferris(), folder.path(), "timed", more);
    let timed = |fixed_costs| {
        let options = Options { fixed_costs, ..threads(2) };
        let unit = Box::new(Timed(Modelled::default()));
        compute_on(&bundle, options, &prompt, &|_| Decoder::full(), unit)
    };
    let (measured, fixed, modelled) = (timed(false), timed(true), compute(&bundle, threads(2), &prompt));
    for got in [&measured, &fixed, &modelled] {
        assert!(got.logits == want.logits && got.ids == want.ids);
    }
    assert_eq!(fixed.assigned, modelled.assigned);
    assert!(fixed.assigned.unwrap().costs.iter().all(Option::is_none));
    let checks: Vec<CostCheck> = measured.assigned.unwrap().costs.into_iter().flatten().collect();
    println!("{checks:?}");
    for unit in [MeasuredUnit::Link, MeasuredUnit::Gpu, MeasuredUnit::Cpu] {
        assert!(checks.iter().any(|c| c.unit == unit && c.measured_us > 0.0), "{unit:?}: {checks:?}");
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
