//! Sizes of a bundle's artifacts, compared with the limits of the HTP.

use super::WEIGHTS;
use super::library::contexts::artifacts;
use super::library::{CONTEXT, CONTEXT_BYTES, networks};
use super::read::wrong;
use crate::net::Network;
use moec_backend::error::Result;
use moec_backend::{ArtifactSizes, UnitSizes};
use moec_device::DeviceUnit;
use moec_runtime::bundle::BundleReader;
use std::path::Path;

/// Sizes of every artifact below a bundle.
///
/// # Errors
/// An artifact that cannot be read.
pub(super) fn sizes(root: &Path, unit: &DeviceUnit) -> Result<UnitSizes> {
    let mut all = UnitSizes {
        graph_limit: unit.graph_limit(),
        context_limit: CONTEXT_BYTES,
        tile_memory: unit.hexagon.as_ref().map(|h| u64::from(h.vtcm_mib) << 20),
        artifacts: Vec::new(),
    };
    for folder in artifacts(root)? {
        let package = format!("artifacts/{}", folder.file_name().unwrap_or_default().to_string_lossy());
        let bytes = |file: &str| folder.join(file).metadata().ok().map(|m| m.len());
        let networks = networks(&BundleReader::unchecked(&folder)).map_err(|e| wrong(&package, &e))?;
        let weights = bytes(WEIGHTS).ok_or_else(|| wrong(&package, &format!("it has no `{WEIGHTS}`")))?;
        let each = || networks.iter().map(Network::static_bytes);
        all.artifacts.push(ArtifactSizes {
            functions: networks.len(),
            weights,
            unshared: each().sum(),
            largest: each().max().unwrap_or(0),
            activations: networks.iter().map(widest).max().unwrap_or(0),
            context: bytes(CONTEXT),
            package,
        });
    }
    Ok(all)
}

/// Bytes of activations of the node that has most.
fn widest(network: &Network) -> u64 {
    let of = |node: &crate::net::Node| -> u64 {
        let all = node.inputs.iter().chain([&node.output]).map(|id| network.tensor(*id));
        all.filter(|t| !t.is_static()).map(crate::net::Tensor::bytes).sum()
    };
    network.nodes.iter().map(of).max().unwrap_or(0)
}
