//! Streams of experts of the supported families, and of experts with odd sizes.

use crate::common::{Bench, GLUS, Random, Weights, bits, small};
use moec_ir::{Activation, Glu};
use moec_ndp::allocation::{DimmConfig, DramLayout, RowAllocator};
use moec_ndp::emit::{EmitError, Output, emit};
use moec_ndp::evaluate::expert;
use moec_ndp::image::Shape;
use moec_ndp_isa::{Op, Stream, decode, encode, parse, print, verify};
use proptest::prelude::*;

const SILU: Glu = Glu::Gated(Activation::Silu);

/// Hidden and inner channels, gate, biases; expected tokens per block, with routing weights.
const SHAPES: [(u32, u32, Glu, bool, u32); 13] = [
    (2048, 1024, SILU, false, 25),
    (4096, 14336, SILU, false, 6),
    (6144, 16384, SILU, false, 5),
    (5120, 1536, SILU, false, 17),
    (4096, 1536, SILU, false, 20),
    (4096, 1408, SILU, false, 20),
    (4096, 6400, SILU, false, 11),
    (2880, 2880, Glu::Clamped { alpha: 1.702, limit: 7.0 }, true, 18),
    (7168, 2048, SILU, false, 13),
    (2048, 768, Glu::Gated(Activation::Relu), false, 20),
    (64, 32, SILU, false, 64),
    (100, 36, Glu::DRelu, true, 64),
    (33, 17, Glu::Gated(Activation::GeluTanh), true, 64),
];

fn stream(dimm_config: DimmConfig, shape: &Shape, slots: u32, output: Output) -> Stream {
    emitted(dimm_config, shape, slots, output).expect("a stream")
}

fn emitted(dimm_config: DimmConfig, shape: &Shape, slots: u32, output: Output) -> Result<Stream, EmitError> {
    let mut allocator = RowAllocator::new(dimm_config, *shape, slots).expect("an allocator");
    let rows =
        allocator.allocate(crate::common::EXPERT, DramLayout::Localized(1)).expect("room").rows.clone();
    emit(shape, &dimm_config, 1, rows, allocator.boxes(), output)
}

#[test]
fn the_verifier_accepts_every_stream() {
    for (hidden, inner, glu, bias, tokens) in SHAPES {
        let shape = Shape { hidden, inner, glu, bias };
        for output in [Output::Slots, Output::Weighted] {
            for slots in [1, 2, 7, 64, 4096] {
                let stream = stream(DimmConfig::trimoe(), &shape, slots, output);
                verify(&stream).unwrap_or_else(|fault| panic!("{shape:?}, {slots} slots: {fault}"));
                assert_eq!(parse(&print(&stream)).expect("a text form"), stream);
                assert_eq!(decode(&encode(&stream)).expect("a binary form"), stream);
                assert!(stream.tokens <= slots);
                if slots == 64 && output == Output::Weighted {
                    assert_eq!(stream.tokens, tokens, "{shape:?}");
                }
            }
        }
    }
}

#[test]
fn every_weight_is_read_once_in_a_block() {
    for (hidden, inner, glu, bias, _) in SHAPES {
        let shape = Shape { hidden, inner, glu, bias };
        let image = shape.image().expect("an image");
        let stream = stream(DimmConfig::trimoe(), &shape, 64, Output::Slots);
        let mut read: Vec<_> = stream.code.iter().filter(|i| matches!(i.op, Op::Gemv { .. })).collect();
        read.sort_by_key(|i| i.op.lines()[0].lines.line);
        let end = read.iter().fold(0, |at, i| {
            let lines = i.op.lines()[0];
            assert_eq!(lines.lines.line, at, "{shape:?}");
            at + lines.count
        });
        assert_eq!(end, image.down.range().end);
    }
}

#[test]
fn expert_that_is_too_wide_is_rejected() {
    let dimm_config = DimmConfig::trimoe();
    let shape = Shape { hidden: 131_072, inner: 64, glu: GLUS[0], bias: false };
    let mut allocator = RowAllocator::new(dimm_config, shape, 4).expect("an allocator");
    let rows =
        allocator.allocate(crate::common::EXPERT, DramLayout::Localized(0)).expect("room").rows.clone();
    let refused =
        emit(&shape, &dimm_config, 0, rows, allocator.boxes(), Output::Slots).expect_err("too wide");
    assert_eq!(
        refused.to_string(),
        "a token of an expert of 131072 by 64 takes 263040 bytes of the buffer, which has 262144: such an expert cannot \
         be computed in a DIMM"
    );
    // Only one token fits, and the sums of few panels at a time.
    let many = Shape { hidden: 65_250, inner: 65_250, ..shape };
    let refused =
        emit(&many, &dimm_config, 0, 0..1, allocator.boxes(), Output::Slots).err().map(|e| e.to_string());
    let expected = "the stream of an expert of 65250 by 65250 takes more instructions than a stream has, or more lines than an \
                  instruction moves";
    assert_eq!(refused.as_deref(), Some(expected));
    let shape = Shape { hidden: 0, ..shape };
    let boxes = allocator.boxes().clone();
    assert!(matches!(emit(&shape, &dimm_config, 0, 0..1, &boxes, Output::Slots), Err(EmitError::Image(_))));
}

/// The text of a stream.
#[test]
fn stream_computes_chunk_by_chunk() {
    let shape = Shape { hidden: 512, inner: 4096, glu: SILU, bias: false };
    let text = print(&stream(small(), &shape, 64, Output::Weighted));
    let code: Vec<&str> =
        text.lines().map(str::trim).filter(|l| l.starts_with(['g', 'l', 's', 'i', 'b'])).collect();
    let kinds: Vec<&str> = code.iter().filter_map(|line| line.split(' ').next()).collect();
    let step = |from: usize| {
        let end = kinds[from..].iter().position(|k| *k == "barrier").map_or(kinds.len(), |n| from + n);
        &kinds[from..end]
    };
    let body = kinds.iter().position(|k| *k == "loop").expect("a loop") + 1;
    assert_eq!(step(body), ["load", "load", "init"], "{text}");
    let overlapped =
        kinds.split(|k| *k == "barrier").filter(|s| s.contains(&"gemv") && s.contains(&"glu")).count();
    assert!(overlapped > 0, "gate and up are joined while others are multiplied: {text}");
}

fn shapes(most: u32) -> impl Strategy<Value = Shape> {
    let size = || prop_oneof![1..100_u32, 1..most];
    let glu = prop::sample::select(&GLUS[..]);
    (size(), size(), glu, any::<bool>()).prop_map(|(hidden, inner, glu, bias)| Shape {
        hidden,
        inner,
        glu,
        bias,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_shape_has_a_valid_stream(shape in shapes(40_000), slots in prop_oneof![1..64_u32, 1..5000_u32], weighted: bool) {
        let output = if weighted { Output::Weighted } else { Output::Slots };
        match emitted(DimmConfig::trimoe(), &shape, slots, output) {
            Ok(stream) => {
                prop_assert_eq!(verify(&stream), Ok(()));
                prop_assert!(stream.tokens >= 1 && stream.tokens <= slots);
            }
            // A stream of so many weights may have too many instructions.
            Err(e) => {
                let weights = u64::from(shape.hidden) * u64::from(shape.inner);
                prop_assert!(matches!(e, EmitError::Long(_)) && weights > 1 << 29, "{e}");
            }
        }
    }

    #[test]
    fn any_shape_matches_the_evaluator(shape in shapes(300), n in 1_usize..6, slots in 5_u32..9, seed: u64) {
        let mut bench = Bench::new(&Weights::random(shape, seed), slots, Output::Slots);
        // Small blocks, so that the stream has several.
        bench.stream.tokens = bench.stream.tokens.min(2);
        let x = Random(seed).numbers(n * shape.hidden as usize, 3.0);
        let expected = expert(&shape, &bench.image, &x, n).expect("an evaluation");
        let (results, _) = bench.run(1, &x, &vec![1.0; n], slots - n as u32);
        prop_assert_eq!(bits(&results), bits(&expected));
    }
}
