//! Default sampling options of a bundle: those of its `generation_config.json`, else temperature 1.

use crate::error::{Error, Result};
use moec_runtime::Sampling;
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::hash::{BuildHasher, RandomState};

/// Sampling parameters of a bundle's checkpoint, from its `generation_config.json`.
pub const FILE: &str = "artifacts/sampling.json";
/// Limit of that file.
const LIMIT: regular::Limit = regular::Limit { what: "options of sampling", bytes: 1 << 16 };

/// The keys of transformers.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Advice {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<usize>,
    min_p: Option<f32>,
    typical_p: Option<f32>,
    repetition_penalty: Option<f32>,
}

/// The options of a bundle: those of its checkpoint, else temperature 1.
///
/// # Errors
/// A file with other options, or one that was changed after the build.
pub fn open(bundle: &BundleReader) -> Result<Sampling> {
    let read = bundle.read_if_any(FILE, LIMIT)?;
    parse(read.as_deref().unwrap_or(b"{}"))
        .map_err(|why| Error::new(format!("cannot read `{FILE}`: {why}")).hint("rebuild the bundle"))
}

/// Reads the options from a bundle's file. `do_sample = false` takes the most probable token.
///
/// # Errors
/// The reason that the text is invalid or out of range.
pub fn parse(bytes: &[u8]) -> Result<Sampling, String> {
    // serde would read the values of a list in order.
    let object: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
    let advice = Advice::deserialize(Value::Object(object)).map_err(|e| e.to_string())?;
    let all = Sampling::GREEDY;
    let sampling = Sampling {
        temperature: match advice.do_sample {
            Some(false) => 0.0,
            _ => advice.temperature.unwrap_or(1.0),
        },
        top_p: advice.top_p.unwrap_or(all.top_p),
        top_k: advice.top_k.unwrap_or(all.top_k),
        min_p: advice.min_p.unwrap_or(all.min_p),
        typical_p: advice.typical_p.unwrap_or(all.typical_p),
        repetition_penalty: advice.repetition_penalty.unwrap_or(all.repetition_penalty),
        ..all
    };
    sampling.check().map_err(|e| e.to_string())?;
    Ok(sampling)
}

/// A random seed.
pub fn random_seed() -> u64 {
    // Larger JSON numbers are not exact in every client that sends them back.
    RandomState::new().hash_one(std::process::id()) >> 11
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_defaults_without_advice_keep_all_tokens() {
        let of = |text: &str| parse(text.as_bytes());
        assert_eq!(of("{}").unwrap(), Sampling { temperature: 1.0, ..Sampling::GREEDY });
        let advised = r#"{"do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": null}"#;
        let expected = Sampling { temperature: 0.6, top_p: 0.95, top_k: 20, ..Sampling::GREEDY };
        assert_eq!(of(advised).unwrap(), expected);
        assert_eq!(of(r#"{"do_sample": false, "temperature": 0.6}"#).unwrap(), Sampling::GREEDY);
        for (wrong, words) in [("[]", "expected"), (r#"{"temperature": -1}"#, "temperature must be from 0")] {
            assert!(of(wrong).unwrap_err().contains(words), "{wrong}");
        }
        assert_ne!(random_seed(), random_seed());
    }
}
