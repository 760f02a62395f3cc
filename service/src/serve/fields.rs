//! Typed access to the fields of a request. Null counts as missing, unknown fields are ignored, and a wrong
//! type is an error that names the field.

use super::error::{Answer, ApiError};
use serde_json::{Map, Value};

/// An object of a request.
#[derive(Clone, Copy)]
pub(super) struct Fields<'v>(&'v Map<String, Value>);

impl<'v> Fields<'v> {
    /// The fields of a value that must be an object; `what` is its place.
    pub(super) fn of(value: &'v Value, what: &str) -> Answer<Self> {
        value.as_object().map(Self).ok_or_else(|| wrong(what, "an object", value))
    }

    /// A field that is present and not null.
    pub(super) fn get(self, name: &str) -> Option<&'v Value> {
        self.0.get(name).filter(|v| !v.is_null())
    }

    fn read<T>(self, name: &str, kind: &str, read: impl Fn(&'v Value) -> Option<T>) -> Answer<Option<T>> {
        self.get(name).map(|value| read(value).ok_or_else(|| wrong(name, kind, value))).transpose()
    }

    #[expect(clippy::cast_possible_truncation, reason = "the runtime computes with the nearest f32")]
    pub(super) fn number(self, name: &str) -> Answer<Option<f32>> {
        self.read(name, "a number", |v| v.as_f64().map(|x| x as f32))
    }

    pub(super) fn boolean(self, name: &str) -> Answer<bool> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    pub(super) fn string(self, name: &str) -> Answer<Option<&'v str>> {
        self.read(name, "a string", Value::as_str)
    }

    pub(super) fn array(self, name: &str) -> Answer<Option<&'v Vec<Value>>> {
        self.read(name, "an array", Value::as_array)
    }

    pub(super) fn object(self, name: &str) -> Answer<Option<Fields<'v>>> {
        self.read(name, "an object", |v| v.as_object().map(Fields))
    }

    /// An integer in a range.
    pub(super) fn integer(self, name: &str, least: usize, most: usize) -> Answer<Option<usize>> {
        let kind = format!("an integer from {least} to {most}");
        let read = |v: &Value| usize::try_from(v.as_u64()?).ok().filter(|n| (least..=most).contains(n));
        self.read(name, &kind, read)
    }

    /// Any integer, as 64 bits.
    pub(super) fn bits(self, name: &str) -> Answer<Option<u64>> {
        self.read(name, "an integer", |v| v.as_u64().or_else(|| v.as_i64().map(|n| n as u64)))
    }

    /// A string, or several.
    pub(super) fn strings(self, name: &str) -> Answer<Vec<String>> {
        let read = |v: &Value| match v {
            Value::String(one) => Some(vec![one.clone()]),
            Value::Array(all) => all.iter().map(|s| s.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        Ok(self.read(name, "a string or an array of strings", read)?.unwrap_or_default())
    }

    /// Names and values.
    pub(super) fn entries(self) -> impl Iterator<Item = (&'v String, &'v Value)> {
        self.0.iter()
    }
}

/// The error that names a value of a wrong type.
pub(super) fn wrong(name: &str, kind: &str, found: &Value) -> ApiError {
    let found = match found {
        Value::Null => "null".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => {
            let text = other.to_string();
            let short: String = text.chars().take(40).collect();
            if short.len() < text.len() { format!("{short}…") } else { text }
        }
    };
    ApiError::bad(name, format!("`{name}` must be {kind}, not {found}")).code("invalid_type")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn field_types_are_checked_and_nulls_are_absent() {
        let value = json!({"n": 2, "x": null, "t": 0.5, "stop": ["a", "b"], "bad": "é".repeat(60), "no": false, "s": -3});
        let f = Fields::of(&value, "the body").unwrap();
        assert_eq!(f.integer("n", 1, 4).unwrap(), Some(2));
        assert_eq!(f.integer("x", 1, 4).unwrap(), None);
        assert_eq!(f.number("t").unwrap(), Some(0.5));
        assert_eq!(f.strings("stop").unwrap(), ["a", "b"]);
        assert_eq!((f.boolean("no").unwrap(), f.boolean("none").unwrap()), (false, false));
        assert_eq!(f.bits("s").unwrap(), Some(-3_i64 as u64));
        let e = f.integer("n", 3, 4).expect_err("out of range");
        assert_eq!(e.message, "`n` must be an integer from 3 to 4, not 2");
        let e = f.number("bad").expect_err("no number");
        assert!(e.message.ends_with('…') && e.param.as_deref() == Some("bad"), "{}", e.message);
        assert!(Fields::of(&json!([]), "the body").is_err());
    }
}
