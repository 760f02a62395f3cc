//! A `config.json`, its `quantization_config` included: what is read requests tensors of some shape, each once, or
//! says why not.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_import::Config;
use serde_json::Value;
use std::collections::HashSet;

/// Largest whole number in a configuration that is read as a model: it may be a number of layers and experts, each
/// of which is a request.
const LARGEST: u64 = 512;

/// Names of tensors that exist, of those that a family chooses between.
const OPTIONAL: [&[&str]; 3] =
    [&[], &["experts.gate_up_proj"], &[".qweight", ".weight_packed", "_scale_inv"]];

fn is_small(value: &Value) -> bool {
    match value {
        Value::Number(n) => n.as_u64().is_none_or(|n| n <= LARGEST),
        Value::Array(values) => values.iter().all(is_small),
        Value::Object(map) => map.values().all(is_small),
        _ => true,
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Ok(config) = Config::parse("config.json", bytes) else { return };
    for spec in moec_import::quantised::layouts(&config).into_iter().flatten() {
        assert!(!spec.title().is_empty());
    }
    let Ok(Value::Object(map)) = serde_json::from_slice(bytes) else { return };
    if !map.values().all(is_small) {
        return;
    }
    for optional in OPTIONAL {
        let Ok((_, tensors)) = moec_import::without_weights(map.clone(), optional) else { continue };
        let names: HashSet<&str> = tensors.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names.len(), tensors.len());
    }
});
