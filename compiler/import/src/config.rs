//! Typed reading of `config.json`, in the spellings of transformers 4 and 5.

use moec_base::error::{Error, Result};
use serde_json::{Map, Value};
use std::fmt;

/// Largest extent, count or position in a config; products of two are far from overflow.
const MAX_SIZE: usize = 1 << 28;
const DAMAGED: &str = "the file may be that of another model, or damaged; download it again";

/// A `config.json`, or an object in it. A key with the value `null` counts as absent. If a value has several
/// spellings, the first key that exists is used.
#[derive(Clone, Debug)]
pub struct Config {
    file: String,
    /// Path of keys to this object, with a dot after each.
    path: String,
    map: Map<String, Value>,
}

/// An integer of the config, with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// The number.
    pub n: usize,
    /// The key.
    pub key: &'static str,
}

impl Config {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// Fails if it is not a JSON object.
    pub fn parse(file: &str, text: &[u8]) -> Result<Self> {
        let parsed = serde_json::from_slice(text);
        match parsed.or_else(|e| serde_json::from_slice(&of_python(text)).map_err(|_| e)) {
            Ok(Value::Object(map)) => Ok(Self { file: file.to_owned(), path: String::new(), map }),
            Ok(_) => Err(Error::input(format!("`{file}` is not a JSON object")).hint(DAMAGED)),
            Err(e) => Err(Error::input(format!("`{file}` is not valid JSON")).because(e).hint(DAMAGED)),
        }
    }

    /// The configuration of another kind of file, with the keys of `config.json`.
    pub fn of(file: &str, map: Map<String, Value>) -> Self {
        Self { file: file.to_owned(), path: String::new(), map }
    }

    /// Whether a key exists and is not `null`.
    pub fn has(&self, key: &str) -> bool {
        self.map.get(key).is_some_and(|v| !v.is_null())
    }

    /// A copy with another value for a key.
    pub fn with(mut self, key: &str, value: Value) -> Self {
        self.map.insert(key.to_owned(), value);
        self
    }

    fn find<'k>(&self, keys: &[&'k str]) -> Option<(&'k str, &Value)> {
        keys.iter().find_map(|&k| self.map.get(k).filter(|v| !v.is_null()).map(|v| (k, v)))
    }

    /// Name of a key with its file, for messages: `` `rope_scaling.factor` in `config.json` ``.
    pub fn name(&self, key: &str) -> String {
        format!("`{}{key}` in `{}`", self.path, self.file)
    }

    fn missing(&self, keys: &[&str]) -> Error {
        let keys: Vec<_> = keys.iter().map(|k| format!("`{}{k}`", self.path)).collect();
        let message = match keys.as_slice() {
            [key] => format!("`{}` has no {key}", self.file),
            keys => format!("`{}` has none of {}", self.file, keys.join(", ")),
        };
        Error::input(message).hint(DAMAGED)
    }

    fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        let mut shown = value.to_string();
        if let Some((at, _)) = shown.char_indices().nth(60) {
            shown.truncate(at);
            shown.push('…');
        }
        Error::input(format!("{} is {shown}, expected {expected}", self.name(key)))
    }

    /// The error for a value that this version does not support; it lists the supported ones.
    pub fn unsupported(&self, key: &str, value: impl fmt::Debug, supported: &[&str]) -> Error {
        Error::limit(format!("{} is {value:?}, which is not supported", self.name(key)))
            .hint(format!("supported: {}", supported.join(", ")))
    }

    /// Returns an integer of at least 1, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_size(&self, keys: &[&'static str]) -> Result<Option<Size>> {
        match self.opt_count(keys)? {
            Some(Size { n: 0, key }) => Err(self.wrong(key, &Value::from(0), "a whole number of at least 1")),
            size => Ok(size),
        }
    }

    /// Returns an integer of at least 1.
    ///
    /// # Errors
    /// Fails for any other value, or if the key is absent.
    pub fn size(&self, keys: &[&'static str]) -> Result<Size> {
        self.opt_size(keys)?.ok_or_else(|| self.missing(keys))
    }

    /// Returns an integer, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_count(&self, keys: &[&'static str]) -> Result<Option<Size>> {
        let Some((key, value)) = self.find(keys) else { return Ok(None) };
        // Some configs have a list with the same number for each layer.
        let value = match value.as_array().map(Vec::as_slice) {
            Some([first, rest @ ..]) if rest.iter().all(|v| v == first) => first,
            _ => value,
        };
        match value.as_u64() {
            Some(n) => match usize::try_from(n) {
                Ok(n) if n <= MAX_SIZE => Ok(Some(Size { n, key })),
                _ => Err(self.wrong(key, value, &format!("at most {MAX_SIZE}"))),
            },
            None => Err(self.wrong(key, value, "a whole number")),
        }
    }

    /// Returns a number, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_number(&self, key: &str) -> Result<Option<f64>> {
        let Some((key, value)) = self.find(&[key]) else { return Ok(None) };
        match value.as_f64() {
            Some(x) if x.is_finite() => Ok(Some(x)),
            _ => Err(self.wrong(key, value, "a number")),
        }
    }

    /// Returns a number, or the family's default.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64> {
        Ok(self.opt_number(key)?.unwrap_or(default))
    }

    /// Returns a number.
    ///
    /// # Errors
    /// Fails for any other value, or if the key is absent.
    pub fn number(&self, key: &str) -> Result<f64> {
        self.opt_number(key)?.ok_or_else(|| self.missing(&[key]))
    }

    /// Returns a number above 0.
    ///
    /// # Errors
    /// Fails for any other value, or if the key is absent.
    pub fn positive(&self, key: &str) -> Result<f64> {
        if self.has(key) { self.positive_or(key, 1.0) } else { Err(self.missing(&[key])) }
    }

    /// Returns a number above 0, or the family's default.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn positive_or(&self, key: &str, default: f64) -> Result<f64> {
        match self.find(&[key]) {
            None => Ok(default),
            Some((key, value)) => match self.opt_number(key)? {
                Some(x) if x > 0.0 => Ok(x),
                _ => Err(self.wrong(key, value, "a number above 0")),
            },
        }
    }

    /// Returns a Boolean, or the family's default.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        match self.find(&[key]) {
            None => Ok(default),
            Some((_, Value::Bool(b))) => Ok(*b),
            Some((key, value)) => Err(self.wrong(key, value, "true or false")),
        }
    }

    /// Returns a string with its key, if a key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_keyed_text<'k>(&self, keys: &[&'k str]) -> Result<Option<(&'k str, &str)>> {
        match self.find(keys) {
            None => Ok(None),
            Some((key, Value::String(s))) => Ok(Some((key, s))),
            Some((key, value)) => Err(self.wrong(key, value, "a string")),
        }
    }

    /// Returns a string, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_text(&self, key: &str) -> Result<Option<&str>> {
        Ok(self.opt_keyed_text(&[key])?.map(|(_, s)| s))
    }

    /// Returns the JSON value of a key, if the key exists.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.find(&[key]).map(|(_, value)| value)
    }

    /// The error for a value that does not have the `expected` type.
    pub fn unfit(&self, key: &str, expected: &str) -> Error {
        self.wrong(key, self.value(key).unwrap_or(&Value::Null), expected)
    }

    /// Returns a list of numbers, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.list(key, "a list of numbers", |v| v.as_f64().filter(|x| x.is_finite()))
    }

    /// Returns a list of strings, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_texts(&self, key: &str) -> Result<Option<Vec<String>>> {
        self.list(key, "a list of strings", |v| v.as_str().map(str::to_owned))
    }

    /// Returns a list of integers, if the key exists; a single integer is a list of one.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_ids(&self, key: &str) -> Result<Option<Vec<u32>>> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        match self.find(&[key]).and_then(|(_, v)| id(v)) {
            Some(one) => Ok(Some(vec![one])),
            None => self.list(key, "a token id or a list of them", id),
        }
    }

    /// Returns a switch for each of `layers` layers, each 0 or 1, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value, or if the list has another length.
    pub fn opt_layout(&self, key: &str, layers: usize) -> Result<Option<Vec<bool>>> {
        let switch = |v: &Value| match v.as_u64() {
            Some(n @ 0..=1) => Some(n == 1),
            _ => None,
        };
        let Some(list) = self.list(key, "a list of 0 and 1", switch)? else { return Ok(None) };
        if list.len() != layers {
            let message =
                format!("{} has {} entries, but the model has {layers} layers", self.name(key), list.len());
            return Err(Error::input(message).hint(DAMAGED));
        }
        Ok(Some(list))
    }

    fn list<T>(
        &self,
        key: &str,
        expected: &str,
        item: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>> {
        let Some((key, value)) = self.find(&[key]) else { return Ok(None) };
        let items = value.as_array().and_then(|items| items.iter().map(item).collect());
        items.map(Some).ok_or_else(|| self.wrong(key, value, expected))
    }

    /// Returns an object in this one, if the key exists.
    ///
    /// # Errors
    /// Fails for any other value.
    pub fn opt_section(&self, key: &str) -> Result<Option<Self>> {
        match self.find(&[key]) {
            None => Ok(None),
            Some((_, Value::Object(map))) => {
                let path = format!("{}{key}.", self.path);
                Ok(Some(Self { file: self.file.clone(), path, map: map.clone() }))
            }
            Some((key, value)) => Err(self.wrong(key, value, "an object")),
        }
    }

    /// Its keys.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str)
    }

    /// Returns a key whose value is an object, if there is one.
    pub fn nested(&self) -> Option<&str> {
        self.map.iter().find(|(_, v)| v.is_object()).map(|(k, _)| k.as_str())
    }

    /// Whether the object has no keys.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }
}

/// Replaces infinities and NaN, which Python's `json` writes but JSON does not have, with `null`.
fn of_python(text: &[u8]) -> Vec<u8> {
    const NUMBERS: [&[u8]; 3] = [b"-Infinity", b"Infinity", b"NaN"];
    let (mut out, mut rest, mut quoted) = (Vec::with_capacity(text.len()), text, false);
    while let [first, tail @ ..] = rest {
        let number = NUMBERS.iter().find(|number| !quoted && rest.starts_with(number));
        let taken = match (number, first, tail) {
            (Some(number), ..) => number.len(),
            (None, b'\\', [_, ..]) if quoted => 2,
            _ => 1,
        };
        quoted ^= *first == b'"';
        out.extend_from_slice(if number.is_some() { b"null" } else { &rest[..taken] });
        rest = &rest[taken..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_and_infinity_in_json_count_as_absent() {
        let text =
            br#"{"a": NaN, "b": [0.5, -Infinity, Infinity], "c": "NaN \" Infinity", "d": "\\", "e": NaN}"#;
        let config = Config::parse("config.json", text).unwrap();
        assert_eq!(config.value("b").unwrap().to_string(), "[0.5,null,null]");
        assert_eq!(config.opt_text("c").unwrap(), Some("NaN \" Infinity"));
        assert!(!config.has("a") && !config.has("e"));
        for bad in [&b"{\"a\": Infinit}"[..], b"{\"a\": NaNNaN}", b"{\"a", b"{\"\\"] {
            assert!(Config::parse("config.json", bad).is_err());
        }
    }
}
