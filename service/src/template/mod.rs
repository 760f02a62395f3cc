//! Chat templates: render conversations as prompts, like transformers' `apply_chat_template`.
//!
//! A template is a program that came with a model, so it is not trusted. The engine counts steps, but parsing
//! recurses on a template's structure, and some functions allocate memory without a step. So a template is
//! parsed and rendered in a process of its own (`worker`), under limits of the operating system. If that
//! process ends, the server continues.

pub mod engine;
mod prompt;
mod python;
pub(crate) mod worker;

use crate::error::{Error, Result};
use crate::process::pool::Pool;
use chrono::{DateTime, FixedOffset};
use moec_runtime::bundle::BundleReader;
use moec_runtime::platform::regular;
pub use prompt::Prompt;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::{Failure, JOB, MEMORY, Request, TIME};

/// Maximum bytes of a template's source; published ones have 20 KB.
pub const MAX_SOURCE: usize = 1 << 20;
/// File of a bundle's chat templates.
pub const FILE: &str = "artifacts/chat_template.json";
/// Limit of that file.
const LIMIT: regular::Limit = regular::Limit { what: "chat templates", bytes: 16 << 20 };

/// The chat templates of a bundle, and the special tokens that they may name.
#[derive(Clone, Debug)]
pub struct Templates {
    /// Source by name; the one for conversations is `default`, that for tools is `tool_use`, if there is one.
    pub templates: BTreeMap<String, String>,
    /// `bos_token` and similar variables, with their text.
    pub tokens: BTreeMap<String, String>,
    pool: Arc<Pool>,
}

impl Templates {
    /// Reads the templates of a bundle; `None` if it has none.
    ///
    /// # Errors
    /// An invalid file, or one that was changed after the build.
    pub fn open(bundle: &BundleReader) -> Result<Option<Self>> {
        let read = bundle.read_if_any(FILE, LIMIT)?;
        read.map(|bytes| Self::parse(&bytes)).transpose().map_err(|why| {
            Error::new(format!("cannot read `{FILE}`: {why}"))
                .hint("rebuild the bundle, or give a template with `--template FILE`")
        })
    }

    /// Reads the templates from a bundle's file.
    ///
    /// # Errors
    /// The reason that the text is invalid.
    pub fn parse(bytes: &[u8]) -> Result<Self, String> {
        let whole: Json = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        let part = |key: &str| -> Result<BTreeMap<String, String>, String> {
            let read = |(k, v): (&String, &Json)| Some((k.clone(), v.as_str()?.to_owned()));
            let object = whole.get(key).and_then(Json::as_object);
            let pairs = object.and_then(|pairs| pairs.iter().map(read).collect());
            pairs.ok_or_else(|| format!("`{key}` is not a table of texts"))
        };
        Ok(Self::new(part("templates")?, part("tokens")?))
    }

    /// Templates by name, and the special tokens that they may name.
    pub fn new(templates: BTreeMap<String, String>, tokens: BTreeMap<String, String>) -> Self {
        Self { templates, tokens, pool: Pool::new(JOB, Vec::new()) }
    }

    /// The template for a conversation, as in transformers: `tool_use` if there are tools and it exists, else
    /// `default`.
    ///
    /// # Errors
    /// There is none.
    pub fn choose(&self, tools: bool) -> Result<Template> {
        let named = |name: &str| self.templates.get(name);
        let source = named("tool_use").filter(|_| tools).or_else(|| named("default"));
        let names = || self.templates.keys().cloned().collect::<Vec<_>>().join(", ");
        let source = source.ok_or_else(|| {
            Error::new(format!("no chat template is called `default`; there are: {}", names()))
                .hint("give one with `--template FILE`")
        })?;
        Ok(self.template(source))
    }

    /// All of them, with their names.
    pub fn all(&self) -> impl Iterator<Item = (&str, Template)> {
        self.templates.iter().map(|(name, source)| (name.as_str(), self.template(source)))
    }

    fn template(&self, source: &str) -> Template {
        Template { source: source.to_owned(), tokens: self.tokens.clone(), pool: Arc::clone(&self.pool) }
    }
}

/// Input of a template.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Render<'a> {
    /// Messages, each an object with `role` and `content`.
    pub messages: &'a [Json],
    /// Functions that the model may call, as JSON schemas in OpenAI's form.
    pub tools: Option<&'a [Json]>,
    /// Texts that an answer may be based on.
    pub documents: Option<&'a [Json]>,
    /// Whether the start of an answer is appended.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open, to be continued.
    pub continue_final_message: bool,
    /// Variables of the model's own: `enable_thinking`, `reasoning_effort`.
    pub more: Option<&'a Map<String, Json>>,
    /// Time of `strftime_now`; `None`: the clock's.
    #[serde(serialize_with = "worker::write_time")]
    pub now: Option<DateTime<FixedOffset>>,
}

/// A chat template.
#[derive(Clone, Debug)]
pub struct Template {
    source: String,
    tokens: BTreeMap<String, String>,
    pool: Arc<Pool>,
}

impl Template {
    /// Checks and creates a template. `tokens`: special tokens, as variables.
    ///
    /// # Errors
    /// A source that is too long, takes too much, or is not a template.
    pub fn new(source: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        let template =
            Self { source: source.to_owned(), tokens: tokens.clone(), pool: Pool::new(JOB, Vec::new()) };
        template.check()?.map_or(Ok(template), Err)
    }

    /// Parses it. Returns the error if it is not a template.
    ///
    /// # Errors
    /// A source that takes too much, for all users; no process could be started.
    pub fn check(&self) -> Result<Option<Error>> {
        if self.source.len() > MAX_SOURCE {
            let bytes = self.source.len();
            return Err(Error::new(format!(
                "the chat template has {bytes} bytes; {MAX_SOURCE} are the most"
            )));
        }
        Ok(self.run_worker(None)?.err())
    }

    /// Names of its variables, without the conversation and the special tokens: `enable_thinking` and
    /// similar.
    ///
    /// # Errors
    /// As [`check`](Self::check).
    pub fn variables(&self) -> Result<Vec<String>> {
        Ok(self.run_worker(None)??.split_whitespace().map(str::to_owned).collect())
    }

    /// Its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// Errors that the template raises; a template that takes too much time, memory or depth; a last message
    /// that cannot be continued.
    pub fn render(&self, request: &Render<'_>) -> Result<String> {
        self.run_worker(Some(request))?
    }

    /// Lets a process parse it, and render it if `render` is given; else returns the names of its variables.
    fn run_worker(&self, render: Option<&Render<'_>>) -> Result<Result<String>> {
        let request =
            Request { source: Cow::Borrowed(&self.source), tokens: Cow::Borrowed(&self.tokens), render };
        let request = serde_json::to_vec(&request).map_err(|e| Error::new(e.to_string()))?;
        let mut worker = self.pool.take()?;
        let reply = worker.send(&request).and_then(|()| worker.reply());
        // If the connection has ended, the process has exceeded a limit.
        let reply = reply.map_err(|_| {
            let mib = MEMORY >> 20;
            let what = format!("the chat template takes more than {TIME} s, {mib} MiB, or too deep a stack");
            Error::new(what).hint("give another one with `--template FILE`")
        })?;
        Ok(match reply {
            Ok(text) => Ok(String::from_utf8_lossy(&text).into_owned()),
            Err(failure) => Err(Failure::read(&failure)),
        })
    }
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, …
    pub role: String,
    /// Text of the message.
    pub content: String,
    /// Earlier reasoning, if the family separates it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
}

impl Message {
    /// A message.
    pub fn new(role: &str, content: impl Into<String>) -> Self {
        Self { role: role.to_owned(), content: content.into(), reasoning_content: None }
    }
}

#[cfg(test)]
mod tests;
