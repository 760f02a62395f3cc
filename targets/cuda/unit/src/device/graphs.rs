//! CUDA graphs of repeated launches. The launches between two copies over the link are collected. When the
//! same launches come a second time, the driver makes a graph of them, which is launched in their place from
//! then on.
//!
//! A decoded token of a model on the GPU is some hundred launches with the same addresses, grids and rows as
//! the token before. One by one each costs the host some microseconds, which is longer than the kernels of a
//! small layer.

use super::{GpuDevice, Kernel, Refusal, Result, check};
use crate::api::{Api, Handle};
use std::collections::HashMap;
use std::ptr;

/// Launches from which on a graph is made: fewer cost little more by themselves.
const FEW: usize = 8;
/// Most runs that are kept. A prompt's last chunk has as many rows as it happens to have, and may never come
/// again.
const MOST: usize = 256;
/// Only this thread's work on a stream is captured.
const OF_THREAD: u32 = 1;

/// Knowledge about a run of launches.
#[derive(Clone, Copy, Debug)]
enum LaunchGraph {
    /// The launches occurred once.
    Once,
    /// A graph of the driver's, and when it was launched last.
    Graph(Handle, u64),
}

/// Launches that wait for the next copy over the link, and earlier ones.
#[derive(Debug, Default)]
pub(super) struct Graphs {
    /// Pending launches, as [`GpuDevice::queue`] encodes them: equal bytes are equal launches on the GPU.
    waiting: Vec<u64>,
    launches: usize,
    seen: HashMap<Box<[u64]>, LaunchGraph>,
    /// Graphs that were launched so far.
    clock: u64,
    /// Whether graphs are off: the driver has refused one, or the user disabled them.
    refused: bool,
}

impl Graphs {
    /// Creates an empty set. With `MOEC_CUDA_GRAPHS=off` in the environment every launch is made
    /// individually, for comparison.
    pub(super) fn of_environment() -> Self {
        let refused = std::env::var_os("MOEC_CUDA_GRAPHS").is_some_and(|v| v == "off");
        Self { refused, ..Self::default() }
    }

    /// Releases the driver's objects.
    pub(super) fn free(&mut self, api: &Api) {
        for known in std::mem::take(&mut self.seen).into_values() {
            if let LaunchGraph::Graph(graph, _) = known {
                // SAFETY: it is this GPU's own, and launched no more.
                unsafe { (api.graph_free)(graph) };
            }
        }
    }

    /// Makes room for another run: removes one that came once, else the graph that was not launched for
    /// longest.
    fn make_room(&mut self, api: &Api) {
        if self.seen.len() < MOST {
            return;
        }
        self.seen.retain(|_, known| matches!(known, LaunchGraph::Graph(..)));
        if self.seen.len() < MOST {
            return;
        }
        let launched = |known: &LaunchGraph| if let LaunchGraph::Graph(_, at) = known { *at } else { 0 };
        let oldest = self.seen.iter().min_by_key(|(_, known)| launched(known)).map(|(run, _)| run.clone());
        if let Some(LaunchGraph::Graph(graph, _)) = oldest.and_then(|run| self.seen.remove(&run)) {
            // SAFETY: it is this GPU's own; a running launch is not disturbed.
            unsafe { (api.graph_free)(graph) };
        }
    }
}

/// A launch as it waits.
struct Waiting<'a> {
    kernel: Kernel,
    grid: [u32; 3],
    block: u32,
    rows: u32,
    addresses: &'a [u64],
}

/// Words before the addresses.
const HEAD: usize = 7;

impl<'a> Waiting<'a> {
    /// The first of a run, and the launches after it.
    fn read(words: &'a [u64]) -> Option<(Self, &'a [u64])> {
        let &[kernel, x, y, z, block, rows, count, ref rest @ ..] = words else { return None };
        let (addresses, rest) = rest.split_at_checked(usize::try_from(count).ok()?)?;
        let kernel = Kernel(ptr::with_exposed_provenance_mut(usize::try_from(kernel).ok()?));
        let word = |n| u32::try_from(n).ok();
        let grid = [word(x)?, word(y)?, word(z)?];
        Some((Self { kernel, grid, block: word(block)?, rows: word(rows)?, addresses }, rest))
    }
}

impl GpuDevice {
    /// Queues a kernel, which is launched before the next copy or wait.
    ///
    /// # Safety
    /// As [`GpuDevice::launch`], until then.
    pub unsafe fn queue(
        &mut self,
        kernel: Kernel,
        [x, y, z]: [u32; 3],
        block: u32,
        addresses: &[u64],
        rows: u32,
    ) {
        let head = [x, y, z, block, rows].map(u64::from);
        let waiting = &mut self.graphs.waiting;
        waiting.reserve(HEAD + addresses.len());
        waiting.push(kernel.0.expose_provenance() as u64);
        waiting.extend(head);
        waiting.push(addresses.len() as u64);
        waiting.extend(addresses);
        self.graphs.launches += 1;
    }

    /// Launches the waiting kernels.
    ///
    /// # Errors
    /// Fails if the driver does, with the kernel.
    pub(super) fn flush(&mut self) -> Result<()> {
        let launches = std::mem::take(&mut self.graphs.launches);
        let mut run = std::mem::take(&mut self.graphs.waiting);
        let done = if launches == 0 { Ok(()) } else { self.launch_run(&run, launches) };
        run.clear();
        self.graphs.waiting = run;
        done
    }

    fn launch_run(&mut self, run: &[u64], launches: usize) -> Result<()> {
        if launches < FEW || self.graphs.refused {
            return self.launch_each(run);
        }
        let graph = match self.graphs.seen.get(run).copied() {
            Some(LaunchGraph::Graph(graph, _)) => graph,
            Some(LaunchGraph::Once) => {
                let Ok(graph) = self.capture(run) else {
                    // The graph was refused, not its launches; if a launch is at fault, the individual
                    // launches report it now.
                    self.graphs.refused = true;
                    return self.launch_each(run);
                };
                graph
            }
            None => {
                self.graphs.make_room(&self.api);
                self.graphs.seen.insert(run.into(), LaunchGraph::Once);
                return self.launch_each(run);
            }
        };
        self.graphs.clock += 1;
        if let Some(known) = self.graphs.seen.get_mut(run) {
            *known = LaunchGraph::Graph(graph, self.graphs.clock);
        }
        self.current()?;
        // SAFETY: the graph is this GPU's own; the caller promised the validity of its launches when they
        // were queued.
        check(&self.api, "cuGraphLaunch", unsafe { (self.api.graph_launch)(graph, self.compute) })
    }

    fn launch_each(&mut self, mut run: &[u64]) -> Result<()> {
        while let Some((of, rest)) = Waiting::read(run) {
            // SAFETY: promised when it waited.
            let launched = unsafe { self.launch(of.kernel, of.grid, of.block, of.addresses, of.rows) };
            launched.map_err(|refusal| Refusal { kernel: Some(of.kernel), ..refusal })?;
            run = rest;
        }
        Ok(())
    }

    /// Makes a graph of a run, which is not launched by that.
    fn capture(&mut self, run: &[u64]) -> Result<Handle> {
        let (mut captured, mut graph) = (ptr::null_mut(), ptr::null_mut());
        self.current()?;
        // SAFETY: stream and graphs are this GPU's own, and every address is of a variable.
        unsafe {
            let begun = (self.api.capture_begin)(self.compute, OF_THREAD);
            check(&self.api, "cuStreamBeginCapture", begun)?;
            let launched = self.launch_each(run);
            // A capture is ended whatever its result: the stream does nothing else before.
            let ended = (self.api.capture_end)(self.compute, &raw mut captured);
            let ended = launched.and(check(&self.api, "cuStreamEndCapture", ended));
            let made = ended.and_then(|()| {
                let made = (self.api.graph_make)(&raw mut graph, captured, 0);
                check(&self.api, "cuGraphInstantiateWithFlags", made)
            });
            if !captured.is_null() {
                (self.api.graph_destroy)(captured);
            }
            made?;
        }
        Ok(graph)
    }
}
