//! For any bytes in a package, reading, checking and executing it does not panic.

use crate::builder::{Builder, MODEL, Saved, WEIGHTS, golden};
use moec_coreml::check::{Limits, check};
use moec_coreml::exec::{Executor, States, Tensor};
use moec_coreml::package::Package;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

/// Functions with larger values are not executed here.
const SMALL: usize = 1 << 16;

fn exercise(package: Package) {
    let package = &Arc::new(package);
    let _ = check(package, &Limits::default());
    for (name, f) in &package.program.functions {
        let large = f.values.iter().map(|v| v.ty.elements()).max().is_some_and(|n| n > SMALL);
        if large {
            continue;
        }
        let Ok(executor) = Executor::new(package, Some(name)) else { continue };
        let inputs: Option<BTreeMap<String, Tensor>> = (f.inputs.iter())
            .map(|id| {
                let value = f.value(*id)?;
                Some((value.name.clone(), Tensor::zeros(&value.ty)?))
            })
            .collect();
        if let Some(inputs) = inputs {
            let _ = executor.run(&inputs, &mut States::default());
        }
    }
}

/// Files of a golden package: model and weights.
fn files(name: &str) -> [Vec<u8>; 2] {
    let folder = golden().join(format!("{name}/{name}.mlpackage"));
    [MODEL, WEIGHTS].map(|file| fs::read(folder.join(file)).expect("a file"))
}

/// Changed bytes: whether in the model, the position as a share of the file, the new value.
fn changes() -> impl Strategy<Value = Vec<(bool, u32, u8)>> {
    // Most changes are in the model, since only few bytes of the weights are headers.
    prop::collection::vec((prop::bool::weighted(0.8), any::<u32>(), any::<u8>()), 1..6)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    #[test]
    fn damaged_packages_are_refused_or_run(
        name in prop::sample::select(vec!["experts", "attention", "compressed"]),
        changes in changes(),
        cut in prop::option::weighted(0.1, any::<u32>()),
    ) {
        let mut files = files(name);
        for (model, at, byte) in changes {
            let file = &mut files[usize::from(!model)];
            let at = at as usize % file.len();
            file[at] = byte;
        }
        if let Some(cut) = cut {
            let len = cut as usize % files[0].len();
            files[0].truncate(len);
        }
        let saved = Builder::default().save();
        saved.write(MODEL, &files[0]);
        saved.write(WEIGHTS, &files[1]);
        if let Ok(package) = saved.open() {
            exercise(package);
        }
    }
}

#[test]
fn undamaged_packages_run() {
    for name in ["experts", "attention", "compressed"] {
        let saved: Saved = Builder::default().save();
        let files = files(name);
        saved.write(MODEL, &files[0]);
        saved.write(WEIGHTS, &files[1]);
        exercise(saved.open().expect("opens"));
    }
}
