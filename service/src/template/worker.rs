//! Worker process that parses and renders templates, and can be ended.

use super::Render;
use super::engine::Engine;
use crate::error::Error;
use crate::process::link::Link;
use chrono::{DateTime, FixedOffset};
use moec_runtime::cli::limits;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value as Json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;

/// Name of the job.
pub(crate) const JOB: &str = "templates";
/// CPU seconds to parse and render a template once.
pub(super) const TIME: u64 = 4;
/// Memory of a template, a conversation and its prompt.
pub(super) const MEMORY: u64 = 512 << 20;

/// Request to the process, any number of times. The reply is the prompt, or the names of the variables if
/// nothing is rendered.
#[derive(Debug, Serialize)]
pub(super) struct Request<'a> {
    pub(super) source: Cow<'a, str>,
    pub(super) tokens: Cow<'a, BTreeMap<String, String>>,
    pub(super) render: Option<&'a Render<'a>>,
}

/// The same request on the receiving side.
#[derive(Debug, Deserialize)]
struct Received {
    source: String,
    tokens: BTreeMap<String, String>,
    render: Option<Owned>,
}

/// [`Render`] on the receiving side.
#[derive(Debug, Deserialize)]
struct Owned {
    messages: Vec<Json>,
    tools: Option<Vec<Json>>,
    documents: Option<Vec<Json>>,
    add_generation_prompt: bool,
    continue_final_message: bool,
    more: Option<Map<String, Json>>,
    now: Option<String>,
}

impl Owned {
    fn borrowed(&self) -> Render<'_> {
        Render {
            messages: &self.messages,
            tools: self.tools.as_deref(),
            documents: self.documents.as_deref(),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message,
            more: self.more.as_ref(),
            now: self.now.as_deref().and_then(|now| DateTime::parse_from_rfc3339(now).ok()),
        }
    }
}

/// Writes a time in the format of RFC 3339.
#[expect(clippy::ref_option, reason = "serde calls it so")]
pub(super) fn write_time<S: Serializer>(
    now: &Option<DateTime<FixedOffset>>,
    to: S,
) -> Result<S::Ok, S::Error> {
    now.map(|now| now.to_rfc3339()).serialize(to)
}

/// An error in the format of a reply.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Failure {
    what: String,
    hint: Option<String>,
}

impl Failure {
    /// Reads an error from a reply.
    pub(super) fn read(text: &str) -> Error {
        let failure = serde_json::from_str(text).unwrap_or(Self { what: text.to_owned(), hint: None });
        Error { what: failure.what, hint: failure.hint }
    }
}

/// Serves requests.
///
/// # Errors
/// The connection has ended, or a limit cannot be set.
pub(crate) fn serve(link: &mut Link) -> io::Result<()> {
    limits::memory(MEMORY)?;
    loop {
        let request = link.receive()?;
        limits::cpu_seconds(TIME)?;
        let done = serde_json::from_slice(&request).map_err(|e| Error::new(e.to_string())).and_then(done);
        let reply = done.map(String::into_bytes).map_err(|Error { what, hint }| {
            serde_json::to_string(&Failure { what, hint }).unwrap_or_else(|e| e.to_string())
        });
        link.reply(reply)?;
    }
}

fn done(request: Received) -> crate::Result<String> {
    let engine = Engine::new(&request.source, &request.tokens)?;
    request
        .render
        .map_or_else(|| Ok(engine.variables().join(" ")), |render| engine.render(&render.borrowed()))
}
