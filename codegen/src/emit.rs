//! From kernel specifications to LLVM modules and objects.

use crate::dsl::Kb;
use crate::error::{Error, Result};
use crate::kernels;
use crate::machine::Machine;
use crate::spec::KernelSpec;
use inkwell::OptimizationLevel;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::{
    CodeModel, FileType, InitializationConfig, RelocMode, Target, TargetMachine, TargetTriple,
};
use std::collections::BTreeMap;

/// One object (ELF on Linux) with every kernel, symbols sorted, duplicates merged. Position-independent
/// and self-contained but for `memcpy`, `memmove` and `memset`. The same input gives the same bytes.
///
/// # Errors
/// [`Error::Target`] for a machine that LLVM cannot serve, [`Error::Spec`] or [`Error::Bug`] for ours.
pub fn compile(machine: &Machine, kernels: &[KernelSpec]) -> Result<Vec<u8>> {
    let target = target_machine(machine)?;
    let isa = machine.isa();
    let sorted: BTreeMap<String, &KernelSpec> = kernels.iter().map(|s| (s.symbol(&isa), s)).collect();
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "kernels");
    for (symbol, spec) in &sorted {
        write_kernel(&ctx, &module, machine, symbol, spec)?;
    }
    optimise(&module, &target, "default<O3>")?;
    let object = target.write_to_memory_buffer(&module, FileType::Object).map_err(Error::bug)?;
    Ok(object.as_slice().to_vec())
}

/// LLVM IR of one kernel, before or after optimisation.
///
/// # Errors
/// As [`compile`].
pub fn llvm_ir(machine: &Machine, spec: &KernelSpec, optimised: bool) -> Result<String> {
    let target = target_machine(machine)?;
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "kernels");
    write_kernel(&ctx, &module, machine, &spec.symbol(&machine.isa()), spec)?;
    optimise(&module, &target, if optimised { "default<O3>" } else { "strip-dead-prototypes" })?;
    Ok(module.print_to_string().to_string())
}

/// Assembly of one kernel, optimised.
///
/// # Errors
/// As [`compile`].
pub fn assembly(machine: &Machine, spec: &KernelSpec) -> Result<String> {
    let target = target_machine(machine)?;
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "kernels");
    write_kernel(&ctx, &module, machine, &spec.symbol(&machine.isa()), spec)?;
    optimise(&module, &target, "default<O3>")?;
    let text = target.write_to_memory_buffer(&module, FileType::Assembly).map_err(Error::bug)?;
    Ok(String::from_utf8_lossy(text.as_slice()).into_owned())
}

fn write_kernel<'c>(
    ctx: &'c Context,
    module: &Module<'c>,
    machine: &Machine,
    symbol: &str,
    spec: &KernelSpec,
) -> Result<()> {
    let isa = machine.isa();
    kernels::check(spec, &isa).map_err(|what| Error::Spec { symbol: symbol.to_string(), what })?;
    let k = Kb::new(ctx, module, machine, symbol)?;
    kernels::write(&k, spec);
    k.finish()?;
    module.verify().map_err(|e| Error::Bug(format!("{symbol}: {e}")))
}

pub(crate) fn new_module<'c>(ctx: &'c Context, target: &TargetMachine, name: &str) -> Module<'c> {
    let module = ctx.create_module(name);
    module.set_triple(&target.get_triple());
    module.set_data_layout(&target.get_target_data().get_data_layout());
    module
}

pub(crate) fn target_machine(machine: &Machine) -> Result<TargetMachine> {
    if machine.is_x86() {
        Target::initialize_x86(&InitializationConfig::default());
    } else if machine.is_aarch64() {
        Target::initialize_aarch64(&InitializationConfig::default());
    } else {
        return Err(machine.unsupported());
    }
    let triple = TargetTriple::create(&machine.triple);
    let target = Target::from_triple(&triple).map_err(|e| Error::Target {
        what: format!("this LLVM does not know `{}`: {e}", machine.triple),
        hint: "install an LLVM with the x86 and AArch64 targets".to_string(),
    })?;
    let cpu = if machine.is_x86() { "x86-64" } else { "generic" };
    target
        .create_target_machine(
            &triple,
            cpu,
            &machine.feature_string(),
            OptimizationLevel::Aggressive,
            RelocMode::PIC,
            CodeModel::Default,
        )
        .ok_or_else(|| Error::Target {
            what: format!("this LLVM cannot compile for `{}` ({})", machine.triple, machine.cpu),
            hint: "check the triple, the CPU name and the features of the target".to_string(),
        })
}

pub(crate) fn optimise(module: &Module<'_>, target: &TargetMachine, passes: &str) -> Result<()> {
    let options = PassBuilderOptions::create();
    // Kernels are vectorised by hand.
    options.set_loop_vectorization(false);
    options.set_loop_slp_vectorization(false);
    module.run_passes(passes, target, options).map_err(Error::bug)
}
