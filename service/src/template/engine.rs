//! Templates as transformers renders them, by `minijinja`.

use super::python::{self, Style};
use super::{MAX_SOURCE, Render};
use crate::error::{Error, Result};
use chrono::{DateTime, FixedOffset, Local};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, ErrorKind, State, Value};
use serde::Deserialize as _;
use serde_json::{Map, Value as Json};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Steps of a template in addition to those for its input; each also counts for 64 bytes that it may
/// allocate.
const FUEL: u64 = 2_000_000;
/// Additional steps for each byte of a conversation.
const FUEL_PER_BYTE: u64 = 16;
/// Maximum nesting of macros and blocks.
const RECURSION: usize = 200;
/// Tag that stands for the end of a message that is to be continued.
const TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";
/// Names of the field for the reasoning in a message.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A chat template, parsed in this process. Untrusted templates may overflow the stack or fill the memory:
/// see [`Template`](super::Template).
#[derive(Debug)]
pub struct Engine {
    env: Environment<'static>,
    source: String,
    tokens: Vec<(String, Value)>,
}

/// Name of the template in errors.
const NAME: &str = "chat template";

impl Engine {
    /// Parses a template. `tokens`: special tokens, as variables.
    ///
    /// # Errors
    /// A source that is too long, or is not a template.
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

    /// Names of its variables, without the conversation and the special tokens, in alphabetical order.
    pub fn variables(&self) -> Vec<String> {
        let known = ["messages", "tools", "documents", "add_generation_prompt"];
        let template = self.env.template_from_named_str(NAME, &self.source);
        let names = template.map(|template| template.undeclared_variables(false)).unwrap_or_default();
        let own = |name: &String| {
            !known.contains(&name.as_str())
                && self.tokens.iter().all(|(token, _)| token != name)
                && self.env.globals().all(|(global, _)| global != name)
        };
        let mut names: Vec<String> = names.into_iter().filter(own).collect();
        names.sort_unstable();
        names
    }

    /// The prompt for a conversation.
    ///
    /// # Errors
    /// Errors that the template raises; a template that takes too much time, memory or depth; a last message
    /// that cannot be continued.
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
    }
}

/// Converts JSON to a template's value.
fn value(json: &Json) -> Value {
    Value::deserialize(json).unwrap_or(Value::UNDEFINED)
}

/// Approximate bytes of a message's texts, keys and numbers.
fn size(value: &Json) -> usize {
    match value {
        Json::String(s) => s.len(),
        Json::Array(items) => items.iter().map(size).sum::<usize>() + items.len(),
        Json::Object(map) => map.iter().map(|(k, v)| k.len() + size(v)).sum(),
        _ => 8,
    }
}

/// Environment of templates beside their variables.
fn environment(fuel: Option<u64>) -> Environment<'static> {
    let mut env = Environment::new();
    // With default delimiters, building a syntax does not fail.
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
    env.add_function("strftime_now", |format: &str| strftime(Local::now().fixed_offset(), format));
    env
}

fn invalid(what: impl Into<std::borrow::Cow<'static, str>>) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, what)
}

fn strftime(now: DateTime<FixedOffset>, format: &str) -> Result<String, minijinja::Error> {
    let mut out = String::new();
    let written = write!(out, "{}", now.format(format));
    written.map(|()| out).map_err(|_| invalid(format!("`{format}` is not a format of a time")))
}

/// `tojson` as in transformers: nothing is escaped for HTML.
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

/// An engine's error as an error of this crate: the line, and the message.
fn explain(e: &minijinja::Error) -> Error {
    let place = e.line().map_or_else(String::new, |line| format!(", line {line}"));
    let what = e.detail().map_or_else(|| e.kind().to_string(), ToOwned::to_owned);
    match e.kind() {
        ErrorKind::OutOfFuel => Error::new(format!("the chat template{place} takes too long"))
            .hint("give another one with `--template FILE`"),
        _ => Error::new(format!("the chat template{place}: {what}"))
            .hint("it may not allow these messages; another template is given with `--template FILE`"),
    }
}

/// A message with its reasoning under every name that templates read, as in transformers.
fn aliased(message: &Json) -> Json {
    let Json::Object(map) = message else { return message.clone() };
    let Some(reasoning) = REASONING.iter().find_map(|key| map.get(*key).filter(|v| !v.is_null())) else {
        return message.clone();
    };
    let mut all = Map::new();
    all.insert("thinking".to_owned(), reasoning.clone());
    all.extend(map.iter().map(|(k, v)| (k.clone(), v.clone())));
    all.insert("reasoning_content".to_owned(), reasoning.clone());
    Json::Object(all)
}

/// Marks the end of the last message; returns its text.
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
    // If the template has trimmed the message, the text before the tag is trimmed, too.
    Ok(if rest.starts_with(TAG) { text } else { text.trim_end() }.to_owned())
}

/// Replaces `{% generation %}` blocks, with which transformers marks the model's output, by blocks without
/// effect.
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
