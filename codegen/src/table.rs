//! The object that tells a precompiled `run` what it is: the plan's bytes, and where its kernels are.
//!
//! It defines one symbol, [`TABLE`], which `moec-prebuilt` reads:
//!
//! | field | what |
//! |---|---|
//! | pointer | first byte of the encoded plan |
//! | word | bytes of it |
//! | pointer | addresses of the kernels, in the plan's order |
//! | word | how many |

use crate::emit::{new_module, target_machine};
use crate::error::{Error, Result};
use crate::machine::Machine;
use inkwell::AddressSpace;
use inkwell::context::Context;
use inkwell::module::{Linkage, Module};
use inkwell::targets::FileType;
use inkwell::values::{BasicValue, PointerValue};

/// Symbol of the table.
pub const TABLE: &str = "moec_table";

/// One object (ELF on Linux) with the table of `kernels`, which another object defines, and of an encoded
/// plan. The same input gives the same bytes.
///
/// # Errors
/// [`Error::Target`] for a machine that LLVM cannot serve, [`Error::Bug`] for ours.
pub fn table(machine: &Machine, kernels: &[&str], plan: &[u8]) -> Result<Vec<u8>> {
    let target = target_machine(machine)?;
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "table");
    let pointer = ctx.ptr_type(AddressSpace::default());
    let word = ctx.ptr_sized_int_type(&target.get_target_data(), None);
    // Only the address of a kernel matters here: `moec_runtime::bundle::abi` has its arguments.
    let code = ctx.void_type().fn_type(&[], false);
    let address = |symbol: &&str| {
        let declared = module.get_function(symbol).unwrap_or_else(|| module.add_function(symbol, code, None));
        declared.as_global_value().as_pointer_value()
    };
    let addresses: Vec<PointerValue<'_>> = kernels.iter().map(address).collect();
    let fields = [
        constant(&module, "plan", ctx.const_string(plan, false)).into(),
        word.const_int(plan.len() as u64, false).into(),
        constant(&module, "kernels", pointer.const_array(&addresses)).into(),
        word.const_int(kernels.len() as u64, false).into(),
    ];
    let all = ctx.const_struct(&fields, false);
    let global = module.add_global(all.get_type(), None, TABLE);
    global.set_constant(true);
    global.set_initializer(&all);
    module.verify().map_err(Error::bug)?;
    let object = target.write_to_memory_buffer(&module, FileType::Object).map_err(Error::bug)?;
    Ok(object.as_slice().to_vec())
}

/// A constant that only this object names.
fn constant<'c>(module: &Module<'c>, name: &str, value: impl BasicValue<'c>) -> PointerValue<'c> {
    let value = value.as_basic_value_enum();
    let global = module.add_global(value.get_type(), None, name);
    global.set_constant(true);
    global.set_linkage(Linkage::Private);
    global.set_initializer(&value);
    global.as_pointer_value()
}
