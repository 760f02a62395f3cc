//! Experts and attention on a unit with its own memory give bit-identical results to the CPU, in every
//! placement.
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
use moec_runtime::{
    Decoder, Engine, LogitRows, Options, Program, Request, Result, Sampler, Sampling, best_of,
};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use support::{IN_RAM, MIXTURES, built, checkpoint, expected, fails, ferris, mixtures, moec, ok, root};

/// The device file of the modelled unit.
fn device() -> String {
    root().join("targets/mirror/mirror.toml").display().to_string()
}

/// Counts of the unit's work.
#[derive(Default)]
struct UnitObservations {
    taken: AtomicU64,
    moved: AtomicU64,
    kernels: AtomicU64,
}

/// The modelled unit, with counts of its work.
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

/// Writes the `model.toml` of a model for the modelled unit, with these additions.
fn toml(source: &Path, folder: &Path, name: &str, more: &str) -> PathBuf {
    let toml = folder.join(format!("{name}.toml"));
    let text = format!(
        "[model]\nsource = \"{}\"\n[shapes]\nmax_context = 96\nprefill_chunk = 20\ndecode_batch = [1, 2]\n{more}",
        source.display()
    );
    fs::write(&toml, text).unwrap();
    toml
}

/// Builds a model for the modelled unit, with these additions.
fn build(source: &Path, folder: &Path, name: &str, more: &str) -> Bundle {
    let toml = toml(source, folder, name, more);
    built(&toml, &["--target", &device()], &folder.join(name));
    Bundle::open(&folder.join(name)).unwrap()
}

/// Results of a bundle: logits of every token of the prompt, and tokens generated after it, by one sequence
/// and by two together.
#[derive(Debug, PartialEq)]
struct Computed {
    logits: Vec<u32>,
    ids: Vec<u32>,
    both: Vec<Vec<u32>>,
}

/// Runs a bundle; `seen` counts the work of its unit.
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
    engine.prefill(0, 0, prompt, LogitRows::All, &mut keep).unwrap();
    let request = Request { slot: 0, prompt, n: 12, end: &[] };
    let (mut decoder, mut sampler) = (Decoder::full(), Sampler::new(Sampling::default()));
    let made = moec_runtime::generate(&mut engine, &request, &mut decoder, &mut sampler, &mut |_| Ok(()));
    let ids = made.unwrap().ids;
    let sampling = Sampling { temperature: 0.8, seed: 7, ..Sampling::default() };
    let both = best_of(&mut engine, &request, 2, &mut Decoder::full(), &sampling).unwrap();
    let both = both.candidates.into_iter().map(|c| c.ids).collect();
    let promised: Vec<_> =
        (1..).zip(engine.accelerator_memories()).map(|(m, (_, taken))| (m, taken)).collect();
    for (memory, taken) in promised {
        assert_eq!(bundle.plan.peak(memory, 1), Some(taken), "the promise of memory {memory}");
        assert_eq!(seen.taken.load(Relaxed), taken);
    }
    Computed { logits, ids, both }
}

/// Numbers of the accelerator's steps: kernels, copies of rows, copies of slots.
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

/// Seven placements: all experts, half of them, attention, both, half of the experts with a memory budget,
/// everything but experts, the whole model. Every family is tested with four of them; in a run of every
/// combination, the late ones with half of the experts.
#[test]
fn parts_on_an_accelerator_give_the_same_bits() {
    for (i, family) in mixtures().filter(|family| !IN_RAM.contains(family)).enumerate() {
        let folder = tempfile::tempdir().unwrap();
        let source = checkpoint(family);
        let prompt = expected(&source).ids;
        let on_cpu = build(&source, folder.path(), "cpu", "");
        let none = Arc::new(UnitObservations::default());
        let want = compute(&on_cpu, Options::default(), &prompt, &none);
        assert_eq!((accelerator_steps(&on_cpu.plan), none.taken.load(Relaxed)), ([0; 3], 0));
        // The placements rotate over the families, so each is tested with at least five families.
        let places = if MIXTURES.contains(&family) { (4 * i, 4) } else { (1, 1) };
        for (name, more) in PLACES.into_iter().cycle().skip(places.0).take(places.1) {
            let bundle = build(&source, folder.path(), name, more);
            let [kernels, rows, slots] = accelerator_steps(&bundle.plan);
            assert!(kernels > 0 && rows > 0, "{family}, {name}");
            // If attention is on the unit, too, no rows of slots are copied.
            assert_eq!(slots > 0, !["attention", "model"].contains(&name), "{family}, {name}");
            let kernels =
                |step: &&moec_ir::plan::Step| step.unit == 0 && matches!(step.code, Code::Kernel(_));
            let on_cpu = bundle.plan.entries.iter().flat_map(|e| &e.steps).filter(kernels).count();
            // Mixers with recurrent states stay on the CPU.
            let whole = name == "model" && !support::FOLDED.contains(&family);
            assert_eq!(on_cpu == 0, whole, "{family}, {name}: {on_cpu} kernels on the CPU");
            // Caches are in the memory of attention's unit, recurrent states in the CPU's memory.
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

/// In a model with another mixer than attention in some layers, that mixer's steps stay on the CPU, which
/// `explain` reports.
#[test]
fn mixers_are_assigned_separately_from_attention() {
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
    // The plan alone distinguishes the two, whatever the mixer of the first layer is.
    let assignment = UnitAssignment::of_plan(&bundle.plan, &module);
    assert_eq!((assignment.attention, assignment.mixer), (1, 0));
    let stdout = String::from_utf8(ok(moec().arg("explain").arg(&bundle.folder)).stdout).unwrap();
    let row = |op: &str, words: &[&str]| {
        let mut lines = stdout.lines().filter(|l| l.contains(op));
        assert!(lines.any(|l| words.iter().all(|w| l.contains(w))), "{op} {words:?}: {stdout}");
    };
    row("layers.*.mixer", &["linear", "cpu", "`mirror` does not run `causal_conv`"]);
    row("layers.*.attn", &["attention", "mirror", "requested by `placement.attention`"]);
    let more = "[placement]\nattention = \"mirror\"\nmixer = \"mirror\"\n";
    let toml = toml(&source, folder.path(), "mixer", more);
    let build = ["--target", &device(), "--no-run", "--quiet"];
    let (code, stderr) = fails(moec().arg("build").arg(&toml).args(build));
    assert!(code == 1 && stderr.contains("does not run `causal_conv` of `layers.0.mixer`"), "{stderr}");
}

/// Half of the experts on another unit and the rest on disk, with few in memory: the trained model gives the
/// same results as with all on the CPU.
#[test]
fn disk_budget_and_accelerator_memory_work_together() {
    let folder = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..40).map(|i| 3 + i * 29 % 400).collect();
    let on_cpu = build(&ferris(), folder.path(), "cpu", "");
    let want = compute(&on_cpu, Options::default(), &prompt, &Arc::new(UnitObservations::default()));
    let half = build(&ferris(), folder.path(), "budget", PLACES[4].1);
    let paging = half.plan.paging.as_ref().unwrap();
    let fixed = paging.resident + paging.process + u64::from(paging.staging) * paging.frame_bytes;
    for frames in [2, 9] {
        let settings = moec_runtime::offload::paging::Paging::from_env().unwrap();
        let budget = Some(fixed + frames * paging.frame_bytes);
        let paging = Some(moec_runtime::offload::paging::Paging { budget, ..settings });
        let options = Options { threads: Some(2), paging, ..Options::default() };
        let got = compute(&half, options, &prompt, &Arc::new(UnitObservations::default()));
        assert!(got == want, "{frames} experts in memory");
    }
}

/// Lookup and head on the unit share one table, which is stored once; the CPU reads none of it.
#[test]
fn accelerator_stores_a_tied_table_once() {
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

/// A plan that exceeds the unit's memory is refused by name, and so is a unit that the device lacks.
#[test]
fn units_that_are_too_small_or_missing_are_refused_by_name() {
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
    let error = refused("[placement]\nexperts = \"mirror\"\n", &small);
    assert!(
        error.contains("in `vram`, which has 64.0 KiB") && error.contains("hint: place fewer experts there"),
        "{error}"
    );
    let error = refused("[placement]\nexperts = \"tpu\"\n", &small);
    assert!(error.contains("`tpu`") && error.contains("its units are `cpu`, `mirror`"), "{error}");
    fs::write(&small, device.replace("[[link]]\nfrom = \"vram\"", "[[link]]\nfrom = \"ram\"")).unwrap();
    let error = refused("", &small);
    assert!(error.contains("`link`") && error.contains("from `vram` to `ram`"), "{error}");
}

/// `explain` gives the reason for the experts that leave the CPU in each layer: the requested share.
#[test]
fn explain_gives_the_reason_for_experts_off_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    build(&checkpoint("olmoe"), folder.path(), "half", PLACES[1].1);
    let stdout = ok(moec().arg("explain").arg(folder.path().join("half"))).stdout;
    let half = String::from_utf8(stdout).unwrap();
    assert!(
        half.contains("units of experts (assign_units)") && half.contains("4 of 8 on `mirror`"),
        "{half}"
    );
    assert!(half.contains("the share that `placement.experts` requests"), "{half}");
}

/// Layers with zero-computation experts do not divide the other experts. Requesting it is an error that names
/// the setting to change.
#[test]
fn layers_with_zero_experts_stay_on_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let toml = folder.path().join("model.toml");
    let source = checkpoint("longcat_flash");
    for (target, more, words) in [
        (
            &*device(),
            "[placement]\nexperts = \"mirror\"\n",
            ["zero-computation experts", "`experts = \"cpu\"`"],
        ),
        ("h100-x86", "[placement]\nexperts = \"gpu\"\n", ["zero-computation experts", "`experts = \"cpu\"`"]),
        (
            "native",
            "[memory]\nbudget = \"1 GiB\"\n",
            ["zero-computation experts", "`budget` under `[memory]`"],
        ),
    ] {
        fs::write(&toml, format!("[model]\nsource = {source:?}\n{more}")).unwrap();
        let mut build = moec();
        build.arg("build").arg(&toml).args(["--target", target, "--quiet", "--no-run", "-o"]);
        let (_, stderr) = fails(build.arg(folder.path().join("b")));
        assert!(words.iter().all(|w| stderr.contains(w)), "{target}: {stderr}");
        assert!(!folder.path().join("b").exists(), "{target}");
    }
}

/// A bundle for a modelled unit runs with emulation, and otherwise reports that it cannot run.
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
    let (_, stderr) = fails(&mut run(&[]));
    assert!(stderr.contains("the unit `mirror`") && stderr.contains("--emulate"), "{stderr}");
    ok(&mut run(&["--emulate"]));
    let info = |more: &[&str]| {
        let mut run = moec();
        run.arg("run").args(more).arg(folder.path().join("half"));
        let report: Value = serde_json::from_slice(&ok(run.args(["info", "--json"])).stdout).unwrap();
        report["target"].clone()
    };
    let (alone, emulated) = (info(&[]), info(&["--emulate"]));
    assert_eq!((&alone["missing_units"], &alone["runs_here"]), (&json!(["mirror"]), &json!(false)));
    assert_eq!(emulated["missing_units"], json!([]));
}
