//! Storage formats of tensors, one row each.

use crate::quants::{self, i_quants, k_quants, ternary};

/// Decodes consecutive numbers of a row, the first being number `from % block` of the first block, as
/// `decode(stored, from, out)`. Numbers after the end of `stored` stay unchanged.
pub type Decode = fn(&[u8], usize, &mut [f32]);

/// A way to store numbers, in blocks of a fixed size. Rows hold whole blocks.
#[derive(Clone, Copy, Debug)]
pub struct Type {
    /// Its number in files.
    pub id: u32,
    /// Its name in ggml.
    pub name: &'static str,
    /// Numbers of a block.
    pub block: usize,
    /// Bytes of a block.
    pub bytes: usize,
    /// Decoder, if this version has one.
    pub decode: Option<Decode>,
}

const fn row(id: u32, name: &'static str, block: usize, bytes: usize) -> Type {
    Type { id, name, block, bytes, decode: None }
}

const fn read(decode: Decode, row: Type) -> Type {
    Type { decode: Some(decode), ..row }
}

/// Every type whose size is known, in the order of their numbers.
pub static TYPES: [Type; 34] = [
    read(quants::f32, row(0, "F32", 1, 4)),
    read(quants::f16, row(1, "F16", 1, 2)),
    read(quants::q4_0, row(2, "Q4_0", 32, 18)),
    read(quants::q4_1, row(3, "Q4_1", 32, 20)),
    read(quants::q5_0, row(6, "Q5_0", 32, 22)),
    read(quants::q5_1, row(7, "Q5_1", 32, 24)),
    read(quants::q8_0, row(8, "Q8_0", 32, 34)),
    row(9, "Q8_1", 32, 40),
    read(k_quants::q2_k, row(10, "Q2_K", 256, 84)),
    read(k_quants::q3_k, row(11, "Q3_K", 256, 110)),
    read(k_quants::q4_k, row(12, "Q4_K", 256, 144)),
    read(k_quants::q5_k, row(13, "Q5_K", 256, 176)),
    read(k_quants::q6_k, row(14, "Q6_K", 256, 210)),
    row(15, "Q8_K", 256, 292),
    read(i_quants::iq2_xxs, row(16, "IQ2_XXS", 256, 66)),
    read(i_quants::iq2_xs, row(17, "IQ2_XS", 256, 74)),
    read(i_quants::iq3_xxs, row(18, "IQ3_XXS", 256, 98)),
    read(i_quants::iq1_s, row(19, "IQ1_S", 256, 50)),
    read(i_quants::iq4_nl, row(20, "IQ4_NL", 32, 18)),
    read(i_quants::iq3_s, row(21, "IQ3_S", 256, 110)),
    read(i_quants::iq2_s, row(22, "IQ2_S", 256, 82)),
    read(i_quants::iq4_xs, row(23, "IQ4_XS", 256, 136)),
    row(24, "I8", 1, 1),
    row(25, "I16", 1, 2),
    row(26, "I32", 1, 4),
    row(27, "I64", 1, 8),
    row(28, "F64", 1, 8),
    read(i_quants::iq1_m, row(29, "IQ1_M", 256, 56)),
    read(quants::bf16, row(30, "BF16", 1, 2)),
    read(ternary::tq1_0, row(34, "TQ1_0", 256, 54)),
    read(ternary::tq2_0, row(35, "TQ2_0", 256, 66)),
    read(quants::mxfp4, row(39, "MXFP4", 32, 17)),
    read(quants::nvfp4, row(40, "NVFP4", 64, 36)),
    row(41, "Q1_0", 128, 18),
];

impl Type {
    /// The row of a type's number.
    pub fn of(id: u32) -> Option<&'static Self> {
        TYPES.iter().find(|row| row.id == id)
    }

    /// The row of a type's name.
    pub const fn named(name: &str) -> Option<&'static Self> {
        let mut i = 0;
        while i < TYPES.len() {
            if equal(TYPES[i].name.as_bytes(), name.as_bytes()) {
                return Some(&TYPES[i]);
            }
            i += 1;
        }
        None
    }
}

/// Whether names are equal: a comparison for constants.
const fn equal(a: &[u8], b: &[u8]) -> bool {
    match (a, b) {
        ([], []) => true,
        ([a, left @ ..], [b, right @ ..]) => *a == *b && equal(left, right),
        _ => false,
    }
}
