//! The process that compiles the grammar of a request and computes its masks, where it can be ended.
//!
//! The limits of the libraries leave out some of their loops: `derivre` derives a conjunction of patterns in one step, whose time
//! and memory double with each pattern, while an answer is compiled and while its tokens are masked. So the limits are those
//! of the operating system, and what exceeds them ends this process and not the server.

use super::{Grammar, Grammars};
use crate::process::link::Link;
use llguidance::Matcher;
use moec_runtime::cli::limits;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};

/// Name of the job that its process is started for.
pub(crate) const JOB: &str = "grammars";
/// Seconds on the CPU to read a vocabulary.
const OPEN: u64 = 60;
/// Seconds on the CPU to compile a grammar.
pub(super) const COMPILE: u64 = 4;
/// Seconds on the CPU for the mask of a token. Limits of the library end most that takes so long much earlier, with their reason.
pub(super) const TOKEN: u64 = 1;
/// Memory of a grammar, its parsers and masks.
pub(super) const MEMORY: u64 = 256 << 20;

/// First message to a worker; the `tokenizer.json` follows.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Vocabulary {
    /// Logits of the model.
    pub(super) tokens: usize,
    /// Its end tokens.
    pub(super) ends: Vec<u32>,
}

/// Further message to a worker, any number of times.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Compile this for so many answers, in place of what was before. The reply is the first mask.
    Compile(Grammar, usize),
    /// An answer has its next token. The reply is whether it is complete; where it is not, its next mask is another reply.
    Token(usize, u32),
}

/// Serves requests.
///
/// # Errors
/// The connection has ended.
pub(crate) fn serve(link: &mut Link) -> io::Result<()> {
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
