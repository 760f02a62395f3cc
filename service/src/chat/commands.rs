//! Commands of a chat, which begin with `/`.
#![allow(clippy::unnecessary_wraps, reason = "all rows of the table have one type")]

use super::{Conversation, FILE, json_or_text};
use crate::error::{Error, Result};
use crate::template::Message;
use moec_runtime::Sampling;
use moec_runtime::cli::{Failure, Io};
use moec_runtime::platform::regular;
use serde_json::json;
use std::path::Path;

/// Function of a command, which gets its argument.
type Do = fn(&mut Conversation<'_, '_, '_>, &str, &mut Io<'_>) -> Result<(), Failure>;

/// Name, argument, description and function of each command.
const COMMANDS: &[(&str, &str, &str, Do)] = &[
    ("help", "", "this list", help),
    ("reset", "", "start a new conversation with the same system message", reset),
    ("system", "TEXT", "start a new conversation with another system message, or with none", system),
    (
        "regenerate",
        "",
        "answer the last message anew, with the next seed; at temperature 0 the answer is the same",
        regenerate,
    ),
    ("set", "NAME VALUE", "set an option of sampling, or a variable of the template", set),
    ("save", "FILE", "save the conversation to a file, as JSON", save),
    ("load", "FILE", "continue a conversation from a file", load),
    ("quit", "", "quit (also Ctrl-D)", |_, _, _| Ok(())),
];

/// Runs a command, without its `/`.
pub(super) fn run(
    chat: &mut Conversation<'_, '_, '_>,
    command: &str,
    io: &mut Io<'_>,
) -> Result<(), Failure> {
    let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
    match COMMANDS.iter().find(|(known, ..)| *known == name) {
        Some((.., run)) => run(chat, rest.trim(), io),
        None => Err(Error::new(format!("there is no command `/{name}`")).hint("`/help` lists them").into()),
    }
}

fn help(chat: &mut Conversation<'_, '_, '_>, _: &str, io: &mut Io<'_>) -> Result<(), Failure> {
    for (name, takes, what, _) in COMMANDS {
        io.note(&format!("{:20} {what}", format!("/{name} {takes}")));
    }
    io.note(&settable(chat)?);
    Ok(())
}

/// All settings of `/set`, in words.
fn settable(chat: &Conversation<'_, '_, '_>) -> Result<String> {
    let names: Vec<&str> = OPTIONS.iter().map(|(name, _)| *name).collect();
    let variables = match chat.template.variables()? {
        none if none.is_empty() => "none".to_owned(),
        some => some.join(", "),
    };
    Ok(format!("sampling parameters: {}; variables of the chat template: {variables}", names.join(", ")))
}

fn reset(chat: &mut Conversation<'_, '_, '_>, _: &str, _: &mut Io<'_>) -> Result<(), Failure> {
    chat.reset(chat.system());
    Ok(())
}

fn system(chat: &mut Conversation<'_, '_, '_>, text: &str, _: &mut Io<'_>) -> Result<(), Failure> {
    chat.reset(Some(text.to_owned()).filter(|t| !t.is_empty()));
    Ok(())
}

fn regenerate(chat: &mut Conversation<'_, '_, '_>, _: &str, io: &mut Io<'_>) -> Result<(), Failure> {
    let Some(last) = chat.messages.pop_if(|m| m.role == "assistant") else {
        return Err(Error::new("there is no answer yet").hint("send a message first").into());
    };
    let done = chat.answer(io);
    if done.is_err() {
        chat.messages.push(last);
    } else if chat.sampling.temperature <= 0.0 && chat.messages.last() == Some(&last) {
        io.note("note: the answer is the same: at temperature 0 each token is the most probable one; `/set temperature 0.8` samples others");
    }
    done
}

/// Sets a sampling option; returns whether the text is a valid value.
type Set = fn(&mut Sampling, &str) -> bool;

/// Stores a value, if the text is one.
fn put<T: std::str::FromStr>(place: &mut T, text: &str) -> bool {
    text.parse().map(|value| *place = value).is_ok()
}

/// Sampling options of `/set`.
const OPTIONS: &[(&str, Set)] = &[
    ("temperature", |s, v| put(&mut s.temperature, v)),
    ("top_p", |s, v| put(&mut s.top_p, v)),
    ("top_k", |s, v| put(&mut s.top_k, v)),
    ("min_p", |s, v| put(&mut s.min_p, v)),
    ("typical_p", |s, v| put(&mut s.typical_p, v)),
    ("repetition_penalty", |s, v| put(&mut s.repetition_penalty, v)),
    ("presence_penalty", |s, v| put(&mut s.presence_penalty, v)),
    ("frequency_penalty", |s, v| put(&mut s.frequency_penalty, v)),
    ("seed", |s, v| put(&mut s.seed, v)),
];

fn set(chat: &mut Conversation<'_, '_, '_>, text: &str, _: &mut Io<'_>) -> Result<(), Failure> {
    let (name, value) = match text.split_once([' ', '=']) {
        Some((name, value)) => (name, Some(value.trim())),
        None => (text, None),
    };
    let option = OPTIONS.iter().find(|(known, _)| *known == name);
    if option.is_none() && !chat.template.variables()?.iter().any(|known| known == name) {
        let what = if name.is_empty() {
            "`/set` takes a name and a value".to_owned()
        } else {
            format!(
                "`{name}` cannot be set: it is neither a sampling parameter nor a variable of the chat template"
            )
        };
        return Err(Error::new(what).hint(settable(chat)?).into());
    }
    let Some(value) = value else {
        return Err(Error::new(format!("`/set {name}` takes a value"))
            .hint("as in `/set temperature 0.7`")
            .into());
    };
    let Some((_, put)) = option else {
        chat.vars.insert(name.to_owned(), json_or_text(value));
        return Ok(());
    };
    let mut sampling = chat.sampling.clone();
    if !put(&mut sampling, value) {
        return Err(Error::new(format!("`{value}` is not a value of {name}")).into());
    }
    sampling.check()?;
    if name == "seed" {
        chat.seed = sampling.seed;
    }
    chat.sampling = sampling;
    Ok(())
}

fn file(text: &str) -> Result<&Path> {
    if text.is_empty() {
        Err(Error::new("the name of a file is missing").hint("as in `/save talk.json`"))
    } else {
        Ok(Path::new(text))
    }
}

fn save(chat: &mut Conversation<'_, '_, '_>, text: &str, io: &mut Io<'_>) -> Result<(), Failure> {
    let path = file(text)?;
    let whole = format!("{:#}\n", json!({ "messages": chat.messages }));
    std::fs::write(path, whole).map_err(|e| Error::new(format!("cannot write `{}`: {e}", path.display())))?;
    io.note(&format!("wrote {} messages to `{}`", chat.messages.len(), path.display()));
    Ok(())
}

fn load(chat: &mut Conversation<'_, '_, '_>, text: &str, io: &mut Io<'_>) -> Result<(), Failure> {
    #[derive(serde::Deserialize)]
    struct File {
        messages: Vec<Message>,
    }
    let path = file(text)?;
    let failed =
        |why: String| Error::new(format!("cannot read a conversation from `{}`: {why}", path.display()));
    let text = regular::read_text(path, FILE).map_err(|e| failed(e.to_string()))?;
    let file: File = serde_json::from_str(&text).map_err(|e| failed(e.to_string()))?;
    chat.messages = file.messages;
    chat.first = 0;
    io.note(&format!("read {} messages", chat.messages.len()));
    Ok(())
}
