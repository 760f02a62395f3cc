//! Arithmetic on f32 scalars and vectors.

use super::value::{binary, compare, width};
use super::{Elem, F, I, Span};
use inkwell::FloatPredicate;
use inkwell::values::{BasicValue, BasicValueEnum};
use std::ops::{Add, Div, Mul, Neg, Sub};

impl<'k> F<'k> {
    fn with(self, v: BasicValueEnum<'k>) -> Self {
        Self { k: self.k, v }
    }

    /// The scalar in every lane; a vector as it is.
    pub(crate) fn splat(self) -> Self {
        if width(self.v) > 1 || self.k.lanes() == 1 {
            self
        } else {
            self.with(self.k.splat_value(self.v, self.k.lanes() as u32))
        }
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

    /// The lower and the upper half of a vector.
    pub(crate) fn halves(self) -> [Self; 2] {
        let n = self.width() / 2;
        let order: Vec<usize> = (0..2 * n).collect();
        [self.shuffle(self, &order[..n]), self.shuffle(self, &order[n..])]
    }

    /// Combines the lanes of a vector pairwise, in a fixed order, to a scalar.
    fn reduce(self, join: impl Fn(Self, Self) -> Self) -> Self {
        let mut v = self;
        while v.width() > 1 {
            let [lo, hi] = v.halves();
            v = join(lo, hi);
        }
        v.lane(0)
    }

    /// As many vectors as they have lanes, rows and columns exchanged.
    pub(crate) fn transpose(vectors: &[Self]) -> Vec<Self> {
        let mut all = vectors.to_vec();
        let n = vectors.len();
        let mut run = 1;
        while run < n {
            // Lanes with the bit `run` change places between vectors without it and with it.
            let low: Vec<usize> = (0..n).map(|l| if l & run == 0 { l } else { n + l - run }).collect();
            let high: Vec<usize> = (0..n).map(|l| if l & run == 0 { l + run } else { n + l }).collect();
            for i in (0..n).filter(|i| i & run == 0) {
                let (a, b) = (all[i], all[i | run]);
                all[i] = a.shuffle(b, &low);
                all[i | run] = a.shuffle(b, &high);
            }
            run *= 2;
        }
        all
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
