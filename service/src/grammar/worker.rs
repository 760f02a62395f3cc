//! The process that compiles the grammar of a request and computes its masks, where it can be ended.
//!
//! The limits of the libraries leave out some of their loops: `derivre` derives a conjunction of patterns in one step, whose time
//! and memory double with each pattern, while an answer is compiled and while its tokens are masked. So the limits are those
//! of the operating system, and what exceeds them ends this process and not the server.

use super::{Grammar, Grammars};
use crate::error::{Error, Result};
use llguidance::Matcher;
use moec_runtime::cli::{Context, Failure, Io, More, limits};
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// The subcommand, hidden, of every program that serves. Test programs take it for the name of a test.
pub(super) const NAME: &str = "grammar_worker";
/// Seconds on the CPU to read a vocabulary.
const OPEN: u64 = 60;
/// Seconds on the CPU to compile a grammar.
pub(super) const COMPILE: u64 = 4;
/// Seconds on the CPU for the mask of a token. Limits of the library end most that takes so long much earlier, with their reason.
pub(super) const TOKEN: u64 = 1;
/// Memory of a grammar, its parsers and masks.
pub(super) const MEMORY: u64 = 256 << 20;
/// Stack of the parsers, which call themselves for each level of a grammar.
const STACK: usize = 64 << 20;
/// Most bytes of a message: a vocabulary is the longest.
const MESSAGE: u64 = 1 << 30;

/// What a worker is sent first; the `tokenizer.json` follows.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Vocabulary {
    /// Logits of the model.
    pub(super) tokens: usize,
    /// Its end tokens.
    pub(super) ends: Vec<u32>,
}

/// What a worker is sent then, any number of times.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Compile this for so many answers, in place of what was before. The reply is the first mask.
    Compile(Grammar, usize),
    /// An answer has its next token. The reply is whether it is complete; where it is not, its next mask is another reply.
    Token(usize, u32),
}

/// A connection of messages, each after its length.
#[derive(Debug)]
pub(super) struct Link(pub(super) UnixStream);

impl Link {
    /// Sends a message.
    ///
    /// # Errors
    /// Those of the connection.
    pub(super) fn send(&mut self, message: &[u8]) -> io::Result<()> {
        let length = u64::try_from(message.len()).map_err(io::Error::other)?;
        self.0.write_all(&[&length.to_le_bytes(), message].concat())
    }

    /// Receives a message.
    ///
    /// # Errors
    /// Those of the connection; it has ended, or is silent for too long.
    pub(super) fn receive(&mut self) -> io::Result<Vec<u8>> {
        let mut length = [0; 8];
        self.0.read_exact(&mut length)?;
        let length = u64::from_le_bytes(length);
        let mut message = Vec::new();
        if length > MESSAGE || (&self.0).take(length).read_to_end(&mut message)? as u64 != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        Ok(message)
    }

    /// Sends a reply: what was asked for, or why not.
    fn reply(&mut self, reply: std::result::Result<Vec<u8>, String>) -> io::Result<()> {
        let (status, bytes) = reply.map_or_else(|why| (1, why.into_bytes()), |bytes| (0, bytes));
        self.send(&[&[status], &*bytes].concat())
    }

    /// Receives a reply, and gives up after a while. The worker's own limits are those that count: they end it earlier.
    ///
    /// # Errors
    /// As [`Link::receive`].
    pub(super) fn replied(&mut self, patience: Duration) -> io::Result<std::result::Result<Vec<u8>, String>> {
        self.0.set_read_timeout(Some(patience))?;
        let mut message = self.receive()?;
        match message.first() {
            Some(0) => Ok(Ok(message.split_off(1))),
            Some(_) => Ok(Err(String::from_utf8_lossy(&message[1..]).into_owned())),
            None => Err(ErrorKind::InvalidData.into()),
        }
    }
}

/// The subcommand.
pub(crate) const VERB: More = More { command, run: run_verb };

fn command() -> clap::Command {
    clap::Command::new(NAME).hide(true)
}

fn run_verb(_: &Context<'_>, _: &clap::ArgMatches, _: &mut Io<'_>) -> std::result::Result<(), Failure> {
    Ok(run()?)
}

/// Whether this process was started to be a worker.
pub fn is_started() -> bool {
    std::env::args_os().skip(1).eq([NAME])
}

/// Does what the server at the other end of standard input, a socket, asks for, until that has gone. Returns at once in a process that
/// was not started for it.
///
/// # Errors
/// The connection fails, or a limit cannot be set.
pub fn run() -> Result<()> {
    if !is_started() {
        return Ok(());
    }
    let failed = |e: io::Error| Error::new(format!("the process for grammars fails: {e}"));
    let stream = UnixStream::from(io::stdin().as_fd().try_clone_to_owned().map_err(failed)?);
    let work = move || serve(&mut Link(stream));
    let thread = std::thread::Builder::new().stack_size(STACK).spawn(work).map_err(failed)?;
    match thread.join() {
        Ok(Err(e)) if e.kind() != ErrorKind::UnexpectedEof => Err(failed(e)),
        Ok(_) => Ok(()),
        Err(_) => Err(Error::new("the process for grammars ended in a panic")),
    }
}

fn serve(link: &mut Link) -> io::Result<()> {
    limits::no_core_file()?;
    limits::cpu_seconds(OPEN)?;
    let of: Vocabulary = serde_json::from_slice(&link.receive()?)?;
    let opened = Grammars::new(&link.receive()?, of.tokens, &of.ends);
    let grammars = match opened {
        Ok(grammars) => grammars,
        Err(e) => return link.reply(Err(e.what)),
    };
    link.reply(Ok(Vec::new()))?;
    let mut matchers: Vec<Matcher> = Vec::new();
    loop {
        match serde_json::from_slice(&link.receive()?) {
            Ok(Command::Compile(grammar, answers)) => {
                matchers.clear();
                limits::cpu_seconds(COMPILE)?;
                limits::memory(MEMORY)?;
                let reply = grammars.matcher(&grammar).map(|(matcher, mask)| {
                    matchers.extend((1..answers).map(|_| matcher.deep_clone()));
                    matchers.push(matcher);
                    mask
                });
                link.reply(reply.map_err(|e| e.what))?;
            }
            Ok(Command::Token(answer, id)) => {
                limits::cpu_seconds(TOKEN)?;
                let matcher = matchers.get_mut(answer).ok_or(ErrorKind::InvalidInput)?;
                if let Err(e) = matcher.consume_token(id) {
                    link.reply(Err(e.to_string()))?;
                    continue;
                }
                let complete = matcher.is_stopped();
                link.reply(Ok(vec![u8::from(complete)]))?;
                if !complete {
                    link.reply(super::mask(matcher))?;
                }
            }
            // Such as a schema that is nested deeper than JSON is read.
            Err(e) => link.reply(Err(e.to_string()))?,
        }
    }
}

#[cfg(test)]
mod tests {
    /// What a [`Process`](super::super::process::Process) of the other tests runs: this program, with the name of this test.
    #[test]
    fn grammar_worker() {
        super::run().unwrap();
    }
}
