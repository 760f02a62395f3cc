//! An NDP command stream, in binary or as text: what is read in one form has the other, and can be verified.
#![no_main]

use libfuzzer_sys::fuzz_target;
use moec_ndp_isa::{Block, Stream, decode, encode, parse, print, verify};

/// Both forms give the stream back, to the last bit; the verifier answers, and operands report what they touch.
fn check(stream: &Stream) {
    let (bytes, text) = (encode(stream), print(stream));
    match decode(&bytes) {
        Ok(again) => assert!(again == *stream && encode(&again) == bytes, "binary form:\n{text}"),
        Err(e) => panic!("does not decode: {e}\n{text}"),
    }
    match parse(&text) {
        Ok(again) => {
            assert!(again == *stream && encode(&again) == bytes, "reads back another stream:\n{text}")
        }
        Err(e) => panic!("does not read back: {e}\n{text}"),
    }
    let verified = verify(stream).is_ok();
    for instruction in &stream.code {
        let block = Block { first: 0, tokens: if verified { stream.tokens } else { 1 } };
        let _ = (instruction.op.reads(block), instruction.op.writes(block));
    }
}

fuzz_target!(|bytes: &[u8]| {
    if let Ok(stream) = decode(bytes) {
        assert!(encode(&stream) == bytes, "two binary forms of one stream");
        check(&stream);
    }
    if let Ok(stream) = std::str::from_utf8(bytes).map_err(drop).and_then(|text| parse(text).map_err(drop)) {
        check(&stream);
    }
});
