//! A GPU kernel: the language writes what one thread does, in scalars. This module adds what threads share.
//!
//! A launch has blocks of threads. Thirty-two threads are a warp, which shuffles values between its lanes; a
//! block has shared memory and a barrier. Each operand is a parameter, an address in global memory. The
//! number of valid rows is the last parameter.

use super::dot::Instructions;
use super::{Elem, F, FLOAT_INTRINSICS, I, Index, Kb, P};
use crate::error::{Error, Result};
use crate::machine::Isa;
use inkwell::AddressSpace;
use inkwell::attributes::{Attribute, AttributeLoc};
use inkwell::context::Context;
use inkwell::intrinsics::Intrinsic;
use inkwell::module::{Linkage, Module};
use inkwell::types::{BasicType, BasicTypeEnum};
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// Threads of a warp.
pub(crate) const WARP: usize = 32;

/// LLVM's number of the calling convention of kernels.
const KERNEL: u32 = 71;
/// LLVM's address spaces.
const GLOBAL: u16 = 1;
const SHARED: u16 = 3;

const THREAD: &str = "llvm.nvvm.read.ptx.sreg.tid.x";
const BLOCKS: [&str; 3] =
    ["llvm.nvvm.read.ptx.sreg.ctaid.x", "llvm.nvvm.read.ptx.sreg.ctaid.y", "llvm.nvvm.read.ptx.sreg.ctaid.z"];
/// The barrier; the second name is the one that LLVM used up to version 20.
const BARRIER: [&str; 2] = ["llvm.nvvm.barrier.cta.sync.aligned.all", "llvm.nvvm.barrier0"];
const SHUFFLE: &str = "llvm.nvvm.shfl.sync.bfly.i32";
const BALLOT: &str = "llvm.nvvm.vote.ballot.sync";
const COUNT_ONES: &str = "llvm.ctpop";
pub(super) const COPY_16: &str = "llvm.nvvm.cp.async.cg.shared.global.16";
pub(super) const COMMIT: &str = "llvm.nvvm.cp.async.commit.group";
pub(super) const WAIT: &str = "llvm.nvvm.cp.async.wait.group";
pub(super) const LOAD_MATRICES: &str = "llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4.b16";
pub(super) const MMA_BF16: &str = "llvm.nvvm.mma.m16n8k16.row.col.bf16";
pub(super) const MMA_F16: &str = "llvm.nvvm.mma.m16n8k16.row.col.f32.f32";

/// Inputs of a new GPU kernel.
pub(crate) struct GpuFunction<'a> {
    /// Its symbol.
    pub(crate) symbol: &'a str,
    /// Operands, each an address.
    pub(crate) operands: usize,
    /// Threads of a block.
    pub(crate) block: u32,
    /// Bytes of shared memory.
    pub(crate) shared: u32,
}

impl<'c> Kb<'c> {
    /// Begins a GPU kernel in `module`.
    pub(crate) fn of_gpu(ctx: &'c Context, module: &Module<'c>, kernel: &GpuFunction<'_>) -> Result<Self> {
        let global = ctx.ptr_type(AddressSpace::from(GLOBAL));
        let mut params: Vec<_> = vec![global.into(); kernel.operands];
        params.push(ctx.i32_type().into());
        let func = module.add_function(kernel.symbol, ctx.void_type().fn_type(&params, false), None);
        func.set_call_conventions(KERNEL);
        let threads = kernel.block.to_string();
        func.add_attribute(AttributeLoc::Function, ctx.create_string_attribute("nvvm.reqntid", &threads));
        for name in ["nounwind", "convergent"] {
            let kind = Attribute::get_named_enum_kind_id(name);
            func.add_attribute(AttributeLoc::Function, ctx.create_enum_attribute(kind, 0));
        }
        let bytes = ctx.i8_type().array_type(kernel.shared.max(1));
        let shared =
            module.add_global(bytes, Some(AddressSpace::from(SHARED)), &format!("{}_shared", kernel.symbol));
        shared.set_linkage(Linkage::Internal);
        shared.set_alignment(16);
        shared.set_initializer(&bytes.get_poison());

        let find = |name: &str, types: &[BasicTypeEnum<'c>]| {
            Intrinsic::find(name).and_then(|i| i.get_declaration(module, types))
        };
        let float = ctx.f32_type().as_basic_type_enum();
        let mut intrinsics = HashMap::new();
        for name in FLOAT_INTRINSICS {
            let function = find(name, &[float]).ok_or_else(|| Error::bug(format!("LLVM has no {name}")))?;
            intrinsics.insert((name, Elem::F32, 1), function);
        }
        let mut instructions = Instructions::new();
        let plain = [SHUFFLE, BALLOT, COPY_16, COMMIT, WAIT, MMA_BF16, MMA_F16, THREAD];
        for name in plain.into_iter().chain(BLOCKS) {
            let function = find(name, &[]).ok_or_else(|| Error::bug(format!("LLVM has no {name}")))?;
            instructions.insert(name, function);
        }
        let ones = find(COUNT_ONES, &[ctx.i32_type().into()]);
        instructions.insert(COUNT_ONES, ones.ok_or_else(|| Error::bug("LLVM has no llvm.ctpop"))?);
        let in_shared = ctx.ptr_type(AddressSpace::from(SHARED)).into();
        let matrices = find(LOAD_MATRICES, &[in_shared]);
        instructions.insert(LOAD_MATRICES, matrices.ok_or_else(|| Error::bug("LLVM has no ldmatrix"))?);
        let barrier = BARRIER.iter().find_map(|name| find(name, &[]));
        instructions.insert(BARRIER[0], barrier.ok_or_else(|| Error::bug("LLVM has no barrier"))?);
        let generic = ctx.ptr_type(AddressSpace::default());
        let prefetch = find("llvm.prefetch", &[generic.into()]);
        let b = ctx.create_builder();
        b.position_at_end(ctx.append_basic_block(func, "entry"));
        Ok(Self {
            isa: Isa::GPU,
            ctx,
            b,
            func,
            intrinsics,
            instructions,
            prefetch: prefetch.ok_or_else(|| Error::bug("LLVM has no llvm.prefetch"))?,
            converts_f16: true,
            past_caches: Cell::new(false),
            shared: Some(shared.as_pointer_value()),
            error: RefCell::new(None),
        })
    }
}

impl<'k> Kb<'k> {
    /// Calls an instruction of a thread that gives something.
    pub(super) fn thread_value(
        &'k self,
        name: &'static str,
        args: &[BasicMetadataValueEnum<'k>],
    ) -> Option<BasicValueEnum<'k>> {
        let Some(function) = self.instructions.get(name) else {
            self.fail(format!("{name} requires a GPU kernel"));
            return None;
        };
        match self.b.build_call(*function, args, "") {
            Ok(call) => call.try_as_basic_value().basic(),
            Err(e) => {
                self.fail(e);
                None
            }
        }
    }

    fn special(&'k self, name: &'static str) -> I<'k> {
        let zero = self.i32(0);
        let v = self.thread_value(name, &[]).unwrap_or(zero.v);
        // They are not negative: widened without a sign they need one instruction less.
        let BasicValueEnum::IntValue(x) = v else { return zero };
        I { k: self, v: self.keep(self.b.build_int_z_extend(x, self.i64t(), "").map(Into::into), v) }
    }

    /// Number of the thread in its block.
    pub(crate) fn thread(&'k self) -> I<'k> {
        self.special(THREAD)
    }

    /// Number of the block, `axis` 0, 1 or 2.
    pub(crate) fn block_index(&'k self, axis: usize) -> I<'k> {
        self.special(BLOCKS[axis])
    }

    /// Lane of the thread in its warp.
    pub(crate) fn lane_index(&'k self) -> I<'k> {
        self.thread() & (WARP - 1)
    }

    /// Number of the warp in its block.
    pub(crate) fn warp_index(&'k self) -> I<'k> {
        self.thread().shr(5)
    }

    /// Number of valid rows.
    pub(crate) fn row_count(&'k self) -> I<'k> {
        let n = self.int_param(self.func.count_params().saturating_sub(1));
        n.wide()
    }

    /// Shared memory of the block, `bytes` on.
    pub(crate) fn shared(&'k self, bytes: impl Index<'k>) -> P<'k> {
        let Some(v) = self.shared else {
            self.fail("shared memory of a kernel that has no threads");
            return self.scratch();
        };
        P { k: self, v }.bytes(bytes)
    }

    /// Waits until all threads of the block arrive; their earlier writes are then visible.
    pub(crate) fn barrier(&'k self) {
        let zero = self.i32(0).v.into();
        let count = self.instructions.get(BARRIER[0]).map_or(0, |f| f.count_params());
        let _ = self.thread_value(BARRIER[0], &[zero][..count as usize]);
    }

    /// The lanes of the warp for which the condition holds, a bit each; every lane must come here.
    pub(crate) fn ballot(&'k self, condition: I<'k>) -> I<'k> {
        let none = self.i32(0);
        let args = [self.i32(-1).v.into(), condition.v.into()];
        self.thread_value(BALLOT, &args).map_or(none, |v| I { k: self, v })
    }

    /// A bit for every lane of the warp before this one.
    pub(crate) fn lanes_before(&'k self) -> I<'k> {
        let one = self.i32(1);
        let BasicValueEnum::IntValue(lane) = self.lane_index().narrow().v else { return one };
        let BasicValueEnum::IntValue(bit) = one.v else { return one };
        let own = I { k: self, v: self.keep(self.b.build_left_shift(bit, lane, "").map(Into::into), one.v) };
        own - one
    }

    fn shuffle_word(&'k self, v: BasicValueEnum<'k>, by: usize) -> BasicValueEnum<'k> {
        let word = |x: i32| BasicMetadataValueEnum::from(self.i32(x).v.into_int_value());
        // All lanes take part, and segments are whole warps.
        let args = [word(-1), v.into(), word(by as i32), word(31)];
        self.thread_value(SHUFFLE, &args).unwrap_or(v)
    }

    /// The same over lanes that differ in the bits below `lanes`, a power of two. All of them get the result;
    /// every lane of the warp must execute this.
    fn across<T: Copy>(value: T, lanes: usize, step: impl Fn(T, usize) -> T) -> T {
        let mut value = value;
        let mut by = lanes / 2;
        while by > 0 {
            value = step(value, by);
            by /= 2;
        }
        value
    }
}

impl F<'_> {
    /// The value of the lane whose number differs in the bits of `by`.
    pub(crate) fn lane_xor(self, by: usize) -> Self {
        self.bits().lane_xor(by).as_float()
    }

    /// Sum over each `lanes` lanes of a warp.
    pub(crate) fn warp_sum(self, lanes: usize) -> Self {
        Kb::across(self, lanes, |x, by| x + x.lane_xor(by))
    }

    /// Largest over each `lanes` lanes of a warp.
    pub(crate) fn warp_max(self, lanes: usize) -> Self {
        Kb::across(self, lanes, |x, by| x.max(x.lane_xor(by)))
    }
}

impl I<'_> {
    /// Number of bits that are 1, of 32.
    pub(crate) fn ones(self) -> Self {
        self.k.thread_value(COUNT_ONES, &[self.v.into()]).map_or(self, |v| Self { k: self.k, v })
    }

    /// As [`F::lane_xor`], of 32 bits.
    pub(crate) fn lane_xor(self, by: usize) -> Self {
        Self { k: self.k, v: self.k.shuffle_word(self.v, by) }
    }

    /// Smallest over each `lanes` lanes of a warp, signed, 32 bits.
    pub(crate) fn warp_min(self, lanes: usize) -> Self {
        Kb::across(self, lanes, |x, by| x.min(x.lane_xor(by)))
    }

    /// Sum over each `lanes` lanes of a warp, 32 bits.
    pub(crate) fn warp_sum(self, lanes: usize) -> Self {
        Kb::across(self, lanes, |x, by| x + x.lane_xor(by))
    }
}
