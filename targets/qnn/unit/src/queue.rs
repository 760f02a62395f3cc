//! Requests to the threads of a chip: graphs to execute, one at a time, and graphs to have ready.
//!
//! One thread executes graphs and creates what is loaded of an artifact; another reads the artifacts' files.
//! So an artifact is read while graphs of others are executed, and while CPUs compute earlier steps
//! (PowerInfer-2, §4.1.1, §4.1.3 and §4.4). An execution waits for the artifact of its graph; and for one
//! that is being read, if its own is not the next.

use crate::loader::Loader;
use moec_ir::plan::{ArtifactBytes, GraphDecl};
use moec_runtime::exec::graphs::LoadCounts;
use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Reads an artifact's files, on another thread.
pub type Reader<T> = Box<dyn FnOnce() -> Result<T, String> + Send>;

/// Loader and executor of graphs, on one thread. Artifacts have the numbers of [`crate::artifacts`].
pub trait Chip {
    /// Stored numbers of a call.
    type Call: Default + Send + 'static;
    /// Content that is read of an artifact.
    type Content: Send + 'static;

    /// Whether an artifact is loaded from the start.
    fn is_loaded(&self, artifact: usize) -> bool;

    /// A reader of an artifact.
    fn reader(&self, artifact: usize) -> Reader<Self::Content>;

    /// Loads an artifact that was read.
    ///
    /// # Errors
    /// For people.
    fn load(&mut self, artifact: usize, content: Self::Content) -> Result<(), String>;

    /// Frees an artifact.
    fn free(&mut self, artifact: usize);

    /// Has a graph of a loaded artifact ready; does nothing if it is.
    ///
    /// # Errors
    /// For people.
    fn ready(&mut self, graph: usize) -> Result<(), String>;

    /// Executes a graph that is ready.
    ///
    /// # Errors
    /// For people.
    fn execute(&mut self, graph: usize, call: &mut Self::Call) -> Result<(), String>;
}

/// The threads, and the requests to them.
pub struct Queue<C: Chip> {
    shared: Arc<Shared<C>>,
    /// Held by the caller whose graph is executed.
    executing: Mutex<()>,
    threads: Vec<JoinHandle<()>>,
}

impl<C: Chip> fmt::Debug for Queue<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}

struct Shared<C: Chip> {
    requests: Mutex<Requests<C::Call, C::Content>>,
    changed: Condvar,
}

struct Requests<Call, Content> {
    loader: Loader,
    /// Announced graphs that are not ready yet, in order.
    ahead: VecDeque<usize>,
    /// The graph to be executed.
    job: Option<(usize, Call)>,
    /// Its result.
    done: Option<(Call, Result<(), String>)>,
    /// The artifact to be read.
    to_read: Option<(usize, Reader<Content>)>,
    /// The artifact that was read.
    read: Option<(usize, Result<Content, String>)>,
    /// No more requests are accepted or answered.
    closed: bool,
}

impl<C: Chip> Shared<C> {
    fn lock(&self) -> MutexGuard<'_, Requests<C::Call, C::Content>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        requests: MutexGuard<'a, Requests<C::Call, C::Content>>,
    ) -> MutexGuard<'a, Requests<C::Call, C::Content>> {
        self.changed.wait(requests).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records that a thread has ended, for any reason.
struct Closing<'a, C: Chip>(&'a Shared<C>);

impl<C: Chip> Drop for Closing<'_, C> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl<C: Chip + 'static> Queue<C> {
    /// Starts the threads of a plan's graphs with the chip that `open` gives there, and passes on what it
    /// says besides. `sizes`: bytes of the artifacts, where memory is limited.
    ///
    /// # Errors
    /// The error of `open`, or `failed` with the operating system's message if a thread cannot start.
    pub fn start<T: Send + 'static, E: Send + 'static>(
        graphs: &[GraphDecl],
        sizes: &[ArtifactBytes],
        open: impl FnOnce() -> Result<(C, T), E> + Send + 'static,
        failed: impl Fn(String) -> E,
    ) -> Result<(Self, T), E> {
        let requests = Requests {
            loader: Loader::new(graphs, sizes),
            ahead: VecDeque::new(),
            job: None,
            done: None,
            to_read: None,
            read: None,
            closed: false,
        };
        let shared = Arc::new(Shared { requests: Mutex::new(requests), changed: Condvar::new() });
        let (send, receive) = std::sync::mpsc::channel();
        let here = Arc::clone(&shared);
        let body = move || {
            let _closing = Closing(&*here);
            match open() {
                Ok((mut chip, about)) => {
                    let _ = send.send(Ok(about));
                    answer(&here, &mut chip);
                }
                Err(e) => {
                    let _ = send.send(Err(e));
                }
            }
        };
        let here = Arc::clone(&shared);
        let reads = move || {
            let _closing = Closing(&*here);
            read(&here);
        };
        let mut queue = Self { shared, executing: Mutex::default(), threads: Vec::new() };
        let named = |name: &str| std::thread::Builder::new().name(name.to_owned());
        queue.threads.push(named("graphs").spawn(body).map_err(|e| failed(e.to_string()))?);
        queue.threads.push(named("artifacts").spawn(reads).map_err(|e| failed(e.to_string()))?);
        match receive.recv() {
            Ok(Ok(about)) => Ok((queue, about)),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(failed("its thread ended while it was opened".to_owned())),
        }
    }

    /// Announces the graphs of a call, in order, and the most bytes of artifacts that may be loaded. They
    /// replace what was announced before. Returns when no more is loaded than that.
    pub fn prepare(&self, graphs: &[usize], memory: Option<u64>) {
        let mut requests = self.shared.lock();
        requests.loader.announce(graphs, memory.unwrap_or(u64::MAX));
        requests.ahead.clear();
        requests.ahead.extend(graphs);
        self.shared.changed.notify_all();
        while requests.loader.is_over() && !requests.closed {
            requests = self.shared.wait(requests);
        }
    }

    /// Executes a graph in this memory, which comes back. Further callers wait for their turn.
    ///
    /// # Errors
    /// The chip's error, or that a thread has ended.
    pub fn execute(&self, graph: usize, call: C::Call) -> (C::Call, Result<(), String>) {
        let _executing = self.executing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut requests = self.shared.lock();
        requests.job = Some((graph, call));
        self.shared.changed.notify_all();
        loop {
            if let Some(done) = requests.done.take() {
                return done;
            }
            if requests.closed {
                return (C::Call::default(), Err("its thread has ended".to_owned()));
            }
            requests = self.shared.wait(requests);
        }
    }

    /// Counts of loads so far.
    pub fn counts(&self) -> LoadCounts {
        self.shared.lock().loader.counts()
    }
}

impl<C: Chip> Drop for Queue<C> {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Reads artifacts until no more requests come.
fn read<C: Chip>(shared: &Shared<C>) {
    let mut requests = shared.lock();
    while !requests.closed {
        if let Some((artifact, reader)) = requests.to_read.take() {
            drop(requests);
            let read = reader();
            requests = shared.lock();
            requests.read = Some((artifact, read));
            shared.changed.notify_all();
        } else {
            requests = shared.wait(requests);
        }
    }
}

impl<Call: Default, Content> Requests<Call, Content> {
    /// Frees artifacts and has another read.
    fn begin<C: Chip<Call = Call, Content = Content>>(
        &mut self,
        chip: &mut C,
        (artifact, freed): (usize, Vec<usize>),
        waits: bool,
    ) {
        for other in freed {
            chip.free(other);
            self.loader.freed(other);
        }
        self.loader.begin(artifact, waits);
        self.to_read = Some((artifact, chip.reader(artifact)));
    }

    /// Has the next artifact read, if there is room and nothing is being read; returns whether it did.
    fn read_ahead<C: Chip<Call = Call, Content = Content>>(&mut self, chip: &mut C) -> bool {
        if self.loader.is_reading() {
            return false;
        }
        let Some(next) = self.loader.ahead() else { return false };
        self.begin(chip, next, false);
        true
    }

    /// Takes the announced graph that is to be made ready now: the next one, if its artifact is loaded. Those
    /// whose artifacts have failed are left out.
    fn next_ahead(&mut self) -> Option<usize> {
        loop {
            let graph = *self.ahead.front()?;
            let artifact = self.loader.of(graph);
            if artifact.is_some_and(|a| self.loader.is_loaded(a)) {
                return self.ahead.pop_front();
            }
            if artifact.is_some_and(|a| !self.loader.has_failed(a)) {
                return None;
            }
            self.ahead.pop_front();
        }
    }

    /// Ends the job with an error, if there is one, and it is that of this artifact.
    fn fail(&mut self, artifact: Option<usize>, why: &str) {
        if let Some((_, call)) = self.job.take_if(|(graph, _)| self.loader.of(*graph) == artifact) {
            self.done = Some((call, Err(why.to_owned())));
        }
    }
}

/// Answers until no more requests come.
fn answer<C: Chip>(shared: &Shared<C>, chip: &mut C) {
    let mut requests = shared.lock();
    for artifact in (0..requests.loader.len()).filter(|&a| chip.is_loaded(a)) {
        requests.loader.ended(artifact, true);
    }
    while !requests.closed {
        if let Some((artifact, content)) = requests.read.take() {
            drop(requests);
            let loaded = content.and_then(|content| chip.load(artifact, content));
            requests = shared.lock();
            requests.loader.ended(artifact, loaded.is_ok());
            if let Err(why) = loaded {
                requests.fail(Some(artifact), &why);
            }
        } else if let Some(artifact) = requests.loader.excess() {
            chip.free(artifact);
            requests.loader.freed(artifact);
        } else if let Some(graph) = requests.job.as_ref().map(|(graph, _)| *graph) {
            match requests.loader.of(graph) {
                Some(artifact) if requests.loader.is_loaded(artifact) => {
                    let Some((_, mut call)) = requests.job.take() else { continue };
                    requests.loader.executed(graph);
                    // The next artifact is read meanwhile.
                    requests.read_ahead(chip);
                    shared.changed.notify_all();
                    drop(requests);
                    let done = chip.ready(graph).and_then(|()| chip.execute(graph, &mut call));
                    requests = shared.lock();
                    requests.done = Some((call, done));
                }
                Some(_) if requests.loader.is_reading() => {
                    requests = shared.wait(requests);
                    continue;
                }
                Some(artifact) => match requests.loader.demanded(artifact) {
                    Some(freed) => requests.begin(chip, (artifact, freed), true),
                    None => requests.fail(Some(artifact), "its artifact is larger than the memory for it"),
                },
                None => requests.fail(None, &format!("there is no graph {graph}")),
            }
        } else if let Some(graph) = requests.next_ahead() {
            drop(requests);
            // Its executor gets the error.
            let _ = chip.ready(graph);
            requests = shared.lock();
        } else if !requests.read_ahead(chip) {
            requests = shared.wait(requests);
            continue;
        }
        shared.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Stored numbers of a call.
    #[derive(Debug, Default, PartialEq)]
    struct Numbers {
        inputs: Vec<u8>,
        outputs: Vec<u8>,
    }

    /// A fake that records its requests, and reads only when it is permitted to. Every graph has an artifact
    /// of its own.
    struct Recorder {
        log: Sender<String>,
        gate: Arc<Mutex<Receiver<()>>>,
    }

    impl Chip for Recorder {
        type Call = Numbers;
        type Content = usize;

        fn is_loaded(&self, _: usize) -> bool {
            false
        }

        fn reader(&self, artifact: usize) -> Reader<usize> {
            let (log, gate) = (self.log.clone(), Arc::clone(&self.gate));
            Box::new(move || {
                let _ = log.send(format!("read {artifact}"));
                let _ = gate.lock().unwrap().recv();
                if artifact == 9 { Err("artifact 9 is damaged".into()) } else { Ok(artifact) }
            })
        }

        fn load(&mut self, artifact: usize, content: usize) -> Result<(), String> {
            assert_eq!(artifact, content);
            self.log.send(format!("loaded {artifact}")).unwrap();
            Ok(())
        }

        fn free(&mut self, artifact: usize) {
            self.log.send(format!("freed {artifact}")).unwrap();
        }

        fn ready(&mut self, _: usize) -> Result<(), String> {
            Ok(())
        }

        fn execute(&mut self, graph: usize, call: &mut Numbers) -> Result<(), String> {
            assert!(graph != 7, "a chip that fails otherwise");
            self.log.send(format!("execute {graph}")).unwrap();
            call.outputs.clone_from(&call.inputs);
            Ok(())
        }
    }

    /// Ten graphs; each artifact has 10 bytes.
    fn recorder() -> (Queue<Recorder>, Receiver<String>, Sender<()>) {
        let ((log, received), (open, gate)) = (channel(), channel());
        let graph = |i: usize| GraphDecl {
            package: format!("artifacts/{i}.qnn"),
            function: "f".into(),
            inputs: Vec::new(),
            outputs: Vec::new(),
            stateful: false,
        };
        let graphs: Vec<GraphDecl> = (0..10).map(graph).collect();
        let sizes: Vec<_> =
            graphs.iter().map(|g| ArtifactBytes { package: g.package.clone(), bytes: 10 }).collect();
        let chip = move || Ok::<_, String>((Recorder { log, gate: Arc::new(Mutex::new(gate)) }, ()));
        let (queue, ()) = Queue::start(&graphs, &sizes, chip, |e| e).unwrap();
        (queue, received, open)
    }

    fn numbers() -> Numbers {
        Numbers { inputs: vec![1, 2], outputs: Vec::new() }
    }

    fn next<const N: usize>(log: &Receiver<String>) -> [String; N] {
        std::array::from_fn(|_| log.recv().unwrap())
    }

    /// The caller continues while an artifact is read. No graph is executed before it is loaded, and none
    /// waits for later ones.
    #[test]
    fn graphs_load_while_the_caller_computes() {
        let (queue, log, gate) = recorder();
        queue.prepare(&[0, 1, 2], None);
        // The first artifact is still being read, and waits for permission; the call has returned.
        assert_eq!(next(&log), ["read 0"]);
        assert!(log.try_recv().is_err());
        gate.send(()).unwrap();
        assert_eq!(next(&log), ["loaded 0", "read 1"]);
        // A graph is executed while the next artifact is being read.
        let (numbers, done) = queue.execute(0, numbers());
        assert_eq!((numbers.outputs, done), (vec![1, 2], Ok(())));
        assert_eq!(next(&log), ["execute 0"]);
        gate.send(()).unwrap();
        assert_eq!(next(&log), ["loaded 1", "read 2"]);
        gate.send(()).unwrap();
        assert_eq!(next(&log), ["loaded 2"]);
        assert_eq!((queue.counts().ahead, queue.counts().waited), (3, 0));
    }

    /// With room for two artifacts each is read while the one before it is executed, and freed after that.
    #[test]
    fn artifacts_are_read_ahead_and_freed_behind() {
        let (queue, log, gate) = recorder();
        (0..6).for_each(|_| gate.send(()).unwrap());
        queue.prepare(&[0, 1, 2, 3], Some(20));
        assert_eq!(next(&log), ["read 0", "loaded 0", "read 1", "loaded 1"]);
        queue.execute(0, numbers()).1.unwrap();
        assert_eq!(next(&log), ["execute 0"]);
        queue.execute(1, numbers()).1.unwrap();
        let mut seen: Vec<String> = next::<4>(&log).to_vec();
        assert_eq!(seen.remove(0), "freed 0");
        // The read may begin before or after the execution, and ends after it was begun.
        seen.sort();
        assert_eq!(seen, ["execute 1", "loaded 2", "read 2"]);
        let counts = queue.counts();
        assert_eq!((counts.ahead, counts.waited, counts.freed, counts.held, counts.peak), (3, 0, 1, 20, 20));
        // A call with less memory begins when the rest is freed.
        queue.prepare(&[2], Some(10));
        assert_eq!(queue.counts().held, 10);
        assert_eq!(next(&log), ["freed 1"]);
    }

    /// Several threads may execute at a time: each gets the result of its own graph.
    #[test]
    fn callers_execute_one_after_the_other() {
        let (queue, log, gate) = recorder();
        (0..4).for_each(|_| gate.send(()).unwrap());
        std::thread::scope(|scope| {
            let call = |graph: u8| {
                let numbers = Numbers { inputs: vec![graph; 3], outputs: Vec::new() };
                queue.execute(graph.into(), numbers)
            };
            let callers: Vec<_> = (0..4).map(|graph| (graph, scope.spawn(move || call(graph)))).collect();
            for (graph, caller) in callers {
                let (numbers, done) = caller.join().unwrap();
                assert_eq!((numbers.outputs, done), (vec![graph; 3], Ok(())));
            }
        });
        assert_eq!(log.try_iter().filter(|line| line.starts_with("execute")).count(), 4);
    }

    #[test]
    fn next_call_replaces_pending_preparations() {
        let (queue, log, gate) = recorder();
        queue.prepare(&[0, 1, 2], None);
        assert_eq!(next(&log), ["read 0"]);
        queue.prepare(&[3], None);
        gate.send(()).unwrap();
        gate.send(()).unwrap();
        assert_eq!(next(&log), ["loaded 0", "read 3", "loaded 3"]);
        // A graph that was not announced is loaded when it is executed.
        gate.send(()).unwrap();
        assert_eq!(queue.execute(1, numbers()).1, Ok(()));
        assert_eq!(next(&log), ["read 1", "loaded 1", "execute 1"]);
        assert_eq!(queue.counts().waited, 1);
        drop(queue);
        assert!(log.recv().is_err(), "the thread has ended");
    }

    #[test]
    fn failed_preparation_is_reported_to_the_caller() {
        let (queue, log, gate) = recorder();
        // The error is reported only when the graph is executed.
        queue.prepare(&[9], None);
        gate.send(()).unwrap();
        gate.send(()).unwrap();
        assert_eq!(queue.execute(9, numbers()).1, Err("artifact 9 is damaged".to_owned()));
        (0..3).for_each(|_| gate.send(()).unwrap());
        assert_eq!(queue.execute(0, numbers()).1, Ok(()));
        assert_eq!(queue.execute(99, numbers()).1, Err("there is no graph 99".to_owned()));
        // No thread waits for a thread that has ended.
        for _ in 0..2 {
            assert_eq!(queue.execute(7, numbers()).1, Err("its thread has ended".to_owned()));
        }
        drop(log);
        let opened = Queue::start(&[], &[], || Err::<(Recorder, ()), _>("no chip".to_owned()), |e| e);
        assert_eq!(opened.err().as_deref(), Some("no chip"));
    }
}
