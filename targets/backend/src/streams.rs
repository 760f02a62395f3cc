//! NDP command streams: experts that units compute by commands of their own, for as many rows as a call has.

use crate::error::Result;
use crate::verify::FunctionReport;
use moec_device::{Device, DeviceUnit};
use moec_ir::eval::Evaluator;
use moec_ir::plan::{ExpertPlacement, Layout, Plan, Scheduled, StreamSet};
use moec_ir::{Format, Glu, Module};
use moec_runtime::bundle::BundleReader;
use serde::Serialize;
use std::path::Path;

/// An expert, as an NDP command stream computes it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamExpert {
    /// Channels of a row.
    pub hidden: u32,
    /// Channels between the two halves.
    pub inner: u32,
    /// Function that joins gate and up.
    pub glu: Glu,
    /// Whether both biases are there.
    pub bias: bool,
    /// Formats of gate and up, and of down.
    pub formats: [Format; 2],
}

/// Costs of an expert on an NDP DIMM of a unit, in microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StreamCosts {
    /// NDP DIMMs of the unit.
    pub dimms: u32,
    /// Times for ascending numbers of rows, in one DIMM: computing, including reads.
    pub rows: Vec<(u32, f64)>,
    /// Reading the weights in their DIMM.
    pub internal_us: f64,
    /// Moving them from one DIMM to another; `None` without a link.
    pub link_us: Option<f64>,
    /// Reading weights from the CPU, over all channels and from one DIMM.
    pub host_us: [f64; 2],
}

/// The NDP command streams of a layer, to be written.
#[derive(Clone, Copy, Debug)]
pub struct StreamLayer<'a> {
    /// The set, with the path of its artifact.
    pub set: &'a StreamSet,
    /// Computation of each of its experts.
    pub expert: StreamExpert,
    /// The NDP DIMM of each expert; −1: it is striped over all of them.
    pub dimms: &'a [i32],
    /// Most slots of a call.
    pub slots: u32,
}

/// Steps of a model whose experts are assigned while it runs, to be simulated.
#[derive(Clone, Copy, Debug)]
pub struct StreamWorkload<'a> {
    /// Units of experts, and where these start.
    pub experts: &'a ExpertPlacement,
    /// The policy of these.
    pub schedule: &'a Scheduled,
    /// Rows by step, layer and expert.
    pub loads: &'a [Vec<Vec<u32>>],
    /// Tokens by step.
    pub rows: &'a [u32],
    /// Number of steps of the prompt, which come first.
    pub prompts: usize,
    /// 10⁹ bytes per second to the hot unit; `None` without such a unit.
    pub link_gb_per_s: Option<f64>,
}

/// Event of one queue.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StreamEvent {
    /// Index into [`StreamRun::queues`].
    pub queue: usize,
    /// Description, in words.
    pub name: String,
    /// Its begin, in microseconds.
    pub begin_us: f64,
    /// Its end.
    pub end_us: f64,
}

/// One simulated step of all layers, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StreamStep {
    /// All of it.
    pub total_us: f64,
    /// Experts alone.
    pub experts_us: f64,
    /// Time that the scheduler expected of these.
    pub expected_us: f64,
}

/// Result of a simulation.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct StreamRun {
    /// Units, DIMMs and links.
    pub queues: Vec<String>,
    /// Events of each, and their times.
    pub events: Vec<StreamEvent>,
    /// The steps.
    pub steps: Vec<StreamStep>,
    /// Moves of experts between steps.
    pub moves: u64,
    /// Share of experts whose class was predicted correctly.
    pub predicted: f64,
    /// Numbers of the model: name, value, source.
    pub constants: Vec<[String; 3]>,
}

/// NDP command streams of a backend.
pub trait CommandStreams: Sync + std::fmt::Debug {
    /// Costs of an expert on a unit, by rows that ascend.
    ///
    /// # Errors
    /// The reason that the unit does not run it, for people: its formats, its size, a gap in the device file.
    fn costs(
        &self,
        device: &Device,
        unit: &DeviceUnit,
        expert: &StreamExpert,
        rows: &[u32],
    ) -> Result<StreamCosts, String>;

    /// Whether the unit reads weights with that layout.
    fn reads(&self, layout: Layout) -> bool;

    /// Writes the artifacts of layers below `root`. Gives their bytes.
    ///
    /// # Errors
    /// An expert that does not fit; a disk that is full.
    fn emit(
        &self,
        unit: &DeviceUnit,
        layers: &[StreamLayer<'_>],
        root: &Path,
        next: &dyn Fn(&str) -> Result<()>,
    ) -> Result<u64>;

    /// Reads every artifact that a plan's streams of a unit name, and verifies each stream; executes nothing.
    /// Gives their number.
    ///
    /// # Errors
    /// An artifact that is missing, malformed or refused.
    fn read(&self, bundle: &BundleReader, plan: &Plan, unit: u32) -> Result<usize>;

    /// An artifact as text.
    ///
    /// # Errors
    /// Invalid bytes.
    fn print(&self, bytes: &[u8]) -> Result<String, String>;

    /// Simulates steps: the runtime's own scheduler decides, and units, DIMMs and links take the times of the
    /// model.
    ///
    /// # Errors
    /// The reason that it cannot, for people.
    fn simulate(&self, unit: &DeviceUnit, scene: &StreamWorkload<'_>) -> Result<StreamRun, String>;

    /// Executes every NDP command stream of every artifact against the backend's own evaluator and against
    /// the Graph's.
    ///
    /// # Errors
    /// An artifact that is missing, malformed, or does not run.
    fn verify(&self, trial: &mut StreamTrial<'_, '_>) -> Result<Vec<FunctionReport>>;
}

/// Streams of one unit, and the reference that they are compared with.
pub struct StreamTrial<'a, 'e> {
    /// Files of the bundle.
    pub files: &'a BundleReader,
    /// Its plan.
    pub plan: &'a Plan,
    /// The Graph.
    pub module: &'a Module,
    /// Index of the unit.
    pub unit: u32,
    /// The unit.
    pub device: &'a DeviceUnit,
    /// The reference.
    pub evaluator: &'a mut Evaluator<'e>,
    /// Notified of every layer before it is executed.
    pub next: &'a dyn Fn(&str) -> Result<()>,
}

/// Relative rounding of an expert in bf16: rows and the values between its halves keep 8 bits, sums are f32.
pub const BF16_BOUND: f64 = 3.0 / 256.0;
