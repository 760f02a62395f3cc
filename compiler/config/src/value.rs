//! A value of a key, and the reason that it is invalid.

use std::ops::RangeInclusive;
use toml::de::DeValue;

/// A value of a key.
pub(super) struct Value<'a>(pub(super) &'a DeValue<'a>);

/// Reason that a value is invalid.
pub(super) enum ValueError {
    /// The value does not have this type.
    Type(&'static str),
    /// The value is outside the key's range.
    Range,
    /// The value will be valid in a later version.
    Unsupported,
}

impl ValueError {
    /// Returns the same reason for a key that also accepts another type.
    pub(super) fn of(self, expected: &'static str) -> Self {
        if let Self::Type(_) = self { Self::Type(expected) } else { self }
    }
}

impl<'a> Value<'a> {
    pub(super) fn text(&self) -> Result<&'a str, ValueError> {
        self.0.as_str().ok_or(ValueError::Type("a string"))
    }

    pub(super) fn texts(&self) -> Result<Vec<&'a str>, ValueError> {
        let wrong = || ValueError::Type("a list of strings");
        let list = self.0.as_array().ok_or_else(wrong)?;
        list.iter().map(|v| v.get_ref().as_str().ok_or_else(wrong)).collect()
    }

    pub(super) fn boolean(&self) -> Result<bool, ValueError> {
        self.0.as_bool().ok_or(ValueError::Type("true or false"))
    }

    pub(super) fn integer<T: TryFrom<usize>>(&self, range: RangeInclusive<usize>) -> Result<T, ValueError> {
        let n = self.0.as_integer().ok_or(ValueError::Type("an integer"))?;
        let n = usize::from_str_radix(n.as_str(), n.radix()).map_err(|_| ValueError::Range)?;
        if range.contains(&n) {
            T::try_from(n).map_err(|_| ValueError::Range)
        } else {
            Err(ValueError::Range)
        }
    }

    /// Returns a float, or an integer as a float.
    pub(super) fn number(&self, range: RangeInclusive<f64>) -> Result<f64, ValueError> {
        let text = self.0.as_float().map(|x| x.as_str().to_owned());
        let text = text.or_else(|| self.0.as_integer().map(|n| n.as_str().to_owned()));
        let x: f64 = text.ok_or(ValueError::Type("a number"))?.parse().map_err(|_| ValueError::Range)?;
        if range.contains(&x) { Ok(x) } else { Err(ValueError::Range) }
    }

    pub(super) fn integers(&self, range: RangeInclusive<usize>) -> Result<Vec<usize>, ValueError> {
        let list = self.0.as_array().ok_or(ValueError::Type("a list of integers"))?;
        list.iter()
            .map(|v| Value(v.get_ref()).integer(range.clone()))
            .map(|r| {
                r.map_err(|w| {
                    if let ValueError::Type(_) = w { ValueError::Type("a list of integers") } else { w }
                })
            })
            .collect()
    }
}
