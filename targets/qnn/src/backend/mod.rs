//! The backend's interface to the compiler.
//!
//! A group of experts is in the folder `artifacts/layers.L.group.G.qnn`. It has a network `cap{C}.onnx` for
//! each number of rows of an expert, and `weights.bin` with their common codes. `rows.bin` has the rows by
//! which ranges were measured. If QNN's library is installed, `context.bin` has all networks compiled, and
//! `cap{C}.dlc` the largest as a DLC. Attention, dense networks and the head have networks of their own, and
//! so have hot neurons of experts if a build requires them.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

mod attention;
mod emit;
mod host;
mod hot;
mod library;
mod read;
mod rows;
mod sequences;
mod sizes;
mod subgraphs;
mod verify;
mod verify_hot;
mod weights;

pub use host::Emulated;

use include_dir::{Dir, include_dir};
use library::device::DeviceHost;
use library::host::LibraryHost;
use library::{Library, Unavailable, contexts};
use moec_backend::error::Result;
use moec_backend::{
    Backend, Diagnosis, Emit, Emitted, Flaw, FunctionReport, GroupGraph, HotLayer, LayerExperts, Runner,
    RunnerCrate, StaticGraphs, StaticSubgraph, Tools, Trial, UnitSizes,
};
use moec_device::{Device, DeviceUnit, UnitKind};
use moec_ir::plan::{ExpertTable, GraphDecl, GraphTensor, Plan};
use moec_ir::{Module, Scope, Weight};
use moec_qnn_sys::{INSTALL, SNAPDRAGON_8_GEN_3, VARIABLE, worker};
use moec_qnn_unit::{BACKEND, Hexagon};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::Graphs;
use std::path::Path;
use std::process::ExitCode;

static SYS: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/sys/src");
static UNIT: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/unit/src");

/// Executor of contexts in a `run`.
static RUNNER: Runner = Runner {
    feature: BACKEND,
    native: "moec_qnn_unit::NATIVE",
    system: "",
    crates: &[
        RunnerCrate { name: "moec-qnn-sys", manifest: include_str!("../../sys/Cargo.toml"), sources: &SYS },
        RunnerCrate {
            name: "moec-qnn-unit",
            manifest: include_str!("../../unit/Cargo.toml"),
            sources: &UNIT,
        },
    ],
    lock: include_str!("../../unit/runner.lock"),
};

/// The QNN backend: networks for Hexagon.
#[derive(Clone, Copy, Debug)]
pub struct Qnn;

impl Backend for Qnn {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        let bad = |key: &str, message: &str| Err(Flaw::new(key, message));
        if unit.kind != UnitKind::Npu {
            return bad("unit.backend", "a unit of the backend `qnn` is of kind `npu`");
        }
        if unit.hexagon.is_none() {
            return bad("unit.hexagon", "an NPU of the backend `qnn` needs `hexagon`");
        }
        if unit.legality.is_empty() || unit.max_graph_bytes.is_none() || unit.matmul.is_empty() {
            return bad(
                "unit",
                "an NPU of the backend `qnn` needs `legality`, `matmul` and `max_graph_bytes`",
            );
        }
        if let Some((hexagon, soc)) = unit.hexagon.as_ref().and_then(|h| Some((h, library::soc(h)?))) {
            if hexagon.arch != soc.arch {
                let message =
                    format!("chip {} of QNN ({}) has architecture {}", soc.model, soc.part, soc.arch);
                return bad("unit.hexagon.arch", &message);
            }
            if hexagon.vtcm_mib > soc.vtcm {
                let message = format!("chip {} of QNN ({}) has {} MiB", soc.model, soc.part, soc.vtcm);
                return bad("unit.hexagon.vtcm_mib", &message);
            }
        }
        let cpu = device.units.iter().find(|u| u.kind == UnitKind::Cpu);
        if cpu.is_none_or(|u| u.matmul.is_empty()) {
            return bad("unit", "the backend `qnn` needs a unit of kind `cpu` with `matmul`");
        }
        Ok(())
    }

    fn graphs(&self) -> Option<&dyn StaticGraphs> {
        Some(self)
    }

    fn runner(&self) -> Option<&'static Runner> {
        Some(&RUNNER)
    }

    /// A phone's, if [`VARIABLE`] names the folder of QNN's library.
    fn attached(&self, _unit: &str) -> Option<moec_runtime::Result<Executor>> {
        let named = std::env::var_os(VARIABLE).is_some_and(|folder| !folder.is_empty());
        (named && cfg!(target_arch = "aarch64"))
            .then(|| Ok(Executor::Graphs(Box::new(Hexagon::default()) as Box<dyn Graphs>)))
    }

    fn doctor(&self, tools: Tools<'_>, targets: &[&str]) -> Vec<Diagnosis> {
        let name = "qnn";
        let row = match Library::load(tools, SNAPDRAGON_8_GEN_3) {
            Ok(library) => Diagnosis {
                name,
                works: true,
                found: format!("version {} in `{}`", library.build, library.folder().display()),
                hint: format!("`{INSTALL}` installs it again"),
            },
            Err(missing) => Diagnosis {
                name,
                works: false,
                found: missing.why,
                hint: format!("to compile for {}: {}", targets.join(", "), missing.hint),
            },
        };
        vec![row]
    }

    fn serve(&self) -> Option<ExitCode> {
        Some(worker::serve())
    }
}

impl StaticGraphs for Qnn {
    fn subgraph(&self, module: &Module, scope: &Scope, unit: &DeviceUnit) -> Result<StaticSubgraph, String> {
        subgraphs::HtpSubgraph::find(module, scope)?.described(module, unit)
    }

    fn group(&self, module: &Module, table: &ExpertTable, group: usize) -> Vec<GroupGraph> {
        let hidden =
            LayerExperts::of(module, table.layer).map_or(0, |e| module.weight(e.gate_up).cols() as u32);
        let experts = table.groups.get(group).map_or(0, |g| g.experts.len() as u32);
        let of = |capacity: u32| {
            let tensor =
                |name: &str| GraphTensor { name: name.to_owned(), shape: [capacity * experts, hidden, 1, 1] };
            let graph = GraphDecl {
                package: path(table, group),
                function: function(capacity),
                inputs: vec![tensor("x")],
                outputs: vec![tensor("y")],
                stateful: false,
            };
            GroupGraph { capacity, graph }
        };
        sizes(table, group).into_iter().map(of).collect()
    }

    fn bytes(&self, _: &DeviceUnit, weight: &Weight, numbers: u64) -> u64 {
        weights::WeightStorage::of(weight.format).bytes(numbers)
    }

    fn hot(&self, module: &Module, layer: u32) -> Result<(), String> {
        hot::can(module, layer)
    }

    fn thresholds(&self) -> Result<(), String> {
        Ok(())
    }

    fn attends_by_default(&self) -> bool {
        false
    }

    fn hot_graphs(&self, module: &Module, layer: u32, batch: u32) -> Vec<Vec<GraphDecl>> {
        hot::graphs(module, layer, batch)
    }

    fn loads_on_demand(&self) -> bool {
        true
    }

    fn emit(&self, emit: &Emit<'_>) -> Result<Emitted> {
        let bytes = subgraphs::write(emit)? + emit::artifacts(emit)? + hot::write(emit)?;
        Ok(Emitted { bytes, notes: contexts::write(emit)?, ..Emitted::default() })
    }

    fn read(&self, bundle: &BundleReader, plan: &Plan, unit: &DeviceUnit) -> Result<usize> {
        read::read(bundle, plan, unit)
    }

    fn read_hot(&self, bundle: &BundleReader, module: &Module, hot: &[HotLayer]) -> Result<()> {
        hot::read(bundle, module, hot)
    }

    fn verify(&self, trial: &mut Trial<'_, '_>) -> Result<Vec<FunctionReport>> {
        let (parts, given) = subgraphs::verify(trial)?;
        let mut checker = verify::checker(trial);
        let mut reports = verify::verify(trial, parts, &given, checker.as_mut())?;
        reports.extend(verify_hot::verify(trial, checker.as_mut())?);
        Ok(reports)
    }

    fn sizes(&self, folder: &Path, unit: &DeviceUnit) -> Result<Option<UnitSizes>> {
        sizes::sizes(folder, unit).map(Some)
    }

    fn host(&self) -> Box<dyn Graphs> {
        Box::new(Emulated::default())
    }

    fn library(&self, tools: Tools<'_>, unit: &DeviceUnit) -> Result<Box<dyn Graphs>> {
        let library = Library::open(tools, unit).map_err(Unavailable::error)?;
        Ok(Box::new(LibraryHost::new(library)))
    }

    fn device(&self, tools: Tools<'_>, unit: &DeviceUnit) -> Result<Box<dyn Graphs>> {
        let library = Library::open(tools, unit).map_err(Unavailable::error)?;
        Ok(Box::new(DeviceHost::new(library, tools.cache)))
    }
}

impl Qnn {
    /// Declaration in a plan of the network for a number of rows of each expert.
    fn declared(module: &Module, table: &ExpertTable, group: usize, capacity: u32) -> Option<GraphDecl> {
        Self.group(module, table, group).into_iter().find(|g| g.capacity == capacity).map(|g| g.graph)
    }
}

/// File of the codes of an artifact.
const WEIGHTS: &str = "weights.bin";
/// File of the rows that ranges were measured by: f32, `[n, H]`.
const ROWS: &str = "rows.bin";

/// Path of an artifact in a bundle.
fn path_of(name: &str) -> String {
    format!("artifacts/{name}.qnn")
}

/// Path of a group's artifact in a bundle.
fn path(table: &ExpertTable, group: usize) -> String {
    path_of(&table.group_name(group))
}

/// Name of the network that takes this many rows of each expert.
fn function(capacity: u32) -> String {
    format!("cap{capacity}")
}

/// Rows per expert of a group's networks, ascending: those of the placement, or the capacity of its tier.
fn sizes(table: &ExpertTable, group: usize) -> Vec<u32> {
    let Some(group) = table.groups.get(group) else { return Vec::new() };
    match group.sizes.as_slice() {
        [] => table.tiers.get(group.tier as usize).copied().into_iter().collect(),
        sizes => sizes.to_vec(),
    }
}
