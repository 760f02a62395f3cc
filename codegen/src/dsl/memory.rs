//! Addresses, loads and stores. The one module of the language with `unsafe`: LLVM's address arithmetic.

use super::{Elem, F, I, Index, Kb, elem_type};
use inkwell::types::BasicTypeEnum;
use inkwell::values::{BasicValue, BasicValueEnum, InstructionValue, PointerValue};
use moec_ir::types::Format;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// An address.
#[derive(Clone, Copy)]
pub(crate) struct P<'k> {
    pub(super) k: &'k Kb<'k>,
    pub(super) v: PointerValue<'k>,
}

/// The lanes of a vector that are there.
#[derive(Clone, Copy)]
pub(crate) enum Span<'k> {
    /// All of them.
    Full,
    /// The lanes of the mask.
    Part(I<'k>),
}

impl<'k> Kb<'k> {
    /// The first `n` lanes; every lane if `n` is the width or more.
    pub(crate) fn span(&'k self, n: usize) -> Span<'k> {
        if n >= self.lanes() { Span::Full } else { Span::Part(self.first_lanes(n)) }
    }

    /// The lanes before `n`, which may be negative or more than the width.
    pub(crate) fn span_before(&'k self, n: I<'k>) -> Span<'k> {
        Span::Part(self.lane_ids().lt(n.narrow().splat(self.lanes())))
    }

    /// Address of operand `i`.
    pub(crate) fn arg(&'k self, i: usize) -> P<'k> {
        if self.shared.is_some() {
            return P { k: self, v: self.pointer_param(i as u32) };
        }
        let args = P { k: self, v: self.pointer_param(0) };
        let at = args.bytes(i * 8);
        let ty = at.v.get_type();
        match self.b.build_load(ty, at.v, "") {
            Ok(BasicValueEnum::PointerValue(v)) => P { k: self, v },
            Ok(_) => args,
            Err(e) => {
                self.fail(e);
                args
            }
        }
    }

    /// The thread's scratch.
    pub(crate) fn scratch(&'k self) -> P<'k> {
        P { k: self, v: self.pointer_param(4) }
    }

    fn pointer_param(&self, i: u32) -> PointerValue<'k> {
        if let Some(BasicValueEnum::PointerValue(v)) = self.func.get_nth_param(i) {
            return v;
        }
        self.fail("a kernel parameter is missing");
        self.ctx.ptr_type(inkwell::AddressSpace::default()).const_null()
    }

    /// An integer parameter of the kernel.
    pub(super) fn int_param(&'k self, i: u32) -> I<'k> {
        if let Some(v @ BasicValueEnum::IntValue(_)) = self.func.get_nth_param(i) {
            return I { k: self, v };
        }
        self.fail("a kernel parameter is missing");
        self.i(0)
    }

    fn align(&self, instruction: Option<InstructionValue<'k>>, bytes: u32) {
        if let Some(Err(e)) = instruction.map(|i| i.set_alignment(bytes)) {
            self.fail(e);
        }
    }
}

impl<'k> P<'k> {
    fn step(self, index: I<'k>, ty: BasicTypeEnum<'k>) -> Self {
        // SAFETY: the instruction is only built here. Without `inbounds` its result is defined wherever it
        // points, which the last lanes of masked tails need. Reads and writes stay within the extents that
        // the kernel's specification documents.
        let v = unsafe { self.k.b.build_gep(ty, self.v, &[index.scalar()], "") };
        Self { k: self.k, v: self.k.keep(v, self.v) }
    }

    /// `n` bytes on, perhaps outside of the operand: not to be read.
    pub(crate) fn beyond(self, n: usize) -> Self {
        let k = self.k;
        let index = k.i64t().const_int(n as u64, false);
        // SAFETY: an address without `inbounds` may be anything as long as it is not accessed.
        let v = unsafe { k.b.build_gep(k.ctx.i8_type(), self.v, &[index], "") };
        Self { k, v: k.keep(v, self.v) }
    }

    /// `n` bytes on.
    pub(crate) fn bytes(self, n: impl Index<'k>) -> Self {
        self.step(n.int(self.k), self.k.ctx.i8_type().into())
    }

    /// `n` 32-bit words on.
    pub(crate) fn words(self, n: impl Index<'k>) -> Self {
        self.step(n.int(self.k), self.k.f32t().into())
    }

    /// `n` elements of a weight on.
    pub(crate) fn elements(self, n: impl Index<'k>, format: Format) -> Self {
        match format {
            Format::F32 => self.words(n),
            Format::Bf16 | Format::F16 => self.step(n.int(self.k), self.k.ctx.i16_type().into()),
            _ => {
                self.k.fail("codes have no address of their own");
                self
            }
        }
    }

    /// Whether two addresses are the same.
    pub(crate) fn equals(self, o: Self) -> I<'k> {
        let k = self.k;
        let zero = k.ctx.bool_type().const_zero();
        let v = k.b.build_int_compare(inkwell::IntPredicate::EQ, self.v, o.v, "");
        I { k, v: k.keep(v, zero).into() }
    }

    pub(super) fn load_as(self, ty: BasicTypeEnum<'k>, align: u32) -> BasicValueEnum<'k> {
        let k = self.k;
        let v = k.keep(k.b.build_load(ty, self.v, ""), ty.const_zero());
        k.align(v.as_instruction_value(), align);
        v
    }

    /// One f32.
    pub(crate) fn load(self) -> F<'k> {
        F { k: self.k, v: self.load_as(self.k.f32t().into(), 4) }
    }

    /// Address `i` of a table of addresses.
    pub(crate) fn load_address(self, i: impl Index<'k>) -> Self {
        let k = self.k;
        let at = self.step(i.int(k), k.i64t().into());
        match at.load_as(at.v.get_type().into(), 8) {
            BasicValueEnum::PointerValue(v) => Self { k, v },
            _ => at,
        }
    }

    /// One i32, widened.
    pub(crate) fn load_int(self) -> I<'k> {
        I { k: self.k, v: self.load_as(self.k.ctx.i32_type().into(), 4) }.wide()
    }

    /// A vector of f32; lanes outside of the span are zero.
    pub(crate) fn load_vec(self, span: Span<'k>) -> F<'k> {
        F { k: self.k, v: self.load_elems(Elem::F32, span) }
    }

    /// A vector of 32-bit integers, read whole.
    pub(crate) fn load_ints(self) -> I<'k> {
        let ty = self.k.ctx.i32_type().vec_type(self.k.lanes() as u32);
        I { k: self.k, v: self.load_as(ty.into(), 4) }
    }

    /// A vector of weights as f32; lanes outside of the span are zero.
    pub(crate) fn load_weights(self, format: Format, span: Span<'k>) -> F<'k> {
        let k = self.k;
        match format {
            Format::F32 => self.load_vec(span),
            Format::Bf16 => I { k, v: self.load_elems(Elem::I16, span) }.zext16().shl(16).as_float(),
            Format::F16 if k.converts_f16 => {
                let to = k.f32t().vec_type(k.lanes() as u32);
                match self.load_elems(Elem::F16, span) {
                    BasicValueEnum::VectorValue(v) => {
                        let wide = k.b.build_float_ext(v, to, "");
                        F { k, v: k.keep(wide, to.const_zero()).into() }
                    }
                    _ => k.fv(0.0),
                }
            }
            Format::F16 => f16_by_bits(I { k, v: self.load_elems(Elem::I16, span) }.zext16()),
            _ => {
                k.fail("codes have no address of their own");
                k.fv(0.0)
            }
        }
    }

    /// One f16, as f32.
    pub(crate) fn load_f16(self) -> F<'k> {
        let k = self.k;
        let bits = I { k, v: self.load_as(k.ctx.i16_type().into(), 2) }.zext16();
        if k.converts_f16 { bits.f16() } else { f16_by_bits(bits) }
    }

    /// As many bytes as a vector has lanes, widened by zeros.
    pub(crate) fn load_bytes(self) -> I<'k> {
        let k = self.k;
        let lanes = k.lanes() as u32;
        let wide = k.ctx.i32_type().vec_type(lanes);
        match self.load_as(k.ctx.i8_type().vec_type(lanes).into(), 1) {
            BasicValueEnum::VectorValue(v) => {
                let v = k.keep(k.b.build_int_z_extend(v, wide, ""), wide.const_zero());
                I { k, v: v.into() }
            }
            v => I { k, v: k.mismatch(v) },
        }
    }

    /// 32 bits at any address, in every lane.
    pub(crate) fn load_bits(self) -> I<'k> {
        I { k: self.k, v: self.load_as(self.k.ctx.i32_type().into(), 1) }.splat(self.k.lanes())
    }

    fn load_elems(self, elem: Elem, span: Span<'k>) -> BasicValueEnum<'k> {
        let (k, lanes) = (self.k, self.k.lanes() as u32);
        let ty = elem_type(k.ctx, elem, lanes);
        let align = if elem == Elem::F32 { 4 } else { 2 };
        match span {
            Span::Full => self.load_as(ty, align),
            Span::Part(mask) => {
                let mut args = vec![self.v.into(), mask.v.into(), ty.const_zero().into()];
                k.with_align(&mut args, "llvm.masked.load", elem, 1, align);
                k.call("llvm.masked.load", elem, lanes, &args).unwrap_or(ty.const_zero())
            }
        }
    }

    /// Prefetches the cache line of the address, which need not be mapped.
    pub(crate) fn prefetch(self) {
        self.prefetch_to(0, 3);
    }

    /// As [`P::prefetch`], for what is written soon.
    pub(crate) fn prefetch_to_write(self) {
        self.prefetch_to(1, 3);
    }

    /// As [`P::prefetch`], no nearer than the second-level cache: for data that is used later.
    pub(crate) fn prefetch_far(self) {
        self.prefetch_to(0, 2);
    }

    /// `write`: 0 or 1; `locality`: from 3, the nearest cache, to 0.
    fn prefetch_to(self, write: u64, locality: u64) {
        let k = self.k;
        let flag = |x: u64| k.ctx.i32_type().const_int(x, false).into();
        // Of data.
        k.done(k.b.build_call(k.prefetch, &[self.v.into(), flag(write), flag(locality), flag(1)], ""));
    }

    /// Whether a cache line begins here.
    pub(crate) fn begins_line(self) -> I<'k> {
        let k = self.k;
        let zero = k.i64t().const_zero();
        let address = k.keep(k.b.build_ptr_to_int(self.v, k.i64t(), ""), zero);
        (I { k, v: address.into() } & k.i(LINE as i64 - 1)).equals(k.i(0))
    }

    /// Stores a scalar, or a vector whole.
    pub(crate) fn store(self, x: F<'k>) {
        self.store_value(x.v);
    }

    /// Stores a 32-bit integer, or a vector of them whole.
    pub(crate) fn store_int(self, x: I<'k>) {
        self.store_value(x.v);
    }

    fn store_value(self, v: BasicValueEnum<'k>) {
        self.store_aligned(v, 4);
    }

    pub(super) fn store_aligned(self, v: BasicValueEnum<'k>, align: u32) {
        match self.k.b.build_store(self.v, v) {
            Ok(store) => self.k.align(Some(store), align),
            Err(e) => self.k.fail(e),
        }
    }

    /// Stores the lanes of a vector that are in the span.
    pub(crate) fn store_vec(self, x: F<'k>, span: Span<'k>) {
        let k = self.k;
        match span {
            Span::Full if k.past_caches.get() => match k.b.build_store(self.v, x.v) {
                Ok(store) => {
                    k.align(Some(store), LINE as u32);
                    let node = k.ctx.metadata_node(&[k.ctx.i32_type().const_int(1, false).into()]);
                    if let Err(e) = store.set_metadata(node, k.ctx.get_kind_id("nontemporal")) {
                        k.fail(e);
                    }
                }
                Err(e) => k.fail(e),
            },
            Span::Full => self.store(x),
            Span::Part(mask) => {
                let mut args = vec![x.v.into(), self.v.into(), mask.v.into()];
                k.with_align(&mut args, "llvm.masked.store", Elem::F32, 2, 4);
                let _ = k.call("llvm.masked.store", Elem::F32, k.lanes() as u32, &args);
            }
        }
    }
}

impl<'k> Kb<'k> {
    /// In `body`, [`P::store_vec`] of whole vectors writes past the caches. It is for results too large for
    /// them: they are not read from memory before they are written, and evict nothing that is read again.
    /// Every vector must be a whole line. [`Kb::fence_stores`] must follow before any thread reads them.
    pub(crate) fn past_caches(&'k self, body: impl FnOnce()) {
        self.past_caches.set(true);
        body();
        self.past_caches.set(false);
    }

    /// Up to LLVM 21 masked accesses take their alignment as an argument; later as an attribute.
    pub(super) fn with_align(
        &self,
        args: &mut Vec<inkwell::values::BasicMetadataValueEnum<'k>>,
        name: &'static str,
        elem: Elem,
        at: usize,
        align: u32,
    ) {
        let key = (name, elem, self.lanes() as u32);
        if self.intrinsics.get(&key).is_some_and(|f| f.count_params() as usize > args.len()) {
            args.insert(at, self.ctx.i32_type().const_int(u64::from(align), false).into());
        }
    }
}

impl<'k> I<'k> {
    /// Truth value: `a` where true, else `b`.
    pub(crate) fn pick_address(self, a: P<'k>, b: P<'k>) -> P<'k> {
        let k = self.k;
        match k.b.build_select(self.scalar(), a.v, b.v, "") {
            Ok(BasicValueEnum::PointerValue(v)) => P { k, v },
            Ok(_) => a,
            Err(e) => {
                k.fail(e);
                a
            }
        }
    }
}

/// binary16 in the low half of each lane to f32, by integer arithmetic.
fn f16_by_bits(h: I<'_>) -> F<'_> {
    let k = h.k;
    let magnitude = (h & 0x7fff).shl(13);
    // Rebiases the exponent by 112, which also normalises subnormals.
    let finite = magnitude.as_float() * f32::from_bits((127 + 112) << 23);
    let special = (magnitude | 0x7f80_0000).as_float();
    let is_finite = magnitude.lt(k.i32(0x7c00 << 13));
    let sign = (h & 0x8000).shl(16);
    (is_finite.pick(finite, special).bits() | sign).as_float()
}
