//! Pass `fuse` does not change any bit of the results: prompts, chunk by chunk, and decoding of several
//! sequences.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_base::progress::Progress;
use moec_bundle::read::Bundle;
use moec_bundle::write;
use moec_config::Config;
use moec_import::ImportOptions;
use moec_passes::tune;
use moec_pipeline::{Compilation, Inputs, Stops};
use moec_runtime::{Engine, LogitRows, Options, Program};
use moec_targets::target;
use std::path::Path;
use support::{FAMILIES, Setup, checkpoint, expected};

/// Bits of all logits of a prompt and of some tokens after it; and the number of steps of each entry point.
fn run(toml: &Path, last: &str, ids: &[u32], bundle: &Path) -> (Vec<u32>, Vec<usize>) {
    let config = Config::load(toml).unwrap();
    let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let target = target("native").unwrap().with_activations(config.weights.activations);
    let mut c = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
    let stops = Stops { stop_after: Some(last), ..Stops::default() };
    c.run(stops, &Progress::silent(), &mut |_| {}).unwrap();
    let planned = c.planned.as_mut().unwrap();
    if planned.decisions.is_none() {
        // A bundle needs decisions; those of tuning without measurements do not change the kernels.
        let (mut plan, mut kernels) = (planned.plan.clone(), planned.kernels.clone());
        planned.decisions = Some(tune::tune(&mut plan, &mut kernels, &target, None).unwrap());
    }
    let steps = planned.plan.entries.iter().map(|e| e.steps.len()).collect();
    let compiled = c.finish().unwrap();
    write::write(&compiled, bundle, write::Options::default(), &Progress::silent()).unwrap();
    let bundle = Bundle::open(bundle).unwrap();
    let unit = bundle.unit().unwrap();
    let program = Program::new(bundle.plan.clone(), &|s| unit.resolve(s)).unwrap();
    let mut bits = Vec::new();
    let options = Options { threads: Some(2), ..Options::default() };
    let mut engine = Engine::open(&program, &bundle.folder, options).unwrap();
    for slot in 0..2 {
        let mut sink = |_: usize, logits: &[f32]| {
            bits.extend(logits.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.prefill(slot, 0, &ids[slot as usize..40], LogitRows::All, &mut sink).unwrap();
    }
    for step in 0..4 {
        let rows: Vec<_> = (0..2).map(|s| (s, 40 - s as usize + step, ids[step + s as usize])).collect();
        let mut sink = |_: usize, logits: &[f32]| {
            bits.extend(logits.iter().map(|x| x.to_bits()));
            Ok(())
        };
        engine.decode(&rows, &mut sink).unwrap();
    }
    (bits, steps)
}

/// Compares plans before and after `fuse` for every family; with `whole` also after all passes. The later
/// passes do not depend on the format.
fn compare(format: &str, activations: &str, whole: bool) {
    for family in FAMILIES {
        let source = checkpoint(family);
        let ids = expected(&source).ids;
        let folder = tempfile::tempdir().unwrap();
        // Chunks of 16 and 24 tokens, so that some keys are written in whole vectors and some one at a time.
        let toml = Setup { format, chunk: 24, batch: &[2], context: 64 }.write(&source, folder.path());
        let setting = format!("activations = \"{activations}\"");
        let text = std::fs::read_to_string(&toml).unwrap().replace("activations = \"f32\"", &setting);
        std::fs::write(&toml, text).unwrap();
        let at = |name: &str| folder.path().join(name);
        let (before, steps) = run(&toml, "layout", &ids, &at("before"));
        let (after, fewer) = run(&toml, "fuse", &ids, &at("after"));
        assert!(before == after, "{family} in {format}");
        assert!(before.iter().any(|&x| x != before[0]), "{family} in {format}: all logits are the same");
        // In f32, models with latent attention have nothing to fuse. With q8, norms before byte products
        // always fuse.
        let fuses = steps.iter().zip(&fewer).all(|(a, b)| b < a || (format != "q8" && b == a));
        assert!(fuses, "{family} in {format}: {fewer:?} steps of {steps:?}");
        if whole {
            let (whole, _) = run(&toml, "barriers", &ids, &at("whole"));
            assert!(before == whole, "{family} in {format}, all passes");
        }
    }
}

#[test]
fn fused_steps_give_the_same_bits_in_f32() {
    compare("f32", "f32", false);
}

#[test]
fn fused_steps_give_the_same_bits_in_bf16() {
    compare("bf16", "auto", true);
}

#[test]
fn fused_steps_give_the_same_bits_in_q8() {
    compare("q8", "auto", false);
}
