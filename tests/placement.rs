//! Placements for devices with a neural processing unit or a GPU: the passes' decisions for real models, with
//! only legal operators on each unit.
//!
//! `cargo xtask test placement` runs them.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by panicking, and says what it skips"
)]

#[path = "placement/hazards.rs"]
mod hazards;
#[path = "placement/program.rs"]
mod program;
use crate::support;

use moec_base::progress::Progress;
use moec_config::{Config, Overflow};
use moec_costs::model::Model;
use moec_costs::request::placed;
use moec_costs::timeline::Queue;
use moec_costs::units::Units;
use moec_device::{BUILT_IN, Device};
use moec_import::ImportOptions;
use moec_ir::placement::{OpAssignment, Placement};
use moec_ir::text::parse_placement;
use moec_ir::{EntryKind, Op, Operand, Role, WeightClass};
use moec_passes::outline_graphs::Statics;
use moec_pipeline::{Candidate, Change, Compilation, Inputs, QualityProbe, Stops};
use moec_profile::{Chunk, Origin, Profile, Reading, Routes, Routing, Trace};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use support::{GRAPHS, Setup, checkpoint, ferris};

const CHUNK: u32 = 64;

/// Devices with a neural processing unit.
fn devices() -> Vec<Device> {
    let all = BUILT_IN.iter().map(|(name, _)| Device::find(name).unwrap());
    all.filter(|d| Units::of(d).is_some()).collect()
}

#[test]
fn network_with_an_unsupported_activation_is_refused_by_name() {
    let device = Device::find("m2-ultra").unwrap();
    let refused =
        compile(&checkpoint("prosparse"), &device, ATTENTION_ON_NPU, "assign_residency", None, &mut |_| {});
    let e = refused.unwrap_err();
    let message = format!("{e}: {}", e.causes.join(", "));
    assert!(message.contains("`layers.0.ffn` cannot be a graph") && message.contains("FATReLU"), "{message}");
    // Under `auto` the network stays on the CPU, and the placement says why.
    compile(&checkpoint("prosparse"), &device, "", "assign_residency", None, &mut |c| {
        let ops = &c.placed.placement.as_ref().unwrap().ops;
        let mut networks = ops.iter().filter(|o| o.op == "linear_glu");
        assert!(networks.all(|o| o.unit == 0 && o.why.contains("FATReLU")), "{ops:?}");
    })
    .unwrap();
}

/// A profile as skewed as those of large models, identical on every machine. Expert `e` is chosen about half
/// as often as expert `e / 2`, and the last expert of every layer hardly ever.
fn skewed(spec: &moec_import::ModelSpec, routers: &[(u32, usize, usize)]) -> Profile {
    let mut state = 1_u32;
    let mut random = move |below: usize| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as usize % below
    };
    let mut layers: Vec<Routing> =
        routers.iter().map(|&(layer, experts, k)| Routing::new(layer, k as u32, experts)).collect();
    let mut trace = Trace::new(CHUNK);
    for _ in 0..4 {
        trace.begin();
        for _ in 0..8 {
            let mut loads = Vec::new();
            for layer in &mut layers {
                let n = layer.chosen.len();
                let mut own = vec![0_u16; n];
                for _ in 0..CHUNK {
                    let mut chosen: Vec<usize> = Vec::new();
                    while chosen.len() < layer.k as usize {
                        let (a, b) = (random(n), random(n));
                        let e = a.min(b);
                        if !chosen.contains(&e) {
                            chosen.push(e);
                        }
                    }
                    for (i, &a) in chosen.iter().enumerate() {
                        own[a] += 1;
                        layer.chosen[a] += 1;
                        for &b in &chosen[..i] {
                            let pair = layer.pair(a, b).unwrap();
                            layer.together[pair] += 1;
                        }
                    }
                }
                layer.tokens += u64::from(CHUNK);
                loads.extend(own);
            }
            trace.push(Chunk { tokens: CHUNK, loads });
        }
    }
    let origin = Origin {
        family: spec.family.to_owned(),
        hidden: spec.hidden as u32,
        vocab: spec.vocab as u32,
        layers: spec.layers.len() as u32,
        checkpoint: [0; 32],
    };
    let (reading, weights) = (Reading::default(), BTreeMap::new());
    Profile {
        origin,
        reading,
        layers,
        trace,
        saliency: Vec::new(),
        weights,
        routes: Routes::default(),
        correlations: Vec::new(),
        neurons: Vec::new(),
        samples: Vec::new(),
        gates: Vec::new(),
        confidence: None,
        losses: Vec::new(),
    }
}

/// Compiles for a device up to a pass, and calls `visit` with the result.
fn compile(
    source: &Path,
    device: &Device,
    more: &str,
    pass: &str,
    quality: Option<&dyn QualityProbe>,
    visit: &mut dyn FnMut(&Compilation<'_>),
) -> moec_base::Result<()> {
    let setup = Setup { format: "f16", chunk: CHUNK as usize, batch: &[1], context: 128 };
    compile_with(setup, source, device, more, pass, quality, visit)
}

/// Like [`compile`], with other shapes.
fn compile_with(
    setup: Setup<'_>,
    source: &Path,
    device: &Device,
    more: &str,
    pass: &str,
    quality: Option<&dyn QualityProbe>,
    visit: &mut dyn FnMut(&Compilation<'_>),
) -> moec_base::Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let toml = setup.write(source, folder.path());
    fs::write(&toml, fs::read_to_string(&toml).unwrap() + more).unwrap();
    let until = |pass| Stops { stop_after: Some(pass), ..Stops::default() };
    with_inputs(&toml, device, &mut |inputs| {
        let mut c = Compilation::new(Inputs { quality, ..inputs });
        c.run(until(pass), &Progress::silent(), &mut |_| {})?;
        visit(&c);
        Ok(())
    })
}

/// Calls `visit` with the inputs of a build for a device, which have a [`skewed`] profile.
fn with_inputs(
    toml: &Path,
    device: &Device,
    visit: &mut dyn FnMut(Inputs<'_>) -> moec_base::Result<()>,
) -> moec_base::Result<()> {
    let config = Config::load(toml).unwrap();
    let (checkpoint, spec) = moec_import::open(&config.model.source, &ImportOptions::default()).unwrap();
    let target = moec_cpu::CpuTarget::new(device).unwrap();
    let mut lowered = Compilation::new(Inputs::new(&config, &checkpoint, &spec, &target));
    let until = Stops { stop_after: Some("lower"), ..Stops::default() };
    lowered.run(until, &Progress::silent(), &mut |_| {}).unwrap();
    let routers = lowered.module.entries[0].nodes.iter().filter_map(|n| match &n.op {
        Op::Router(d) => Some((n.scope.layer.unwrap(), d.experts, d.k)),
        _ => None,
    });
    let profile = skewed(&spec, &routers.collect::<Vec<_>>());
    let inputs = Inputs::new(&config, &checkpoint, &spec, &target);
    visit(Inputs { units: Units::of(device), profile: Some(&profile), ..inputs })
}

#[test]
fn every_operator_has_a_unit_where_it_is_legal() {
    for device in devices() {
        let units = Units::of(&device).unwrap();
        // Graphs of phones hold no state, which attention would need.
        let attention = if device.backend == "coreml" { "attention = \"npu\"\n" } else { "" };
        let npu = format!("[placement]\n{attention}experts = \"npu\"\n");
        let configs = ["", &npu, "[placement]\nattention = \"cpu\"\n"];
        for source in GRAPHS.into_iter().map(checkpoint).chain([ferris()]) {
            for config in configs {
                compile(&source, &device, config, "assign_residency", None, &mut |c| {
                    let p = c.placed.placement.as_ref().unwrap();
                    for op in p.ops.iter().filter(|o| o.unit == units.npu_index()) {
                        assert!(units.npu.is_legal(&op.op), "{} of {} in {source:?}", op.op, op.scope);
                        assert!(!config.contains("cpu") || op.op == "expert_ffn", "{op:?}");
                    }
                    for graph in &c.module.entries {
                        let placed = p.ops.iter().filter(|o| o.entry == graph.kind && o.op != "expert_ffn");
                        let of_graph = graph.nodes.iter().filter(|n| !matches!(n.op, Op::ExpertFfn { .. }));
                        let placed: u32 = placed.map(|o| o.nodes).sum();
                        assert_eq!(placed as usize, of_graph.count(), "{source:?}");
                        assert!(
                            graph.nodes.iter().all(|n| units.npu.row(n.op.name()).is_some()),
                            "{source:?}"
                        );
                    }
                    if config.contains("npu") {
                        let npu = |t: &moec_ir::placement::ExpertTable| {
                            t.groups.iter().all(|g| g.unit == units.npu_index())
                        };
                        assert!(p.experts.iter().all(npu), "{source:?}");
                    }
                    assert!(parse_placement(&p.to_string()).unwrap() == *p, "{source:?}");
                })
                .unwrap();
            }
        }
    }
}

#[test]
fn attention_of_prompts_and_decoding_is_on_one_unit() {
    let device = Device::find("m2-ultra").unwrap();
    let units = Units::of(&device).unwrap();
    // Decoding a token costs less on the CPU, including launches, and the KV cache is on the unit of
    // attention.
    for (setting, unit) in [("auto", units.cpu_index()), ("npu", units.npu_index())] {
        let more = format!("[placement]\nattention = \"{setting}\"\n");
        compile(&ferris(), &device, &more, "assign_residency", None, &mut |c| {
            let p = c.placed.placement.as_ref().unwrap();
            let attention = p.ops.iter().filter(|o| o.op == "attention");
            assert_eq!(attention.map(|o| o.unit).collect::<Vec<_>>(), [unit, unit], "{setting}");
            // Residual additions and routers stay on the CPU (NPUMoE, §3.2 and Table 4).
            for op in ["add", "router", "dispatch", "combine", "embed"] {
                assert!(p.ops.iter().filter(|o| o.op == op).all(|o| o.unit == units.cpu_index()), "{op}");
            }
        })
        .unwrap();
    }
}

/// A checkpoint with one layer of Phi-tiny's shapes, 4096 channels and 16 experts. All weights are zero, in a
/// sparse file.
fn phi_layer(folder: &Path) {
    let (hidden, inner, experts, vocab, q, kv) = (4096, 448, 16, 320, 4096, 1024);
    let text = fs::read_to_string(checkpoint("phimoe").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    for (key, value) in [
        ("hidden_size", hidden),
        ("intermediate_size", inner),
        ("num_local_experts", experts),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 8),
        ("num_hidden_layers", 1),
        ("max_position_embeddings", 4096),
    ] {
        config[key] = value.into();
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut tensors: Vec<(String, Vec<usize>)> = vec![
        ("lm_head.weight".into(), vec![vocab, hidden]),
        ("lm_head.bias".into(), vec![vocab]),
        ("model.embed_tokens.weight".into(), vec![vocab, hidden]),
        ("model.layers.0.block_sparse_moe.gate.weight".into(), vec![experts, hidden]),
    ];
    for norm in ["model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm"] {
        tensors.extend(["weight", "bias"].map(|part| (format!("{norm}.{part}"), vec![hidden])));
    }
    for (part, rows, cols) in [("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("o", hidden, q)] {
        let name = format!("model.layers.0.self_attn.{part}_proj");
        tensors.push((format!("{name}.weight"), vec![rows, cols]));
        tensors.push((format!("{name}.bias"), vec![rows]));
    }
    for e in 0..experts {
        for (part, shape) in [("w1", [inner, hidden]), ("w2", [hidden, inner]), ("w3", [inner, hidden])] {
            let name = format!("model.layers.0.block_sparse_moe.experts.{e}.{part}.weight");
            tensors.push((name, shape.into()));
        }
    }
    let mut at = 0;
    let header: serde_json::Map<String, Value> = tensors
        .into_iter()
        .map(|(name, shape)| {
            let bytes = 2 * shape.iter().product::<usize>();
            let value =
                serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, at + bytes]});
            at += bytes;
            (name, value)
        })
        .collect();
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    let path = folder.join("model.safetensors");
    fs::write(&path, &bytes).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len((bytes.len() + at) as u64).unwrap();
}

/// Prompts are faster on the NPU, decoding is slower: the typical request decides for both together.
#[test]
fn attention_is_placed_where_a_request_takes_less_time() {
    let device = Device::find("m2-ultra").unwrap();
    let units = Units::of(&device).unwrap();
    let folder = tempfile::tempdir().unwrap();
    phi_layer(folder.path());
    let mut decisions = Vec::new();
    for (more, unit) in [
        // The default is a long prompt with a short answer.
        ("", units.npu_index()),
        ("[placement]\ngenerate = 512\n", units.cpu_index()),
        ("[placement]\nprompt = 9000\ngenerate = 0\n", units.npu_index()),
    ] {
        let setup = Setup { format: "f16", chunk: 256, batch: &[1, 4], context: 4096 };
        compile_with(setup, folder.path(), &device, more, "assign_residency", None, &mut |c| {
            let p = c.placed.placement.as_ref().unwrap();
            let attention = p.ops.iter().filter(|o| o.op == "attention");
            assert_eq!(attention.map(|o| o.unit).collect::<Vec<_>>(), [unit; 3], "{more}");
            let decision = c.placed.attention.clone().unwrap();
            assert_eq!(decision.chosen, p.unit(unit), "{more}");
            let [first, second] = decision.alternatives.as_slice() else { panic!("{decision:?}") };
            assert_eq!(decision.chosen, first.what);
            assert!(first.figures["request_ms"] < second.figures["request_ms"], "{decision:?}");
            decisions.push(decision);
        })
        .unwrap();
    }
    // The context holds 4096 tokens.
    for (d, (prompt, generated)) in decisions.iter().zip([(4088, 8), (3584, 512), (4096, 0)]) {
        assert_eq!(d.reason, format!("a request of {prompt} tokens with {generated} generated, simulated"));
    }
    // A long answer is faster on the CPU, whatever the prompt.
    let ms = |i: usize, unit: &str| {
        let on = decisions[i].alternatives.iter().find(|h| h.what == unit).unwrap();
        on.figures["request_ms"]
    };
    assert!(ms(1, "npu") > ms(0, "npu"), "{decisions:?}");
    // Only `auto` is decided by the request.
    for more in ["[placement]\nattention = \"npu\"\n", "[placement]\nattention = \"cpu\"\n"] {
        let setup = Setup { format: "f16", chunk: 256, batch: &[1], context: 2048 };
        compile_with(setup, folder.path(), &device, more, "assign_residency", None, &mut |c| {
            assert!(c.placed.attention.is_none());
        })
        .unwrap();
    }
}

/// Launches and weights are paid once for a chunk, and padding at the end of a prompt (NPUMoE, §5.8).
#[test]
fn long_prompts_get_larger_chunks() {
    let device = Device::find("m2-ultra").unwrap();
    let folder = tempfile::tempdir().unwrap();
    phi_layer(folder.path());
    let written = tempfile::tempdir().unwrap();
    let setup = Setup { format: "f16", chunk: 256, batch: &[1], context: 4096 };
    let toml = setup.write(folder.path(), written.path());
    let text = fs::read_to_string(&toml).unwrap().replace("prefill_chunk = 256", "prefill_chunk = \"auto\"");
    let mut chosen = Vec::new();
    for prompt in ["40", "200", "4000", "[40, 4000]"] {
        fs::write(&toml, format!("{text}[placement]\nprompt = {prompt}\n")).unwrap();
        with_inputs(&toml, &device, &mut |inputs| {
            let (tokens, decision) = moec_measure::chunk::choose(&inputs)?.unwrap();
            // All sizes that the context holds were simulated, and no other is faster.
            let ms = |d: &moec_passes::decisions::Alternative| d.figures["request_ms"];
            assert_eq!(decision.alternatives.len(), moec_measure::chunk::SIZES.len());
            assert!(decision.alternatives.iter().all(|a| ms(a) >= decision.figure("request_ms").unwrap()));
            assert_eq!(decision.chosen, tokens.to_string());
            chosen.push(tokens);
            // The build has that size.
            let mut c = Compilation::new(Inputs { chunk: Some(tokens), ..inputs });
            c.run(Stops { stop_after: Some("tier"), ..Stops::default() }, &Progress::silent(), &mut |_| {})?;
            assert_eq!(c.placed.placement.as_ref().unwrap().chunk as usize, tokens);
            assert_eq!(c.module.entries[0].kind, EntryKind::Prefill(tokens as u32));
            Ok(())
        })
        .unwrap();
    }
    assert!(chosen[0] < chosen[2] && chosen.is_sorted_by(|a, b| a <= b || *b == chosen[3]), "{chosen:?}");
    assert!((chosen[0]..=chosen[2]).contains(&chosen[3]), "{chosen:?}");
    // A size in the file is not replaced.
    setup.write(folder.path(), written.path());
    with_inputs(&toml, &device, &mut |inputs| {
        assert_eq!(moec_measure::chunk::choose(&inputs)?, None);
        Ok(())
    })
    .unwrap();
}

/// A call takes the smallest size that fits its tokens. More sizes mean less padding, and no more dropped
/// rows.
#[test]
fn graph_sizes_reduce_padding_and_drop_no_more_rows() {
    let device = Device::find("m2-ultra").unwrap();
    let mut rates = Vec::new();
    for sizes in [1, 2, 4, 8] {
        let more =
            format!("[placement]\nexperts = \"npu\"\n[experts]\ntiers = 1\ngroup = 4\nsizes = {sizes}\n");
        compile(&ferris(), &device, &more, "outline_graphs", None, &mut |c| {
            let p = c.placed.placement.as_ref().unwrap();
            moec_ir::verify::placement(p).unwrap();
            for table in &p.experts {
                for group in &table.groups {
                    assert!(group.sizes.len() <= sizes && (sizes > 1 || group.sizes.is_empty()));
                    let capacity = table.tiers[group.tier as usize];
                    assert_eq!(*group.sizes.last().unwrap_or(&capacity), capacity);
                    assert_eq!((group.rows(1, capacity) == capacity), group.sizes.len() <= 1);
                    assert_eq!(group.rows(capacity + 1, capacity), capacity);
                }
            }
            let functions: usize = c.placed.statics.sets.iter().map(|s| s.groups.len()).sum();
            assert_eq!(
                functions,
                c.placed.statics.graphs.iter().filter(|g| g.function.starts_with("cap")).count()
            );
            rates.push(p.experts.iter().map(|t| t.expected.unwrap()).collect::<Vec<_>>());
        })
        .unwrap();
    }
    for pair in rates.windows(2) {
        for (less, more) in pair[0].iter().zip(&pair[1]) {
            assert_eq!(less.overflow, more.overflow);
            assert!(more.padding <= less.padding, "{less:?} {more:?}");
        }
    }
    assert!(rates[2][0].padding < rates[0][0].padding - 0.03, "{:?} {:?}", rates[2][0], rates[0][0]);
}

/// Attention and everything else that the Neural Engine supports, except experts.
const ATTENTION_ON_NPU: &str = "[placement]\nexperts = \"cpu\"\nattention = \"npu\"\n";

/// Legalisation does not change the Graph of a part on the unit. The backend reports its counts for each
/// part.
#[test]
fn legalisation_is_counted_and_keeps_the_graph() {
    let device = Device::find("m2-ultra").unwrap();
    for family in GRAPHS {
        let mut texts = Vec::new();
        for pass in ["assign_residency", "outline_graphs"] {
            compile(&checkpoint(family), &device, ATTENTION_ON_NPU, pass, None, &mut |c| {
                texts.push(c.module.to_string());
                let made = &c.placed.legalised;
                assert_eq!(made.is_empty(), pass == "assign_residency", "{family}");
                let attention = made.iter().filter(|d| d.subject == "graph `layers.*.attn`");
                let layers: BTreeSet<u32> = attention.clone().filter_map(|d| d.layer).collect();
                if pass == "outline_graphs" {
                    let nodes = c.module.entries.iter().flat_map(|g| &g.nodes);
                    let attend = nodes.filter(|n| matches!(n.op, Op::Attention(_)));
                    assert_eq!(layers, attend.filter_map(|n| n.scope.layer).collect(), "{family}");
                }
                for d in attention {
                    // Projections of queries, keys, values and results; for latent attention also those of
                    // the latent.
                    let (layers, changes) =
                        (d.figure("convolutions").unwrap(), d.figure("layout_changes").unwrap());
                    assert!((4.0..=7.0).contains(&layers), "{family}: {d:?}");
                    // Input and output rows, angles if there is a rotation, operands and result of attention.
                    assert!((6.0..=7.0).contains(&changes), "{family}: {d:?}");
                }
                for d in made.iter().filter(|d| d.subject == "graph `head`") {
                    assert_eq!(
                        (d.figure("convolutions"), d.figure("layout_changes")),
                        (Some(1.0), Some(2.0)),
                        "{family}"
                    );
                }
            })
            .unwrap();
        }
        assert_eq!(texts[0], texts[1], "{family}");
    }
}

/// A mixer other than attention stays on the CPU of a device with static graphs, and costs what its own
/// matrices cost. It counts neither as attention nor as a dense network, wherever those run.
#[test]
fn mixers_are_costed_separately_from_attention_and_ffn() {
    let device = Device::find("m2-ultra").unwrap();
    let units = Units::of(&device).unwrap();
    compile(
        &checkpoint("qwen3_next"),
        &device,
        "[placement]\nexperts = \"npu\"\n",
        "assign_residency",
        None,
        &mut |c| {
            let p = c.placed.placement.as_ref().unwrap();
            let mixers: Vec<_> = p.ops.iter().filter(|o| o.scope.role() == Role::Mixer).collect();
            for op in &mixers {
                assert_eq!(op.unit, units.cpu_index(), "{} of {}: {}", op.op, op.scope, op.why);
            }
            // Operators with exact weights have another reason.
            assert!(mixers.iter().any(|op| op.why == "graphs cannot hold recurrent states"), "{mixers:?}");
            let layers = c.inputs.spec().unwrap().layers.len() as u32;
            let model = Model::of(&c.module, "a hybrid", layers).unwrap();
            let prefill = c.module.entries.iter().find(|g| g.kind.is_prefill()).unwrap();
            let mut both = BTreeSet::new();
            for layer in &model.layers {
                let own = || prefill.nodes.iter().filter(|n| n.scope.layer == Some(layer.layer));
                let has = |role| own().any(|n| n.scope.role() == role);
                let found = (layer.attention > 0, layer.mixer > 0);
                assert_eq!(found, (has(Role::Attention), has(Role::Mixer)), "layer {}", layer.layer);
                both.insert(found);
                // Dense networks are counted separately.
                let weights = |n: &moec_ir::Node| match (&n.op, n.inputs.get(1)) {
                    (Op::Linear { .. } | Op::LinearGlu { .. }, Some(&Operand::Weight(w))) => {
                        let weight = c.module.weight(w);
                        let counts = weight.class != WeightClass::Exact && n.scope.role() == Role::Network;
                        if counts { weight.shape.iter().product::<usize>() as u64 } else { 0 }
                    }
                    _ => 0,
                };
                assert_eq!(layer.dense, own().map(weights).sum::<u64>(), "layer {}", layer.layer);
            }
            assert_eq!(both, BTreeSet::from([(true, false), (false, true)]));
            // Mixers do not follow dense networks to the unit.
            let mut moved = p.clone();
            let network = |o: &OpAssignment| o.scope.role() == Role::Network && o.op.starts_with("linear");
            for op in &mut moved.ops {
                op.unit = if op.scope.role() == Role::Mixer { units.npu_index() } else { units.cpu_index() };
            }
            assert_eq!(placed(&moved, &units).dense, Queue::Cpu);
            moved.ops.iter_mut().filter(|o| network(o)).for_each(|o| o.unit = units.npu_index());
            assert_eq!(placed(&moved, &units).dense, Queue::Npu);
        },
    )
    .unwrap();
}

/// A dense network may be on the unit for prompts only; it is still one part.
#[test]
fn part_may_be_on_the_npu_only_for_prompts() {
    let device = Device::find("m2-ultra").unwrap();
    let units = Units::of(&device).unwrap();
    compile(&checkpoint("qwen2_moe"), &device, ATTENTION_ON_NPU, "assign_residency", None, &mut |c| {
        let (module, mut placement) = (c.module.clone(), c.placed.placement.clone().unwrap());
        let here =
            |o: &OpAssignment| matches!(o.entry, EntryKind::Decode(_)) && o.scope.role() != Role::Attention;
        placement.ops.iter_mut().filter(|o| here(o)).for_each(|o| o.unit = units.cpu_index());
        let statics = Statics::of(&module, &placement, &units).unwrap();
        let of =
            |kind: fn(&EntryKind) -> bool| statics.calls.iter().filter(|p| kind(&p.boundary.entry)).count();
        let layers = c.inputs.spec().unwrap().layers.len();
        assert_eq!(of(|k| matches!(k, EntryKind::Decode(_))), layers);
        assert_eq!(of(|k| matches!(k, EntryKind::Prefill(_))), 2 * layers + 1);
    })
    .unwrap();
}

/// Every device with an NPU also has a CPU, which computes the rows past a capacity. No rows are dropped
/// unless the user requests it.
#[test]
fn rows_past_a_capacity_spill_to_the_cpu_by_default() {
    let npu = "[placement]\nexperts = \"npu\"\n";
    let prune = format!("{npu}[experts]\noverflow = \"prune\"\n");
    let auto = format!("{npu}[experts]\noverflow = \"auto\"\n");
    for device in devices() {
        let units = Units::of(&device).unwrap();
        for (more, overflow, fallback) in [
            (npu, Overflow::Spill, Some(units.cpu_index())),
            (&auto, Overflow::Spill, Some(units.cpu_index())),
            (&prune, Overflow::Prune, None),
        ] {
            compile(&ferris(), &device, more, "tier", None, &mut |c| {
                let p = c.placed.placement.as_ref().unwrap();
                assert_eq!(p.overflow, overflow, "{}: {more}", device.name);
                let rows: Vec<_> = p.experts.iter().flat_map(|t| &t.experts).collect();
                assert!(
                    !rows.is_empty() && rows.iter().all(|r| r.fallback == fallback),
                    "{}: {more}",
                    device.name
                );
                assert_eq!(p.units[units.cpu_index() as usize], device.units[0].name);
            })
            .unwrap();
        }
    }
}

/// A quality probe that reports a loss of one percent for each percent of dropped pairs.
#[derive(Debug)]
struct Proportional;

impl Proportional {
    fn loss(placement: &Placement) -> f64 {
        let tables = &placement.experts;
        let sum: f32 = tables.iter().map(|t| t.expected.unwrap().overflow).sum();
        f64::from(sum) / tables.len() as f64
    }
}

impl QualityProbe for Proportional {
    fn perplexity_increase(&self, candidate: &Candidate<'_>) -> moec_base::Result<f64> {
        Ok(Self::loss(candidate.placement))
    }

    fn increase_by(&self, _: &Change<'_>) -> moec_base::Result<f64> {
        unreachable!("only placements are measured")
    }
}

#[test]
fn a_quality_budget_chooses_the_capacities() {
    // So small experts would share a capacity to save launches; with free launches, rows decide.
    let mut device = Device::find("m2-ultra").unwrap();
    device.units.iter_mut().for_each(|u| (u.dispatch_cost_us, u.sync_cost_us) = (None, None));
    let mut rows = Vec::new();
    for budget in ["0.1%", "1%", "10%"] {
        let more = format!(
            "[quality]\nmax_perplexity_increase = \"{budget}\"\n[experts]\nsizes = 1\n[placement]\nexperts = \"npu\"\n"
        );
        compile(&ferris(), &device, &more, "tier", Some(&Proportional), &mut |c| {
            let p = c.placed.placement.as_ref().unwrap();
            let budget = c.inputs.config.quality.max_perplexity_increase.unwrap();
            // If the user allows a loss, rows are dropped.
            assert_eq!(p.overflow, Overflow::Prune);
            assert!(Proportional::loss(p) <= budget);
            rows.push(p.experts.iter().flat_map(|t| &t.experts).map(|r| r.capacity).sum::<u32>());
        })
        .unwrap();
    }
    assert!(rows.is_sorted_by(|a, b| a > b), "a larger budget computes fewer rows: {rows:?}");
    // Without a quality probe a limit on the loss cannot be kept; spilling needs none.
    let budget = "[quality]\nmax_perplexity_increase = \"1%\"\n";
    let e = compile(&ferris(), &device, budget, "tier", None, &mut |_| {}).unwrap_err();
    assert!(e.to_string().contains("m2-ultra") && e.hint.unwrap().contains("coverage"));
    let spill = format!("{budget}[experts]\noverflow = \"spill\"\n");
    compile(&ferris(), &device, &spill, "tier", None, &mut |_| {}).unwrap();
}

/// Experts leave the CPU if another unit is expected to be faster, including copies, as far as its memory has
/// room. The decision states the costs on both sides.
#[test]
fn experts_are_placed_where_they_cost_less_with_a_reason() {
    let text = fs::read_to_string(support::root().join("targets/cuda/cuda.toml")).unwrap();
    let near = text.replace("latency_us = 5\n", "latency_us = 0\n").replace("value = 5,", "value = 0,");
    assert_ne!(text, near);
    let small = near.replace("value = 8589934592", "value = 4000000");
    let folder = tempfile::tempdir().unwrap();
    let mut placed = Vec::new();
    for (name, text) in [("far", &text), ("near", &near), ("small", &small)] {
        let path = folder.path().join(format!("{name}.toml"));
        fs::write(&path, text).unwrap();
        let device = Device::find(path.to_str().unwrap()).unwrap();
        compile(&ferris(), &device, "[placement]\nexperts = \"auto\"\n", "assign_units", None, &mut |c| {
            let table = &c.placed.placement.as_ref().unwrap().experts;
            let gone: Vec<usize> =
                table.iter().map(|t| t.experts.iter().filter(|e| e.unit != 0).count()).collect();
            let sums = |key: &str| c.placed.of_experts.iter().map(|d| d.figures[key]).sum::<f64>();
            placed.push((gone, sums("all_on_the_cpu_us"), sums("as_placed_us"), c.placed.of_experts.clone()));
        })
        .unwrap();
    }
    let [(far, cpu, as_far, why), (near, _, as_near, all), (some, _, as_some, part)] = placed.as_slice()
    else {
        panic!("{placed:?}")
    };
    // A launch and two copies take 15 µs, which is longer than an expert of this size on the CPU.
    assert!(far.iter().all(|&n| n == 0) && as_far == cpu, "{why:?}");
    assert!(why.iter().all(|d| d.reason == "no other unit costs less and has room"), "{why:?}");
    assert!(near.iter().all(|&n| n == 24) && as_near < cpu, "{all:?}");
    assert!(all.iter().all(|d| d.reason == "they cost less there than on the CPU"), "{all:?}");
    let alternative: f64 = all.iter().map(|d| d.figures["all_beside_it_us"]).sum();
    assert!((alternative - as_near).abs() < 1e-9 * alternative, "{all:?}");
    // The first layers fill the memory; of the last layer that fits in part, the most popular experts are
    // there.
    assert!(some.iter().sum::<usize>() < 4 * 24 && as_near < as_some && as_some < cpu, "{part:?}");
    assert!(some.is_sorted_by(|a, b| a >= b) && some[0] > 0, "{some:?}");
}
