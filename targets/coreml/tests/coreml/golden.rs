//! Packages written by coremltools compute the same as numpy.

use crate::builder::{golden, tensor};
use moec_coreml::check::{Limits, Severity, check};
use moec_coreml::exec::{Executor, States};
use moec_coreml::package::Package;
use moec_runtime::bundle::BundleReader;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

#[derive(Deserialize)]
struct Array {
    shape: Vec<usize>,
    values: Vec<f32>,
}

#[derive(Deserialize)]
struct Case {
    function: String,
    inputs: BTreeMap<String, Array>,
    outputs: BTreeMap<String, Array>,
}

fn rms(a: impl Iterator<Item = f64>, n: usize) -> f64 {
    (a.map(|x| x * x).sum::<f64>() / n as f64).sqrt()
}

fn open(name: &str) -> Arc<Package> {
    Arc::new(
        Package::open(&BundleReader::unchecked(&golden().join(format!("{name}/{name}.mlpackage"))))
            .expect("opens"),
    )
}

/// The check's errors for a golden package, as text.
fn errors(name: &str) -> Vec<String> {
    let findings = check(&open(name), &Limits::default());
    findings.iter().filter(|f| f.severity == Severity::Error).map(ToString::to_string).collect()
}

/// Runs every case, in order and on the same states, and compares.
fn agrees(name: &str, tolerance: f64) {
    let package = open(name);
    let cases = fs::read(golden().join(name).join("cases.json")).expect("cases");
    let cases: Vec<Case> = serde_json::from_slice(&cases).expect("cases");
    let mut states = States::default();
    assert!(!cases.is_empty());
    for case in cases {
        let executor = Executor::new(&package, Some(&case.function)).expect("loads");
        let function = executor.function();
        let inputs = function.inputs.iter().map(|id| {
            let value = &function.values[id.0];
            let given = &case.inputs[&value.name];
            assert_eq!(given.shape, value.ty.shape);
            (value.name.clone(), tensor(&value.ty, &given.values))
        });
        let outputs = executor.run(&inputs.collect(), &mut states).expect("runs");
        assert_eq!(outputs.len(), case.outputs.len());
        for (output, expected) in &case.outputs {
            let computed = &outputs[output];
            assert_eq!(computed.shape(), expected.shape);
            let (a, b) = (computed.to_f32(), &expected.values);
            let difference = rms(a.iter().zip(b).map(|(a, b)| f64::from(a - b)), b.len());
            let relative = difference / rms(b.iter().map(|&b| b.into()), b.len());
            assert!(relative < tolerance, "{name}, {}, {output}: {relative:.2e}", case.function);
        }
    }
}

#[test]
fn experts_of_several_capacities_share_their_weights() {
    agrees("experts", 1e-3);
    assert_eq!(errors("experts"), Vec::<String>::new());
    let package = open("experts");
    assert_eq!(package.program.functions.keys().collect::<Vec<_>>(), ["cap16", "cap32"]);
    assert_eq!(package.weights.file(0).map(|(_, blobs)| blobs), Some(6));
}

#[test]
fn attention_reads_what_earlier_calls_wrote_into_the_state() {
    agrees("attention", 2e-3);
    // The package resembles the output of exporters that ignore the Neural Engine; the check reports it.
    let errors = errors("attention");
    assert!(errors.iter().filter(|e| e.contains("(projections)")).count() == 3, "{errors:?}");
}

#[test]
fn compressed_weights_are_made_dense() {
    agrees("compressed", 1e-3);
    assert_eq!(errors("compressed"), Vec::<String>::new());
}
