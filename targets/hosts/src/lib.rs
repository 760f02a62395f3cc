//! Backends of the CPUs of other hosts, and of other NUMA nodes ([`Nodes`]): they run the CPU's kernels, each on weights
//! of its own.
//!
//! A program that a launcher of MPI started on as many hosts as its device has sends their steps to them
//! ([`moec_hosts_unit`]). Without a launcher this process executes the steps of all hosts, each in a memory of its
//! own, with the same results.
//!
//! Invariant: nothing of the compiler or the runtime names this crate, but its row in the table of backends.

mod measure;
mod nodes;

pub use nodes::Nodes;

use measure::Job;
use moec_backend::{Backend, Diagnosis, Flaw, Links, Tools};
use moec_device::{Device, DeviceUnit, HOST_BACKEND};
use moec_hosts_unit::{
    Delayed, Part, Remote, Wire as _, launched, leave, library, mpi, serve, units_of_hosts,
};
use moec_ir::Op;
use moec_mirror::Modelled;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::{CheckLevel, Program, Result};
use std::path::Path;

/// The backend of other hosts' CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Hosts;

impl Backend for Hosts {
    fn name(&self) -> &'static str {
        HOST_BACKEND
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> std::result::Result<(), Flaw> {
        if unit.host.is_none() || device.memory_of(unit).is_none() {
            return Err(Flaw::new("unit.host", "the CPU of another host names its host and its memory"));
        }
        Ok(())
    }

    /// Everything but requests of experts, which are for the first host's disk. Another host reads those of its own
    /// disk that its steps need.
    fn takes(&self, op: &Op) -> bool {
        !op.reads_disk()
    }

    fn host(&self, _unit: &str) -> Option<Executor> {
        Some(Executor::Unit(Box::new(Modelled::default())))
    }

    fn attached(&self, unit: &str) -> Option<Result<Executor>> {
        if launched().is_none() {
            return self.host(unit).map(Ok);
        }
        let remote = mpi::mpi().and_then(|mpi| Remote::new(mpi));
        Some(remote.map(|remote| Executor::Unit(Box::new(remote))))
    }

    fn doctor(&self, _tools: Tools<'_>, _targets: &[&str]) -> Vec<Diagnosis> {
        let library = library();
        let found = match &library {
            Ok(library) => format!("found: moec's part for it is `{}`", library.display()),
            Err(e) => format!("{e}; models run on one host alone"),
        };
        let hint =
            "`apt install openmpi-bin libopenmpi-dev`, or `mpich libmpich-dev`, on every host".to_owned();
        vec![Diagnosis { name: "MPI", works: library.is_ok(), found, hint }]
    }

    fn follow(
        &self,
        program: &Program,
        bundle: &Path,
        threads: Option<usize>,
        check: CheckLevel,
    ) -> Option<Result<()>> {
        launched()?;
        let mpi = match mpi::mpi() {
            Ok(mpi) if mpi.rank() == 0 => return None,
            Ok(mpi) => mpi,
            Err(e) => return Some(Err(e)),
        };
        ignore_signals();
        let unit = units_of_hosts(program).nth(mpi.rank() - 1);
        let part = Part { bundle, unit, threads, check };
        let served = Delayed::from_environment(mpi.as_ref()).and_then(|wire| serve(&wire, program, part));
        Some(served.and_then(|()| leave(&mpi)))
    }

    fn links(&self) -> Option<Result<Box<dyn Links>>> {
        launched()?;
        Some(mpi::mpi().map(|mpi| Box::new(Job(mpi)) as Box<dyn Links>))
    }

    fn leave(&self) -> Result<()> {
        launched().map_or(Ok(()), |_| leave(mpi::mpi()?.as_ref()))
    }
}

/// Ignores requests to end: the first host decides, which may have answers to finish. A launcher sends them to
/// all processes.
fn ignore_signals() {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: `signal` takes two numbers, and no handler is given.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}
