//! Tests of frequency tables against values computed by hand from the published formulas.

use super::*;
use serde_json::{Value, json};

fn config(rope: Value) -> Config {
    let all = json!({"max_position_embeddings": 131_072, "rope_theta": 10_000.0, "rope_scaling": rope});
    Config::parse("config.json", all.to_string().as_bytes()).unwrap()
}

fn check(rope: Value, head_dim: usize, expect: &[f64]) -> Rope {
    let rope = read(&config(rope), head_dim, Defaults::default()).unwrap();
    assert_eq!(rope.inv_freq.len(), expect.len());
    for (got, want) in rope.inv_freq.iter().zip(expect) {
        assert!((f64::from(*got) / want - 1.0).abs() < 3e-7, "{got} is not {want}");
    }
    rope
}

fn refused(rope: Value) -> String {
    read(&config(rope), 8, Defaults::default()).unwrap_err().to_string()
}

#[test]
fn plain() {
    // 10000^(−2i/8)
    let rope = check(Value::Null, 8, &[1.0, 0.1, 0.01, 0.001]);
    assert_eq!((rope.scale, rope.long), (1.0, None));
}

#[test]
fn theta_of_rope_scaling_has_precedence() {
    check(json!({"type": "linear", "factor": 1.0, "rope_theta": 16.0}), 8, &[1.0, 0.5, 0.25, 0.125]);
}

#[test]
fn linear() {
    check(json!({"type": "linear", "factor": 4.0}), 8, &[0.25, 0.025, 0.0025, 0.00025]);
}

#[test]
fn partial() {
    let config = config(json!({"partial_rotary_factor": 0.5}));
    assert_eq!(read(&config, 16, Defaults::default()).unwrap().inv_freq.len(), 4);
    let halved = Defaults { partial: 0.5, ..Defaults::default() };
    let silent = Config::parse("config.json", b"{}").unwrap();
    assert_eq!(read(&silent, 16, halved).unwrap().inv_freq.len(), 4);
}

#[test]
fn yarn_ramp() {
    // dim 8, context 4096: the channel that rotates n times is 8 ln(4096 / 2πn) / (2 ln 10000).
    // n = 32: 1.3097 → 1; n = 1: 2.8147 → 3. Pairs 0 and 1 are kept, 2 is half way, 3 is interpolated.
    let yarn = json!({"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096});
    let rope = check(yarn, 8, &[1.0, 0.1, 0.01 * (0.5 + 0.5 / 40.0), 0.001 / 40.0]);
    // 0.1 ln 40 + 1
    assert!((rope.scale - 1.368_887_9).abs() < 1e-6);
}

#[test]
fn yarn_without_truncation() {
    let yarn =
        json!({"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "truncate": false});
    let channel = |turns: f64| 8.0 * (4096.0 / (turns * 2.0 * PI)).ln() / (2.0 * 10_000_f64.ln());
    let (low, high) = (channel(32.0), channel(1.0));
    assert!((low - 1.3097).abs() < 1e-3 && (high - 2.8147).abs() < 1e-3);
    let ramp = (2.0 - low) / (high - low);
    check(yarn, 8, &[1.0, 0.1, 0.01 * (1.0 - ramp + ramp / 40.0), 0.001 / 40.0]);
}

#[test]
fn yarn_of_deepseek() {
    // Equal mscale and mscale_all_dim cancel in cosine and sine; they change the softmax scale instead.
    let yarn = json!({
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 0.707, "mscale_all_dim": 0.707,
    });
    let (config, defaults) = (config(yarn), Defaults::default());
    assert_eq!(read(&config, 64, defaults).unwrap().scale, 1.0);
    // (0.0707 ln 40 + 1)² = 1.260804²
    assert!((softmax_factor(&config, defaults).unwrap() - 1.589_626).abs() < 1e-5);
}

#[test]
fn yarn_attention_factor() {
    let yarn = json!({"type": "yarn", "factor": 4.0, "attention_factor": 0.5, "mscale_all_dim": 0.0});
    assert_eq!(read(&config(yarn.clone()), 8, Defaults::default()).unwrap().scale, 0.5);
    assert_eq!(softmax_factor(&config(yarn), Defaults::default()).unwrap(), 1.0);
}

#[test]
fn softmax_scale_is_untouched_without_scaling() {
    assert_eq!(softmax_factor(&config(json!({"mscale_all_dim": 1.0})), Defaults::default()).unwrap(), 1.0);
}

#[test]
fn longrope() {
    let long = json!({
        "type": "longrope", "short_factor": [1.0, 1.0, 2.0, 2.0], "long_factor": [1.0, 4.0, 8.0, 10.0],
        "original_max_position_embeddings": 4096,
    });
    let rope = check(long.clone(), 8, &[1.0, 0.1, 0.005, 0.0005]);
    // √(1 + ln(131072 / 4096) / ln 4096) = √(1 + 5/12)
    assert!((rope.scale - 1.190_238).abs() < 1e-6);
    let switched = rope.long.unwrap();
    assert_eq!((switched.after, switched.scale), (4096, rope.scale));
    for (got, want) in switched.inv_freq.iter().zip([1.0, 0.025, 0.00125, 0.0001]) {
        assert!((got / want - 1.0).abs() < 3e-7);
    }
    // Phi-3.5-MoE gives both factors.
    let mut phi = long;
    phi["short_mscale"] = json!(1.25);
    phi["long_mscale"] = json!(1.5);
    let rope = read(&config(phi), 8, Defaults::default()).unwrap();
    assert_eq!((rope.scale, rope.long.unwrap().scale), (1.25, 1.5));
}

#[test]
fn original_context_is_also_read_outside_of_rope_scaling() {
    let text = json!({
        "max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    });
    let config = Config::parse("config.json", text.to_string().as_bytes()).unwrap();
    assert_eq!(read(&config, 2, Defaults::default()).unwrap().long.unwrap().after, 4096);
}

#[test]
fn llama3() {
    // Wavelengths 2π/f of 6.28, 62.8, 628 and 6283 against bounds 8192/4 and 8192/1: the first three are
    // kept, and of the last a part s = (8192/6283.19 − 1)/3 = 0.1012686.
    let scaled = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let s = (8192.0 / (2000.0 * PI) - 1.0) / 3.0;
    check(scaled.clone(), 8, &[1.0, 0.1, 0.01, 0.001 * ((1.0 - s) / 8.0 + s)]);
    let mut shorter = scaled;
    shorter["original_max_position_embeddings"] = json!(4096);
    check(shorter, 8, &[1.0, 0.1, 0.01, 0.001 / 8.0]);
}

#[test]
fn unknown_kinds_are_refused_by_name() {
    for kind in ["dynamic", "mrope", "su"] {
        assert!(refused(json!({"type": kind, "factor": 2.0})).contains(kind));
    }
}

#[test]
fn numbers_out_of_range_are_refused() {
    for rope in [
        json!({"type": "yarn", "factor": 0.0}),
        json!({"type": "linear", "factor": -1.0}),
        json!({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}),
        json!({"type": "longrope", "short_factor": [1.0, 1.0, 1.0, 0.0], "long_factor": [1.0, 1.0, 1.0, 1.0]}),
        json!({"type": "longrope", "long_factor": [1.0, 1.0, 1.0, 1.0]}),
        json!({"rope_theta": 0.5}),
        json!({"partial_rotary_factor": 0.1}),
        json!({"partial_rotary_factor": 2.0}),
        json!({"partial_rotary_factor": 1e300}),
    ] {
        refused(rope);
    }
}
