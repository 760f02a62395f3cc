//! For any bytes there is no panic, and every result is inside the file.

use super::builder::*;
use moec_gguf::Header;
use moec_gguf::types::TYPES;
use proptest::prelude::*;

/// Reads a file and everything in it.
fn walk(file: &[u8]) {
    let Ok(header) = Header::read(file) else { return };
    for (_, value) in header.keys() {
        if let Some(array) = value.as_array() {
            assert_eq!(array.iter().count(), array.len());
            assert!(array.len() <= file.len());
        }
    }
    let mut last = 0;
    for t in header.tensors() {
        assert!(t.bytes.start >= last && t.bytes.end <= file.len());
        last = t.bytes.end;
        let numbers: usize = t.shape.iter().product();
        assert_eq!(t.bytes.len(), numbers / t.kind.block * t.kind.bytes);
        if let Some(decode) = t.kind.decode {
            let mut out = vec![0.0; numbers.min(1000)];
            decode(&file[t.bytes.clone()], 0, &mut out);
        }
    }
}

fn sample() -> Vec<u8> {
    Builder::default()
        .key("general.architecture", TEXT, &text("llama"))
        .key("list", ARRAY, &[array(TEXT, 2), text("x"), text("yz")].concat())
        .key("n", U32, &7_u32.to_le_bytes())
        .tensor("a", &[32, 2], 8, &[1; 68])
        .tensor("b", &[3], 0, &[2; 12])
        .tensor("c", &[256], 12, &[3; 144])
        .build()
}

#[test]
fn seeds_of_fuzzing_are_read() {
    let seeds = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/gguf");
    let files: Vec<_> = std::fs::read_dir(seeds).unwrap().map(|f| f.unwrap().path()).collect();
    let mut with_tensors = 0;
    for path in files {
        let file = std::fs::read(&path).unwrap();
        let header = Header::read(&file).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        with_tensors += usize::from(!header.tensors().is_empty());
        walk(&file);
    }
    // One is the metadata of a model alone.
    assert_eq!(with_tensors, 3);
}

proptest! {
    #[test]
    fn changed_bytes_do_not_panic(changes in proptest::collection::vec((0_usize..700, any::<u8>()), 1..8)) {
        let mut file = sample();
        for (at, byte) in changes {
            let at = at % file.len();
            file[at] = byte;
        }
        walk(&file);
    }

    #[test]
    fn any_bytes_after_the_magic_do_not_panic(rest in proptest::collection::vec(any::<u8>(), 0..300)) {
        walk(&[b"GGUF\x03\0\0\0".as_slice(), &rest].concat());
    }

    #[test]
    fn changed_header_numbers_do_not_panic(at in 0_usize..60, n in any::<u64>(), small in 0_u64..70) {
        for n in [n, small, u64::MAX - small, 1 << (small % 64)] {
            let mut file = sample();
            let at = (8 * at).min(file.len() - 8);
            file[at..at + 8].copy_from_slice(&n.to_le_bytes());
            walk(&file);
        }
    }

    /// A part of a row, from any number on, equals that part of the whole row. Numbers past the row's end are
    /// unchanged.
    #[test]
    fn parts_of_a_row_decode_like_the_whole_row(row in 0_usize..34, from in 0_usize..600, len in 0_usize..600, seed in any::<u64>()) {
        let kind = TYPES[row];
        let Some(decode) = kind.decode else { return Ok(()) };
        let rows = 768 / kind.block;
        let mut state = seed;
        let stored: Vec<u8> = (0..rows * kind.bytes).map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        }).collect();
        let mut whole = vec![0.0; 768];
        decode(&stored, 0, &mut whole);
        let (from, len) = (from, len.min(768 - from));
        let first = from / kind.block * kind.bytes;
        let mut part = vec![7.0; len];
        decode(&stored[first..], from, &mut part);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&part), bits(&whole[from..from + len]));
        let mut none = vec![7.0; len];
        decode(&stored[..kind.bytes - 1], from, &mut none);
        prop_assert!(none.iter().all(|x| *x == 7.0));
    }
}
