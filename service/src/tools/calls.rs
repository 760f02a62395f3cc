//! Formats of calls by model family.

use super::{Event, Read, ToolCall, schema};
use serde_json::{Map, Value};

/// `{"name": …, "arguments": {…}}` (Qwen).
pub(super) fn json(text: &str, _: &[Value]) -> Result<Vec<ToolCall>, String> {
    Ok(vec![as_written(text, call(&parse(text)?)?)])
}

/// `name[ARGS]{…}`, or `name[CALL_ID]id[ARGS]{…}` (Mistral). Elements of its lists of calls are parsed as
/// they arrive ([`element`]): a list that is left here has no end.
pub(super) fn named(text: &str, _: &[Value]) -> Result<Vec<ToolCall>, String> {
    if text.starts_with('[') {
        return Err("the list of calls is not valid JSON, or has no end".to_owned());
    }
    let (head, arguments) =
        text.split_once("[ARGS]").ok_or("the calls are not a list, and a call has no `[ARGS]`")?;
    let (name, id) = named_head(head);
    Ok(vec![ToolCall { name: name.to_owned(), arguments: object(arguments)?, id }])
}

/// Name and id of a call before its `[ARGS]`.
fn named_head(head: &str) -> (&str, Option<String>) {
    let (name, id) = head.split_once("[CALL_ID]").unwrap_or((head, ""));
    (name.trim(), of_nine(id.trim()))
}

/// First part of the rest of a list of calls (Mistral's earlier form), after its `[`.
pub(super) enum Element {
    /// No complete element.
    Open,
    /// An element: the call, or the reason that it is not one.
    Whole(Result<ToolCall, String>),
    /// The end of the list.
    End,
}

/// The first element of such a list, and its number of bytes, including the `[` or `,` before it.
pub(super) fn element(list: &str) -> (Element, usize) {
    let first = first_of(list);
    let before = list.len() - first.len();
    if first.starts_with(']') {
        return (Element::End, before + 1);
    }
    let mut values = serde_json::Deserializer::from_str(first).into_iter::<Value>();
    let Some(Ok(value)) = values.next() else { return (Element::Open, 0) };
    let text = &first[..values.byte_offset()];
    let id = value.get("id").and_then(Value::as_str).and_then(of_nine);
    let call = call(&value).map(|call| ToolCall { id, ..as_written(text, call) });
    (Element::Whole(call), before + text.len())
}

/// Text after the `[` of a list, or after the comma if an element was taken.
fn first_of(list: &str) -> &str {
    let inside = list.trim_start();
    let inside = inside.strip_prefix('[').unwrap_or(inside).trim_start();
    inside.strip_prefix(',').unwrap_or(inside).trim_start()
}

/// An id of nine letters and digits: Mistral's templates accept no other.
fn of_nine(id: &str) -> Option<String> {
    (id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric())).then(|| id.to_owned())
}

/// `NAME<｜tool▁sep｜>{…}` (DeepSeek-V3.1), or `function<｜tool▁sep｜>NAME` and a fence of JSON (DeepSeek-V3).
pub(super) fn separated(text: &str, _: &[Value]) -> Result<Vec<ToolCall>, String> {
    let (first, rest) = text.split_once("<｜tool▁sep｜>").ok_or("the call has no `<｜tool▁sep｜>`")?;
    let (name, arguments) = match rest.split_once("```json") {
        Some((name, fenced)) => (name, fenced.trim_end().strip_suffix("```").unwrap_or(fenced)),
        None => (first, rest),
    };
    with(name, object(arguments)?)
}

/// `NAME`, and `<arg_key>…</arg_key><arg_value>…</arg_value>` for each argument (GLM-4.5). A value is read as
/// JSON if it is valid JSON and the tool's schema does not require a text; else it is a text.
pub(super) fn keys_and_values(text: &str, tools: &[Value]) -> Result<Vec<ToolCall>, String> {
    let (name, mut rest) = text.split_at(text.find("<arg_key>").unwrap_or(text.len()));
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (key, after) = inside(rest.trim_start(), "<arg_key>", "</arg_key>")?;
        let (value, after) = inside(after.trim_start(), "<arg_value>", "</arg_value>")?;
        let key = key.trim();
        arguments.insert(key.to_owned(), typed(tools, name, key, value, json_or_text));
        rest = after;
    }
    with(name, Value::Object(arguments).to_string())
}

/// `<function=NAME>`, and `<parameter=KEY>`, a line with the value, `</parameter>` for each argument
/// (Qwen3-Coder). The template writes values as Python does: a value is read as JSON or as one of Python's
/// names. Any other value is a text, and so is every value for which the tool's schema requires a text.
pub(super) fn tagged(text: &str, tools: &[Value]) -> Result<Vec<ToolCall>, String> {
    let (function, after) = inside(text.trim(), "<function=", "</function>")?;
    if !after.trim().is_empty() {
        return Err("something follows `</function>`".to_owned());
    }
    let (name, mut rest) = function.split_once('>').ok_or("`<function=` has no end")?;
    let mut arguments = Map::new();
    while !rest.trim().is_empty() {
        let (parameter, after) = inside(rest.trim_start(), "<parameter=", "</parameter>")?;
        let (key, value) = parameter.split_once('>').ok_or("`<parameter=` has no end")?;
        let value = value.strip_prefix('\n').unwrap_or(value);
        let (key, value) = (key.trim(), value.strip_suffix('\n').unwrap_or(value));
        arguments.insert(key.to_owned(), typed(tools, name, key, value, python));
        rest = after;
    }
    with(name, Value::Object(arguments).to_string())
}

/// An argument: its text if the tool's schema accepts only texts, else the result of `read`.
fn typed(tools: &[Value], name: &str, key: &str, text: &str, read: fn(&str) -> Value) -> Value {
    let function = tools.iter().map(|tool| &tool["function"]).find(|f| f["name"] == *name.trim());
    let schema = function.map(|f| &f["parameters"]["properties"][key]);
    if schema.is_some_and(|s| schema::takes_text(s, text)) { Value::from(text) } else { read(text) }
}

fn json_or_text(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::from(text))
}

/// A value in the format of Python's `str`; a text is unchanged.
fn python(value: &str) -> Value {
    match value {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        _ => json_or_text(value),
    }
}

/// `functions.NAME:N<|tool_call_argument_begin|>{…}`, the N-th call of a conversation (Kimi-K2). The text
/// before the tag is the id, if it has this form.
pub(super) fn numbered(text: &str, _: &[Value]) -> Result<Vec<ToolCall>, String> {
    let (head, arguments) =
        text.split_once(KIMI_TAG).ok_or_else(|| format!("the call has no `{KIMI_TAG}`"))?;
    let calls = with(numbered_name(head).0, object(arguments)?)?;
    Ok(calls.into_iter().map(|call| ToolCall { id: numbered_name(head).1, ..call }).collect())
}

/// Tag before the arguments of Kimi-K2.
const KIMI_TAG: &str = "<|tool_call_argument_begin|>";

/// The name of a function before [`KIMI_TAG`], and the id.
fn numbered_name(head: &str) -> (&str, Option<String>) {
    let head = head.trim();
    let (of, number) = head.rsplit_once(':').unwrap_or((head, ""));
    let name = of.strip_prefix("functions.");
    let counts = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
    (name.unwrap_or(of), (name.is_some() && counts).then(|| head.to_owned()))
}

/// One call of the function with this name.
fn with(name: &str, arguments: String) -> Result<Vec<ToolCall>, String> {
    match name.trim() {
        "" => Err("the call has no name".to_owned()),
        name => Ok(vec![ToolCall { name: name.to_owned(), arguments, id: None }]),
    }
}

/// Text between two tags at the beginning, and what follows.
fn inside<'t>(text: &'t str, open: &str, close: &str) -> Result<(&'t str, &'t str), String> {
    let missing = |tag: &str| format!("`{tag}` is missing");
    let rest = text.strip_prefix(open).ok_or_else(|| missing(open))?;
    rest.split_once(close).ok_or_else(|| missing(close))
}

/// The call event of a message to a function (gpt-oss).
pub(super) fn arguments(name: String, text: String) -> Event {
    match object(&text) {
        Ok(arguments) => Event::Call(ToolCall { name, arguments, id: None }),
        Err(why) => Event::Broken { text, why },
    }
}

/// The unfinished call at the start of a text, once its name is known, with its arguments so far. They are a
/// prefix of JSON, or, for families with keys and values, an object without its end.
pub(super) fn partial_call(text: &str, read: Read, tools: &[Value]) -> Option<ToolCall> {
    let text = text.trim();
    if text.starts_with(['{', '[']) {
        return partial_json_call(first_of(text));
    }
    let of = |name: &str, arguments: &str| ToolCall {
        name: name.trim().to_owned(),
        arguments: arguments.trim_start().to_owned(),
        id: None,
    };
    if let Some((head, arguments)) = text.split_once("[ARGS]") {
        let (name, id) = named_head(head);
        return Some(ToolCall { id, ..of(name, arguments) });
    }
    if let Some((name, rest)) = text.split_once("<｜tool▁sep｜>") {
        return match rest.split_once("```json") {
            Some((name, arguments)) => Some(of(name, arguments)),
            None if name.trim() == "function" => None,
            None => Some(of(name, rest)),
        };
    }
    if let Some((head, arguments)) = text.split_once(KIMI_TAG) {
        let (name, id) = numbered_name(head);
        return Some(ToolCall { id, ..of(name, arguments) });
    }
    let syntaxes = [("<arg_key>", "</arg_value>", ""), ("<parameter=", "</parameter>", "</function>")];
    syntaxes.into_iter().find_map(|(begin, end, close)| {
        let whole = text.rfind(end).map(|at| at + end.len()).or_else(|| text.find(begin))?;
        let mut call = read(&format!("{}{close}", &text[..whole]), tools).ok()?.pop()?;
        call.arguments.pop();
        Some(call)
    })
}

/// The complete or unfinished call in JSON with `name` and then `arguments`.
pub(crate) fn partial_json_call(text: &str) -> Option<ToolCall> {
    match serde_json::from_str(text) {
        Ok(value) => call(&value).ok().map(|call| as_written(text, call)),
        Err(_) => first_written(text),
    }
}

/// A call with its arguments as written in the text, if they are an object after the name.
fn as_written(text: &str, call: ToolCall) -> ToolCall {
    let written = first_written(text).filter(|w| w.name == call.name && w.arguments.starts_with('{'));
    written.map_or(call.clone(), |written| ToolCall { arguments: written.arguments, ..call })
}

/// The call in JSON that begins with `name`, followed by `arguments`, with its arguments so far.
fn first_written(text: &str) -> Option<ToolCall> {
    let rest = after_words(text, &["{", "\"name\"", ":"])?;
    let mut names = serde_json::Deserializer::from_str(rest).into_iter::<String>();
    let name = names.next()?.ok()?;
    let arguments =
        after_words(&rest[names.byte_offset()..], &[",", "\"arguments\"", ":"]).unwrap_or_default();
    Some(ToolCall { name, arguments: first_value(arguments.trim_start()).to_owned(), id: None })
}

/// The first JSON value of a text, or all of the text if the value has no end yet.
pub(super) fn first_value(text: &str) -> &str {
    let mut values = serde_json::Deserializer::from_str(text).into_iter::<serde::de::IgnoredAny>();
    match values.next() {
        Some(Ok(_)) => &text[..values.byte_offset()],
        _ => text,
    }
}

/// Text after these words, which may be surrounded by white space.
fn after_words<'t>(text: &'t str, words: &[&str]) -> Option<&'t str> {
    words.iter().try_fold(text, |text, word| text.trim_start().strip_prefix(word))
}

fn parse(text: &str) -> Result<Value, String> {
    serde_json::from_str(text.trim()).map_err(|e| e.to_string())
}

/// A JSON object, as written.
fn object(text: &str) -> Result<String, String> {
    match parse(text)? {
        Value::Object(_) => Ok(text.trim().to_owned()),
        _ => Err("the arguments are not a JSON object".to_owned()),
    }
}

/// The call of an object with name and arguments; the arguments may be a text.
fn call(value: &Value) -> Result<ToolCall, String> {
    let name = value.get("name").and_then(Value::as_str).ok_or("the call has no name")?;
    let arguments = match value.get("arguments").or_else(|| value.get("parameters")) {
        None => "{}".to_owned(),
        Some(Value::String(text)) => object(text)?,
        Some(object @ Value::Object(_)) => object.to_string(),
        Some(_) => return Err("the arguments are not a JSON object".to_owned()),
    };
    Ok(ToolCall { name: name.to_owned(), arguments, id: None })
}
