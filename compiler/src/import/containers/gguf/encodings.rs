//! How GGUF stores numbers, one row for each type that is decoded. What is plain is decoded by the rows of other containers.

use crate::import::encodings::Encoding;
use crate::import::encodings::plain;
use moec_gguf::quants;
use moec_ir::Encoding as Stored;

/// A type in blocks of `block` numbers and `bytes` bytes.
const fn blocks(
    name: &'static str,
    block: usize,
    bytes: usize,
    decode: crate::import::encodings::Decode,
) -> Encoding {
    Encoding {
        title: name,
        leaf: |_| Stored::Plain,
        dtype: name,
        block,
        bytes,
        decode,
        same: None,
        ..plain::F32
    }
}

const Q4_0: Encoding = blocks("Q4_0", 32, 18, |s, _, from, out| quants::q4_0(s, from, out));
const Q4_1: Encoding = blocks("Q4_1", 32, 20, |s, _, from, out| quants::q4_1(s, from, out));
const Q5_0: Encoding = blocks("Q5_0", 32, 22, |s, _, from, out| quants::q5_0(s, from, out));
const Q5_1: Encoding = blocks("Q5_1", 32, 24, |s, _, from, out| quants::q5_1(s, from, out));
const Q8_0: Encoding = blocks("Q8_0", 32, 34, |s, _, from, out| quants::q8_0(s, from, out));
const Q4_K: Encoding = blocks("Q4_K", 256, 144, |s, _, from, out| quants::q4_k(s, from, out));
const Q5_K: Encoding = blocks("Q5_K", 256, 176, |s, _, from, out| quants::q5_k(s, from, out));
const Q6_K: Encoding = blocks("Q6_K", 256, 210, |s, _, from, out| quants::q6_k(s, from, out));
const MXFP4: Encoding = blocks("MXFP4", 32, 17, |s, _, from, out| quants::mxfp4(s, from, out));

/// Every type that is read.
pub(super) const ENCODINGS: [&Encoding; 12] =
    [&plain::F32, &plain::F16, &plain::BF16, &Q8_0, &Q4_0, &Q4_1, &Q5_0, &Q5_1, &Q4_K, &Q5_K, &Q6_K, &MXFP4];

#[cfg(test)]
mod tests {
    use super::*;
    use moec_gguf::types::TYPES;

    #[test]
    fn every_type_that_is_decoded_has_a_row() {
        let decoded: Vec<_> = TYPES.iter().filter(|t| t.decode.is_some()).collect();
        assert_eq!(decoded.len(), ENCODINGS.len());
        for kind in decoded {
            let row = ENCODINGS.iter().find(|row| row.dtype == kind.name).unwrap();
            assert_eq!((row.block, row.bytes), (kind.block, kind.bytes), "{}", kind.name);
            let stored: Vec<u8> = (0..2 * kind.bytes).map(|i| (i * 29 % 64) as u8).collect();
            let (mut ours, mut theirs) = (vec![0.0; 2 * kind.block], vec![0.0; 2 * kind.block]);
            (row.decode)(&stored, &[], 0, &mut ours);
            kind.decode.unwrap()(&stored, 0, &mut theirs);
            assert_eq!(ours, theirs, "{}", kind.name);
        }
    }
}
