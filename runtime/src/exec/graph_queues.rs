//! Queues of a unit with static graphs: several graphs of one step run at a time (NPUMoE, §5.7 and Table 5).
//!
//! Every queue is a thread that runs one graph after the other. Launches own their buffers, so a thread needs
//! no memory of its caller. Which queue takes a launch changes no result: the caller reads each result where
//! the launch says, whatever the order in which they end.

use crate::error::{Error, Result};
use crate::exec::capacity_limit::lock;
use crate::exec::graphs::{Graphs, f16};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// Input and output of a launch; kept from call to call.
#[derive(Debug, Default)]
pub(crate) struct LaunchBuffers {
    /// Rows that the graph takes.
    pub(crate) x: Vec<f16>,
    /// Rows that it gives.
    pub(crate) y: Vec<f16>,
}

/// The launches of one step.
pub(crate) trait Launches {
    /// Number of launches.
    fn count(&self) -> usize;

    /// Fills the input of a launch and sizes its output. Returns the graph.
    ///
    /// # Errors
    /// Rows that a graph does not take.
    fn fill(&mut self, launch: usize, buffers: &mut LaunchBuffers) -> Result<u32>;

    /// Takes the result of a launch.
    fn take(&mut self, launch: usize, buffers: &LaunchBuffers);
}

/// Queues of one unit.
pub(crate) struct GraphQueues {
    graphs: Arc<dyn Graphs>,
    /// Requests to the threads; `None`: one queue, which is the caller's thread.
    requests: Option<Sender<Request>>,
    threads: Vec<JoinHandle<()>>,
    /// Buffers that no launch has.
    free: Mutex<Vec<LaunchBuffers>>,
}

/// A launch on its way to a queue. It is answered even if its thread panics.
struct Request {
    launch: usize,
    graph: usize,
    /// `None` once it is answered.
    buffers: Option<LaunchBuffers>,
    answers: Sender<Answer>,
}

struct Answer {
    launch: usize,
    buffers: LaunchBuffers,
    result: Result<()>,
}

impl Request {
    fn answer(&mut self, result: Result<()>) {
        if let Some(buffers) = self.buffers.take() {
            // The caller may have given up after an error.
            let _ = self.answers.send(Answer { launch: self.launch, buffers, result });
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if self.buffers.is_some() {
            let why = "the thread of its queue has ended";
            self.answer(Err(Error::graph(format!("graph {}", self.graph), why)));
        }
    }
}

impl GraphQueues {
    /// Starts a thread for each of `queues` queues, if there are several.
    ///
    /// # Errors
    /// [`Error::Io`] if the operating system refuses to start a thread.
    pub(crate) fn new(graphs: Box<dyn Graphs>, queues: usize) -> Result<Self> {
        let mut all =
            Self { graphs: graphs.into(), requests: None, threads: Vec::new(), free: Mutex::default() };
        if queues < 2 {
            return Ok(all);
        }
        let (requests, received) = channel();
        all.requests = Some(requests);
        let received = Arc::new(Mutex::new(received));
        for i in 0..queues {
            let (graphs, received) = (Arc::clone(&all.graphs), Arc::clone(&received));
            let body = move || serve(&*graphs, &received);
            let thread = std::thread::Builder::new().name(format!("moec-graphs-{i}")).spawn(body);
            // Dropping `all` ends those that have started.
            all.threads.push(thread.map_err(Error::thread)?);
        }
        Ok(all)
    }

    /// The graphs.
    pub(crate) fn graphs(&self) -> &dyn Graphs {
        &*self.graphs
    }

    /// Runs launches to their end, in parallel if there are several queues: as many as there are queues, and
    /// one more is filled. After an error no launch begins, and all that have begun are waited for.
    ///
    /// # Errors
    /// That of the first launch that fails, in their order.
    pub(crate) fn run(&self, launches: &mut dyn Launches) -> Result<()> {
        let Some(requests) = &self.requests else { return self.one_by_one(launches) };
        let (answers, answered) = channel();
        let mut error: Option<(usize, Error)> = None;
        let mut fail = |launch: usize, e: Error| {
            if error.as_ref().is_none_or(|(first, _)| launch < *first) {
                error = Some((launch, e));
            }
        };
        let (mut next, mut running, mut failed) = (0, 0, false);
        while running > 0 || (next < launches.count() && !failed) {
            if next < launches.count() && !failed && running <= self.threads.len() {
                let mut buffers = lock(&self.free).pop().unwrap_or_default();
                match launches.fill(next, &mut buffers) {
                    Ok(graph) => {
                        let (graph, buffers) = (graph as usize, Some(buffers));
                        let request = Request { launch: next, graph, buffers, answers: answers.clone() };
                        // A request that no thread receives answers itself.
                        let _ = requests.send(request);
                        running += 1;
                    }
                    Err(e) => {
                        fail(next, e);
                        failed = true;
                        lock(&self.free).push(buffers);
                    }
                }
                next += 1;
                continue;
            }
            // `answers` is still here, and every request is answered.
            let Ok(Answer { launch, buffers, result }) = answered.recv() else { break };
            running -= 1;
            match result {
                Ok(()) if failed => {}
                Ok(()) => launches.take(launch, &buffers),
                Err(e) => {
                    fail(launch, e);
                    failed = true;
                }
            }
            lock(&self.free).push(buffers);
        }
        error.map_or(Ok(()), |(_, e)| Err(e))
    }

    fn one_by_one(&self, launches: &mut dyn Launches) -> Result<()> {
        let mut buffers = lock(&self.free).pop().unwrap_or_default();
        let count = launches.count();
        let mut each = |launch| {
            let graph = launches.fill(launch, &mut buffers)?;
            run(&*self.graphs, graph as usize, &mut buffers)?;
            launches.take(launch, &buffers);
            Ok(())
        };
        let done = (0..count).try_for_each(&mut each);
        lock(&self.free).push(buffers);
        done
    }
}

impl Drop for GraphQueues {
    fn drop(&mut self) {
        // Threads end when no more requests can come.
        self.requests = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn run(graphs: &dyn Graphs, graph: usize, LaunchBuffers { x, y }: &mut LaunchBuffers) -> Result<()> {
    graphs.run(graph, 0, &[x], &mut [y])
}

/// Runs graphs until no more requests can come.
fn serve(graphs: &dyn Graphs, received: &Mutex<Receiver<Request>>) {
    loop {
        let request = lock(received).recv();
        let Ok(mut request) = request else { return };
        let graph = request.graph;
        if let Some(buffers) = &mut request.buffers {
            let result = run(graphs, graph, buffers);
            request.answer(result);
        }
    }
}

#[cfg(test)]
mod tests;
