//! Numbers of the kernel language: constants, broadcasting, and what both kinds share.

use super::Kb;
use inkwell::types::{BasicTypeEnum, VectorType};
use inkwell::values::{BasicValueEnum, VectorValue};

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

/// A value that can be used as a 64-bit integer.
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

pub(super) fn width(v: BasicValueEnum<'_>) -> u32 {
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

    /// Bit `first + i` in lane `i`, 32 bits.
    pub(crate) fn lane_bits(&'k self, first: usize) -> I<'k> {
        let bit = |i: usize| self.ctx.i32_type().const_int(1 << (first + i), false);
        I { k: self, v: VectorType::const_vector(&(0..self.lanes()).map(bit).collect::<Vec<_>>()).into() }
    }

    /// True in the first `n` lanes.
    pub(crate) fn first_lanes(&'k self, n: usize) -> I<'k> {
        let bits: Vec<_> =
            (0..self.lanes()).map(|i| self.ctx.bool_type().const_int(u64::from(i < n), false)).collect();
        I { k: self, v: VectorType::const_vector(&bits).into() }
    }

    pub(super) fn mismatch(&self, v: BasicValueEnum<'k>) -> BasicValueEnum<'k> {
        self.fail("operands of different kinds");
        v
    }

    pub(super) fn same_width(
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

    pub(super) fn splat_value(&'k self, v: BasicValueEnum<'k>, n: u32) -> BasicValueEnum<'k> {
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

    pub(super) fn shuffle_value(
        &self,
        a: VectorValue<'k>,
        b: VectorValue<'k>,
        order: &[usize],
    ) -> BasicValueEnum<'k> {
        let ids: Vec<_> = order.iter().map(|&i| self.ctx.i32_type().const_int(i as u64, false)).collect();
        self.keep(self.b.build_shuffle_vector(a, b, VectorType::const_vector(&ids), ""), a).into()
    }

    pub(super) fn bitcast(&self, v: BasicValueEnum<'k>, to: BasicTypeEnum<'k>) -> BasicValueEnum<'k> {
        self.keep(self.b.build_bit_cast(v, to, ""), v)
    }

    pub(super) fn select_value(
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
    pub(super) fn i32_like(&self, v: BasicValueEnum<'k>) -> BasicTypeEnum<'k> {
        match width(v) {
            1 => self.ctx.i32_type().into(),
            n => self.ctx.i32_type().vec_type(n).into(),
        }
    }

    /// f32 type as wide as `v`.
    pub(super) fn f32_like(&self, v: BasicValueEnum<'k>) -> BasicTypeEnum<'k> {
        match width(v) {
            1 => self.f32t().into(),
            n => self.f32t().vec_type(n).into(),
        }
    }
}

pub(super) use {binary, compare};
