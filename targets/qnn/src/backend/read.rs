//! Reads the networks of a bundle back.

use super::sequences;
use crate::net::Network;
use crate::onnx;
use moec_backend::error::{Error, Result};
use moec_device::DeviceUnit;
use moec_ir::plan::{GraphDecl, GraphTensor, Plan};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;

/// The network of a graph, read from a bundle, with the ports that the plan gives.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn network(bundle: &BundleReader, graph: &GraphDecl) -> Result<Network, String> {
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && !name.starts_with('.');
    let inside = graph.package.strip_prefix("artifacts/").is_some_and(plain) && plain(&graph.function);
    if !inside {
        return Err(format!("`{}` and `{}` are not paths below `artifacts/`", graph.package, graph.function));
    }
    let file = format!("{}/{}.onnx", graph.package, graph.function);
    let bytes = bundle.read(&file, regular::NETWORK).map_err(|e| e.to_string())?;
    let network = onnx::read(&bytes).map_err(|e| e.to_string())?;
    if network.name != graph.function {
        return Err(format!("`{file}` contains the network `{}`", network.name));
    }
    if graph.stateful {
        sequences::shape(graph, &network)?;
        return Ok(network);
    }
    let fits = |tensors: &[GraphTensor], ids: &[crate::net::TensorId]| {
        let rows = |p: &GraphTensor| p.shape[..2].iter().map(|&n| n as usize).collect::<Vec<_>>();
        let one = |(p, id): (&GraphTensor, &crate::net::TensorId)| {
            network.tensor(*id).shape == rows(p) && p.shape[2..] == [1, 1]
        };
        tensors.len() == ids.len() && tensors.iter().zip(ids).all(one)
    };
    if fits(&graph.inputs, &network.inputs) && fits(&graph.outputs, &network.outputs) {
        Ok(network)
    } else {
        Err(format!("`{}` has other inputs or results than in the plan", graph.function))
    }
}

/// A damaged or wrong artifact.
pub(super) fn wrong(name: &str, e: &dyn std::fmt::Display) -> Error {
    Error::input(format!("`{name}` in the bundle: {e}"))
}

/// Reads every network that the plan calls and checks that the unit holds it; executes nothing. Gives their
/// number.
///
/// # Errors
/// A network that is missing, malformed or too large.
pub(super) fn read(bundle: &BundleReader, plan: &Plan, unit: &DeviceUnit) -> Result<usize> {
    for graph in &plan.graphs {
        let network = network(bundle, graph).map_err(|e| wrong(&graph.package, &e))?;
        check_size(&network, unit).map_err(|e| wrong(&graph.package, &e))?;
    }
    Ok(plan.graphs.len())
}

/// Whether the unit holds a network.
///
/// # Errors
/// The reason against it, for people.
pub(super) fn check_size(network: &Network, unit: &DeviceUnit) -> Result<(), String> {
    let bytes = network.static_bytes();
    match unit.graph_limit().filter(|limit| bytes > *limit) {
        Some(limit) => Err(format!("{bytes} bytes of weights; `{}` holds {limit}", unit.name)),
        None => Ok(()),
    }
}
