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
//! | `manifest.json.minisig` | a signature of the manifest, where it was signed; the manifest does not list it |

pub mod artifacts;
pub mod cargo;
pub mod destination;
pub mod device;
mod in_order;
pub mod link;
pub mod manifest;
pub mod objects;
pub mod pack;
pub mod packed;
pub mod partial;
pub mod read;
mod reuse;
pub mod runner;
pub mod signature;
pub mod swap;
pub mod toolchain;
pub mod workspace;
pub mod write;
