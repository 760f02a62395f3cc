//! Invalid packages are refused, and the error names the place.

use crate::builder::{Arg, Builder, MODEL, Saved, WEIGHTS, halves, name, raw, ty};
use moec_coreml::package::proto::{self, Bound, Kind};
use moec_coreml::package::{Dtype, Flaw, PackageError};
use std::fs;

fn weighted() -> Builder {
    let t = ty(Dtype::F16, &[4]);
    Builder::default()
        .input("x", &t)
        .weight("w", &[4], &[1.0, 2.0, 3.0, 4.0])
        .op("add", &[("x", name("x")), ("y", name("w"))], &[("y", t.clone())])
        .output("y", &t)
}

/// The error of a package, as text with its hint.
fn refused(saved: &Saved) -> String {
    let error = saved.open().expect_err("refused");
    format!("{error}\n  hint: {}", error.hint())
}

fn flaw(saved: &Saved) -> Flaw {
    match saved.open() {
        Err(PackageError::Model { flaw, .. }) => *flaw,
        other => panic!("{other:?}"),
    }
}

#[test]
fn metadata_of_weights_must_agree_with_the_model() {
    let good = weighted();
    assert!(good.save().open().is_ok());
    // Byte of the metadata, its new value, expected words of the error.
    for (at, value, expected) in [
        (64, 0, "0xdeadbe00"),
        (68, 2, "element type number 2"),
        (72, 9, "9 bytes"),
        (80, 129, "data at 129"),
        (80, 0, "data at 0"),
        (87, 255, "data at"),
        (4, 1, "version 2"),
    ] {
        let mut bad = good.clone();
        bad.weights[at] = value;
        let error = refused(&bad.save());
        assert!(error.contains(expected) && error.contains("hint: "), "{expected}: {error}");
    }
    for len in [0, 63, 64, 100, 128, 135] {
        let mut short = good.clone();
        short.weights.truncate(len);
        assert!(matches!(flaw(&short.save()), Flaw::Weight { .. }), "{len} bytes");
    }
    for offset in [0, 32, 65, 1 << 40, u64::MAX, u64::MAX - 63] {
        let bad =
            Builder::default().weight("v", &[4], &[0.0; 4]).constant("w", &ty(Dtype::F16, &[4]), offset);
        assert!(matches!(flaw(&bad.save()), Flaw::Weight { .. }), "offset {offset}");
    }
}

#[test]
fn paths_outside_the_package_are_rejected() {
    let secret = tempfile::tempdir().expect("a folder");
    fs::write(secret.path().join("weight.bin"), vec![0; 4096]).expect("written");
    let outside = secret.path().join("weight.bin").display().to_string();
    for path in [
        "../../../weight.bin",
        "@model_path/../weight.bin",
        "@model_path//etc/hostname",
        "/etc/hostname",
        "",
        &outside,
    ] {
        let mut model = weighted().model();
        let functions = &mut model.ml_program.as_mut().expect("a program").functions;
        let block =
            functions.values_mut().flat_map(|f| f.block_specializations.values_mut()).next().expect("a body");
        let value = block.operations[0].attributes.get_mut("val").expect("a value");
        value.held =
            Some(proto::StoredValue::Blob(proto::BlobFileValue { file_name: path.into(), offset: 64 }));
        let error = refused(&Saved::new(&model, &weighted().weights));
        assert!(error.contains("outside of the package"), "`{path}`: {error}");
        if path.starts_with("@model_path//") {
            continue; // In a manifest this is a valid folder name.
        }
        let saved = weighted().save();
        let manifest = format!(
            r#"{{"rootModelIdentifier": "A", "itemInfoEntries": {{"A": {{"path": {}}}}}}}"#,
            serde_json::to_string(path).expect("a string")
        );
        saved.write("Manifest.json", manifest.as_bytes());
        assert!(refused(&saved).contains("outside of the package"), "`{path}`");
    }
    #[cfg(unix)]
    {
        let saved = weighted().save();
        let weights = saved.path().join(WEIGHTS);
        fs::remove_file(&weights).expect("removed");
        std::os::unix::fs::symlink(&outside, &weights).expect("linked");
        assert!(refused(&saved).contains("outside of the package"));
    }
}

#[test]
fn manifest_without_a_model_is_rejected() {
    let saved = weighted().save();
    for (text, expected) in [
        ("", "EOF"),
        ("{}", "missing field"),
        (r#"{"rootModelIdentifier": "B", "itemInfoEntries": {}}"#, "no item `B`"),
    ] {
        saved.write("Manifest.json", text.as_bytes());
        assert!(refused(&saved).contains(expected), "{text}");
    }
    fs::remove_file(saved.path().join("Manifest.json")).expect("removed");
    assert!(refused(&saved).contains("Manifest.json` is missing"));
    let saved = weighted().save();
    saved.write(MODEL, &[0xFF; 12]);
    assert!(refused(&saved).contains("not a Core ML model"));
    saved.write(MODEL, &vec![0; (16 << 20) + 1]);
    assert!(refused(&saved).contains("more than 16777216"));
}

#[test]
fn package_files_changed_after_the_build_are_rejected() {
    let saved = weighted().save();
    for file in ["Manifest.json", MODEL, WEIGHTS] {
        let error = saved.open_changed(file).expect_err("another file").to_string();
        assert!(error.contains(file) && error.contains("was changed after the build"), "{error}");
    }
    saved.open().expect("opens");
}

#[test]
fn names_and_shapes_are_resolved() {
    let t = ty(Dtype::F16, &[4]);
    let start = || Builder::default().input("x", &t);
    let relu = |f: Builder, x, y| f.op("relu", &[("x", name(x))], &[(y, t.clone())]).output(y, &t);
    assert_eq!(flaw(&relu(start(), "z", "y").save()), Flaw::Undefined("z".into()));
    assert_eq!(flaw(&relu(start(), "y", "y").save()), Flaw::Undefined("y".into()));
    assert_eq!(flaw(&relu(start(), "x", "x").save()), Flaw::Twice("x".into()));
    assert!(matches!(flaw(&start().save()), Flaw::Invalid(_)), "no outputs");
    let bytes = |n| {
        start().op("add", &[("x", name("x")), ("y", raw(Dtype::F16, &[4], vec![0; n]))], &[("y", t.clone())])
    };
    assert!(bytes(8).output("y", &t).save().open().is_ok());
    assert!(matches!(flaw(&bytes(7).output("y", &t).save()), Flaw::Invalid(_)), "too few bytes");
    let mut open = relu(start(), "x", "y");
    if let Some(Kind::Tensor(ty)) = open.inputs[0].r#type.as_mut().and_then(|t| t.kind.as_mut()) {
        ty.dimensions[0].constant = None;
    }
    assert_eq!(flaw(&open.save()), Flaw::Flexible);
    let mut huge = relu(start(), "x", "y");
    if let Some(Kind::Tensor(ty)) = huge.inputs[0].r#type.as_mut().and_then(|t| t.kind.as_mut()) {
        ty.dimensions[0].constant = Some(proto::ConstantDimension { size: u64::MAX });
    }
    assert!(matches!(flaw(&huge.save()), Flaw::Invalid(_)));
    let mut nested = relu(start(), "x", "y");
    nested.block.operations[0].blocks.push(proto::Block::default());
    assert!(matches!(flaw(&nested.save()), Flaw::Unsupported(_)), "control flow");
    let mut nothing = relu(start(), "x", "y");
    nothing.block.operations[0].inputs.get_mut("x").expect("x").arguments[0].binding = None;
    assert!(matches!(flaw(&nothing.save()), Flaw::Invalid(_)));
    nothing.block.operations[0].inputs.get_mut("x").expect("x").arguments[0].binding =
        Some(Bound::Name(String::new()));
    assert!(matches!(flaw(&nothing.save()), Flaw::Undefined(_)));
}

#[test]
fn an_error_names_function_and_operation() {
    let t = ty(Dtype::F16, &[2]);
    let f = Builder::default()
        .input("x", &t)
        .op("add", &[("x", name("x")), ("y", Arg::Name("cache"))], &[("sum", t.clone())])
        .op("mul", &[("x", name("sum")), ("y", halves(&[], &[2.0]))], &[("y", t.clone())])
        .output("y", &t);
    let error = refused(&f.save());
    assert!(
        error.contains("function `main`, add `sum`: `cache` is not defined before it is used"),
        "{error}"
    );
}
