//! The backend of NVIDIA GPUs.
//!
//! Its units have a memory of their own and launch GPU kernels: the compiler writes each of their operators
//! as [`moec_ir::plan::GpuKernel`]s, whose PTX is in one artifact for each unit. This crate reads it back
//! ([`artifact`]) and executes it on the host ([`Emulated`]), instruction by instruction, in a memory of its
//! own. The code for NVIDIA's driver travels with bundles, and is a separate crate ([`moec_cuda_unit`]).
//!
//! Invariant: nothing of the compiler or the runtime names this crate, but its row in the table of backends.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod artifact;
mod bench;
mod emulated;
mod ptxas;

pub use emulated::Emulated;
pub use moec_cuda_unit::Gpu;

use include_dir::{Dir, include_dir};
use moec_backend::error::{Error, Result};
use moec_backend::{Assembled, Backend, Bench, Flaw, GpuKernels, KernelsRead, Runner, RunnerCrate, Tools};
use moec_cuda_unit::text::code_path;
use moec_device::{Device, DeviceUnit, UnitKind};
use moec_ir::Op;
use moec_ir::plan::Plan;
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use std::path::Path;

use moec_cuda_unit::BACKEND as NAME;

/// Generations that kernels are written for.
const GENERATIONS: [&str; 3] = ["sm_80", "sm_89", "sm_90"];

/// Number of a generation: 90 of `sm_90`.
fn number(generation: &str) -> Option<u32> {
    generation.strip_prefix("sm_")?.parse().ok()
}

static UNIT: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/unit/src");

/// Driver of a GPU in a `run` that cargo builds.
static RUNNER: Runner = Runner {
    feature: NAME,
    native: "moec_cuda_unit::NATIVE",
    system: "",
    crates: &[RunnerCrate {
        name: "moec-cuda-unit",
        manifest: include_str!("../unit/Cargo.toml"),
        sources: &UNIT,
    }],
    lock: include_str!("../unit/runner.lock"),
};

/// The backend of NVIDIA GPUs.
#[derive(Clone, Copy, Debug)]
pub struct Cuda;

impl Backend for Cuda {
    fn name(&self) -> &'static str {
        NAME
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        if unit.kind != UnitKind::Gpu {
            return Err(Flaw::new("unit.kind", "a unit of the backend `cuda` is of kind `gpu`"));
        }
        if device.memory_of(unit).is_none() {
            return Err(Flaw::new("unit.memory", "a unit of the backend `cuda` has a memory of its own"));
        }
        if let Some(other) = device.units.iter().find(|u| u.backend == unit.backend && u.name != unit.name) {
            let message = format!(
                "`{}` also has the backend `cuda`, but a run opens only the machine's first GPU",
                other.name
            );
            return Err(Flaw::new("unit.backend", message));
        }
        let known = || GENERATIONS.map(|g| format!("`{g}`")).join(", ");
        match unit.sm.as_deref() {
            Some(sm) if GENERATIONS.contains(&sm) => Ok(()),
            Some(sm) => Err(Flaw::new(
                "unit.sm",
                format!(
                    "there are no kernels for `{sm}`, only for {}: name the newest of these that is not newer than the GPU",
                    known()
                ),
            )),
            None => Err(Flaw::new(
                "unit.sm",
                format!("a unit of the backend `cuda` needs `sm`, one of {}", known()),
            )),
        }
    }

    fn gpu_kernels(&self) -> Option<&dyn GpuKernels> {
        Some(self)
    }

    /// Operators with GPU kernels. Angles that depend on the length of a prompt are the CPU's, as are single
    /// neurons.
    fn takes(&self, op: &Op) -> bool {
        !matches!(
            op,
            Op::RequestExperts { .. }
                | Op::LimitCapacity(_)
                | Op::RopeAngles { switch: Some(_), .. }
                | Op::NeuronFfn { .. }
                | Op::ZeroExperts { .. }
        )
    }

    fn bench(&self) -> Option<Result<Box<dyn Bench>>> {
        Some(bench::Measured::open().map(|device| Box::new(device) as Box<dyn Bench>))
    }

    fn runner(&self) -> Option<&'static Runner> {
        Some(&RUNNER)
    }

    fn attached(&self, unit: &str) -> Option<moec_runtime::Result<Executor>> {
        Some(Gpu::open(unit).map(|gpu| Executor::Unit(Box::new(gpu))))
    }

    /// The GPU's generation decides besides: PTX runs on its own generation and on newer ones.
    fn present(&self, unit: &DeviceUnit) -> Option<moec_runtime::Result<()>> {
        let here = moec_cuda_unit::open(&unit.name).and_then(|device| {
            let generation = device.generation().map_err(|refusal| refusal.to_string());
            let newest = unit.sm.as_deref().and_then(number).unwrap_or(0);
            let why = match generation {
                Ok(here) if here >= newest => return Ok(()),
                Ok(here) => format!("`{}` is of sm_{here}, older than sm_{newest}", device.name()),
                Err(refusal) => refusal,
            };
            Err(moec_runtime::Error::unit(&unit.name, why).with_hint("choose a target of its generation"))
        });
        Some(here)
    }

    fn host(&self, _unit: &str) -> Option<Executor> {
        Some(Executor::Unit(Box::new(Emulated::default())))
    }
}

impl GpuKernels for Cuda {
    fn generation<'u>(&self, unit: &'u DeviceUnit) -> Option<&'u str> {
        unit.sm.as_deref()
    }

    fn assemble(&self, text: &Path, unit: &DeviceUnit, tools: Tools<'_>) -> Result<Option<Assembled>> {
        let (Some(ptxas), Some(generation)) = (ptxas::find(tools.cache), unit.sm.as_deref()) else {
            return Ok(None);
        };
        ptxas::assemble(&ptxas, generation, text).map(Some)
    }

    fn installs_assembler(&self) -> &'static str {
        ptxas::INSTALL
    }

    fn code_path(&self, artifact: &str) -> String {
        code_path(artifact)
    }

    fn read(
        &self,
        bundle: &BundleReader,
        plan: &Plan,
        unit: u32,
        by: Option<&str>,
        tools: Tools<'_>,
    ) -> Result<KernelsRead> {
        let artifact = artifact::read(bundle, plan, unit)?;
        let text = &artifact.text;
        let assembled = match (ptxas::find(tools.cache), text.generation()) {
            (Some(ptxas), Some(generation)) => {
                Some(ptxas::assemble(&ptxas, generation, &bundle.path(&text.path)?)?)
            }
            _ => None,
        };
        let unverified = match (&text.code, assembled) {
            (Some(code), Some(made)) if Some(made.by.as_str()) == by && *code != made.code => {
                let path = code_path(&text.path);
                return Err(Error::input(format!(
                    "`{path}` differs from the output of {} for `{}`",
                    made.by, text.path
                ))
                .hint("build the bundle again"));
            }
            (Some(code), Some(made)) if *code != made.code => Some(format!("{} is installed here", made.by)),
            (Some(_), None) => Some("NVIDIA's assembler is not installed here".to_owned()),
            _ => None,
        };
        let unverified = unverified.map(|why| {
            let (path, by) = (code_path(&text.path), by.unwrap_or("an unknown assembler"));
            format!("`{path}`, written by {by}, is not checked against its PTX: {why}")
        });
        Ok(KernelsRead { kernels: artifact.kernels.iter().flatten().count(), unverified })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_ir::Activation;

    #[test]
    fn only_operators_with_kernels_are_claimed() {
        let claimed = [
            Op::CausalConv { act: None, bias: true },
            Op::DeltaRule { key_heads: 1, heads: 2 },
            Op::Ssd { groups: 1, heads: 2 },
            Op::SelectiveScan,
            Op::CacheWrite,
            Op::Act(Activation::Relu2),
        ];
        assert!(claimed.iter().all(|op| Cuda.takes(op)));
        assert!(!Cuda.takes(&Op::ZeroExperts { experts: 2, zero: 1 }));
    }
}
