//! Worker process that compiles the grammar of a request and computes its masks, and can be ended.
//!
//! The limits of the libraries do not cover all of their loops. `derivre` derives a conjunction of patterns
//! in one step, whose time and memory double with each pattern, both in compilation and in masks. So the
//! operating system's limits apply: work that exceeds them ends this process, not the server.

use super::{Grammar, Grammars};
use crate::process::link::Link;
use llguidance::Matcher;
use moec_runtime::cli::limits;
use serde::{Deserialize, Serialize};
use std::io::{self, ErrorKind};

/// Name of the job.
pub(crate) const JOB: &str = "grammars";
/// CPU seconds to read a vocabulary.
const OPEN: u64 = 60;
/// CPU seconds to compile a grammar.
pub(super) const COMPILE: u64 = 4;
/// CPU seconds for the mask of a token. The library's limits end most of such work much earlier, with a
/// reason.
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

/// Further messages to a worker.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Command {
    /// Compiles this for a number of answers, and replaces what was compiled before. The reply is the first
    /// mask.
    Compile(Grammar, usize),
    /// Appends a token to an answer. The reply is whether the answer is complete; if not, its next mask is
    /// another reply.
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
            // For example a schema that is nested too deep for the JSON reader.
            Err(e) => link.reply(Err(e.to_string()))?,
        }
    }
}
