//! Typed access to the metadata.
#![expect(clippy::cast_possible_truncation, reason = "what is narrowed is compared with what it was")]

use moec_base::error::{Error, Result};
use moec_gguf::{Header, Value};

/// Largest count of a key; the same as for `config.json`.
const MAX: u64 = 1 << 28;

/// The metadata of a file. Keys that begin with a dot get the architecture's name as prefix: `.block_count`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Keys<'a> {
    file: &'a str,
    header: &'a Header<'a>,
}

impl<'a> Keys<'a> {
    pub(super) const fn new(file: &'a str, header: &'a Header<'a>) -> Self {
        Self { file, header }
    }

    /// The file with the metadata.
    pub(super) const fn file(&self) -> &'a str {
        self.file
    }

    /// `general.architecture`.
    ///
    /// # Errors
    /// Fails if it is absent or not a string.
    pub(super) fn architecture(&self) -> Result<&'a str> {
        const KEY: &str = "general.architecture";
        self.text(KEY)?.ok_or_else(|| {
            Error::input(format!("`{}` has no `{KEY}`", self.file))
                .hint("the file does not contain a language model")
        })
    }

    /// The full name of a key, with the architecture's name as prefix if it begins with a dot.
    fn full(&self, key: &str) -> String {
        match key.strip_prefix('.') {
            Some(rest) => format!("{}.{rest}", self.architecture().unwrap_or("?")),
            None => key.to_owned(),
        }
    }

    /// Name of a key with its file, for messages.
    pub(super) fn name(&self, key: &str) -> String {
        format!("`{}` in `{}`", self.full(key), self.file)
    }

    /// Returns a value, if the key exists.
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
                .hint("the file is damaged, or was converted in an unknown way")
        })
    }

    /// Returns an integer, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        self.typed(key, &format!("a whole number of at most {MAX}"), |v| v.as_u64().filter(|n| *n <= MAX))
    }

    /// Returns an integer.
    ///
    /// # Errors
    /// Fails for any other value, or if the key is absent.
    pub(super) fn needed(&self, key: &str) -> Result<u64> {
        self.count(key)?.ok_or_else(|| self.missing(key))
    }

    /// The error for a required key that is absent.
    pub(super) fn missing(&self, key: &str) -> Error {
        Error::input(format!("`{}` has no `{}`", self.file, self.full(key)))
            .hint("convert the model with a current version of llama.cpp's converter")
    }

    /// Returns a number, if the key exists: the shortest decimal number with these 32 bits, as it was in
    /// `config.json`.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        let short = |x: f64| {
            let narrow = x as f32;
            if f64::from(narrow) == x { narrow.to_string().parse().unwrap_or(x) } else { x }
        };
        self.typed(key, "a number", |v| v.as_f64().filter(|x| x.is_finite()).map(short))
    }

    /// Returns a Boolean, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    /// Returns a string, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a text", Value::as_text)
    }

    /// Returns a list of strings, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        self.typed(key, "a list of texts", |v| Some(v.as_array()?.texts()?.collect()))
    }

    /// Returns a list of numbers, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.typed(key, "a list of numbers", |v| v.as_array()?.iter().map(|v| v.as_f64()).collect())
    }

    /// Returns a list of integers, or of Booleans as 1 and 0, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub(super) fn counts(&self, key: &str) -> Result<Option<Vec<u64>>> {
        let count = |v: Value<'_>| v.as_u64().or(v.as_bool().map(u64::from)).filter(|n| *n <= MAX);
        self.typed(key, "a list of whole numbers", |v| v.as_array()?.iter().map(count).collect())
    }

    /// The error for a value that this version does not support; it lists the supported ones.
    pub(super) fn unsupported(&self, key: &str, value: &str, supported: &[&str]) -> Error {
        Error::limit(format!("{} is `{value}`, which is not supported", self.name(key)))
            .hint(format!("supported: {}", supported.join(", ")))
    }
}

/// A value for messages, shortened.
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
