//! Tests of the Graphs of every golden checkpoint, and of the choices of lowering.

use super::support::{Folder, golden, shapes, spec};
use moec_import::lower::{Shapes, lower};
use moec_import::{ImportOptions, ModelSpec};
use moec_ir::eval::Evaluator;
use moec_ir::text::parse_module;
use moec_ir::{EntryKind, Module, Op, Part, Scope, StateKind, WeightClass};
use moec_testing::checkpoints::{CHECKPOINTS, Checkpoint};
use serde_json::json;

fn module(spec: &ModelSpec, shapes: &Shapes) -> Module {
    let module = lower(spec, shapes).unwrap();
    moec_ir::verify::module(&module).unwrap();
    module
}

fn ops<'a>(module: &'a Module, name: &'a str) -> impl Iterator<Item = &'a Op> {
    module.entries[0].nodes.iter().map(|n| &n.op).filter(move |op| op.name() == name)
}

#[test]
fn the_text_form_reads_back() {
    for Checkpoint { name: family, .. } in CHECKPOINTS {
        let module = module(&spec(&golden("hf").join(family)), &shapes(64, 20));
        assert_eq!(parse_module(&module.to_string()).unwrap(), module, "{family}");
    }
}

#[test]
fn one_entry_for_each_shape() {
    let shapes = Shapes { prefill_out_rows: 1, decode_batch: vec![1, 4], ..shapes(64, 16) };
    let module = module(&spec(&golden("hf/olmoe")), &shapes);
    let entries: Vec<_> = module.entries.iter().map(|g| (g.kind, g.ty(g.output).shape.clone())).collect();
    let expect = [(EntryKind::Prefill(16), 1), (EntryKind::Decode(1), 1), (EntryKind::Decode(4), 4)];
    assert_eq!(entries, expect.map(|(kind, rows)| (kind, vec![rows, 320])));
    // Entries share weights and states.
    assert_eq!(module.states.len(), 4);
    assert_eq!(module.states[1].name, "layers.0.v");
    assert_eq!(module.states[1].ty.shape, [2, 4, 64, 16]);
}

#[test]
fn names_and_classes_of_weights() {
    let module = module(&spec(&golden("hf/qwen2_moe")), &shapes(64, 16));
    let named: Vec<_> = module
        .weights
        .iter()
        .filter(|w| !w.name.starts_with("layers.1") && !w.name.starts_with("layers.2"))
        .map(|w| format!("{} {} {:?}", w.name, w.class.name(), w.shape))
        .collect();
    insta::assert_snapshot!(named.join("\n"), @"
    embed embeddings [320, 64]
    rope.inv_freq exact [8]
    layers.0.attn.norm exact [64]
    layers.0.attn.q attention [64, 64]
    layers.0.attn.q.bias exact [64]
    layers.0.attn.k attention [32, 64]
    layers.0.attn.k.bias exact [32]
    layers.0.attn.v attention [32, 64]
    layers.0.attn.v.bias exact [32]
    layers.0.attn.o attention [64, 64]
    layers.0.ffn.norm exact [64]
    layers.0.moe.router exact [6, 64]
    layers.0.moe.gate_up experts [6, 96, 64]
    layers.0.moe.down experts [6, 64, 48]
    layers.0.shared.gate attention [64, 64]
    layers.0.shared.up attention [64, 64]
    layers.0.shared.down attention [64, 64]
    layers.0.shared.weight exact [1, 64]
    norm exact [64]
    head embeddings [320, 64]
    ");
    let exact = module.weights.iter().filter(|w| w.class == WeightClass::Exact);
    assert!(exact.clone().all(|w| w.shape.len() < 3) && exact.count() > 10);
}

#[test]
fn a_layer_of_latent_attention() {
    let module = module(&spec(&golden("hf/deepseek_v3")), &shapes(64, 16));
    let nodes = module.entries[0].nodes.iter().filter(|n| n.scope == Scope::in_layer(1, Part::ATTN));
    let names: Vec<_> = nodes.map(|n| n.op.name()).collect();
    insta::assert_snapshot!(names.join(" "), @"rms_norm linear rms_norm linear slice slice head_linear rope concat linear slice rms_norm slice rope concat cache_write attention head_linear linear add");
    // Only one head of latent and rotated channels is cached.
    let states: Vec<_> = module.states.iter().map(|s| (s.name.as_str(), s.ty.shape.as_slice())).collect();
    assert_eq!(states[1], ("layers.1.k", [2, 1, 64, 40].as_slice()));
    assert_eq!(states.len(), 3);
}

/// Llama 4: rotated layers have a chunk, unless it is as long as the context; others have a
/// position-dependent factor on queries.
#[test]
fn chunked_layers_and_layers_without_rotation_are_lowered() {
    let spec = spec(&golden("hf/llama4"));
    let module = |context| module(&spec, &shapes(context, 8));
    let names = |layer, part| {
        let (module, scope) = (module(64), Scope::in_layer(layer, part));
        let nodes = module.entries[0].nodes.iter().filter(|n| n.scope == scope);
        nodes.map(|n| n.op.name()).collect::<Vec<_>>().join(" ")
    };
    insta::assert_snapshot!(names(2, Part::ATTN), @"rms_norm linear linear linear rope rope rms_norm rms_norm cache_write cache_write attention linear add");
    insta::assert_snapshot!(names(3, Part::ATTN), @"rms_norm linear linear linear scale_by_position cache_write cache_write attention linear add");
    insta::assert_snapshot!(names(3, Part::FFN), @"rms_norm linear router mul clamp dispatch expert_ffn combine linear linear silu mul linear add add");
    let chunks = |context| {
        let module = module(context);
        let of = ops(&module, "attention").map(|op| match op {
            Op::Attention(d) => (d.window, d.chunked),
            _ => (None, false),
        });
        of.collect::<Vec<_>>()
    };
    let (chunk, all) = ((Some(16), true), (None, false));
    assert_eq!(chunks(64), [chunk, chunk, chunk, all]);
    assert_eq!(chunks(16), [all; 4]);
}

#[test]
fn gated_shared_expert_is_lowered() {
    let module = module(&spec(&golden("hf/qwen2_moe")), &shapes(64, 16));
    let nodes = module.entries[0].nodes.iter().filter(|n| n.scope == Scope::in_layer(1, Part::FFN));
    let names: Vec<_> = nodes.map(|n| n.op.name()).collect();
    insta::assert_snapshot!(names.join(" "), @"rms_norm linear router dispatch expert_ffn combine linear linear silu mul linear linear sigmoid mul add add");
}

#[test]
fn head_runs_only_on_output_rows() {
    let module = module(&spec(&golden("hf/olmoe")), &shapes(64, 16));
    let nodes = module.entries[0].nodes.iter().filter(|n| n.scope == Part::HEAD.into());
    assert_eq!(nodes.map(|n| n.op.name()).collect::<Vec<_>>(), ["gather_rows", "rms_norm", "linear"]);
}

#[test]
fn window_as_long_as_the_context_is_dropped() {
    let spec = spec(&golden("hf/gpt_oss"));
    let windows = |context| {
        let module = module(&spec, &shapes(context, 8));
        let windows = ops(&module, "attention").map(|op| match op {
            Op::Attention(d) => d.window,
            _ => None,
        });
        windows.collect::<Vec<_>>()
    };
    assert_eq!(windows(64), [Some(16), None]);
    assert_eq!(windows(16), [None, None]);
}

#[test]
fn window_uses_a_ring_if_the_context_is_longer() {
    let spec = spec(&golden("hf/gpt_oss"));
    let state_sizes = |shapes: &Shapes| {
        let module = module(&spec, shapes);
        let of = |s: &moec_ir::StateDecl| (s.ty.shape[2], s.kind);
        module.states.iter().map(of).collect::<Vec<_>>()
    };
    let (ring, cache) = (StateKind::Ring { window: 16 }, StateKind::Cache);
    // Window and chunk are 16 + 31 rows, which need one block; 16 + 127 need two.
    assert_eq!(state_sizes(&shapes(512, 32)), [(128, ring), (128, ring), (512, cache), (512, cache)]);
    assert_eq!(state_sizes(&shapes(512, 128)), [(256, ring), (256, ring), (512, cache), (512, cache)]);
    assert_eq!(state_sizes(&shapes(128, 32)), [(128, cache); 4]);
    assert_eq!(state_sizes(&Shapes { rings: None, ..shapes(512, 32) }), [(512, cache); 4]);
}

#[test]
fn ring_and_full_cache_give_the_same_logits() {
    for family in ["gpt_oss", "llama4"] {
        let dir = golden("hf").join(family);
        let (checkpoint, spec) = moec_import::open(&dir, &ImportOptions::default()).unwrap();
        let ids: Vec<u32> = (0..400).map(|i| (i * 37 + i / 7) % 320).collect();
        let logits = |rings: bool| {
            let module = module(&spec, &Shapes { rings: rings.then_some(128), ..shapes(512, 32) });
            assert_eq!(module.states.iter().any(|s| s.kind != StateKind::Cache), rings);
            let mut evaluator = Evaluator::new(&module, &checkpoint);
            let all = evaluator.logits_from(0, 1, 0, &ids).unwrap();
            all.as_f32()[390 * 320..].to_vec()
        };
        assert_eq!(logits(true), logits(false), "{family}");
    }
}

#[test]
fn long_rope_frequencies_exist_only_for_long_contexts() {
    let folder = Folder::golden("phimoe").set("original_max_position_embeddings", 32).set(
        "rope_parameters",
        json!({
            "rope_type": "longrope", "rope_theta": 10_000.0,
            "short_factor": vec![1.0; 8], "long_factor": vec![4.0; 8], "short_mscale": 1.25, "long_mscale": 1.5,
        }),
    );
    let spec = spec(folder.write().path());
    let switch = |context| {
        let module = module(&spec, &shapes(context, 8));
        let angles: Vec<_> = ops(&module, "rope_angles").cloned().collect();
        let long = module.weights.iter().any(|w| w.name == "rope.inv_freq_long");
        match angles.as_slice() {
            [Op::RopeAngles { scale, switch }] => (*scale, switch.map(|s| (s.after, s.long_scale)), long),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(switch(32), (1.25, None, false));
    assert_eq!(switch(33), (1.25, Some((32, 1.5)), true));
}

#[test]
fn shapes_out_of_range_are_refused() {
    let spec = spec(&golden("hf/olmoe"));
    for bad in [
        Shapes { max_context: 0, ..shapes(64, 16) },
        Shapes { decode_batch: vec![1, 0], ..shapes(64, 16) },
        Shapes { slots: 1 << 40, ..shapes(64, 16) },
    ] {
        assert!(lower(&spec, &bad).is_err());
    }
}
