//! From kernel specifications to LLVM modules and objects.

use crate::dsl::Kb;
use crate::error::{Error, Result};
use crate::machine::Machine;
use crate::merge::merge;
use crate::spec::KernelSpec;
use inkwell::OptimizationLevel;
use inkwell::context::Context;
use inkwell::module::Module;
use inkwell::passes::PassBuilderOptions;
use inkwell::targets::{
    CodeModel, FileType, InitializationConfig, RelocMode, Target, TargetMachine, TargetTriple,
};
use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Passes that run on every module.
const PASSES: &str = "default<O3>";
/// Stack of a thread in which LLVM runs; its passes recurse on the code's structure.
const STACK: usize = 64 << 20;

/// Objects by what they were compiled from, kept by a caller from one compilation to the next.
pub trait Objects: Sync {
    /// The object that was compiled from `source`, if it is kept.
    fn get(&self, source: &[u8]) -> Option<Vec<u8>>;
    /// Keeps an object. Nothing depends on it.
    fn keep(&self, source: &[u8], object: &[u8]);
}

/// Keeps nothing.
impl Objects for () {
    fn get(&self, _: &[u8]) -> Option<Vec<u8>> {
        None
    }

    fn keep(&self, _: &[u8], _: &[u8]) {}
}

/// One object (ELF on Linux) with every kernel, symbols sorted, duplicates merged. Position-independent
/// and self-contained but for `memcpy`, `memmove` and `memset`. The same input gives the same bytes.
///
/// Kernels do not know each other, so each is a module of its own: all cores compile them, and `objects`
/// keeps each. Only Mach-O objects are made of one module.
///
/// # Errors
/// [`Error::Target`] for a machine that LLVM cannot serve, [`Error::Spec`] or [`Error::Bug`] for ours.
pub fn compile(machine: &Machine, kernels: &[KernelSpec], objects: &dyn Objects) -> Result<Vec<u8>> {
    let isa = machine.isa();
    let sorted: BTreeMap<String, &KernelSpec> = kernels.iter().map(|s| (s.symbol(&isa), s)).collect();
    let sorted: Vec<(&str, &KernelSpec)> = sorted.iter().map(|(symbol, spec)| (&**symbol, *spec)).collect();
    let alone = machine.is_elf() && !sorted.is_empty();
    let modules: Vec<&[(&str, &KernelSpec)]> = if alone { sorted.chunks(1).collect() } else { vec![&sorted] };
    let next = AtomicUsize::new(0);
    let compiled: Vec<OnceLock<Result<Vec<u8>>>> = modules.iter().map(|_| OnceLock::new()).collect();
    let work = || {
        while let Some((kernels, result)) = {
            let i = next.fetch_add(1, Ordering::Relaxed);
            modules.get(i).zip(compiled.get(i))
        } {
            let _ = result.set(compile_module(machine, kernels, objects));
        }
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores.min(modules.len()) {
            // The name shows where a process spends its time.
            let thread = std::thread::Builder::new().name("llvm".to_owned()).stack_size(STACK);
            thread.spawn_scoped(scope, work).map_err(|e| Error::Bug(format!("no thread for LLVM: {e}")))?;
        }
        Ok(())
    })?;
    let missing = || Err(Error::Bug("LLVM's thread ended early".to_owned()));
    let results = compiled.into_iter().map(|result| result.into_inner().unwrap_or_else(missing));
    let mut compiled = results.collect::<Result<Vec<_>>>()?;
    match compiled.pop() {
        Some(only) if compiled.is_empty() => Ok(only),
        last => merge(&compiled.into_iter().chain(last).collect::<Vec<_>>()),
    }
}

fn compile_module(
    machine: &Machine,
    kernels: &[(&str, &KernelSpec)],
    objects: &dyn Objects,
) -> Result<Vec<u8>> {
    let target = target_machine(machine)?;
    let ctx = Context::create();
    let module = new_module(&ctx, &target, "kernels");
    for (symbol, spec) in kernels {
        write_kernel(&ctx, &module, machine, symbol, spec)?;
    }
    let source = source(machine, &module);
    if let Some(object) = objects.get(&source) {
        return Ok(object);
    }
    optimise(&module, &target, PASSES)?;
    let object = target.write_to_memory_buffer(&module, FileType::Object).map_err(Error::bug)?;
    objects.keep(&source, object.as_slice());
    Ok(object.as_slice().to_vec())
}

/// All that decides an object: LLVM, the machine, the passes, and the module before them.
fn source(machine: &Machine, module: &Module<'_>) -> Vec<u8> {
    let Machine { triple, .. } = machine;
    let head = format!("{}\n{triple}\n{}\n{PASSES}\n", crate::llvm_version(), machine.feature_string());
    [head.as_bytes(), module.write_bitcode_to_memory().as_slice()].concat()
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
    optimise(&module, &target, if optimised { PASSES } else { "strip-dead-prototypes" })?;
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
    optimise(&module, &target, PASSES)?;
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
    spec.check(&isa).map_err(|what| Error::Spec { symbol: symbol.to_string(), what })?;
    let k = Kb::new(ctx, module, machine, symbol)?;
    spec.kernel().write(&k);
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
