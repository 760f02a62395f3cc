//! Attribute lists `{key = value, …}`, shared by the operators and the Plan.

use super::ParseError;
use super::cursor::{Cursor, MAX_DEPTH, Parsed};
use super::lex::Token;
use std::str::FromStr;

/// The value of an attribute.
#[derive(Debug)]
pub(super) enum Value<'t> {
    /// `12`, `1e-6`
    Number(&'t str),
    /// `"…"`
    Str(String),
    /// `silu`, `true`, or with arguments `clamped(alpha = 1.702, limit = 7.0)`
    Word(&'t str, Attrs<'t>),
    /// `[1, 2]`
    List(Vec<Value<'t>>),
}

#[derive(Debug)]
struct Attr<'t> {
    key: &'t str,
    value: Value<'t>,
    at: usize,
}

/// Attributes, taken out by name; one that is left over is an error.
#[derive(Debug)]
pub(super) struct Attrs<'t> {
    list: Vec<Attr<'t>>,
    /// Place of the list, for messages.
    at: usize,
}

impl<'t> Attrs<'t> {
    /// Reads `open key = value, … close`, or nothing if `open` is not next.
    pub(super) fn parse(c: &mut Cursor<'t>, open: char, close: char, depth: usize) -> Parsed<Self> {
        let at = c.at();
        let mut list: Vec<Attr<'t>> = Vec::new();
        if c.is_punct(open) {
            if depth == 0 {
                return Err(c.error_at(at, "attributes are nested too deeply"));
            }
            list = c.list(open, close, |c| {
                let at = c.at();
                let key = c.word("an attribute name")?;
                c.punct('=')?;
                Ok(Attr { key, value: Value::parse(c, depth - 1)?, at })
            })?;
        }
        Ok(Self { list, at })
    }

    /// Reads `{…}`, or nothing.
    pub(super) fn braces(c: &mut Cursor<'t>) -> Parsed<Self> {
        Self::parse(c, '{', '}', MAX_DEPTH)
    }

    /// Takes an attribute out.
    fn take(&mut self, key: &str) -> Option<(Value<'t>, usize)> {
        let i = self.list.iter().position(|a| a.key == key)?;
        let attr = self.list.swap_remove(i);
        Some((attr.value, attr.at))
    }

    /// An attribute that may be absent, read by `read`.
    pub(super) fn optional<T>(
        &mut self,
        c: &Cursor<'t>,
        key: &str,
        what: &str,
        read: impl FnOnce(Value<'t>, &Cursor<'t>) -> Parsed<Option<T>>,
    ) -> Parsed<Option<T>> {
        match self.take(key) {
            None => Ok(None),
            Some((value, at)) => match read(value, c)? {
                Some(value) => Ok(Some(value)),
                None => Err(c.error_at(at, format!("expected {what} for `{key}`"))),
            },
        }
    }

    /// An attribute that must be there, read by `read`.
    pub(super) fn required<T>(
        &mut self,
        c: &Cursor<'t>,
        key: &str,
        what: &str,
        read: impl FnOnce(Value<'t>, &Cursor<'t>) -> Parsed<Option<T>>,
    ) -> Parsed<T> {
        match self.optional(c, key, what, read)? {
            Some(value) => Ok(value),
            None => Err(self.missing(c, key)),
        }
    }

    fn missing(&self, c: &Cursor<'t>, key: &str) -> ParseError {
        c.error_at(self.at, format!("expected the attribute `{key}`"))
    }

    pub(super) fn int<T: FromStr>(&mut self, c: &Cursor<'t>, key: &str) -> Parsed<T> {
        self.required(c, key, "an integer in range", |v, _| Ok(v.number()))
    }

    pub(super) fn optional_int<T: FromStr>(&mut self, c: &Cursor<'t>, key: &str) -> Parsed<Option<T>> {
        self.optional(c, key, "an integer in range", |v, _| Ok(v.number()))
    }

    pub(super) fn float(&mut self, c: &Cursor<'t>, key: &str) -> Parsed<f32> {
        self.required(c, key, "a number", |v, _| Ok(v.float()))
    }

    /// `true` or `false`; false where absent.
    pub(super) fn flag(&mut self, c: &Cursor<'t>, key: &str) -> Parsed<bool> {
        let read = |v: Value<'t>, _: &Cursor<'t>| {
            Ok(match v {
                Value::Word("true", _) => Some(true),
                Value::Word("false", _) => Some(false),
                _ => None,
            })
        };
        Ok(self.optional(c, key, "true or false", read)?.unwrap_or(false))
    }

    pub(super) fn string(&mut self, c: &Cursor<'t>, key: &str) -> Parsed<String> {
        self.required(c, key, "a string", |v, _| {
            Ok(match v {
                Value::Str(s) => Some(s),
                _ => None,
            })
        })
    }

    /// A list whose items `item` reads.
    pub(super) fn list<T>(
        &mut self,
        c: &Cursor<'t>,
        key: &str,
        what: &str,
        item: impl Fn(Value<'t>) -> Option<T>,
    ) -> Parsed<Vec<T>> {
        self.required(c, key, what, |v, _| {
            Ok(match v {
                Value::List(items) => items.into_iter().map(item).collect(),
                _ => None,
            })
        })
    }

    /// A word with its arguments, read by `read`, which takes all of them.
    pub(super) fn variant<T>(
        &mut self,
        c: &Cursor<'t>,
        key: &str,
        what: &str,
        read: impl FnOnce(&str, &mut Self) -> Parsed<Option<T>>,
    ) -> Parsed<T> {
        match self.optional_variant(c, key, what, read)? {
            Some(value) => Ok(value),
            None => Err(self.missing(c, key)),
        }
    }

    /// As [`Self::variant`], of an attribute that may be absent.
    pub(super) fn optional_variant<T>(
        &mut self,
        c: &Cursor<'t>,
        key: &str,
        what: &str,
        read: impl FnOnce(&str, &mut Self) -> Parsed<Option<T>>,
    ) -> Parsed<Option<T>> {
        self.optional(c, key, what, |v, c| match v {
            Value::Word(word, mut args) => {
                let value = read(word, &mut args)?;
                if value.is_some() {
                    args.finish(c)?;
                }
                Ok(value)
            }
            _ => Ok(None),
        })
    }

    /// Fails if attributes are left over.
    pub(super) fn finish(self, c: &Cursor<'t>) -> Parsed<()> {
        match self.list.first() {
            None => Ok(()),
            Some(a) => Err(c.error_at(a.at, format!("`{}` is unknown or comes twice", a.key))),
        }
    }
}

impl<'t> Value<'t> {
    fn parse(c: &mut Cursor<'t>, depth: usize) -> Parsed<Self> {
        if depth == 0 {
            return Err(c.error_at(c.at(), "attributes are nested too deeply"));
        }
        match *c.peek() {
            Token::Number(n) => {
                c.advance()?;
                Ok(Self::Number(n))
            }
            Token::Str(_) => Ok(Self::Str(c.string("a string")?)),
            Token::Word(w) => {
                c.advance()?;
                Ok(Self::Word(w, Attrs::parse(c, '(', ')', depth)?))
            }
            Token::Punct('[') => Ok(Self::List(c.list('[', ']', |c| Self::parse(c, depth - 1))?)),
            _ => c.expected("a value"),
        }
    }

    pub(super) fn number<T: FromStr>(self) -> Option<T> {
        match self {
            Self::Number(n) => n.parse().ok(),
            _ => None,
        }
    }

    pub(super) fn float(self) -> Option<f32> {
        match self {
            Self::Number(n) | Self::Word(n @ "inf", _) => n.parse().ok().filter(|x: &f32| !x.is_nan()),
            _ => None,
        }
    }
}
