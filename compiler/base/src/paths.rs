//! Paths of the files of a bundle, relative to its folder.

/// Sizes and hashes of all files. This file marks a folder as a bundle.
pub const MANIFEST: &str = "manifest.json";
/// Weights that every token uses.
pub const DENSE: &str = "weights/dense.bin";
/// Weights of routed experts.
pub const EXPERTS: &str = "weights/experts.bin";
/// Folder of all weights.
const WEIGHTS: &str = "weights/";
/// Object code.
pub const KERNELS: &str = "artifacts/kernels.o";
/// Text of the Graph.
pub const GRAPH: &str = "artifacts/graph.moe";
/// Tokenizer.
pub const TOKENIZER: &str = "artifacts/tokenizer.json";
/// Chat templates.
pub const CHAT_TEMPLATE: &str = "artifacts/chat_template.json";
/// Sampling options.
pub const SAMPLING: &str = "artifacts/sampling.json";
/// Binary form of the plan.
pub const PLAN: &str = "plan.bin";
/// Description of the device.
pub const DEVICE: &str = "device.toml";
/// Text form of the plan.
pub const PLAN_TEXT: &str = "plan.txt";
/// Decisions on kernels, with their reasons.
pub const DECISIONS: &str = "decisions.json";
/// Signature of the manifest, by minisign or `moec sign`.
pub const SIGNATURE: &str = "manifest.json.minisig";
/// The executable.
pub const RUN: &str = "run";

/// Whether a file of a bundle is part of an artifact that is a folder: such files are as large as weights.
pub fn is_inside(name: &str) -> bool {
    name.strip_prefix("artifacts/").is_some_and(|rest| rest.contains('/'))
}

/// Weights that another host than the first reads into this memory.
pub fn weights_of(memory: &str) -> String {
    format!("{WEIGHTS}{memory}.bin")
}

/// Whether a file of a plan has weights.
pub fn has_weights(path: &str) -> bool {
    path.starts_with(WEIGHTS)
}
