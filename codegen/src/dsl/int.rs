//! Arithmetic on integers, truth values and vectors of either.

use super::value::{binary, compare, width};
use super::{F, I};
use inkwell::IntPredicate;
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValue, BasicValueEnum, IntValue};
use std::ops::{Add, BitAnd, BitOr, BitXor, Mul, Sub};

impl<'k> I<'k> {
    fn with(self, v: BasicValueEnum<'k>) -> Self {
        Self { k: self.k, v }
    }

    /// The scalar in each of `n` lanes.
    pub(crate) fn splat(self, n: usize) -> Self {
        self.with(self.k.splat_value(self.v, n as u32))
    }

    fn cmp(self, p: IntPredicate, o: Self) -> Self {
        let k = self.k;
        self.with(compare!(k, self.v, o.v, IntValue, build_int_compare, p))
    }

    /// `self < o`, signed.
    pub(crate) fn lt(self, o: Self) -> Self {
        self.cmp(IntPredicate::SLT, o)
    }

    /// `self ≥ o`, signed.
    pub(crate) fn ge(self, o: Self) -> Self {
        self.cmp(IntPredicate::SGE, o)
    }

    /// `self = o`.
    pub(crate) fn equals(self, o: Self) -> Self {
        self.cmp(IntPredicate::EQ, o)
    }

    /// The smaller, signed.
    pub(crate) fn min(self, o: Self) -> Self {
        self.lt(o).pick_int(self, o)
    }

    /// The larger, signed.
    pub(crate) fn max(self, o: Self) -> Self {
        self.lt(o).pick_int(o, self)
    }

    /// Truth value: `a` where true, else `b`.
    pub(crate) fn pick(self, a: F<'k>, b: F<'k>) -> F<'k> {
        F { k: self.k, v: self.k.select_value(self.v, a.v, b.v) }
    }

    /// Truth value: `a` where true, else `b`.
    pub(crate) fn pick_int(self, a: Self, b: Self) -> Self {
        self.with(self.k.select_value(self.v, a.v, b.v))
    }

    /// Truth value: both.
    pub(crate) fn and(self, o: Self) -> Self {
        let k = self.k;
        self.with(binary!(k, self.v, o.v, IntValue, build_and))
    }

    /// Truth value: the opposite.
    pub(crate) fn not(self) -> Self {
        let v = match self.v {
            BasicValueEnum::IntValue(v) => self.k.keep(self.k.b.build_not(v, "").map(Into::into), self.v),
            BasicValueEnum::VectorValue(v) => self.k.keep(self.k.b.build_not(v, "").map(Into::into), self.v),
            _ => self.k.mismatch(self.v),
        };
        self.with(v)
    }

    /// Shifted left.
    pub(crate) fn shl(self, bits: i64) -> Self {
        let (k, by) = (self.k, self.constant(bits));
        self.with(binary!(k, self.v, by, IntValue, build_left_shift))
    }

    /// Shifted right, the sign kept.
    pub(crate) fn shr(self, bits: i64) -> Self {
        let (k, by) = (self.k, self.constant(bits));
        self.with(match k.same_width(self.v, by) {
            (BasicValueEnum::IntValue(a), BasicValueEnum::IntValue(b)) => {
                k.keep(k.b.build_right_shift(a, b, true, "").map(Into::into), self.v)
            }
            (BasicValueEnum::VectorValue(a), BasicValueEnum::VectorValue(b)) => {
                k.keep(k.b.build_right_shift(a, b, true, "").map(Into::into), self.v)
            }
            _ => k.mismatch(self.v),
        })
    }

    /// Quotient by a positive number, of a number that is not negative.
    pub(crate) fn div(self, o: Self) -> Self {
        let k = self.k;
        self.with(binary!(k, self.v, o.v, IntValue, build_int_unsigned_div))
    }

    /// Remainder by a positive number, of a number that is not negative.
    pub(crate) fn rem(self, o: Self) -> Self {
        let k = self.k;
        self.with(binary!(k, self.v, o.v, IntValue, build_int_unsigned_rem))
    }

    /// 32 bits reread as f32.
    pub(crate) fn as_float(self) -> F<'k> {
        F { k: self.k, v: self.k.bitcast(self.v, self.k.f32_like(self.v)) }
    }

    /// 32-bit scalar widened to 64, the sign kept.
    pub(crate) fn wide(self) -> Self {
        match self.v {
            BasicValueEnum::IntValue(v) => self
                .with(self.k.keep(self.k.b.build_int_s_extend(v, self.k.i64t(), "").map(Into::into), self.v)),
            _ => self.with(self.k.mismatch(self.v)),
        }
    }

    /// 64-bit scalar cut to 32.
    pub(crate) fn narrow(self) -> Self {
        let to = self.k.ctx.i32_type();
        match self.v {
            BasicValueEnum::IntValue(v) => {
                self.with(self.k.keep(self.k.b.build_int_truncate(v, to, "").map(Into::into), self.v))
            }
            _ => self.with(self.k.mismatch(self.v)),
        }
    }

    /// Each lane widened from 16 to 32 bits by zeros.
    pub(super) fn zext16(self) -> Self {
        let to = self.k.i32_like(self.v);
        self.with(match (self.v, to) {
            (BasicValueEnum::VectorValue(v), BasicTypeEnum::VectorType(t)) => {
                self.k.keep(self.k.b.build_int_z_extend(v, t, "").map(Into::into), self.v)
            }
            (BasicValueEnum::IntValue(v), BasicTypeEnum::IntType(t)) => {
                self.k.keep(self.k.b.build_int_z_extend(v, t, "").map(Into::into), self.v)
            }
            _ => self.k.mismatch(self.v),
        })
    }

    /// Smallest lane of a 32-bit vector.
    pub(crate) fn lanes_min(self) -> Self {
        let mut v = self;
        let mut n = width(self.v) as usize;
        while n > 1 {
            n /= 2;
            let BasicValueEnum::VectorValue(x) = v.v else { return v };
            let lo: Vec<usize> = (0..n).collect();
            let hi: Vec<usize> = (n..2 * n).collect();
            v = v.with(self.k.shuffle_value(x, x, &lo)).min(v.with(self.k.shuffle_value(x, x, &hi)));
        }
        match v.v {
            BasicValueEnum::VectorValue(x) => {
                let zero = self.k.ctx.i32_type().const_zero();
                v.with(self.k.keep(self.k.b.build_extract_element(x, zero, ""), v.v))
            }
            _ => v,
        }
    }

    /// A constant of the same type, scalar.
    fn constant(self, x: i64) -> BasicValueEnum<'k> {
        let ty = match self.v.get_type() {
            BasicTypeEnum::IntType(t) => t,
            BasicTypeEnum::VectorType(t) => match t.get_element_type() {
                BasicTypeEnum::IntType(t) => t,
                _ => self.k.i64t(),
            },
            _ => self.k.i64t(),
        };
        ty.const_int(x as u64, true).into()
    }

    pub(super) fn scalar(self) -> IntValue<'k> {
        if let BasicValueEnum::IntValue(v) = self.v {
            return v;
        }
        self.k.fail("expected a scalar, found a vector");
        self.k.i64t().const_zero()
    }

    /// Whether this is a 64-bit scalar: an index, which never overflows.
    fn is_index(self) -> bool {
        matches!(self.v, BasicValueEnum::IntValue(v) if v.get_type().get_bit_width() == 64)
    }
}

/// Operators on integers, also with a constant on the right. Indices do not overflow; bit patterns may.
macro_rules! int_operator {
    ($op:ident, $name:ident, $index:ident, $method:ident) => {
        impl<'k> $op for I<'k> {
            type Output = Self;
            fn $name(self, o: Self) -> Self {
                let k = self.k;
                self.with(if self.is_index() {
                    binary!(k, self.v, o.v, IntValue, $index)
                } else {
                    binary!(k, self.v, o.v, IntValue, $method)
                })
            }
        }
        impl<'k> $op<usize> for I<'k> {
            type Output = Self;
            fn $name(self, o: usize) -> Self {
                self.$name(Self { k: self.k, v: self.constant(o as i64) })
            }
        }
    };
}

int_operator!(Add, add, build_int_nsw_add, build_int_add);
int_operator!(Sub, sub, build_int_nsw_sub, build_int_sub);
int_operator!(Mul, mul, build_int_nsw_mul, build_int_mul);
int_operator!(BitAnd, bitand, build_and, build_and);
int_operator!(BitOr, bitor, build_or, build_or);
int_operator!(BitXor, bitxor, build_xor, build_xor);
