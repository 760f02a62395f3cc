//! Parts of a model's output beside its answer: reasoning and tool calls, parsed while it comes.
//!
//! Families write it in ways of their own, which [`SYNTAXES`] distinguishes by what their chat templates
//! write.

mod calls;
pub(crate) mod schema;

pub(crate) use calls::partial_json_call;

use moec_runtime::serving::stops::prefix_at_end;
use serde_json::Value;
use std::sync::Arc;

/// A tool that the model calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Its arguments: a JSON object.
    pub arguments: String,
    /// Id from the model, if its family writes one and no other call has it: its template then requires it
    /// again.
    pub id: Option<String>,
}

/// A piece of a model's output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A piece of the answer.
    Content(String),
    /// A piece of the reasoning.
    Reasoning(String),
    /// A complete call.
    Call(ToolCall),
    /// A malformed call.
    Broken {
        /// Text as written.
        text: String,
        /// Reason.
        why: String,
    },
}

/// Parser of one or several calls, given the declared tools.
type Read = fn(&str, &[Value]) -> Result<Vec<ToolCall>, String>;

/// Kind of the text between two tags.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// Reasoning.
    Reasoning,
    /// Calls with their parser; whether they may end with the text.
    Calls(Read, bool),
    /// Nothing: only a tag that belongs to a section of calls.
    Nothing,
    /// A header that describes the following text (harmony).
    Header,
}

/// An opening tag and its closing tag; empty: the end of the text. If both are the same, each occurrence, and
/// the end of the text, closes the span before it.
#[derive(Clone, Copy, Debug)]
struct Span {
    open: &'static str,
    close: &'static str,
    kind: Kind,
}

const fn span(open: &'static str, close: &'static str, kind: Kind) -> Span {
    Span { open, close, kind }
}

/// Syntax of reasoning and calls in a family.
#[derive(Debug)]
pub struct Syntax {
    /// Name of the model family.
    pub name: &'static str,
    /// All tags that its templates write.
    tags: &'static [&'static str],
    spans: &'static [Span],
}

const THINK: Span = span("<think>", "</think>", Kind::Reasoning);
/// Tag that ends a header of harmony.
const MESSAGE: &str = "<|message|>";
/// Tags that end a message of harmony.
const ENDS: [&str; 3] = ["<|end|>", "<|call|>", "<|return|>"];

/// All known syntaxes; the first whose tags are in a template is used.
pub const SYNTAXES: &[Syntax] = &[
    Syntax {
        name: "gpt-oss",
        tags: &["<|channel|>", MESSAGE],
        spans: &[span("<|start|>", MESSAGE, Kind::Header), span("<|channel|>", MESSAGE, Kind::Header)],
    },
    Syntax {
        name: "GLM-4.5",
        tags: &["<tool_call>", "<arg_key>"],
        spans: &[THINK, span("<tool_call>", "</tool_call>", Kind::Calls(calls::keys_and_values, false))],
    },
    Syntax {
        name: "Qwen3-Coder",
        tags: &["<tool_call>", "<function="],
        spans: &[THINK, span("<tool_call>", "</tool_call>", Kind::Calls(calls::tagged, false))],
    },
    Syntax {
        name: "Qwen",
        tags: &["<tool_call>"],
        spans: &[THINK, span("<tool_call>", "</tool_call>", Kind::Calls(calls::json, false))],
    },
    Syntax {
        name: "DeepSeek",
        tags: &["<｜tool▁call▁begin｜>"],
        spans: &[
            THINK,
            span("<｜tool▁calls▁begin｜>", "", Kind::Nothing),
            span("<｜tool▁calls▁end｜>", "", Kind::Nothing),
            span("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", Kind::Calls(calls::separated, false)),
        ],
    },
    Syntax {
        name: "Kimi-K2",
        tags: &["<|tool_calls_section_begin|>"],
        spans: &[
            THINK,
            span("<|tool_calls_section_begin|>", "", Kind::Nothing),
            span("<|tool_calls_section_end|>", "", Kind::Nothing),
            span("<|tool_call_begin|>", "<|tool_call_end|>", Kind::Calls(calls::numbered, false)),
        ],
    },
    Syntax {
        name: "Mistral",
        tags: &["[TOOL_CALLS]"],
        spans: &[span("[TOOL_CALLS]", "[TOOL_CALLS]", Kind::Calls(calls::named, true))],
    },
    Syntax { name: "reasoning alone", tags: &["</think>"], spans: &[THINK] },
    Syntax { name: "text alone", tags: &[], spans: &[] },
];

impl Syntax {
    /// The syntax of a chat template.
    pub fn of(template: &str) -> &'static Self {
        let has = |s: &&Self| s.tags.iter().all(|tag| template.contains(tag));
        SYNTAXES.iter().find(has).unwrap_or(Self::text_alone())
    }

    /// The syntax in which everything is text.
    pub fn text_alone() -> &'static Self {
        &SYNTAXES[SYNTAXES.len() - 1]
    }

    /// Whether the text of a grammar contains a tag of its reasoning or calls.
    pub fn is_written_by(&self, grammar: &str) -> bool {
        let mut tags = self.spans.iter().flat_map(|s| [s.open, s.close]).filter(|tag| !tag.is_empty());
        tags.any(|tag| grammar.contains(tag))
    }

    /// Whether everything is text. If not, special tokens are part of the input of [`Parser::push`].
    pub fn is_text_alone(&self) -> bool {
        self.spans.is_empty()
    }
}

/// Part to which the current text belongs.
#[derive(Clone, Debug)]
enum State {
    Content,
    /// The header of an answer that may name a recipient (harmony).
    Addressed,
    /// Text between tags: its kind, and the tags that end it.
    In(Kind, &'static [&'static str]),
    /// The arguments of a call to this function (harmony).
    Arguments(String),
}

/// Parses a model's output, piece by piece.
#[derive(Clone, Debug)]
pub struct Parser {
    syntax: &'static Syntax,
    state: State,
    held: String,
    /// Whether line ends are skipped: after a tag of reasoning.
    fresh: bool,
    /// Tools that may be called.
    tools: Arc<[Value]>,
    /// Whether calls are allowed.
    may_call: bool,
    /// Ids of calls so far.
    ids: Vec<String>,
}

impl Parser {
    /// Creates a parser of an answer after `prompt`. If the prompt ends with a tag of reasoning or with an
    /// open header, the answer continues it.
    pub fn new(syntax: &'static Syntax, prompt: &str) -> Self {
        let goes_on = |span: &&Span| match span.kind {
            Kind::Reasoning => prompt.trim_end().ends_with(span.open),
            Kind::Header => prompt.rfind(span.open) > prompt.rfind(span.close),
            Kind::Calls(..) | Kind::Nothing => false,
        };
        let state = match syntax.spans.iter().find(goes_on) {
            Some(Span { kind: Kind::Header, .. }) => State::Addressed,
            Some(span) => State::In(span.kind, std::slice::from_ref(&span.close)),
            None => State::Content,
        };
        let fresh = matches!(state, State::In(..));
        let (held, tools, ids) = (String::new(), Arc::default(), Vec::new());
        Self { syntax, fresh, state, held, tools, may_call: true, ids }
    }

    /// Sets the tools that may be called, as requests declare them. Arguments that a family writes without
    /// types are then texts if a tool's schema accepts only texts.
    #[must_use]
    pub fn with_tools(self, tools: Arc<[Value]>) -> Self {
        Self { tools, ..self }
    }

    /// Disallows calls: text that looks like a call is text.
    #[must_use]
    pub fn without_calls(self) -> Self {
        Self { may_call: false, ..self }
    }

    /// Whether everything is text. If not, special tokens are part of the input of [`Parser::push`].
    pub fn is_text_alone(&self) -> bool {
        self.spans().next().is_none()
    }

    /// Spans that are separated from text.
    fn spans(&self) -> impl Iterator<Item = &'static Span> + use<> {
        let may_call = self.may_call;
        let may_open = move |span: &&Span| may_call || !matches!(span.kind, Kind::Calls(..) | Kind::Nothing);
        self.syntax.spans.iter().filter(may_open)
    }

    /// Events that are certain after one more piece of text, special tokens included.
    pub fn push(&mut self, piece: &str) -> Vec<Event> {
        self.held.push_str(piece);
        let mut events = Vec::new();
        while self.step(&mut events) {}
        events
    }

    /// Events that were held back, at the end of the text.
    pub fn finish(mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let text = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Content) {
            State::In(Kind::Calls(read, true), _) => self.calls(read, text, &mut events),
            State::Arguments(name) => events.push(calls::arguments(name, text)),
            State::In(Kind::Calls(..), _) => {
                events.push(Event::Broken { text, why: "the call has no end".to_owned() });
            }
            State::In(Kind::Header | Kind::Nothing, _) => {}
            State::In(Kind::Reasoning, _) => self.emit_text(text, true, &mut events),
            State::Content | State::Addressed => self.emit_text(text, false, &mut events),
        }
        events
    }

    /// As [`Parser::finish`], for a cut answer: an unfinished call with a name is a call, with its arguments
    /// so far.
    pub fn finish_truncated(mut self) -> Vec<Event> {
        let partial = match self.state.clone() {
            State::In(Kind::Calls(read, _), closes) => {
                let tag = closes.iter().map(|tag| prefix_at_end(&self.held, tag)).max().unwrap_or(0);
                self.held.truncate(self.held.len() - tag);
                if read(self.held.trim(), &self.tools).is_ok() {
                    // Only its closing tag is missing.
                    self.state = State::In(Kind::Calls(read, true), closes);
                }
                calls::partial_call(&self.held, read, &self.tools)
            }
            State::Arguments(name) => {
                let arguments = self.held.trim().to_owned();
                Some(ToolCall { name, arguments, id: None })
            }
            _ => None,
        };
        let mut events = self.finish();
        if let (Some(last @ Event::Broken { .. }), Some(call)) = (events.last_mut(), partial) {
            *last = Event::Call(call);
        }
        events
    }

    /// The unfinished call, once its name is known, with the part of its arguments that is certain.
    pub fn partial_call(&self) -> Option<ToolCall> {
        let certain = |closes: &[&str]| {
            let tag = closes.iter().map(|tag| prefix_at_end(&self.held, tag)).max().unwrap_or(0);
            &self.held[..self.held.len() - tag]
        };
        let ToolCall { name, arguments, id } = match &self.state {
            State::In(Kind::Calls(read, _), closes) => {
                calls::partial_call(certain(closes), *read, &self.tools)?
            }
            State::Arguments(name) => {
                let arguments = certain(&ENDS).trim_start().to_owned();
                ToolCall { name: name.clone(), arguments, id: None }
            }
            _ => return None,
        };
        let id = id.filter(|id| !self.ids.contains(id));
        let arguments = calls::first_value(&arguments).to_owned();
        // Arguments that are not an object may be a string that holds one; otherwise this is not a call.
        (arguments.is_empty() || arguments.starts_with('{')).then_some(ToolCall { name, arguments, id })
    }

    /// Processes the text up to the next tag; returns whether there was one.
    fn step(&mut self, events: &mut Vec<Event>) -> bool {
        match self.state.clone() {
            State::Content => {
                let opens = self.spans().filter_map(|s| Some((self.held.find(s.open)?, s)));
                let found = opens.min_by_key(|(at, _)| *at);
                // Harmony ends its messages with tags of their own.
                let ends: &[&str] = if self.syntax.has_headers() { &ENDS } else { &[] };
                let end = ends.iter().filter_map(|e| Some((self.held.find(e)?, e.len()))).min();
                if let Some((at, len)) = end.filter(|(at, _)| found.is_none_or(|(open, _)| *at < open)) {
                    let text = self.take(at, len);
                    self.emit_text(text, false, events);
                    return true;
                }
                let Some((at, span)) = found else {
                    let tags = self.spans().map(|s| s.open).chain(ends.iter().copied());
                    let text = self.certain(tags);
                    self.emit_text(text, false, events);
                    return false;
                };
                let text = self.take(at, span.open.len());
                self.emit_text(text, false, events);
                self.enter(span);
                true
            }
            State::Addressed => {
                const TO: &str = "to=";
                let header = self.held.trim_start();
                if TO.starts_with(header) {
                    return false;
                }
                let header = header.starts_with(TO);
                self.state = if header { State::In(Kind::Header, &[MESSAGE]) } else { State::Content };
                true
            }
            State::In(Kind::Calls(_, true), closes) if self.held.trim_start().starts_with('[') => {
                let (element, bytes) = calls::element(&self.held);
                match element {
                    calls::Element::Open => return false,
                    calls::Element::Whole(call) => {
                        let text = self.held[..bytes].to_owned();
                        self.held.replace_range(..bytes, "[");
                        self.called(call.map(|call| vec![call]), text, events);
                    }
                    // Text after the list is not part of it.
                    calls::Element::End => {
                        self.held.drain(..bytes);
                        self.state = State::In(Kind::Nothing, closes);
                    }
                }
                true
            }
            State::In(kind, closes) => {
                let found = closes.iter().filter(|c| !c.is_empty());
                let found = found.filter_map(|c| Some((self.held.find(c)?, c.len()))).min();
                let Some((at, len)) = found else {
                    if matches!(kind, Kind::Reasoning) {
                        let text = self.certain(closes.iter().copied());
                        self.emit_text(text, true, events);
                    }
                    return false;
                };
                let next = self.spans().find(|span| self.held[at..].starts_with(span.open));
                let text = self.take(at, len);
                self.state = State::Content;
                if let Some(span) = next {
                    self.enter(span);
                }
                match kind {
                    Kind::Reasoning => {
                        self.emit_text(text, true, events);
                        self.fresh = true;
                    }
                    Kind::Calls(read, _) => self.calls(read, text, events),
                    Kind::Header => self.state = after_header(&text, self.may_call),
                    Kind::Nothing => {}
                }
                true
            }
            State::Arguments(name) => {
                let Some((at, len)) = ENDS.iter().filter_map(|e| Some((self.held.find(e)?, e.len()))).min()
                else {
                    return false;
                };
                let text = self.take(at, len);
                self.state = State::Content;
                events.push(calls::arguments(name, text));
                true
            }
        }
    }

    fn enter(&mut self, span: &'static Span) {
        self.state = match span.kind {
            Kind::Nothing => State::Content,
            kind => State::In(kind, std::slice::from_ref(&span.close)),
        };
        self.fresh = true;
    }

    /// Takes the text before a tag, and drops the tag.
    fn take(&mut self, at: usize, tag: usize) -> String {
        let text = self.held[..at].to_owned();
        self.held.drain(..at + tag);
        text
    }

    /// Takes the text that cannot begin a tag.
    fn certain<'m>(&mut self, tags: impl Iterator<Item = &'m str>) -> String {
        let keep = tags.map(|tag| prefix_at_end(&self.held, tag)).max().unwrap_or(0);
        let certain = self.held.len() - keep;
        self.held.drain(..certain).collect()
    }

    fn emit_text(&mut self, text: String, reasoning: bool, events: &mut Vec<Event>) {
        let text = if self.fresh { text.trim_start_matches('\n').to_owned() } else { text };
        if !text.is_empty() {
            self.fresh = false;
            events.push(if reasoning { Event::Reasoning(text) } else { Event::Content(text) });
        }
    }

    fn calls(&mut self, read: Read, text: String, events: &mut Vec<Event>) {
        self.called(read(text.trim(), &self.tools), text, events);
    }

    /// Emits the calls in a text, or the reason that it is not one.
    fn called(&mut self, calls: Result<Vec<ToolCall>, String>, text: String, events: &mut Vec<Event>) {
        self.fresh = true;
        match calls {
            Ok(calls) => events.extend(calls.into_iter().map(|call| Event::Call(self.once(call)))),
            Err(why) => events.push(Event::Broken { text, why }),
        }
    }

    /// The call, without its id if another call has it already.
    fn once(&mut self, call: ToolCall) -> ToolCall {
        let id = call.id.filter(|id| !self.ids.contains(id));
        self.ids.extend(id.clone());
        ToolCall { id, ..call }
    }
}

impl Syntax {
    fn has_headers(&self) -> bool {
        self.spans.iter().any(|s| matches!(s.kind, Kind::Header))
    }
}

/// State after a header of harmony, such as
/// `assistant<|channel|>commentary to=functions.f <|constrain|>json`.
fn after_header(header: &str, may_call: bool) -> State {
    let words = || {
        header.split([' ', '\n']).flat_map(|w| w.split("<|channel|>")).flat_map(|w| w.split("<|constrain|>"))
    };
    if let Some(name) = words().find_map(|w| w.strip_prefix("to=")).filter(|_| may_call) {
        return State::Arguments(name.strip_prefix("functions.").unwrap_or(name).to_owned());
    }
    if words().any(|w| w == "analysis") { State::In(Kind::Reasoning, &ENDS) } else { State::Content }
}

#[cfg(test)]
mod tests;
