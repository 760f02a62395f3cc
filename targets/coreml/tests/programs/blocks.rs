//! Weights that are stored as codes with scales: their results, their sizes, and where they are permitted.

use crate::interpret::{Rounding, States, call, difference};
use crate::packages::{folder, helper};
use crate::store::{Store, ane, padded};
use moec_coreml::check;
use moec_coreml::emit::{EmitError, ExpertGroup, Limits, Networks};
use moec_coreml::exec::{self, Executor, Tensor};
use moec_coreml::helper::Package;
use moec_coreml::package::Package as Saved;
use moec_coreml::program::{Counted, Program};
use moec_ir::{Activation, Glu};
use moec_runtime::bundle::BundleReader;
use std::collections::BTreeMap;
use std::fs;
use std::sync::Arc;

/// A group of experts of 64 channels with 96 between, as codes and as the same values in f16.
fn groups(store: &mut Store, bits: u8) -> [ExpertGroup; 2] {
    let (count, hidden, inner) = (3, 64, 96);
    let gate = store.blocks([count * inner, hidden], bits);
    let up = store.blocks([count * inner, hidden], bits);
    let down = store.blocks([count * hidden, inner], bits);
    let [a, b] = [0, 1].map(|i| {
        let of = |both: &[moec_coreml::emit::Raw; 2]| both[i].clone();
        let weights =
            Networks { gate: of(&gate), up: of(&up), down: of(&down), gate_up_bias: None, down_bias: None };
        ExpertGroup {
            name: ["codes", "halves"][i].into(),
            hidden,
            intermediate: inner,
            glu: Glu::Gated(Activation::Silu),
            experts: (0..count).map(|e| format!("expert{e}")).collect(),
            weights,
            capacities: vec![16, 32],
        }
    });
    [a, b]
}

#[test]
fn quantized_weights_match_f16_values_in_less_memory() {
    let Some(helper) = helper() else { return };
    for bits in [4, 8] {
        let mut store = Store::default();
        let [codes, halves] = groups(&mut store, bits);
        let x = store.rows(3 * 32 * 64);
        let folder = folder(&store);
        for limits in [ane(), padded()] {
            let programs: [Program; 2] = [&codes, &halves].map(|g| g.emit(&limits).unwrap());
            let mut results = Vec::new();
            for program in &programs {
                let out = folder.path().join(format!("{}.mlpackage", program.name));
                let jobs = [Package { program, weights: folder.path(), out: &out }];
                let emitted = helper.emit(&jobs, &mut |_| ()).unwrap();
                // The planned bytes are the stored bytes, so limits can be checked before anything is
                // written.
                assert_eq!(emitted[0].weight_bytes, program.weight_bytes(), "{bits} bits");
                let saved = Arc::new(Saved::open(&BundleReader::unchecked(&out)).unwrap());
                let rules = check::Limits {
                    last_axis_bytes: limits.rules.last_axis_bytes,
                    ..check::Limits::default()
                };
                assert_eq!(check::check(&saved, &rules), [], "{bits} bits");
                let executor = Executor::new(&saved, Some("cap32")).unwrap();
                let given = BTreeMap::from([("x".to_owned(), Tensor::f16(&[3 * 32, 64, 1, 1], &x).unwrap())]);
                let got = executor.run(&given, &mut exec::States::default()).unwrap()["y"].to_f32();
                let want = call(program, "cap32", &store, &[("x", &x)], &mut States::new(), Rounding::None);
                let error = difference(&want["y"], &got);
                println!("{} bits, {}: {error:.1e}, {} bytes", bits, program.name, program.weight_bytes());
                assert!(error < 2e-3, "{bits} bits: {error}");
                results.push(got);
            }
            assert_eq!(results[0], results[1], "{bits} bits: codes give other bits than their values");
            let dense = programs[1].weight_bytes();
            assert_eq!(programs[0].counted_bytes(Counted::Dense), dense);
            // One 16-bit scale for 32 codes: 4.5 and 8.5 bits per weight in place of 16, without metadata.
            let share = programs[0].weight_bytes() as f64 / dense as f64;
            let plain = (f64::from(bits) + 0.5) / 16.0;
            assert!(share > plain && share < plain + 0.05, "{bits} bits: {share}");
        }
    }
}

#[test]
fn size_limit_counts_stored_or_dense_bytes() {
    let [codes, halves] = groups(&mut Store::default(), 4);
    let dense = halves.emit(&padded()).unwrap().weight_bytes();
    let limits = |counted| Limits { graph_bytes: dense - 1, counted, ..padded() };
    assert!(codes.emit(&limits(Counted::Stored)).is_ok());
    for (group, counted) in [(&codes, Counted::Dense), (&halves, Counted::Stored)] {
        let error = group.emit(&limits(counted)).unwrap_err();
        assert!(matches!(error, EmitError::TooLarge { bytes, fits: 2, .. } if bytes == dense), "{error}");
    }
}

#[test]
fn check_counts_as_configured_and_rejects_last_axis_of_one() {
    let Some(helper) = helper() else { return };
    let mut store = Store::default();
    let [codes, halves] = groups(&mut store, 4);
    let folder = folder(&store);
    let dense: u64 = 3 * 3 * 64 * 96 * 2;
    let program = codes.emit(&ane()).unwrap();
    let out = folder.path().join("codes.mlpackage");
    helper.emit(&[Package { program: &program, weights: folder.path(), out: &out }], &mut |_| ()).unwrap();
    let saved = Saved::open(&BundleReader::unchecked(&out)).unwrap();
    let rules = |limits: &check::Limits| -> Vec<&str> {
        let mut rules: Vec<_> = check::check(&saved, limits).iter().map(|f| f.rule).collect();
        rules.dedup();
        rules
    };
    let limits = check::Limits { graph_bytes: dense - 1, ..check::Limits::default() };
    assert!(rules(&limits).is_empty());
    assert_eq!(rules(&check::Limits { counted: Counted::Dense, ..limits.clone() }), ["size"]);
    let fits = check::Limits { graph_bytes: dense, counted: Counted::Dense, ..limits.clone() };
    assert!(rules(&fits).is_empty());
    assert_eq!(rules(&check::Limits { last_axis_bytes: 64, ..limits }), ["last_axis"]);
    // The program's verifier reports the same error.
    let error = halves.emit(&ane()).unwrap().verify(&padded().rules).unwrap_err().to_string();
    assert!(error.contains("pads a last axis of 1 to 64 bytes"), "{error}");
}

#[test]
fn incomplete_quantization_blocks_are_rejected() {
    let mut store = Store::default();
    for (fault, bits, channels) in [("5 bits", 5, 64), ("48 channels", 4, 48)] {
        let [mut codes, _] = groups(&mut store, 4);
        for raw in [&mut codes.weights.gate, &mut codes.weights.up] {
            raw.shape = vec![3 * 96, channels];
            raw.blocks.as_mut().unwrap().bits = bits;
        }
        codes.hidden = channels;
        codes.weights.down.shape = vec![3 * channels, 96];
        let error = codes.emit(&padded()).unwrap_err().to_string();
        assert!(error.contains("has no such blocks"), "{fault}: {error}");
    }
}

#[test]
fn truncated_quantized_weights_are_rejected() {
    let Some(helper) = helper() else { return };
    let mut store = Store::default();
    let [codes, _] = groups(&mut store, 8);
    let program = codes.emit(&padded()).unwrap();
    let folder = folder(&store);
    let short = store.bytes()[..3 * 96 * 64].to_vec();
    fs::write(folder.path().join(crate::store::FILE), short).unwrap();
    let out = folder.path().join("codes.mlpackage");
    let jobs = [Package { program: &program, weights: folder.path(), out: &out }];
    let error = helper.emit(&jobs, &mut |_| ()).unwrap_err().to_string();
    assert!(error.contains("ends before byte"), "{error}");
}
