//! Sampling options by the authors of a checkpoint, in the form that a bundle has them in.

use super::Config;
use serde_json::{Map, Value};

/// Keys of sampling options in `generation_config.json`.
const KEYS: [&str; 7] =
    ["do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty"];

/// Contents of `artifacts/sampling.json`: these keys, with the checkpoint's values. `None` if it has none of
/// them.
pub(super) fn sampling(config: Option<&Config>) -> Option<Vec<u8>> {
    let value = |key: &&str| Some(((*key).to_owned(), config?.value(key)?.clone()));
    let found: Map<String, Value> = KEYS.iter().filter_map(value).collect();
    (!found.is_empty()).then(|| format!("{:#}\n", Value::Object(found)).into_bytes())
}
