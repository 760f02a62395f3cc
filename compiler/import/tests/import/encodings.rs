//! Tests of quantised checkpoints: the numbers that are read follow the published rules.

use super::support::{
    Folder, Tensor, distance, golden, load, logits, numbers, packed as held, refusal, refusal_with, shapes,
    spec,
};
use moec_import::lower::lower;
use moec_import::{Checkpoint, ImportOptions};
use moec_ir::{Coded, Encoding, Format, Leaf, Source, WeightClass};
use safetensors::tensor::Dtype;
use serde_json::json;
use std::collections::BTreeMap;

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Rounds rows of 32 to MXFP4; returns blocks, scales, and the numbers that they represent.
fn to_mxfp4(numbers: &[f32]) -> (Vec<u8>, Vec<u8>, Vec<f32>) {
    let (mut blocks, mut scales, mut rounded) = (Vec::new(), Vec::new(), Vec::new());
    for block in numbers.chunks_exact(32) {
        let most = block.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let exponent = if most > 0.0 { most.log2().floor() as i32 - 2 } else { 0 };
        scales.push((exponent + 127) as u8);
        let scale = 2.0_f32.powi(exponent);
        let nibbles: Vec<u8> = block
            .iter()
            .map(|x| {
                let near = |a: &usize, b: &usize| {
                    let off = |i: usize| (x.abs() / scale - E2M1[i]).abs();
                    off(*a).total_cmp(&off(*b))
                };
                let i = (0..8).min_by(near).unwrap();
                rounded.push(E2M1[i] * scale * x.signum());
                i as u8 | if *x < 0.0 { 8 } else { 0 }
            })
            .collect();
        blocks.extend(nibbles.chunks(2).map(|n| n[0] | n[1] << 4));
    }
    (blocks, scales, rounded)
}

/// gpt-oss with experts of 64 channels instead of 48, so that MXFP4 can hold them.
fn wide_gpt_oss() -> Folder {
    let mut folder = Folder::golden("gpt_oss").set("intermediate_size", 64);
    for layer in 0..2 {
        let at = format!("model.layers.{layer}.mlp.experts");
        for (name, from, to) in [
            ("gate_up_proj", [8, 64, 96], [8, 64, 128]),
            ("gate_up_proj_bias", [8, 1, 96], [8, 1, 128]),
            ("down_proj", [8, 48, 64], [8, 64, 64]),
        ] {
            let name = format!("{at}.{name}");
            let old = folder.take(&name);
            let numbers = old.numbers();
            let mut wide = vec![0.0; to.iter().product()];
            for e in 0..8 {
                for r in 0..from[1] {
                    for c in 0..from[2] {
                        wide[(e * to[1] + r) * to[2] + c] = numbers[(e * from[1] + r) * from[2] + c];
                    }
                }
            }
            let shape: Vec<usize> = to.into_iter().filter(|&d| d != 1).collect();
            folder.tensors.insert(name, Tensor::f32(&shape, &wide));
        }
    }
    folder
}

#[test]
fn gpt_oss_as_mxfp4() {
    let mut packed = wide_gpt_oss();
    packed.config["quantization_config"] = json!({"quant_method": "mxfp4"});
    let mut plain = packed.clone();
    for layer in 0..2 {
        for (name, rows) in [("gate_up_proj", 128), ("down_proj", 64)] {
            let name = format!("model.layers.{layer}.mlp.experts.{name}");
            // The plain form is [experts, in, out], the blocks run along `in`.
            let numbers = packed.take(&name).numbers();
            let cols = 64;
            let exchanged = |x: &[f32], rows: usize, cols: usize| -> Vec<f32> {
                let one = |e: usize| (0..cols).flat_map(move |c| (0..rows).map(move |r| (e, r, c)));
                (0..8).flat_map(one).map(|(e, r, c)| x[(e * rows + r) * cols + c]).collect()
            };
            let (blocks, scales, rounded) = to_mxfp4(&exchanged(&numbers, cols, rows));
            let blocks = Tensor::bytes(Dtype::U8, &[8, rows, 2, 16], blocks);
            packed.tensors.insert(format!("{name}_blocks"), blocks);
            packed.tensors.insert(format!("{name}_scales"), Tensor::bytes(Dtype::U8, &[8, rows, 2], scales));
            let rounded = Tensor::f32(&[8, cols, rows], &exchanged(&rounded, rows, cols));
            plain.tensors.insert(name, rounded);
        }
    }
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 320).collect();
    let (packed, plain) = (packed.write(), plain.write());
    let (checkpoint, spec_of) = moec_import::open(packed.path(), &ImportOptions::default()).unwrap();
    let module = lower(&spec_of, &shapes(64, 10)).unwrap();
    let experts = || module.weights.iter().filter(|w| w.class == WeightClass::Experts);
    // Gate and up of two layers, and down, are stored exactly. Weights that are rounded to another format are
    // not.
    for weight in experts() {
        let want = numbers(weight, &checkpoint);
        assert_eq!(held(weight, Format::Mxfp4, &checkpoint), want, "{}", weight.name);
        assert_ne!(held(weight, Format::Q4, &checkpoint), want, "{}", weight.name);
    }
    assert_eq!(experts().count(), 4);
    assert_eq!(distance(&logits(packed.path(), &ids, 10), &logits(plain.path(), &ids, 10)), 0.0);
    let (packed, plain) = (spec(packed.path()), spec(plain.path()));
    assert_eq!((packed.params, packed.active_params), (plain.params, plain.active_params));
    assert_eq!(packed.warnings, Vec::<String>::new());
}

#[test]
fn mxfp4_needs_rows_of_whole_blocks() {
    let mut folder = Folder::golden("gpt_oss").set("quantization_config", json!({"quant_method": "mxfp4"}));
    for layer in 0..2 {
        for name in ["gate_up_proj", "down_proj"] {
            let name = format!("model.layers.{layer}.mlp.experts.{name}");
            folder.take(&name);
            let (blocks, scales) = (vec![0; 8 * 96 * 32], vec![127; 8 * 96 * 2]);
            folder
                .tensors
                .insert(format!("{name}_blocks"), Tensor::bytes(Dtype::U8, &[8, 96, 2, 16], blocks));
            folder.tensors.insert(format!("{name}_scales"), Tensor::bytes(Dtype::U8, &[8, 96, 2], scales));
        }
    }
    insta::assert_snapshot!(refusal(folder.write().path()), @"
    Input: tensor `model.layers.0.mlp.experts.down_proj_blocks` cannot hold rows of 48 numbers
      because MXFP4 has groups of 32, and `intermediate_size` sets the rows
    ");
}

/// A checkpoint of a few tensors, without a model.
fn open(tensors: BTreeMap<String, Tensor>) -> (tempfile::TempDir, Checkpoint) {
    let dir = Folder { config: json!({}), tensors }.write();
    let checkpoint = Checkpoint::open(dir.path(), &ImportOptions::default()).unwrap();
    (dir, checkpoint)
}

/// Codes with scales in tensor `s`.
fn coded(layout: &str, bits: u32, block: [usize; 2]) -> Encoding {
    let (layout, scales) = (layout.to_owned(), "s".to_owned());
    Encoding::Coded(Box::new(Coded { layout, bits, block, scales, zeros: None, factor: None, groups: None }))
}

/// Reads the same leaf whole and in parts.
fn read_all(checkpoint: &Checkpoint, leaf: &Leaf) -> Vec<f32> {
    let [matrices, rows, cols] = leaf.shape[..] else { panic!("three axes") };
    let mut out = Vec::new();
    for matrix in 0..matrices {
        let mut one = vec![0.0; rows * cols];
        checkpoint.read(leaf, matrix, 0..rows, 0..cols, &mut one).unwrap();
        let (r, c) = (rows / 3..rows - 1, cols / 3..cols - 1);
        let mut part = vec![0.0; r.len() * c.len()];
        checkpoint.read(leaf, matrix, r.clone(), c.clone(), &mut part).unwrap();
        let want: Vec<f32> = r.flat_map(|r| one[r * cols..][c.clone()].to_vec()).collect();
        assert_eq!(part, want);
        out.extend(one);
    }
    out
}

#[test]
fn fp8_blocks_of_128_by_128() {
    // Two experts of 200×300: two by three blocks each, with smaller blocks at the edges.
    let (rows, cols) = (200, 300);
    let stored: Vec<u8> = (0..2 * rows * cols).map(|i| (i * 7 % 126) as u8).collect();
    let factors: Vec<f32> = (0..12).map(|i| 1.0 + i as f32).collect();
    for scales in [Tensor::f32(&[2, 2, 3], &factors), {
        let bytes = factors.iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
        Tensor::bytes(Dtype::BF16, &[2, 2, 3], bytes)
    }] {
        let weight = Tensor::bytes(Dtype::F8_E4M3, &[2, rows, cols], stored.clone());
        let (_dir, checkpoint) = open([("w".to_owned(), weight), ("s".to_owned(), scales)].into());
        let encoding = coded("fp8", 8, [128, 128]);
        let leaf = Leaf { tensor: "w".into(), shape: vec![2, rows, cols], encoding };
        let got = read_all(&checkpoint, &leaf);
        for (i, x) in got.iter().enumerate() {
            let (e, r, c) = (i / (rows * cols), i / cols % rows, i % cols);
            let factor = factors[(e * 2 + r / 128) * 3 + c / 128];
            assert_eq!(*x, moec_import::encodings::fp8::e4m3(stored[i]) * factor);
        }
    }
}

#[test]
fn mxfp4_rectangles() {
    let numbers: Vec<f32> = (0..3 * 10 * 96).map(|i| (i * 29 % 101) as f32 - 50.0).collect();
    let (blocks, scales, rounded) = to_mxfp4(&numbers);
    let blocks = Tensor::bytes(Dtype::U8, &[3, 10, 3, 16], blocks);
    let scales = Tensor::bytes(Dtype::U8, &[3, 10, 3], scales);
    let (_dir, checkpoint) = open([("w".to_owned(), blocks), ("s".to_owned(), scales)].into());
    let encoding = coded("mxfp4", 4, [1, 32]);
    let leaf = Leaf { tensor: "w".into(), shape: vec![3, 10, 96], encoding };
    assert_eq!(read_all(&checkpoint, &leaf), rounded);
}

/// Blocks of gpt-oss decode as transformers does it.
#[test]
fn mxfp4_of_gpt_oss_decodes_like_transformers() {
    let mut tensors = load(&golden("quantised/gpt_oss_mxfp4.safetensors"));
    let [want, scales] = ["numbers", "w_scales"].map(|name| tensors.remove(name).unwrap());
    tensors.insert("s".into(), scales);
    let (_dir, checkpoint) = open(tensors);
    let leaf =
        Leaf { tensor: "w_blocks".into(), shape: vec![2, 8, 64], encoding: coded("mxfp4", 4, [1, 32]) };
    assert_eq!(read_all(&checkpoint, &leaf), want.numbers());
}

#[test]
fn released_pages_can_be_read_again() {
    // More than the resident limit of reading: the maps are released in between.
    let numbers: Vec<f32> = (0..2 * 40 * 50).map(|i| i as f32).collect();
    let (_dir, checkpoint) = open([("w".to_owned(), Tensor::f32(&[2, 40, 50], &numbers))].into());
    let leaf = Leaf { tensor: "w".into(), shape: vec![2, 40, 50], encoding: Encoding::Plain };
    let reads = (160 << 20) / (numbers.len() * 4);
    for _ in 0..reads {
        assert_eq!(read_all(&checkpoint, &leaf), numbers);
    }
}

#[test]
fn rectangles_out_of_range_are_refused() {
    let (_dir, checkpoint) = open([("w".to_owned(), Tensor::f32(&[2, 3], &[0.0; 6]))].into());
    let leaf = Leaf { tensor: "w".into(), shape: vec![2, 3], encoding: Encoding::Plain };
    let read = |leaf: &Leaf, matrix, rows, cols, n: usize| {
        checkpoint.read(leaf, matrix, rows, cols, &mut vec![0.0; n])
    };
    assert!(read(&leaf, 0, 0..2, 0..3, 6).is_ok());
    assert!(read(&leaf, 0, 1..1, 0..3, 0).is_ok());
    assert!(read(&leaf, 1, 0..2, 0..3, 6).is_err());
    assert!(read(&leaf, 0, 0..3, 0..3, 9).is_err());
    assert!(read(&leaf, 0, 0..2, 1..4, 6).is_err());
    assert!(read(&leaf, 0, 0..2, 0..3, 5).is_err());
    let other = Leaf { shape: vec![3, 2], ..leaf.clone() };
    assert!(read(&other, 0, 0..3, 0..2, 6).is_err());
    let huge = Leaf { shape: vec![usize::MAX, usize::MAX, 2], ..leaf };
    assert!(read(&huge, usize::MAX - 1, 0..1, 0..1, 1).is_err());
}

#[test]
fn numbers_that_are_not_finite() {
    let mut folder = Folder::golden("olmoe");
    let name = "model.layers.1.self_attn.k_proj.weight";
    let t = folder.tensors.get_mut(name).unwrap();
    t.data[2 * (5 * 64 + 9)..][..2].copy_from_slice(&half::bf16::NAN.to_le_bytes());
    let dir = folder.write();
    let leaf = Leaf { tensor: name.into(), shape: vec![64, 64], encoding: Encoding::Plain };
    let read = |options: &ImportOptions, cols: std::ops::Range<usize>| {
        let checkpoint = Checkpoint::open(dir.path(), options).unwrap();
        let mut out = vec![0.0; 60 * cols.len()];
        checkpoint.read(&leaf, 0, 4..64, cols, &mut out).map(|()| out)
    };
    let strict = ImportOptions::default();
    let error = read(&strict, 7..64).unwrap_err();
    insta::assert_snapshot!(error, @"tensor `model.layers.1.self_attn.k_proj.weight` in `model.safetensors` is NaN at [5, 9]");
    assert!(read(&strict, 10..64).is_ok());
    let lax = ImportOptions { allow_nonfinite: true };
    assert!(read(&lax, 7..64).unwrap()[57 + 2].is_nan());
    // Opening does not read numbers.
    assert_eq!(refusal_with(dir.path(), &lax), "accepted");
}

/// A checkpoint with matrices in FP8, and one with the numbers that these represent.
fn in_fp8(family: &str) -> [Folder; 2] {
    let mut folder = Folder::golden(family);
    let mut plain = folder.clone();
    let table: Vec<f32> = (0..=255).map(moec_import::encodings::fp8::e4m3).collect();
    let is_matrix = |t: &Tensor| t.shape.len() == 2 && t.shape[0] > 8;
    let matrices = folder.tensors.iter().filter(|(n, t)| n.contains("_proj") && is_matrix(t));
    let names: Vec<String> = matrices.map(|(name, _)| name.clone()).collect();
    assert!(names.len() > 20);
    for name in names {
        let t = folder.take(&name);
        let [rows, cols] = t.shape[..] else { panic!("{name}: {:?}", t.shape) };
        let blocks = [rows.div_ceil(128), cols.div_ceil(128)];
        let factors: Vec<f32> =
            (0..blocks[0] * blocks[1]).map(|i| (1.0 + 0.25 * i as f32) / 1024.0).collect();
        let (mut stored, mut rounded) = (Vec::new(), Vec::new());
        for (i, x) in t.numbers().into_iter().enumerate() {
            let factor = factors[i / cols / 128 * blocks[1] + i % cols / 128];
            let off = |b: &u8| (table[usize::from(*b)] * factor - x).abs();
            let known = (0..=254_u8).filter(|b| b & 0x7f != 0x7f);
            let nearest = known.min_by(|a, b| off(a).total_cmp(&off(b))).unwrap();
            stored.push(nearest);
            rounded.push(table[usize::from(nearest)] * factor);
        }
        plain.tensors.insert(name.clone(), Tensor::f32(&t.shape, &rounded));
        folder.tensors.insert(format!("{name}_scale_inv"), Tensor::f32(&blocks, &factors));
        folder.tensors.insert(name, Tensor::bytes(Dtype::F8_E4M3, &t.shape, stored));
    }
    let quantised = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
    [folder.set("quantization_config", quantised), plain]
}

#[test]
fn fp8_checkpoints() {
    let ids: Vec<u32> = (0..24).map(|i| i * 37 % 320).collect();
    // Rows of a matrix that is split by heads, and a configuration that is nested in another.
    for family in ["deepseek_v3", "qwen3_next", "qwen3_5_moe_published"] {
        let [dir, plain] = in_fp8(family).map(|folder| folder.write());
        assert_eq!(distance(&logits(dir.path(), &ids, 10), &logits(plain.path(), &ids, 10)), 0.0, "{family}");
        assert_eq!(spec(dir.path()).params, spec(plain.path()).params, "{family}");
    }
    let [folder, _] = in_fp8("deepseek_v3");
    let mut broken = folder.clone();
    broken.take("model.layers.0.self_attn.o_proj.weight_scale_inv");
    insta::assert_snapshot!(refusal(broken.write().path()), @"
    Input: tensor `model.layers.0.self_attn.o_proj.weight` in `model.safetensors` is FP8 E4M3 without scales
      because there is no tensor `model.layers.0.self_attn.o_proj.weight_scale_inv`
      hint: the download may be incomplete, or `quantization_config` may be that of another model
    ");
    let wrong = Tensor::f32(&[2, 1], &[1.0, 1.0]);
    broken.tensors.insert("model.layers.0.self_attn.o_proj.weight_scale_inv".into(), wrong);
    insta::assert_snapshot!(refusal(broken.write().path()), @"
    Input: tensor `model.layers.0.self_attn.o_proj.weight_scale_inv` in `model.safetensors` has shape [2, 1], but `config.json` requires [1, 1]
      because axis 0 is 2, which ⌈`hidden_size` / 128⌉ sets to 1
      hint: `config.json` and the weights may be of different models; download both again
    ");
}
