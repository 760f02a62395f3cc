//! Operators: mnemonic and attributes.

use super::attrs::{Attrs, Value};
use super::cursor::Cursor;
pub(crate) use super::cursor::Parsed;
use crate::op::Op;
use std::fmt;

/// An attribute `key = value`.
pub(crate) trait Attribute: Sized {
    /// Writes it, unless it is the default.
    fn put(&self, key: &str, w: &mut Writer);
    /// Takes it out of those that were read.
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self>;
}

/// The value of an attribute that is a word, with arguments or without: `silu`, `clamped(alpha = 1.702, limit = 7.0)`.
pub(crate) trait Word: Sized {
    /// What is expected, for messages.
    const WHAT: &'static str;
    /// Writes the word and its arguments.
    fn word(&self, w: &mut Writer);
    /// The value of a word, if it is one.
    fn of(word: &str, arguments: &mut Reader<'_, '_>) -> Parsed<Option<Self>>;
}

/// Writes attributes, or a word and its arguments.
#[derive(Default)]
pub(crate) struct Writer {
    word: &'static str,
    list: Vec<String>,
    /// Whether a number of them is NaN.
    nan: bool,
}

impl Writer {
    /// Writes an attribute.
    pub(crate) fn put(&mut self, key: &str, value: &impl Attribute) -> &mut Self {
        value.put(key, self);
        self
    }

    /// Writes the word.
    pub(crate) fn word(&mut self, word: &'static str) {
        self.word = word;
    }

    fn push(&mut self, key: &str, value: impl fmt::Display) {
        self.list.push(format!("{key} = {value}"));
    }
}

/// Attributes that were read, to be taken out by name.
pub(crate) struct Reader<'r, 't> {
    cursor: &'r Cursor<'t>,
    attrs: &'r mut Attrs<'t>,
}

impl Reader<'_, '_> {
    /// Takes an attribute out.
    pub(crate) fn get<T: Attribute>(&mut self, key: &str) -> Parsed<T> {
        T::get(key, self)
    }
}

impl Attribute for f32 {
    fn put(&self, key: &str, w: &mut Writer) {
        w.nan |= self.is_nan();
        w.push(key, format_args!("{self:?}"));
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.float(r.cursor, key)
    }
}

impl Attribute for usize {
    fn put(&self, key: &str, w: &mut Writer) {
        w.push(key, self);
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.int(r.cursor, key)
    }
}

impl Attribute for Option<usize> {
    fn put(&self, key: &str, w: &mut Writer) {
        if let Some(value) = self {
            value.put(key, w);
        }
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.optional_int(r.cursor, key)
    }
}

/// False is the default.
impl Attribute for bool {
    fn put(&self, key: &str, w: &mut Writer) {
        if *self {
            w.push(key, true);
        }
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.flag(r.cursor, key)
    }
}

impl Attribute for Vec<u32> {
    fn put(&self, key: &str, w: &mut Writer) {
        w.push(key, format_args!("{self:?}"));
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.list(r.cursor, key, &format!("a list of {key}"), Value::number)
    }
}

impl<T: Word> Attribute for T {
    fn put(&self, key: &str, w: &mut Writer) {
        let mut of = Writer::default();
        self.word(&mut of);
        let arguments = if of.list.is_empty() { String::new() } else { format!("({})", of.list.join(", ")) };
        w.push(key, format_args!("{}{arguments}", of.word));
        w.nan |= of.nan;
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        let cursor = r.cursor;
        r.attrs.variant(cursor, key, T::WHAT, |word, attrs| T::of(word, &mut Reader { cursor, attrs }))
    }
}

impl<T: Word> Attribute for Option<T> {
    fn put(&self, key: &str, w: &mut Writer) {
        if let Some(value) = self {
            value.put(key, w);
        }
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        let cursor = r.cursor;
        r.attrs
            .optional_variant(cursor, key, T::WHAT, |word, attrs| T::of(word, &mut Reader { cursor, attrs }))
    }
}

/// The attributes of an operator in braces, or nothing if it has none to show.
pub(super) fn attributes(op: &Op) -> String {
    let mut w = Writer::default();
    op.write(&mut w);
    if w.list.is_empty() { String::new() } else { format!(" {{{}}}", w.list.join(", ")) }
}

/// Whether an attribute is NaN, which has no text.
pub(crate) fn has_nan(op: &Op) -> bool {
    let mut w = Writer::default();
    op.write(&mut w);
    w.nan
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name(), attributes(self))
    }
}

/// The operator of this mnemonic, which stands at byte `at`, with the attributes read for it.
pub(super) fn read<'t>(cursor: &Cursor<'t>, name: &str, at: usize, mut attrs: Attrs<'t>) -> Parsed<Op> {
    let op = Op::read(name, &mut Reader { cursor, attrs: &mut attrs })?;
    let op = op.ok_or_else(|| cursor.error_at(at, format!("expected an operator, found `{name}`")))?;
    attrs.finish(cursor)?;
    Ok(op)
}
