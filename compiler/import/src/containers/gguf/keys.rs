//! Typed reading of the metadata.
#![expect(clippy::cast_possible_truncation, reason = "what is narrowed is compared with what it was")]

use moec_base::error::{Error, Result};
use moec_gguf::{Header, Value};

/// Largest count that a key may give, as `config.json`'s.
const MAX: u64 = 1 << 28;

/// The metadata of a file. Keys that begin with a dot are those of its architecture: `.block_count`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a> {
    file: &'a str,
    header: &'a Header<'a>,
}

impl<'a> Keys<'a> {
    pub(super) const fn new(file: &'a str, header: &'a Header<'a>) -> Self {
        Self { file, header }
    }

    /// The file that has them.
    pub(super) const fn file(&self) -> &'a str {
        self.file
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// It is absent or no text.
    pub(super) fn architecture(&self) -> Result<&'a str> {
        const KEY: &str = "general.architecture";
        self.text(KEY)?.ok_or_else(|| {
            Error::input(format!("`{}` has no `{KEY}`", self.file)).hint("the file holds no language model")
        })
    }

    /// A key, with the architecture's name as its prefix where it has one.
    fn full(&self, key: &str) -> String {
        match key.strip_prefix('.') {
            Some(rest) => format!("{}.{rest}", self.architecture().unwrap_or("?")),
            None => key.to_owned(),
        }
    }

    /// Names a key with its file, for messages.
    pub(super) fn name(&self, key: &str) -> String {
        format!("`{}` in `{}`", self.full(key), self.file)
    }

    /// A value, if there.
    pub(super) fn get(&self, key: &str) -> Option<&'a Value<'a>> {
        self.header.get(&self.full(key))
    }

    fn typed<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value<'a>) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| {
            Error::input(format!("{} is {}, expected {expected}", self.name(key), shown(value)))
                .hint("the file is damaged, or was converted in a way that is not known")
        })
    }

    /// A whole number, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, &format!("a whole number of at most {MAX}"), |v| v.as_u64().filter(|n| *n <= MAX))
    }

    /// A whole number.
    ///
    /// # Errors
    /// Anything else, and its absence.
    pub(super) fn needed(&self, key: &str) -> Result<u64> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    /// The error for a key that must be there.
    pub(super) fn missing(&self, key: &str) -> Error {
        Error::input(format!("`{}` has no `{}`", self.file, self.full(key)))
            .hint("convert the model with a current version of llama.cpp's converter")
    }

    /// A number, if there: the shortest decimal number that its 32 bits can mean, as the converter had it from `config.json`.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        let short = |x: f64| {
            let narrow = x as f32;
            if f64::from(narrow) == x { narrow.to_string().parse().unwrap_or(x) } else { x }
        };
        self.typed(key, "a number", |v| v.as_f64().filter(|x| x.is_finite()).map(short))
    }

    /// A truth value, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// A text, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_text)
    }

    /// A list of texts, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.typed(key, "a list of texts", |v| Some(v.as_array()?.texts()?.collect()))
    }

    /// A list of numbers, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(|v| v.as_f64()).collect())
    }

    /// A list of whole numbers, or of truth values as 1 and 0, if there.
    ///
    /// # Errors
    /// Anything else.
    pub(super) fn counts(&self, key: &str) -> Result<Option<Vec<u64>>> {
        let count = |v: Value<'_>| v.as_u64().or(v.as_bool().map(u64::from)).filter(|n| *n <= MAX);
        self.typed(key, "a list of whole numbers", |v| v.as_array()?.iter().map(count).collect())
    }

    /// The error for a value that this version does not know, naming those that it does.
    pub(super) fn unsupported(&self, key: &str, value: &str, supported: &[&str]) -> Error {
        Error::limit(format!("{} is `{value}`, which is not supported", self.name(key)))
            .hint(format!("supported: {}", supported.join(", ")))
    }
}

/// A value for messages, cut short.
fn shown(value: &Value<'_>) -> String {
    match value {
        Value::Unsigned(n) => n.to_string(),
        Value::Signed(n) => n.to_string(),
        Value::Float(x) => x.to_string(),
        Value::Bool(b) => b.to_string(),
        Value::Text(text) => format!("{:?}", text.chars().take(40).collect::<String>()),
        Value::Array(array) => format!("a list of {} values", array.len()),
    }
}
