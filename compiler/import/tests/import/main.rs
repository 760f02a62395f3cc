//! Tests of the import: from Hugging Face folders to Graphs with the logits of transformers.
#![allow(clippy::cast_possible_truncation, reason = "numbers of tests are small")]
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
mod quantised;
mod support;
