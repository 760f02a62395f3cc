//! Python's view and spelling of values: sequences, `json.dumps` and `str`.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use std::fmt::{self, Write};

/// Maximum nesting that is written.
const MAX_DEPTH: usize = 128;
/// Bytes of output per step of a template.
const STEP: usize = 64;

/// Output of values. It consumes a template's fuel as it grows: values that contain each other many times are
/// small until they are written.
struct Out<'s, 't, 'e> {
    text: String,
    state: &'s State<'t, 'e>,
}

impl Out<'_, '_, '_> {
    /// Output of `write`.
    ///
    /// # Errors
    /// Those of `write`; fuel that runs out.
    fn of(
        state: &State<'_, '_>,
        write: impl FnOnce(&mut Out<'_, '_, '_>) -> Result<(), Error>,
    ) -> Result<String, Error> {
        let mut out = Out { text: String::new(), state };
        let written = write(&mut out);
        // Running out of fuel is the reason for a failed write.
        state.consume_fuel(0)?;
        written.map(|()| out.text)
    }

    /// A value comes, at this depth; `what` is to become of it.
    fn begin(&self, depth: usize, what: &'static str) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, what));
        }
        self.state.consume_fuel(1)
    }
}

impl Write for Out<'_, '_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let before = self.text.len();
        let steps = (before + text.len()) / STEP - before / STEP;
        self.state.consume_fuel(steps as u64).map_err(|_| fmt::Error)?;
        self.text.push_str(text);
        Ok(())
    }
}

/// Style of [`json`].
#[derive(Clone, Debug)]
pub(super) struct Style {
    /// Whether non-ASCII characters become `\uXXXX`.
    pub ensure_ascii: bool,
    /// Indentation of a level; `None`: everything on one line.
    pub indent: Option<String>,
    /// Separators between items, and between a key and its value.
    pub separators: (String, String),
    /// Whether keys are sorted.
    pub sort_keys: bool,
}

/// A value in the format of `json.dumps`.
///
/// # Errors
/// Values that JSON does not have, nesting that is too deep, and fuel that runs out.
pub(super) fn json(state: &State<'_, '_>, value: &Value, style: &Style) -> Result<String, Error> {
    Out::of(state, |out| write_json(value, style, 0, out))
}

fn write_json(value: &Value, style: &Style, depth: usize, out: &mut Out<'_, '_, '_>) -> Result<(), Error> {
    out.begin(depth, "a value is nested too deep for JSON")?;
    let fail = || {
        let what = format!("{} is not JSON serializable", value.kind());
        Err(Error::new(ErrorKind::BadSerialization, what))
    };
    match value.kind() {
        ValueKind::None => out.write_str("null")?,
        ValueKind::Bool => out.write_str(if value.is_true() { "true" } else { "false" })?,
        ValueKind::Number => out.write_str(&number(value)?)?,
        ValueKind::String => quote(value.as_str().unwrap_or_default(), style.ensure_ascii, out)?,
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            between(['[', ']'], items.len(), style, depth, out, |i, out| {
                write_json(&items[i], style, depth + 1, out)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            between(['{', '}'], keys.len(), style, depth, out, |i, out| {
                if let Some(key) = keys[i].as_str() {
                    quote(key, style.ensure_ascii, out)?;
                } else {
                    let key = Out::of(out.state, |out| write_json(&keys[i], style, depth + 1, out))?;
                    quote(&key, style.ensure_ascii, out)?;
                }
                out.write_str(&style.separators.1)?;
                write_json(&value.get_item(&keys[i])?, style, depth + 1, out)
            })?;
        }
        _ => return fail(),
    }
    Ok(())
}

/// Writes items between brackets.
fn between(
    brackets: [char; 2],
    count: usize,
    style: &Style,
    depth: usize,
    out: &mut Out<'_, '_, '_>,
    mut item: impl FnMut(usize, &mut Out<'_, '_, '_>) -> Result<(), Error>,
) -> Result<(), Error> {
    out.write_char(brackets[0])?;
    let line = |depth: usize, out: &mut Out<'_, '_, '_>| match &style.indent {
        Some(indent) => {
            out.write_char('\n')?;
            (0..depth).try_for_each(|_| out.write_str(indent))
        }
        None => Ok(()),
    };
    for i in 0..count {
        if i > 0 {
            out.write_str(&style.separators.0)?;
        }
        line(depth + 1, out)?;
        item(i, out)?;
    }
    if count > 0 {
        line(depth, out)?;
    }
    out.write_char(brackets[1])?;
    Ok(())
}

/// A string in JSON, with the escapes that Python chooses.
fn quote(text: &str, ensure_ascii: bool, out: &mut impl Write) -> fmt::Result {
    out.write_char('"')?;
    for c in text.chars() {
        match c {
            '"' => out.write_str("\\\"")?,
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            '\u{8}' => out.write_str("\\b")?,
            '\u{c}' => out.write_str("\\f")?,
            c if c < ' ' || (ensure_ascii && c > '~') => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(out, "\\u{unit:04x}")?;
                }
            }
            c => out.write_char(c)?,
        }
    }
    out.write_char('"')
}

/// A number as Python's `repr` spells it.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    f64::try_from(value.clone()).map(float)
}

/// A float as Python's `repr` spells it: the shortest digits that give it back, with an exponent below 1e-4
/// and from 1e16 on.
fn float(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity".to_owned() } else { "-Infinity".to_owned() };
    }
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { format!("{plain}.0") }
}

/// Whether Python finds a length and items in a value, as Jinja requires of a sequence: texts and mappings
/// have both.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Map | String | Undefined)
}

/// A value as Python's `str` gives it.
///
/// # Errors
/// Nesting that is too deep, and fuel that runs out.
pub(super) fn text(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        ValueKind::Undefined => Ok(String::new()),
        _ => Out::of(state, |out| write_repr(value, 0, out)),
    }
}

fn write_repr(value: &Value, depth: usize, out: &mut Out<'_, '_, '_>) -> Result<(), Error> {
    out.begin(depth, "a value is nested too deep to be written")?;
    match value.kind() {
        ValueKind::None => out.write_str("None")?,
        ValueKind::Undefined => out.write_str("Undefined")?,
        ValueKind::Bool => out.write_str(if value.is_true() { "True" } else { "False" })?,
        ValueKind::Number => match &*number(value)? {
            "NaN" => out.write_str("nan")?,
            "Infinity" => out.write_str("inf")?,
            "-Infinity" => out.write_str("-inf")?,
            number => out.write_str(number)?,
        },
        ValueKind::String => repr(value.as_str().unwrap_or_default(), out)?,
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.write_char(if tuple { '(' } else { '[' })?;
            for (i, item) in value.try_iter()?.enumerate() {
                out.write_str(if i > 0 { ", " } else { "" })?;
                write_repr(&item, depth + 1, out)?;
            }
            out.write_str(if tuple && value.len() == Some(1) { "," } else { "" })?;
            out.write_char(if tuple { ')' } else { ']' })?;
        }
        ValueKind::Map => {
            out.write_char('{')?;
            for (i, key) in value.try_iter()?.enumerate() {
                out.write_str(if i > 0 { ", " } else { "" })?;
                write_repr(&key, depth + 1, out)?;
                out.write_str(": ")?;
                write_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.write_char('}')?;
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

/// A string as Python's `repr` quotes it.
fn repr(text: &str, out: &mut impl Write) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.write_char(quote)?;
    for c in text.chars() {
        match c {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            c if c == quote => {
                out.write_char('\\')?;
                out.write_char(c)?;
            }
            c if c < ' ' || ('\u{7f}'..='\u{a0}').contains(&c) || c == '\u{ad}' => {
                write!(out, "\\x{:02x}", c as u32)?;
            }
            c => out.write_char(c)?,
        }
    }
    out.write_char(quote)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_formatted_as_python_does() {
        // What `repr` of Python 3 gives.
        for (x, found) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (-2.5e300, "-2.5e+300"),
        ] {
            assert_eq!(float(x), found);
        }
    }

    #[test]
    fn strings_are_quoted_as_python_does() {
        let of = |text: &str| {
            let mut out = String::new();
            repr(text, &mut out).unwrap();
            out
        };
        assert_eq!(of("a'b"), "\"a'b\"");
        assert_eq!(of("a'b\"\n\u{1}é"), "'a\\'b\"\\n\\x01é'");
        let mut out = String::new();
        quote("é😀\u{7f}\u{1}\"", true, &mut out).unwrap();
        assert_eq!(out, "\"\\u00e9\\ud83d\\ude00\\u007f\\u0001\\\"\"");
    }
}
