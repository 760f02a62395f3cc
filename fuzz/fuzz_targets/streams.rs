//! The file of a layer's NDP command streams: what is read is written again, to the byte.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_ndp::artifact::{decode, encode};
use moec_ndp::machine::Program;

fuzz_target!(|bytes: &[u8]| {
    let Ok(artifact) = decode(bytes) else { return };
    match encode(&artifact) {
        Ok(again) => assert!(again == bytes, "two forms of one artifact"),
        Err(e) => panic!("does not encode: {e}"),
    }
    for placed in artifact.experts {
        let _ = Program::new(placed.stream);
    }
});
