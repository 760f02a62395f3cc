//! The artifact with a layer's experts.

use crate::common::{EXPERT, GLUS, small};
use moec_ndp::allocation::{DramLayout, RowAllocator};
use moec_ndp::artifact::{Artifact, ArtifactError, MAX_EXPERTS, Placed, decode, encode};
use moec_ndp::emit::{Output, emit};
use moec_ndp::image::Shape;
use moec_ndp_isa::Stream;
use proptest::prelude::*;

fn stream(dimm: u32, number: u32) -> Stream {
    let shape = Shape {
        hidden: 64 + number,
        inner: 48,
        glu: GLUS[number as usize % GLUS.len()],
        bias: number % 2 == 1,
    };
    let mut allocator = RowAllocator::new(small(), shape, 8).expect("an allocator");
    let rows = allocator.allocate(EXPERT, DramLayout::Localized(dimm)).expect("room").rows.clone();
    emit(&shape, &small(), dimm, rows, allocator.boxes(), Output::Weighted).expect("a stream")
}

fn artifact() -> Artifact {
    let placed = |expert, dimm| Placed { expert, stream: stream(dimm, expert) };
    Artifact { layer: 3, experts: vec![placed(2, 0), placed(5, 3), placed(6, 0)] }
}

#[test]
fn damaged_ndp_artifact_is_reported() {
    let good = encode(&artifact()).expect("bytes");
    assert_eq!(decode(&good), Ok(artifact()));
    let with = |at: usize, number: u32| {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        decode(&bytes).expect_err("it is wrong").to_string()
    };
    assert_eq!(with(0, 0), "this is not a file of experts in DIMMs: it does not begin with `moecdimm`");
    assert_eq!(with(8, 2), "version 2 of experts in DIMMs, but this moec reads 1: build the bundle again");
    assert_eq!(with(16, 1 << 20), format!("1048576 experts: at most {MAX_EXPERTS} are allowed"));
    assert_eq!(with(20, 7), "expert 5 is after expert 7: they must ascend");
    assert_eq!(with(24, 2), "expert 2 is on DIMM 2, but its stream is for DIMM 0");
    assert_eq!(with(28, u32::MAX), "4294967295 bytes of a stream: at most 1048576 are allowed");
    assert_eq!(
        with(32, 0),
        "the stream of expert 2: this is not an NDP command stream: it does not begin with `moec.ndp`"
    );
    let fewer = with(16, 2);
    assert!(fewer.ends_with("bytes are left after the last expert"), "{fewer}");
    let more = format!("byte {}: the file ends inside of an expert; it has been cut off", good.len());
    assert_eq!(with(16, 4), more);
}

#[test]
fn undecodable_artifacts_are_not_encoded() {
    let mut twice = artifact();
    twice.experts[1].expert = 2;
    assert_eq!(encode(&twice), Err(ArtifactError::Order { expert: 2, before: 2 }));
    let mut mixed = artifact();
    mixed.experts[2].stream.geometry.rows = 9;
    assert!(matches!(encode(&mixed), Err(ArtifactError::Dimms { expert: 6, .. })));
    let mut nameless = artifact();
    nameless.experts[0].stream.name = "no name".into();
    assert!(matches!(encode(&nameless), Err(ArtifactError::Stream { expert: 2, .. })));
}

proptest! {
    #[test]
    fn artifacts_round_trip(layer: u32, chosen in prop::collection::btree_map(0_u32..64, 0_u32..4, 0..6)) {
        let placed = |(&expert, &dimm): (&u32, &u32)| Placed { expert, stream: stream(dimm, expert) };
        let artifact = Artifact { layer, experts: chosen.iter().map(placed).collect() };
        let bytes = encode(&artifact).expect("bytes");
        prop_assert_eq!(decode(&bytes), Ok(artifact));
    }

    /// Artifacts that are truncated, extended or changed: those that are accepted are canonical.
    #[test]
    fn accepted_artifact_bytes_are_canonical(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in any::<prop::sample::Index>(),
        cuts: bool,
    ) {
        let mut bytes = encode(&artifact()).expect("bytes");
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if cuts {
            bytes.truncate(cut.index(bytes.len()));
        }
        if let Ok(artifact) = decode(&bytes) {
            prop_assert_eq!(encode(&artifact), Ok(bytes));
        }
    }

    #[test]
    fn any_artifact_bytes_are_decoded_or_rejected(mut bytes in prop::collection::vec(any::<u8>(), 0..200), known: bool) {
        if known {
            bytes.splice(0..0, encode(&Artifact::default()).expect("bytes").into_iter().take(12));
        }
        if let Ok(artifact) = decode(&bytes) {
            prop_assert_eq!(encode(&artifact), Ok(bytes));
        }
    }
}
