//! Parser of `model.toml`: every error gives file, line and key.

use super::value::{Value, ValueError};
use super::{Config, KEYS, Key};
use moec_base::{Error, Result};
use moec_device::nearest;
use moec_runtime::platform::regular;
use std::fmt;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A position in the file, shown as `line:column`.
#[derive(Clone, Copy)]
pub(super) struct Position {
    line: usize,
    column: usize,
}

impl Position {
    /// Returns the position of a byte offset.
    fn of(text: &str, offset: usize) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let last = before.rsplit('\n').next().unwrap_or(before);
        Self { line: before.matches('\n').count() + 1, column: last.chars().count() + 1 }
    }
}

impl fmt::Display for Position {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.line, self.column)
    }
}

/// Parses a text. Also returns the position of `model.source`, for callers that check that folder.
pub(super) fn read(text: &str, path: &Path) -> Result<(Config, Position)> {
    let file = path.display();
    let table = DeTable::parse(text).map_err(|e| {
        let at = Position::of(text, e.span().map_or(0, |s| s.start));
        Error::input(format!("`{file}:{at}`: {}", e.message()))
            .hint("the file is TOML: `key = value` under `[section]`")
    })?;
    let mut config = Config::defaults(path);
    let mut source_at = Position { line: 1, column: 1 };
    for (section, value) in in_order(table.get_ref()) {
        let at = Position::of(text, section.span().start);
        let section = section.get_ref().as_ref();
        if !KEYS.iter().any(|k| k.section == section) {
            return Err(unknown_section(&format!("{file}:{at}"), section));
        }
        let Some(keys) = value.get_ref().as_table() else {
            return Err(Error::input(format!(
                "`{file}:{at}`: `{section}` is {}, expected a section",
                type_name(value.get_ref())
            ))
            .hint(format!("write `[{section}]` on a line of its own and its keys below it")));
        };
        for (name, value) in in_order(keys) {
            let Some(key) = KEYS.iter().find(|k| k.section == section && k.name == name.get_ref().as_ref())
            else {
                let at = Position::of(text, name.span().start);
                return Err(unknown_key(&format!("{file}:{at}"), section, name.get_ref()));
            };
            let at = Position::of(text, value.span().start);
            if key.section == "model" && key.name == "source" {
                source_at = at;
            }
            (key.set)(&mut config, &Value(value.get_ref())).map_err(|wrong| {
                let shown = text.get(value.span()).unwrap_or_default();
                refused(&format!("{file}:{at}"), key, wrong, value.get_ref(), shown)
            })?;
        }
    }
    Ok((config, source_at))
}

/// `file:line:column` of a key's value, for errors that are found later. Only the file if it does not have
/// the key.
pub(super) fn place(path: &Path, section: &str, key: &str) -> String {
    let file = path.display().to_string();
    let Ok(text) = regular::read_text(path, regular::SETTINGS) else { return file };
    let Ok(table) = DeTable::parse(&text) else { return file };
    let keys = table.get_ref().get(section).and_then(|s| s.get_ref().as_table());
    let value = keys.and_then(|keys| keys.get(key));
    value.map_or(file.clone(), |value| format!("{file}:{}", Position::of(&text, value.span().start)))
}

/// Keys and values as written in the file.
fn in_order<'a, 'i>(
    table: &'a DeTable<'i>,
) -> Vec<(&'a Spanned<std::borrow::Cow<'i, str>>, &'a Spanned<DeValue<'i>>)> {
    let mut all: Vec<_> = table.iter().collect();
    all.sort_by_key(|(k, _)| k.span().start);
    all
}

/// Names of the sections of this version, for a hint.
fn sections() -> String {
    let mut names: Vec<_> = KEYS.iter().map(|k| format!("`[{}]`", k.section)).collect();
    names.dedup();
    names.join(", ")
}

fn unknown_section(at: &str, section: &str) -> Error {
    if let Some(key) = KEYS.iter().find(|k| k.name == section) {
        return Error::input(format!("`{at}`: `{section}` is outside of its section"))
            .hint(format!("put it under `[{}]`", key.section));
    }
    let error = Error::input(format!("`{at}`: unknown section `[{section}]`"));
    match nearest(section, KEYS.iter().map(|k| k.section)).first() {
        Some(name) => error.hint(format!("did you mean `[{name}]`?")),
        None => error.hint(format!("the sections are {}", sections())),
    }
}

fn unknown_key(at: &str, section: &str, name: &str) -> Error {
    let error = Error::input(format!("`{at}`: unknown key `{section}.{name}`"));
    if let Some(key) = KEYS.iter().find(|k| k.name == name) {
        return error.hint(format!("`{name}` belongs under `[{}]`", key.section));
    }
    let keys: Vec<_> = KEYS.iter().filter(|k| k.section == section).map(|k| k.name).collect();
    if let Some(near) = nearest(name, keys.iter().copied()).first() {
        return error.hint(format!("did you mean `{near}`?"));
    }
    let keys: Vec<_> = keys.iter().map(|k| format!("`{k}`")).collect();
    error.hint(format!("the keys of `[{section}]` are {}", keys.join(", ")))
}

fn refused(at: &str, key: &Key, wrong: ValueError, value: &DeValue<'_>, shown: &str) -> Error {
    let path = key.path();
    // A long or multi-line value is cut after its first words, which are enough.
    let shown = match shown.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &shown[..end]),
        None => shown.to_owned(),
    };
    let shown = shown.lines().next().unwrap_or_default();
    match wrong {
        ValueError::Type(expected) => {
            Error::input(format!("`{at}`: `{path}` is {}, expected {expected}", type_name(value)))
                .hint(format!("it may be {}; the default is {}", key.range, key.default))
        }
        ValueError::Range => Error::input(format!("`{at}`: `{path}` is `{shown}`, expected {}", key.range))
            .hint(format!("the default is {}", key.default)),
        ValueError::Unsupported => {
            Error::limit(format!("`{at}`: `{path}` is `{shown}`, which this version does not support"))
                .hint(format!("it may be {}", key.range))
        }
    }
}

/// Type of a value, in words.
fn type_name(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}
