//! The process: a library, a chip, a context, and the requests to them.

use super::protocol::{Answer, Request, encode, receive, send};
use super::stdio;
use crate::call::{Backend, Context, Device, Graph, System, write_dlc};
use crate::error::{Error, Result};
use crate::find::Installation;
use crate::soc::Soc;
use std::io;
use std::process::ExitCode;
use std::rc::Rc;

/// Answers requests from stdin until there are no more: the whole work of a [`Worker`](super::Worker)'s
/// program.
pub fn serve() -> ExitCode {
    match stdio::take().and_then(|(from, to)| answer_all(from, to)) {
        Ok(()) => ExitCode::SUCCESS,
        // The caller has gone, or sends something else: it knows the reason itself.
        Err(_) => ExitCode::FAILURE,
    }
}

fn answer_all(mut from: impl io::Read, mut to: impl io::Write) -> io::Result<()> {
    let mut session = None;
    while let Some(request) = receive(&mut from)? {
        send(&mut to, &encode(&answer(&mut session, request))?)?;
    }
    Ok(())
}

/// State after the library was opened.
struct Session {
    installation: Installation,
    device: Rc<Device>,
    system: System,
    context: Context,
    graphs: Vec<Graph>,
}

fn answer(session: &mut Option<Session>, request: Request) -> Answer {
    let doing = request.doing();
    let done = match (session, request) {
        (session @ None, Request::Open { folder, model, share }) => {
            Session::open(folder, model, share).map(|(opened, build)| {
                *session = Some(opened);
                Answer::Opened(build)
            })
        }
        (Some(session), request) => session.answer(request),
        (None, _) => Err(Error::Protocol { doing: doing.into(), why: "nothing is open".into() }),
    };
    done.unwrap_or_else(Answer::Failed)
}

impl Session {
    fn open(folder: std::path::PathBuf, model: u32, share: bool) -> Result<(Self, String)> {
        let installation = Installation::at(folder)?;
        let Some(soc) = Soc::numbered(model) else {
            return refuse("load the library", &format!("it supports no chip of number {model}"));
        };
        let backend = Backend::htp(&installation)?;
        let device = Device::new(&backend, soc)?;
        let system = System::open(&installation)?;
        let context = Context::new(&device, share)?;
        let build = backend.build().to_owned();
        Ok((Self { installation, device, system, context, graphs: Vec::new() }, build))
    }

    fn answer(&mut self, request: Request) -> Result<Answer> {
        match request {
            Request::Open { .. } => refuse("load the library", "it is loaded"),
            Request::Compose(spec) => {
                let graph = self.context.compose(&spec)?;
                Ok(self.keep(vec![graph]))
            }
            Request::ComposeDlc(path) => {
                let graphs = self.context.compose_dlc(&self.system, &path)?;
                Ok(self.keep(graphs))
            }
            Request::Load(_) if !self.graphs.is_empty() => {
                refuse("load a context binary", "the context has graphs")
            }
            Request::Load(bytes) => {
                let (context, graphs) = Context::from_binary(&self.device, &self.system, &bytes)?;
                self.context = context;
                Ok(self.keep(graphs))
            }
            Request::Execute { graph, inputs } => {
                let Some(graph) = self.graphs.get(graph as usize) else {
                    return refuse("execute a graph", "there is no graph of that number");
                };
                let inputs: Vec<&[u8]> = inputs.iter().map(Vec::as_slice).collect();
                graph.execute(&inputs).map(Answer::Outputs)
            }
            Request::Binary => self.context.binary().map(Answer::Binary),
            Request::Info(bytes) => self.system.binary_info(&bytes).map(Answer::Info),
            Request::WriteDlc { spec, path } => {
                write_dlc(&Backend::ir(&self.installation)?, &spec, &path).map(|()| Answer::Done)
            }
        }
    }

    fn keep(&mut self, graphs: Vec<Graph>) -> Answer {
        let infos = graphs.iter().map(|graph| graph.info().clone()).collect();
        self.graphs.extend(graphs);
        Answer::Graphs(infos)
    }
}

fn refuse<T>(doing: &str, why: &str) -> Result<T> {
    Err(Error::Protocol { doing: doing.into(), why: why.into() })
}
