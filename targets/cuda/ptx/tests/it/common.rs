//! What tests share.

use std::fs;
use std::path::PathBuf;

/// What LLVM wrote, by name.
pub(crate) const SAMPLES: [&str; 4] = ["vector_add", "row_sum", "matmul", "softmax"];

/// The folder of the samples.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/samples")
}

/// A sample's text.
pub(crate) fn sample(name: &str) -> String {
    fs::read_to_string(folder().join(format!("{name}.ptx"))).unwrap()
}

/// A module of one kernel: its parameters and its statements.
pub(crate) fn kernel(params: &str, body: &str) -> String {
    format!(
        ".version 8.3\n.target sm_80\n.address_size 64\n.visible .entry kernel({params})\n{{\n{}\n{body}\n}}\n",
        ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<16>;"
    )
}
