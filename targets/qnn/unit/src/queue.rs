//! Requests to the thread of a chip: graphs to execute, one at a time, and graphs to have ready.
//!
//! The executor of a plan waits for an execution, and for no loading but that of the graph itself. Other
//! graphs load when nothing is to be executed, in the order in which a call reaches them, while CPUs compute
//! earlier steps (PowerInfer-2, §4.1.3).

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// Loader and executor of graphs, on one thread.
pub(crate) trait Chip {
    /// Has a graph ready; does nothing if it is.
    ///
    /// # Errors
    /// For people.
    fn ready(&mut self, graph: usize) -> Result<(), String>;

    /// Executes a graph that is ready.
    ///
    /// # Errors
    /// For people.
    fn execute(&mut self, graph: usize, memory: &mut Memory) -> Result<(), String>;
}

/// Stored numbers of a call, tensor by tensor.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) inputs: Vec<Vec<u8>>,
    pub(crate) outputs: Vec<Vec<u8>>,
}

/// The thread, and the requests to it.
#[derive(Debug)]
pub(crate) struct Queue {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    requests: Mutex<Requests>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Requests {
    /// Graphs to be loaded in advance, in this order.
    ahead: VecDeque<usize>,
    /// The graph to be executed.
    job: Option<(usize, Memory)>,
    /// Its result.
    done: Option<(Memory, Result<(), String>)>,
    /// No more requests are accepted or answered.
    closed: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, requests: MutexGuard<'a, Requests>) -> MutexGuard<'a, Requests> {
        self.changed.wait(requests).unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records that the thread has ended, for any reason.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Queue {
    /// Starts the thread with what `open` gives there, and passes on what it says besides.
    ///
    /// # Errors
    /// The error of `open`, or `failed` with the operating system's message if a thread cannot start.
    pub(crate) fn start<C: Chip, T: Send + 'static, E: Send + 'static>(
        open: impl FnOnce() -> Result<(C, T), E> + Send + 'static,
        failed: impl FnOnce(String) -> E,
    ) -> Result<(Self, T), E> {
        let shared = Arc::<Shared>::default();
        let (here, channel) = (Arc::clone(&shared), std::sync::mpsc::channel());
        let (send, receive) = channel;
        let body = move || {
            let _closing = Closing(&here);
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
        let thread = match std::thread::Builder::new().name("qnn".to_owned()).spawn(body) {
            Ok(thread) => thread,
            Err(e) => return Err(failed(e.to_string())),
        };
        match receive.recv() {
            Ok(Ok(about)) => Ok((Self { shared, thread: Some(thread) }, about)),
            Ok(Err(e)) => Err(e),
            Err(_) => Err(failed("its thread ended while it was opened".to_owned())),
        }
    }

    /// Announces the graphs of a call, in order. They replace those that were announced before.
    pub(crate) fn prepare(&self, graphs: &[usize]) {
        let mut requests = self.shared.lock();
        requests.ahead.clear();
        requests.ahead.extend(graphs);
        self.shared.changed.notify_all();
    }

    /// Executes a graph in this memory, which comes back. One caller at a time.
    ///
    /// # Errors
    /// The chip's error, or that its thread has ended.
    pub(crate) fn execute(&self, graph: usize, memory: Memory) -> (Memory, Result<(), String>) {
        let mut requests = self.shared.lock();
        requests.job = Some((graph, memory));
        self.shared.changed.notify_all();
        loop {
            if let Some(done) = requests.done.take() {
                return done;
            }
            if requests.closed {
                return (Memory::default(), Err("its thread has ended".to_owned()));
            }
            requests = self.shared.wait(requests);
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Answers until no more requests come.
fn answer(shared: &Shared, chip: &mut impl Chip) {
    let mut requests = shared.lock();
    while !requests.closed {
        if let Some((graph, mut memory)) = requests.job.take() {
            drop(requests);
            let done = chip.ready(graph).and_then(|()| chip.execute(graph, &mut memory));
            requests = shared.lock();
            requests.done = Some((memory, done));
            shared.changed.notify_all();
        } else if let Some(graph) = requests.ahead.pop_front() {
            drop(requests);
            // Its executor gets the error.
            let _ = chip.ready(graph);
            requests = shared.lock();
        } else {
            requests = shared.wait(requests);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// A fake that records its requests, and loads only when it is permitted to.
    struct Recorder {
        log: Sender<String>,
        gate: Receiver<()>,
        ready: Vec<usize>,
    }

    impl Chip for Recorder {
        fn ready(&mut self, graph: usize) -> Result<(), String> {
            if self.ready.contains(&graph) {
                return Ok(());
            }
            self.log.send(format!("load {graph}")).unwrap();
            self.gate.recv().unwrap();
            if graph == 9 {
                return Err("there is no graph 9".into());
            }
            self.ready.push(graph);
            self.log.send(format!("loaded {graph}")).unwrap();
            Ok(())
        }

        fn execute(&mut self, graph: usize, memory: &mut Memory) -> Result<(), String> {
            assert!(graph != 7, "a chip that fails otherwise");
            self.log.send(format!("execute {graph}")).unwrap();
            memory.outputs.clone_from(&memory.inputs);
            Ok(())
        }
    }

    fn recorder() -> (Queue, Receiver<String>, Sender<()>) {
        let ((log, received), (open, gate)) = (channel(), channel());
        let chip = move || Ok::<_, String>((Recorder { log, gate, ready: Vec::new() }, ()));
        let (queue, ()) = Queue::start(chip, |e| e).unwrap();
        (queue, received, open)
    }

    fn memory() -> Memory {
        Memory { inputs: vec![vec![1, 2]], outputs: Vec::new() }
    }

    /// The caller continues while a graph loads. No graph is executed before it is loaded, and none waits for
    /// later ones.
    #[test]
    fn graphs_load_while_the_caller_computes() {
        let (queue, log, gate) = recorder();
        queue.prepare(&[0, 1, 2]);
        // The first graph is still loading, and waits for permission; the call has returned.
        assert_eq!(log.recv().unwrap(), "load 0");
        assert!(log.try_recv().is_err());
        gate.send(()).unwrap();
        assert_eq!([log.recv().unwrap(), log.recv().unwrap()], ["loaded 0", "load 1"]);
        // A graph that is executed while the second loads runs before the third is loaded.
        let execution = std::thread::scope(|scope| {
            let execution = scope.spawn(|| queue.execute(0, memory()));
            while queue.shared.lock().job.is_none() {
                std::thread::yield_now();
            }
            gate.send(()).unwrap();
            execution.join().unwrap()
        });
        assert_eq!((execution.0.outputs, execution.1), (vec![vec![1, 2]], Ok(())));
        let next: Vec<_> = (0..3).map(|_| log.recv().unwrap()).collect();
        assert_eq!(next, ["loaded 1", "execute 0", "load 2"]);
        gate.send(()).unwrap();
        assert_eq!(log.recv().unwrap(), "loaded 2");
    }

    #[test]
    fn next_call_replaces_pending_preparations() {
        let (queue, log, gate) = recorder();
        queue.prepare(&[0, 1, 2]);
        assert_eq!(log.recv().unwrap(), "load 0");
        queue.prepare(&[3]);
        gate.send(()).unwrap();
        gate.send(()).unwrap();
        let next: Vec<_> = (0..3).map(|_| log.recv().unwrap()).collect();
        assert_eq!(next, ["loaded 0", "load 3", "loaded 3"]);
        // A graph that was not announced is loaded when it is executed.
        gate.send(()).unwrap();
        assert_eq!(queue.execute(1, memory()).1, Ok(()));
        let next: Vec<_> = (0..3).map(|_| log.recv().unwrap()).collect();
        assert_eq!(next, ["load 1", "loaded 1", "execute 1"]);
        drop(queue);
        assert!(log.recv().is_err(), "the thread has ended");
    }

    #[test]
    fn failed_preparation_is_reported_to_the_caller() {
        let (queue, log, gate) = recorder();
        // The error is reported only when the graph is executed.
        queue.prepare(&[9]);
        gate.send(()).unwrap();
        gate.send(()).unwrap();
        assert_eq!(queue.execute(9, memory()).1, Err("there is no graph 9".to_owned()));
        gate.send(()).unwrap();
        assert_eq!(queue.execute(0, memory()).1, Ok(()));
        // No thread waits for a thread that has ended.
        gate.send(()).unwrap();
        for _ in 0..2 {
            assert_eq!(queue.execute(7, memory()).1, Err("its thread has ended".to_owned()));
        }
        drop(log);
        let opened = Queue::start(|| Err::<(Recorder, ()), _>("no chip".to_owned()), |e| e);
        assert_eq!(opened.err().as_deref(), Some("no chip"));
    }
}
