//! Whole models on the library's emulator, as a bundle's `run` executes them on a phone: compiled, loaded
//! from context binaries and executed in this process, by the same unit.

use super::super::read::network;
use super::{CONTEXT, Library};
use crate::compose::compose;
use moec_ir::plan::{ArtifactBytes, GraphDecl};
use moec_qnn_unit::Hexagon;
use moec_runtime::bundle::BundleReader;
use moec_runtime::error::{Error, Result};
use moec_runtime::exec::graphs::{Graphs, LoadCounts, f16};
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The emulator in this process.
#[derive(Debug)]
pub(in crate::backend) struct DeviceHost {
    library: Library,
    /// Contexts that were compiled for it; goes with it.
    folder: PathBuf,
    unit: Hexagon,
}

impl DeviceHost {
    /// A unit with nothing loaded yet. Contexts are compiled below `cache`.
    pub(in crate::backend) fn new(library: Library, cache: &Path) -> Self {
        let folder = cache.join("qnn-device").join(std::process::id().to_string());
        let unit = Hexagon::with(library.installation.clone());
        Self { library, folder, unit }
    }

    /// Compiles the graphs of a package. The emulator does not load shared weights, which a bundle's own
    /// contexts have.
    fn compile(&self, bundle: &BundleReader, package: &str, graphs: &[GraphDecl]) -> Result<()> {
        let failed = |why: String| Error::graph(package.to_owned(), why);
        let mut worker = self.library.worker(false).map_err(|e| failed(e.to_string()))?;
        for graph in graphs.iter().filter(|graph| graph.package == package) {
            let network = network(bundle, graph).map_err(failed)?;
            let spec = compose(&network, Some(&bundle.below(package))).map_err(|e| failed(e.to_string()))?;
            worker.compose(&spec).map_err(|e| failed(e.to_string()))?;
        }
        let binary = worker.binary().map_err(|e| failed(e.to_string()))?;
        let folder = self.folder.join(package);
        let path = folder.join(CONTEXT);
        let written = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, binary));
        written.map_err(|source| Error::io("write", path, source))
    }
}

impl Graphs for DeviceHost {
    fn name(&self) -> &'static str {
        self.unit.name()
    }

    fn load_on_demand(&mut self, artifacts: &[ArtifactBytes]) {
        self.unit.load_on_demand(artifacts);
    }

    fn load(&mut self, bundle: &BundleReader, graphs: &[GraphDecl], slots: usize) -> Result<()> {
        let packages: BTreeSet<&str> = graphs.iter().map(|graph| &*graph.package).collect();
        packages.into_iter().try_for_each(|package| self.compile(bundle, package, graphs))?;
        self.unit.load(&BundleReader::unchecked(&self.folder), graphs, slots)
    }

    fn prepare(&self, graphs: &[usize], memory: Option<u64>) {
        self.unit.prepare(graphs, memory);
    }

    fn loads(&self) -> LoadCounts {
        self.unit.loads()
    }

    fn run(&self, graph: usize, slot: usize, inputs: &[&[f16]], outputs: &mut [&mut [f16]]) -> Result<()> {
        self.unit.run(graph, slot, inputs, outputs)
    }
}

impl Drop for DeviceHost {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}
