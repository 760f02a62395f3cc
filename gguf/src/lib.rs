//! GGUF, the file format of llama.cpp: metadata, a table of tensors, and their numbers in blocks.
//!
//! A file is untrusted data. [`Header::read`] takes the bytes of a whole file, usually mapped, and checks
//! every count, length, offset and text before it is used. Its result refers only to bytes inside of the
//! file, and takes no more memory than the file's own header justifies. [`types::TYPES`] lists the encodings
//! of numbers, and [`types::Type::decode`] decodes them.
//!
//! The format is described in `docs/gguf.md` of the ggml repository. Versions 2 and 3 are read, in little
//! endian.
//!
//! ```
//! // A file of version 3 without tensors, whose only key is `a`, a `bool`.
//! let mut bytes = b"GGUF\x03\0\0\0".to_vec();
//! bytes.extend([0_u64.to_le_bytes(), 1_u64.to_le_bytes(), 1_u64.to_le_bytes()].concat());
//! bytes.extend(b"a\x07\0\0\0\x01");
//! let header = moec_gguf::Header::read(&bytes).unwrap();
//! assert_eq!(header.get("a"), Some(&moec_gguf::Value::Bool(true)));
//! ```
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

mod cursor;
mod error;
mod header;
mod kind;
mod layout;
pub mod quants;
mod tensor;
pub mod types;
mod value;

pub use error::Error;
pub use header::Header;
pub use kind::Kind;
pub use tensor::Tensor;
pub use value::{Array, Value};
