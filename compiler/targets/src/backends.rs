//! The backends, one row each, and the devices that they compile for.
//!
//! What a backend does is after [`Backend`]: nothing else in the compiler knows one by name, the CPU's aside,
//! whose kernels, packed weights and object code every bundle has.

use moec_backend::{Backend, Bench, CommandStreams, GpuKernels, Links, Runner, StaticGraphs};
use moec_base::error::{Error, Result};
use moec_device::{CPU_BACKEND, Device, DeviceUnit};
use moec_ir::plan::Plan;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::{CheckLevel, Program};
use std::path::Path;

/// Every backend.
pub const BACKENDS: &[&dyn Backend] = &[
    &moec_cpu::Cpu,
    &moec_coreml::CoreMl,
    &moec_cuda::Cuda,
    &moec_hosts::Hosts,
    &moec_hosts::Nodes,
    &moec_mirror::Mirror,
    &moec_ndp::Ndp,
    &moec_qnn::Qnn,
];

/// The backend of a unit.
///
/// # Errors
/// One that does not exist.
pub fn of(unit: &DeviceUnit, device: &Device) -> Result<&'static dyn Backend> {
    let name = device.backend_of(unit);
    named(name).ok_or_else(|| {
        let known: Vec<_> = BACKENDS.iter().map(|f| format!("`{}`", f.name())).collect();
        Error::input(format!("unit `{}` of `{}` is of the backend `{name}`", unit.name, device.name))
            .because(format!("there are {}", known.join(", ")))
            .hint("correct `backend` in the device file")
    })
}

/// The backend of a name.
pub fn named(backend: &str) -> Option<&'static dyn Backend> {
    BACKENDS.iter().find(|f| f.name() == backend).copied()
}

/// The static graphs of a unit; `None` where its shapes are dynamic.
pub fn graphs(unit: &DeviceUnit, device: &Device) -> Option<&'static dyn StaticGraphs> {
    of(unit, device).ok()?.graphs()
}

/// A backend's NDP command streams, by its name; `None` where its units compute in another way.
pub fn command_streams(backend: &str) -> Option<&'static dyn CommandStreams> {
    named(backend)?.command_streams()
}

/// The GPU kernels of a backend, by its name; `None` where its units launch none.
pub fn gpu_kernels(backend: &str) -> Option<&'static dyn GpuKernels> {
    named(backend)?.gpu_kernels()
}

/// An artifact of NDP command streams as text, by whichever backend reads it.
///
/// # Errors
/// What the backends say of it.
pub fn print_command_streams(bytes: &[u8]) -> Result<String, String> {
    let mut errors = Vec::new();
    for streams in BACKENDS.iter().filter_map(|f| f.command_streams()) {
        match streams.print(bytes) {
            Ok(text) => return Ok(text),
            Err(why) => errors.push(why),
        }
    }
    Err(errors.join("; "))
}

/// Executor of a backend's units on this machine.
pub fn host(backend: &str, unit: &str) -> Option<Executor> {
    named(backend)?.host(unit)
}

/// Driver of a backend's units on this machine; `None` where a run finds none by itself.
///
/// # Errors
/// Why the machine has no such unit.
pub fn attached(backend: &str, unit: &str) -> Option<Result<Executor>> {
    let found = named(backend)?.attached(unit)?;
    Some(found.map_err(Error::from))
}

/// Executes this process's part of a program whose first part is another process; `None` where it is the first.
///
/// # Errors
/// A part that cannot be executed; a first process that cannot be reached.
pub fn follow(
    program: &Program,
    bundle: &Path,
    threads: Option<usize>,
    check: CheckLevel,
) -> Option<Result<()>> {
    let followed = used(program).find_map(|backend| backend.follow(program, bundle, threads, check))?;
    Some(followed.map_err(Error::from))
}

/// Lets processes end that execute parts of a program for this one.
///
/// # Errors
/// A process that cannot be reached.
pub fn leave(program: &Program) -> Result<()> {
    used(program).try_for_each(<dyn Backend>::leave).map_err(Error::from)
}

/// Backends of the accelerators of a program.
fn used(program: &Program) -> impl Iterator<Item = &'static dyn Backend> + '_ {
    let has = |backend: &&dyn Backend| program.accelerators().any(|(_, unit)| unit.backend == backend.name());
    BACKENDS.iter().copied().filter(has)
}

/// Accelerators of a device that this machine does not have, each with the reason: a run emulates
/// them.
///
/// # Errors
/// A unit of an unknown backend.
pub fn absent(device: &Device) -> Result<Vec<(&str, String)>> {
    let mut absent = Vec::new();
    for unit in device.units.iter().filter(|u| device.backend_of(u) != CPU_BACKEND) {
        let why = match of(unit, device)?.present(unit) {
            Some(Ok(())) => continue,
            Some(Err(e)) => e.to_string(),
            None => format!("`{}` is executed by moec's emulator alone", unit.name),
        };
        absent.push((unit.name.as_str(), why));
    }
    Ok(absent)
}

/// Whether a compute unit of a device is a model of hardware that is not for sale.
///
/// # Errors
/// A unit of an unknown backend.
pub fn modelled(device: &Device) -> Result<bool> {
    device.units.iter().try_fold(false, |any, unit| Ok(any || of(unit, device)?.is_modelled()))
}

/// A unit of this machine with GPU kernels, opened to be measured, and its backend.
///
/// # Errors
/// This machine has none, or none that can be used.
pub fn bench() -> Result<(&'static str, Box<dyn Bench>)> {
    let found = BACKENDS.iter().find_map(|f| Some((f.name(), f.bench()?)));
    let (name, opened) = found.ok_or_else(|| Error::bug("no backend has units that are measured"))?;
    Ok((name, opened?))
}

/// Connections with the processes that a launcher started together with this one, to be measured.
///
/// # Errors
/// There are no others, or they cannot be reached.
pub fn links() -> Result<Box<dyn Links>> {
    job()?.ok_or_else(|| {
        Error::usage("no launcher of MPI has started this process with others")
            .hint("`mpirun -n 2 moec profile-device --hosts` measures two processes; `--hostfile` names other machines")
    })
}

/// Connections with the processes that a launcher started together with this one; `None`: there are no others.
///
/// # Errors
/// They cannot be reached.
pub fn job() -> Result<Option<Box<dyn Links>>> {
    BACKENDS.iter().find_map(|f| f.links()).transpose().map_err(Error::from)
}

/// Libraries of a plan's `run` besides the runtime, to drive the units that have steps; `None`: nothing.
///
/// # Errors
/// Units of two backends that bring something.
pub fn runner(plan: &Plan) -> Result<Option<&'static Runner>> {
    let mut required: Option<&Runner> = None;
    for step in plan.entries.iter().flat_map(|e| &e.steps) {
        let Some(unit) = plan.units.get(step.unit as usize) else { continue };
        let Some(found) = runner_of(named(&unit.backend), &plan.target.triple) else { continue };
        if required.replace(found).is_some_and(|other| other.feature != found.feature) {
            return Err(Error::limit("units of two backends that a `run` drives by itself")
                .hint("build with one of them, or with `--no-run`"));
        }
    }
    Ok(required)
}

/// Libraries of a backend's `run` besides the runtime on machines of a triple.
fn runner_of(backend: Option<&dyn Backend>, triple: &str) -> Option<&'static Runner> {
    backend?.runner().filter(|runner| triple.contains(runner.system))
}

/// Whether a `run` for a device may need what moec's precompiled runtime lacks.
pub fn needs_cargo(device: &Device) -> bool {
    let precompiled = |backend| moec_units::PRECOMPILED.iter().any(|unit| unit.backend == backend);
    let mut backends = device.units.iter().map(|unit| device.backend_of(unit));
    backends.any(|name| runner_of(named(name), &device.triple).is_some() && !precompiled(name))
}

/// The static graphs of a device.
///
/// # Errors
/// A device without such graphs.
pub fn statics(device: &Device) -> Result<&'static dyn StaticGraphs> {
    let found = device.units.iter().find_map(|unit| graphs(unit, device));
    found.ok_or_else(|| Error::input(format!("no unit of `{}` has static graphs", device.name)))
}

/// Checks every unit of a device by its backend; `name` is for messages.
///
/// # Errors
/// The first thing that a backend misses.
pub fn check(device: &Device, name: &str) -> Result<()> {
    for unit in &device.units {
        of(unit, device)?.check(device, unit).map_err(|error| {
            Error::input(format!("device `{name}`, unit `{}`: `{}`: {}", unit.name, error.key, error.message))
                .hint("`moec targets m2-ultra` prints a device file that is right")
        })?;
    }
    // Capacities, groups and parts are for the limits of one.
    let mut fixed = device.units.iter().filter(|unit| graphs(unit, device).is_some());
    if let (Some(one), Some(other)) = (fixed.next(), fixed.next()) {
        return Err(Error::limit(format!(
            "device `{name}`: `{}` and `{}` both run static graphs alone",
            one.name, other.name
        ))
        .hint("leave one of them out: a model is divided between the CPU and one such unit, and any number of others"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use moec_device::BUILT_IN;
    use std::path::Path;

    fn built_in(name: &str) -> &'static str {
        BUILT_IN.iter().find(|(n, _)| *n == name).map(|(_, text)| *text).expect("a built-in device")
    }

    #[test]
    fn every_built_in_device_is_accepted() {
        for (name, _) in BUILT_IN {
            crate::device(name).expect(name);
        }
    }

    #[test]
    fn names_of_backends_are_unique() {
        let mut names: Vec<_> = BACKENDS.iter().map(|f| f.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), BACKENDS.len());
    }

    #[test]
    fn device_keys_missing_for_the_backend_are_reported() {
        let text = built_in("m2-ultra");
        let refused = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            let device = Device::parse(&text.replace(from, to), Path::new("d.toml")).expect("a device");
            check(&device, "d.toml").expect_err(from).to_string()
        };
        let message = refused("form = \"conv1x1\"\n", "");
        assert!(
            message.contains("the row of `linear`: an NPU of the backend `coreml` has `form"),
            "{message}"
        );
        let limit = text.lines().find(|l| l.starts_with("max_graph_bytes")).expect("a limit");
        let message = refused(limit, "");
        assert!(message.contains("needs `legality`, `matmul` and `max_graph_bytes`"), "{message}");
        let npu = text
            .split("[[unit]]")
            .nth(2)
            .and_then(|t| t.split("[[memory]]").next())
            .expect("an NPU")
            .to_owned();
        let two = format!("{npu}[[unit]]{}", npu.replace("name = \"npu\"", "name = \"other\""));
        let message = refused(&npu, &two);
        assert!(message.contains("`npu` and `other` both run static graphs alone"), "{message}");
        let message = refused("backend = \"coreml\"", "backend = \"cobol\"");
        assert!(message.contains("is of the backend `cobol`"), "{message}");
    }
}
