//! Chat templates: conversations become prompts, as transformers' `apply_chat_template` renders them.
//!
//! A template is a program that came with a model, so it is not trusted: work, memory, depth and output are bounded, it reaches
//! nothing but what it is given, and it runs on a stack of its own, which values that it nests cannot overflow.

mod prompt;
mod python;

use crate::error::{Error, Result};
use chrono::{DateTime, Local};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, ErrorKind, State, Value};
use moec_runtime::regular;
pub use prompt::Prompt;
use python::Style;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

/// Most bytes of a template's source; those that are published have 20 KB.
pub const MAX_SOURCE: usize = 1 << 20;
/// A file of templates in a bundle.
const FILE: regular::Limit = regular::Limit { what: "chat templates", bytes: 16 << 20 };
/// Steps of a template beside those for its input; each stands for 64 bytes that it may take, too.
const FUEL: u64 = 2_000_000;
/// Steps more for each byte of a conversation.
const FUEL_PER_BYTE: u64 = 16;
/// Macros and blocks inside each other.
const RECURSION: usize = 200;
/// Bytes of stack while a template runs. Each step can nest a value by one level, and letting go of them all takes stack.
const STACK: usize = 1 << 30;
/// What stands for the end of a message that is to be continued.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Names under which a message carries what was thought before it.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Where a bundle keeps its chat templates.
pub fn path(bundle: &Path) -> PathBuf {
    bundle.join("artifacts").join("chat_template.json")
}

/// The chat templates of a bundle, as the build found them, and the special tokens that they may name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Templates {
    /// Source by name; the one for conversations is `default`, that for tools `tool_use` where there is one.
    pub templates: BTreeMap<String, String>,
    /// `bos_token` and its like, with their text.
    pub tokens: BTreeMap<String, String>,
}

impl Templates {
    /// Reads those of a bundle; none if it has no template.
    ///
    /// # Errors
    /// A file that is no such thing.
    pub fn open(bundle: &Path) -> Result<Option<Self>> {
        let path = path(bundle);
        let failed = |why: String| {
            Error::new(format!("cannot read `{}`: {why}", path.display()))
                .hint("rebuild the bundle, or give a template with `--template FILE`")
        };
        let bytes = match regular::read(&path, FILE) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(failed(e.to_string())),
        };
        let whole: Json = serde_json::from_slice(&bytes).map_err(|e| failed(e.to_string()))?;
        let part = |key: &str| -> Result<BTreeMap<String, String>> {
            let read = |(k, v): (&String, &Json)| Some((k.clone(), v.as_str()?.to_owned()));
            let object = whole.get(key).and_then(Json::as_object);
            let pairs = object.and_then(|pairs| pairs.iter().map(read).collect());
            pairs.ok_or_else(|| failed(format!("`{key}` is no table of texts")))
        };
        Ok(Some(Self { templates: part("templates")?, tokens: part("tokens")? }))
    }

    /// The one for a conversation, as transformers chooses: `tool_use` where there are tools and it exists, else `default`.
    ///
    /// # Errors
    /// There is none; one that cannot be parsed.
    pub fn choose(&self, tools: bool) -> Result<Template> {
        let named = |name: &str| self.templates.get(name);
        let source = named("tool_use").filter(|_| tools).or_else(|| named("default"));
        let names = || self.templates.keys().cloned().collect::<Vec<_>>().join(", ");
        let source = source.ok_or_else(|| {
            Error::new(format!("no chat template is called `default`; there are: {}", names()))
                .hint("give one with `--template FILE`")
        })?;
        Template::new(source, &self.tokens)
    }
}

/// What a template renders.
#[derive(Clone, Copy, Debug, Default)]
pub struct Render<'a> {
    /// Messages, each an object with `role` and `content`.
    pub messages: &'a [Json],
    /// Functions that the model may call, as JSON schemas in OpenAI's form.
    pub tools: Option<&'a [Json]>,
    /// Texts that an answer may be founded on.
    pub documents: Option<&'a [Json]>,
    /// Whether the beginning of an answer follows.
    pub add_generation_prompt: bool,
    /// Whether the last message is left open, to be continued.
    pub continue_final_message: bool,
    /// Variables of the model's own: `enable_thinking`, `reasoning_effort`.
    pub more: Option<&'a Map<String, Json>>,
    /// What `strftime_now` takes for the time; none: the clock's.
    pub now: Option<DateTime<Local>>,
}

/// A chat template, parsed.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
    source: String,
    tokens: Vec<(String, Value)>,
}

/// The name that errors give it.
const NAME: &str = "chat template";

impl Template {
    /// Parses a template. `tokens`: special tokens, as variables.
    ///
    /// # Errors
    /// A source that is too long, or is no template.
    pub fn new(source: &str, tokens: &BTreeMap<String, String>) -> Result<Self> {
        if source.len() > MAX_SOURCE {
            let what = format!("the chat template has {} bytes; {MAX_SOURCE} are the most", source.len());
            return Err(Error::new(what));
        }
        let prepared = without_generation(source);
        let env = environment(None);
        env.template_from_named_str(NAME, &prepared).map(drop).map_err(|e| explain(&e))?;
        let tokens = tokens.iter().map(|(k, v)| (k.clone(), Value::from(v.as_str()))).collect();
        Ok(Self { env, source: prepared, tokens })
    }

    /// Its source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// What the template raises; a template that takes too much time, memory or depth; a last message that cannot be continued.
    pub fn render(&self, request: &Render<'_>) -> Result<String> {
        let mut messages: Vec<Json> = request.messages.iter().map(aliased).collect();
        let last = request.continue_final_message.then(|| tag_last(&mut messages)).transpose()?;
        if last.is_some() && request.add_generation_prompt {
            return Err(Error::new("an answer cannot both be continued and begun")
                .hint("set one of `continue_final_message` and `add_generation_prompt`"));
        }
        let rendered = self.run(request, &messages)?;
        match last {
            None => Ok(rendered),
            Some(last) => untag(&rendered, &last),
        }
    }

    fn run(&self, request: &Render<'_>, messages: &[Json]) -> Result<String> {
        let bytes: usize = messages.iter().chain(request.tools.unwrap_or_default()).map(size).sum();
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL + FUEL_PER_BYTE * bytes as u64));
        if let Some(now) = request.now {
            env.add_function("strftime_now", move |format: &str| strftime(now, format));
        }
        let render = || {
            let list = |of: Option<&[Json]>| of.map_or(Value::from(()), |of| of.iter().map(value).collect());
            let mut vars: BTreeMap<String, Value> = self.tokens.iter().cloned().collect();
            let more = request.more.into_iter().flatten();
            vars.extend(more.map(|(k, v)| (k.clone(), value(v))));
            vars.insert("messages".to_owned(), list(Some(messages)));
            vars.insert("tools".to_owned(), list(request.tools));
            vars.insert("documents".to_owned(), list(request.documents));
            vars.insert("add_generation_prompt".to_owned(), request.add_generation_prompt.into());
            let context = Value::from_pairs(vars);
            let template = env.template_from_named_str(NAME, &self.source).map_err(|e| explain(&e))?;
            template.render(context).map_err(|e| explain(&e))
        };
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, render).map_err(moec_runtime::Error::Thread)?;
            thread.join().unwrap_or_else(|_| Err(Error::new("the chat template made its engine panic")))
        })
    }
}

/// JSON as templates see it.
fn value(json: &Json) -> Value {
    Value::deserialize(json).unwrap_or(Value::UNDEFINED)
}

/// Bytes of a message's texts, keys and numbers, about.
fn size(value: &Json) -> usize {
    match value {
        Json::String(s) => s.len(),
        Json::Array(items) => items.iter().map(size).sum::<usize>() + items.len(),
        Json::Object(map) => map.iter().map(|(k, v)| k.len() + size(v)).sum(),
        _ => 8,
    }
}

/// What templates find beside their variables.
fn environment(fuel: Option<u64>) -> Environment<'static> {
    let mut env = Environment::new();
    // With marks as they are by default, building a syntax does not fail.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_fuel(fuel);
    env.set_recursion_limit(RECURSION);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(|out, state, value| {
        out.write_str(&python::text(state, value)?).map_err(|_| invalid("the output cannot be written"))
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", python::is_sequence);
    env.add_filter("string", |state: &State<'_, '_>, value: &Value| python::text(state, value));
    env.add_filter("tojson", tojson);
    env.add_function("raise_exception", |message: &str| -> Result<Value, minijinja::Error> {
        Err(invalid(message.to_owned()))
    });
    env.add_function("strftime_now", |format: &str| strftime(Local::now(), format));
    env
}

fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, what)
}

fn strftime(now: DateTime<Local>, format: &str) -> Result<String, minijinja::Error> {
    let mut out = String::new();
    let written = write!(out, "{}", now.format(format));
    written.map(|()| out).map_err(|_| invalid(format!("`{format}` is no format of a time")))
}

/// `tojson` as transformers has it: nothing is escaped for HTML.
fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    rest: Rest<Value>,
    options: Kwargs,
) -> Result<Value, minijinja::Error> {
    if !rest.is_empty() {
        return Err(invalid("options of `tojson` are given by name"));
    }
    let indent = match options.get::<Option<Value>>("indent")?.filter(|v| !v.is_none()) {
        None => None,
        Some(indent) => Some(match (indent.as_str(), indent.as_usize()) {
            (Some(text), _) => text.to_owned(),
            (None, Some(n)) if n <= 64 => " ".repeat(n),
            _ => return Err(invalid("`indent` of `tojson` is a text, or a number up to 64")),
        }),
    };
    let separators = match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(invalid("`separators` of `tojson` are two texts")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent,
        separators,
    };
    options.assert_all_used()?;
    python::json(state, value, &style).map(Value::from)
}

/// An engine's error in our words: the line, and what it says.
fn explain(e: &minijinja::Error) -> Error {
    let place = e.line().map_or_else(String::new, |line| format!(", line {line}"));
    let what = e.detail().map_or_else(|| e.kind().to_string(), ToOwned::to_owned);
    match e.kind() {
        ErrorKind::OutOfFuel => {
            Error::new(format!("the chat template{place} does not come to an end in time"))
                .hint("give another one with `--template FILE`")
        }
        _ => Error::new(format!("the chat template{place}: {what}"))
            .hint("it may not allow these messages; another template is given with `--template FILE`"),
    }
}

/// A message with what was thought before it under every name that templates read, as transformers copies it.
fn aliased(message: &Json) -> Json {
    let Json::Object(map) = message else { return message.clone() };
    let Some(thought) = REASONING.iter().find_map(|key| map.get(*key).filter(|v| !v.is_null())) else {
        return message.clone();
    };
    let mut all = Map::new();
    all.insert("thinking".to_owned(), thought.clone());
    all.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
    all.insert("reasoning_content".to_owned(), thought.clone());
    Json::Object(all)
}

/// Marks where the last message ends. Gives its text.
fn tag_last(messages: &mut [Json]) -> Result<String> {
    let none = || Error::new("there is no last message with a text to continue");
    let content = messages.last_mut().and_then(|m| m.get_mut("content")).ok_or_else(none)?;
    let text = match content {
        Json::Array(parts) => {
            parts.iter_mut().rev().find_map(|part| part.get_mut("text")).ok_or_else(none)?
        }
        content => content,
    };
    let Json::String(text) = text else { return Err(none()) };
    let last = text.clone();
    text.push_str(TAG);
    Ok(last)
}

/// The prompt up to the end of the last message.
fn untag(rendered: &str, last: &str) -> Result<String> {
    let at = rendered.rfind(TAG.trim_end()).filter(|_| rendered.contains(last.trim()));
    let at = at.ok_or_else(|| {
        Error::new("the chat template leaves out a part of the last message, so that it cannot be continued")
    })?;
    let (text, rest) = rendered.split_at(at);
    // Where the template has trimmed the message, what stands in front of the mark is trimmed, too.
    Ok(if rest.starts_with(TAG) { text } else { text.trim_end() }.to_owned())
}

/// `{% generation %}` blocks, with which transformers marks what the model says, as blocks that do nothing.
fn without_generation(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (text, tag) = rest.split_at(at);
        out.push_str(text);
        let end = tag.find("%}").map_or(tag.len(), |end| end + 2);
        let (tag, after) = tag.split_at(end);
        let name = tag.trim_start_matches("{%").trim_end_matches("%}");
        match name.trim_matches(['-', '+']).trim() {
            "generation" | "endgeneration" => out.push_str(&tag.replace("generation", "with")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, …
    pub role: String,
    /// What it says.
    pub content: String,
    /// What was thought before, where the family tells it apart.
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
