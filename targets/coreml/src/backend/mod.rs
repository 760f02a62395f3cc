//! The backend as the compiler uses it.
//!
//! A group of experts is in `artifacts/layers.L.group.G.mlpackage`. Its functions `cap{C}` take the packed
//! rows of the group's experts (NPUMoE, §4.2), each with room for C of every expert. Attention, dense
//! networks and the head are [`subgraphs`]. Weights are the checkpoint's, cast to f16, or codes with scales.
#![expect(clippy::cast_possible_truncation, reason = "sizes of one layer, which the import bounds")]

mod emit;
mod host;
mod verify;
mod weights;

pub use host::Emulated;

use crate::helper::{Helper, INSTALL, PROGRAM};
use crate::subgraphs;
use include_dir::{Dir, include_dir};
use moec_backend::LayerExperts;
use moec_backend::error::Result;
use moec_backend::{
    Backend, Diagnosis, Emit, Emitted, Flaw, FunctionReport, GroupGraph, Runner, RunnerCrate,
    StaticAttention, StaticGraphs, StaticSubgraph, SubgraphFunction, Tools, Trial,
};
use moec_coreml_unit::BACKEND;
use moec_device::{Device, DeviceUnit, UnitKind};
use moec_ir::plan::{ExpertTable, GraphDecl, GraphTensor, Plan};
use moec_ir::{Module, Scope, Weight};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::Graphs;

static UNIT: Dir<'_> = include_dir!("$CARGO_MANIFEST_DIR/unit/src");

/// Core ML as the unit of a `run` on a Mac.
static RUNNER: Runner = Runner {
    feature: BACKEND,
    native: "moec_coreml_unit::NATIVE",
    system: "-apple-",
    crates: &[RunnerCrate {
        name: "moec-coreml-unit",
        manifest: include_str!("../../unit/Cargo.toml"),
        sources: &UNIT,
    }],
    lock: include_str!("../../unit/runner.lock"),
};

/// The Core ML backend: packages for the Neural Engine.
#[derive(Clone, Copy, Debug)]
pub struct CoreMl;

impl Backend for CoreMl {
    fn name(&self) -> &'static str {
        BACKEND
    }

    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw> {
        let bad = |key: &str, message: &str| Err(Flaw::new(key, message));
        if unit.kind != UnitKind::Npu {
            return bad("unit.backend", "a unit of the backend `coreml` is of kind `npu`");
        }
        if unit.legality.is_empty() || unit.max_graph_bytes.is_none() || unit.matmul.is_empty() {
            return bad(
                "unit",
                "an NPU of the backend `coreml` needs `legality`, `matmul` and `max_graph_bytes`",
            );
        }
        // Its graphs are written of convolutions.
        let projections = ["linear", "linear_glu", "head_linear"].into_iter();
        let mut others = projections.filter(|op| unit.is_legal(op) && unit.form(op) != Some("conv1x1"));
        if let Some(op) = others.next() {
            let needs = "an NPU of the backend `coreml` has `form = \"conv1x1\"`";
            return bad("unit.legality", &format!("the row of `{op}`: {needs}"));
        }
        if let Some(op) = ["to_nchw", "from_nchw"].into_iter().find(|op| !unit.is_legal(op)) {
            return bad(
                "unit.legality",
                &format!("an NPU of the backend `coreml` needs a legal row of `{op}`"),
            );
        }
        let cpu = device.units.iter().find(|u| u.kind == UnitKind::Cpu);
        if cpu.is_none_or(|u| u.matmul.is_empty()) {
            return bad("unit", "the backend `coreml` needs a unit of kind `cpu` with `matmul`");
        }
        Ok(())
    }

    fn graphs(&self) -> Option<&dyn StaticGraphs> {
        Some(self)
    }

    fn runner(&self) -> Option<&'static Runner> {
        Some(&RUNNER)
    }

    fn attached(&self, _unit: &str) -> Option<moec_runtime::Result<Executor>> {
        moec_coreml_unit::open()
    }

    fn doctor(&self, tools: Tools<'_>, targets: &[&str]) -> Vec<Diagnosis> {
        let name = "core ml";
        let row = match Helper::find(tools.cache).and_then(|helper| helper.versions()) {
            Ok(v) => Diagnosis {
                name,
                works: true,
                found: format!(
                    "`{PROGRAM}` with coremltools {}, Python {}, numpy {}",
                    v.coremltools, v.python, v.numpy
                ),
                hint: format!("`{INSTALL}` installs them again"),
            },
            Err(e) => Diagnosis {
                name,
                works: false,
                found: e.to_string().lines().next().unwrap_or_default().to_owned(),
                hint: format!("to build for {}, in moec's source tree: {}", targets.join(", "), e.hint()),
            },
        };
        vec![row]
    }
}

impl StaticGraphs for CoreMl {
    fn subgraph(&self, module: &Module, scope: &Scope, unit: &DeviceUnit) -> Result<StaticSubgraph, String> {
        let found = subgraphs::CoreMlSubgraph::find(module, scope)?;
        found.check(module, unit)?;
        let graphs = found.graphs(module, unit)?.iter().map(described).collect::<Result<_, String>>()?;
        let limits = subgraphs::limits(unit);
        let context =
            found.context(&limits).map(|context| StaticAttention { context, window: found.window() });
        let matrices = found.matrices();
        let legalised = found.legalised(module, unit)?;
        let legalised =
            vec![("convolutions", legalised.convolutions), ("layout_changes", legalised.layout_changes)];
        let subgraphs::CoreMlSubgraph { name, scope, boundaries, .. } = found;
        Ok(StaticSubgraph { name, scope, boundaries, attention: context, graphs, matrices, legalised })
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

    fn bytes(&self, unit: &DeviceUnit, weight: &Weight, numbers: u64) -> u64 {
        subgraphs::graph_bytes(unit, weight, numbers)
    }

    fn emit(&self, emit: &Emit<'_>) -> Result<Emitted> {
        Ok(Emitted { bytes: emit::packages(emit)?, ..Emitted::default() })
    }

    fn read(&self, bundle: &BundleReader, plan: &Plan, unit: &DeviceUnit) -> Result<usize> {
        verify::read(bundle, plan, unit)
    }

    fn verify(&self, trial: &mut Trial<'_, '_>) -> Result<Vec<FunctionReport>> {
        verify::verify(trial)
    }

    fn host(&self) -> Box<dyn Graphs> {
        Box::new(Emulated::default())
    }
}

/// A function as a plan has it: its tensors have four axes.
fn described(graph: &subgraphs::StaticGraph) -> Result<SubgraphFunction, String> {
    let tensors = |list: &[subgraphs::GraphTensor]| {
        let tensor = |p: &subgraphs::GraphTensor| {
            let shape: Option<Vec<u32>> = p.shape.iter().map(|&n| u32::try_from(n).ok()).collect();
            Some(GraphTensor { name: p.name.clone(), shape: shape?.try_into().ok()? })
        };
        let all: Option<Vec<GraphTensor>> = list.iter().map(tensor).collect();
        all.ok_or_else(|| format!("a tensor of `{}` has other axes than four", graph.function))
    };
    let (inputs, outputs) = (tensors(&graph.inputs)?, tensors(&graph.outputs)?);
    let (package, function) = (graph.package.clone(), graph.function.clone());
    let graph_decl = GraphDecl { package, function, inputs, outputs, stateful: graph.stateful };
    Ok(SubgraphFunction { entry: graph.entry, graph: graph_decl })
}

/// Path of a group's package in a bundle.
fn path(table: &ExpertTable, group: usize) -> String {
    subgraphs::path(&table.group_name(group))
}

/// Name of the function that takes this many rows of each expert.
fn function(capacity: u32) -> String {
    format!("cap{capacity}")
}

/// Rows per expert of a group's functions, ascending: those of the placement, or the capacity of its tier.
fn sizes(table: &ExpertTable, group: usize) -> Vec<u32> {
    let Some(group) = table.groups.get(group) else { return Vec::new() };
    match group.sizes.as_slice() {
        [] => table.tiers.get(group.tier as usize).copied().into_iter().collect(),
        sizes => sizes.to_vec(),
    }
}
