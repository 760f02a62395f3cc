//! Experts and attention on a unit with a memory of its own give what the CPU gives, to the bit, wherever
//! they live.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;
use moec_runtime::CheckLevel;

use moec_bundle::read::Bundle;
use moec_ir::Role;
use moec_ir::plan::{Builtin, Code, Plan, Span, StateBuf};
use moec_mirror::Modelled;
use moec_passes::assign_units::UnitAssignment;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::unit::{ComputeUnit, Launch, PoolThread, StepFault};
use moec_runtime::platform::memory::Addr;
use moec_runtime::{Decoder, Engine, Options, Program, Request, Result, Sampler, Sampling, Want, best_of};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use support::{MIXTURES, built, checkpoint, expected, fails, ferris, moec, ok, root};

/// The device file of the modelled unit.
fn device() -> String {
    root().join("targets/mirror/mirror.toml").display().to_string()
}

/// Observations of the unit.
#[derive(Default)]
struct UnitObservations {
    taken: AtomicU64,
    moved: AtomicU64,
    kernels: AtomicU64,
}

/// The modelled unit, watched.
struct Watched(Modelled, Arc<UnitObservations>);

impl ComputeUnit for Watched {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn executes(&self, builtin: Builtin) -> bool {
        self.0.executes(builtin)
    }

    fn take(&mut self, bytes: u64) -> Result<Option<Addr>> {
        self.1.taken.fetch_add(bytes, Relaxed);
        self.0.take(bytes)
    }

    unsafe fn copy(&self, from: Addr, to: Addr, bytes: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.0.copy(from, to, bytes) };
    }

    unsafe fn submit(&self, launch: &Launch<'_>, thread: PoolThread) {
        if let moec_runtime::bundle::program::Code::Kernel(_) = launch.code {
            self.1.kernels.fetch_add(1, Relaxed);
        }
        // SAFETY: as above.
        unsafe { self.0.submit(launch, thread) };
        self.1.moved.store(self.0.moved(), Relaxed);
    }

    fn wait(&self, fault: &OnceLock<StepFault>) {
        self.0.wait(fault);
    }
}

/// Writes the `model.toml` of a model for the mirror, with what `more` says.
fn toml(source: &Path, folder: &Path, name: &str, more: &str) -> PathBuf {
    let toml = folder.join(format!("{name}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n{more}",
        source.display()
    );
    fs::write(&toml, text).unwrap();
    toml
}

/// Builds a model for the mirror with what `more` says.
fn build(source: &Path, folder: &Path, name: &str, more: &str) -> Bundle {
    let toml = toml(source, folder, name, more);
    built(&toml, &["--target", &device()], &folder.join(name));
    Bundle::open(&folder.join(name)).unwrap()
}

/// Results of a bundle: logits of every token of the prompt, and ids generated after it, one sequence and two
/// together.
#[derive(Debug, PartialEq)]
struct Computed {
    logits: Vec<u32>,
    ids: Vec<u32>,
    both: Vec<Vec<u32>>,
}

/// Runs a bundle; `seen` gets what its unit did.
fn compute(bundle: &Bundle, options: Options, prompt: &[u32], seen: &Arc<UnitObservations>) -> Computed {
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let mut bring = |_: &_| Some(Executor::Unit(Box::new(Watched(Modelled::default(), Arc::clone(seen)))));
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
    engine.prefill(0, 0, prompt, Want::All, &mut keep).unwrap();
    let request = Request { slot: 0, prompt, n: 12, end: &[] };
    let (mut decoder, mut sampler) = (Decoder::full(), Sampler::new(Sampling::default()));
    let made = moec_runtime::generate(&mut engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(()));
    let ids = made.unwrap().ids;
    let how = Sampling { temperature: 0.8, seed: 7, ..Sampling::default() };
    let both = best_of(&mut engine, &request, 2, &mut Decoder::full(), &how).unwrap();
    let both = both.candidates.into_iter().map(|c| c.ids).collect();
    let promised: Vec<_> =
        (1..).zip(engine.accelerator_memories()).map(|(m, (_, taken))| (m, taken)).collect();
    for (memory, taken) in promised {
        assert_eq!(bundle.plan.peak(memory, 1), Some(taken), "the promise of memory {memory}");
        assert_eq!(seen.taken.load(Relaxed), taken);
    }
    Computed { logits, ids, both }
}

/// Steps of the accelerator: kernels, copies of rows, copies of slots.
fn accelerator_steps(plan: &Plan) -> [usize; 3] {
    let steps = plan.entries.iter().flat_map(|e| &e.steps).filter(|s| s.unit == 1);
    steps.fold([0; 3], |mut n, s| {
        let kind = match s.code {
            Code::Kernel(_) => 0,
            Code::Builtin(Builtin::Copy { span: Span::Slots { .. }, .. }) => 2,
            Code::Builtin(_) => 1,
        };
        n[kind] += 1;
        n
    })
}

const PLACES: [(&str, &str); 7] = [
    ("all", "[placement]\nexperts = \"mirror\"\n"),
    ("half", "[placement]\nexperts = \"mirror:50%\"\n"),
    ("attention", "[placement]\nattention = \"mirror\"\n"),
    ("both", "[placement]\nattention = \"gpu\"\nexperts = \"mirror:30%\"\n"),
    ("budget", "[placement]\nexperts = \"mirror:50%\"\n[memory]\nbudget = \"1 GiB\"\nthreads = 2\n"),
    ("rest", "[placement]\nattention = \"mirror\"\nexperts = \"mirror:30%\"\nrest = \"mirror\"\n"),
    ("model", "[placement]\nattention = \"mirror\"\nexperts = \"mirror\"\nrest = \"mirror\"\n"),
];

/// Every family with experts, half of the experts, attention, both, half of the experts beside a memory
/// budget, all but experts, and the whole model: four of these for every family.
#[test]
fn what_lives_elsewhere_computes_the_same_bits() {
    for (i, family) in MIXTURES.into_iter().enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let prompt = expected(&source).ids;
        let on_cpu = build(&source, folder.path(), "cpu", "");
        let none = Arc::new(UnitObservations::default());
        let want = compute(&on_cpu, Options::default(), &prompt, &none);
        assert_eq!((accelerator_steps(&on_cpu.plan), none.taken.load(Relaxed)), ([0; 3], 0));
        // Each has most places, and each place has five families at least.
        for (name, more) in PLACES.into_iter().cycle().skip(4 * i).take(4) {
            let bundle = build(&source, folder.path(), name, more);
            let [kernels, rows, slots] = accelerator_steps(&bundle.plan);
            assert!(kernels > 0 && rows > 0, "{family}, {name}");
            // Nothing of experts comes back where all else is there, too.
            assert_eq!(slots > 0, !["attention", "model"].contains(&name), "{family}, {name}");
            let kernels =
                |step: &&moec_ir::plan::Step| step.unit == 0 && matches!(step.code, Code::Kernel(_));
            let on_cpu = bundle.plan.entries.iter().flat_map(|e| &e.steps).filter(kernels).count();
            // Mixers whose states fold tokens stay with these.
            let whole = name == "model" && !support::FOLDED.contains(&family);
            assert_eq!(on_cpu == 0, whole, "{family}, {name}: {on_cpu} kernels on the CPU");
            // Caches are on the unit that computes attention, states that fold tokens in the CPU's memory.
            let away = |s: &StateBuf| {
                ["attention", "both", "rest", "model"].contains(&name) && !s.kind.needs_snapshots()
            };
            for state in &bundle.plan.states {
                assert_eq!(state.memory, u32::from(away(state)), "{family}, {name}: {}", state.name);
            }
            for threads in [1, 2] {
                let seen = Arc::new(UnitObservations::default());
                let options = Options { threads: Some(threads), ..Options::default() };
                let got = compute(&bundle, options, &prompt, &seen);
                assert!(got == want, "{family} with {name} on the mirror, {threads} threads");
                assert!(seen.kernels.load(Relaxed) > 0 && seen.moved.load(Relaxed) > 0);
            }
        }
    }
}

/// Steps that stay on the CPU of a model some of whose layers have another mixer than attention, and
/// `explain` on them.
#[test]
fn mixers_have_a_unit_apart_from_attention_and_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let source = checkpoint("qwen3_next");
    let bundle = build(&source, folder.path(), "model", PLACES[6].1);
    let module = bundle.graph().unwrap();
    let mut units: BTreeMap<Role, BTreeSet<u32>> = BTreeMap::new();
    for (entry, graph) in bundle.plan.entries.iter().zip(&module.entries) {
        for step in entry.steps.iter().filter(|s| matches!(s.code, Code::Kernel(_))) {
            units.entry(graph.nodes[step.node as usize].scope.role()).or_default().insert(step.unit);
        }
    }
    let on = |unit| BTreeSet::from([unit]);
    let roles = [Role::Attention, Role::Mixer, Role::Network, Role::Head].map(|role| units[&role].clone());
    assert_eq!(roles, [on(1), on(0), on(1), on(1)]);
    // The plan alone distinguishes them, whichever layer is the first.
    let assignment = UnitAssignment::of_plan(&bundle.plan, &module);
    assert_eq!((assignment.attention, assignment.mixer), (1, 0));
    let said = String::from_utf8(ok(moec().arg("explain").arg(&bundle.folder)).stdout).unwrap();
    let row = |op: &str, words: &[&str]| {
        let mut lines = said.lines().filter(|l| l.contains(op));
        assert!(lines.any(|l| words.iter().all(|w| l.contains(w))), "{op} {words:?}: {said}");
    };
    row("layers.*.mixer", &["linear", "cpu", "`mirror` does not run `causal_conv`"]);
    row("layers.*.attn", &["attention", "mirror", "requested by `placement.attention`"]);
    let more = "[placement]\nattention = \"mirror\"\nmixer = \"mirror\"\n";
    let toml = toml(&source, folder.path(), "mixer", more);
    let build = ["--target", &device(), "--no-run", "--quiet"];
    let (code, said) = fails(moec().arg("build").arg(&toml).args(build));
    assert!(code == 1 && said.contains("does not run `causal_conv` of `layers.0.mixer`"), "{said}");
}

/// Half of the experts elsewhere and the rest on disk, with room for few: the trained model gives the same
/// results as with all on the CPU.
#[test]
fn a_budget_over_disk_beside_a_memory_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "");
    let want = compute(&on_cpu, Options::default(), &prompt, &Arc::new(UnitObservations::default()));
    let half = build(&ferris(), folder.path(), "budget", PLACES[4].1);
    let paging = half.plan.paging.as_ref().unwrap();
    let fixed = paging.resident + paging.process + u64::from(paging.staging) * paging.frame_bytes;
    for frames in [2, 9] {
        let how = moec_runtime::offload::paging::Paging::from_env().unwrap();
        let budget = Some(fixed + frames * paging.frame_bytes);
        let paging = Some(moec_runtime::offload::paging::Paging { budget, ..how });
        let options = Options { threads: Some(2), paging, ..Options::default() };
        let got = compute(&half, options, &prompt, &Arc::new(UnitObservations::default()));
        assert!(got == want, "{frames} experts in memory");
    }
}

/// Lookup and head on the unit read one table, which is there once; the CPU reads none of it.
#[test]
fn a_tied_table_is_there_once() {
    let folder = tempfile::tempdir().unwrap();
    let (source, seen) = (checkpoint("smallthinker_4b"), Arc::new(UnitObservations::default()));
    let prompt = expected(&source).ids;
    let on_cpu = build(&source, folder.path(), "cpu", "");
    let model = build(&source, folder.path(), "model", PLACES[6].1);
    let shape = &model.plan.segments[0].shape;
    let table = |plan: &Plan, residents: &BTreeSet<u32>| {
        residents.iter().filter(|&&s| plan.segments[s as usize].shape == *shape).count()
    };
    let there = model.plan.memories[1].residents.iter().map(|r| r.segment).collect();
    assert_eq!((table(&model.plan, &there), table(&model.plan, &model.plan.segments_of(0))), (1, 0));
    assert_eq!(table(&on_cpu.plan, &on_cpu.plan.segments_of(0)), 1);
    let want = compute(&on_cpu, Options::default(), &prompt, &Arc::new(UnitObservations::default()));
    assert!(compute(&model, Options::default(), &prompt, &seen) == want);
    assert!(seen.kernels.load(Relaxed) > 0);
}

/// The unit's memory is a promise: a plan that is larger is refused by name, and so is a unit that the device
/// has not.
#[test]
fn what_does_not_fit_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let device = fs::read_to_string(device()).unwrap();
    let small = folder.path().join("small.toml");
    fs::write(&small, device.replace("value = 8589934592", "value = 65536")).unwrap();
    let toml = folder.path().join("model.toml");
    let source = checkpoint("olmoe");
    let refused = |more: &str, target: &Path| {
        fs::write(&toml, format!("[model]\nsource = {source:?}\n{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).arg("--target").arg(target).args(["--quiet", "--no-run", "-o"]);
        fails(build.arg(folder.path().join("b"))).1
    };
    let said = refused("[placement]\nexperts = \"mirror\"\n", &small);
    assert!(
        said.contains("into `vram`, which has 64.0 KiB") && said.contains("hint: place less there"),
        "{said}"
    );
    let said = refused("[placement]\nexperts = \"tpu\"\n", &small);
    assert!(said.contains("`tpu`") && said.contains("its units are `cpu`, `mirror`"), "{said}");
    fs::write(&small, device.replace("[[link]]\nfrom = \"vram\"", "[[link]]\nfrom = \"ram\"")).unwrap();
    let said = refused("", &small);
    assert!(said.contains("`link`") && said.contains("from `vram` to `ram`"), "{said}");
}

/// The experts that leave the CPU are chosen by layer, and `explain` gives the reason: the requested share.
#[test]
fn explain_says_why_experts_left_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    build(&checkpoint("olmoe"), folder.path(), "half", PLACES[1].1);
    let said = ok(moec().arg("explain").arg(folder.path().join("half"))).stdout;
    let half = String::from_utf8(said).unwrap();
    assert!(
        half.contains("units of experts (assign_units)") && half.contains("4 of 8 on `mirror`"),
        "{half}"
    );
    assert!(half.contains("the share that `placement.experts` requests"), "{half}");
}

/// If some experts of a layer compute nothing, the others are not divided: a setting that requests it
/// is an error, which names the setting to change.
#[test]
fn experts_next_to_some_that_compute_nothing_stay_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    let source = checkpoint("longcat_flash");
    for (target, more, words) in [
        (&*device(), "[placement]\nexperts = \"mirror\"\n", ["compute nothing", "`experts = \"cpu\"`"]),
        ("h100-x86", "[placement]\nexperts = \"gpu\"\n", ["compute nothing", "`experts = \"cpu\"`"]),
        ("native", "[memory]\nbudget = \"1 GiB\"\n", ["compute nothing", "`budget` under `[memory]`"]),
    ] {
        fs::write(&toml, format!("[model]\nsource = {source:?}\n{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--target", target, "--quiet", "--no-run", "-o"]);
        let (_, said) = fails(build.arg(folder.path().join("b")));
        assert!(words.iter().all(|w| said.contains(w)), "{target}: {said}");
        assert!(!folder.path().join("b").exists(), "{target}");
    }
}

/// A bundle for a modelled unit runs if emulation is requested, and otherwise says that it cannot.
#[test]
fn a_modelled_unit_is_emulated_when_requested() {
    let folder = tempfile::tempdir().unwrap();
    build(&checkpoint("mixtral"), folder.path(), "half", PLACES[1].1);
    let run = |more: &[&str]| {
        let mut run = moec();
        run.arg("run").args(more).arg(folder.path().join("half"));
        run.args(["generate", "--ids", "1,2,3", "-n", "4", "--json"]);
        run
    };
    let (_, said) = fails(&mut run(&[]));
    assert!(said.contains("the unit `mirror`") && said.contains("--emulate"), "{said}");
    ok(&mut run(&["--emulate"]));
    let info = |more: &[&str]| {
        let mut run = moec();
        run.arg("run").args(more).arg(folder.path().join("half"));
        let said: Value = serde_json::from_slice(&ok(run.args(["info", "--json"])).stdout).unwrap();
        said["target"].clone()
    };
    let (alone, emulated) = (info(&[]), info(&["--emulate"]));
    assert_eq!((&alone["missing_units"], &alone["runs_here"]), (&json!(["mirror"]), &json!(false)));
    assert_eq!(emulated["missing_units"], json!([]));
}
