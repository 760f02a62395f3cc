//! Wide accesses of a thread, and its operations on words of small numbers: loads of up to 16 bytes,
//! asynchronous copies to shared memory, dot products of bytes, matrix products by a warp.

use super::gpu::{COMMIT, COPY_16, LOAD_MATRICES, MMA_BF16, MMA_F16, WAIT};
use super::{F, I, Kb, P};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum};

/// Kind of 16-bit numbers, two in a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HalfType {
    /// bfloat16
    Bf16,
    /// binary16
    F16,
}

impl<'k> P<'k> {
    /// `count` words, 1, 2 or 4, in one load; the address is a multiple of their bytes.
    pub(crate) fn load_words(self, count: usize) -> Vec<I<'k>> {
        let k = self.k;
        let word = k.ctx.i32_type();
        let ty: BasicTypeEnum<'k> = if count == 1 { word.into() } else { word.vec_type(count as u32).into() };
        let v = self.load_as(ty, 4 * count as u32);
        (0..count).map(|i| I { k, v }.word(i)).collect()
    }

    /// Four 8 × 8 matrices of 16-bit numbers from shared memory, by a warp. Lane `l` gives the address, a
    /// multiple of 16, of row `l mod 8` of matrix `l / 8`. It gets, of each matrix, columns `2(l mod 4)` and
    /// the next of row `l / 4`.
    pub(crate) fn load_matrices(self) -> [I<'k>; 4] {
        let k = self.k;
        let all = k.thread_value(LOAD_MATRICES, &[self.v.into()]);
        std::array::from_fn(|i| match all {
            Some(BasicValueEnum::StructValue(all)) => {
                I { k, v: k.keep(k.b.build_extract_value(all, i as u32, ""), k.i32(0).v) }
            }
            _ => k.i32(0),
        })
    }

    /// `count` f32 in loads of up to `at_once` of them, which the address is a multiple of.
    pub(crate) fn load_floats(self, count: usize, at_once: usize) -> Vec<F<'k>> {
        let step = widest(count, at_once);
        let loads = (0..count).step_by(step);
        loads.flat_map(|i| self.words(i).load_words(step)).map(I::as_float).collect()
    }

    /// Stores words in one access, 1, 2 or 4, to a multiple of their bytes.
    pub(crate) fn store_words(self, words: &[I<'k>]) {
        let k = self.k;
        if let [one] = words {
            return self.store_aligned(one.v, 4);
        }
        let ty = k.ctx.i32_type().vec_type(words.len() as u32);
        let mut all = ty.get_poison();
        for (i, w) in words.iter().enumerate() {
            let at = k.ctx.i32_type().const_int(i as u64, false);
            all = k.keep(k.b.build_insert_element(all, w.v, at, ""), all);
        }
        self.store_aligned(all.into(), 4 * words.len() as u32);
    }

    /// One unsigned byte, as 32 bits.
    pub(crate) fn load_byte(self) -> I<'k> {
        let k = self.k;
        let v = self.load_as(k.ctx.i8_type().into(), 1);
        let BasicValueEnum::IntValue(x) = v else { return I { k, v: k.mismatch(v) } };
        I { k, v: k.keep(k.b.build_int_z_extend(x, k.ctx.i32_type(), "").map(Into::into), v) }
    }

    /// One 16-bit number, as 32 bits.
    pub(crate) fn load_half(self) -> I<'k> {
        let k = self.k;
        I { k, v: self.load_as(k.ctx.i16_type().into(), 2) }.zext16()
    }

    /// Begins to copy 16 bytes from global memory to here, in shared memory; both are multiples of 16.
    pub(crate) fn copy_from(self, from: P<'k>) {
        let _ = self.k.thread_value(COPY_16, &[self.v.into(), from.v.into()]);
    }
}

/// The most words of one access, a power of two, that divides `count` and `at_once`.
pub(crate) fn widest(count: usize, at_once: usize) -> usize {
    [4, 2].into_iter().find(|w| count.is_multiple_of(*w) && at_once.is_multiple_of(*w)).unwrap_or(1)
}

impl<'k> I<'k> {
    /// Word `i` of several; a single one as it is.
    fn word(self, i: usize) -> Self {
        let k = self.k;
        match self.v {
            BasicValueEnum::VectorValue(v) => {
                let i = k.ctx.i32_type().const_int(i as u64, false);
                Self { k, v: k.keep(k.b.build_extract_element(v, i, ""), self.v) }
            }
            _ => self,
        }
    }

    /// The two 16-bit numbers of a word as f32, the lower first.
    pub(crate) fn unpack(self, kind: HalfType) -> [F<'k>; 2] {
        match kind {
            HalfType::Bf16 => [self.shl(16).as_float(), (self & 0xffff_0000).as_float()],
            HalfType::F16 => [self.f16(), self.logical_shr(16).f16()],
        }
    }

    /// The low half, a binary16, as f32.
    pub(crate) fn f16(self) -> F<'k> {
        let k = self.k;
        let BasicValueEnum::IntValue(v) = self.v else { return F { k, v: k.mismatch(self.v) } };
        let cut = k.keep(k.b.build_int_truncate(v, k.ctx.i16_type(), ""), v);
        match k.bitcast(cut.into(), k.ctx.f16_type().into()) {
            BasicValueEnum::FloatValue(h) => {
                let wide = k.b.build_float_ext(h, k.f32t(), "");
                F { k, v: k.keep(wide, k.f32t().const_zero()).into() }
            }
            v => F { k, v: k.mismatch(v) },
        }
    }

    /// Shifted right, zeros coming in.
    pub(crate) fn logical_shr(self, bits: i64) -> Self {
        let k = self.k;
        match self.v {
            BasicValueEnum::IntValue(v) => {
                let by = v.get_type().const_int(bits as u64, false);
                Self { k, v: k.keep(k.b.build_right_shift(v, by, false, "").map(Into::into), self.v) }
            }
            _ => Self { k, v: k.mismatch(self.v) },
        }
    }

    /// Byte `i` of a word, with its sign.
    pub(crate) fn signed_byte(self, i: usize) -> Self {
        self.shl(24 - 8 * i as i64).shr(24)
    }

    /// `self + Σ wᵢ·xᵢ` over the four bytes of words; `x` is signed, `w` too if it says so.
    pub(crate) fn dot_of_bytes(self, w: Self, x: Self, signed: bool) -> Self {
        let k = self.k;
        let word = k.ctx.i32_type();
        let ty = word.fn_type(&[word.into(); 3], false);
        let text = if signed { "dp4a.s32.s32 $0, $1, $2, $3;" } else { "dp4a.u32.s32 $0, $1, $2, $3;" };
        let asm =
            k.ctx.create_inline_asm(ty, text.to_owned(), "=r,r,r,r".to_owned(), false, false, None, false);
        match k.b.build_indirect_call(ty, asm, &[w.v.into(), x.v.into(), self.v.into()], "") {
            Ok(call) => Self { k, v: call.try_as_basic_value().basic().unwrap_or(self.v) },
            Err(e) => {
                k.fail(e);
                self
            }
        }
    }
}

impl<'k> F<'k> {
    /// Two numbers rounded to bf16 in one word, `self` in its low half.
    pub(crate) fn both_halves(self, upper: Self) -> I<'k> {
        let k = self.k;
        let ty = k.f32t().vec_type(2);
        let at = |i: u64| k.ctx.i32_type().const_int(i, false);
        let pair = k.keep(k.b.build_insert_element(ty.get_poison(), self.v, at(0), ""), ty.get_poison());
        let pair = k.keep(k.b.build_insert_element(pair, upper.v, at(1), ""), pair);
        let to = k.ctx.bf16_type().vec_type(2);
        let rounded = k.keep(k.b.build_float_trunc(pair, to, "").map(Into::into), self.v);
        I { k, v: k.bitcast(rounded, k.ctx.i32_type().into()) }
    }
}

impl<'k> Kb<'k> {
    /// Ends a group of copies.
    pub(crate) fn commit_copies(&'k self) {
        let _ = self.thread_value(COMMIT, &[]);
    }

    /// Waits until all but the last `pending` groups of copies of this thread have arrived.
    pub(crate) fn wait_copies(&'k self, pending: usize) {
        let _ = self.thread_value(WAIT, &[self.ctx.i32_type().const_int(pending as u64, false).into()]);
    }

    /// `sum + a · b` by a warp: `a` 16 × 16, `b` 16 × 8, `sum` 16 × 8. Let `g` be the lane divided by 4 and
    /// `t` the remainder. Of `a` a thread holds the pairs of columns `2t` of rows `g` and `g + 8`, then the
    /// same of columns `2t + 8`. Of `b` it holds the pairs of rows `2t` and `2t + 8` of column `g`. Of `sum`
    /// it holds columns `2t` and `2t + 1` of rows `g` and `g + 8`. All lanes must execute this.
    pub(crate) fn multiply_fragments(
        &'k self,
        kind: HalfType,
        a: [I<'k>; 4],
        b: [I<'k>; 2],
        sum: [F<'k>; 4],
    ) -> [F<'k>; 4] {
        let pair: BasicTypeEnum<'k> = self.ctx.f16_type().vec_type(2).into();
        let word = |x: I<'k>| -> BasicMetadataValueEnum<'k> {
            if kind == HalfType::F16 { self.bitcast(x.v, pair).into() } else { x.v.into() }
        };
        let mut args: Vec<_> = a.into_iter().chain(b).map(word).collect();
        args.extend(sum.map(|s| BasicMetadataValueEnum::from(s.v)));
        let name = if kind == HalfType::F16 { MMA_F16 } else { MMA_BF16 };
        let Some(BasicValueEnum::StructValue(all)) = self.thread_value(name, &args) else { return sum };
        std::array::from_fn(|i| F {
            k: self,
            v: self.keep(self.b.build_extract_value(all, i as u32, ""), sum[i].v),
        })
    }
}
