//! Packages written by the helper. If it is not installed, these tests are skipped.

use crate::store::{FILE, Store, ane};
use moec_coreml::emit::Chunk;
use moec_coreml::helper::{Helper, HelperError, Package};
use moec_coreml::program::{Arg, FunctionBuilder, Mode, OpKind, Program, Rules, WeightRef};
use moec_testing::COREML;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The helper in this user's cache folder; without it, the calling test is skipped.
pub(crate) fn helper() -> Option<Helper> {
    let from = |var: &str| std::env::var_os(var).filter(|v| !v.is_empty()).map(PathBuf::from);
    let cache = from("MOEC_CACHE")
        .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("moec")))
        .or_else(|| from("HOME").map(|p| p.join(".cache/moec")))?;
    COREML.ok_or_skip(Helper::find(&cache))
}

/// A folder with the store's weight file.
pub(crate) fn folder(store: &Store) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(FILE), store.bytes()).unwrap();
    folder
}

/// Every file below a folder with its bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![folder.to_owned()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
            } else {
                found.insert(path.strip_prefix(folder).unwrap().to_owned(), fs::read(path).unwrap());
            }
        }
    }
    found
}

#[test]
fn packages_store_weights_once_and_are_reproducible() {
    let Some(helper) = helper() else { return };
    let mut store = Store::default();
    let group = store.swiglu(2).emit(&ane()).unwrap();
    let mut attention = store.attention_of([4, 2, 24, 16], true);
    attention.sinks = Some(store.raw(&[4], 0.0, 1.0));
    (attention.q_norm, attention.k_norm) = (Some(store.norm(24)), Some(store.norm(24)));
    attention.chunks.push(Chunk { rows: 32, start: Some(0) });
    let programs: [Program; 3] = [group, attention.emit(&ane()).unwrap(), store.head().emit(&ane()).unwrap()];
    let folder = folder(&store);
    let outs = |run: &str| -> Vec<PathBuf> {
        programs.iter().map(|p| folder.path().join(run).join(format!("{}.mlpackage", p.name))).collect()
    };
    let [first, second] = ["first", "second"].map(|run| {
        let outs = outs(run);
        let jobs = programs.iter().zip(&outs);
        let jobs: Vec<_> =
            jobs.map(|(program, out)| Package { program, weights: folder.path(), out }).collect();
        let mut progress = Vec::new();
        let done = helper.emit(&jobs, &mut |e| progress.push(e.name.clone())).unwrap();
        assert_eq!(progress, programs.iter().map(|p| p.name.clone()).collect::<Vec<_>>());
        for (program, emitted) in programs.iter().zip(&done) {
            // With two capacities or two chunks, the predicted size counts every weight once.
            assert_eq!(emitted.weight_bytes, program.weight_bytes(), "{}", program.name);
            let found = files(&emitted.out);
            assert_eq!(found.values().map(Vec::len).sum::<usize>() as u64, emitted.bytes);
            assert_eq!(found.len(), 3, "{:?}", found.keys());
        }
        done
    });
    for (a, b) in first.iter().zip(&second) {
        assert_ne!(a.out, b.out);
        assert!(files(&a.out) == files(&b.out), "{} is not the same twice", a.name);
    }
    // No other files remain beside the packages, and an existing package is replaced.
    assert_eq!(fs::read_dir(folder.path().join("first")).unwrap().count(), programs.len());
    let again = Package { program: &programs[0], weights: folder.path(), out: &first[0].out };
    helper.emit(&[again], &mut |_| ()).unwrap();
    assert!(files(&first[0].out) == files(&second[0].out));
}

/// A function with every operator kind.
fn everything() -> Program {
    let mut weights = Vec::new();
    let mut b = FunctionBuilder::new("main", &mut weights);
    let x = b.input("x", &[1, 32, 1, 32]);
    let state = b.state("s", &[32, 32]);
    let weight =
        WeightRef { name: "w".into(), file: FILE.into(), offset: 0, shape: vec![32, 32, 1, 1], blocks: None };
    let mut y = b.conv(x, &weight, None).unwrap();
    for op in [OpKind::Silu, OpKind::Sigmoid, OpKind::Relu, OpKind::Abs] {
        y = b.unary(op, y).unwrap();
    }
    for mode in [Mode::Exact, Mode::TanhApproximation] {
        y = b.gelu(y, mode).unwrap();
    }
    y = b.clip(y, 0.0, 2.0).unwrap();
    for op in [OpKind::Add, OpKind::Sub, OpKind::Mul, OpKind::Maximum, OpKind::Minimum, OpKind::RealDiv] {
        y = b.scalar(op, y, 0.5).unwrap();
    }
    y = b.rsqrt(y, 1.0 / 1024.0).unwrap();
    for op in [OpKind::ReduceMean, OpKind::ReduceMax, OpKind::ReduceSum] {
        let reduced = b.reduce(op, y, 1).unwrap();
        y = b.binary(OpKind::Add, y, reduced).unwrap();
    }
    let axes = |list: &[usize]| ("axes", Arg::Ints(list.to_vec()));
    y = b.one(OpKind::Squeeze, &[("x", Arg::Value(y)), axes(&[0, 2])]).unwrap();
    let old = b.read_state(state).unwrap();
    y = b.matmul(old, y, true).unwrap();
    b.write_state(state, y).unwrap();
    y = b.softmax(y, 1).unwrap();
    let halves = [("x", Arg::Value(y)), ("split_sizes", Arg::Ints(vec![8, 24])), ("axis", Arg::Int(1))];
    let halves = b.op(OpKind::Split, &halves).unwrap();
    y = b.concat(&[halves[1], halves[0]], 1).unwrap();
    let part = b.slice(y, 1, 4, 12).unwrap();
    y = b.slice_update(y, part, &[0, 20]).unwrap();
    y = b.one(OpKind::ExpandDims, &[("x", Arg::Value(y)), axes(&[0, 2])]).unwrap();
    y = b.tile(y, &[1, 1, 3, 1]).unwrap();
    y = b.transpose(y, &[0, 2, 1, 3]).unwrap();
    y = b.reshape(y, &[1, 96, 32]).unwrap();
    let function = b.finish(&[("y", y)]);
    Program {
        name: "everything".into(),
        description: "every operator".into(),
        weights,
        functions: vec![function],
    }
}

#[test]
fn coremltools_accepts_all_operators_with_equal_shapes() {
    let program = everything();
    program.verify(&Rules::ANE).unwrap();
    let used = |kind| program.functions[0].ops.iter().any(|op| op.op == kind);
    assert_eq!(OpKind::all().filter(|&kind| !used(kind)).collect::<Vec<_>>(), []);
    let Some(helper) = helper() else { return };
    let mut store = Store::default();
    store.matrix(32, 32);
    let folder = folder(&store);
    let out = folder.path().join("everything.mlpackage");
    // The helper compares the shape of every value.
    let emit = |program| helper.emit(&[Package { program, weights: folder.path(), out: &out }], &mut |_| ());
    emit(&program).unwrap();
    let mut wrong = program.clone();
    let value = wrong.functions[0].ops.iter().find(|op| op.op == OpKind::Softmax).unwrap().results[0];
    wrong.functions[0].values[value.index()].shape = vec![32, 33];
    let error = emit(&wrong).unwrap_err().to_string();
    assert!(error.contains("(softmax) is [32, 32] for coremltools, [32, 33] in the program"), "{error}");
}

#[test]
fn helper_write_errors_are_reported() {
    let Some(helper) = helper() else { return };
    assert_eq!(helper.versions().unwrap().coremltools, "9.0");
    let mut store = Store::default();
    let program = store.swiglu(1).emit(&ane()).unwrap();
    let folder = folder(&store);
    let emit = |weights: &Path, name: &str| {
        let out = folder.path().join(name);
        let error =
            helper.emit(&[Package { program: &program, weights, out: &out }], &mut |_| ()).unwrap_err();
        assert!(!out.exists());
        let HelperError::Package { what, .. } = &error else { panic!("{error:?}") };
        what.clone()
    };
    assert!(emit(Path::new("/nowhere"), "x.mlpackage").contains("`/nowhere/weights.bin` cannot be mapped"));
    assert!(emit(folder.path(), "x.folder").contains("does not end in .mlpackage"));

    let bytes = store.bytes();
    fs::write(folder.path().join(FILE), &bytes[..bytes.len() - 2]).unwrap();
    assert!(emit(folder.path(), "x.mlpackage").contains("ends before byte"));
    let mut infinite = bytes;
    infinite[..2].copy_from_slice(&half::f16::INFINITY.to_le_bytes());
    fs::write(folder.path().join(FILE), infinite).unwrap();
    assert!(emit(folder.path(), "x.mlpackage").contains("`gate expert0` has values that f16 cannot hold"));
}

#[test]
fn program_that_is_not_a_helper_is_detected() {
    let venv = tempfile::tempdir().unwrap();
    let hint = |e: &HelperError| e.hint();
    let gone = Helper::new("/nowhere/moec-coreml", venv.path()).versions().unwrap_err();
    assert!(
        matches!(gone, HelperError::Start { .. }) && hint(&gone).contains("cargo xtask coreml"),
        "{gone}"
    );
    let fails = Helper::new("/bin/false", venv.path()).versions().unwrap_err();
    assert!(matches!(fails, HelperError::Died { .. }), "{fails:?}");
    let talks = Helper::new("/bin/echo", venv.path()).versions().unwrap_err();
    assert!(matches!(talks, HelperError::Talk { .. }), "{talks:?}");
}
