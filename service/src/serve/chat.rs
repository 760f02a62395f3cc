//! `/v1/chat/completions`: conversations, by the model's chat template; tools, and answers that are JSON.

use super::Server;
use super::answers::{Answers, Piece};
use super::body::Body;
use super::error::{Answer, ApiError, hint};
use super::fields::{Fields, wrong};
use super::names::{Names, name};
use super::request::Options;
use super::stream::{ResponseFormat, answer};
use crate::grammar::Grammar;
use crate::template::{Prompt, Render, Template};
use crate::tools::{Event, Parser, Syntax, ToolCall, partial_json_call, schema};
use axum::http::StatusCode;
use axum::response::Response;
use moec_runtime::serving::sampler::{LogProbabilities, MAX_TOP_LOGPROBS};
use moec_runtime::{Constraint, Text};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::sync::Arc;

/// Roles of messages. `developer` is OpenAI's newer name of `system`.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];
/// Variables of templates that are top-level fields of requests.
const VARIABLES: [&str; 2] = ["reasoning_effort", "enable_thinking"];

impl Server {
    /// The template of a conversation.
    fn template(&self, tools: bool) -> Answer<Template> {
        let refused = |why: String| ApiError::new(StatusCode::BAD_REQUEST, why).code("no_chat_template");
        match &self.templates {
            Ok(Some(templates)) => Ok(templates.choose(tools)?),
            Ok(None) => {
                Err(refused("this model has no chat template; hint: use `/v1/completions`".to_owned()))
            }
            Err(why) => Err(refused(why.clone())),
        }
    }
}

impl From<crate::Error> for ApiError {
    fn from(e: crate::Error) -> Self {
        let hint = hint(e.hint);
        Self::new(StatusCode::BAD_REQUEST, format!("{}{hint}", e.what))
    }
}

/// Answers a request.
///
/// # Errors
/// Invalid fields, or a prompt that does not fit; a model without a template.
pub(super) async fn complete(server: Arc<Server>, body: Body) -> Answer<Response> {
    let ChatRequest { text, ids, mut options, constraints, format } = read(&server, &body.value).await?;
    options.record = Arc::clone(&body.record);
    drop(body);
    answer(server, text, vec![ids], options, constraints, format).await
}

/// Parsed request.
pub(super) struct ChatRequest {
    text: Arc<Text>,
    pub(super) ids: Vec<u32>,
    pub(super) options: Options,
    constraints: Vec<Box<dyn Constraint>>,
    format: Chat,
}

/// Reads a request.
///
/// # Errors
/// Invalid fields, or a prompt that does not fit; a model without a template.
pub(super) async fn read(server: &Arc<Server>, body: &Value) -> Answer<ChatRequest> {
    let fields = Fields::of(body, "the body")?;
    let text = server.text()?;
    let messages = messages(fields)?;
    let tools = Tools::read(fields)?;
    let template = server.template(tools.shown().is_some())?;
    let mut options = Options::read(fields, server, false)?;
    let most_probable = fields.integer("top_logprobs", 0, MAX_TOP_LOGPROBS)?;
    if fields.boolean("logprobs")? {
        options.sampling.log_probabilities = Some(most_probable.unwrap_or(0));
    } else if most_probable.is_some() {
        let message = "`top_logprobs` requires `logprobs`; hint: set `logprobs` to true";
        return Err(ApiError::bad("top_logprobs", message));
    }
    let forced = tools.forced();
    let grammar = match &forced {
        Some(schema) => Some(Grammar::Schema(schema.clone())),
        None => response_format(fields)?,
    };
    // With a grammar, the output is text from its first token on, independent of the prompt.
    let syntax = if grammar.is_some() { Syntax::text_alone() } else { Syntax::of(template.source()) };
    // An invalid grammar is refused before the engine gets the request.
    let constraints = match grammar {
        Some(grammar) => server.constraints.make(grammar, options.n).await?,
        None => Vec::new(),
    };
    let more = variables(fields)?;
    let shown = tools.shown().cloned();
    let encoder = Arc::clone(&text);
    let rendered = server.on_core(move || {
        template.prompt(
            &encoder,
            &Render {
                messages: &messages,
                tools: shown.as_deref(),
                add_generation_prompt: true,
                more: Some(&more),
                ..Render::default()
            },
        )
    });
    let Prompt { ids, text: rendered } = rendered.await??;
    let parser = tools.parser(syntax, &rendered);
    options.special = !parser.is_text_alone();
    let choices = (0..options.n).map(|_| Choice { parser: Some(parser.clone()), ..Choice::default() });
    let format = Chat {
        id: server.name("chatcmpl"),
        created: super::now(),
        model: server.model.clone(),
        seed: options.sampling.seed,
        forced: forced.is_some(),
        parallel: tools.parallel,
        choices: choices.collect(),
    };
    Ok(ChatRequest { text, ids, options, constraints, format })
}

/// Messages in the form of templates: texts joined, arguments of calls as objects.
fn messages(fields: Fields<'_>) -> Answer<Vec<Value>> {
    let missing = || ApiError::bad("messages", "`messages` must be an array of messages, at least one");
    let list = fields.array("messages")?.filter(|m| !m.is_empty()).ok_or_else(missing)?;
    list.iter().enumerate().map(|(i, m)| message(m, &format!("messages[{i}]"))).collect()
}

fn message(value: &Value, at: &str) -> Answer<Value> {
    let fields = Fields::of(value, at)?;
    let mut out = value.clone();
    match fields.string("role").map_err(|e| e.at(at))? {
        None => return Err(ApiError::bad(at, format!("`{at}` has no `role`"))),
        Some("developer") => out["role"] = json!("system"),
        Some(role) if ROLES.contains(&role) => {}
        Some(role) => {
            let message = format!(
                "`{at}.role` is `{}`; hint: it may be {}",
                role.chars().take(40).collect::<String>(),
                ROLES.map(|role| format!("`{role}`")).join(", ")
            );
            return Err(ApiError::bad(&format!("{at}.role"), message).code("unknown_role"));
        }
    }
    match fields.get("content") {
        None => {
            out["content"] = json!("");
        }
        Some(Value::String(_)) => {}
        Some(Value::Array(parts)) => {
            let mut text = String::new();
            for part in parts {
                let piece = (part["type"] == "text").then(|| part["text"].as_str()).flatten();
                let refused = || {
                    let message = format!(
                        "`{at}.content` has a part that is not text; hint: this model reads only text"
                    );
                    ApiError::bad(at, message).code("unsupported_content")
                };
                text += piece.ok_or_else(refused)?;
            }
            out["content"] = json!(text);
        }
        Some(other) => return Err(wrong(&format!("{at}.content"), "a string or an array of parts", other)),
    }
    if let Some(calls) = fields.array("tool_calls").map_err(|e| e.at(at))? {
        let calls = calls.iter().enumerate();
        let calls = calls.map(|(i, call)| called(call, &format!("{at}.tool_calls[{i}]")));
        out["tool_calls"] = calls.collect::<Answer<_>>()?;
    } else if let Some(object) = out.as_object_mut() {
        object.shift_remove("tool_calls");
    }
    Ok(out)
}

/// A call in a message, with its arguments parsed.
fn called(value: &Value, at: &str) -> Answer<Value> {
    let function = Fields::of(value, at)?.object("function").map_err(|e| e.at(at))?;
    let arguments = function.and_then(|f| f.get("arguments")?.as_str());
    let parsed = arguments.and_then(|a| serde_json::from_str::<Value>(a).ok());
    let mut out = value.clone();
    if let (Some(parsed), Some(arguments)) = (parsed, out.pointer_mut("/function/arguments")) {
        *arguments = parsed;
    }
    Ok(out)
}

/// Variables for the template.
fn variables(fields: Fields<'_>) -> Answer<Map<String, Value>> {
    let mut more = Map::new();
    if let Some(given) = fields.object("chat_template_kwargs")? {
        more.extend(given.entries().map(|(k, v)| (k.clone(), v.clone())));
    }
    more.extend(VARIABLES.iter().filter_map(|&name| Some((name.to_owned(), fields.get(name)?.clone()))));
    Ok(more)
}

/// Tools that the model may call.
struct Tools {
    all: Arc<[Value]>,
    choice: ToolChoice,
    /// Whether an answer may have several calls.
    parallel: bool,
}

/// Kind of tool choice.
enum ToolChoice {
    None,
    Auto,
    Required,
    Named(String),
}

impl Tools {
    fn read(fields: Fields<'_>) -> Answer<Self> {
        let all: Arc<[Value]> = fields.array("tools")?.map_or(&[][..], Vec::as_slice).into();
        for (i, tool) in all.iter().enumerate() {
            let name = tool["function"]["name"].as_str().filter(|n| !n.is_empty());
            if tool["type"] != "function" || name.is_none() {
                let message =
                    format!("`tools[{i}]` must have `type` \"function\", and a `function` with a `name`");
                return Err(ApiError::bad("tools", message));
            }
            if schema::of_arguments(&tool["function"]["parameters"], "").is_none() {
                let message = format!(
                    "`tools[{i}].function.parameters` must be the JSON schema of an object; hint: arguments have names, so give its `properties`"
                );
                return Err(ApiError::bad("tools", message));
            }
        }
        let bad = |value| wrong("tool_choice", "\"none\", \"auto\", \"required\" or a function", value);
        let choice = match fields.get("tool_choice") {
            None => ToolChoice::Auto,
            Some(value) => match value.as_str() {
                Some("none") => ToolChoice::None,
                Some("auto") => ToolChoice::Auto,
                Some("required") => ToolChoice::Required,
                Some(_) => return Err(bad(value)),
                None => {
                    let name = value["function"]["name"].as_str().ok_or_else(|| bad(value))?;
                    if all.iter().all(|t| t["function"]["name"] != name) {
                        return Err(ApiError::bad(
                            "tool_choice",
                            format!("`tools` has no function `{name}`"),
                        ));
                    }
                    ToolChoice::Named(name.to_owned())
                }
            },
        };
        if matches!(choice, ToolChoice::Required) && all.is_empty() {
            return Err(ApiError::bad(
                "tool_choice",
                "`tool_choice` is \"required\", but there are no `tools`",
            ));
        }
        let parallel =
            fields.get("parallel_tool_calls").is_none() || fields.boolean("parallel_tool_calls")?;
        Ok(Self { all, choice, parallel })
    }

    /// Tools that the template gets.
    fn shown(&self) -> Option<&Arc<[Value]>> {
        (!self.all.is_empty() && !matches!(self.choice, ToolChoice::None)).then_some(&self.all)
    }

    /// Parser of an answer after a prompt. If calls are not allowed, text that looks like a call is text.
    fn parser(&self, syntax: &'static Syntax, prompt: &str) -> Parser {
        let parser = Parser::new(syntax, prompt);
        match self.shown() {
            Some(tools) => parser.with_tools(Arc::clone(tools)),
            None => parser.without_calls(),
        }
    }

    /// The schema of a required call: an object with `name` and `arguments`.
    fn forced(&self) -> Option<Value> {
        let is_offered = |tool: &&Value| match &self.choice {
            ToolChoice::Named(name) => tool["function"]["name"] == **name,
            _ => true,
        };
        if matches!(self.choice, ToolChoice::None | ToolChoice::Auto) {
            return None;
        }
        let call = |(i, tool): (usize, &Value)| {
            let function = &tool["function"];
            let place = format!("/anyOf/{i}/properties/arguments");
            let arguments = schema::of_arguments(&function["parameters"], &place);
            json!({
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = self.all.iter().filter(is_offered).enumerate().map(call).collect();
        Some(json!({"anyOf": calls}))
    }
}

/// Grammar of the answer, if any.
fn response_format(fields: Fields<'_>) -> Answer<Option<Grammar>> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    match format.string("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Grammar::Schema(json!({"type": "object"})))),
        Some("json_schema") => {
            let schema = format.object("json_schema")?.and_then(|s| s.get("schema"));
            let missing =
                || ApiError::bad("response_format", "`response_format.json_schema` has no `schema`");
            Ok(Some(Grammar::Schema(schema.ok_or_else(missing)?.clone())))
        }
        _ => Err(ApiError::bad(
            "response_format",
            "`response_format.type` must be \"text\", \"json_object\" or \"json_schema\"",
        )),
    }
}

/// One answer.
#[derive(Default)]
struct Choice {
    parser: Option<Parser>,
    calls: usize,
    /// Text of a required call.
    forced: String,
    /// Part of the next call's arguments that was already sent, once the call has begun.
    sent_arguments: Option<String>,
}

/// Addition of a piece to an answer.
#[derive(Default)]
struct Delta {
    content: String,
    reasoning: String,
    calls: Vec<CallDelta>,
}

/// Addition of a piece to a call.
struct CallDelta {
    index: usize,
    /// Id and name, if the call begins here.
    begins: Option<(String, String)>,
    arguments: String,
}

impl Delta {
    /// Calls in the form of an event's message or of a whole message.
    fn calls(self) -> Value {
        let of = |call: CallDelta| {
            let Some((id, name)) = call.begins else {
                return json!({"index": call.index, "function": {"arguments": call.arguments}});
            };
            let function = json!({"name": name, "arguments": call.arguments});
            json!({"index": call.index, "id": id, "type": "function", "function": function})
        };
        self.calls.into_iter().map(of).collect()
    }

    /// Appends what follows.
    fn append(&mut self, more: Self) {
        self.content += &more.content;
        self.reasoning += &more.reasoning;
        for call in more.calls {
            match self.calls.last_mut().filter(|last| last.index == call.index) {
                Some(last) => last.arguments += &call.arguments,
                None => self.calls.push(call),
            }
        }
    }
}

/// Format of its responses.
pub(super) struct Chat {
    id: String,
    created: u64,
    model: String,
    seed: u64,
    forced: bool,
    parallel: bool,
    choices: Vec<Choice>,
}

impl Chat {
    fn object(&self, kind: &str, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": kind, "created": self.created, "model": self.model, "seed": self.seed, "choices": choices})
    }

    /// Addition of a piece, and the finish reason if it is the last.
    fn delta(&mut self, piece: &Piece) -> (Delta, Option<&'static str>) {
        let mut delta = Delta::default();
        let Some(choice) = self.choices.get_mut(piece.choice) else { return (delta, piece.finish) };
        let most = if self.parallel { usize::MAX } else { 1 };
        let mut events = Vec::new();
        if self.forced {
            choice.forced += &piece.text;
            if piece.finish.is_some() {
                events.extend(partial_json_call(&choice.forced).map(Event::Call));
            }
        } else {
            if let Some(parser) = &mut choice.parser {
                events = parser.push(&piece.text);
            }
            if let Some(parser) = choice.parser.take_if(|_| piece.finish.is_some()) {
                let truncated = piece.finish == Some("length");
                events.extend(if truncated { parser.finish_truncated() } else { parser.finish() });
            }
        }
        for event in events {
            match event {
                // Calls beyond the maximum are left out.
                _ if choice.calls == most => {}
                Event::Reasoning(text) => delta.reasoning += &text,
                Event::Call(call) => {
                    choice.goes_on(call, (&self.id, piece.choice), &mut delta);
                    choice.calls += 1;
                    choice.sent_arguments = None;
                }
                // The part that was already sent counts as a call.
                Event::Broken { .. } if choice.sent_arguments.take().is_some() => choice.calls += 1,
                Event::Content(text) | Event::Broken { text, .. } => delta.content += &text,
            }
        }
        let partial = match &choice.parser {
            _ if choice.calls == most || piece.finish.is_some() => None,
            _ if self.forced => partial_json_call(&choice.forced),
            parser => parser.as_ref().and_then(Parser::partial_call),
        };
        if let Some(call) = partial {
            choice.goes_on(call, (&self.id, piece.choice), &mut delta);
        }
        let finish = match piece.finish {
            Some("stop") if choice.calls > 0 => Some("tool_calls"),
            None if choice.calls == most => Some("tool_calls"),
            other => other,
        };
        (delta, finish)
    }
}

impl Choice {
    /// Gives away what is new of the next call. `answer`: the id of the answer and the choice, which name the
    /// call.
    fn goes_on(&mut self, call: ToolCall, (id, choice): (&str, usize), delta: &mut Delta) {
        let ToolCall { name, mut arguments, id: own } = call;
        let begins = match &self.sent_arguments {
            // Arguments are sent in order.
            Some(given) => {
                arguments = arguments.strip_prefix(&**given).map(str::to_owned).unwrap_or_default();
                None
            }
            None => Some((own.unwrap_or_else(|| call_id(id, choice, self.calls)), name)),
        };
        if begins.is_some() || !arguments.is_empty() {
            *self.sent_arguments.get_or_insert_default() += &arguments;
            delta.calls.push(CallDelta { index: self.calls, begins, arguments });
        }
    }
}

/// An id for a call without one from the model: nine letters and digits. Mistral's templates accept nothing
/// else, and other templates accept it, too.
fn call_id(answer: &str, choice: usize, index: usize) -> String {
    const SIGNS: &[u8; 36] = b"abcdefghijklmnopqrstuvwxyz0123456789";
    let hash = Sha256::digest(format!("{answer} {choice} {index}"));
    hash.iter().take(9).map(|&byte| char::from(SIGNS[usize::from(byte) % SIGNS.len()])).collect()
}

impl ResponseFormat for Chat {
    fn first(&mut self, choice: usize) -> Option<Value> {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": choice, "delta": delta, "logprobs": null, "finish_reason": null});
        Some(self.object("chat.completion.chunk", vec![choice]))
    }

    fn piece(&mut self, piece: &Piece, names: &Names) -> Option<Value> {
        let (delta, finish) = self.delta(piece);
        let is_empty = delta.content.is_empty() && delta.reasoning.is_empty() && delta.calls.is_empty();
        if is_empty && finish.is_none() && piece.log_probabilities.is_none() {
            return None;
        }
        let mut object = json!({});
        if !delta.content.is_empty() {
            object["content"] = json!(delta.content);
        }
        if !delta.reasoning.is_empty() {
            object["reasoning_content"] = json!(delta.reasoning);
        }
        if !delta.calls.is_empty() {
            object["tool_calls"] = delta.calls();
        }
        let content = piece.log_probabilities.as_ref().map(|l| json!({"content": [of_token(l, names)]}));
        let choice =
            json!({"index": piece.choice, "delta": object, "logprobs": content, "finish_reason": finish});
        Some(self.object("chat.completion.chunk", vec![choice]))
    }

    fn is_over(&self, choice: usize) -> bool {
        !self.parallel && self.choices.get(choice).is_some_and(|choice| choice.calls > 0)
    }

    fn whole(&mut self, pieces: Vec<Vec<Piece>>, answers: &Answers<'_>, names: &Names) -> Value {
        let mut choices = Vec::new();
        for (index, pieces) in pieces.into_iter().enumerate() {
            let (mut all, mut finish, mut tokens) = (Delta::default(), None, Vec::new());
            for piece in &pieces {
                let (delta, why) = self.delta(piece);
                all.append(delta);
                finish = finish.or(why);
                tokens.extend(piece.log_probabilities.as_ref().map(|l| of_token(l, names)));
            }
            let only_calls = all.content.is_empty() && !all.calls.is_empty();
            let content = if only_calls { Value::Null } else { json!(all.content) };
            let mut message = json!({"role": "assistant", "content": content, "refusal": null});
            if !all.reasoning.is_empty() {
                message["reasoning_content"] = json!(all.reasoning);
            }
            if !all.calls.is_empty() {
                let mut calls = all.calls();
                for call in calls.as_array_mut().into_iter().flatten() {
                    call.as_object_mut().map(|c| c.shift_remove("index"));
                }
                message["tool_calls"] = calls;
            }
            let logprobs = if tokens.is_empty() { Value::Null } else { json!({"content": tokens}) };
            choices.push(
                json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish}),
            );
        }
        let mut object = self.object("chat.completion", choices);
        object["usage"] = answers.usage.json();
        object
    }

    fn last(&mut self, answers: &Answers<'_>) -> Value {
        let mut object = self.object("chat.completion.chunk", Vec::new());
        object["usage"] = answers.usage.json();
        object
    }
}

/// Log-probabilities of a token.
fn of_token(l: &LogProbabilities, names: &Names) -> Value {
    let one = |id: u32, p: f64| {
        let bytes = names.bytes(id);
        json!({"token": name(&bytes), "logprob": p, "bytes": bytes})
    };
    let mut object = one(l.id, l.chosen);
    object["top_logprobs"] = l.most_probable.iter().map(|&(id, p)| one(id, p)).collect();
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tool_calls_are_parsed_only_if_tools_are_offered() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        for (body, calls) in [
            (json!({"tools": [tool]}), true),
            (json!({"tools": [tool], "tool_choice": "auto"}), true),
            (json!({"tools": [tool], "tool_choice": "none"}), false),
            (json!({"tools": []}), false),
            (json!({}), false),
        ] {
            let tools = Tools::read(Fields::of(&body, "the body").unwrap()).unwrap();
            let parser = tools.parser(Syntax::of("<tool_call>"), "<think>");
            let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
            let choices = vec![Choice { parser: Some(parser), ..Choice::default() }];
            let (id, model) = (String::new(), String::new());
            let mut chat = Chat { id, created: 0, model, seed: 0, forced: false, parallel: true, choices };
            let piece = Piece { text: format!("hm</think>{call}"), finish: Some("stop"), ..Piece::default() };
            let (delta, finish) = chat.delta(&piece);
            assert_eq!((&*delta.reasoning, &*delta.content), ("hm", if calls { "" } else { call }), "{body}");
            assert_eq!(delta.calls.len(), usize::from(calls), "{body}");
            assert_eq!(finish, Some(if calls { "tool_calls" } else { "stop" }), "{body}");
        }
    }

    #[test]
    fn developer_role_is_read_as_system() {
        for (role, expected) in [("developer", Some("system")), ("tool", Some("tool")), ("robot", None)] {
            let read = message(&json!({"role": role, "content": "a"}), "messages[0]");
            assert_eq!(read.ok().as_ref().and_then(|m| m["role"].as_str()), expected);
        }
        let unknown = message(&json!({"role": "robot", "content": "a"}), "messages[0]").unwrap_err();
        assert!(unknown.message.contains("it may be `system`, `developer`, `user`"), "{}", unknown.message);
    }

    /// Two calls, letter by letter: the first piece of each has its name, and the others its arguments. If
    /// only one call is allowed, the answer ends with it.
    #[test]
    fn tool_calls_are_streamed_in_pieces() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        for (parallel, most) in [(json!(null), 2), (json!(true), 2), (json!(false), 1)] {
            let body = json!({"tools": [tool], "parallel_tool_calls": parallel});
            let tools = Tools::read(Fields::of(&body, "the body").unwrap()).unwrap();
            let parser = tools.parser(Syntax::of("<tool_call>"), "");
            let choices = vec![Choice { parser: Some(parser), ..Choice::default() }];
            let (id, model) = (String::new(), String::new());
            let mut chat =
                Chat { id, created: 0, model, seed: 0, forced: false, parallel: tools.parallel, choices };
            let call = r#"<tool_call>{"name": "f", "arguments": {"a": [1, 2]}}</tool_call>"#;
            let (mut all, mut pieces, mut ended) = (Delta::default(), 0, None);
            for c in format!("{call}{call}").chars() {
                let (delta, finish) = chat.delta(&Piece { text: c.to_string(), ..Piece::default() });
                assert!(delta.calls.iter().all(|c| c.begins.is_some() || !c.arguments.is_empty()));
                pieces += delta.calls.len();
                all.append(delta);
                ended = ended.or(finish);
            }
            assert_eq!((all.calls.len(), &*all.content), (most, ""), "{parallel}");
            assert!(all.calls.iter().all(|c| c.arguments == r#"{"a": [1, 2]}"#) && pieces > 8 * most);
            assert_eq!(ended, (most == 1).then_some("tool_calls"));
            assert_eq!(chat.is_over(0), most == 1);
        }
    }
}
