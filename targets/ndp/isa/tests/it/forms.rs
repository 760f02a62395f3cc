//! Text and binary form round-trip.

use crate::common::{EXPERT, expert, stream};
use moec_ndp_isa::*;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;

/// Bitwise equality: `-0` differs from `0`.
fn same(one: &Stream, other: &Stream) -> bool {
    one == other && encode(one) == encode(other)
}

/// Checks that an accepted stream round-trips through both forms, and can be verified.
fn accepted(stream: &Stream) -> Result<(), TestCaseError> {
    let text = print(stream);
    let again = parse(&text).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
    prop_assert!(same(&again, stream), "{}", text);
    let bytes = encode(stream);
    let again = decode(&bytes).map_err(|e| TestCaseError::fail(format!("{e}\n{text}")))?;
    prop_assert!(same(&again, stream), "{}", text);
    let _ = verify(stream);
    Ok(())
}

proptest! {
    #[test]
    fn every_form_round_trips(stream in stream()) {
        accepted(&stream)?;
    }

    /// Damaged binary forms are refused, or are the canonical form of another stream.
    #[test]
    fn damaged_streams_are_rejected_or_canonical(
        stream in stream(),
        damage in vec((any::<Index>(), any::<u8>()), 0..4),
        cut in any::<Index>(),
        whole in any::<bool>(),
        more in vec(any::<u8>(), 0..2),
    ) {
        let mut bytes = encode(&stream);
        for (at, byte) in damage {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        bytes.truncate(if whole { bytes.len() } else { cut.index(bytes.len()) });
        bytes.extend(more);
        if let Ok(stream) = decode(&bytes) {
            prop_assert_eq!(encode(&stream), bytes);
            accepted(&stream)?;
        }
    }

    #[test]
    fn decoding_any_bytes_never_panics(bytes in vec(any::<u8>(), 0..300)) {
        for bytes in [bytes.clone(), [&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat()] {
            if let Ok(stream) = decode(&bytes) {
                prop_assert_eq!(encode(&stream), bytes);
                accepted(&stream)?;
            }
        }
    }

    /// Random edits of the example.
    #[test]
    fn parsing_any_text_never_panics(
        edits in vec((any::<Index>(), 0..12_usize, prop_oneof!["[a-z0-9 ,\\[\\]+*.;>-]{0,6}", "\\PC{0,2}"]), 1..5),
    ) {
        let mut text: Vec<char> = EXPERT.chars().collect();
        for (at, length, with) in edits {
            let at = at.index(text.len());
            let end = (at + length).min(text.len());
            text.splice(at..end, with.chars());
        }
        let text: String = text.into_iter().collect();
        match parse(&text) {
            Ok(stream) => accepted(&stream)?,
            Err(e) => {
                let line = text.lines().nth(e.line - 1).unwrap_or_default();
                prop_assert!(e.column <= line.chars().count() + 1, "{}", e);
                prop_assert!(!e.hint.is_empty());
            }
        }
    }
}

#[test]
fn isa_example_is_well_formed() {
    let stream = expert();
    verify(&stream).expect("the example is well-formed");
    accepted(&stream).expect("the example has both forms");
    insta::assert_snapshot!(print(&stream));
}

/// The documentation shows the example unchanged.
#[test]
fn isa_page_contains_the_example() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../docs/ndp-isa.md"));
    assert!(page.contains(EXPERT), "docs/ndp-isa.md has another example than tests/it/expert.ndp");
}

/// The seed of fuzzing is of this version. `MOEC_SEEDS=1` writes it.
#[test]
fn isa_fuzz_seeds_are_current() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../fuzz/seeds/ndp");
    let (text, bytes) = (EXPERT.as_bytes().to_vec(), encode(&expert()));
    for (name, content) in [("expert.text", text), ("expert", bytes)] {
        let path = format!("{folder}/{name}");
        if std::env::var_os("MOEC_SEEDS").is_some() {
            std::fs::write(&path, &content).expect("the folder of seeds can be written");
        }
        assert!(std::fs::read(&path).expect("there is a seed") == content, "{path} is of another version");
    }
}

/// Every operation in text form, so that none is missing from the tables of names, codes and operands.
#[test]
fn every_operation_has_both_forms() {
    let lines = [
        "loop",
        "load f32[0], outbox[3], lines 4 wait e0 wait e31 signal e7",
        "store b16[64 + t*128], outbox[3 + r*4], lines 4",
        "init f32[0 + t*64], count 16",
        "gemv f32[0], b16[64], weights[1], panels 2, pairs 3",
        "act silu b16[0], f32[64], count 5",
        "act gelu b16[0], f32[64], count 5",
        "act gelu_tanh b16[0], f32[64], count 5",
        "act relu b16[0], f32[64], count 5",
        "act sigmoid b16[0], f32[64], count 5",
        "glu silu b16[0], f32[64], count 5",
        "glu gelu b16[0], f32[64], count 5",
        "glu gelu_tanh b16[0], f32[64], count 5",
        "glu relu b16[0], f32[64], count 5",
        "glu sigmoid b16[0], f32[64], count 5",
        "glu drelu b16[0], f32[64], count 5",
        "glu clamped(1.702, 7) b16[0], f32[64], count 5",
        "glu clamped(-0, 0.000000000000000000000000000000000000000000001) b16[0], f32[64], count 5",
        "mul f32[0], f32[64], f32[128], count 5",
        "scale f32[0], f32[64], f32[128], count 5",
        "reduce f32[0], f32[64], count 5",
        "convert b16[0], f32[64], count 5",
        "end",
        "relayout weights[0] -> outbox[1], lines 2, to striped",
        "migrate weights[0] -> dimm 3 rows 4..5, lines 6",
        "barrier",
    ];
    let (header, _) = EXPERT.split_once("loop").expect("the example has a loop");
    let text = format!("{header}\n{}\n", lines.join("\n"));
    let stream = parse(&text).expect("all of them");
    accepted(&stream).expect("both forms");
    let printed = print(&stream);
    let again: Vec<_> = printed.lines().map(str::trim).skip_while(|line| *line != "loop").collect();
    assert_eq!(again, lines);
}

/// The binary form by the documentation, written by hand.
#[test]
fn binary_form_matches_the_documentation() {
    let (header, _) = EXPERT.split_once("\nloop").expect("the example has a loop");
    let empty = encode(&parse(header).expect("a stream without instructions"));
    let name = b"olmoe.layers.0.experts.17";
    let mut expected = [b"moec.ndp", &[1, 0, 0, 0][..], &[name.len() as u8], name].concat();
    for number in [8, 2, 5, 2, 4, 8, 4, 65536, 64, 8, 512, 3, 0_u32] {
        expected.extend(number.to_le_bytes());
    }
    for (name, rows, access) in [("weights", [0, 12_u32], 0), ("inbox", [12, 15], 0), ("outbox", [15, 19], 1)]
    {
        expected.push(name.len() as u8);
        expected.extend(name.bytes());
        expected.extend(rows.map(u32::to_le_bytes).as_flattened());
        expected.extend([0, access]);
    }
    assert_eq!(empty, expected);

    let lines = [
        "loop",
        "end",
        "barrier",
        "load b16[64 + t*128], outbox[3 + r*4], lines 5 wait e0 wait e9 signal e7",
        "store f32[64], outbox[3], lines 5",
        "init f32[64], count 5",
        "gemv f32[64], b16[128], weights[1], panels 2, pairs 3",
        "act sigmoid b16[0], f32[64], count 5",
        "glu clamped(1.5, 7) b16[0], f32[64], count 5",
        "mul f32[0], f32[64], f32[128], count 5",
        "scale f32[0], f32[64], f32[128], count 5",
        "reduce f32[0], f32[64], count 5",
        "convert b16[0], f32[64], count 5",
        "relayout weights[1] -> outbox[2], lines 3, to striped",
        "migrate weights[1] -> dimm 3 rows 4..5, lines 6",
    ];
    let hex = |line: &&str| {
        let stream = parse(&format!("{header}\n{line}\n")).expect("an instruction");
        let bytes: Vec<_> = encode(&stream)[empty.len()..].iter().map(|b| format!("{b:02x}")).collect();
        format!("{line}\n    {}", bytes.join(" "))
    };
    insta::assert_snapshot!(lines.iter().map(hex).collect::<Vec<_>>().join("\n"));
}
