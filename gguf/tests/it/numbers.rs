//! Decoded numbers, compared with the dequantiser of the `gguf` package (`tests/samples/write.py`).

use moec_gguf::Header;
use moec_gguf::types::TYPES;
use moec_testing::GGUF;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn samples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/samples")
}

/// Decodes the blocks of every type in a file and compares the numbers with the file's own, bit for bit. NaN
/// matches any NaN: its bits depend on the CPU. Returns the names of types with infinite numbers or NaN.
fn compare(file: &[u8]) -> Vec<&'static str> {
    let header = Header::read(file).unwrap();
    let find = |name: &str| header.tensors().iter().find(|t| t.name == name).unwrap();
    let mut special = Vec::new();
    for kind in TYPES.iter().filter(|kind| kind.decode.is_some()) {
        let (stored, want) = (find(kind.name), find(&format!("{}.decoded", kind.name)));
        assert_eq!((stored.kind.id, want.kind.name), (kind.id, "F32"));
        assert_eq!(stored.shape, want.shape);
        let want: Vec<f32> =
            file[want.bytes.clone()].as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut out = vec![0.0; want.len()];
        kind.decode.unwrap()(&file[stored.bytes.clone()], 0, &mut out);
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
        let differ = out.iter().zip(&want).filter(|(x, want)| !same(**x, **want)).count();
        assert_eq!(differ, 0, "{}: of {} numbers", kind.name, want.len());
        assert!(out.iter().any(|x| *x < 0.0) && out.iter().any(|x| *x > 0.0), "{}", kind.name);
        if out.iter().any(|x| !x.is_finite()) {
            special.push(kind.name);
        }
    }
    special
}

#[test]
fn every_type_decodes_like_the_python_package() {
    let file = fs::read(samples().join("numbers.gguf")).unwrap();
    // The largest scales of MXFP4 overflow.
    assert_eq!(compare(&file), ["MXFP4"]);
}

/// A quarter of a million numbers of each type: every point of every grid, and all kinds of scales.
#[test]
fn any_bytes_decode_like_the_python_package() {
    if !GGUF.met_or_skip() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("any.gguf");
    let mut command = Command::new(moec_testing::gguf().unwrap());
    command.arg(samples().join("write.py")).arg(&path).args(["--numbers", "262144", "--any"]);
    let out = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let special = compare(&fs::read(&path).unwrap());
    let finite: Vec<_> =
        TYPES.iter().filter(|t| t.decode.is_some() && !special.contains(&t.name)).map(|t| t.name).collect();
    assert_eq!(finite, ["NVFP4"]);
}
