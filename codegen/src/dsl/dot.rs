//! Dot products of small numbers, and the conversions around them: the base of the matrix kernels.
//!
//! Packed numbers travel as vectors of 32-bit words ([`I`]): two bf16 or four bytes each.

use super::lookup::{self, Symbols};
use super::value::width;
use super::{Elem, F, I, Kb, P, Span, elem_type};
use crate::error::{Error, Result};
use crate::machine::{ByteDot, Machine};
use inkwell::context::Context;
use inkwell::intrinsics::Intrinsic;
use inkwell::module::Module;
use inkwell::types::{BasicType, BasicTypeEnum, VectorType};
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum, FunctionValue, VectorValue};
use std::collections::HashMap;

/// Instructions of the machine, by name.
pub(super) type Instructions<'c> = HashMap<&'static str, FunctionValue<'c>>;

const BF16_X86: &str = "llvm.x86.avx512bf16.dpbf16ps.512";
const BF16_ARM: &str = "llvm.aarch64.neon.bfdot";
const BF16_SQUARES: &str = "llvm.aarch64.neon.bfmmla";
const VNNI_512: &str = "llvm.x86.avx512.vpdpbusd.512";
const VNNI_256: &str = "llvm.x86.avx512.vpdpbusd.256";
const SIGN: &str = "llvm.x86.avx2.psign.b";
const ABS: &str = "llvm.abs";
const MADD_BYTES: &str = "llvm.x86.avx2.pmadd.ub.sw";
const MADD_WORDS: &str = "llvm.x86.avx2.pmadd.wd";
const SDOT: &str = "llvm.aarch64.neon.sdot";
const SMMLA: &str = "llvm.aarch64.neon.smmla";
const PERMUTE: &str = "llvm.x86.avx512.permvar.qi.512";
const BOTH_BF16: &str = "llvm.x86.avx512bf16.cvtne2ps2bf16.512";
const RINT: &str = "llvm.rint";

/// Declares what the machine has.
pub(super) fn declare<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    machine: &Machine,
) -> Result<Instructions<'c>> {
    let isa = machine.isa();
    let vector = |t: BasicTypeEnum<'c>, n: usize| -> BasicTypeEnum<'c> {
        match t {
            BasicTypeEnum::FloatType(t) => t.vec_type(n as u32).into(),
            BasicTypeEnum::IntType(t) => t.vec_type(n as u32).into(),
            other => other,
        }
    };
    let (byte, int) = (ctx.i8_type().as_basic_type_enum(), ctx.i32_type().as_basic_type_enum());
    let (float, half) = (ctx.f32_type().as_basic_type_enum(), ctx.bf16_type().as_basic_type_enum());
    let lanes = isa.lanes;
    let mut required: Vec<Symbols<'c>> = vec![(RINT, vec![vector(float, lanes)])];
    required.extend(lookup::required(machine, vector(byte, 4 * lanes)));
    if isa.bf16 {
        required.push(match lanes {
            16 => (BF16_X86, vec![]),
            _ => (BF16_ARM, vec![vector(float, lanes), vector(half, 2 * lanes)]),
        });
    }
    if isa.squares() {
        required.push((BF16_SQUARES, vec![]));
    }
    if isa.tiles {
        required.extend(super::tiles::INSTRUCTIONS.map(|name| (name, vec![])));
    }
    if isa.permutes {
        required.extend([(PERMUTE, vec![]), (BOTH_BF16, vec![])]);
    }
    match isa.bytes {
        ByteDot::None => {}
        ByteDot::Vnni => required.push((if lanes == 16 { VNNI_512 } else { VNNI_256 }, vec![])),
        ByteDot::Maddubs => {
            required.extend([(SIGN, vec![]), (MADD_BYTES, vec![]), (MADD_WORDS, vec![])]);
            required.push((ABS, vec![vector(byte, 4 * lanes)]));
        }
        ByteDot::Sdot | ByteDot::Smmla => {
            let types = vec![vector(int, lanes), vector(byte, 4 * lanes)];
            if isa.bytes == ByteDot::Smmla {
                required.push((SMMLA, types.clone()));
            }
            required.push((SDOT, types));
        }
    }
    required
        .into_iter()
        .map(|(name, types)| {
            let found = Intrinsic::find(name).and_then(|i| i.get_declaration(module, &types));
            found.map(|f| (name, f)).ok_or_else(|| Error::bug(format!("LLVM has no {name}")))
        })
        .collect()
}

impl<'k> Kb<'k> {
    /// Calls an instruction of the machine. Operands are reread as the types that it wants.
    pub(super) fn instruction(
        &'k self,
        name: &'static str,
        args: &[BasicValueEnum<'k>],
        otherwise: BasicValueEnum<'k>,
    ) -> BasicValueEnum<'k> {
        let Some(function) = self.instructions.get(name) else {
            self.fail(format!("this machine has no {name}"));
            return otherwise;
        };
        let types = function.get_type().get_param_types();
        let args: Vec<BasicMetadataValueEnum<'k>> = args
            .iter()
            .zip(&types)
            .map(|(&a, &t)| match BasicTypeEnum::try_from(t) {
                Ok(t) if t != a.get_type() => self.bitcast(a, t).into(),
                _ => a.into(),
            })
            .collect();
        match self.b.build_call(*function, &args, "") {
            Ok(call) => call.try_as_basic_value().basic().unwrap_or(otherwise),
            Err(e) => {
                self.fail(e);
                otherwise
            }
        }
    }

    /// `sum + a₀·b₀ + a₁·b₁` in every lane, of pairs of bf16.
    pub(crate) fn dot_pairs(&'k self, sum: F<'k>, a: I<'k>, b: I<'k>) -> F<'k> {
        let name = if self.lanes() == 16 { BF16_X86 } else { BF16_ARM };
        F { k: self, v: self.instruction(name, &[sum.v, a.v, b.v], sum.v) }
    }

    /// `sum + a·bᵀ` of bf16: `a` holds four of two rows, `b` four of two columns, `sum` their four products,
    /// row by row.
    pub(crate) fn dot_squares(&'k self, sum: F<'k>, a: I<'k>, b: I<'k>) -> F<'k> {
        F { k: self, v: self.instruction(BF16_SQUARES, &[sum.v, a.v, b.v], sum.v) }
    }

    /// `sum + Σ wᵢ·xᵢ` in every lane, of four bytes each; `x` is signed. What `w` must be follows from
    /// [`Isa::bytes`](crate::machine::Isa::bytes): `code + 128` for VNNI, the signed code otherwise, −127 or
    /// more ([`Self::dot_any_bytes`]).
    pub(crate) fn dot_bytes(&'k self, sum: I<'k>, w: I<'k>, x: I<'k>) -> I<'k> {
        let v = match self.isa.bytes {
            ByteDot::Vnni => {
                let name = if self.lanes() == 16 { VNNI_512 } else { VNNI_256 };
                self.instruction(name, &[sum.v, w.v, x.v], sum.v)
            }
            ByteDot::Sdot | ByteDot::Smmla => self.instruction(SDOT, &[sum.v, w.v, x.v], sum.v),
            ByteDot::Maddubs => {
                return sum + self.add_pairs(self.pairs_signed(self.abs_bytes(x), x, w));
            }
            ByteDot::None => self.mismatch(sum.v),
        };
        I { k: self, v }
    }

    /// As [`Self::dot_bytes`] where signed codes may be −128, which has no opposite in a byte: of AVX2 `x`,
    /// which is never that, takes the signs.
    pub(crate) fn dot_any_bytes(&'k self, sum: I<'k>, w: I<'k>, x: I<'k>) -> I<'k> {
        match self.isa.bytes {
            ByteDot::Maddubs => sum + self.add_pairs(self.pairs_signed(self.abs_bytes(w), w, x)),
            _ => self.dot_bytes(sum, w, x),
        }
    }

    /// `sum + a·bᵀ` of signed bytes: `a` holds eight of two rows, `b` eight of two columns, `sum` their four
    /// products, row by row.
    pub(crate) fn dot_rows(&'k self, sum: I<'k>, a: I<'k>, b: I<'k>) -> I<'k> {
        I { k: self, v: self.instruction(SMMLA, &[sum.v, a.v, b.v], sum.v) }
    }

    /// Lanes of two vectors in a new order: those of `b` count on where `a` ends.
    pub(crate) fn arrange(&'k self, a: I<'k>, b: I<'k>, order: [usize; 4]) -> I<'k> {
        match (a.v, b.v) {
            (BasicValueEnum::VectorValue(x), BasicValueEnum::VectorValue(y)) => {
                I { k: self, v: self.shuffle_value(x, y, &order) }
            }
            _ => I { k: self, v: self.mismatch(a.v) },
        }
    }

    /// As [`Self::dot_bytes`] over several words, of unsigned `w`: the sums of products by pairs stay below 2¹⁵.
    pub(crate) fn dot_above(&'k self, sum: I<'k>, terms: &[(I<'k>, I<'k>)]) -> I<'k> {
        let pairs = terms.iter().map(|&(w, x)| self.pairs(w, x)).reduce(|sum, p| sum + p);
        pairs.map_or(sum, |p| sum + self.add_pairs(p))
    }

    /// Products of unsigned and signed bytes, added by twos in 16 bits.
    pub(crate) fn pairs(&'k self, unsigned: I<'k>, signed: I<'k>) -> I<'k> {
        I { k: self, v: self.instruction(MADD_BYTES, &[unsigned.v, signed.v], signed.v) }
    }

    /// As [`Self::pairs`], of signed bytes: `|a|` by `b` with the sign of `a`. Two products do not overflow
    /// 16 bits as long as `b` is −127 or more; `a` may be −128, whose magnitude is an unsigned byte.
    pub(crate) fn pairs_signed(&'k self, magnitude: I<'k>, a: I<'k>, b: I<'k>) -> I<'k> {
        let signed = I { k: self, v: self.instruction(SIGN, &[b.v, a.v], b.v) };
        self.pairs(magnitude, signed)
    }

    /// Sums of pairs of 16-bit numbers, 32 bits each.
    pub(crate) fn add_pairs(&'k self, pairs: I<'k>) -> I<'k> {
        let ones = self.i32v(0x0001_0001);
        I { k: self, v: self.instruction(MADD_WORDS, &[pairs.v, ones.v], ones.v) }
    }

    /// Magnitudes of signed bytes.
    pub(crate) fn abs_bytes(&'k self, x: I<'k>) -> I<'k> {
        let keep = self.ctx.bool_type().const_zero();
        I { k: self, v: self.instruction(ABS, &[x.v, keep.into()], x.v) }
    }

    /// A vector rounded to bf16, as 16-bit integers.
    pub(super) fn round_bf16(&'k self, x: F<'k>) -> BasicValueEnum<'k> {
        let lanes = self.lanes() as u32;
        let half = self.ctx.bf16_type().vec_type(lanes);
        let BasicValueEnum::VectorValue(v) = x.v else { return self.mismatch(x.v) };
        let rounded = self.keep(self.b.build_float_trunc(v, half, "").map(Into::into), x.v);
        self.bitcast(rounded, elem_type(self.ctx, Elem::I16, lanes))
    }
}

impl<'k> I<'k> {
    /// 32-bit lanes as f32.
    pub(crate) fn to_float(self) -> F<'k> {
        let k = self.k;
        let v = match (self.v, k.f32_like(self.v)) {
            (BasicValueEnum::VectorValue(v), BasicTypeEnum::VectorType(t)) => {
                k.keep(k.b.build_signed_int_to_float(v, t, "").map(Into::into), self.v)
            }
            (BasicValueEnum::IntValue(v), BasicTypeEnum::FloatType(t)) => {
                k.keep(k.b.build_signed_int_to_float(v, t, "").map(Into::into), self.v)
            }
            _ => k.mismatch(self.v),
        };
        F { k, v }
    }

    /// Sum of the lanes of a 32-bit vector.
    pub(crate) fn lanes_sum(self) -> Self {
        let k = self.k;
        let (mut v, mut n) = (self, width(self.v) as usize);
        while n > 1 {
            n /= 2;
            let BasicValueEnum::VectorValue(x) = v.v else { return v };
            let half = |from: usize| (from..from + n).collect::<Vec<_>>();
            let part = |from| I { k, v: k.shuffle_value(x, x, &half(from)) };
            v = part(0) + part(n);
        }
        match v.v {
            BasicValueEnum::VectorValue(x) => {
                let zero = k.ctx.i32_type().const_zero();
                I { k, v: k.keep(k.b.build_extract_element(x, zero, ""), v.v) }
            }
            _ => v,
        }
    }
}

impl<'k> I<'k> {
    /// Bytes of the vector as the top bytes of lanes, over zeros ([`Kb::top_bytes`]).
    pub(crate) fn bytes_to_top(self, order: VectorValue<'k>) -> Self {
        let k = self.k;
        let moved = k.instruction(PERMUTE, &[self.v, order.into()], order.into());
        let top = k.i32v(0xff00_0000_u32.cast_signed());
        I { k, v: k.bitcast(moved, self.v.get_type()) } & top
    }
}

impl<'k> Kb<'k> {
    /// The order in which byte `from[i]` of a vector is the top byte of lane `i` ([`Isa::permutes`]). To be
    /// made once: it takes a register.
    pub(crate) fn top_bytes(&'k self, from: &[usize]) -> VectorValue<'k> {
        let byte = |x: usize| self.ctx.i8_type().const_int(x as u64, false);
        let order: Vec<_> = from.iter().flat_map(|&f| [0, 0, 0, f].map(byte)).collect();
        self.opaque(VectorType::const_vector(&order))
    }

    /// The vector as one that the compiler knows nothing of: of a constant order it makes two instructions of
    /// one.
    fn opaque(&'k self, v: VectorValue<'k>) -> VectorValue<'k> {
        let ty = v.get_type().fn_type(&[v.get_type().into()], false);
        let nothing =
            self.ctx.create_inline_asm(ty, String::new(), "=v,0".to_owned(), false, false, None, false);
        match self.b.build_indirect_call(ty, nothing, &[v.into()], "") {
            Ok(call) => match call.try_as_basic_value().basic() {
                Some(BasicValueEnum::VectorValue(same)) => same,
                _ => v,
            },
            Err(e) => {
                self.fail(e);
                v
            }
        }
    }
}

impl<'k> F<'k> {
    /// Lanes rounded to bf16, those of `self` in the lower half of the vector, those of `upper` in the upper
    /// one ([`Isa::permutes`]).
    pub(crate) fn both_bf16(self, upper: Self) -> I<'k> {
        let k = self.k;
        let both = k.instruction(BOTH_BF16, &[upper.v, self.v], self.v);
        I { k, v: k.bitcast(both, k.i32_like(self.v)) }
    }

    /// Vector lanes rounded to the nearest integer, ties to even, as 32-bit integers.
    pub(crate) fn to_int(self) -> I<'k> {
        let k = self.k;
        let rounded = k.instruction(RINT, &[self.v], self.v);
        let v = match (rounded, k.i32_like(self.v)) {
            (BasicValueEnum::VectorValue(v), BasicTypeEnum::VectorType(t)) => {
                k.keep(k.b.build_float_to_signed_int(v, t, "").map(Into::into), rounded)
            }
            _ => k.mismatch(rounded),
        };
        I { k, v }
    }
}

impl<'k> P<'k> {
    /// One 32-bit integer, as it is.
    pub(crate) fn load_word(self) -> I<'k> {
        let k = self.k;
        I { k, v: self.load_as(k.ctx.i32_type().into(), 4) }
    }

    /// Stores the low byte of every lane.
    pub(crate) fn store_bytes(self, x: I<'k>) {
        let k = self.k;
        let to = k.ctx.i8_type().vec_type(width(x.v));
        match x.v {
            BasicValueEnum::VectorValue(v) => {
                let bytes = k.keep(k.b.build_int_truncate(v, to, "").map(Into::into), x.v);
                self.store_aligned(bytes, 1);
            }
            _ => k.fail("bytes of a scalar"),
        }
    }

    /// Stores the lanes of a vector that are in the span, rounded to bf16.
    pub(crate) fn store_bf16(self, x: F<'k>, span: Span<'k>) {
        let k = self.k;
        let lanes = k.lanes() as u32;
        let words = k.round_bf16(x);
        match span {
            Span::Full => self.store_aligned(words, 2),
            Span::Part(mask) => {
                let mut args = vec![words.into(), self.v.into(), mask.v.into()];
                k.with_align(&mut args, "llvm.masked.store", Elem::I16, 2, 2);
                let _ = k.call("llvm.masked.store", Elem::I16, lanes, &args);
            }
        }
    }
}
