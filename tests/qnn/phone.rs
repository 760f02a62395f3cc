//! A phone's `run` in an emulator of its CPU: the CPU's steps give the same results as elsewhere, and graphs
//! run in a fake of QNN's library.

#[path = "../../targets/qnn/unit/tests/fake/mod.rs"]
mod fake;

use super::{Case, PHONE};
use crate::support::{clean, fails, list, logits_file, moec, ok};
use fake::Fake;
use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_bundle::toolchain::{CrossTarget, Toolchain};
use moec_ir::plan::GraphDecl;
use moec_measure::host_build::HostBuild;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::graphs::{Graphs, f16};
use moec_runtime::{Engine, LogitRows, Options};
use moec_testing::AARCH64;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};

/// Debian's folder with the AArch64 system libraries.
const SYSTEM: &str = "/usr/aarch64-linux-gnu";

/// Cross toolchain for phones, with an emulator that executes their programs.
fn cross() -> Option<&'static CrossTarget> {
    AARCH64.ok_or_skip(match Toolchain::find("aarch64-unknown-linux-gnu") {
        Ok(Toolchain { cross: Some(cross), .. }) if cross.emulated() && Path::new(SYSTEM).is_dir() => {
            Ok(cross)
        }
        Ok(Toolchain { cross: Some(cross), .. }) => {
            Err(format!("no `{}`, or no `{SYSTEM}`", cross.emulator[0]))
        }
        Ok(Toolchain { cross: None, .. }) => Err("this is such a machine".to_owned()),
        Err(missing) => Err(missing.to_string()),
    })
}

/// A bundle's `run` in the emulator.
fn run(cross: &CrossTarget, bundle: &Path) -> Command {
    let mut command = clean(Command::new(cross.emulator[0]));
    command.args(&cross.emulator[1..]).args(["-L", SYSTEM]).arg(bundle.join("run"));
    command.env_remove("MOEC_QNN_LIB");
    command
}

/// Every graph is retrieved from its context and executed, in the order of the steps. A bundle without the
/// library or without a context reports that.
#[test]
fn run_executes_contexts_in_its_own_process() {
    let Some(cross) = cross() else { return };
    let case = Case::of("ferris", 16, "[experts]\ngroup = 24\n");
    let bundle = case.path("a.moec");
    // The shared cache, in which the runtime is compiled only once.
    let mut build = moec();
    ok(build.args(["build", "--quiet"]).arg(&case.toml).args(["--target", PHONE, "-o"]).arg(&bundle));
    let plan = Bundle::open(&bundle).unwrap().plan;
    let mut packages: BTreeMap<&str, String> = BTreeMap::new();
    for graph in &plan.graphs {
        let ([x], [y]) = (&*graph.inputs, &*graph.outputs) else { panic!("{graph:?}") };
        let text = packages.entry(&graph.package).or_insert_with(|| "moec-fake-context 57\n".to_owned());
        writeln!(text, "{} {} {} {}", graph.function, x.shape[0], x.shape[1], y.shape[1]).unwrap();
    }
    for (package, text) in &packages {
        fs::write(bundle.join(package).join("context.bin"), format!("{text}end\n")).unwrap();
    }
    let library = Fake::new(&case.path("lib"), cross.linker, &[]);
    let ids: Vec<u32> = (1..=16).collect();
    let out = case.path("logits.safetensors");
    let logits = || {
        let mut command = run(cross, &bundle);
        command.env("MOEC_QNN_LIB", &library.folder);
        ok(command.args(["logits", "--threads", "1", "--ids", &list(&ids), "--out"]).arg(&out));
        logits_file(&out).1
    };
    let first = logits();
    assert!(first.iter().all(|x| x.is_finite()) && first.len() >= 16 * 1000, "{} logits", first.len());
    let calls = library.calls();
    assert_eq!(calls[0], "device 57");
    let of = |what: &str| calls.iter().filter(|call| call.starts_with(what)).count();
    assert!(of("load") == packages.len() && of("execute") >= packages.len(), "{calls:?}");
    assert!(of("retrieve") >= packages.len(), "{calls:?}");
    assert_eq!(logits(), first, "the same library gives the same numbers");

    // The library is also found beside `run`, but nowhere else.
    let refused = |words: &[&str]| {
        let mut command = run(cross, &bundle);
        let (code, stderr) = fails(command.args(["logits", "--ids", "1", "--out"]).arg(&out));
        assert!(code == 1 && words.iter().all(|word| stderr.contains(word)), "{stderr}");
    };
    refused(&["`libQnnHtp.so` cannot be loaded", "hint:", "MOEC_QNN_LIB"]);
    for name in ["libQnnHtp.so", "libQnnSystem.so"] {
        fs::copy(library.folder.join(name), bundle.join(name)).unwrap();
    }
    ok(run(cross, &bundle).args(["logits", "--ids", "1", "--out"]).arg(&out));
    let (package, text) = packages.last_key_value().unwrap();
    let context = bundle.join(package).join("context.bin");
    fs::write(&context, text).unwrap();
    refused(&[package, "context.bin", "cannot be read"]);
    fs::write(&context, format!("{text}end\n").replace(" 57\n", " 42\n")).unwrap();
    refused(&[package, "for the chip of number 42"]);
    fs::remove_file(&context).unwrap();
    refused(&[package, "context.bin"]);
    // `info` finds all required units.
    let info = ok(run(cross, &bundle).args(["info", "--json"]));
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["target"]["missing_units"], serde_json::json!([]), "{info}");
}

/// Calls to a unit.
#[derive(Clone, Debug, PartialEq)]
enum Event {
    Prepare(Vec<usize>),
    Run(usize),
}

/// A unit that records its calls and computes nothing.
struct Recorder(Arc<Mutex<Vec<Event>>>);

impl Graphs for Recorder {
    fn name(&self) -> &'static str {
        "recorder"
    }

    fn load(&mut self, _: &BundleReader, _: &[GraphDecl], _: usize) -> moec_runtime::Result<()> {
        Ok(())
    }

    fn prepare(&self, graphs: &[usize], _: Option<u64>) {
        self.0.lock().unwrap().push(Event::Prepare(graphs.to_vec()));
    }

    fn run(&self, graph: usize, _: usize, _: &[&[f16]], _: &mut [&mut [f16]]) -> moec_runtime::Result<()> {
        self.0.lock().unwrap().push(Event::Run(graph));
        Ok(())
    }
}

/// Before the first step of another entry point, its graphs are announced, in the order of its steps.
#[test]
fn graphs_of_a_new_entry_point_are_announced_first() {
    let case = Case::of("ferris", 16, "[experts]\ngroup = 24\n");
    case.build(PHONE, "a.moec");
    let bundle = Bundle::open(&case.path("a.moec")).unwrap();
    let host_build = HostBuild::of(&bundle, &Progress::silent()).unwrap();
    let events = Arc::<Mutex<Vec<Event>>>::default();
    let unit = Box::new(Recorder(Arc::clone(&events)));
    let options = Options { threads: Some(1), ..Options::default() };
    let (program, weights) = (host_build.program(), host_build.folder());
    let mut engine =
        Engine::with_graphs(program, weights, unit, &bundle.files(CheckLevel::Small).unwrap(), options)
            .unwrap();
    let mut events = |start: usize, ids: &[u32]| {
        match ids {
            [id] => engine.decode(&[(0, start, *id)], &mut |_, _| Ok(())).unwrap(),
            _ => engine.prefill(0, start, ids, LogitRows::Last, &mut |_, _| Ok(())).unwrap(),
        }
        std::mem::take(&mut *events.lock().unwrap())
    };
    let chunk: Vec<u32> = (1..=16).collect();
    let first = events(0, &chunk);
    let [Event::Prepare(named), runs @ ..] = &*first else { panic!("{first:?}") };
    let places: Vec<Option<usize>> = runs
        .iter()
        .map(|event| match event {
            Event::Run(graph) => named.iter().position(|named| named == graph),
            Event::Prepare(_) => None,
        })
        .collect();
    assert!(places.len() > 1 && places.is_sorted() && places.iter().all(Option::is_some), "{first:?}");
    // A repeated size is not announced; another size is, and so is the change back.
    let runs = |events: Vec<Event>| events.iter().all(|event| matches!(event, Event::Run(_)));
    assert!(runs(events(16, &chunk)));
    assert!(matches!(&*events(32, &[7]), [Event::Prepare(_), ..]));
    assert!(runs(events(33, &[7])));
    assert_eq!(events(34, &chunk).first(), first.first());
}
