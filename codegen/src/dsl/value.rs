//! Numbers of the kernel language, and their arithmetic.

use super::{Elem, Kb, Span};
use inkwell::types::{BasicTypeEnum, VectorType};
use inkwell::values::{BasicValue, BasicValueEnum, IntValue, VectorValue};
use inkwell::{FloatPredicate, IntPredicate};
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Sub};

/// An f32, or a vector of them.
#[derive(Clone, Copy)]
pub(crate) struct F<'k> {
    pub(super) k: &'k Kb<'k>,
    pub(super) v: BasicValueEnum<'k>,
}

/// An integer, a truth value, or a vector of either.
#[derive(Clone, Copy)]
pub(crate) struct I<'k> {
    pub(super) k: &'k Kb<'k>,
    pub(super) v: BasicValueEnum<'k>,
}

/// What can stand for a 64-bit integer.
pub(crate) trait Index<'k>: Copy {
    /// The integer.
    fn int(self, k: &'k Kb<'k>) -> I<'k>;
}

impl<'k> Index<'k> for usize {
    fn int(self, k: &'k Kb<'k>) -> I<'k> {
        k.i(self as i64)
    }
}

impl<'k> Index<'k> for I<'k> {
    fn int(self, _: &'k Kb<'k>) -> I<'k> {
        self
    }
}

fn width(v: BasicValueEnum<'_>) -> u32 {
    match v {
        BasicValueEnum::VectorValue(v) => v.get_type().get_size(),
        _ => 1,
    }
}

/// Applies a builder method to two floats, two integers or two vectors.
macro_rules! binary {
    ($k:expr, $a:expr, $b:expr, $scalar:ident, $method:ident) => {{
        let (a, b) = $k.same_width($a, $b);
        match (a, b) {
            (BasicValueEnum::$scalar(x), BasicValueEnum::$scalar(y)) => {
                $k.keep($k.b.$method(x, y, "").map(|v| v.as_basic_value_enum()), a)
            }
            (BasicValueEnum::VectorValue(x), BasicValueEnum::VectorValue(y)) => {
                $k.keep($k.b.$method(x, y, "").map(|v| v.as_basic_value_enum()), a)
            }
            _ => $k.mismatch(a),
        }
    }};
}

/// As [`binary`], for comparisons.
macro_rules! compare {
    ($k:expr, $a:expr, $b:expr, $scalar:ident, $method:ident, $predicate:expr) => {{
        let (a, b) = $k.same_width($a, $b);
        match (a, b) {
            (BasicValueEnum::$scalar(x), BasicValueEnum::$scalar(y)) => {
                $k.keep($k.b.$method($predicate, x, y, "").map(|v| v.as_basic_value_enum()), a)
            }
            (BasicValueEnum::VectorValue(x), BasicValueEnum::VectorValue(y)) => {
                $k.keep($k.b.$method($predicate, x, y, "").map(|v| v.as_basic_value_enum()), a)
            }
            _ => $k.mismatch(a),
        }
    }};
}

impl<'k> Kb<'k> {
    /// A constant.
    pub(crate) fn f(&'k self, x: f32) -> F<'k> {
        F { k: self, v: self.f32t().const_float(f64::from(x)).into() }
    }

    /// A vector with the constant in every lane.
    pub(crate) fn fv(&'k self, x: f32) -> F<'k> {
        self.f(x).splat()
    }

    /// A 64-bit constant.
    pub(crate) fn i(&'k self, x: i64) -> I<'k> {
        I { k: self, v: self.i64t().const_int(x as u64, true).into() }
    }

    /// A 32-bit constant.
    pub(crate) fn i32(&'k self, x: i32) -> I<'k> {
        I { k: self, v: self.ctx.i32_type().const_int(x as u32 as u64, true).into() }
    }

    /// A 32-bit constant in every lane.
    pub(crate) fn i32v(&'k self, x: i32) -> I<'k> {
        self.i32(x).splat(self.lanes())
    }

    /// `0, 1, 2, …`, 32 bits.
    pub(crate) fn lane_ids(&'k self) -> I<'k> {
        let ids: Vec<_> = (0..self.lanes()).map(|i| self.ctx.i32_type().const_int(i as u64, false)).collect();
        I { k: self, v: VectorType::const_vector(&ids).into() }
    }

    /// True in the first `n` lanes.
    pub(crate) fn first_lanes(&'k self, n: usize) -> I<'k> {
        let bits: Vec<_> =
            (0..self.lanes()).map(|i| self.ctx.bool_type().const_int(u64::from(i < n), false)).collect();
        I { k: self, v: VectorType::const_vector(&bits).into() }
    }

    fn mismatch(&self, v: BasicValueEnum<'k>) -> BasicValueEnum<'k> {
        self.fail("operands of different kinds");
        v
    }

    fn same_width(
        &'k self,
        a: BasicValueEnum<'k>,
        b: BasicValueEnum<'k>,
    ) -> (BasicValueEnum<'k>, BasicValueEnum<'k>) {
        match (width(a), width(b)) {
            (1, n) if n > 1 => (self.splat_value(a, n), b),
            (n, 1) if n > 1 => (a, self.splat_value(b, n)),
            _ => (a, b),
        }
    }

    fn splat_value(&'k self, v: BasicValueEnum<'k>, n: u32) -> BasicValueEnum<'k> {
        let ty = match v.get_type() {
            BasicTypeEnum::FloatType(t) => t.vec_type(n),
            BasicTypeEnum::IntType(t) => t.vec_type(n),
            _ => return v,
        };
        let zero = self.ctx.i32_type().const_zero();
        let one = self.keep(self.b.build_insert_element(ty.get_poison(), v, zero, ""), ty.get_poison());
        let mask = self.ctx.i32_type().vec_type(n).const_zero();
        self.keep(self.b.build_shuffle_vector(one, ty.get_poison(), mask, ""), one).into()
    }

    fn shuffle_value(&self, a: VectorValue<'k>, b: VectorValue<'k>, order: &[usize]) -> BasicValueEnum<'k> {
        let ids: Vec<_> = order.iter().map(|&i| self.ctx.i32_type().const_int(i as u64, false)).collect();
        self.keep(self.b.build_shuffle_vector(a, b, VectorType::const_vector(&ids), ""), a).into()
    }

    fn bitcast(&self, v: BasicValueEnum<'k>, to: BasicTypeEnum<'k>) -> BasicValueEnum<'k> {
        self.keep(self.b.build_bit_cast(v, to, ""), v)
    }

    fn select_value(
        &'k self,
        mask: BasicValueEnum<'k>,
        a: BasicValueEnum<'k>,
        b: BasicValueEnum<'k>,
    ) -> BasicValueEnum<'k> {
        let (a, b) = self.same_width(a, b);
        let n = width(mask);
        let (a, b) =
            if n > 1 && width(a) == 1 { (self.splat_value(a, n), self.splat_value(b, n)) } else { (a, b) };
        match mask {
            BasicValueEnum::IntValue(m) => self.keep(self.b.build_select(m, a, b, ""), a),
            BasicValueEnum::VectorValue(m) => self.keep(self.b.build_select(m, a, b, ""), a),
            _ => self.mismatch(a),
        }
    }

    /// Integer type as wide as `v`, 32 bits per lane.
    fn i32_like(&self, v: BasicValueEnum<'k>) -> BasicTypeEnum<'k> {
        match width(v) {
            1 => self.ctx.i32_type().into(),
            n => self.ctx.i32_type().vec_type(n).into(),
        }
    }

    /// f32 type as wide as `v`.
    fn f32_like(&self, v: BasicValueEnum<'k>) -> BasicTypeEnum<'k> {
        match width(v) {
            1 => self.f32t().into(),
            n => self.f32t().vec_type(n).into(),
        }
    }
}

impl<'k> F<'k> {
    fn with(self, v: BasicValueEnum<'k>) -> Self {
        Self { k: self.k, v }
    }

    /// The scalar in every lane; a vector as it is.
    pub(crate) fn splat(self) -> Self {
        if width(self.v) > 1 { self } else { self.with(self.k.splat_value(self.v, self.k.lanes() as u32)) }
    }

    /// `self · b + c`, fused where the machine can.
    pub(crate) fn fma(self, b: Self, c: Self) -> Self {
        let (a, b) = self.k.same_width(self.v, b.v);
        let (a, c) = self.k.same_width(a, c.v);
        let (b, c) = self.k.same_width(b, c);
        let args = [a.into(), b.into(), c.into()];
        self.with(self.k.call("llvm.fmuladd", Elem::F32, width(a), &args).unwrap_or(a))
    }

    fn unary(self, name: &'static str) -> Self {
        self.with(self.k.call(name, Elem::F32, width(self.v), &[self.v.into()]).unwrap_or(self.v))
    }

    /// Square root.
    pub(crate) fn sqrt(self) -> Self {
        self.unary("llvm.sqrt")
    }

    /// Absolute value.
    pub(crate) fn abs(self) -> Self {
        self.unary("llvm.fabs")
    }

    fn cmp(self, p: FloatPredicate, o: Self) -> I<'k> {
        let k = self.k;
        I { k, v: compare!(k, self.v, o.v, FloatValue, build_float_compare, p) }
    }

    /// `self < o`; false if either is NaN.
    pub(crate) fn lt(self, o: Self) -> I<'k> {
        self.cmp(FloatPredicate::OLT, o)
    }

    /// `self > o`; false if either is NaN.
    pub(crate) fn gt(self, o: Self) -> I<'k> {
        self.cmp(FloatPredicate::OGT, o)
    }

    /// `self ≤ o`; false if either is NaN.
    pub(crate) fn le(self, o: Self) -> I<'k> {
        self.cmp(FloatPredicate::OLE, o)
    }

    /// `self = o`; false if either is NaN.
    pub(crate) fn equals(self, o: Self) -> I<'k> {
        self.cmp(FloatPredicate::OEQ, o)
    }

    /// The larger; `self` where that is NaN, and where `o` is.
    pub(crate) fn max(self, o: Self) -> Self {
        o.gt(self).pick(o, self)
    }

    /// The smaller; `self` where that is NaN, and where `o` is.
    pub(crate) fn min(self, o: Self) -> Self {
        o.lt(self).pick(o, self)
    }

    /// At least `lo`.
    pub(crate) fn at_least(self, lo: f32) -> Self {
        self.max(self.k.f(lo))
    }

    /// At most `hi`.
    pub(crate) fn at_most(self, hi: f32) -> Self {
        self.min(self.k.f(hi))
    }

    /// The lanes of the span; `otherwise` in the rest.
    pub(crate) fn within(self, span: Span<'k>, otherwise: f32) -> Self {
        match span {
            Span::Full => self,
            Span::Part(mask) => mask.pick(self, self.k.fv(otherwise)),
        }
    }

    /// Lanes; 1 for a scalar.
    pub(crate) fn width(self) -> usize {
        width(self.v) as usize
    }

    /// The bits, 32 per lane.
    pub(crate) fn bits(self) -> I<'k> {
        I { k: self.k, v: self.k.bitcast(self.v, self.k.i32_like(self.v)) }
    }

    /// Lane `i`.
    pub(crate) fn lane(self, i: usize) -> Self {
        match self.v {
            BasicValueEnum::VectorValue(v) => {
                let i = self.k.ctx.i32_type().const_int(i as u64, false);
                self.with(self.k.keep(self.k.b.build_extract_element(v, i, ""), self.v))
            }
            _ => self,
        }
    }

    /// Lanes of `self`, then of `o`, chosen by number. Both must be vectors.
    pub(crate) fn shuffle(self, o: Self, order: &[usize]) -> Self {
        match (self.v, o.v) {
            (BasicValueEnum::VectorValue(a), BasicValueEnum::VectorValue(b)) => {
                self.with(self.k.shuffle_value(a, b, order))
            }
            _ => self.with(self.k.mismatch(self.v)),
        }
    }

    /// Combines the lanes of a vector pairwise, in a fixed order, to a scalar.
    fn reduce(self, join: impl Fn(Self, Self) -> Self) -> Self {
        let mut v = self;
        let mut n = width(self.v) as usize;
        while n > 1 {
            n /= 2;
            let lo: Vec<usize> = (0..n).collect();
            let hi: Vec<usize> = (n..2 * n).collect();
            v = join(v.shuffle(v, &lo), v.shuffle(v, &hi));
        }
        v.lane(0)
    }

    /// Sum of the lanes.
    pub(crate) fn sum(self) -> Self {
        self.reduce(|a, b| a + b)
    }

    /// Largest of the lanes; NaN lanes are skipped unless they come first.
    pub(crate) fn lanes_max(self) -> Self {
        self.reduce(Self::max)
    }

    /// Values of two vectors in turn: `a0 b0 a1 b1 …`, as two vectors.
    pub(crate) fn zip(self, o: Self) -> [Self; 2] {
        let n = width(self.v) as usize;
        let order: Vec<usize> = (0..n).flat_map(|i| [i, i + n]).collect();
        [self.shuffle(o, &order[..n]), self.shuffle(o, &order[n..])]
    }

    /// Even lanes, then odd lanes of two vectors: the inverse of [`Self::zip`].
    pub(crate) fn unzip(self, o: Self) -> [Self; 2] {
        let n = width(self.v) as usize;
        let order = |odd: usize| (0..n).map(|i| 2 * i + odd).collect::<Vec<_>>();
        [self.shuffle(o, &order(0)), self.shuffle(o, &order(1))]
    }
}

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
        match self.v {
            BasicValueEnum::IntValue(v) => v,
            _ => {
                self.k.fail("a vector where a scalar is wanted");
                self.k.i64t().const_zero()
            }
        }
    }

    /// Whether this is a 64-bit scalar: an index, which never overflows.
    fn is_index(self) -> bool {
        matches!(self.v, BasicValueEnum::IntValue(v) if v.get_type().get_bit_width() == 64)
    }
}

/// Operators on floats, also with a constant on the right.
macro_rules! float_operator {
    ($op:ident, $name:ident, $method:ident) => {
        impl<'k> $op for F<'k> {
            type Output = Self;
            fn $name(self, o: Self) -> Self {
                let k = self.k;
                self.with(binary!(k, self.v, o.v, FloatValue, $method))
            }
        }
        impl<'k> $op<f32> for F<'k> {
            type Output = Self;
            fn $name(self, o: f32) -> Self {
                self.$name(self.k.f(o))
            }
        }
    };
}

float_operator!(Add, add, build_float_add);
float_operator!(Sub, sub, build_float_sub);
float_operator!(Mul, mul, build_float_mul);
float_operator!(Div, div, build_float_div);

impl Neg for F<'_> {
    type Output = Self;
    fn neg(self) -> Self {
        let k = self.k;
        self.with(match self.v {
            BasicValueEnum::FloatValue(v) => k.keep(k.b.build_float_neg(v, "").map(Into::into), self.v),
            BasicValueEnum::VectorValue(v) => k.keep(k.b.build_float_neg(v, "").map(Into::into), self.v),
            _ => k.mismatch(self.v),
        })
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
