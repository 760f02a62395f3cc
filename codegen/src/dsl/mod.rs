//! A small language for kernels over LLVM's builder.
//!
//! [`Kb`] writes one function. [`F`] are f32 scalars and vectors, [`I`] integers (scalars, vectors,
//! masks), [`P`] addresses; scalars are broadcast to vectors. Loops and branches take closures, so a
//! kernel reads like the mathematics that it computes. Errors stick: after the first one values are
//! arbitrary, and [`Kb::finish`] returns it.
#![expect(clippy::cast_possible_truncation, reason = "kernels: lanes, tiles and strides of one matrix")]

mod dot;
mod float;
mod flow;
mod gpu;
mod int;
mod lookup;
mod math;
mod memory;
mod narrow;
mod tiles;
mod value;
mod wide;

pub(crate) use gpu::{GpuFunction, WARP};
pub(crate) use memory::{LINE, P, Span};
pub(crate) use tiles::{TILE_CONFIG_BYTES, TILE_ROW_BYTES, TILE_ROWS, Tile};
pub(crate) use value::{F, I, Index};
pub(crate) use wide::{HalfType, widest};

use crate::error::{Error, Result};
use crate::machine::{Isa, Machine};
use inkwell::AddressSpace;
use inkwell::attributes::AttributeLoc;
use inkwell::builder::{Builder, BuilderError};
use inkwell::context::Context;
use inkwell::intrinsics::Intrinsic;
use inkwell::module::Module;
use inkwell::types::{BasicType, BasicTypeEnum, FloatType, IntType};
use inkwell::values::{BasicMetadataValueEnum, BasicValueEnum, FunctionValue, PointerValue};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;

/// Intrinsics that kernels call, each for the types of [`Elem`].
const FLOAT_INTRINSICS: [&str; 3] = ["llvm.fmuladd", "llvm.sqrt", "llvm.fabs"];
const MEMORY_INTRINSICS: [&str; 2] = ["llvm.masked.load", "llvm.masked.store"];

/// Element types in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Elem {
    /// f32
    F32,
    /// binary16
    F16,
    /// 16-bit integer
    I16,
}

/// Writes one kernel.
pub(crate) struct Kb<'c> {
    /// Vector shape.
    pub(crate) isa: Isa,
    ctx: &'c Context,
    b: Builder<'c>,
    func: FunctionValue<'c>,
    /// By name, element and width (1: scalar).
    intrinsics: HashMap<(&'static str, Elem, u32), FunctionValue<'c>>,
    instructions: dot::Instructions<'c>,
    prefetch: FunctionValue<'c>,
    converts_f16: bool,
    /// Whether whole lines are stored past the caches.
    past_caches: Cell<bool>,
    /// Shared memory, in a GPU kernel; its operands are parameters of their own there.
    shared: Option<PointerValue<'c>>,
    error: RefCell<Option<String>>,
}

impl<'c> Kb<'c> {
    /// Begins the kernel `symbol` in `module`.
    pub(crate) fn new(
        ctx: &'c Context,
        module: &Module<'c>,
        machine: &Machine,
        symbol: &str,
    ) -> Result<Self> {
        let isa = machine.isa();
        let (ptr, i64t) = (ctx.ptr_type(AddressSpace::default()), ctx.i64_type());
        let ty =
            ctx.void_type().fn_type(&[ptr.into(), i64t.into(), i64t.into(), i64t.into(), ptr.into()], false);
        let func = module.add_function(symbol, ty, None);
        for (param, name) in func.get_param_iter().zip(["args", "n", "begin", "end", "scratch"]) {
            param.set_name(name);
        }
        let cpu = if machine.is_x86() { "x86-64" } else { "generic" };
        let bits = (isa.lanes * 32).to_string();
        for (key, value) in [
            ("target-cpu", cpu),
            ("tune-cpu", machine.cpu.as_str()),
            ("target-features", machine.feature_string().as_str()),
            ("prefer-vector-width", bits.as_str()),
            ("min-legal-vector-width", bits.as_str()),
            ("no-trapping-math", "true"),
        ] {
            func.add_attribute(AttributeLoc::Function, ctx.create_string_attribute(key, value));
        }
        let nounwind = inkwell::attributes::Attribute::get_named_enum_kind_id("nounwind");
        func.add_attribute(AttributeLoc::Function, ctx.create_enum_attribute(nounwind, 0));

        let mut intrinsics = HashMap::new();
        let lanes = isa.lanes as u32;
        let mut declare = |name: &'static str, elem: Elem, width: u32, extra: &[BasicTypeEnum<'c>]| {
            let mut types = vec![elem_type(ctx, elem, width)];
            types.extend_from_slice(extra);
            let found = Intrinsic::find(name).and_then(|i| i.get_declaration(module, &types));
            let function = found.ok_or_else(|| Error::bug(format!("LLVM has no {name} for {types:?}")))?;
            intrinsics.insert((name, elem, width), function);
            Ok::<(), Error>(())
        };
        for name in FLOAT_INTRINSICS {
            declare(name, Elem::F32, 1, &[])?;
            declare(name, Elem::F32, lanes, &[])?;
        }
        for name in MEMORY_INTRINSICS {
            for elem in [Elem::F32, Elem::F16, Elem::I16] {
                declare(name, elem, lanes, &[ptr.into()])?;
            }
        }

        let prefetch =
            Intrinsic::find("llvm.prefetch").and_then(|i| i.get_declaration(module, &[ptr.into()]));
        let prefetch = prefetch.ok_or_else(|| Error::bug("LLVM has no llvm.prefetch"))?;

        let b = ctx.create_builder();
        b.position_at_end(ctx.append_basic_block(func, "entry"));
        let converts_f16 = machine.converts_f16();
        let instructions = dot::declare(ctx, module, machine)?;
        let (past_caches, error) = (Cell::new(false), RefCell::new(None));
        let shared = None;
        Ok(Self {
            isa,
            ctx,
            b,
            func,
            intrinsics,
            instructions,
            prefetch,
            converts_f16,
            past_caches,
            shared,
            error,
        })
    }

    /// Ends the kernel.
    pub(crate) fn finish(self) -> Result<()> {
        self.b.build_return(None).map_err(Error::bug)?;
        match self.error.into_inner() {
            Some(what) => Err(Error::Bug(what)),
            None => Ok(()),
        }
    }

    /// f32 lanes of a vector.
    pub(crate) fn lanes(&self) -> usize {
        self.isa.lanes
    }

    fn f32t(&self) -> FloatType<'c> {
        self.ctx.f32_type()
    }

    fn i64t(&self) -> IntType<'c> {
        self.ctx.i64_type()
    }

    /// Remembers that generation failed.
    pub(crate) fn fail(&self, what: impl ToString) {
        self.error.borrow_mut().get_or_insert_with(|| what.to_string());
    }

    /// The value, or `otherwise` with the error remembered.
    fn keep<T>(&self, result: std::result::Result<T, BuilderError>, otherwise: T) -> T {
        result.unwrap_or_else(|e| {
            self.fail(e);
            otherwise
        })
    }

    fn done<T>(&self, result: std::result::Result<T, BuilderError>) {
        if let Err(e) = result {
            self.fail(e);
        }
    }

    /// Calls an intrinsic; `None` for those that return nothing.
    fn call(
        &self,
        name: &'static str,
        elem: Elem,
        width: u32,
        args: &[BasicMetadataValueEnum<'c>],
    ) -> Option<BasicValueEnum<'c>> {
        let Some(function) = self.intrinsics.get(&(name, elem, width)) else {
            self.fail(format!("{name} is not declared for {width} {elem:?}"));
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
}

fn elem_type<'c>(ctx: &'c Context, elem: Elem, width: u32) -> BasicTypeEnum<'c> {
    let scalar: BasicTypeEnum<'c> = match elem {
        Elem::F32 => ctx.f32_type().into(),
        Elem::F16 => ctx.f16_type().into(),
        Elem::I16 => ctx.i16_type().into(),
    };
    match (scalar, width) {
        (_, 1) => scalar,
        (BasicTypeEnum::FloatType(t), _) => t.vec_type(width).as_basic_type_enum(),
        (BasicTypeEnum::IntType(t), _) => t.vec_type(width).as_basic_type_enum(),
        (other, _) => other,
    }
}
