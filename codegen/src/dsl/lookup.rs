//! Numbers that are looked up: codes of a grid by their index, byte by byte, and words of any table.

use super::value::width;
use super::{I, Kb};
use crate::machine::Machine;
use inkwell::types::{BasicTypeEnum, VectorType};
use inkwell::values::BasicValueEnum;

/// An instruction by name, and the types that it is declared for.
pub(super) type Symbols<'c> = (&'static str, Vec<BasicTypeEnum<'c>>);

const BYTES_512: &str = "llvm.x86.avx512.pshuf.b.512";
const BYTES_256: &str = "llvm.x86.avx2.pshuf.b";
const BYTES_128: &str = "llvm.x86.ssse3.pshuf.b.128";
const BYTES_ARM: &str = "llvm.aarch64.neon.tbl1";
const WORDS_OF_TWO: &str = "llvm.x86.avx512.vpermi2var.d.512";
const WORDS_512: &str = "llvm.x86.avx512.permvar.si.512";
const WORDS_256: &str = "llvm.x86.avx2.permd";
const WORDS_ARM: &str = "llvm.aarch64.neon.tbl4";

/// Instructions that look up words, and how many.
const WORDS: [(&str, usize); 4] = [(WORDS_OF_TWO, 32), (WORDS_512, 16), (WORDS_ARM, 16), (WORDS_256, 8)];

/// The instruction that looks up every byte of a vector among 16, if the machine has one.
fn instruction(machine: &Machine) -> Option<&'static str> {
    let features = machine.all_features();
    let has = |name: &str| features.iter().any(|f| f == name);
    match machine.isa().lanes {
        16 => has("avx512bw").then_some(BYTES_512),
        8 => Some(BYTES_256),
        _ if machine.is_aarch64() => Some(BYTES_ARM),
        _ => has("ssse3").then_some(BYTES_128),
    }
}

/// Declarations that lookups need; `bytes` is a vector of them.
pub(super) fn required<'c>(machine: &Machine, bytes: BasicTypeEnum<'c>) -> Vec<Symbols<'c>> {
    let types = |name| if name == BYTES_ARM || name == WORDS_ARM { vec![bytes] } else { Vec::new() };
    let words: &[&str] = match machine.isa().lanes {
        16 => &[WORDS_OF_TWO, WORDS_512],
        8 => &[WORDS_256],
        _ if machine.is_aarch64() => &[WORDS_ARM],
        _ => &[],
    };
    instruction(machine).into_iter().chain(words.iter().copied()).map(|name| (name, types(name))).collect()
}

impl I<'_> {
    /// The codes of a grid of 8 or 16 at these indices, bytes in all lanes, plus `offset`: bytes of which the
    /// lowest eight bits remain.
    pub(crate) fn codes_at(self, grid: &[i8], offset: u8) -> Self {
        let k = self.k;
        let table: Vec<u8> = grid.iter().map(|code| code.cast_unsigned().wrapping_add(offset)).collect();
        let known = [BYTES_512, BYTES_256, BYTES_128, BYTES_ARM].into_iter();
        match (self.v, known.into_iter().find(|name| k.instructions.contains_key(name))) {
            (BasicValueEnum::VectorValue(_), Some(name)) => {
                let bytes = k.bytes_of(&table.repeat(4 * k.lanes() / table.len()));
                let found = k.instruction(name, &[bytes, self.v], bytes);
                Self { k, v: k.bitcast(found, self.v.get_type()) }
            }
            _ => self.codes_by_bits(grid, offset),
        }
    }

    /// The word of every index in a table, whose length is a power of two; of an index only as many bits count.
    pub(crate) fn look_up(self, table: &[u32]) -> Self {
        let k = self.k;
        let vector = matches!(self.v, BasicValueEnum::VectorValue(_));
        let fits = |(name, words): &(&'static str, usize)| {
            vector && *words <= table.len() && k.instructions.contains_key(name)
        };
        match WORDS.into_iter().find(fits) {
            Some((name, words)) if words == table.len() => self.look_up_by(name, table),
            _ if table.len() > 1 => {
                let (low, high) = table.split_at(table.len() / 2);
                let first = (self & low.len()).equals(k.i32(0));
                first.pick_int(self.look_up(low), self.look_up(high))
            }
            _ => self.word_like(table.first().copied().unwrap_or_default()),
        }
    }

    /// A word in every lane.
    fn word_like(self, word: u32) -> Self {
        let word = self.k.i32(word.cast_signed());
        if width(self.v) > 1 { word.splat(width(self.v) as usize) } else { word }
    }

    fn look_up_by(self, name: &'static str, table: &[u32]) -> Self {
        let k = self.k;
        let vectors: Vec<BasicValueEnum<'_>> = table.chunks(k.lanes()).map(|part| k.words(part)).collect();
        let index = if name == WORDS_ARM {
            // Each byte is looked up by itself.
            (self & (table.len() - 1)) * 0x0404_0404 + 0x0302_0100
        } else {
            self
        };
        let mut args = vectors;
        args.insert(if name == WORDS_ARM { args.len() } else { 1 }, index.v);
        let found = k.instruction(name, &args, self.v);
        Self { k, v: k.bitcast(found, self.v.get_type()) }
    }

    /// Bytes, negated where the top bit of the byte of `signs` is set. None of them is zero.
    pub(crate) fn negated_where(self, signs: Self) -> Self {
        let k = self.k;
        let (BasicValueEnum::VectorValue(_), n) = (self.v, 4 * width(self.v)) else {
            let each = signs.logical_shr(7) & 0x0101_0101;
            return (self ^ (each.shl(8) - each)) + each;
        };
        let bytes = k.ctx.i8_type().vec_type(n);
        let (x, s) = (k.bitcast(self.v, bytes.into()), k.bitcast(signs.v, bytes.into()));
        let zero = I { k, v: bytes.const_zero().into() };
        let found = (I { k, v: s }).lt(zero).pick_int(zero - (I { k, v: x }), I { k, v: x });
        Self { k, v: k.bitcast(found.v, self.v.get_type()) }
    }

    /// As [`Self::codes_at`], by arithmetic on all bytes of a word at once: what a code is above the lowest is a sum
    /// over the sets of bits that an index has, with a factor for each set. Only the whole sum need be within a
    /// byte: what a part borrows from the next one, another gives back.
    fn codes_by_bits(self, grid: &[i8], offset: u8) -> Self {
        const EACH: usize = 0x0101_0101;
        let lowest = grid.iter().copied().min().unwrap_or(0);
        let above = |at: usize| i32::from(grid[at]) - i32::from(lowest);
        let mut products: Vec<Self> = Vec::with_capacity(grid.len());
        let mut sum = self.word_like(u32::from(grid[0].abs_diff(lowest)) * EACH as u32);
        for set in 1..grid.len() {
            let top = set.ilog2() as usize;
            let bit = self.shr(top as i64) & EACH;
            let rest = set & !(1 << top);
            let product = if rest == 0 { bit } else { products[rest - 1] & bit };
            products.push(product);
            let signed = |part: usize| {
                let even = (set ^ part).count_ones().is_multiple_of(2);
                if even { above(part) } else { -above(part) }
            };
            let factor: i32 = (0..=set).filter(|part| part & !set == 0).map(signed).sum();
            let term = product * factor.unsigned_abs() as usize;
            sum = match factor {
                0 => sum,
                1.. => sum + term,
                _ => sum - term,
            };
        }
        sum.plus_in_bytes(lowest.cast_unsigned().wrapping_add(offset))
    }

    /// Bytes plus a number, each modulo 256.
    fn plus_in_bytes(self, number: u8) -> Self {
        const LOWER: usize = 0x7f7f_7f7f;
        let each = u32::from(number) * 0x0101_0101;
        let lower = (self & LOWER) + (each as usize & LOWER);
        lower ^ ((self ^ self.word_like(each)) & !LOWER & 0xffff_ffff)
    }
}

impl<'k> Kb<'k> {
    /// Words as a vector.
    fn words(&self, words: &[u32]) -> BasicValueEnum<'k> {
        let word = |w: &u32| self.ctx.i32_type().const_int(u64::from(*w), false);
        VectorType::const_vector(&words.iter().map(word).collect::<Vec<_>>()).into()
    }

    /// Bytes as a vector.
    fn bytes_of(&self, bytes: &[u8]) -> BasicValueEnum<'k> {
        let byte = |b: &u8| self.ctx.i8_type().const_int(u64::from(*b), false);
        VectorType::const_vector(&bytes.iter().map(byte).collect::<Vec<_>>()).into()
    }
}
