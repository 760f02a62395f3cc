//! Packages that are read back from disk compute the same as their programs, and the Neural Engine can run
//! them.

use crate::interpret::{Rounding, States, call, difference};
use crate::packages::{folder, helper};
use crate::store::{Store, ane, padded};
use moec_coreml::check::{self, Severity};
use moec_coreml::emit::{Chunk, MASKED, Rope};
use moec_coreml::exec::{self, Executor, Tensor};
use moec_coreml::helper::Package;
use moec_coreml::package::Package as Saved;
use moec_coreml::program::{Function, Program};
use moec_ir::{Activation, Glu, RopeStyle};
use moec_runtime::bundle::BundleReader;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Inputs of a function: a mask that keeps the first half, rows that are written in order.
fn inputs(function: &Function, store: &mut Store) -> Vec<(String, Vec<usize>, Vec<f32>)> {
    let of = |id: &moec_coreml::program::ValueId| {
        let value = &function.values[id.index()];
        let (count, last) = (value.shape.iter().product(), *value.shape.last().unwrap());
        let data: Vec<f32> = match &*value.name {
            "mask" => (0..count).map(|i| if i % last < last / 2 { 0.0 } else { MASKED }).collect(),
            "write" => (0..count).map(|i| f32::from(u8::from(i / last == i % last))).collect(),
            _ => store.rows(count),
        };
        (value.name.clone(), value.shape.clone(), data)
    };
    function.inputs.iter().map(of).collect()
}

#[test]
fn executed_packages_match_their_programs() {
    let Some(helper) = helper() else { return };
    let mut store = Store::default();
    let clamped = Glu::Clamped { alpha: 1.702, limit: 1.5 };
    let gelu = Glu::Gated(Activation::GeluTanh);
    let mut groups = [store.group(3, clamped, true), store.group(2, gelu, false)];
    groups[1].name = "layer1.group0".into();
    let mut attention = store.attention_of([4, 2, 24, 16], true);
    attention.rope = Some(Rope { offset: 8, channels: 16, style: RopeStyle::Interleaved });
    attention.sinks = Some(store.raw(&[4], 0.0, 1.0));
    (attention.q_norm, attention.k_norm) = (Some(store.norm(24)), Some(store.norm(2 * 24)));
    attention.norm = Some(store.norm(32));
    attention.chunks.push(Chunk { rows: 32, start: Some(32) });
    let programs: Vec<Program> = vec![
        groups[0].emit(&padded()).unwrap(),
        groups[1].emit(&ane()).unwrap(),
        attention.emit(&padded()).unwrap(),
        store.head().emit(&ane()).unwrap(),
    ];
    let folder = folder(&store);
    for program in &programs {
        let out = folder.path().join(format!("{}.mlpackage", program.name));
        helper.emit(&[Package { program, weights: folder.path(), out: &out }], &mut |_| ()).unwrap();
        let saved = Arc::new(Saved::open(&BundleReader::unchecked(&out)).unwrap());
        let limits = check::Limits { graph_bytes: program.weight_bytes(), ..check::Limits::default() };
        let findings = check::check(&saved, &limits);
        for finding in &findings {
            println!("{}: {finding}", program.name);
        }
        assert!(findings.iter().all(|f| f.severity < Severity::Error), "{}", program.name);
        assert!(findings.iter().all(|f| f.rule != "about"), "{}", program.name);
        assert_eq!(saved.about.description, program.description);
        assert!(saved.about.author.starts_with("moec") && !saved.about.version.is_empty());
        let described = saved.program.described.values().flat_map(|d| d.inputs.iter().chain(&d.states));
        assert!(described.clone().count() > 0 && described.into_iter().all(|f| f.about.contains("f16 [")));
        // The functions of a package share their state, in the reference and in the executor.
        let (mut states, mut exec_states) = (States::new(), exec::States::default());
        for function in &program.functions {
            let given = inputs(function, &mut store);
            let tensors: BTreeMap<String, Tensor> =
                given.iter().map(|(n, shape, x)| (n.clone(), Tensor::f16(shape, x).unwrap())).collect();
            let named: Vec<(&str, &[f32])> = given.iter().map(|(n, _, x)| (&**n, &**x)).collect();
            let want = call(program, &function.name, &store, &named, &mut states, Rounding::None);
            let executor = Executor::new(&saved, Some(&function.name)).unwrap();
            let got = executor.run(&tensors, &mut exec_states).unwrap();
            let stored = states.iter().map(|(n, x)| (n, x, exec_states.get(n).unwrap().to_f32()));
            let results = want.iter().map(|(n, x)| (n, x, got[n].to_f32()));
            for (name, want, got) in results.chain(stored) {
                let error = difference(want, &got);
                println!("{} {} {name}: {error:.1e}", program.name, function.name);
                assert!(error < 5e-3, "{} {} {name}: {error}", program.name, function.name);
            }
        }
    }
}
