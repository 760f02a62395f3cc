//! Numbers of 8 and 16 bits, one at a time or a vector of them: what a KV cache is written with.

use super::value::width;
use super::{Elem, F, I, Kb, P, Span, elem_type};
use inkwell::types::BasicTypeEnum;
use inkwell::values::BasicValueEnum;
use moec_ir::types::Format;

impl<'k> F<'k> {
    /// Lanes rounded to bf16, in the low half of every 32-bit lane; the upper half is zero.
    pub(crate) fn to_bf16(self) -> I<'k> {
        let k = self.k;
        let lanes = k.lanes() as u32;
        if let (true, BasicValueEnum::VectorValue(v)) = (k.isa.bf16, self.v) {
            let half = k.ctx.bf16_type().vec_type(lanes);
            let rounded = k.keep(k.b.build_float_trunc(v, half, "").map(Into::into), self.v);
            let halves = k.bitcast(rounded, elem_type(k.ctx, Elem::I16, lanes));
            return I { k, v: halves }.zext16();
        }
        // To the nearest, ties to even. A NaN stays one.
        let bits = self.bits();
        let odd = bits.shr(16) & 1;
        let rounded = bits + odd + 0x7fff;
        let quiet = bits | 0x0040_0000;
        let upper = self.equals(self).pick_int(rounded, quiet).shr(16);
        upper & 0xffff
    }

    /// Two vectors rounded to bf16: lane by lane one word, `self` in its low half.
    pub(crate) fn pair_bf16(self, upper: Self) -> I<'k> {
        self.to_bf16() | upper.to_bf16().shl(16)
    }
}

impl I<'_> {
    /// The first lane; a scalar as it is.
    pub(crate) fn first(self) -> Self {
        let k = self.k;
        match self.v {
            BasicValueEnum::VectorValue(x) => {
                let zero = k.ctx.i32_type().const_zero();
                I { k, v: k.keep(k.b.build_extract_element(x, zero, ""), self.v) }
            }
            _ => self,
        }
    }

    /// Truth value: either.
    pub(crate) fn or(self, o: Self) -> Self {
        self.not().and(o.not()).not()
    }
}

impl<'k> P<'k> {
    /// `n` numbers of 16 bits on.
    pub(crate) fn halves(self, n: impl super::Index<'k>) -> Self {
        self.bytes(n.int(self.k) * 2)
    }

    /// A vector of 16-bit numbers in 32-bit lanes, widened by zeros.
    pub(crate) fn load_halves(self) -> I<'k> {
        let k = self.k;
        I { k, v: self.load_as(elem_type(k.ctx, Elem::I16, k.lanes() as u32), 2) }.zext16()
    }

    /// One bf16, as f32.
    pub(crate) fn load_bf16(self) -> F<'k> {
        let k = self.k;
        I { k, v: self.load_as(k.ctx.i16_type().into(), 2) }.zext16().shl(16).as_float()
    }

    /// One scale of a format, as f32.
    pub(crate) fn load_scale(self, format: Format) -> F<'k> {
        match format.scales() {
            Format::F16 => self.load_f16(),
            _ => self.load_bf16(),
        }
    }

    /// A vector of signed bytes in 32-bit lanes.
    pub(crate) fn load_codes(self) -> I<'k> {
        let k = self.k;
        let bytes = self.load_as(k.ctx.i8_type().vec_type(k.lanes() as u32).into(), 1);
        let to = k.ctx.i32_type().vec_type(k.lanes() as u32);
        let v = match bytes {
            BasicValueEnum::VectorValue(v) => {
                k.keep(k.b.build_int_s_extend(v, to, "").map(Into::into), bytes)
            }
            _ => k.mismatch(bytes),
        };
        I { k, v }
    }

    /// Stores the low half of a 32-bit integer, or of every lane.
    pub(crate) fn store_halves(self, x: I<'k>) {
        let k = self.k;
        let to = elem_type(k.ctx, Elem::I16, width(x.v));
        let cut = match (x.v, to) {
            (BasicValueEnum::VectorValue(v), BasicTypeEnum::VectorType(t)) => {
                k.keep(k.b.build_int_truncate(v, t, "").map(Into::into), x.v)
            }
            (BasicValueEnum::IntValue(v), BasicTypeEnum::IntType(t)) => {
                k.keep(k.b.build_int_truncate(v, t, "").map(Into::into), x.v)
            }
            _ => k.mismatch(x.v),
        };
        self.store_aligned(cut, 2);
    }

    /// Copies one 16-bit number.
    pub(crate) fn copy_half(self, to: Self) {
        to.store_aligned(self.load_as(self.k.ctx.i16_type().into(), 2), 2);
    }

    /// Copies one byte.
    pub(crate) fn copy_byte(self, to: Self) {
        to.store_aligned(self.load_as(self.k.ctx.i8_type().into(), 1), 1);
    }
}

impl<'k> Kb<'k> {
    /// `count` numbers of f32 at `from`, rounded to bf16 to `to`, which has room up to a whole vector. What
    /// is past the last number becomes zero there.
    pub(crate) fn round_row(&'k self, from: P<'k>, to: P<'k>, count: usize) {
        self.columns(count, |c, span: Span<'k>| {
            to.halves(c).store_halves(from.words(c).load_vec(span).to_bf16());
        });
    }
}
