//! Tests of error messages for files that are damaged, incomplete or malicious.

use super::support::{Folder, Tensor, golden, refusal, serialize, shard, write_index};
use safetensors::tensor::Dtype;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

/// A folder with only these bytes as weights.
fn with_file(bytes: &[u8]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("hf/olmoe/config.json"), dir.path().join("config.json")).unwrap();
    fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// A safetensors file with this header and so many bytes of data.
fn file(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn refused(header: &str, data: usize) -> String {
    refusal(with_file(&file(header, data)).path())
}

#[test]
fn not_a_folder() {
    insta::assert_snapshot!(refusal(Path::new("/nowhere/at/all")), @"
    Input: `DIR` is not a checkpoint
      hint: give the folder of a Hugging Face checkpoint, with its `config.json` and its weights as safetensors, or a GGUF file (the first of a split one)
    ");
}

#[test]
fn no_weights() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(golden("hf/olmoe/config.json"), dir.path().join("config.json")).unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `DIR` has neither `model.safetensors` nor `model.safetensors.index.json`
      hint: give the folder of a Hugging Face checkpoint, with its weights as safetensors
    ");
    fs::write(dir.path().join("pytorch_model.bin"), b"x").unwrap();
    insta::assert_snapshot!(refusal(dir.path()), @"
    Input: `DIR` has neither `model.safetensors` nor `model.safetensors.index.json`
      hint: the weights are there as `pytorch_model.bin`, which is not read; save them as safetensors with `model.save_pretrained(dir, safe_serialization=True)`
    ");
}

#[test]
fn too_short() {
    insta::assert_snapshot!(refusal(with_file(b"").path()), @"
    Input: `model.safetensors` is 0 bytes long, too short for a safetensors file
      hint: the download may have been cut short; download it again
    ");
    insta::assert_snapshot!(refusal(with_file(b"abc").path()), @"
    Input: `model.safetensors` is 3 bytes long, too short for a safetensors file
      hint: the download may have been cut short; download it again
    ");
}

#[test]
fn header_longer_than_the_file() {
    let mut bytes = file("{}", 10);
    bytes[0] = 100;
    insta::assert_snapshot!(refusal(with_file(&bytes).path()), @"
    Input: `model.safetensors` ends inside its header
      because the header takes 100 bytes, of which the file has 12
      hint: the download may have been cut short; download it again
    ");
}

#[test]
fn header_of_absurd_length() {
    insta::assert_snapshot!(refusal(with_file(&[0xff; 64]).path()), @"
    Input: the header of `model.safetensors` claims 18446744073709551615 bytes, more than the 100000000 that are read
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn header_that_is_not_json() {
    insta::assert_snapshot!(refused("{]", 0), @"
    Input: the header of `model.safetensors` is not valid
      because key must be a string at line 1 column 2
      hint: the file is damaged or is not a safetensors file; download it again
    ");
    insta::assert_snapshot!(refused("[1, 2]", 0), @"
    Input: the header of `model.safetensors` is not valid
      because invalid type: sequence, expected an object at line 1 column 0
      hint: the file is damaged or is not a safetensors file; download it again
    ");
    insta::assert_snapshot!(refusal(with_file(&file("{\"a\u{fffd}\":", 0)).path()), @"
    Input: the header of `model.safetensors` is not valid
      because EOF while parsing a value at line 1 column 8
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn header_nested_deeply() {
    insta::assert_snapshot!(refused(&"{\"a\":".repeat(100_000), 0), @"
    Input: the header of `model.safetensors` is not valid
      because EOF while parsing a value at line 1 column 500000
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn truncated_file() {
    let whole = serialize(&Folder::golden("olmoe").tensors);
    insta::assert_snapshot!(refusal(with_file(&whole[..whole.len() - 1000]).path()), @"
    Input: `model.safetensors` is cut short: tensor `model.norm.weight` ends past the end of the file
      because the tensors take 445568 bytes, of which the file has 444568
      hint: the download may have been cut short; download it again
    ");
}

#[test]
fn bytes_after_the_last_tensor() {
    let mut whole = serialize(&Folder::golden("olmoe").tensors);
    whole.extend([0; 3]);
    insta::assert_snapshot!(refusal(with_file(&whole).path()), @"
    Input: `model.safetensors` has 3 bytes after its last tensor
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn overlapping_tensors() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}"#;
    insta::assert_snapshot!(refused(header, 12), @"
    Input: tensors `a` and `b` overlap in `model.safetensors`
      because bytes 0 .. 8 and 4 .. 12 of the data
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn gap_between_tensors_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "b":{"dtype":"F32","shape":[2],"data_offsets":[12,20]}}"#;
    insta::assert_snapshot!(refused(header, 20), @"
    Input: bytes 8 .. 12 before tensor `b` in `model.safetensors` belong to no tensor
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn offsets_out_of_range() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: `model.safetensors` is cut short: tensor `a` ends past the end of the file
      because the tensors take 16 bytes, of which the file has 8
      hint: the download may have been cut short; download it again
    ");
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because its offsets 8 .. 0 run backwards
      hint: the file is damaged or is not a safetensors file; download it again
    ");
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,18446744073709551616]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because data_offsets [0,1.8446744073709552e+19] are not two byte offsets
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn offsets_that_contradict_the_shape_are_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because F32 of shape [3] takes 12 bytes, but its offsets span 8
      hint: the file is damaged or is not a safetensors file; download it again
    ");
    let header = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,8]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because the size of shape [4294967296, 4294967296, 4] overflows
      hint: the file is damaged or is not a safetensors file; download it again
    ");
    let header = r#"{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because shape [-1] is not a list of sizes
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn unknown_dtype() {
    let header = r#"{"a":{"dtype":"Q7","shape":[2],"data_offsets":[0,8]}}"#;
    insta::assert_snapshot!(refused(header, 8), @r#"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because unknown dtype "Q7"
      hint: the file is damaged or is not a safetensors file; download it again
    "#);
    insta::assert_snapshot!(refused(r#"{"a":{"shape":[2],"data_offsets":[0,8]}}"#, 8), @"
    Input: tensor `a` in the header of `model.safetensors` is not valid
      because it has no dtype
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn duplicate_tensor_in_a_file_is_refused() {
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    insta::assert_snapshot!(refused(header, 8), @"
    Input: tensor `a` occurs twice in the header of `model.safetensors`
      hint: the file is damaged or is not a safetensors file; download it again
    ");
}

#[test]
fn unsupported_dtype_is_refused() {
    let mut folder = Folder::golden("olmoe");
    let t = folder.tensors.get_mut("model.layers.0.mlp.gate.weight").unwrap();
    *t = Tensor::bytes(Dtype::I8, &t.shape, vec![0; 8 * 64]);
    insta::assert_snapshot!(refusal(folder.write().path()), @"
    Limit: tensor `model.layers.0.mlp.gate.weight` in `model.safetensors` is stored as I8, which is not supported
      because no `quantization_config` defines the meaning of its codes
      hint: a tensor may be F32, BF16, F16
    ");
    folder.tensors.insert("model.norm.weight".into(), Tensor::bytes(Dtype::F8_E4M3, &[64], vec![0; 64]));
    folder.tensors.insert("model.layers.0.mlp.gate.weight".into(), Tensor::f32(&[8, 64], &[0.0; 512]));
    insta::assert_snapshot!(refusal(folder.write().path()), @"
    Limit: tensor `model.norm.weight` in `model.safetensors` is stored as F8_E4M3, which is not supported
      hint: a tensor may be F32, BF16, F16
    ");
}

/// The error after a change to the index of a sharded checkpoint.
fn with_index(change: impl FnOnce(&Path, &mut serde_json::Map<String, Value>)) -> String {
    let dir = Folder::golden("olmoe").write_sharded();
    let path = dir.path().join("model.safetensors.index.json");
    let index: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let Value::Object(mut map) = index["weight_map"].clone() else { panic!("no map") };
    change(dir.path(), &mut map);
    write_index(dir.path(), map.into());
    refusal(dir.path())
}

#[test]
fn a_shard_is_missing() {
    let found = with_index(|dir, _| fs::remove_file(dir.join(shard(1))).unwrap());
    insta::assert_snapshot!(found, @"
    Input: `model-00002-of-00002.safetensors` is missing from the folder
      hint: `model.safetensors.index.json` names it; the download may be incomplete
    ");
}

#[test]
fn the_index_leaves_the_folder() {
    let name = |name: &str| with_index(|_, map| map["lm_head.weight"] = name.into());
    insta::assert_snapshot!(name("../model.safetensors"), @"
    Input: `../model.safetensors` is outside of the checkpoint's folder
      because only plain names and subfolders are allowed
      because `model.safetensors.index.json` names it
      hint: moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from
    ");
    insta::assert_snapshot!(name("/etc/passwd"), @"
    Input: `/etc/passwd` is outside of the checkpoint's folder
      because only plain names and subfolders are allowed
      because `model.safetensors.index.json` names it
      hint: moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from
    ");
    assert_eq!(name("a/../../b"), name("../b").replace("../b", "a/../../b"));
    insta::assert_snapshot!(name(""), @"
    Input: `` is outside of the checkpoint's folder
      because only plain names and subfolders are allowed
      because `model.safetensors.index.json` names it
      hint: moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from
    ");
}

#[cfg(unix)]
#[test]
fn a_link_leaves_the_folder() {
    let outside = tempfile::tempdir().unwrap();
    let found = with_index(|dir, _| {
        fs::rename(dir.join(shard(1)), outside.path().join("secret")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("secret"), dir.join(shard(1))).unwrap();
    });
    let real = fs::canonicalize(outside.path()).unwrap();
    insta::assert_snapshot!(found.replace(&real.display().to_string(), "OUTSIDE"), @"
    Input: `model-00002-of-00002.safetensors` is outside of the checkpoint's folder
      because it is a link to `OUTSIDE/secret`
      because `model.safetensors.index.json` names it
      hint: moec reads nothing outside of the checkpoint's folder; check where the checkpoint comes from
    ");
}

#[test]
fn the_index_names_a_tensor_that_its_shard_lacks() {
    let found = with_index(|_, map| {
        map.insert("model.extra".into(), shard(0).into());
    });
    insta::assert_snapshot!(found, @"
    Input: `model-00001-of-00002.safetensors` has no tensor `model.extra`
      because `model.safetensors.index.json` names this file for it
      hint: index and shards are of different checkpoints; download them again
    ");
    let found = with_index(|_, map| map["lm_head.weight"] = shard(1).into());
    insta::assert_snapshot!(found, @"
    Input: `model-00002-of-00002.safetensors` has no tensor `lm_head.weight`
      because `model.safetensors.index.json` names this file for it
      because it is in `model-00001-of-00002.safetensors`
      hint: index and shards are of different checkpoints; download them again
    ");
}

#[test]
fn tensor_in_two_shards_is_refused() {
    let found = with_index(|dir, _| {
        let mut both = Folder::golden("olmoe").tensors;
        both.retain(|name, _| name.contains("norm") || name == "lm_head.weight");
        fs::write(dir.join(shard(1)), serialize(&both)).unwrap();
    });
    insta::assert_snapshot!(found, @"
    Input: tensor `lm_head.weight` is both in `model-00001-of-00002.safetensors` and in `model-00002-of-00002.safetensors`
      hint: remove the files that are not of this checkpoint, or download it again
    ");
}

#[test]
fn invalid_weight_index_is_refused() {
    let text = |text: &str| {
        let dir = Folder::golden("olmoe").write_sharded();
        fs::write(dir.path().join("model.safetensors.index.json"), text).unwrap();
        refusal(dir.path())
    };
    insta::assert_snapshot!(text("{}"), @"
    Input: `model.safetensors.index.json` is not a valid index
      because missing field `weight_map` at line 1 column 2
      hint: it needs an object `weight_map` from tensor names to file names; download it again
    ");
    insta::assert_snapshot!(text(r#"{"weight_map": {}}"#), @"
    Input: `model.safetensors.index.json` is not a valid index
      because `weight_map` is empty
      hint: it needs an object `weight_map` from tensor names to file names; download it again
    ");
    insta::assert_snapshot!(text(r#"{"weight_map": {"a": 1}}"#), @"
    Input: `model.safetensors.index.json` is not a valid index
      because invalid type: integer `1`, expected a string at line 1 column 22
      hint: it needs an object `weight_map` from tensor names to file names; download it again
    ");
    insta::assert_snapshot!(text("nonsense"), @"
    Input: `model.safetensors.index.json` is not a valid index
      because expected ident at line 1 column 2
      hint: it needs an object `weight_map` from tensor names to file names; download it again
    ");
    insta::assert_snapshot!(text(r#"{"weight_map": {"a": "x", "a": "y"}}"#), @"
    Input: tensor `a` occurs twice in `model.safetensors.index.json`
      hint: the file is damaged; download it again
    ");
}

#[test]
fn folder_instead_of_a_weight_file_is_refused() {
    let found = with_index(|dir, _| {
        fs::remove_file(dir.join(shard(1))).unwrap();
        fs::create_dir(dir.join(shard(1))).unwrap();
    });
    insta::assert_snapshot!(found, @"
    Environment: `model-00002-of-00002.safetensors` cannot be read
      because it is a folder, not a regular file
      hint: give the file itself, not a folder
    ");
}

#[test]
fn every_prefix_of_a_file_is_refused() {
    let mut small = Folder::golden("olmoe").tensors;
    small.retain(|name, _| name.contains("norm"));
    let whole = serialize(&small);
    for n in (0..whole.len()).step_by(13) {
        assert!(refusal(with_file(&whole[..n]).path()).starts_with("Input: "), "{n}");
    }
}

#[test]
fn damage_to_any_byte_of_a_header_does_not_panic() {
    let whole = serialize(&Folder::golden("olmoe").tensors);
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    for at in (0..header).step_by(97) {
        for byte in [0, b'9', b'"', 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            refusal(with_file(&bytes).path());
        }
    }
}

#[test]
fn the_config_is_checked_before_the_weights() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("config.json"), json!({"architectures": ["LlamaForCausalLM"]}).to_string())
        .unwrap();
    assert!(refusal(dir.path()).contains("LlamaForCausalLM"));
}
