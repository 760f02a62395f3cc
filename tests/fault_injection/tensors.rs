//! Damage to safetensors: headers, offsets, and the index of shards.

use super::case::{CaseFolders, SECRET};
use super::rng::Rng;
use super::text;
use serde_json::{Map, Value, json};
use std::fs;

/// Name of a checkpoint's weights.
const WEIGHTS: &str = "model.safetensors";
/// Value of all norms in checkpoints outside of the subject, as two bytes. Packed weights then show where
/// they come from.
const MARK: [u8; 2] = [0x6f, 0x4e];

/// Header and data of a safetensors file.
fn parts(bytes: &[u8]) -> (Map<String, Value>, &[u8]) {
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..end]).unwrap(), &bytes[end..])
}

fn whole(length: u64, header: &[u8], data: &[u8]) -> Vec<u8> {
    [&length.to_le_bytes(), header, data].concat()
}

/// Writes files with a secret outside of the subject, with the names that a checkpoint's files have.
pub(crate) fn plant(place: &CaseFolders) {
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        if let Ok(text) = fs::read_to_string(place.subject.join(name)) {
            let secret = text.replacen('{', &format!("{{\"{SECRET}\": \"{SECRET}\",\n"), 1);
            fs::write(place.outside.join(name), secret).unwrap();
        }
    }
    if let Ok(mut bytes) = fs::read(place.subject.join(WEIGHTS)) {
        let start = bytes.len() - parts(&bytes).1.len();
        let (header, _) = parts(&bytes);
        for (_, about) in
            header.iter().filter(|(name, t)| name.ends_with("norm.weight") && t["dtype"] == "BF16")
        {
            let at = |i: usize| start + about["data_offsets"][i].as_u64().unwrap() as usize;
            let range = at(0)..at(1);
            for number in bytes[range].chunks_exact_mut(2) {
                number.copy_from_slice(&MARK);
            }
        }
        fs::write(place.outside.join(WEIGHTS), bytes).unwrap();
    }
}

/// Bytes that a bundle must not contain: the secret, and the norms of outside checkpoints, as f32.
pub(crate) fn secrets() -> [Vec<u8>; 2] {
    [SECRET.as_bytes().to_vec(), [0, 0, MARK[0], MARK[1]].repeat(16)]
}

pub(crate) fn header(rng: &mut Rng, place: &mut CaseFolders) -> String {
    let path = place.subject.join(WEIGHTS);
    let bytes = fs::read(&path).unwrap();
    let (mut header, data) = parts(&bytes);
    let names: Vec<String> = header.keys().filter(|k| *k != "__metadata__").cloned().collect();
    let [one, other] = [rng.pick(&names).clone(), rng.pick(&names).clone()];
    let length = data.len() as u64;
    let usual = serde_json::to_vec(&header).unwrap();
    let (damage, new) = match rng.below(8) {
        0 => {
            let n = usual.len() as u64;
            let lengths =
                [0, 1, 7, n - 1, n + 1, n + length, n + length + 1, 1 << 27, 1 << 63, u64::MAX, u64::MAX - 7];
            let n = *rng.pick(&lengths);
            (format!("a header of {n} bytes"), whole(n, &usual, data))
        }
        1 => {
            let mut text = String::from_utf8(usual).unwrap();
            let damage = text::change(rng, &mut text);
            (damage, whole(text.len() as u64, text.as_bytes(), data))
        }
        2 => {
            // The same name a second time, with other offsets.
            let text = String::from_utf8(usual).unwrap();
            let twice = format!("{{{}:{},{}", json!(one), header[&other], &text[1..]);
            (format!("`{one}` twice"), whole(twice.len() as u64, twice.as_bytes(), data))
        }
        3 => {
            let mut bad = usual;
            let at = rng.below(bad.len());
            bad[at] = 0xff;
            ("a header that is not valid UTF-8".to_owned(), whole(bad.len() as u64, &bad, data))
        }
        4 => {
            let kind =
                *rng.pick(&["F32", "F64", "I8", "BOOL", "F8_E4M3", "U8", "BF17", "", "F16", "F4", "C64"]);
            header[&one]["dtype"] = json!(kind);
            let text = serde_json::to_vec(&header).unwrap();
            (format!("`{one}` of {kind:?}"), whole(text.len() as u64, &text, data))
        }
        5 => {
            let shapes = [
                json!([]),
                json!([0]),
                json!([0, 64]),
                json!([1_u64 << 32, 1_u64 << 32]),
                json!([u64::MAX]),
                json!([-1, -1]),
                json!([1, 1, 1, 1, 1, 1]),
                json!([64, 64]),
                json!(vec![1; 10_000]),
                json!([2.5]),
                json!("[64]"),
                json!(null),
                json!([1_u64 << 63, 2]),
            ];
            let shape = rng.pick(&shapes);
            header[&one]["shape"] = shape.clone();
            let text = serde_json::to_vec(&header).unwrap();
            let shape: String = shape.to_string().chars().take(40).collect();
            (format!("`{one}` of shape {shape}"), whole(text.len() as u64, &text, data))
        }
        6 => {
            let renamed = [
                "",
                "two\nlines",
                "\u{0}",
                "../x",
                "model.layers.-1.mlp",
                "model.layers.99999999999.mlp.gate.weight",
                &other,
            ];
            let name = (*rng.pick(&renamed)).to_owned();
            let about = header.shift_remove(&one).unwrap();
            header.insert(name.clone(), about);
            let text = serde_json::to_vec(&header).unwrap();
            (format!("`{one}` is called {name:?}"), whole(text.len() as u64, &text, data))
        }
        _ => {
            let (a, b) = (header[&one]["data_offsets"][0].clone(), header[&one]["data_offsets"][1].clone());
            let places = [
                json!([b, a]),
                json!([0, length]),
                json!([length, length + 64]),
                json!([1_u64 << 63, u64::MAX]),
                json!([u64::MAX, u64::MAX]),
                json!([-8, 0]),
                json!([a]),
                json!([]),
                json!([a, b, b]),
                json!([a, a]),
                header[&other]["data_offsets"].clone(),
                json!([1, 2]),
                json!([1e30, 1e31]),
                json!(null),
            ];
            let at = rng.pick(&places).clone();
            let damage = format!("`{one}` at {at}");
            header[&one]["data_offsets"] = at;
            let text = serde_json::to_vec(&header).unwrap();
            (damage, whole(text.len() as u64, &text, data))
        }
    };
    fs::write(&path, new).unwrap();
    format!("`{WEIGHTS}`: {damage}")
}

pub(crate) fn shards(rng: &mut Rng, place: &mut CaseFolders) -> String {
    const SHARD: &str = "model-00001-of-00001.safetensors";
    let single = place.subject.join(WEIGHTS);
    let bytes = fs::read(&single).unwrap();
    let (header, _) = parts(&bytes);
    fs::rename(&single, place.subject.join(SHARD)).unwrap();
    let names: Vec<&String> = header.keys().filter(|k| *k != "__metadata__").collect();
    let mut map: Map<String, Value> = names.iter().map(|n| ((*n).clone(), json!(SHARD))).collect();
    let one = (*rng.pick(&names)).clone();
    let outside = place.outside.join(WEIGHTS).to_string_lossy().into_owned();
    let elsewhere = [
        json!("../outside/model.safetensors"),
        json!(outside),
        json!("/etc/passwd"),
        json!("/dev/zero"),
        json!(""),
        json!("."),
        json!(".."),
        json!("sub/../../outside/model.safetensors"),
        json!("gone.safetensors"),
        json!("config.json"),
        json!("two\nlines"),
        json!("\u{0}"),
        json!(1),
        json!(null),
        json!([SHARD]),
        json!("n".repeat(5000)),
        json!(format!("./{SHARD}")),
        json!("link.safetensors"),
    ];
    let new = rng.pick(&elsewhere).clone();
    let mut damage =
        format!("index with `{one}` in {}", new.to_string().chars().take(60).collect::<String>());
    if new == "link.safetensors" {
        std::os::unix::fs::symlink(&outside, place.subject.join("link.safetensors")).unwrap();
    }
    // Only that tensor, or all of them.
    if rng.below(2) == 0 {
        for value in map.values_mut() {
            value.clone_from(&new);
        }
        damage += ", as all are";
    } else {
        map.insert(one, new);
    }
    let mut text = json!({"metadata": {"total_size": bytes.len()}, "weight_map": map}).to_string();
    if rng.below(4) == 0 {
        damage = format!("{damage}; {}", text::change(rng, &mut text));
    }
    fs::write(place.subject.join("model.safetensors.index.json"), text).unwrap();
    damage
}
