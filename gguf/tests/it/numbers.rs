//! Numbers against the dequantiser of the `gguf` package, which wrote the sample (`tests/samples/write.py`).

use moec_gguf::Header;
use moec_gguf::types::TYPES;
use std::path::Path;

#[test]
fn every_type_decodes_as_the_package_does() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/samples/numbers.gguf");
    let file = std::fs::read(path).unwrap();
    let header = Header::read(&file).unwrap();
    let find = |name: &str| header.tensors().iter().find(|t| t.name == name).unwrap();
    for kind in TYPES.iter().filter(|kind| kind.decode.is_some()) {
        let (stored, want) = (find(kind.name), find(&format!("{}.decoded", kind.name)));
        assert_eq!((stored.kind.id, want.kind.name), (kind.id, "F32"));
        assert_eq!(stored.shape, want.shape);
        let want: Vec<u32> =
            file[want.bytes.clone()].as_chunks().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        let mut out = vec![f32::NAN; want.len()];
        kind.decode.unwrap()(&file[stored.bytes.clone()], 0, &mut out);
        let differ = out.iter().zip(&want).filter(|(x, want)| x.to_bits() != **want).count();
        assert_eq!(differ, 0, "{}: of {} numbers", kind.name, want.len());
        assert!(out.iter().any(|x| *x < 0.0) && out.iter().any(|x| *x > 0.0), "{}", kind.name);
    }
}
