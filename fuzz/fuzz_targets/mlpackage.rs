//! A Core ML package of arbitrary bytes: whatever opens can be checked, and what loads can be run.
#![no_main]

use moec_runtime::bundle::BundleReader;
use libfuzzer_sys::fuzz_target;
use moec_coreml::check::{Limits, check};
use moec_coreml::exec::{Executor, States, Tensor};
use moec_coreml::package::Package;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::{Arc, LazyLock};
use tempfile::TempDir;

/// Largest tensor of a function that is run, in elements.
const SMALL: usize = 4096;
/// Most operations of a function that is run.
const FEW: usize = 64;
const MANIFEST: &str = r#"{"rootModelIdentifier": "A", "itemInfoEntries": {"A": {"path": "model.mlmodel"}}}"#;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
    let folder = tempfile::tempdir().expect("a folder");
    fs::create_dir_all(folder.path().join("Data/weights")).expect("folders");
    fs::write(folder.path().join("Manifest.json"), MANIFEST).expect("a manifest");
    folder
});

/// The input is a u32, the length of the model, then the model, then the weights.
fn write(folder: &Path, bytes: &[u8]) -> Option<()> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (model, weights) = rest.split_at_checked(u32::from_le_bytes(*len) as usize)?;
    fs::write(folder.join("Data/model.mlmodel"), model).ok()?;
    fs::write(folder.join("Data/weights/weight.bin"), weights).ok()
}

fuzz_target!(|bytes: &[u8]| {
    let folder = FOLDER.path();
    if write(folder, bytes).is_none() {
        return;
    }
    let Ok(package) = Package::open(&BundleReader::unchecked(folder)) else { return };
    let package = Arc::new(package);
    let findings = check(&package, &Limits::default());
    assert!(findings.iter().all(|f| !f.message.is_empty()));
    for (name, f) in &package.program.functions {
        if f.ops.len() > FEW || f.values.iter().any(|v| v.ty.elements() > SMALL) {
            continue;
        }
        let Ok(executor) = Executor::new(&package, Some(name)) else { continue };
        let values = f.inputs.iter().filter_map(|id| f.value(*id));
        let zeros = values.map(|v| Some((v.name.clone(), Tensor::zeros(&v.ty)?)));
        let Some(inputs) = zeros.collect::<Option<BTreeMap<_, _>>>() else { continue };
        // An error is an answer, too.
        if let Ok(outputs) = executor.run(&inputs, &mut States::default()) {
            for id in &f.outputs {
                let value = f.value(*id).expect("resolved");
                assert_eq!(outputs[&value.name].ty(), value.ty);
            }
        }
    }
});
