//! Numbers that are looked up: E2M1, four bits each, as whole codes.

use super::{I, Kb};
use crate::machine::Machine;
use inkwell::types::{BasicTypeEnum, VectorType};
use inkwell::values::BasicValueEnum;
use moec_ir::types::E2M1;

/// An instruction by name, and the types that it is declared for.
pub(super) type Symbols<'c> = (&'static str, Vec<BasicTypeEnum<'c>>);

const BYTES_512: &str = "llvm.x86.avx512.pshuf.b.512";
const BYTES_256: &str = "llvm.x86.avx2.pshuf.b";
const BYTES_128: &str = "llvm.x86.ssse3.pshuf.b.128";
const BYTES_ARM: &str = "llvm.aarch64.neon.tbl1";

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

/// Declaration that it needs; `bytes` is a vector of them.
pub(super) fn required<'c>(machine: &Machine, bytes: BasicTypeEnum<'c>) -> Option<Symbols<'c>> {
    let types = |name| if name == BYTES_ARM { vec![bytes] } else { Vec::new() };
    instruction(machine).map(|name| (name, types(name)))
}

impl I<'_> {
    /// Bytes in 0 ..= 15, in all lanes, as the codes of [`E2M1`], signed bytes.
    pub(crate) fn e2m1(self) -> Self {
        let k = self.k;
        let known = [BYTES_512, BYTES_256, BYTES_128, BYTES_ARM].into_iter();
        match (self.v, known.into_iter().find(|name| k.instructions.contains_key(name))) {
            (BasicValueEnum::VectorValue(_), Some(name)) => {
                let found = k.instruction(name, &[k.table(), self.v], k.table());
                Self { k, v: k.bitcast(found, self.v.get_type()) }
            }
            _ => self.e2m1_by_bits(),
        }
    }

    /// As [`Self::e2m1`], byte by byte within words. Codes up to 4 are their bits; above, 6, 8 and 12 are
    /// what they are more.
    fn e2m1_by_bits(self) -> Self {
        let each = 0x0101_0101;
        let bits = self & 0x0707_0707;
        let [mantissa, odd, high] = [0, 1, 2].map(|at| bits.shr(at) & each);
        let both = high & odd;
        let magnitude = bits + both.shl(1) + (high & mantissa) + (both & mantissa).shl(1);
        // No sign of zero, whose carry would go on to the next byte.
        let negative = self.shr(3) & (mantissa | odd | high);
        (magnitude ^ (negative.shl(8) - negative)) + negative
    }
}

impl<'k> Kb<'k> {
    /// [`E2M1`] in every 16 bytes of a vector.
    fn table(&self) -> BasicValueEnum<'k> {
        let byte = |code: i8| self.ctx.i8_type().const_int(u64::from(code.cast_unsigned()), false);
        let codes: Vec<_> = E2M1.into_iter().map(byte).collect();
        VectorType::const_vector(&codes.repeat(self.lanes() / 4)).into()
    }
}
