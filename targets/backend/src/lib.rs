//! Backends, as the compiler uses them.
//!
//! A backend is one crate and one row of the compiler's table. The device file names the backend of every
//! unit. The compiler reads everything from its row, and names no backend itself:
//!
//! * [`Backend::check`]: the required data of such a unit in a device file;
//! * [`StaticGraphs::subgraph`], [`StaticGraphs::group`]: which parts of a Graph it takes under the limits of
//!   that file, and as which functions;
//! * [`StaticGraphs::emit`]: its artifacts, written to disk;
//! * [`StaticGraphs::read`], [`StaticGraphs::verify`]: the artifacts, read back and executed against the
//!   reference;
//! * [`StaticGraphs::host`], [`Backend::host`]: executors on this machine, for users without the device;
//! * [`Backend::takes`]: which operators units without static graphs run, with dynamic shapes;
//! * [`GpuKernels`]: GPU kernels, which units launch in place of the CPU's: for which of them, and read back;
//! * [`CommandStreams`]: NDP command streams, by which a unit computes experts: costs, files and execution;
//! * [`Bench`]: a unit of this machine, to be measured; [`Links`]: connections with other hosts, too;
//! * [`Runner`]: additions of a bundle's `run` to the runtime, which drive such units;
//! * [`Backend::subcommands`]: subcommands of `moec`;
//! * [`Backend::doctor`], [`Backend::serve`]: which [`Tools`] it needs, whether they are there, and what a
//!   process for them does.
//!
//! Invariant: this crate knows no backend.
#![cfg_attr(test, allow(clippy::cast_possible_truncation, reason = "numbers of tests are small"))]

pub mod bench;
pub mod distance;
pub mod emit;
pub mod error;
pub mod experts;
pub mod find;
pub mod gpu_kernels;
pub mod links;
pub mod runner;
pub mod sizes;
pub mod streams;
pub mod subcommand;
pub mod subgraph;
pub mod tools;
pub mod verify;

pub use bench::{Bench, Call, Peaks};
pub use distance::Distance;
pub use emit::{Channels, Emit, Emitted, Numbers, Rounding};
pub use error::{Error, Fault, Result};
pub use experts::{DenseNeurons, LayerExperts};
pub use gpu_kernels::{Assembled, GpuKernels, KernelsRead};
pub use links::{Links, Peer, Trip};
pub use runner::{Runner, RunnerCrate};
pub use sizes::{ArtifactSizes, UnitSizes};
pub use streams::{
    BF16_BOUND, CommandStreams, StreamCosts, StreamEvent, StreamExpert, StreamLayer, StreamRun, StreamStep,
    StreamTrial, StreamWorkload,
};
pub use subcommand::Subcommand;
pub use subgraph::{
    GroupGraph, HotArtifact, HotBatch, HotLayer, StaticAttention, StaticSubgraph, SubgraphBoundary,
    SubgraphFunction,
};
pub use tools::Tools;
pub use verify::{Check, FunctionReport, Trial};

use moec_device::{Device, DeviceUnit};
use moec_ir::plan::{ExpertTable, GraphDecl, Plan};
use moec_ir::{Module, Op, Scope, Weight};
use moec_runtime::bundle::BundleReader;
use moec_runtime::exec::accelerators::Executor;
use moec_runtime::exec::graphs::Graphs;
use moec_runtime::{CheckLevel, Program};
use std::path::Path;
use std::process::ExitCode;

/// A backend.
pub trait Backend: Sync + std::fmt::Debug {
    /// Name in device files.
    fn name(&self) -> &'static str;

    /// Whether a device file has the data of a unit that the backend needs.
    ///
    /// # Errors
    /// The key that is wrong or missing, and the expected value.
    fn check(&self, device: &Device, unit: &DeviceUnit) -> Result<(), Flaw>;

    /// Its static graphs; `None`: its units have dynamic shapes.
    fn graphs(&self) -> Option<&dyn StaticGraphs> {
        None
    }

    /// Its NDP command streams; `None`: its units run the CPU's kernels, or static graphs.
    fn command_streams(&self) -> Option<&dyn CommandStreams> {
        None
    }

    /// Its GPU kernels; `None`: its units run the CPU's kernels, static graphs or NDP command streams.
    fn gpu_kernels(&self) -> Option<&dyn GpuKernels> {
        None
    }

    /// Whether its units run an operator of the Graph with dynamic shapes, by kernels of the CPU's or the
    /// GPU's, or by NDP command streams. A unit that the device file refuses the operator is not called.
    fn takes(&self, _op: &Op) -> bool {
        false
    }

    /// Whether its compute units are models of hardware that is not for sale.
    fn is_modelled(&self) -> bool {
        false
    }

    /// Executor of its units on this machine; `None` for the CPU, which runs the program.
    fn host(&self, _unit: &str) -> Option<Executor> {
        self.graphs().map(|graphs| Executor::Graphs(graphs.host()))
    }

    /// Driver of a unit that this machine has; `None`: the backend has no units that a run finds itself.
    ///
    /// # Errors
    /// The reason that the machine has no such unit, or no usable one.
    fn attached(&self, _unit: &str) -> Option<moec_runtime::Result<Executor>> {
        None
    }

    /// Executes this process's part of a program, if its units are in several processes and this one is not the
    /// first; `None`: it is, or has no part.
    ///
    /// # Errors
    /// A part that cannot be executed; a first process that cannot be reached.
    fn follow(
        &self,
        _program: &Program,
        _bundle: &Path,
        _threads: Option<usize>,
        _check: CheckLevel,
    ) -> Option<moec_runtime::Result<()>> {
        None
    }

    /// Lets the processes end that [`Backend::follow`] this one.
    ///
    /// # Errors
    /// A process that cannot be reached.
    fn leave(&self) -> moec_runtime::Result<()> {
        Ok(())
    }

    /// Whether this machine has a unit that runs programs compiled for this one; `None`: a run does not find
    /// units itself.
    ///
    /// # Errors
    /// The reason that the machine has no such unit.
    fn present(&self, unit: &DeviceUnit) -> Option<moec_runtime::Result<()>> {
        Some(self.attached(&unit.name)?.map(drop))
    }

    /// A unit of it that this machine has, to be measured; `None`: its units are not measured.
    ///
    /// # Errors
    /// The reason that the machine has no usable unit.
    fn bench(&self) -> Option<Result<Box<dyn Bench>>> {
        None
    }

    /// Connections with the processes that a launcher started together with this one, to be measured; `None`: there are
    /// no others, or they are not this backend's.
    ///
    /// # Errors
    /// The reason that they cannot be reached.
    fn links(&self) -> Option<moec_runtime::Result<Box<dyn Links>>> {
        None
    }

    /// Libraries of a bundle's `run` besides the runtime whose plan calls its units, to drive them; `None`:
    /// nothing.
    fn runner(&self) -> Option<&'static Runner> {
        None
    }

    /// Whether the tools that it needs are there; `targets` are the devices that have such units.
    fn doctor(&self, _tools: Tools<'_>, _targets: &[&str]) -> Vec<Diagnosis> {
        Vec::new()
    }

    /// Subcommands of `moec` that are about its units alone.
    fn subcommands(&self) -> &'static [Subcommand] {
        &[]
    }

    /// Serves a separate process until its stdin ends, for calls that may crash or hang. `None`: the backend
    /// has no such process.
    fn serve(&self) -> Option<ExitCode> {
        None
    }
}

/// Fault of a device file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flaw {
    /// The key, with its section.
    pub key: String,
    /// Requirement.
    pub message: String,
}

impl Flaw {
    /// A flaw of that key.
    pub fn new(key: &str, message: impl Into<String>) -> Self {
        Self { key: key.to_owned(), message: message.into() }
    }
}

/// Whether a tool is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// Name of the tool.
    pub name: &'static str,
    /// Whether it works.
    pub works: bool,
    /// Result of the search.
    pub found: String,
    /// Remedy if the tool does not work.
    pub hint: String,
}

/// Graphs whose shapes are known when the model is built, in artifacts that a unit loads.
pub trait StaticGraphs: Sync + std::fmt::Debug {
    /// The part of a scope, as graphs of a unit.
    ///
    /// # Errors
    /// The reason against it, for people.
    fn subgraph(&self, module: &Module, scope: &Scope, unit: &DeviceUnit) -> Result<StaticSubgraph, String>;

    /// Functions of a group of experts, by ascending rows per expert. All have the form `x[experts · rows, H,
    /// 1, 1]` → `y`.
    fn group(&self, module: &Module, table: &ExpertTable, group: usize) -> Vec<GroupGraph>;

    /// Bytes that `numbers` numbers of a weight take of the limit on a graph.
    fn bytes(&self, unit: &DeviceUnit, weight: &Weight, numbers: u64) -> u64;

    /// Whether attention may go to the unit if a build decides by costs. It may if keys and values stay there
    /// permanently.
    fn attends_by_default(&self) -> bool {
        true
    }

    /// Whether the hot neurons of a layer's experts can be functions of their own.
    ///
    /// # Errors
    /// The reason against it, for people.
    fn hot(&self, _module: &Module, _layer: u32) -> Result<(), String> {
        Err("its graphs hold whole experts".into())
    }

    /// Whether its graphs apply thresholds of gates (CATS).
    ///
    /// # Errors
    /// The reason against it, for people.
    fn thresholds(&self) -> Result<(), String> {
        Err("no operator of its graphs applies a threshold".into())
    }

    /// Declarations in a plan of these functions for a batch, whose results are added: artifact by artifact
    /// that of every expert, in their order.
    fn hot_graphs(&self, _module: &Module, _layer: u32, _batch: u32) -> Vec<Vec<GraphDecl>> {
        Vec::new()
    }

    /// Whether a run loads artifacts when a call needs them, and frees them to keep to a memory budget. Else
    /// all are in memory as long as it runs.
    fn loads_on_demand(&self) -> bool {
        false
    }

    /// Writes artifacts.
    ///
    /// # Errors
    /// A missing tool, with its remedy; a graph over the limit; a weight outside the range of the unit's
    /// numbers; a full disk.
    fn emit(&self, emit: &Emit<'_>) -> Result<Emitted>;

    /// Reads every artifact that a plan calls and checks that the unit can run it; executes nothing. Gives
    /// the number of functions.
    ///
    /// # Errors
    /// An artifact that is missing, malformed or refused, or without a function that the plan calls.
    fn read(&self, bundle: &BundleReader, plan: &Plan, unit: &DeviceUnit) -> Result<usize>;

    /// Reads the other data of the functions of hot neurons, and checks that they and the Graph divide
    /// experts alike.
    ///
    /// # Errors
    /// Neurons other than those that the Graph leaves to them.
    fn read_hot(&self, _bundle: &BundleReader, _module: &Module, _hot: &[HotLayer]) -> Result<()> {
        Ok(())
    }

    /// Executes every function of every artifact against the evaluator.
    ///
    /// # Errors
    /// An artifact that is missing, malformed, or does not run.
    fn verify(&self, trial: &mut Trial<'_, '_>) -> Result<Vec<FunctionReport>>;

    /// Sizes of a bundle's artifacts against the unit's limits; `None`: its artifacts share nothing to
    /// report.
    ///
    /// # Errors
    /// An artifact that cannot be read.
    fn sizes(&self, _folder: &Path, _unit: &DeviceUnit) -> Result<Option<UnitSizes>> {
        Ok(None)
    }

    /// Executor of them on this machine.
    fn host(&self) -> Box<dyn Graphs>;

    /// The emulator of the unit's maker, which executes them on this machine, too.
    ///
    /// # Errors
    /// The tool does not exist, or is not installed.
    fn library(&self, _tools: Tools<'_>, unit: &DeviceUnit) -> Result<Box<dyn Graphs>> {
        let error = Error::limit(format!("`{}` has no emulator but moec's", unit.name));
        Err(error.hint("remove `=library`"))
    }

    /// The same emulator, driven as the unit itself is by a bundle's `run` on the device.
    ///
    /// # Errors
    /// The tool does not exist, or is not installed.
    fn device(&self, _tools: Tools<'_>, unit: &DeviceUnit) -> Result<Box<dyn Graphs>> {
        let error = Error::limit(format!("`run` has no emulator of `{}` but moec's", unit.name));
        Err(error.hint("remove `=device`"))
    }
}
