//! Quantised checkpoints, written by each layout's own tool (`golden/quantised`), from build to logits: those
//! of a checkpoint with the numbers that the tool gives. Codes that a format of kernels has are taken over.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use crate::support;

use moec_import::tensors::{Dim, Tensors};
use moec_import::{Checkpoint, ImportOptions};
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use support::{
    Setup, checkpoint, configured, copy_checkpoint, distance, expected, list, logits_file, moec, ok, root,
    tree,
};

/// A tensor: type, shape, bytes.
type Stored = (Dtype, Vec<usize>, Vec<u8>);

/// Layouts whose codes a format of bundles can hold, and that format; `false`: matrices of attention alone, since
/// the experts' rows are no whole blocks.
const TAKEN: [(&str, &str, bool); 5] = [
    ("packed4_channel", "q4h", true),
    ("packed8_channel", "q8h", true),
    ("int8_channel", "q8h", true),
    ("gptq_sym", "q4h", true),
    ("mxfp4", "mxfp4", false),
];

fn load(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors =
        file.iter().map(|(name, t)| (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec())));
    tensors.collect()
}

fn save(tensors: &BTreeMap<String, Stored>, folder: &Path) {
    let views = tensors.iter().map(|(name, t)| (name, TensorView::new(t.0, t.1.clone(), &t.2).unwrap()));
    let bytes = safetensors::serialize(views, None).unwrap();
    fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

/// The name of a tensor of the other layer with experts.
fn twin(name: &str) -> String {
    name.replacen("model.layers.1.", "model.layers.0.", 1)
}

/// Writes OLMoE twice: with both layers' matrices in a layout, those of the second layer, and with the numbers that
/// the layout's tool makes of them.
fn write(layout: &str, quantised: &Path, plain: &Path) {
    let source = checkpoint("olmoe");
    let path = root().join("golden/quantised").join(format!("{layout}.safetensors"));
    let bytes = fs::read(&path).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let of_layout: Value =
        serde_json::from_str(&header.metadata().as_ref().unwrap()["quantization_config"]).unwrap();
    configured(&source, quantised, |config| config["quantization_config"] = of_layout);
    copy_checkpoint(&source, plain);

    let text = fs::read(root().join("golden/quantised/hashes.json")).unwrap();
    let mut hashes: BTreeMap<String, BTreeMap<String, String>> = serde_json::from_slice(&text).unwrap();
    let hashes = hashes.remove(layout).unwrap();
    let mut tensors = load(&source.join("model.safetensors"));
    let mut shapes = BTreeMap::new();
    for name in hashes.keys() {
        tensors.remove(&twin(name)).unwrap();
        shapes.insert(name, tensors.remove(name).unwrap().1);
    }
    for (name, stored) in load(&path) {
        tensors.insert(twin(&name), stored.clone());
        tensors.insert(name, stored);
    }
    save(&tensors, quantised);

    let opened = Checkpoint::open(quantised, &ImportOptions::default()).unwrap();
    let readable = Tensors::new(opened.config(), &opened).unwrap();
    let mut tensors = load(&source.join("model.safetensors"));
    for (name, shape) in shapes {
        let dims: Vec<Dim> = shape.iter().map(|&n| Dim::new(n, "the test")).collect();
        let matrix = readable.take(name, &dims.iter().collect::<Vec<_>>()).unwrap();
        let mut numbers = vec![0.0; shape.iter().product()];
        matrix.read(0, 0..shape[0], 0..shape[1], &opened, &mut numbers).unwrap();
        let bytes: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        let hash = moec_base::hashing::hex(&moec_base::hashing::sha256(&bytes));
        assert_eq!(hash, hashes[name], "{layout}: {name} is not what the tool gives");
        tensors.insert(twin(name), (Dtype::F32, shape.clone(), bytes.clone()));
        tensors.insert(name.clone(), (Dtype::F32, shape, bytes));
    }
    save(&tensors, plain);
}

/// A bundle's packed weights and logits.
struct Built {
    weights: Vec<(String, Vec<u8>)>,
    logits: Vec<f32>,
}

/// Builds a checkpoint with these formats of experts and attention; everything else is f32.
fn build(source: &Path, [experts, attention]: [&str; 2]) -> Built {
    let folder = tempfile::tempdir().unwrap();
    let toml = Setup { format: "f32", chunk: 20, batch: &[1], context: 64 }.write(source, folder.path());
    let text = fs::read_to_string(&toml).unwrap();
    let text = text.replace("experts = \"f32\"", &format!("experts = \"{experts}\""));
    fs::write(&toml, text.replace("attention = \"f32\"", &format!("attention = \"{attention}\""))).unwrap();
    let (bundle, out) = (folder.path().join("b"), folder.path().join("logits.safetensors"));
    ok(moec().arg("build").arg(&toml).args(["--quiet", "--no-run", "--no-reuse", "-o"]).arg(&bundle));
    let ids = list(&expected(&checkpoint("olmoe")).ids);
    ok(moec().arg("run").arg(&bundle).args(["logits", "--ids", &ids, "--out"]).arg(&out));
    let mut weights = tree(&bundle);
    weights.retain(|(name, _)| name.contains("weights"));
    assert!(!weights.is_empty());
    Built { weights, logits: logits_file(&out).1 }
}

/// In a plain run, every second layout.
#[test]
fn quantised_checkpoints_give_the_logits_of_their_numbers() {
    let text = fs::read(root().join("golden/quantised/hashes.json")).unwrap();
    let layouts: BTreeMap<String, Value> = serde_json::from_slice(&text).unwrap();
    let taken = |layout: &str| TAKEN.into_iter().find(|(name, ..)| *name == layout);
    assert_eq!(layouts.keys().filter(|layout| taken(layout).is_some()).count(), TAKEN.len());
    for layout in moec_testing::every_nth(2, layouts.keys()) {
        let folder = tempfile::tempdir().unwrap();
        let [quantised, plain] = ["quantised", "plain"].map(|name| folder.path().join(name));
        write(layout, &quantised, &plain);
        let [ours, theirs] = [&quantised, &plain].map(|source| build(source, ["f32"; 2]));
        assert!(ours.weights == theirs.weights, "{layout}: other weights");
        assert!(ours.logits == theirs.logits, "{layout}: other logits");
        if let Some((_, format, experts)) = taken(layout) {
            let kept = build(&quantised, [if experts { format } else { "f32" }, format]);
            let off = distance(&kept.logits, &theirs.logits);
            assert!(off < 1e-5, "{layout} as {format}: a logit is off by {off}");
            assert!(kept.weights != ours.weights, "{layout}: the weights are stored in {format}");
        }
    }
}
