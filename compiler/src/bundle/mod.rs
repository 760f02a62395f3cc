//! Bundles: written whole or not at all, and read back.
//!
//! | path | what |
//! |---|---|
//! | `manifest.json` | versions, and size and SHA-256 of every file |
//! | `device.toml` | the device that it was built for |
//! | `plan.bin`, `plan.txt` | the Plan, for machines and for readers |
//! | `decisions.json` | why kernels are what they are, for `moec explain` |
//! | `weights/dense.bin`, `weights/experts.bin` | packed weights |
//! | `artifacts/kernels.o` | object code |
//! | `artifacts/graph.moe` | the Graph that the plan computes, for `moec verify` |
//! | `artifacts/tokenizer.json` | the checkpoint's tokenizer, if it has one |
//! | `artifacts/chat_template.json` | the checkpoint's chat templates and special tokens, if it has some |
//! | `artifacts/sampling.json` | what the checkpoint says of sampling, if it does |
//! | `runner/` | the generated crate; for a Mac also `build.sh`, which makes `run` of it there |
//! | `run` | the program, where the host can link for the target |
//! | `manifest.json.minisig` | a signature of the manifest, where somebody signed it; the manifest does not list it |

pub mod artifacts;
pub mod cargo;
pub mod destination;
pub mod device;
mod in_order;
pub mod link;
pub mod manifest;
pub(crate) mod pack;
pub mod partial;
pub mod read;
mod reuse;
pub mod runner;
pub mod signature;
pub mod swap;
pub mod toolchain;
pub mod workspace;
pub mod write;

/// Sizes and hashes of all files. It marks a folder as a bundle.
pub const MANIFEST: &str = "manifest.json";
/// Weights that every token reads.
pub const DENSE: &str = "weights/dense.bin";
/// Weights of routed experts.
pub const EXPERTS: &str = "weights/experts.bin";
/// Object code.
pub const KERNELS: &str = "artifacts/kernels.o";
/// Text of the Graph.
pub const GRAPH: &str = "artifacts/graph.moe";
/// Tokenizer.
pub const TOKENIZER: &str = "artifacts/tokenizer.json";
/// Chat templates.
pub const CHAT_TEMPLATE: &str = "artifacts/chat_template.json";
/// Options of sampling.
pub const SAMPLING: &str = "artifacts/sampling.json";
/// Binary form of the plan.
pub const PLAN: &str = "plan.bin";
/// Description of the device.
pub const DEVICE: &str = "device.toml";
/// Text form of the plan.
pub const PLAN_TEXT: &str = "plan.txt";
/// Why kernels are what they are.
pub const DECISIONS: &str = "decisions.json";
/// Signature of the manifest, by minisign or `moec sign`.
pub const SIGNATURE: &str = "manifest.json.minisig";
/// The program.
pub const RUN: &str = "run";
