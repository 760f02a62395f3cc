//! Tests of checkpoints that each layout's own tool wrote (`golden/quantised/make.py`): decoded exactly, and
//! refused if damaged.

use super::support::{
    Folder, Tensor, distance, golden, load, logits, numbers, packed as held, refusal, shapes, spec,
};
use moec_import::lower::lower;
use moec_import::tensors::{Dim, Tensors};
use moec_import::{Checkpoint, ImportOptions};
use moec_ir::{Coded, Encoding, Format, Leaf, Source, WeightExpr};
use proptest::prelude::*;
use safetensors::SafeTensors;
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs;

const LAYOUTS: [&str; 18] = [
    "fp8_128",
    "fp8_32",
    "fp8_tensor",
    "fp8_channel",
    "int8_channel",
    "int8_zeros",
    "packed4_group",
    "packed4_zeros",
    "packed4_channel",
    "packed8_channel",
    "nvfp4",
    "nvfp4_modelopt",
    "mxfp4",
    "awq",
    "gptq",
    "gptq_sym",
    "gptq_act_order",
    "gptq_v2",
];

/// Hashes of the matrices by name, as dequantised by the layout's own tool.
fn hashes(layout: &str) -> BTreeMap<String, String> {
    let text = fs::read(golden("quantised/hashes.json")).unwrap();
    let mut all: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_slice(&text).unwrap();
    all.remove(layout).unwrap()
}

/// OLMoE with the matrices of a layer in a layout, and the plain checkpoint that it was made from.
fn quantised(layout: &str) -> [Folder; 2] {
    let path = golden("quantised").join(format!("{layout}.safetensors"));
    let bytes = fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let config = &header.metadata().as_ref().unwrap()["quantization_config"];
    let plain = Folder::golden("olmoe");
    let config: Value = serde_json::from_str(config).unwrap();
    let mut folder = plain.clone().set("quantization_config", config);
    for name in hashes(layout).keys() {
        folder.take(name);
    }
    folder.tensors.extend(load(&path));
    [folder, plain]
}

/// A matrix of a checkpoint.
fn take(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> WeightExpr {
    let tensors = Tensors::new(checkpoint.config(), checkpoint).unwrap();
    let dims: Vec<Dim> = shape.iter().map(|&n| Dim::new(n, "the test")).collect();
    tensors.take(name, &dims.iter().collect::<Vec<_>>()).unwrap_or_else(|e| panic!("{e:?}"))
}

#[test]
fn every_layout_decodes_like_its_tool() {
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 320).collect();
    for layout in LAYOUTS {
        let [folder, mut plain] = quantised(layout);
        let dir = folder.write();
        let checkpoint = Checkpoint::open(dir.path(), &ImportOptions::default()).unwrap();
        for (name, hash) in hashes(layout) {
            let shape = plain.tensors[&name].shape.clone();
            let [rows, cols] = shape[..] else { panic!("{name}") };
            let matrix = take(&checkpoint, &name, &shape);
            let read = |r: std::ops::Range<usize>, c: std::ops::Range<usize>| {
                let mut out = vec![0.0; r.len() * c.len()];
                matrix.read(0, r, c, &checkpoint, &mut out).unwrap();
                out
            };
            let all = read(0..rows, 0..cols);
            let bytes: Vec<u8> = all.iter().flat_map(|x| x.to_le_bytes()).collect();
            let found = moec_base::hashing::hex(&moec_base::hashing::sha256(&bytes));
            assert_eq!(found, hash, "{layout} {name}");
            for (r, c) in [(5..6, 0..cols), (3..rows - 2, 7..cols - 3), (17..40, 33..34), (0..rows, 15..17)] {
                let want: Vec<f32> = r.clone().flat_map(|r| all[r * cols..][c.clone()].to_vec()).collect();
                assert_eq!(read(r, c), want, "{layout} {name}");
            }
            plain.tensors.insert(name, Tensor::f32(&shape, &all));
        }
        let other = plain.write();
        assert_eq!(distance(&logits(dir.path(), &ids, 10), &logits(other.path(), &ids, 10)), 0.0, "{layout}");
        let (quantised, plain) = (spec(dir.path()), spec(other.path()));
        assert_eq!(
            (quantised.params, quantised.active_params),
            (plain.params, plain.active_params),
            "{layout}"
        );
        assert_eq!(
            quantised.warnings.len(),
            usize::from(folder.tensors.keys().any(|n| n.ends_with("input_scale"))),
            "{layout}: {:?}",
            quantised.warnings
        );
    }
}

#[test]
fn channel_scaled_codes_are_kept_unchanged() {
    for (layout, format) in [
        ("packed4_channel", Format::Q4h),
        ("packed8_channel", Format::Q8h),
        ("int8_channel", Format::Q8h),
        ("gptq_sym", Format::Q4h),
    ] {
        let [folder, _] = quantised(layout);
        let dir = folder.write();
        let (checkpoint, spec) = moec_import::open(dir.path(), &ImportOptions::default()).unwrap();
        let module = lower(&spec, &shapes(64, 10)).unwrap();
        let experts: Vec<_> = module
            .weights
            .iter()
            .filter(|w| w.name.starts_with("layers.1.moe.") && w.shape.len() == 3)
            .collect();
        assert_eq!(experts.len(), 2, "{layout}");
        for weight in experts {
            // With zero points, only reading shows whether all codes fit.
            let known = (layout != "gptq_sym").then_some(format);
            assert!(weight.expr.leaves().all(|leaf| checkpoint.format(leaf) == known), "{layout}");
            assert_eq!(
                held(weight, format, &checkpoint),
                numbers(weight, &checkpoint),
                "{layout} {}",
                weight.name
            );
        }
    }
}

#[test]
fn fused_experts_have_scales_of_their_own() {
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 320).collect();
    for layout in ["fp8_channel", "int8_channel"] {
        let [mut folder, _] = quantised(layout);
        let separate = logits(folder.write().path(), &ids, 10);
        let at = "model.layers.1.mlp.experts";
        for (fused, parts) in [("gate_up_proj", &["gate_proj", "up_proj"][..]), ("down_proj", &["down_proj"])]
        {
            for suffix in ["", "_scale"] {
                let names =
                    (0..8).flat_map(|e| parts.iter().map(move |p| format!("{at}.{e}.{p}.weight{suffix}")));
                let all: Vec<Tensor> = names.map(|name| folder.take(&name)).collect();
                let [rows, cols] = all[0].shape[..] else { panic!("{:?}", all[0].shape) };
                let data = all.iter().flat_map(|t| t.data.clone()).collect();
                let joined = Tensor::bytes(all[0].dtype, &[8, rows * parts.len(), cols], data);
                folder.tensors.insert(format!("{at}.{fused}{suffix}"), joined);
            }
        }
        let fused = folder.write();
        assert_eq!(spec(fused.path()).warnings, Vec::<String>::new());
        assert_eq!(distance(&logits(fused.path(), &ids, 10), &separate), 0.0, "{layout}");
    }
}

/// The error for a changed checkpoint in a layout.
fn refused(layout: &str, change: impl FnOnce(&mut Folder)) -> String {
    let [mut folder, _] = quantised(layout);
    change(&mut folder);
    format!("# {layout}\n{}\n", refusal(folder.write().path()))
}

#[test]
fn damaged_checkpoints_are_refused_by_name() {
    let at = "model.layers.1.self_attn.q_proj";
    let without =
        |layout, suffix: &str| refused(layout, |folder| drop(folder.take(&format!("{at}.{suffix}"))));
    let shaped = |layout, suffix: &str, shape: &[usize]| {
        refused(layout, |folder| {
            let t = folder.tensors.get_mut(&format!("{at}.{suffix}")).unwrap();
            let bytes = t.data.len() / t.shape.iter().product::<usize>();
            *t = Tensor::bytes(t.dtype, shape, vec![0; shape.iter().product::<usize>() * bytes]);
        })
    };
    let set = |layout, key: &'static str, value: Value| {
        refused(layout, |folder| folder.config["quantization_config"][key] = value)
    };
    let group = |value: i32| {
        refused("gptq_act_order", |folder| {
            let t = folder.tensors.get_mut(&format!("{at}.g_idx")).unwrap();
            t.data[20..24].copy_from_slice(&value.to_le_bytes());
        })
    };
    let errors = [
        without("fp8_128", "weight_scale_inv"),
        without("int8_zeros", "weight_zero_point"),
        without("packed4_zeros", "weight_zero_point"),
        without("nvfp4", "weight_global_scale"),
        without("nvfp4_modelopt", "weight_scale_2"),
        without("awq", "scales"),
        without("awq", "qweight"),
        without("gptq", "qzeros"),
        without("gptq_act_order", "g_idx"),
        shaped("packed4_group", "weight_scale", &[64, 2]),
        shaped("packed4_group", "weight_packed", &[64, 7]),
        shaped("awq", "qzeros", &[4, 7]),
        shaped("gptq", "qweight", &[8, 63]),
        shaped("nvfp4", "weight_global_scale", &[2]),
        set("awq", "group_size", json!(24)),
        set("gptq", "group_size", json!(32)),
        set("gptq_v2", "bits", json!(4)),
        set("fp8_32", "weight_block_size", json!([64, 64])),
        group(4),
        group(-1),
        refused("fp8_32", |folder| drop(folder.cut("quantization_config"))),
        refused("gptq", |folder| {
            let t = folder.tensors.get_mut(&format!("{at}.scales")).unwrap();
            *t = Tensor::bytes(Dtype::I16, &t.shape.clone(), t.data.clone());
        }),
    ];
    insta::assert_snapshot!(errors.join("\n"));
}

/// Sets every key of every quantisation, at any depth, to invalid values: it is read or refused.
#[test]
fn invalid_values_in_any_key_of_a_quantisation_do_not_panic() {
    fn keys(value: &Value, at: &str, out: &mut Vec<String>) {
        for (key, inner) in value.as_object().into_iter().flatten() {
            let at = format!("{at}/{key}");
            keys(inner, &at, out);
            out.push(at);
        }
    }
    let values = [json!(null), json!(0), json!(-1), json!(7), json!(1u64 << 40), json!(1e300), json!("x")];
    let values =
        values.into_iter().chain([json!([]), json!([0, 1 << 20]), json!({}), json!({"x": {}}), json!(true)]);
    let values: Vec<Value> = values.collect();
    for layout in LAYOUTS {
        let section = json!({"quantization_config": quantised(layout)[0].config["quantization_config"]});
        let mut all = Vec::new();
        keys(&section, "", &mut all);
        assert!(all.len() > 3, "{layout}: {all:?}");
        for (key, value) in all.iter().flat_map(|key| values.iter().map(move |value| (key, value))) {
            let mut changed = section.clone();
            *changed.pointer_mut(key).unwrap() = value.clone();
            let config = moec_import::Config::parse("config.json", changed.to_string().as_bytes()).unwrap();
            if let Err(error) = moec_import::quantised::layouts(&config) {
                assert!(error.message.contains("config.json"), "{layout} {key} {value}: {error}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn damaged_tensors_never_panic(layout in prop::sample::select(LAYOUTS.to_vec()), damage in prop::collection::vec(any::<(u16, u16, u8, u8)>(), 1..5)) {
        let [mut folder, plain] = quantised(layout);
        for (tensor, place, byte, kind) in damage {
            let names: Vec<String> = folder.tensors.keys().filter(|n| n.starts_with("model.layers.1.self_attn.")).cloned().collect();
            let name = &names[usize::from(tensor) % names.len()];
            let t = folder.tensors.get_mut(name).unwrap();
            let place = usize::from(place);
            match kind % 6 {
                0 => { folder.tensors.remove(name); }
                1 => t.shape.reverse(),
                2 if t.dtype == Dtype::I32 => t.dtype = Dtype::F32,
                3 if t.data.len() > 8 => {
                    // Half as much.
                    let n = t.shape.iter().product::<usize>() / 2;
                    let bytes = t.data.len() / (2 * n).max(1);
                    t.data.truncate(n * bytes);
                    t.shape = vec![n];
                }
                _ => if !t.data.is_empty() { let n = t.data.len(); t.data[place % n] = byte },
            }
        }
        let dir = folder.write();
        let checkpoint = Checkpoint::open(dir.path(), &ImportOptions { allow_nonfinite: true }).unwrap();
        if moec_import::read(&checkpoint).is_ok() {
            for name in hashes(layout).keys().filter(|n| n.contains("self_attn")) {
                let shape = &plain.tensors[name].shape;
                let mut out = vec![0.0; shape[0] * shape[1]];
                take(&checkpoint, name, shape).read(0, 0..shape[0], 0..shape[1], &checkpoint, &mut out).unwrap();
            }
        }
    }

    #[test]
    fn leaves_that_mismatch_their_tensors_never_panic(
        file in prop::sample::select(LAYOUTS.to_vec()),
        layout in prop::sample::select(moec_import::quantised::LAYOUTS.to_vec()),
        bits in prop::sample::select(vec![0_u32, 1, 2, 3, 4, 8, 33]),
        sizes in prop::collection::vec(prop::sample::select(vec![0_usize, 1, 2, 16, 48, 64, 128, usize::MAX]), 4),
        parts in prop::collection::vec(any::<prop::sample::Index>(), 5),
        there in [any::<bool>(), any::<bool>(), any::<bool>()],
    ) {
        let tensors = load(&golden("quantised").join(format!("{file}.safetensors")));
        let names: Vec<String> = tensors.keys().cloned().collect();
        let dir = Folder { config: json!({}), tensors }.write();
        let checkpoint = Checkpoint::open(dir.path(), &ImportOptions { allow_nonfinite: true }).unwrap();
        let part = |i: usize| parts[i].get(&names).clone();
        let coded = Coded {
            layout: layout.name.to_owned(),
            bits,
            block: [sizes[0], sizes[1]],
            scales: part(1),
            zeros: there[0].then(|| part(2)),
            factor: there[1].then(|| part(3)),
            groups: there[2].then(|| part(4)),
        };
        let [rows, cols] = [sizes[2], sizes[3]];
        let encoding = Encoding::Coded(Box::new(coded));
        let leaf = Leaf { tensor: part(0), shape: vec![rows, cols], encoding };
        let (r, c) = (rows.saturating_sub(3)..rows, cols.saturating_sub(5)..cols);
        let mut out = vec![0.0; r.len() * c.len()];
        let _ = checkpoint.read(&leaf, 0, r.clone(), c.clone(), &mut out);
        let mut out = vec![0; r.len() * c.len() * 3];
        let _ = checkpoint.stored(&leaf, Format::Q4h, 0, r.clone(), c.clone(), &mut out);
        checkpoint.will_read(&leaf, 0, r, c);
    }
}
