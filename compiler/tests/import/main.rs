//! From Hugging Face folders to Graphs whose logits are those of transformers.

#![allow(clippy::unwrap_used, clippy::panic)]

mod bad_config;
mod bad_files;
mod blocks;
mod containers;
mod encodings;
mod gguf;
mod goldens;
mod layouts;
mod lowering;
mod support;
