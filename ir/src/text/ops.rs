//! Operators: mnemonic and attributes.

use super::attrs::{Attrs, Value};
use super::cursor::Cursor;
pub(crate) use super::cursor::Parsed;
use super::items::{string, with_attrs};
use super::lex::quote;
use crate::op::{Attributes, Op};
use std::fmt;

/// An attribute `key = value`.
pub(crate) trait Attribute: Sized {
    /// Writes it, unless it is the default.
    fn put(&self, key: &str, w: &mut Writer);
    /// Takes it out of those that were read.
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self>;
}

/// The value of an attribute that is a word, with arguments or without: `silu`, `clamped(alpha = 1.702, limit
/// = 7.0)`.
pub(crate) trait Word: Sized {
    /// Name of the expected value, for messages.
    const EXPECTED: &'static str;
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

/// A value in a list.
pub(super) trait Item: Sized {
    /// As it is written.
    fn text(&self) -> String;
    /// Reads it, if it is one.
    fn of<'t>(value: Value<'t>, c: &Cursor<'t>) -> Parsed<Option<Self>>;
}

/// Numbers, by themselves and in lists.
macro_rules! numbers {
    ($($T:ty: $read:ident, $what:literal;)*) => {$(
        impl Item for $T {
            fn text(&self) -> String {
                format!("{self:?}")
            }
            fn of<'t>(value: Value<'t>, _: &Cursor<'t>) -> Parsed<Option<Self>> {
                Ok(value.$read())
            }
        }

        impl Attribute for $T {
            fn put(&self, key: &str, w: &mut Writer) {
                w.push(key, self.text());
            }
            fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
                r.attrs.required(r.cursor, key, $what, Self::of)
            }
        }

        impl Attribute for Option<$T> {
            fn put(&self, key: &str, w: &mut Writer) {
                if let Some(value) = self {
                    value.put(key, w);
                }
            }
            fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
                r.attrs.optional(r.cursor, key, $what, <$T>::of)
            }
        }
    )*};
}

numbers! {
    usize: number, "an integer in range";
    u32: number, "an integer in range";
    i32: number, "an integer in range";
    u64: number, "an integer in range";
    f32: float, "a number";
    f64: number, "a number";
}

impl Item for String {
    fn text(&self) -> String {
        quote(self)
    }
    fn of<'t>(value: Value<'t>, _: &Cursor<'t>) -> Parsed<Option<Self>> {
        Ok(string(value))
    }
}

impl<A: Item, B: Item> Item for (A, B) {
    fn text(&self) -> String {
        format!("[{}, {}]", self.0.text(), self.1.text())
    }
    fn of<'t>(value: Value<'t>, c: &Cursor<'t>) -> Parsed<Option<Self>> {
        let Value::List(two) = value else { return Ok(None) };
        let Ok([a, b]) = <[Value<'t>; 2]>::try_from(two) else { return Ok(None) };
        Ok(A::of(a, c)?.zip(B::of(b, c)?))
    }
}

impl Attribute for String {
    fn put(&self, key: &str, w: &mut Writer) {
        w.push(key, self.text());
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.string(r.cursor, key)
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

/// None is the default.
impl<T: Item> Attribute for Vec<T> {
    fn put(&self, key: &str, w: &mut Writer) {
        if !self.is_empty() {
            w.push(key, list(self));
        }
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        Ok(r.attrs.optional(r.cursor, key, &format!("a list of {key}"), items)?.unwrap_or_default())
    }
}

impl<T: Item, const N: usize> Attribute for [T; N] {
    fn put(&self, key: &str, w: &mut Writer) {
        w.push(key, list(self));
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.required(r.cursor, key, &format!("{N} of {key}"), |v, c| {
            Ok(items(v, c)?.and_then(|items| items.try_into().ok()))
        })
    }
}

impl<T: Word> Item for T {
    fn text(&self) -> String {
        let mut w = Writer::default();
        self.word(&mut w);
        let arguments = if w.list.is_empty() { String::new() } else { format!("({})", w.list.join(", ")) };
        format!("{}{arguments}", w.word)
    }
    fn of<'t>(value: Value<'t>, cursor: &Cursor<'t>) -> Parsed<Option<Self>> {
        let Value::Word(word, mut attrs) = value else { return Ok(None) };
        let read = T::of(word, &mut Reader { cursor, attrs: &mut attrs })?;
        if read.is_some() {
            attrs.finish(cursor)?;
        }
        Ok(read)
    }
}

impl<T: Word> Attribute for T {
    fn put(&self, key: &str, w: &mut Writer) {
        w.push(key, self.text());
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.required(r.cursor, key, T::EXPECTED, <T as Item>::of)
    }
}

impl<T: Word> Attribute for Option<T> {
    fn put(&self, key: &str, w: &mut Writer) {
        if let Some(value) = self {
            value.put(key, w);
        }
    }
    fn get(key: &str, r: &mut Reader<'_, '_>) -> Parsed<Self> {
        r.attrs.optional(r.cursor, key, T::EXPECTED, <T as Item>::of)
    }
}

/// `[1, 2]`
pub(super) fn list(items: &[impl Item]) -> String {
    format!("[{}]", items.iter().map(Item::text).collect::<Vec<_>>().join(", "))
}

/// Reads what [`list`] writes.
fn items<'t, T: Item>(value: Value<'t>, c: &Cursor<'t>) -> Parsed<Option<Vec<T>>> {
    let Value::List(items) = value else { return Ok(None) };
    items.into_iter().map(|item| T::of(item, c)).collect()
}

/// The attributes of an operator in braces, or nothing if it has none to show.
pub(super) fn attributes(op: &Op) -> String {
    let mut w = Writer::default();
    op.write(&mut w);
    if w.list.is_empty() { String::new() } else { format!(" {{{}}}", w.list.join(", ")) }
}

/// Whether an attribute is NaN, which has no text: nothing else is written so.
pub(crate) fn has_nan(op: &Op) -> bool {
    let mut w = Writer::default();
    op.write(&mut w);
    w.list.iter().any(|attribute| attribute.contains("NaN"))
}

/// As [`attributes`], of what always has some.
pub(super) fn braces(of: &impl Attributes) -> String {
    let mut w = Writer::default();
    of.write(&mut w);
    format!(" {{{}}}", w.list.join(", "))
}

/// Takes an attribute out of those that were read.
pub(super) fn get<'t, T: Attribute>(cursor: &Cursor<'t>, attrs: &mut Attrs<'t>, key: &str) -> Parsed<T> {
    T::get(key, &mut Reader { cursor, attrs })
}

/// Reads what [`braces`] writes.
pub(super) fn read_braces<T: Attributes>(c: &mut Cursor<'_>) -> Parsed<T> {
    with_attrs(c, |cursor, attrs| {
        T::read("", &mut Reader { cursor, attrs })?.map_or_else(|| cursor.expected("attributes"), Ok)
    })
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name(), attributes(self))
    }
}

/// The operator with this mnemonic, which is at byte `at`, with the attributes read for it.
pub(super) fn read<'t>(cursor: &Cursor<'t>, name: &str, at: usize, mut attrs: Attrs<'t>) -> Parsed<Op> {
    let op = Op::read(name, &mut Reader { cursor, attrs: &mut attrs })?;
    let op = op.ok_or_else(|| cursor.error_at(at, format!("expected an operator, found `{name}`")))?;
    attrs.finish(cursor)?;
    Ok(op)
}
