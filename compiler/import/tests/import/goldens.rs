//! The logits of every golden checkpoint.

use super::support::{distance, expected, golden, logits};

/// Imports, lowers, verifies and evaluates; the prompt is not a multiple of the chunk.
fn check(path: &str, tokens: usize, chunk: usize) {
    let dir = golden(path);
    let (ids, want) = expected(&dir);
    let vocab = want.len() / ids.len();
    let ids = &ids[..tokens.min(ids.len())];
    let got = logits(&dir, ids, chunk);
    let off = distance(&got, &want[..ids.len() * vocab]);
    assert!(off < 1e-4, "{path}: logits differ by {off}");
}

#[test]
fn deepseek_v2() {
    check("hf/deepseek_v2", 48, 20);
}

#[test]
fn deepseek_v3() {
    check("hf/deepseek_v3", 48, 20);
}

#[test]
fn glm4_moe() {
    check("hf/glm4_moe", 48, 20);
}

#[test]
fn gpt_oss() {
    check("hf/gpt_oss", 48, 20);
}

#[test]
fn mixtral() {
    check("hf/mixtral", 48, 20);
}

#[test]
fn olmoe() {
    check("hf/olmoe", 48, 20);
}

#[test]
fn phimoe() {
    check("hf/phimoe", 48, 20);
}

#[test]
fn qwen2_moe() {
    check("hf/qwen2_moe", 48, 20);
}

#[test]
fn qwen3_moe() {
    check("hf/qwen3_moe", 48, 20);
}

#[test]
fn smallthinker_4b() {
    check("hf/smallthinker_4b", 48, 20);
}

#[test]
fn smallthinker_21b() {
    check("hf/smallthinker_21b", 48, 20);
}

#[test]
fn turbosparse_mixtral() {
    check("hf/turbosparse_mixtral", 48, 20);
}

#[test]
fn bamboo() {
    check("hf/bamboo", 48, 20);
}

#[test]
fn prosparse() {
    check("hf/prosparse", 48, 20);
}

#[test]
fn ferris() {
    check("models/ferris", 600, 64);
}
