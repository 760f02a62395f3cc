//! Common functions of the tests.

use moec_ptx::{Argument, ExecutionError, Launch, LaunchError, Memory, Program, Report, parse, verify};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

/// Modules compiled by LLVM, and `mma_bf16`, which is written by hand.
pub(crate) const SAMPLES: [&str; 5] = ["vector_add", "row_sum", "matmul", "softmax", "mma_bf16"];

/// The folder of the samples.
pub(crate) fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/samples")
}

/// Text of a sample.
pub(crate) fn sample(name: &str) -> String {
    fs::read_to_string(folder().join(format!("{name}.ptx"))).unwrap()
}

/// A module with one kernel, which has these parameters and statements.
pub(crate) fn kernel(params: &str, body: &str) -> String {
    format!(
        ".version 8.3\n.target sm_80\n.address_size 64\n.visible .entry kernel({params})\n{{\n{}\n{body}\n}}\n",
        ".reg .pred %p<8>; .reg .b16 %h<16>; .reg .b32 %r<64>; .reg .b64 %d<32>; .reg .f32 %f<16>;"
    )
}

/// Little-endian bytes of numbers.
pub(crate) fn floats(of: &[f32]) -> Vec<u8> {
    of.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Numbers of little-endian bytes.
pub(crate) fn as_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|x| f32::from_le_bytes(x.try_into().unwrap())).collect()
}

/// Words of little-endian bytes.
pub(crate) fn as_words(bytes: &[u8]) -> Vec<u32> {
    bytes.chunks_exact(4).map(|x| u32::from_le_bytes(x.try_into().unwrap())).collect()
}

/// Pseudorandom numbers between −1 and 1.
pub(crate) fn noise(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2) + 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// The bf16 bits of an f32, rounded to nearest.
pub(crate) fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The f32 of bf16 bits.
pub(crate) fn of_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Assembles a module with `ptxas` for an architecture, if it is installed.
///
/// # Panics
/// Panics if the assembler reports an error.
pub(crate) fn assembled(what: &str, architecture: &str, text: &str) {
    if !moec_testing::PTXAS.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (from, to) = (folder.path().join("it.ptx"), folder.path().join("it.cubin"));
    fs::write(&from, text).unwrap();
    let mut command = Command::new(moec_testing::ptxas().unwrap());
    let result = command.arg("--gpu-name").arg(architecture).arg(&from).arg("-o").arg(&to).output().unwrap();
    assert!(result.status.success(), "{what}: {}", String::from_utf8_lossy(&result.stderr));
}

/// Executes a kernel whose only parameter is a buffer; returns the words that it wrote, or the error.
pub(crate) fn execute(text: &str, words: usize, launch: &Launch) -> Result<(Vec<u32>, Report), LaunchError> {
    let module = parse(text).unwrap_or_else(|e| panic!("{e}"));
    verify(&module).unwrap_or_else(|e| panic!("{e}\n{text}"));
    let mut memory = Memory::new(&module).unwrap();
    let out = memory.add("out", &vec![0; 4 * words]);
    let program = Program::new(&module, "kernel").unwrap();
    let report = program.launch(&memory, &[Argument::Buffer(out)], launch)?;
    Ok((as_words(&memory.bytes(out)), report))
}

/// Error of a kernel with this body; its parameter `out` is a buffer of 256 words.
pub(crate) fn stopped(body: &str, launch: &Launch) -> ExecutionError {
    match execute(&kernel(".param .u64 out", body), 256, launch) {
        Err(LaunchError::Execution(error)) => *error,
        other => panic!("{other:?}\n{body}"),
    }
}
