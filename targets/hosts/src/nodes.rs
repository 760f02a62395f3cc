//! Backend of the CPUs of other NUMA nodes of this machine: the runtime itself executes their steps, on threads and in
//! memory that are bound to the node.

use moec_backend::{Backend, Flaw};
use moec_device::{Device, DeviceUnit, NODE_BACKEND};
use moec_ir::Op;
use moec_mirror::Modelled;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::platform::numa::Node;

/// The backend of other nodes' CPUs.
#[derive(Clone, Copy, Debug)]
pub struct Nodes;

impl Backend for Nodes {
    fn name(&self) -> &'static str {
        NODE_BACKEND
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        if unit.host.is_none() || unit.cpus.is_none() || device.memory_of(unit).is_none() {
            let message = "another NUMA node names its CPUs and its memory, and itself as its host";
            return Err(Flaw::new("unit.cpus", message));
        }
        Ok(())
    }

    /// Everything but what reads the disk.
    fn takes(&self, op: &Op) -> bool {
        !op.reads_disk()
    }

    fn host(&self, _unit: &str) -> Option<Executor> {
        Some(Executor::Unit(Box::new(Modelled::default())))
    }

    fn present(&self, unit: &DeviceUnit) -> Option<moec_runtime::Result<()>> {
        Some(Node::new(&unit.name, unit.cpus.as_ref()?).map(drop))
    }
}
