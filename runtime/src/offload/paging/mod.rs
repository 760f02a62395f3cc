//! Experts on disk, as a store and as a unit: the steps of a plan find them in memory when they need them.
//!
//! * [`decider`]: decides on the expert in each frame, the next read, and evictions. It follows a
//!   [`crate::offload::cache::Cache`], and carries out nothing itself. `ahead`: chooses experts of the next
//!   layers to read before they are requested.
//! * `io_executor`: carries out the decisions on the disk.
//! * `pager`: tells computing threads which experts they may use. `step_order`: the experts of one layer in
//!   one call, in the order in which they are computed.
//! * `neurons`: reads single neurons instead of whole experts, and orders their clusters.
//! * [`Hooks`]: hooks for simulations and tests.
//!
//! Memory has three regions: weights outside of experts, which are mapped; pinned experts, which are read
//! when the store is opened and stay; and frames that a policy shares among the other experts.
//!
//! Between the steps of a layer (PowerInfer-2, §4.3): `request_experts` tells the pager which experts the
//! router chose. Experts in memory are computed first, the others as they arrive. Gate and up of an expert
//! are computed while its down matrix is still being read. No thread waits for all: a thread that takes an
//! expert waits for that expert.

mod ahead;
pub mod decider;
mod hooks;
pub mod io_executor;
mod lock;
mod neurons;
mod options;
mod pager;
mod step_order;
mod tables;

use crate::bundle::BundleFiles;
use crate::bundle::program::Program;
use crate::error::{Error, Result, mib};
use crate::exec::builtin::scores as scores_of;
use crate::exec::timeline::Timeline;
use crate::exec::unit::{ExpertPart, Launch, LayerPart, PoolThread, StepFault};
use crate::offload::border::Border;
use crate::offload::disk::files::Files;
use crate::offload::disk::{
    self, Buffers, Class, Disk, Extent, ExtentTable, FileEntry, SystemClock, ThreadedDisk,
};
use crate::platform::cores::{self, CoreUse};
use crate::platform::cpu::{self, CoreSet};
use crate::platform::memory::Addr;
use crate::weights::store::{CheckLevel, MappedStore, Store};
use lock::Locked;
use moec_ir::op::DispatchLayout;
use moec_ir::plan::{self, Segment};
use neurons::NeuronPager;
use pager::DispatchRequest;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use tables::Tables;

pub use crate::exec::clusters::ClusterPart;
pub use hooks::Hooks;
pub(crate) use lock::locked;
pub use options::{Paging, Wrap};
pub use pager::Report;
pub(crate) use pager::{EvictionListener, Pager};

/// The CPU's memory.
const CPU: u32 = 0;

/// Weights outside of experts mapped, experts on disk.
pub(crate) struct PagedStore {
    mapped: MappedStore,
    tables: Arc<Tables>,
    /// Layer and part of every segment that stays on disk.
    layer_parts: Vec<Option<LayerPart>>,
    bytes: u64,
    /// Warning about memory that could not be locked.
    warning: Option<String>,
}

// SAFETY: the mapped store satisfies the contract. Tables are allocated once, with as many addresses as the
// segment has matrices. An address is entered when its bytes have been read into a frame, which is
// 4096-aligned and stays until the pager is notified that the step is over.
unsafe impl Store for PagedStore {
    fn segment(&self, index: u32) -> Option<Addr> {
        self.mapped.segment(index)
    }

    fn matrices(&self, index: u32) -> Option<Addr> {
        match self.layer_parts.get(index as usize).copied().flatten() {
            Some(layer_part) => Some(self.tables.address(layer_part)),
            None => self.mapped.matrices(index),
        }
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn warning(&mut self) -> Option<String> {
        self.warning.take()
    }
}

/// Opens what a program with [`plan::Plan::paging`] needs: its store, and its pager.
///
/// # Errors
/// As [`MappedStore::open`]; an unknown policy, refused memory, or a weight file that cannot be read.
pub(crate) fn open(
    program: &Program,
    files: &BundleFiles,
    check: CheckLevel,
    options: &Paging,
) -> Result<Opened> {
    let paging = on_disk(program, CPU)?;
    let needed = resident(program, paging);
    let mapped = MappedStore::of(program, files, check, &|i| needed.contains(&i))?;
    let locked = Locked::of(program, &mapped);
    let experts = Experts::open(program, CPU, files, options)?;
    let on_cpu = program.segments_of(CPU);
    let own = |(i, s): (u32, &Segment)| on_cpu.contains(&i).then_some(s.bytes);
    let bytes = (0..).zip(&program.segments).filter_map(own).sum();
    let Experts { tables, layer_parts, pager, border } = experts;
    let store = PagedStore { mapped, tables, layer_parts, bytes, warning: locked.warning() };
    Ok(Opened { store, pager, border, locked: locked.bytes })
}

/// Experts on the disk of a memory's host.
pub(crate) struct Experts {
    tables: Arc<Tables>,
    /// Layer and part of every segment that stays on disk.
    layer_parts: Vec<Option<LayerPart>>,
    pager: AnyPager,
    border: Option<Border>,
}

impl Experts {
    /// Opens those of a memory with [`plan::Plan::paging_of`].
    ///
    /// # Errors
    /// As [`open`].
    pub(crate) fn open(
        program: &Program,
        memory: u32,
        files: &BundleFiles,
        options: &Paging,
    ) -> Result<Self> {
        let paging = under(program, on_disk(program, memory)?, options.budget)?;
        let table = Arc::new(table(program, memory, files)?);
        let disk = disk_of(table, &paging, program, options)?;
        let matrices = |l: &plan::PagedLayer| {
            if paging.by_neurons() { [0, neurons::addresses(program, l)] } else { [l.experts as usize; 2] }
        };
        let tables = Arc::new(Tables::new(paging.layers.iter().map(matrices)));
        let pager = if paging.by_neurons() {
            let pager = NeuronPager::new((program, files), &paging, disk, Arc::clone(&tables), options)?;
            AnyPager::Neurons(Arc::new(pager))
        } else {
            let elsewhere = program.experts_off_disk(memory);
            let pager =
                Pager::new(program, (&*paging, elsewhere.as_slice()), disk, Arc::clone(&tables), options)?;
            AnyPager::Experts(Arc::new(pager))
        };
        let layer_parts = layer_parts(program, &paging);
        Ok(Self { tables, layer_parts, pager, border: Border::new(&paging) })
    }

    /// The pager.
    pub(crate) fn pager(&self) -> &AnyPager {
        &self.pager
    }

    /// The layer and part whose matrices are a segment, if it is on disk.
    pub(crate) fn layer_part(&self, segment: u32) -> Option<LayerPart> {
        self.layer_parts.get(segment as usize).copied().flatten()
    }

    /// The table of a segment's matrices, if it is on disk.
    pub(crate) fn matrices(&self, segment: u32) -> Option<Addr> {
        Some(self.tables.address(self.layer_part(segment)?))
    }

    /// Requests the experts of a step's own dispatch table, if the step is the first on the experts of a layer: of a
    /// host that gets no request by itself.
    ///
    /// # Errors
    /// A reader that has failed.
    ///
    /// # Safety
    /// As [`crate::exec::unit::ComputeUnit::submit`]; no thread runs the step yet.
    pub(crate) unsafe fn request_for(&self, launch: &Launch<'_>, threads: usize) -> Result<()> {
        let (AnyPager::Experts(pager), Some(LayerPart { layer, part: ExpertPart::GateUp })) =
            (&self.pager, launch.layer_part)
        else {
            return Ok(());
        };
        let table = launch.grid.table().and_then(|table| launch.args.get(table as usize));
        let (Some(table), Some((experts, k))) = (table, pager.shape(layer)) else { return Ok(()) };
        // A table begins as one without rows.
        let layout = DispatchLayout { rows: 0, k, experts };
        // SAFETY: the caller's promise; the table has as many words at least, aligned.
        let table = unsafe { std::slice::from_raw_parts(table.of::<i32>(), layout.start()) };
        let active = usize::try_from(table[0]).unwrap_or(0).min(experts);
        let active = &table[layout.expert()..][..active];
        let rows = launch.n;
        let request =
            DispatchRequest { layer, active, accelerator_experts: &[], rows, k, scores: 0, threads };
        pager.request_experts(request, &|_, _| &[])
    }
}

/// By segment of the plan, the layer and part whose matrices it has.
fn layer_parts(program: &Program, paging: &plan::Paging) -> Vec<Option<LayerPart>> {
    let mut layer_parts: Vec<Option<LayerPart>> = vec![None; program.segments.len()];
    for (layer, l) in paging.layers.iter().enumerate() {
        for (part, i) in ExpertPart::ALL.into_iter().zip([l.gate_up, l.down]) {
            // Gates in segments of their own are resident.
            let own = |_: &&mut Option<LayerPart>| part == ExpertPart::Down || !paging.by_neurons();
            if let Some(layer_part) = layer_parts.get_mut(i as usize).filter(own) {
                *layer_part = Some(LayerPart { layer, part });
            }
        }
    }
    layer_parts
}

/// The disk with these extents, and frames to read them into.
fn disk_of(
    table: Arc<ExtentTable>,
    paging: &plan::Paging,
    program: &Program,
    options: &Paging,
) -> Result<Arc<dyn Disk>> {
    let count = paging.frames.saturating_add(paging.staging);
    let class = if paging.by_neurons() {
        neurons::class(program, paging)?
    } else {
        Class { bytes: paging.frame_bytes, count }
    };
    let buffers = Buffers::new(&[class])?;
    let disk_options = disk::Options { block_bytes: paging.block_bytes, ..options.disk };
    let wrap = |reader| match options.wrap {
        Some(wrap) => (wrap.0)(reader),
        None => reader,
    };
    let hooked = options.hooks.map_or(Ok(None), |hooks| hooks.disk(&table, &buffers, &disk_options))?;
    let clock = Arc::new(SystemClock::default());
    Ok(match hooked {
        Some(disk) => disk,
        None => Arc::new(ThreadedDisk::with_reader(table, buffers, &disk_options, clock, wrap)?),
    })
}

/// Parts with which a program with experts on disk runs.
pub(crate) struct Opened {
    /// Its weights.
    pub(crate) store: PagedStore,
    /// Experts on disk.
    pub(crate) pager: AnyPager,
    /// Border between artifacts and frames, if it moves.
    pub(crate) border: Option<Border>,
    /// Bytes of weights that are locked in memory.
    pub(crate) locked: u64,
}

/// Segments that stay in memory: those that are read by the CPU or brought elsewhere, and are not on disk.
fn resident(program: &Program, paging: &plan::Paging) -> BTreeSet<u32> {
    let on_disk: BTreeSet<u32> = paging.segments().collect();
    let mut needed = program.segments_of(0);
    needed.extend(program.segments_to_bring());
    needed.retain(|segment| !on_disk.contains(segment));
    needed
}

/// Store of experts on disk: whole experts or neurons.
#[derive(Clone)]
pub(crate) enum AnyPager {
    /// Whole experts are read.
    Experts(Arc<Pager>),
    /// Up and down of neurons are read.
    Neurons(Arc<NeuronPager>),
}

impl AnyPager {
    /// Statistics so far.
    pub(crate) fn report(&self) -> Report {
        match self {
            Self::Experts(pager) => pager.report(),
            Self::Neurons(pager) => pager.report(),
        }
    }

    /// Bytes that were read from disk so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        match self {
            Self::Experts(pager) => pager.bytes_read(),
            Self::Neurons(pager) => pager.bytes_read(),
        }
    }

    /// Whether this many frames are fewer than now.
    pub(crate) fn shrinks_to(&self, frames: u32) -> bool {
        match self {
            Self::Experts(_) => false,
            Self::Neurons(pager) => frames < pager.frames(),
        }
    }

    /// Sets the number of frames, between two calls. Frames of whole experts do not move: a verified plan has
    /// the same number for all entry points.
    ///
    /// # Errors
    /// More frames than the cache has at most.
    pub(crate) fn resize(&self, frames: u32) -> Result<()> {
        match self {
            Self::Experts(_) => Ok(()),
            Self::Neurons(pager) => pager.resize(frames),
        }
    }

    /// Records waits in the timeline from now on. Called at most once.
    pub(crate) fn watch(&self, timeline: Arc<Timeline>) {
        match self {
            Self::Experts(pager) => pager.watch(timeline),
            Self::Neurons(pager) => pager.watch(timeline),
        }
    }

    /// A thread's share of a step over the active experts: `call` runs a range of its items.
    pub(crate) fn run(
        &self,
        layer_part: LayerPart,
        launch: &Launch<'_>,
        thread: PoolThread,
        call: &dyn Fn(usize, usize),
    ) {
        match self {
            Self::Experts(pager) => pager.run(layer_part, launch, thread, call),
            Self::Neurons(pager) if launch.grid.has_clusters() => {
                pager.run_clusters(layer_part, launch, thread, call);
            }
            Self::Neurons(pager) => pager.run(layer_part, launch, thread, call),
        }
    }
}

/// Neurons of all experts of a layer.
fn neurons_of(program: &Program, layer: &plan::PagedLayer) -> usize {
    let (experts, inter, _) = program.segments.get(layer.down as usize).map_or((0, 0, 0), Segment::extents);
    experts as usize * inter as usize
}

/// Experts on the disk of a memory's host in the plan.
fn on_disk(program: &Program, memory: u32) -> Result<&plan::Paging> {
    program.paging_of(memory).ok_or_else(|| Error::plan("no experts on disk"))
}

/// The same paging with another budget: it changes the number of frames, and a smaller one pins fewer
/// experts.
///
/// # Errors
/// [`Error::Usage`] for a budget that cannot work, with the smallest that can.
fn under<'a>(
    program: &Program,
    paging: &'a plan::Paging,
    budget: Option<u64>,
) -> Result<Cow<'a, plan::Paging>> {
    let Some(budget) = budget else { return Ok(Cow::Borrowed(paging)) };
    let fixed = paging.resident.saturating_add(paging.process);
    let staging = u64::from(paging.staging);
    // Bytes of artifacts of graphs stay as planned, so that the border moves between the same ones.
    let graphs = paging.regions.iter().map(|r| r.graphs).max().unwrap_or(0);
    let fixed = fixed.saturating_add(graphs);
    let frames = budget.saturating_sub(fixed).checked_div(paging.frame_bytes).unwrap_or(0);
    // Frames of one expert; one expert must fit.
    let of_one = |l: &plan::PagedLayer| match paging.neurons {
        0 => 1,
        each => (neurons_of(program, l) / (l.experts.max(1) as usize)).div_ceil(each as usize) as u64,
    };
    let most = paging.layers.iter().map(of_one).max().unwrap_or(1);
    let frames = frames.checked_sub(staging).filter(|&f| f >= most).ok_or_else(|| {
        too_small(budget, fixed.saturating_add((staging + most).saturating_mul(paging.frame_bytes)))
    })?;
    let all: u64 = paging.layers.iter().map(|l| u64::from(l.experts) * of_one(l)).sum();
    let limited = |frames: u64| u32::try_from(frames.min(all)).unwrap_or(u32::MAX);
    let of = |r: &plan::Regions| {
        // What other entry points need more of it.
        let more = if paging.by_neurons() { graphs.saturating_sub(r.graphs) } else { 0 };
        let more = (budget - fixed).saturating_add(more).checked_div(paging.frame_bytes).unwrap_or(0);
        plan::Regions { frames: limited(more.saturating_sub(staging)), ..*r }
    };
    let regions: Vec<_> = paging.regions.iter().map(of).collect();
    let frames = regions.iter().map(|r| r.frames).max().unwrap_or_else(|| limited(frames));
    let pinned = still_pinned(paging, frames).to_vec();
    Ok(Cow::Owned(plan::Paging { budget, frames, pinned, regions, ..paging.clone() }))
}

/// A memory budget cannot work; `least` bytes can.
fn too_small(budget: u64, least: u64) -> Error {
    let (budget, least) = (mib(budget, false), mib(least, true));
    let what = format!("a budget of {budget} is too small for this bundle: it takes {least} or more");
    Error::usage(what).with_hint(format!(
        "give `--budget {}` or more, or build with a shorter `max_context`; `--no-budget` maps all weights",
        least.replace(' ', "")
    ))
}

/// Experts that stay pinned with another number of frames: the hottest; with fewer frames, the same share of
/// frames.
fn still_pinned(paging: &plan::Paging, frames: u32) -> &[(u32, u32)] {
    let all = paging.pinned.len() as u64;
    let share = all * u64::from(frames.min(paging.frames)) / u64::from(paging.frames.max(1));
    paging.pinned.get(..share as usize).unwrap_or_default()
}

/// Extents of every matrix of every expert: by layer, expert, and part.
fn table(program: &Program, memory: u32, opened: &BundleFiles) -> Result<ExtentTable> {
    let paging = on_disk(program, memory)?;
    let segment = |i: u32| {
        program.segments.get(i as usize).ok_or_else(|| Error::plan(format!("there is no segment {i}")))
    };
    let (mut files, mut extents) = (Vec::new(), Vec::new());
    if paging.by_neurons() {
        for (i, expert, skip, bytes) in neurons::units(program)? {
            let whole = extent((program, opened), segment(i)?, expert, None, &mut files)?;
            extents.push(Extent { offset: whole.offset + skip, bytes, ..whole });
        }
        return ExtentTable::new(files.into_iter().map(|(_, entry)| entry).collect(), extents);
    }
    let mut checksums = paging.checksums.iter();
    for l in &paging.layers {
        let there = program.experts_on_disk(memory, l.gate_up);
        for expert in 0..l.experts {
            // Experts of other hosts are never read: they are in no request of this one.
            let matrix = there.get(&expert).copied().unwrap_or(0);
            for i in [l.gate_up, l.down] {
                let crc32c = checksums.next().copied().unwrap_or(0);
                extents.push(extent((program, opened), segment(i)?, matrix, Some(crc32c), &mut files)?);
            }
        }
    }
    ExtentTable::new(files.into_iter().map(|(_, entry)| entry).collect(), extents)
}

/// Cores of a run, where the plan names kinds of cores. `folder`: the operating system's description of the
/// cores, in the form of [`cores::SYS`].
pub(crate) fn cores(program: &Program, folder: &str) -> Option<CoreUse> {
    let classes = program.paging.as_ref().map(|p| &p.cores).filter(|classes| !classes.is_empty())?;
    let allowed = CoreSet::of_this_thread().map(|set| set.cores()).unwrap_or_default();
    Some(cores::choose(classes, &cores::clusters(Path::new(folder)), &allowed))
}

/// Threads of a run: as requested, else the number of cores, or of those that compute, at most the number in
/// the budget.
///
/// # Errors
/// More were requested than the budget allows.
pub(crate) fn threads(
    paging: Option<&plan::Paging>,
    requested: Option<usize>,
    cores: Option<&CoreUse>,
) -> Result<usize> {
    let found = cpu::threads(requested)?;
    let most = paging.map_or(usize::MAX, |p| p.threads as usize);
    let request = requested.is_some() || std::env::var("MOEC_THREADS").is_ok_and(|v| !v.is_empty());
    if request && found > most {
        return Err(Error::usage(format!(
            "the bundle's memory budget is for {most} threads, not for {found}"
        ))
        .with_hint("request fewer, build with more `threads` under `[memory]`, or run with `--no-budget`"));
    }
    let computing = cores.map_or(0, |cores| cores.compute().len());
    let most = if request || computing == 0 { most } else { most.min(computing) };
    Ok(found.min(most))
}

/// Description of the reader that a run here would use, for users: determined by opening it.
pub(crate) fn reader(program: &Program, bundle: &Path) -> Result<String> {
    let block_bytes = program.paging.as_ref().map_or(disk::LARGEST_BLOCK, |p| p.block_bytes);
    let core = cores(program, cores::SYS).and_then(|cores| cores.reader());
    let options = disk::Options { block_bytes, core, ..usual_disk()? };
    let files =
        Arc::new(Files::open(&table(program, CPU, &BundleFiles::open(program, bundle)?)?, options.direct)?);
    let buffers = Buffers::new(&[Class { bytes: disk::BLOCK, count: 1 }])?;
    Ok(disk::open::reader(&files, &buffers, &options)?.describe())
}

/// One matrix of an expert. Files are numbered in the order of their first extents.
fn extent(
    (program, opened): (&Program, &BundleFiles),
    segment: &Segment,
    expert: u32,
    crc32c: Option<u32>,
    files: &mut Vec<(u32, FileEntry)>,
) -> Result<Extent> {
    let wrong = || Error::plan("an expert is outside of its file");
    let known = files.iter().position(|(f, _)| *f == segment.file);
    let file = known.unwrap_or(files.len());
    if known.is_none() {
        let info = program.files.get(segment.file as usize).ok_or_else(wrong)?;
        let missing = || Error::MissingFile(info.path.clone().into());
        let of = opened.get(segment.file).map_err(|_| missing())?;
        let (path, identity) = (of.path.clone(), of.identity()?);
        files.push((segment.file, FileEntry { path, bytes: info.bytes, cached: false, identity }));
    }
    let offset = segment.matrix_offset(expert);
    let bytes = segment.matrix_bytes().ok_or_else(wrong)?;
    Ok(Extent { file: file as u32, offset: offset.ok_or_else(wrong)?, bytes, crc32c })
}

impl Pager {
    /// Requests the experts of a dispatch table; other units compute the experts in `accelerator_experts`.
    ///
    /// # Safety
    /// As [`crate::exec::unit::ComputeUnit::submit`]; no other thread runs this step.
    pub(crate) unsafe fn request(
        &self,
        launch: &Launch<'_>,
        thread: PoolThread,
        layer: usize,
        [rows, k]: [usize; 2],
        strides: &[u32],
        accelerator_experts: &[i32],
    ) {
        let (Some((table, scores)), Some((experts, _))) = (launch.args.split_last(), self.shape(layer))
        else {
            return;
        };
        let layout = DispatchLayout { rows, k, experts };
        // SAFETY: the verifier has found the whole table there, aligned; the step that writes it has ended.
        let table = unsafe { std::slice::from_raw_parts(table.of::<i32>(), layout.words()) };
        let active = usize::try_from(table[0]).unwrap_or(0).min(experts);
        let active = &table[layout.expert()..][..active];
        let score = |i: usize, row: usize| -> &[f32] {
            let Some((experts, _)) = self.shape(layer + i) else { return &[] };
            // SAFETY: the verifier has found `n` rows of so many experts, as far apart; nothing writes them
            // now.
            unsafe { scores_of(launch, strides, i, row, experts) }
        };
        let request = DispatchRequest {
            layer,
            active,
            accelerator_experts,
            rows: launch.n,
            k,
            scores: scores.len(),
            threads: thread.of,
        };
        if let Err(e) = self.request_experts(request, &score) {
            launch.fail(StepFault::Disk(e));
        }
    }
}

/// Default options for the disk: `MOEC_DISK_READER` names the reader.
///
/// # Errors
/// An unknown reader.
pub(crate) fn usual_disk() -> Result<disk::Options> {
    Ok(disk::Options { reader: disk::Choice::from_env()?, ..disk::Options::default() })
}
