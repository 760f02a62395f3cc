//! The unit over a library that replaces QNN's: the order of loading, the results, and every failure by its
//! name.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "fake/mod.rs"]
mod fake;

use fake::Fake;
use half::f16;
use moec_ir::plan::{FileRef, GraphDecl, GraphTensor};
use moec_qnn_sys::Installation;
use moec_qnn_unit::Hexagon;
use moec_runtime::CheckLevel;
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::Graphs;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// This machine's C compiler.
const CC: &str = "cc";
/// Rows and channels of the graphs.
const ROWS: u32 = 2;
const WIDTH: u32 = 8;

fn graph(package: &str, function: &str) -> GraphDecl {
    let port = |name: &str| GraphTensor { name: name.into(), shape: [ROWS, WIDTH, 1, 1] };
    GraphDecl {
        package: format!("artifacts/{package}"),
        function: function.into(),
        inputs: vec![port("x")],
        outputs: vec![port("y")],
        stateful: false,
    }
}

/// A context with graphs of these names.
fn context(chip: u32, functions: &[&str]) -> String {
    let graphs: Vec<String> = functions.iter().map(|f| format!("{f} {ROWS} {WIDTH} {WIDTH}\n")).collect();
    format!("moec-fake-context {chip}\n{}end\n", graphs.concat())
}

/// A bundle with contexts.
fn bundle(folder: &Path, contexts: &[(&str, String)]) -> std::path::PathBuf {
    let bundle = folder.join("bundle");
    for (package, text) in contexts {
        let at = bundle.join("artifacts").join(package);
        fs::create_dir_all(&at).unwrap();
        fs::write(at.join("context.bin"), text).unwrap();
    }
    bundle
}

/// The unit with a library in this folder.
fn unit(library: &Fake) -> Hexagon {
    // Files that only write graphs are absent; executing does not need them.
    fs::write(library.folder.join("libQnnIr.so"), "").unwrap();
    Hexagon::with(Installation::at(&library.folder).unwrap())
}

fn run(unit: &Hexagon, graph: usize) -> Result<Vec<f32>> {
    let x: Vec<f16> = (0..ROWS * WIDTH).map(|i| f16::from_f32(i as f32 / 4.0 - 1.5)).collect();
    let mut y = vec![f16::ZERO; x.len()];
    unit.run(graph, 0, &[&x], &mut [&mut y])?;
    Ok(y.iter().map(|y| y.to_f32()).collect())
}

/// Waits until the library got this many calls.
fn calls(library: &Fake, count: usize) -> Vec<String> {
    let (begin, mut all) = (Instant::now(), Vec::new());
    while all.len() < count && begin.elapsed() < Duration::from_mins(1) {
        all.extend(library.calls());
        std::thread::yield_now();
    }
    all
}

#[test]
fn graphs_are_loaded_ahead_in_the_order_of_a_call_and_executed() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let contexts = [("a.qnn", context(57, &["one", "two"])), ("b.qnn", context(57, &["two", "one"]))];
    let bundle = bundle(folder.path(), &contexts);
    let mut unit = unit(&library);
    let graphs = [graph("a.qnn", "one"), graph("a.qnn", "two"), graph("b.qnn", "one"), graph("b.qnn", "two")];
    unit.load(&BundleReader::unchecked(&bundle), &graphs, 1).unwrap();
    // Contexts are described, the chip is chosen, and nothing is loaded.
    assert_eq!(library.calls(), ["device 57"]);
    // A call of one row comes to the graph of that size of each layer.
    unit.prepare(&[0, 2]);
    assert_eq!(calls(&library, 4), ["load one", "retrieve one", "load two", "retrieve one"]);
    // The next batch: the contexts are there.
    unit.prepare(&[1, 3]);
    assert_eq!(calls(&library, 2), ["retrieve two", "retrieve two"]);
    // 65535 less the stored number, of a scale of 1/1024 and the offset -32768: the real one negated, and a
    // step less.
    let y = run(&unit, 3).unwrap();
    let want: Vec<f32> =
        (0..ROWS * WIDTH).map(|i| f16::from_f32(-(i as f32 / 4.0 - 1.5) - 1.0 / 1024.0).to_f32()).collect();
    assert_eq!(y, want);
    assert_eq!(run(&unit, 0).unwrap(), want);
    assert_eq!(library.calls(), ["execute two", "execute one"]);
}

#[test]
fn what_nobody_has_prepared_is_loaded_when_it_is_executed() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let bundle = bundle(folder.path(), &[("a.qnn", context(57, &["one"]))]);
    let mut unit = unit(&library);
    unit.load(&BundleReader::unchecked(&bundle), &[graph("a.qnn", "one")], 1).unwrap();
    for _ in 0..2 {
        run(&unit, 0).unwrap();
    }
    assert_eq!(library.calls(), ["device 57", "load one", "retrieve one", "execute one", "execute one"]);
}

/// A context is described when a bundle is loaded, and loaded when it is executed: both from one file, and
/// checked both times.
#[test]
fn what_is_executed_is_what_was_described() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let bundle = bundle(folder.path(), &[("a.qnn", context(57, &["one"]))]);
    let path = bundle.join("artifacts/a.qnn/context.bin");
    let loaded = |files: &BundleReader| {
        let mut unit = unit(&library);
        unit.load(files, &[graph("a.qnn", "one")], 1).map(|()| unit)
    };
    let opened = loaded(&BundleReader::unchecked(&bundle)).unwrap();
    assert_eq!(library.calls(), ["device 57"]);
    let other = path.with_extension("other");
    fs::write(&other, context(57, &["two"])).unwrap();
    fs::rename(&other, &path).unwrap();
    run(&opened, 0).unwrap();
    assert_eq!(library.calls(), ["load one", "retrieve one", "execute one"]);
    // One that is not as it was built is neither described nor loaded.
    let name = "artifacts/a.qnn/context.bin";
    let bytes = fs::metadata(&path).unwrap().len();
    let listed = [FileRef { path: name.into(), bytes, sha256: [0; 32] }];
    let e = loaded(&BundleReader::of_manifest(&bundle, &listed, CheckLevel::All)).unwrap_err();
    assert!(
        matches!(&e, Error::BadFile { path, what, .. } if path.ends_with(name) && what.contains("changed")),
        "{e}"
    );
    let e = loaded(&BundleReader::of_manifest(&bundle, &[], CheckLevel::All)).unwrap_err();
    assert!(matches!(&e, Error::BadFile { what, .. } if what.contains("added")), "{e}");
    assert_eq!(library.calls(), [""; 0]);
}

/// Reason that a bundle does not load, with the hint.
fn refused(library: &Fake, bundle: &Path, graphs: &[GraphDecl]) -> String {
    let e = unit(library).load(&BundleReader::unchecked(bundle), graphs, 1).unwrap_err();
    format!("{e}; {}", e.hint().unwrap_or_default())
}

#[test]
fn libraries_that_are_others_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path(), &[("a.qnn", context(57, &["one"]))]);
    let cases: [(&str, &[&str], &[&str]); 3] = [
        ("symbol", &["-DNO_SYMBOL"], &["libQnnHtp.so", "it has no `QnnInterface_getProviders`"]),
        ("api", &["-DCORE=3"], &["libQnnHtp.so", "no interface of version 2"]),
        ("build", &["-DBUILD=\"v2.38.0.1\""], &["libQnnHtp.so", "it is of version v2.38.0.1, not 2.51"]),
    ];
    for (name, defines, words) in cases {
        let said =
            refused(&Fake::new(&folder.path().join(name), CC, defines), &bundle, &[graph("a.qnn", "one")]);
        assert!(words.iter().all(|w| said.contains(w)) && said.contains("beside `run`"), "{name}: {said}");
    }
    // Half of the library, none of it, and a file that is not a library.
    let library = Fake::new(&folder.path().join("half"), CC, &[]);
    fs::write(library.folder.join("libQnnSystem.so"), "no library").unwrap();
    let said = refused(&library, &bundle, &[graph("a.qnn", "one")]);
    assert!(said.contains("libQnnSystem.so` cannot be loaded") && said.contains("LD_LIBRARY_PATH"), "{said}");
    if std::env::var_os(moec_qnn_sys::VARIABLE).is_some() {
        return;
    }
    fs::copy(library.folder.join("libQnnHtp.so"), bundle.join("libQnnHtp.so")).unwrap();
    let said = Installation::to_execute(&bundle).unwrap_err().to_string();
    assert!(said.contains("has no `libQnnSystem.so`"), "{said}");
    fs::remove_file(bundle.join("libQnnHtp.so")).unwrap();
    let e =
        Hexagon::default().load(&BundleReader::unchecked(&bundle), &[graph("a.qnn", "one")], 1).unwrap_err();
    let said = format!("{e}; {}", e.hint().unwrap_or_default());
    assert!(matches!(e, Error::Machine { .. }) && said.contains("`qnn`"), "{said}");
    assert!(said.contains("`libQnnHtp.so` cannot be loaded") && said.contains("MOEC_QNN_LIB"), "{said}");
}

/// Name of a fault, a bundle's contexts, and words of the message.
type Refused<'a> = (&'a str, &'a [(&'a str, String)], &'a [&'a str]);

#[test]
fn contexts_that_are_others_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let one = context(57, &["one"]);
    let cases: [Refused<'_>; 6] = [
        (
            "another graph",
            &[("a.qnn", context(57, &["two"]))],
            &["artifacts/a.qnn one", "no graph of that name"],
        ),
        (
            "cut",
            &[("a.qnn", one[..one.len() - 4].to_owned())],
            &["a.qnn/context.bin", "cannot be read", "again"],
        ),
        ("none", &[("c.qnn", one.clone())], &["a.qnn/context.bin"]),
        (
            "another chip",
            &[("a.qnn", one.clone()), ("b.qnn", context(42, &["one"]))],
            &["b.qnn", "number 42"],
        ),
        ("unknown", &[("a.qnn", context(9, &["one"]))], &["a.qnn/context.bin", "chip 9, which is not known"]),
        ("shape", &[("a.qnn", one.replace("2 8 8", "2 8 9"))], &["artifacts/a.qnn one", "`y` is [2, 9]"]),
    ];
    for (name, contexts, words) in cases {
        let bundle = bundle(&folder.path().join(name), contexts);
        let graphs: Vec<_> =
            ["a.qnn", "b.qnn"].iter().take(contexts.len()).map(|p| graph(p, "one")).collect();
        let said = refused(&library, &bundle, &graphs);
        assert!(words.iter().all(|w| said.contains(w)), "{name}: {said}");
    }
    let said = refused(&library, folder.path(), &[graph("../a.qnn", "one")]);
    assert!(said.contains("not a place below `artifacts/`"), "{said}");
}

#[test]
fn what_the_chip_refuses_is_said_when_it_is_executed() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let contexts = [("a.qnn", context(57, &["one", "failing"])), ("b.qnn", context(57, &["unloadable"]))];
    let bundle = bundle(folder.path(), &contexts);
    let mut unit = unit(&library);
    let graphs = [graph("a.qnn", "one"), graph("a.qnn", "failing"), graph("b.qnn", "unloadable")];
    unit.load(&BundleReader::unchecked(&bundle), &graphs, 1).unwrap();
    // To have it ready is a hint: it is never an error.
    unit.prepare(&[2, 1, 0]);
    let said = |graph| run(&unit, graph).unwrap_err().to_string();
    let failing = said(1);
    assert!(failing.starts_with("graph `artifacts/a.qnn failing`"), "{failing}");
    assert!(
        failing.contains("it has failed (code 1100)") && failing.contains("tensor unit 3 has stopped"),
        "{failing}"
    );
    let unloadable = said(2);
    assert!(
        unloadable.contains("b.qnn/context.bin") && unloadable.contains("no room for unloadable"),
        "{unloadable}"
    );
    // The others go on.
    run(&unit, 0).unwrap();
    let wrong = unit.run(0, 0, &[], &mut []).unwrap_err().to_string();
    assert!(wrong.contains("0 inputs"), "{wrong}");
    let (x, mut y) = ([f16::ONE; 3], vec![f16::ZERO; 16]);
    let wrong = unit.run(0, 0, &[&x], &mut [&mut y]).unwrap_err().to_string();
    assert!(wrong.contains("`x` has 16 numbers, not 3"), "{wrong}");
}
