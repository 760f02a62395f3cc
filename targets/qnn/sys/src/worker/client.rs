//! The caller's side: starts the process, sends requests, and notices its end.

use super::limit::within;
use super::protocol::{Answer, Request, encode, receive, send};
use super::stderr::Stderr;
use crate::call::{BinaryInfo, GraphInfo};
use crate::error::{Error, Result};
use crate::find::Installation;
use crate::graph::GraphSpec;
use crate::soc::Soc;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

/// Number of polls of a process that does not answer, and of its stderr after it, with so long between.
const PATIENCE: u32 = 100;
const BREATH: Duration = Duration::from_millis(10);

/// A program that does nothing but [`serve`](super::serve).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    /// The program.
    pub path: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Time that it may take to answer one request. After that it is ended.
    pub limit: Duration,
}

/// A process with QNN: one chip, one context.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    requests: Option<ChildStdin>,
    answers: ChildStdout,
    stderr: Option<Stderr>,
    limit: Duration,
    build: String,
    graphs: Vec<GraphInfo>,
    /// Error by which it died, once it has.
    died: Option<Error>,
}

impl Worker {
    /// Starts a process for a chip. With `share`, equal weights of its graphs are stored once. The emulator
    /// compiles, executes and saves such graphs, but refuses to load a saved one.
    ///
    /// # Errors
    /// [`Error::Start`], or whatever the library cannot do.
    pub fn start(program: &Program, installation: &Installation, soc: Soc, share: bool) -> Result<Self> {
        let failed = |e: io::Error| Error::Start { program: program.path.clone(), why: e.to_string() };
        let mut command = Command::new(&program.path);
        command.args(&program.arguments);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (Some(requests), Some(answers), Some(stderr)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(failed(io::Error::other("it has no pipes")));
        };
        let mut worker = Self {
            child,
            requests: Some(requests),
            answers,
            stderr: Some(Stderr::read(stderr)),
            limit: program.limit,
            build: String::new(),
            graphs: Vec::new(),
            died: None,
        };
        let open = Request::Open { folder: installation.folder().into(), model: soc.model, share };
        match worker.request(&open)? {
            Answer::Opened(build) => worker.build = build,
            other => return Err(strange(&open, &other)),
        }
        Ok(worker)
    }

    /// Version of the library.
    pub fn build(&self) -> &str {
        &self.build
    }

    /// The graphs of the context, in the order in which they came.
    pub fn graphs(&self) -> &[GraphInfo] {
        &self.graphs
    }

    /// Adds a graph and compiles it; gives its number.
    ///
    /// # Errors
    /// As [`Context::compose`](crate::Context::compose), and [`Error::Died`].
    pub fn compose(&mut self, spec: &GraphSpec) -> Result<usize> {
        spec.verify()?;
        let graphs = self.add(&Request::Compose(spec.clone()))?;
        Ok(graphs.start)
    }

    /// Adds the graphs of a DLC and compiles them; gives their numbers.
    ///
    /// # Errors
    /// As [`Context::compose_dlc`](crate::Context::compose_dlc), and [`Error::Died`].
    pub fn compose_dlc(&mut self, path: &Path) -> Result<std::ops::Range<usize>> {
        self.add(&Request::ComposeDlc(path.into()))
    }

    /// Takes a context binary; nothing may have been composed before. Gives the numbers of its graphs.
    ///
    /// # Errors
    /// As [`Context::from_binary`](crate::Context::from_binary), and [`Error::Died`].
    pub fn load(&mut self, bytes: Vec<u8>) -> Result<std::ops::Range<usize>> {
        self.add(&Request::Load(bytes))
    }

    fn add(&mut self, request: &Request) -> Result<std::ops::Range<usize>> {
        let first = self.graphs.len();
        match self.request(request)? {
            Answer::Graphs(graphs) => self.graphs.extend(graphs),
            other => return Err(strange(request, &other)),
        }
        Ok(first..self.graphs.len())
    }

    /// Executes the graph of a number.
    ///
    /// # Errors
    /// As [`Graph::execute`](crate::Graph::execute), and [`Error::Died`].
    pub fn execute(&mut self, graph: usize, inputs: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>> {
        let graph = u32::try_from(graph).unwrap_or(u32::MAX);
        let request = Request::Execute { graph, inputs };
        match self.request(&request)? {
            Answer::Outputs(outputs) => Ok(outputs),
            other => Err(strange(&request, &other)),
        }
    }

    /// The context binary. The same graphs, composed in the same order by a fresh worker, give the same
    /// bytes.
    ///
    /// # Errors
    /// As [`Context::binary`](crate::Context::binary), and [`Error::Died`].
    pub fn binary(&mut self) -> Result<Vec<u8>> {
        match self.request(&Request::Binary)? {
            Answer::Binary(bytes) => Ok(bytes),
            other => Err(strange(&Request::Binary, &other)),
        }
    }

    /// Description of a context binary by itself.
    ///
    /// # Errors
    /// As [`System::binary_info`](crate::System::binary_info), and [`Error::Died`].
    pub fn binary_info(&mut self, bytes: Vec<u8>) -> Result<BinaryInfo> {
        let request = Request::Info(bytes);
        match self.request(&request)? {
            Answer::Info(info) => Ok(info),
            other => Err(strange(&request, &other)),
        }
    }

    /// Writes a graph as DLC.
    ///
    /// # Errors
    /// As [`write_dlc`](crate::write_dlc), and [`Error::Died`].
    pub fn write_dlc(&mut self, spec: &GraphSpec, path: &Path) -> Result<()> {
        spec.verify()?;
        let request = Request::WriteDlc { spec: spec.clone(), path: path.into() };
        match self.request(&request)? {
            Answer::Done => Ok(()),
            other => Err(strange(&request, &other)),
        }
    }

    fn request(&mut self, request: &Request) -> Result<Answer> {
        if let Some(died) = &self.died {
            return Err(died.clone());
        }
        let failed = |e: io::Error| Error::Request { doing: request.doing().into(), why: e.to_string() };
        let wire = encode(request).map_err(failed)?;
        let (answer, late) = self.exchange(&wire);
        match answer {
            Ok(Some(Answer::Failed(error))) if !late => Err(error),
            Ok(Some(answer)) if !late => Ok(answer),
            // The write error does not matter: the error reports how the process ended.
            _ => Err(self.bury(request, late)),
        }
    }

    /// Sends a request and waits for the answer. The process is ended when its time is over, which ends the
    /// waiting; also says whether it was.
    fn exchange(&mut self, wire: &[u8]) -> (io::Result<Option<Answer>>, bool) {
        let Self { child, requests, answers, limit, .. } = self;
        within(child, *limit, || match requests {
            Some(to) => send(to, wire).and_then(|()| receive(answers)),
            None => Ok(None),
        })
    }

    /// The process has ended, or will not be understood any more.
    fn bury(&mut self, request: &Request, late: bool) -> Error {
        // Without requests it ends, if it can.
        self.requests = None;
        let mut ended = self.child.try_wait();
        for _ in 0..PATIENCE {
            if !matches!(ended, Ok(None)) {
                break;
            }
            thread::sleep(BREATH);
            ended = self.child.try_wait();
        }
        if matches!(ended, Ok(None)) {
            ended = self.child.kill().and_then(|()| self.child.wait()).map(Some);
        }
        let ending = match ended {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "for an unknown reason".into(),
            Err(e) => e.to_string(),
        };
        let messages = self.stderr.take().map(|stderr| stderr.last(PATIENCE * BREATH)).unwrap_or_default();
        let doing = request.doing().into();
        let died = if late {
            Error::Late { doing, seconds: self.limit.as_secs_f64(), messages }
        } else {
            Error::Died { doing, ending, messages }
        };
        self.died = Some(died.clone());
        died
    }
}

/// An answer that fits another request.
fn strange(request: &Request, answer: &Answer) -> Error {
    Error::Protocol { doing: request.doing().into(), why: format!("it answers {}", answer.kind()) }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // Without requests the process ends by itself; it is not waited for longer than killing it takes.
        self.requests = None;
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
