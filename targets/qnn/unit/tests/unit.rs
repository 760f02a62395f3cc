//! The unit with a fake of QNN's library: the order of loading, the results, and the errors.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

#[path = "fake/mod.rs"]
mod fake;

use fake::Fake;
use half::f16;
use moec_ir::plan::{ArtifactBytes, FileRef, GraphDecl, GraphTensor};
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

/// Text of a context with these graphs.
fn context(chip: u32, functions: &[&str]) -> String {
    let graphs: Vec<String> = functions.iter().map(|f| format!("{f} {ROWS} {WIDTH} {WIDTH}\n")).collect();
    format!("moec-fake-context {chip}\n{}end\n", graphs.concat())
}

/// Creates a bundle with these contexts.
fn bundle(folder: &Path, contexts: &[(&str, String)]) -> std::path::PathBuf {
    let bundle = folder.join("bundle");
    for (package, text) in contexts {
        let at = bundle.join("artifacts").join(package);
        fs::create_dir_all(&at).unwrap();
        fs::write(at.join("context.bin"), text).unwrap();
    }
    bundle
}

/// The unit with the fake library.
fn unit(library: &Fake) -> Hexagon {
    // Libraries that only write graphs are replaced by empty files, since execution does not need them.
    fs::write(library.folder.join("libQnnIr.so"), "").unwrap();
    Hexagon::with(Installation::at(&library.folder).unwrap())
}

fn run(unit: &Hexagon, graph: usize) -> Result<Vec<f32>> {
    let x: Vec<f16> = (0..ROWS * WIDTH).map(|i| f16::from_f32(i as f32 / 4.0 - 1.5)).collect();
    let mut y = vec![f16::ZERO; x.len()];
    unit.run(graph, 0, &[&x], &mut [&mut y])?;
    Ok(y.iter().map(|y| y.to_f32()).collect())
}

/// Waits until the library has got this many calls.
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
    // Contexts are described and the chip is chosen, but nothing is loaded yet.
    assert_eq!(library.calls(), ["device 57"]);
    // A call of one row needs the graph of that size of each layer.
    unit.prepare(&[0, 2], None);
    assert_eq!(calls(&library, 4), ["load one", "retrieve one", "load two", "retrieve one"]);
    // The next batch size: the contexts are loaded already.
    unit.prepare(&[1, 3], None);
    assert_eq!(calls(&library, 2), ["retrieve two", "retrieve two"]);
    // The fake computes 65535 minus the stored number, with scale 1/1024 and offset −32768. That is the
    // negated number minus one step.
    let y = run(&unit, 3).unwrap();
    let want: Vec<f32> =
        (0..ROWS * WIDTH).map(|i| f16::from_f32(-(i as f32 / 4.0 - 1.5) - 1.0 / 1024.0).to_f32()).collect();
    assert_eq!(y, want);
    assert_eq!(run(&unit, 0).unwrap(), want);
    assert_eq!(library.calls(), ["execute two", "execute one"]);
}

/// With room for two of three contexts, each is loaded while the one before it is executed, and freed for a
/// later one. One that is damaged when it is loaded again is an error that names it.
#[test]
fn contexts_are_freed_and_loaded_again_under_a_budget() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let names = [("a.qnn", "one"), ("b.qnn", "two"), ("c.qnn", "three")];
    let contexts = names.map(|(package, function)| (package, context(57, &[function])));
    let bundle = bundle(folder.path(), &contexts);
    let graphs = names.map(|(package, function)| graph(package, function));
    let sizes =
        names.map(|(package, _)| ArtifactBytes { package: format!("artifacts/{package}"), bytes: 10 });
    let mut unit = unit(&library);
    unit.load_on_demand(&sizes);
    unit.load(&BundleReader::unchecked(&bundle), &graphs, 1).unwrap();
    assert_eq!(library.calls(), ["device 57"]);
    unit.prepare(&[0, 1, 2], Some(20));
    assert_eq!(calls(&library, 4), ["load one", "retrieve one", "load two", "retrieve two"]);
    let first = run(&unit, 0).unwrap();
    run(&unit, 1).unwrap();
    let expected = ["execute one", "free one", "execute two", "load three", "retrieve three"];
    assert_eq!(calls(&library, 5), expected);
    run(&unit, 2).unwrap();
    assert_eq!(calls(&library, 3), ["free two", "execute three", "load one"]);
    assert_eq!(run(&unit, 0).unwrap(), first);
    let loads = unit.loads();
    assert_eq!((loads.waited, loads.peak, loads.freed), (0, 20, loads.ahead - 2), "{loads:?}");
    fs::write(bundle.join("artifacts/b.qnn/context.bin"), "nothing").unwrap();
    run(&unit, 2).unwrap();
    unit.prepare(&[2], Some(10));
    let error = run(&unit, 1).unwrap_err().to_string();
    assert!(error.contains("artifacts/b.qnn two") && error.contains("b.qnn/context.bin"), "{error}");
    run(&unit, 2).unwrap();
}

#[test]
fn unprepared_graph_is_loaded_on_execution() {
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

/// A context is described when the bundle is loaded, and loaded when it is first executed. Both read the same
/// file, and both check it.
#[test]
fn executed_context_must_match_its_description() {
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
    // A changed context is neither described nor loaded.
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

/// Error of a bundle that cannot be loaded, with its hint.
fn refused(library: &Fake, bundle: &Path, graphs: &[GraphDecl]) -> String {
    let e = unit(library).load(&BundleReader::unchecked(bundle), graphs, 1).unwrap_err();
    format!("{e}; {}", e.hint().unwrap_or_default())
}

#[test]
fn incompatible_libraries_are_rejected_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = bundle(folder.path(), &[("a.qnn", context(57, &["one"]))]);
    let cases: [(&str, &[&str], &[&str]); 3] = [
        ("symbol", &["-DNO_SYMBOL"], &["libQnnHtp.so", "it has no `QnnInterface_getProviders`"]),
        ("api", &["-DCORE=3"], &["libQnnHtp.so", "no interface of version 2"]),
        ("build", &["-DBUILD=\"v2.38.0.1\""], &["libQnnHtp.so", "it is of version v2.38.0.1, not 2.51"]),
    ];
    for (name, defines, words) in cases {
        let error =
            refused(&Fake::new(&folder.path().join(name), CC, defines), &bundle, &[graph("a.qnn", "one")]);
        assert!(
            words.iter().all(|w| error.contains(w)) && error.contains("next to `run`"),
            "{name}: {error}"
        );
    }
    // One half of the library, none of it, and a file that is not a library.
    let library = Fake::new(&folder.path().join("half"), CC, &[]);
    fs::write(library.folder.join("libQnnSystem.so"), "no library").unwrap();
    let error = refused(&library, &bundle, &[graph("a.qnn", "one")]);
    assert!(
        error.contains("libQnnSystem.so` cannot be loaded") && error.contains("LD_LIBRARY_PATH"),
        "{error}"
    );
    if std::env::var_os(moec_qnn_sys::VARIABLE).is_some() {
        return;
    }
    fs::copy(library.folder.join("libQnnHtp.so"), bundle.join("libQnnHtp.so")).unwrap();
    let error = Installation::to_execute(&bundle).unwrap_err().to_string();
    assert!(error.contains("has no `libQnnSystem.so`"), "{error}");
    fs::remove_file(bundle.join("libQnnHtp.so")).unwrap();
    let e =
        Hexagon::default().load(&BundleReader::unchecked(&bundle), &[graph("a.qnn", "one")], 1).unwrap_err();
    let error = format!("{e}; {}", e.hint().unwrap_or_default());
    assert!(matches!(e, Error::Machine { .. }) && error.contains("`qnn`"), "{error}");
    assert!(error.contains("`libQnnHtp.so` cannot be loaded") && error.contains("MOEC_QNN_LIB"), "{error}");
}

/// A name, the contexts of a bundle, and expected words of the error.
type Refused<'a> = (&'a str, &'a [(&'a str, String)], &'a [&'a str]);

#[test]
fn mismatched_contexts_are_rejected_by_name() {
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
        (
            "unknown",
            &[("a.qnn", context(9, &["one"]))],
            &["a.qnn/context.bin", "chip 9, which is not supported"],
        ),
        ("shape", &[("a.qnn", one.replace("2 8 8", "2 8 9"))], &["artifacts/a.qnn one", "`y` is [2, 9]"]),
    ];
    for (name, contexts, words) in cases {
        let bundle = bundle(&folder.path().join(name), contexts);
        let graphs: Vec<_> =
            ["a.qnn", "b.qnn"].iter().take(contexts.len()).map(|p| graph(p, "one")).collect();
        let error = refused(&library, &bundle, &graphs);
        assert!(words.iter().all(|w| error.contains(w)), "{name}: {error}");
    }
    let error = refused(&library, folder.path(), &[graph("../a.qnn", "one")]);
    assert!(error.contains("not a path below `artifacts/`"), "{error}");
}

#[test]
fn chip_errors_are_reported_on_execution() {
    let folder = tempfile::tempdir().unwrap();
    let library = Fake::new(&folder.path().join("lib"), CC, &[]);
    let contexts = [("a.qnn", context(57, &["one", "failing"])), ("b.qnn", context(57, &["unloadable"]))];
    let bundle = bundle(folder.path(), &contexts);
    let mut unit = unit(&library);
    let graphs = [graph("a.qnn", "one"), graph("a.qnn", "failing"), graph("b.qnn", "unloadable")];
    unit.load(&BundleReader::unchecked(&bundle), &graphs, 1).unwrap();
    // `prepare` is only a hint, so it never fails.
    unit.prepare(&[2, 1, 0], None);
    let error = |graph| run(&unit, graph).unwrap_err().to_string();
    let failing = error(1);
    assert!(failing.starts_with("graph `artifacts/a.qnn failing`"), "{failing}");
    assert!(
        failing.contains("it has failed (code 1100)") && failing.contains("tensor unit 3 has stopped"),
        "{failing}"
    );
    let unloadable = error(2);
    assert!(
        unloadable.contains("b.qnn/context.bin") && unloadable.contains("no room for unloadable"),
        "{unloadable}"
    );
    // The other graphs still run.
    run(&unit, 0).unwrap();
    let wrong = unit.run(0, 0, &[], &mut []).unwrap_err().to_string();
    assert!(wrong.contains("0 inputs"), "{wrong}");
    let (x, mut y) = ([f16::ONE; 3], vec![f16::ZERO; 16]);
    let wrong = unit.run(0, 0, &[&x], &mut [&mut y]).unwrap_err().to_string();
    assert!(wrong.contains("`x` has 16 numbers, not 3"), "{wrong}");
}
